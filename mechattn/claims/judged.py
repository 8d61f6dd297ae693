"""Applies the rules: the verdict of each claim for one model."""

from __future__ import annotations

from dataclasses import dataclass

from mechattn.claims.attention_measures import NotApplicable
from mechattn.claims.claim import Claim, Measure, Part
from mechattn.claims.measures import Evidence, NotMeasured, found
from mechattn.claims.rules import Chance, Estimate, Outcome, decide, together


@dataclass(frozen=True)
class JudgedPart:
    """What was found of one part of a claim.

    Args:
        part: The measure and its rule.
        estimate: The number.
        chance: How far it is from that of random weights; None where none were run.
        outcome: What the rule says.
    """

    part: Part
    estimate: Estimate
    chance: Chance | None
    outcome: Outcome


@dataclass(frozen=True)
class Judged:
    """The verdict of a claim of one model.

    Args:
        claim: The claim.
        outcome: The verdict, and why.
        parts: What was found; empty where nothing was.
        control: The control's number; None where there is none.
    """

    claim: Claim
    outcome: Outcome
    parts: tuple[JudgedPart, ...] = ()
    control: Estimate | None = None


def judged(claim: Claim, evidence: Evidence) -> Judged:
    """Measure and decide one claim."""
    try:
        parts = tuple(_part(claim, part, evidence) for part in claim.parts)
    except NotApplicable as error:
        return Judged(claim, Outcome("not applicable", str(error)))
    except NotMeasured as error:
        return Judged(claim, Outcome("cannot be told", str(error)))
    control = None if claim.control is None else _control(claim, claim.control, evidence)
    return Judged(claim, together([part.outcome for part in parts]), parts, control)


def _part(claim: Claim, part: Part, evidence: Evidence) -> JudgedPart:
    estimate, chance = found(part.measure, claim.needs, evidence)
    of_answers = claim.needs not in (
        "attention",
        "activations",
    )  # random weights solve nothing: the run leaves them out
    outcome = decide(part.rule, estimate, chance, by_definition=bool(claim.by_definition) or of_answers)
    if of_answers and outcome.word == "supported":
        outcome = Outcome("supported", f"the whole interval is {part.rule.side} the line")
    return JudgedPart(part, estimate, chance, outcome)


def _control(claim: Claim, control: Measure, evidence: Evidence) -> Estimate | None:
    try:
        return found(control, claim.needs, evidence)[0]
    except (NotApplicable, NotMeasured):
        return None
