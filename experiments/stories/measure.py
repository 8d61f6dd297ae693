"""A real model that was trained on stories, beside the toys: the tables of README.md, written between its marks.

python experiments/stories/measure.py [--models FOLDER] [--limit 50] [--write]

FOLDER holds stories260K; by default what the environment variable MECHATTN_MODELS names, or ../shared/models.
"""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import mechattn as ma
from mechattn.stats.intervals import relative_change

HERE = Path(__file__).parent
README = HERE / "README.md"
MARKS = ("<!-- tables: begin -->", "<!-- tables: end -->")
MODELS = Path(os.environ.get("MECHATTN_MODELS", HERE.parents[2] / "shared" / "models"))
REAL, TOYS = "stories260K", ["toy:llama", "toy:qwen2", "toy:gemma3", "toy:falcon"]
SYSTEM = "Once upon a time, there was a happy family in a small house."
COUNT, DRAWS = 55, 6
SLASH = ma.MeaninglessTokens("/", count=COUNT, separator="")
SPACED = ma.MeaninglessTokens("/", count=COUNT)


@dataclass(frozen=True)
class Row:
    """What is measured of one model on one set of prompts."""

    model: str
    prompts: str
    attention: list[str]
    heads: list[str]


def load(name: str, models: Path = MODELS):
    return ma.load_model(str(models / name) if name == REAL else name)


def stories(limit: int | None = None) -> list:
    return ma.load_prompts(str(HERE / "stories.jsonl"), system=SYSTEM, limit=limit)


def measured(model, prompts: list, slash=SLASH, analyses=None):
    """A result with slashes, and with a sentence of as many tokens."""
    conditions = {"slash": slash, "sentence": ma.RandomSentence(count=slash.count)}
    return ma.run(model, prompts, conditions, analyses)


def row(model, name: str, about: str, prompts: list, slash=SLASH, draws: int = DRAWS) -> Row:
    analyses = [
        ma.ReceivedAttention(),
        ma.analyses.AttentionFocus(),
        ma.analyses.AttentionSinks(),
        ma.analyses.HeadUpdates(),
    ]
    result = measured(model, prompts, slash, analyses)
    verdict = result.verdict("slash")
    uniform = result.verdict("slash", null="uniform")
    sentence = result.verdict("sentence")
    drawn = {
        kind: ma.run_random(model, prompts, {"slash": slash}, draws=draws, kind=kind)
        for kind in ("initialised", "shuffled")
    }
    changes = [
        [draw.verdict("slash").change.estimate for draw in of_kind] for of_kind in drawn.values()
    ]
    tables = [result.compare("slash", random=of_kind, null="uniform") for of_kind in drawn.values()]
    initialised, shuffled = [(table.q_beyond < 0.05) & (table.q_random < 0.05) for table in tables]
    length = (result["sequences"].origin.sel(condition="baseline") >= 0).sum("pos").mean()
    attention = [
        f"{float(length):.0f}",
        interval(verdict.change),
        percent(verdict.null.estimate),
        percent(uniform.null.estimate),
        *(f"{percent(min(of_kind))} to {percent(max(of_kind))}" for of_kind in changes),
        f"{int(initialised.sum())} of {len(initialised)}",
        f"{int((initialised & shuffled).sum())}",
        interval(sentence.change),
    ]
    return Row(name, about, attention, heads(result))


def heads(result) -> list[str]:
    """Means over prompts, layers and heads: where the question looks, sinks, what heads write."""
    focus, sinks, updates = (
        result[name] for name in ("attention_focus", "attention_sinks", "head_updates")
    )
    focus, updates = focus.sel(segment="question"), updates.sel(segment="question")

    def mean(values, condition: str = "baseline") -> float:
        return float(values.sel(condition=condition).mean())

    def written(condition: str) -> str:
        magnitude = updates.magnitude.mean(["layer", "head"]).astype(float)
        of = [magnitude.sel(condition=name).values for name in (condition, "baseline")]
        return interval(relative_change(*of))

    return [
        f"{100 * mean(focus.entropy_share):.0f} %",
        f"{100 * mean(focus.previous_mass):.0f} %",
        f"{100 * mean(focus.inserted_mass, 'slash'):.0f} % ({100 * mean(focus.inserted_mass_uniform, 'slash'):.0f} %)",
        f"{100 * mean(focus.inserted_mass, 'sentence'):.0f} %",
        f"{100 * mean(sinks.first_sink):.1f} %",
        f"{100 * mean(sinks.sinks > 0):.1f} → {100 * mean(sinks.sinks > 0, 'slash'):.1f} %",
        f"{mean(updates.magnitude):.3f}",
        written("slash"),
        written("sentence"),
    ]


def percent(share: float) -> str:
    return f"{'−' if share < 0 else '+'}{abs(100 * float(share)):.1f} %"


def interval(change) -> str:
    return f"{percent(change.estimate)} [{percent(change.low)[:-2]}, {percent(change.high)[:-2]}]"


ATTENTION = (
    "model", "prompts", "tokens", "with “/”", "by dilution", "uniform attention", "initialised weights", "shuffled weights",
    "heads beyond uniform and initialised", "and beyond shuffled", "with a sentence",
)  # fmt: skip
HEADS = (
    "model", "prompts", "entropy / its maximum", "to the token before", "to the “/” (uniform)", "to the sentence",
    "first token a sink", "heads with a sink, with “/”", "‖update‖ / ‖resid‖", "with “/”", "with a sentence",
)  # fmt: skip


def tables(rows: list[Row]) -> str:
    first = markdown([ATTENTION, *((r.model, r.prompts, *r.attention) for r in rows)])
    second = markdown([HEADS, *((r.model, r.prompts, *r.heads) for r in rows)])
    return (
        f"Change of the attention that the question receives:\n\n{first}\n\n"
        f"Where the question looks, sinks, and how the size of what heads write changes:\n\n{second}"
    )


def markdown(lines: list[tuple[str, ...]]) -> str:
    made = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([made[0], "|" + "---|" * len(lines[0]), *made[1:]])


def all_rows(models: Path, limit: int) -> list[Row]:
    told, problems = stories(limit), ma.load_prompts("word-problems", limit=limit)
    made = []
    for name in [REAL, *TOYS]:
        model = load(name, models)
        made.append(row(model, name, "stories", told))
        made.append(row(model, name, "word problems", problems))
        if name == REAL:
            spaced = SPACED.fitted(model)
            made.append(row(model, name, f"stories, {spaced.count} tokens of “/ /”", told, spaced))
    return sorted(made, key=lambda one: one.prompts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--limit", type=int, default=50)
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    given = parser.parse_args()
    if not (given.models / REAL).is_dir():
        parser.error(
            f"there is no {REAL} in {given.models}: say where it is with --models or MECHATTN_MODELS"
        )
    made = tables(all_rows(given.models, given.limit))
    print(made)
    if given.write:
        text = README.read_text(encoding="utf-8")
        before, after = text.split(MARKS[0])[0], text.split(MARKS[1])[1]
        README.write_text(f"{before}{MARKS[0]}\n{made}\n{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
