"""The page of verdicts: claims by models, each claim's rule and figures, and maps of all heads."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from mechattn import render
from mechattn.claims import numbers
from mechattn.claims.claim import Claim, Needs
from mechattn.claims.judged import Judged
from mechattn.claims.plan import WORDS
from mechattn.claims.register import CLAIMS, VERSION, digest
from mechattn.claims.verdicts import OfModel, Verdicts, counted
from mechattn.errors import OptionError
from mechattn.pages.page import heads_options, write_page
from mechattn.pages.sections import Section, drawn_section
from mechattn.render.html import check_page_place
from mechattn.results.result import Result
from mechattn.results.whole import write_whole

_GROUPS: tuple[tuple[str, tuple[Needs, ...], bool], ...] = (
    ("Attention, and what it adds", ("attention",), True),
    ("The first MLP, and ARM", ("activations",), True),
    ("Answers", ("answers", "length", "place", "samples"), True),
    ("Without any tokens (the blog)", ("attention",), False),
)
_KINDS = {"supported": "supported", "contradicted": "contradicted", "cannot be told": "cannot", "not applicable": "not"}
_SIGNS = {"supported": "✓", "contradicted": "✗", "cannot be told": "?", "not applicable": "–"}


def check_place(out: Path, force: bool) -> None:
    """Find out before the work whether the page can be written.

    Raises:
        OutputError: It cannot.
    """
    check_page_place(out / "index.html", force)


def write(verdicts: Verdicts, results: Seq[Seq[Result]], out: Path, command: str, force: bool) -> Path:
    """Write the page, the JSON and the Markdown.

    Args:
        verdicts: Of all models.
        results: For each model that of attention, and that of the first MLP where it was run.
        out: The folder.
        command: What was typed.
        force: Replace a page that mechattn did not write.
    """
    made = {"paper.json": verdicts.to_json(), "paper.md": verdicts.to_markdown() + "\n"}
    for name, text in made.items():
        write_whole(out / name, lambda new, text=text: new.write_text(text, encoding="utf-8"))  # type: ignore[misc]
    sections, links = _sections(results)
    title = "The paper, claim by claim"
    of = ", ".join(model.name for model in verdicts.models)
    subtitle = (
        f"{len(CLAIMS)} claims of arXiv:2510.01032 (“Meaningless Tokens, Meaningful Gains”) and of the blog post "
        f"“Attention Focus Plots”, judged for {of}."
    )
    lead = ("claims.html.j2", _lead(verdicts, links))
    shown = [some[0] for some in results]
    return write_page(out / "index.html", title, subtitle, shown, sections, command, force, lead=lead)


def _lead(verdicts: Verdicts, links: dict[tuple[int, str], str]) -> dict[str, Any]:
    """What the template is filled with."""
    groups = []
    for title, needs, paper in _GROUPS:
        some = [i for i, claim in enumerate(CLAIMS) if claim.needs in needs and _of_paper(claim) == paper]
        groups.append({"title": title, "claims": [_row(verdicts, i, links) for i in some]})
    return {
        "answer": answer(verdicts),
        "models": [
            {
                "name": m.name,
                "size": m.caption.removeprefix(m.name).strip(" ()"),
                "counts": counted(m),
                "marks": _marks(m),
                "deviations": m.deviations,
            }
            for m in verdicts.models
        ],
        "groups": groups,
        "version": VERSION,
        "digest": digest(),
        "plan": [
            (
                row["model"],
                WORDS[row["of"]],
                f"{row['count']}" if row["count"] else "left out: the budget was too small",
            )
            for row in verdicts.about.get("plan", [])
        ],
    }


def answer(verdicts: Verdicts) -> str:
    """The first sentences: what is supported, and what is contradicted, in every model."""
    models = verdicts.models
    free = [i for i, claim in enumerate(CLAIMS) if not claim.by_definition and _of_paper(claim)]
    which = {1: "this model", 2: "both models"}.get(len(models), f"all {len(models)} models")
    parts = []
    for word in ("supported", "contradicted"):
        held = [CLAIMS[i].title for i in free if all(m.judged[i].outcome.word == word for m in models)]
        parts.append(f"{len(held)} {'is' if len(held) == 1 else 'are'} {word} in {which}{_listed(held)}")
    return (
        f"Of the paper’s {len(free)} claims that could fail, {parts[0]}; {parts[1]}. Claims marked “by definition” "
        f"hold even without training, so their support is no evidence."
    )


def _listed(titles: Seq[str]) -> str:
    """Such as " (it falls most at the peaks; λ is one number)"."""
    small = [title[0].lower() + title[1:] if title[1:2] in " abcdefghijklmnopqrstuvwxyz" else title for title in titles]
    return f" ({'; '.join(small)})" if small else ""


def _marks(of: OfModel) -> str:
    """How many verdicts of each kind, in signs, such as "✓ 7 · ✗ 10"."""
    found = [one.outcome.word for one in of.judged]
    return " · ".join(f"{sign} {found.count(word)}" for word, sign in _SIGNS.items() if word in found)


def _row(verdicts: Verdicts, i: int, links: dict[tuple[int, str], str]) -> dict[str, Any]:
    """A claim in the table, and all that stands behind it."""
    claim = CLAIMS[i]
    return {
        "key": claim.key,
        "title": claim.title,
        "by_definition": claim.by_definition,
        "published": claim.published,
        "says": claim.says,
        "where": claim.where,
        "about": [row for row in _about(claim) if row[1]],
        "cells": [_cell(m, m.judged[i], links.get((at, claim.figure), "")) for at, m in enumerate(verdicts.models)],
    }


def _about(claim: Claim) -> list[tuple[str, str]]:
    published = f"{claim.published} ({claim.published_of})" if claim.published_of else claim.published
    return [
        ("published", published),
        ("supported by", claim.supported_by),
        ("measured", claim.measured),
        ("rule", "; ".join(numbers.line_words(part) for part in claim.parts)),
        ("beside", claim.null),
        ("by definition", claim.by_definition),
        ("deviation", claim.deviation),
    ]


def _cell(model: OfModel, one: Judged, link: str) -> dict[str, Any]:
    """A verdict with its figures."""
    kinds = [part.part.measure.kind for part in one.parts]
    found = [numbers.with_interval(part.estimate, kind) for part, kind in zip(one.parts, kinds, strict=True)]
    short = found[0] if len(found) == 1 else ""
    if len(found) > 1:
        each = [numbers.figure(part.estimate.value, kind) for part, kind in zip(one.parts, kinds, strict=True)]
        short = ", ".join(each) + numbers.unit(kinds[0])
    named = [f"{part.part.measure.name}: {words}" for part, words in zip(one.parts, found, strict=True)]
    control = one.claim.control
    return {
        "model": model.name,
        "word": one.outcome.word,
        "kind": _KINDS[one.outcome.word],
        "why": one.outcome.why,
        "short": short.replace(" points", " pt"),  # a column a model
        "found": named,
        "random": [numbers.chance_words(part.chance, kind) for part, kind in zip(one.parts, kinds, strict=True)],
        "control": "" if one.control is None or control is None else _control(one),
        "power": [numbers.detectable_words(part) for part in one.parts],
        "link": link,
    }


def _control(one: Judged) -> str:
    assert one.control is not None
    assert one.claim.control is not None
    return f"{one.claim.control.name}: {numbers.with_interval(one.control, one.claim.control.kind)}"


def _of_paper(claim: Claim) -> bool:
    return claim.where.startswith("arXiv")


def _sections(results: Seq[Seq[Result]]) -> tuple[list[Section], dict[tuple[int, str], str]]:
    """Figures of every model, and the address of each: by the model's number and the claim's ``figure``."""
    sections: list[Section] = []
    links: dict[tuple[int, str], str] = {}
    for at, some in enumerate(results):
        for name in dict.fromkeys(claim.figure for claim in CLAIMS if claim.figure):
            kind, _, quantity = name.partition(":")
            result = some[-1] if kind in ("activation_metrics", "agreement") else some[0]
            try:
                section = drawn_section(getattr(render, kind), result, _options(kind, quantity, result))
            except OptionError:  # a model without what it shows
                continue
            sections.append(section)
            links[at, name] = f"section-{len(sections)}"
    return sections, links


def _options(kind: str, quantity: str, result: Result) -> dict[str, Any]:
    """Which condition, layer and quantity a figure shows."""
    if kind == "received_attention":
        return {"layer": 0, "condition": "slash"} | heads_options(result, None, 3)
    if kind == "agreement":
        return {"condition": "slash", "layer": 0}
    if kind == "activation_metrics":
        return {"layer": 0}
    if quantity:
        return {"quantity": quantity}
    return {} if kind == "update_histogram" else {"condition": "slash"}
