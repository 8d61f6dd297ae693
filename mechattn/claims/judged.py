"""Applies the rules: the verdict of each claim for one model, and of all models as one family."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.claims import rules
from mechattn.claims.measures import with_unit
from mechattn.results.result_units import units_of

if TYPE_CHECKING:
    from mechattn.claims.register import Claim, Measuring, Part


@dataclass(frozen=True)
class Evidence:
    """What was measured of one model."""

    runs: Mapping[str, Any]  # the result or evaluation of each run that was made
    draws: Mapping[str, Seq[np.ndarray]] = field(default_factory=dict)  # of a part, "KEY/0": each random model's [unit]
    drawn: frozenset[str] = frozenset()  # the runs that random models were asked for
    missing: Mapping[str, rules.Outcome] = field(default_factory=dict)  # of runs that were not made: their verdict
    model: str = ""  # its name and that of the prompts, for which a claim may have published numbers
    prompts: str = ""


@dataclass(frozen=True)
class JudgedPart:
    """What was found of one part of a claim, and what its rule says."""

    part: Part
    rule: rules.Rule  # for this model and these prompts
    estimate: rules.Estimate
    chance: rules.Chance | None  # None where no random weights were run
    attainable: tuple[float, float]
    outcome: rules.Outcome


@dataclass(frozen=True)
class Judged:
    """The verdict of a claim of one model."""

    claim: Claim
    outcome: rules.Outcome
    parts: tuple[JudgedPart, ...] = ()  # empty where nothing was found
    control: rules.Estimate | None = None
    q: float | None = None  # over all cells of the page; None where nothing was tested


def judged(claim: Claim, evidence: Evidence) -> Judged:
    """Measure and decide one claim."""
    if claim.needs in evidence.missing:
        return Judged(claim, evidence.missing[claim.needs])
    try:
        parts = tuple(_part(claim, i, evidence) for i in range(len(claim.parts)))
    except rules.NotApplicable as error:
        return Judged(claim, rules.Outcome("not applicable", str(error)))
    try:
        control = found(claim.control, evidence.runs[claim.needs]) if claim.control else None
    except rules.NotApplicable:
        control = None
    return Judged(claim, rules.together([part.outcome for part in parts]), parts, control)


def _part(claim: Claim, i: int, evidence: Evidence) -> JudgedPart:
    part, of = claim.parts[i], evidence.runs[claim.needs]
    rule, estimate, attainable = part.rule_of(evidence.model, evidence.prompts), found(part, of), part.attainable(of)
    draws = evidence.draws.get(f"{claim.key}/{i}", ())
    chance = rules.beside_chance(units(part, of), draws) if draws else None
    if claim.identity:
        holds = rule.sign * ((estimate.high if part.side == "below" else estimate.low) - part.line) > 0
        why = f"{part.side} {part.line:g} by arithmetic, in any model"
        outcome = rules.Outcome("holds" if holds else "does not hold", why)
    elif claim.compared and chance is None and claim.needs in evidence.drawn:
        outcome = rules.Outcome("cannot be told", "there are no random weights of this architecture to compare with")
    else:
        beside, shown = chance if claim.compared else None, partial(with_unit, kind=part.kind)
        outcome = rules.decide(rule, estimate, beside, attainable, shown)
    return JudgedPart(part, rule, estimate, chance, attainable, outcome)


def found(measuring: Measuring, of: Any) -> rules.Estimate:
    """A number with its interval."""
    made = measuring(of)
    return made if isinstance(made, rules.Estimate) else rules.estimated(units_of(of, len(made)).means(made))


def units(measuring: Measuring, of: Any) -> np.ndarray:
    """A value for each unit: a prompt, or a group of them."""
    made = measuring(of)
    return units_of(of, len(made)).means(made)


def corrected(models: Seq[Seq[Judged]]) -> list[tuple[Judged, ...]]:
    """The verdicts of all models as one family: what does not hold over all cells of the page cannot be told."""
    cells = [one for some in models for one in some]
    q = iter(rules.family([one.outcome.p for one in cells]))
    return [tuple(_in_family(one, next(q), len(cells)) for one in some) for some in models]


def _in_family(one: Judged, q: float | None, cells: int) -> Judged:
    if q is None or q <= 1 - rules.LEVEL or one.outcome.word not in ("supported", "contradicted"):
        return replace(one, q=q)
    why = f"by itself {one.outcome.word}, but not over the {cells} cells of this page (q = {q:.2g})"
    return replace(one, q=q, outcome=replace(one.outcome, word="cannot be told", why=why))
