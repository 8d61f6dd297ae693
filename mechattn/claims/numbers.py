"""Figures of a claim in words: a change in percent, points of accuracy, a share, a number."""

from __future__ import annotations

import math

from mechattn.claims.claim import Kind, Part
from mechattn.claims.judged import Judged, JudgedPart
from mechattn.claims.rules import Chance, Estimate

SIGNED: tuple[Kind, ...] = ("log-ratio", "points")


def scaled(value: float, kind: Kind) -> float:
    """A number in the units that are shown."""
    if kind == "log-ratio":
        return 100 * math.expm1(value)
    return value if kind == "number" else 100 * value


def figure(value: float, kind: Kind) -> str:
    """A number without its unit."""
    if not math.isfinite(value):
        return "?"
    shown = scaled(value, kind)
    digits = 2 if kind == "number" else 1
    shown = round(shown, digits) + 0.0  # no "−0.0"
    text = f"{shown:+.{digits}f}" if kind in SIGNED else f"{shown:.{digits}f}"
    return text.replace("-", "−")


def unit(kind: Kind) -> str:
    """What stands behind it."""
    return {"log-ratio": " %", "share": " %", "points": " points", "number": ""}[kind]


def with_interval(estimate: Estimate, kind: Kind) -> str:
    """Such as "−30.3 % [−31.0, −29.6]"."""
    value, low, high = (figure(end, kind) for end in (estimate.value, estimate.low, estimate.high))
    return f"{value}{unit(kind)} [{low}, {high}]"


def apart(distance: float, kind: Kind) -> str:
    """How far two numbers of a kind are from each other, such as "5.0 points"."""
    if kind == "number":
        return f"{distance:.2f}"
    return f"{100 * distance:.1f}{' points' if kind in ('share', 'points') else ' %'}"


def line_words(part: Part) -> str:
    """The rule in words: where the interval has to lie."""
    kind, rule = part.measure.kind, part.rule
    return f"{part.measure.name}: {rule.side} {figure(rule.line, kind)}{unit(kind)}"


def detectable_words(found: JudgedPart) -> str:
    """What this number of units can tell: how far from the line the truth has to be."""
    kind, n = found.part.measure.kind, found.estimate.n
    if not math.isfinite(found.estimate.detectable):
        return f"{n} are too few to tell anything"
    return f"what lies {apart(found.estimate.detectable, kind)} off the line (n = {n})"


def chance_words(chance: Chance | None, kind: Kind) -> str:
    """The number in random weights of the same architecture."""
    if chance is None:
        return ""
    return f"{', '.join(figure(draw, kind) for draw in chance.draws)}{unit(kind)}"


def cell(judged: Judged, sep: str = "; ") -> str:
    """The figures of a claim, or why there are none."""
    if not judged.parts:
        return judged.outcome.why
    return sep.join(with_interval(one.estimate, one.part.measure.kind) for one in judged.parts)
