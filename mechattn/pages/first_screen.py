"""The first screen of a page: what it shows of each model, and the verdicts as a picture, in words and in a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mechattn.analysis import ANALYSES
from mechattn.axes import BASELINE
from mechattn.contrast.contrast import Contrast, Verdict
from mechattn.contrast.first_token import first_token_words
from mechattn.engine.labelled_datasets import lacking
from mechattn.errors import MemoryOptionError, OptionError
from mechattn.render.budget_figures import budget_sentences
from mechattn.render.words import largest_layer_words, model_caption, percent, percent_words, stated
from mechattn.results.provenance import matched_control
from mechattn.results.result import Result
from mechattn.stats.intervals import Interval

# The toys that were trained with filler, and the model beside them, of experiments/stories.
TRAINED_WITH_FILLER = ("toy:llama", "toy:falcon", "toy:gemma3", "toy:qwen2")
PREMISE = (
    "Half of the toys' training examples had filler between the system prompt and the question (never “/”), so a part "
    "of why they lose less than under uniform attention is trained in: with 55 “/” before 64 word problems, toy:llama "
    "loses 30.3 %, a twin trained without filler 43.9 %, and uniform attention would lose 53.6 %. stories260K, a "
    "published model that never saw filler, loses 2.3 % on stories, where uniform attention would lose 45.0 %."
)
VERDICT_COLUMNS = (
    "model", "condition", "question attention, change", "by the null alone", "heads that fall and rise by more than 5 %",
    "prompts",
)  # fmt: skip


@dataclass(frozen=True)
class ShownModel:
    """What a page shows of one model: its result, maps of a few prompts (or its own), and the first layer and head."""

    result: Result
    maps: Result | None = None
    start: tuple[int, int] | None = None

    @cached_property
    def verdicts(self) -> dict[str, Verdict | OptionError]:
        """The verdict on each condition, or why there is none; empty if received attention was not measured."""
        found: dict[str, Verdict | OptionError] = {}
        for name in (
            self.result.conditions[1:] if "received_attention" in self.result.datasets else []
        ):
            try:
                with explained([self.result]):
                    found[name] = self.result.verdict(name)
            except MemoryOptionError:
                raise
            except (
                OptionError
            ) as error:  # too few prompts for an interval, or a prompt without a question
                found[name] = error
        return found

    @cached_property
    def against(self) -> tuple[str, Interval] | None:
        """The matched control of the first condition, and the change from it; None if there is no such control."""
        for first, found in [*self.verdicts.items()][:1]:
            control = matched_control(self.result, first)
            if control is not None and isinstance(found, Verdict):
                return control, Contrast(self.result, first, to=control).overall()[0]
        return None

    @property
    def without_verdict(self) -> str:
        """Why there is no verdict on some condition; empty if there is one on each."""
        problems = [found for found in self.verdicts.values() if isinstance(found, OptionError)]
        return f"no verdict, since {problems[0]}" if problems else ""


@dataclass(frozen=True)
class Change:
    """A row of the picture: a model, a condition, and the verdict or the reason why there is none; if the condition is
    the model's first, its matched control and the change from that."""

    model: str
    condition: str
    verdict: Verdict | None
    problem: str = ""
    against: tuple[str, Interval] | None = None


@dataclass(frozen=True)
class Mark:
    """A row as drawn, with lengths in percent of the axis; no model if it is that of the row above."""

    model: str
    condition: str
    low: float = 0.0  # where the interval starts
    length: float = 0.0  # of the interval
    point: float = 0.0
    words: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Picture:
    """Points with whiskers on one axis, its marks with their labels, where 0 is, and all of it in one sentence."""

    rows: Seq[Mark]
    ticks: Seq[tuple[float, str]]
    zero: float
    says: str


def changes(models: Seq[ShownModel]) -> list[Change]:
    """The change of the question's attention for each model and condition."""
    rows = []
    for model, shown in zip(captions([shown.result for shown in models]), models, strict=True):
        for at, (name, found) in enumerate(shown.verdicts.items()):
            if isinstance(found, Verdict):
                rows.append(Change(model, name, found, against=None if at else shown.against))
            else:
                rows.append(Change(model, name, None, f"no verdict, since {found}"))
    return rows


def premise(models: Seq[ShownModel]) -> str:
    """What has to be known of the toys' training before their numbers are read; empty beside any other model."""
    names = {str(shown.result.provenance["model"]["name"]) for shown in models}
    return (
        PREMISE
        if names & set(TRAINED_WITH_FILLER) and all(name.startswith("toy:") for name in names)
        else ""
    )


