"""A register in Markdown, as the documentation shows it."""

from __future__ import annotations

from mechattn.claims import numbers
from mechattn.claims.measures import MEASURES
from mechattn.claims.register import Claim, Register
from mechattn.claims.verdicts import TABLES, table_of


def register_markdown(register: Register) -> str:
    """Digest, and of each claim what was said and where, what is measured, and the rule."""
    sources = "; ".join(register.about.sources.values())
    parts = [f"{len(register.claims)} claims of {sources}; SHA-256 `{register.digest}`."]
    for which, title in TABLES.items():
        claims = [claim for claim in register.claims if table_of(claim) == which]
        parts += [f"### {title}", *(_described(claim, register) for claim in claims)] if claims else []
    return "\n\n".join(parts)


def measures_markdown() -> str:
    """Every measure that a register may name, and what it needs."""
    rows = [f"| `{name}` | {one.says} | {', '.join(one.needs)} |" for name, one in sorted(MEASURES.items())]
    return "\n".join(["| measure | what it is | of |", "|---|---|---|", *rows])


def said(claim: Claim, register: Register) -> str:
    """The quote and its place, and our words."""
    place = ", ".join(filter(None, [register.about.sources.get(claim.source, ""), claim.where]))
    quote = f"“{claim.quote}” ({place})" if claim.quote else place
    unread = "" if claim.audited else " The source itself was not at hand."
    return " ".join(filter(None, [quote, claim.says])) + unread


def rows(claim: Claim, register: Register) -> dict[str, str]:
    """What stands behind a claim, by heading."""
    compared = register.runs[claim.needs].draws and claim.compared and not claim.identity
    margins = " and ".join(dict.fromkeys(map(numbers.margin_words, claim.parts))) if compared else ""
    return {
        "of": claim.of,
        "published": claim.published,
        "measured": claim.measured or " ".join(dict.fromkeys(part.of.says for part in claim.parts)),
        "rule": "; ".join(map(numbers.line_words, claim.parts)),
        "beyond random weights": margins,
        "null": claim.null,
        "differs from the source": claim.deviation,
    }


def _described(claim: Claim, register: Register) -> str:
    found = {name: words.replace("|", "\\|") for name, words in rows(claim, register).items() if words}
    table = ["|  |  |", "|---|---|", *(f"| {name} | {words} |" for name, words in found.items())]
    return "\n\n".join([f"#### {claim.title}", f"`{claim.key}` · {said(claim, register)}", "\n".join(table)])
