"""Claims, rules and figures in words: a change in percent, points of accuracy, a share, a number."""

from __future__ import annotations

from math import isfinite

from mechattn.claims.judged import Judged, JudgedPart
from mechattn.claims.measures import MEASURES, UNIT, Kind, figure, with_unit
from mechattn.claims.register import Claim, Part, Register
from mechattn.claims.rules import OTHER, Estimate

TABLES = {  # which claims stand together
    "stated": "What the sources state",
    "figure": "What is read off their figures, by automatic captions",
    "inferred": "What we would ask besides: not claims of the sources",
    "identity": "Checks of the library: these hold by arithmetic",
}


def with_interval(estimate: Estimate, kind: Kind) -> str:
    """Such as "−30.3 % [−31.0, −29.6]"; of accuracies with their levels and the exact test."""
    digits = 4 if kind == "share" and 0 <= estimate.high < 0.001 else None  # an error of 0 is told from one of 0.04 %
    value, low, high = (figure(end, kind, digits) for end in (estimate.value, estimate.low, estimate.high))
    words = f"{value}{UNIT[kind]} [{low}, {high}]"
    if estimate.levels is not None:
        words = f"{_levels(estimate)} % ({words})"
    return words if estimate.exact is None else f"{words}, exact p = {estimate.exact:.2g}"


def short(one: Judged) -> str:
    """The values alone, for a column of a table."""
    if any(part.estimate.levels for part in one.parts):
        return ", ".join(_levels(part.estimate) for part in one.parts) + " %"
    each = [figure(part.estimate.value, part.part.kind) for part in one.parts]
    return ", ".join(each) + UNIT[one.parts[0].part.kind].replace("points", "pt") if each else ""


def _levels(estimate: Estimate) -> str:
    return " → ".join(f"{100 * level:.1f}" for level in estimate.levels or ())


def cell(one: Judged) -> str:
    """The figures of a claim, or why there are none."""
    return "; ".join(with_interval(part.estimate, part.part.kind) for part in one.parts) or one.outcome.why


def line_words(part: Part) -> str:
    """The rule in words: where the interval has to lie, and what contradicts it."""
    rule, kind = part.rule_of(), part.kind
    other = OTHER[rule.side]
    against = f"{other} {with_unit(rule.opposite, kind)}" if rule.opposite != rule.line else f"{other} it"
    gains = "; ".join(
        f"{model} {with_unit(gain, kind)}" + f" ({of})"
        for of, some in part.gains.items()
        for model, gain in some.items()
    )
    own = f", or the gain that is published for the model and set ({gains})" if gains else ""
    return f"{part.name}: supported {rule.side} {with_unit(rule.line, kind)}, contradicted {against}{own}"


def _margin(part: Part) -> str:
    units = {"number": f"{part.margin:.2f}", "log-ratio": f"{100 * part.margin:.1f} %"}
    margin = units.get(part.kind, f"{100 * part.margin:.1f} points")
    return f"by {margin} at least, and by more than one further draw would be"


def part_words(found: JudgedPart) -> dict[str, str]:
    """What was found, what the model can show, random weights, and what this many units and draws can tell."""
    part, kind, chance = found.part, found.part.kind, found.chance
    ends = zip(("least", "most"), found.attainable, strict=True)
    random = ""
    if chance is not None:
        few, many = (figure(end(chance.draws), kind) for end in (min, max))
        random = f"{with_unit(chance.mean, kind)}, {few} to {many} in {len(chance.draws)} draws"
    told = f"n = {found.estimate.n}" + ("" if chance is None else f", {len(chance.draws)} draws")
    if found.outcome.told is not None and all(map(isfinite, found.outcome.told)):
        yes, no = (with_unit(end, kind) for end in found.outcome.told)
        told = f"supported {part.side} {yes}, contradicted {OTHER[part.side]} {no} ({told})"
    return {
        "found": f"{part.name}: {with_interval(found.estimate, kind)}",
        "attainable": ", ".join(f"at {w} {with_unit(end, kind)}" for w, end in ends if isfinite(end)) or "any value",
        "random": random,
        "told": told,
    }


def control_words(one: Judged) -> str:
    """The control's number, by its measure and conditions."""
    control = one.claim.control
    if one.control is None or control is None:
        return ""
    name = ", ".join([control.measure.replace("_", " "), *control.conditions])
    return f"{name}: {with_interval(one.control, control.kind)}"


def table_of(claim: Claim) -> str:
    """In which table a claim stands: by its origin, and what holds by arithmetic apart."""
    return "identity" if claim.identity else claim.origin


def said(claim: Claim, register: Register) -> str:
    """The quote and its place, and our words."""
    place = ", ".join(filter(None, [register.about.sources.get(claim.source, ""), claim.where]))
    quote = f"“{claim.quote}” ({place})" if claim.quote else place
    unread = "" if claim.audited else " The source itself was not at hand."
    return " ".join(filter(None, [quote, claim.says])) + unread


def rows(claim: Claim, register: Register) -> dict[str, str]:
    """What stands behind a claim, by heading."""
    compared = register.runs[claim.needs].draws and claim.compared and not claim.identity
    parts = [(part, part.other) for part in claim.parts]
    measured = (
        part.of.says + (f" Less: {less.of.says}" if less and less.of is not part.of else "") for part, less in parts
    )
    found = {
        "of": claim.of,
        "published": claim.published,
        "measured": " ".join(dict.fromkeys(measured)),
        "rule": "; ".join(map(line_words, claim.parts)),
        "beyond random weights": " and ".join(dict.fromkeys(map(_margin, claim.parts))) if compared else "",
        "null": claim.null,
        "exploratory": claim.exploratory,
        "differs from the source": claim.deviation,
    }
    return {name: words for name, words in found.items() if words}


def register_markdown(register: Register) -> str:
    """Digest, and of each claim what was said and where, what is measured, and the rule."""
    sources = "; ".join(register.about.sources.values())
    parts = [f"{len(register.claims)} claims of {sources}; SHA-256 `{register.digest}`."]
    for which, title in TABLES.items():
        claims = [claim for claim in register.claims if table_of(claim) == which]
        parts += [f"### {title}"] * bool(claims)
        for claim in claims:
            about = {name: words.replace("|", "\\|") for name, words in rows(claim, register).items()}
            parts += [f"#### {claim.title}", f"`{claim.key}` · {said(claim, register)}"]
            parts.append(
                "\n".join(["|  |  |", "|---|---|", *(f"| {name} | {words} |" for name, words in about.items())])
            )
    return "\n\n".join(parts)


def measures_markdown() -> str:
    """Every measure that a register may name, and what it needs."""
    each = [f"| `{name}` | {one.says} | {', '.join(one.needs)} |" for name, one in sorted(MEASURES.items())]
    return "\n".join(["| measure | what it is | of |", "|---|---|---|", *each])
