"""The register in Markdown, as the documentation shows it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from mechattn.claims import numbers
from mechattn.claims.claim import Claim
from mechattn.claims.register import CLAIMS, VERSION, digest


def register_markdown(claims: Seq[Claim] = CLAIMS) -> str:
    """Version, digest, and of each claim what was said, what is measured, and the rule."""
    head = f"Register {VERSION}, {len(claims)} claims, SHA-256 `{digest(claims)}`."
    return "\n\n".join([head, *map(_described, claims)])


def _described(claim: Claim) -> str:
    published = f"{claim.published} ({claim.published_of})" if claim.published_of else claim.published
    random = "" if claim.by_definition or not _has_draws(claim) else _margins(claim)
    rows = {
        "published": published,
        "supported by": claim.supported_by,
        "measured": claim.measured,
        "rule": "; ".join(numbers.line_words(part) for part in claim.parts),
        "further than random weights": random,
        "beside": claim.null,
        "control": claim.control.name if claim.control else "",
        "by definition": claim.by_definition,
        "deviation": claim.deviation,
    }
    lines = [f"### {claim.title}", f"`{claim.key}` · {claim.says} *{claim.where}.*"]
    table = ["|  |  |", "|---|---|", *(f"| {name} | {_cell(words)} |" for name, words in rows.items() if words)]
    return "\n\n".join([*lines, "\n".join(table)])


def _has_draws(claim: Claim) -> bool:
    """Random weights are run for what is measured in prompts; they answer nothing."""
    return claim.needs in ("attention", "activations")


def _margins(claim: Claim) -> str:
    """By how much, at least."""
    found = [f"{numbers.apart(part.rule.margin, part.measure.kind)}" for part in claim.parts]
    return f"by {' and '.join(found)} at least, and by more than they differ among themselves"


def _cell(words: str) -> str:
    return words.replace("|", "\\|")