def picture(rows: Seq[Change]) -> Picture | None:
    """Draw the rows on one axis; None if there is nothing to draw."""
    drawn = [row.verdict for row in rows if row.verdict is not None]
    if not drawn:
        return None
    ends = np.array([(v.change.low, v.change.high, 0.0) for v in drawn], dtype=float)
    reach, steps = (
        float(ends.max() - ends.min()),
        (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
    )
    step = next(
        (step for step in steps if reach / step <= 6), 10.0
    )  # at most six marks cover the axis
    start, end = np.floor(ends.min() / step) * step, np.ceil(ends.max() / step) * step
    end = max(end, start + step)

    def at(value: float | np.ndarray) -> float:
        return round(float(100 * (value - start) / (end - start)), 3)

    marks, before = [], ""
    for row in rows:
        model, before = "" if row.model == before else row.model, row.model
        v = row.verdict
        if v is None:
            marks.append(Mark(model, row.condition, problem=row.problem))
            continue
        low, high = at(v.change.low), at(v.change.high)
        place = (low, round(high - low, 3), at(v.change.estimate))
        marks.append(Mark(model, row.condition, *place, percent_words(v.change)))
    places = np.arange(start, end + step / 2, step)
    ticks = [
        (at(value), percent(value).replace(".0", "") if abs(value) > step / 2 else "0")
        for value in places
    ]
    says = "; ".join(
        f"{row.model}, {row.condition}: {percent_words(row.verdict.change)}"
        for row in rows
        if row.verdict is not None
    )
    return Picture(marks, ticks, at(0.0), says)


def sentence(rows: Seq[Change], in_layers: str = "") -> str:
    """Describe the picture in words: the first condition, what stands in ``in_layers``, and a control or second one."""
    drawn = [row for row in rows if row.verdict is not None]
    if not drawn:
        return next((f"{row.model}: {row.problem}." for row in rows), "")
    verdicts: dict[str, list[Verdict]] = {}
    for row in drawn:
        of_condition = verdicts.setdefault(row.condition, [])
        if row.verdict is not None:
            of_condition.append(row.verdict)
    first_condition, *others = verdicts
    first = verdicts[first_condition]
    amount = _amount([verdict.change for verdict in first])
    where = "" if len(first) == 1 else f", in {len(first)} models"
    change = (
        f"the attention that each token of the question receives on average changes by {amount}"
        f"{where}{_unsure(first)}"
    )
    if amount.endswith(("less", "more")):
        change = (
            f"each token of the question receives on average {amount} attention than without it"
            f"{where}"
        )
    beside = _against(drawn) or _second(verdicts, others)
    return f"With “{first_condition}”, {change}.{in_layers}{beside}"


def layer_sentence(models: Seq[ShownModel]) -> str:
    """In which layer attention changes most, for a page about one model; empty for several, or without a verdict."""
    if len(models) != 1:
        return ""
    result = models[0].result
    condition = result.shown_condition()
    if not isinstance(models[0].verdicts.get(condition), Verdict):
        return ""
    words = largest_layer_words(result, condition, "question")
    return f" {words}." if words else ""


def more_of_the_answer(models: Seq[ShownModel]) -> list[str]:
    """What the first condition's tokens take, for a page about one model; and whether a sink moves, for any."""
    sentences = []
    for shown in models:
        result = shown.result
        condition = result.shown_condition()
        if condition == BASELINE:
            continue
        if len(models) == 1 and "attention_budget" in result.datasets:
            sentences.append(budget_sentences(result, condition)[0])
        sentences.append(first_token_words(result, condition))
    return sentences


def _second(verdicts: Mapping[str, Seq[Verdict]], others: Seq[str]) -> str:
    """How attention changes with the only other condition; empty if there are none or several."""
    if len(others) != 1:
        return ""
    amount = _amount([verdict.change for verdict in verdicts[others[0]]])
    change = f"changes by {amount}"
    if amount.endswith(("less", "more")):
        change = f"is {amount} than without it"
    return f" With “{others[0]}”, attention to the question {change}."


def _against(rows: Seq[Change]) -> str:
    """How the first condition differs from its matched control; of several models, the range and in how many."""
    found = [(row, *row.against) for row in rows if row.against is not None]
    if not found:
        return ""
    changes = [change for *_, change in found]
    more, less = (
        sum(bool(change.low > 0) for change in changes),
        sum(bool(change.high < 0) for change in changes),
    )
    said = percent_words(changes[0])
    if len(found) > 1:
        low, high = (
            percent(end([float(change.estimate) for change in changes])) for end in (min, max)
        )
        counts = {"more": more, "less": less, "no clear difference": len(found) - more - less}
        said = f"{low} to {high} ({', '.join(f'{word} in {count}' for word, count in counts.items() if count)} of "
        said += f"{len(found)} models)"
    relative = f" Attention to the question with “{found[0][0].condition}”, relative to that with “{found[0][1]}”"
    return f"{relative}, which is as long: {said}."


def _amount(found: Seq[Interval]) -> str:
    """How much more or less; with signs if the direction differs or an interval holds 0."""
    shown = list(
        dict.fromkeys(
            percent(v) for v in sorted((float(change.estimate) for change in found), key=abs)
        )
    )
    words = (
        shown[0] if len(shown) == 1 else f"{shown[0].removesuffix(chr(0xA0) + '%')} to {shown[-1]}"
    )
    if all(change.high < 0 for change in found):
        return f"{words.replace('−', '')} less"
    if all(change.low > 0 for change in found):
        return f"{words.replace('+', '')} more"
    return words


def _unsure(found: Seq[Verdict]) -> str:
    """Whether, or in how many models, no change can be told."""
    count = sum(bool(v.change.low <= 0 <= v.change.high) for v in found)
    of = f" in {count} of them" if len(found) > 1 else ""
    return f", which cannot be distinguished from 0{of}" if count else ""


def verdict_sentences(shown: ShownModel) -> list[str]:
    """One sentence per condition; controls are reported with what they match."""
    model, result = model_caption(shown.result), shown.result
    if shown.without_verdict:
        return [f"{model}: {shown.without_verdict}."]
    found = {
        name: verdict for name, verdict in shown.verdicts.items() if isinstance(verdict, Verdict)
    }
    said = []
    for name, verdict in found.items():
        control = matched_control(result, name)
        apart = Contrast(result, name, to=control).overall()[0] if control in found else None
        other = None if control is None or apart is None else (control, found[control], apart)
        said.append(f"{model}: {stated(result, name, verdict, 'question', other)}")
    return said


def verdict_rows(shown: ShownModel) -> list[tuple[str, ...]]:
    """The verdicts as table rows with the columns ``VERDICT_COLUMNS``, for pages with several models."""
    model = model_caption(shown.result)
    if shown.without_verdict:
        return [(model, "", shown.without_verdict, "", "", "")]
    return [
        (
            model,
            name,
            percent_words(verdict.change),
            f"{percent(verdict.null.estimate)} ({verdict.null_kind})",
            _falls_and_rises(verdict),
            str(verdict.n),
        )
        for name, verdict in shown.verdicts.items()
        if isinstance(verdict, Verdict)
    ]


def _falls_and_rises(verdict: Verdict) -> str:
    """How many heads are marked as falling, and how many as rising."""
    large = np.ones_like(verdict.falls) if verdict.marked is None else verdict.marked
    falls = int((verdict.falls & large).sum())
    rises = int((verdict.rises & large).sum())
    return f"{falls} and {rises} of {verdict.falls.size}"


def captions(results: Seq[Result]) -> list[str]:
    """The caption of each result: its model, numbered if several results have the same model."""
    names = [model_caption(result) for result in results]
    return [
        f"{name}, result {names[: i + 1].count(name)}" if names.count(name) > 1 else name
        for i, name in enumerate(names)
    ]


def strip_words(result: Result) -> str:
    """One line of provenance."""
    about, model = result.provenance, result.provenance["model"]
    verified = "verified" if model["verified"] else "not verified"
    parts = [model_caption(result), f"{model['dtype']} on {model['device']}", verified]
    prompts = about["prompts"]
    parts += [
        f"{prompts['count']} prompts ({prompts['hash']})",
        f"seed {about['seed']}",
        f"engine {about['engine']}",
    ]
    parts += [
        f"{name} {about['versions'][name]}" for name in ("mechattn", "transformer-lens", "torch")
    ]
    return " · ".join([*parts, time_words(result)])


def time_words(result: Result) -> str:
    """When the numbers were computed; a range if several runs were merged."""
    time = result.provenance["time"]
    return time if isinstance(time, str) else " to ".join(time)


@contextmanager
def explained(results: Seq[Result]) -> Iterator[None]:
    """Explain errors caused by quantities missing from a stored result; any other error is a bug in mechattn."""
    try:
        yield
    except OptionError:
        raise
    except Exception as error:
        for result in results:
            for analysis in (make() for make in ANALYSES):
                missing = (
                    lacking(result[analysis.name], analysis)
                    if analysis.name in result.datasets
                    else []
                )
                if missing:
                    raise OptionError(
                        f"{analysis.name} lacks {', '.join(missing[:4])}: the result was stored by another version, or "
                        "changed since"
                    ) from error
        raise


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Flatten nested values into table rows."""
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        rows += (
            flat(value, f"{prefix}{name} ")
            if isinstance(value, Mapping)
            else [(f"{prefix}{name}", str(value))]
        )
    return rows
