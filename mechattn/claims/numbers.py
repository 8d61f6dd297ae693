"""Figures of a claim in words: a change in percent, points of accuracy, a share, a number."""

from __future__ import annotations

import math

from mechattn.claims.judged import Judged, JudgedPart
from mechattn.claims.measure import Kind
from mechattn.claims.register import Part
from mechattn.claims.rules import OTHER, Estimate

SIGNED: tuple[Kind, ...] = ("log-ratio", "points")


def scaled(value: float, kind: Kind) -> float:
    """A number in the units that are shown."""
    if kind == "log-ratio":
        return 100 * math.expm1(value)
    return value if kind == "number" else 100 * value


def figure(value: float, kind: Kind, digits: int | None = None) -> str:
    """A number without its unit; one digit after the point, of a plain number two."""
    if not math.isfinite(value):
        return "?"
    digits = (2 if kind == "number" else 1) if digits is None else digits
    shown = round(scaled(value, kind), digits) + 0.0  # no "−0.0"
    text = f"{shown:+.{digits}f}" if kind in SIGNED else f"{shown:.{digits}f}"
    return text.replace("-", "−")


def unit(kind: Kind) -> str:
    """What stands behind it."""
    return {"log-ratio": " %", "share": " %", "points": " points", "number": ""}[kind]


def with_interval(estimate: Estimate, kind: Kind) -> str:
    """Such as "−30.3 % [−31.0, −29.6]"; of accuracies with their levels and the exact test."""
    digits = 4 if kind == "share" and 0 <= estimate.high < 0.001 else None  # an error of 0 is told from one of 0.04 %
    value, low, high = (figure(end, kind, digits) for end in (estimate.value, estimate.low, estimate.high))
    words = f"{value}{unit(kind)} [{low}, {high}]"
    if estimate.levels is not None:
        words = f"{' → '.join(f'{100 * level:.1f}' for level in estimate.levels)} % ({words})"
    return words if estimate.exact is None else f"{words}, exact p = {estimate.exact:.2g}"


def short(one: Judged) -> str:
    """The values alone, for a column of a table."""
    if any(part.estimate.levels for part in one.parts):
        return (
            ", ".join(" → ".join(f"{100 * level:.1f}" for level in part.estimate.levels or ()) for part in one.parts)
            + " %"
        )
    each = [figure(part.estimate.value, part.part.of.kind) for part in one.parts]
    return ", ".join(each) + unit(one.parts[0].part.of.kind).replace(" points", " pt") if each else ""


def line_words(part: Part) -> str:
    """The rule in words: where the interval has to lie, and what contradicts it."""
    kind, rule = part.of.kind, part.rule
    other = OTHER[rule.side]
    against = f"{other} {figure(rule.opposite, kind)}{unit(kind)}" if rule.opposite != rule.line else f"{other} it"
    return f"{part.name}: supported {rule.side} {figure(rule.line, kind)}{unit(kind)}, contradicted {against}"


def margin_words(part: Part) -> str:
    """How far from random weights."""
    margin, kind = part.margin, part.of.kind
    units = {"number": f"{margin:.2f}", "log-ratio": f"{100 * margin:.1f} %"}.get(kind, f"{100 * margin:.1f} points")
    return f"by {units} at least, and by more than one further draw would be"


def range_words(found: JudgedPart) -> str:
    """What this model can show, beside the line."""
    kind, (low, high) = found.part.of.kind, found.attainable
    ends = [
        f"at {word} {figure(end, kind)}{unit(kind)}"
        for word, end in (("least", low), ("most", high))
        if math.isfinite(end)
    ]
    return ", ".join(ends) or "any value"


def told_words(found: JudgedPart) -> str:
    """What this number of units and of draws can tell, the whole rule with 80 % power."""
    kind, n = found.part.of.kind, found.estimate.n
    draws = "" if found.chance is None else f", {len(found.chance.draws)} draws"
    if found.outcome.told is None or not all(map(math.isfinite, found.outcome.told)):
        return f"n = {n}{draws}"
    sides = (found.part.side, OTHER[found.part.side])
    words = [f"{side} {figure(x, kind)}{unit(kind)}" for side, x in zip(sides, found.outcome.told, strict=True)]
    return f"supported {words[0]}, contradicted {words[1]} (n = {n}{draws})"


def chance_words(found: JudgedPart) -> str:
    """The number in random weights of the same architecture: mean and range."""
    if found.chance is None:
        return ""
    kind, draws = found.part.of.kind, found.chance.draws
    ends = [figure(end, kind) for end in (found.chance.mean, min(draws), max(draws))]
    return f"{ends[0]}{unit(kind)}, {ends[1]} to {ends[2]} in {len(draws)} draws"


def control_words(one: Judged) -> str:
    """The control's number, by its measure and conditions."""
    control = one.claim.control
    if one.control is None or control is None:
        return ""
    name = ", ".join([control.measure.replace("_", " "), *control.conditions])
    return f"{name}: {with_interval(one.control, control.of.kind)}"


def cell(one: Judged) -> str:
    """The figures of a claim, or why there are none."""
    if not one.parts:
        return one.outcome.why
    return "; ".join(with_interval(part.estimate, part.part.of.kind) for part in one.parts)
