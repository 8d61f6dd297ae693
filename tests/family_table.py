"""Tests which analyses work on which architecture, by running all of them on a tiny model of each family."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mechattn.analysis import ANALYSES
from mechattn.engine.run import make_plan, run
from mechattn.errors import MechattnError
from mechattn.model.hooked import HookedModel
from mechattn.model.hooks import attention_layers
from mechattn.model.load import verify_model
from mechattn.model.verify.verification import Report
from mechattn.prompts.conditions import MeaninglessTokens
from mechattn.prompts.prompt import Prompt
from tests.tiny_families import FAMILIES, bridge_of, tiny_model

_PROMPTS = (
    Prompt("Tom has 3 apples. How many apples?", "Count.", id="a"),
    Prompt("Add 2 and 5, please, then take 3 away and say it.", id="b"),
)
_CONDITIONS = {"slash": MeaninglessTokens("/", 12)}
_MANY = 5  # families: a reason shared by at least this many is given once


@dataclass(frozen=True)
class Family:
    """One row of the table."""

    name: str
    model_class: str  # in transformers
    layers: str  # how many have attention, and how many there are
    verified: str  # "yes", or the checks that failed
    limits: tuple[str, ...]  # what its hooks do not provide, and why
    analyses: dict[str, str]  # "yes", or the reason why it was refused


def families(names: Iterable[str] = tuple(FAMILIES)) -> Iterator[Family]:
    """Build, load, verify and analyse a tiny model of each family; about a second each."""
    for name in names:
        model = bridge_of(tiny_model(name), verify=False)
        report = verify_model(model)
        has = f"{len(attention_layers(model))} of {model.cfg.n_layers}"
        limits = tuple(f"{name}: {why}" for name, why in report.limited.items())
        yield Family(name, report.architecture, has, _verified(report), limits, _outcomes(model))


def _outcomes(model: HookedModel) -> dict[str, str]:
    """The outcome of each analysis, from one run of all that pass the checks, or a run of each if that run fails."""
    outcomes = {make().name: _tried(model, make(), _planned) for make in ANALYSES}
    possible = [make() for make in ANALYSES if outcomes[make().name] == "yes"]
    measured = lambda model, analyses: run(model, _PROMPTS, _CONDITIONS, analyses)  # noqa: E731
    if possible and _tried(model, possible, measured) != "yes":
        outcomes |= {analysis.name: _tried(model, analysis, measured) for analysis in possible}
    return outcomes


def _tried(model: HookedModel, analyses: Any, how: Callable[[HookedModel, Any], Any]) -> str:
    try:
        how(model, analyses)
    except MechattnError as error:
        return f"no: {error}"
    return "yes"


def _planned(model: HookedModel, analyses: Any) -> None:
    plan = make_plan(model, _CONDITIONS, analyses)
    plan.sequences(_PROMPTS)
    plan.calibrated(_PROMPTS)


def _verified(report: Report) -> str:
    failed = [check.name for check in report.checks if check.outcome == "failed"]
    if failed:
        return f"no: {', '.join(failed)}"
    return "yes, mended" if report.mended else "yes"


def as_markdown(rows: Iterable[Family]) -> str:
    """The table, followed by limitations and reasons for refusals."""
    rows = list(rows)
    names = list(rows[0].analyses)
    head = ["Family", "Class", "Attention layers", "Verified", *(f"`{name}`" for name in names)]
    lines = [_line(head), _line(["---"] * len(head))]
    for row in rows:
        said = ["yes" if outcome == "yes" else "no" for outcome in row.analyses.values()]
        lines.append(
            _line([row.name, f"`{row.model_class}`", row.layers, row.verified.split(":")[0], *said])
        )
    refused = [_refused(row) for row in rows]
    counts = Counter(reason for reasons in refused for reason in reasons)
    notes = []
    for reason in (reason for reason, count in counts.items() if count >= _MANY):
        named = ", ".join(
            row.name for row, reasons in zip(rows, refused, strict=True) if reason in reasons
        )
        analyses = next(reasons[reason] for reasons in refused if reason in reasons)
        notes.append(f"- {', '.join(analyses)} refused: {reason}. So in {named}.")
    for row, reasons in zip(rows, refused, strict=True):
        said = [row.verified] * (":" in row.verified) + list(row.limits)
        said += [
            f"{', '.join(names)} refused: {why}"
            for why, names in reasons.items()
            if counts[why] < _MANY
        ]
        if said:
            notes.append(f"- **{row.name}**: {'; '.join(said)}.")
    return "\n".join([*lines, "", *notes])


def _refused(row: Family) -> dict[str, list[str]]:
    """The reasons for refusals, each with its analyses."""
    found: dict[str, list[str]] = {}
    for name, outcome in row.analyses.items():
        if outcome != "yes":
            reason = outcome.removeprefix("no: ").replace(row.model_class, "the model")
            found.setdefault(reason, []).append(f"`{name}`")
    return found


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(as_markdown(families()))
