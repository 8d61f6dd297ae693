"""The page of verdicts: claims by models, each claim's quote, rule and figures, and maps of all heads."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

from mechattn.claims.register import Claim, Register
from mechattn.claims.verdicts import TABLES, Verdicts, counted, rows, said, table_of
from mechattn.errors import OptionError
from mechattn.pages.first_screen import ShownModel
from mechattn.pages.page import About, Section, drawn_section, heads_options, write_page
from mechattn.render.declared import FIGURES
from mechattn.results.result import Result
from mechattn.store.atomic_writes import write_whole

_KINDS = {"supported": "supported", "contradicted": "contradicted", "cannot be told": "cannot"}

Results = Mapping[str, Result]


def write(verdicts: Verdicts, results: Seq[Results], out: Path, force: bool) -> Path:
    """Write the page, the JSON and the Markdown; the page shows figures of each model's results."""
    made = {"verdicts.json": verdicts.to_json(), "verdicts.md": verdicts.to_markdown() + "\n"}
    for name, text in made.items():
        write_whole(out / name, lambda new, text=text: new.write_text(text, encoding="utf-8"))  # type: ignore[misc]
    register, about = verdicts.register, verdicts.register.about
    sections, links = _sections(register, results)
    groups = [
        {"title": title, "claims": [_row(verdicts, i, links) for i in some]}
        for which, title in TABLES.items()
        if (some := [i for i, claim in enumerate(register.claims) if table_of(claim) == which])
    ]
    models = [
        {**vars(m), "size": m.caption.removeprefix(m.name).strip(" ()"), "counts": counted(m.judged)}
        for m in verdicts.models
    ]
    filled = {"answer": answer(verdicts), "models": models, "groups": groups, "register": register, **verdicts.about}
    of = ", ".join(model.name for model in verdicts.models)
    subtitle = f"{len(register.claims)} claims of {'; '.join(about.sources.values())}, judged for {of}."
    shown = [ShownModel(next(iter(some.values()))) for some in results if some]
    title, lead = f"{about.title}, claim by claim", ("claims.html.j2", filled)
    return write_page(
        out / "index.html", About(title, subtitle, verdicts.about["command"], lead), shown, sections, force
    )


def answer(verdicts: Verdicts) -> str:
    """The first sentences: how many cells of the sources' own claims came out how."""
    theirs = [one for m in verdicts.models for one in m.judged if table_of(one.claim) == "stated"]
    claims, models = len(theirs) // len(verdicts.models), len(verdicts.models)
    of = f"{claims} claims that the sources state" + (f" × {models} models" if models > 1 else " in this model")
    return f"{of}: {counted(theirs)}. A verdict is of that model on these prompts, not of the sources’ models."


def _row(verdicts: Verdicts, i: int, links: dict[tuple[int, str], str]) -> dict[str, Any]:
    """A claim in the table, and all that stands behind it."""
    register, claim = verdicts.register, verdicts.register.claims[i]
    cells = []
    for at, model in enumerate(verdicts.models):
        one = verdicts.content["claims"][i]["verdicts"][model.name]
        kind, link = _KINDS.get(one["verdict"], "not"), links.get((at, claim.figure), "")
        cells.append({**one, "model": model.name, "kind": kind, "link": link})
    made = {"key": claim.key, "title": claim.title, "published": claim.published, "exploratory": claim.exploratory}
    return {**made, "says": said(claim, register), "about": rows(claim, register).items(), "cells": cells}


def _sections(register: Register, results: Seq[Results]) -> tuple[list[Section], dict[tuple[int, str], str]]:
    """Figures of every model, and the address of each: by the model's number and the claim's ``figure``."""
    sections: list[Section] = []
    links: dict[tuple[int, str], str] = {}
    for at, some in enumerate(results):
        for claim in (claim for claim in register.claims if claim.figure):
            if (at, claim.figure) not in links and (section := _section(claim, some)) is not None:
                sections.append(section)
                links[at, claim.figure] = f"section-{len(sections)}"
    return sections, links


def _section(claim: Claim, results: Results) -> Section | None:
    """The figure of the claim's own run, if that has what it draws, else of the first that has."""
    kind, _, quantity = claim.figure.partition(":")
    one = replace(FIGURES[kind], report=[{"quantity": quantity} if quantity else {}])
    for name in sorted(results, key=lambda name: name != claim.needs):
        result = results[name]
        for _, options in one.shown(result, {"layer": 0, **heads_options(result, None, 3)}):
            try:
                return drawn_section(one.draw, result, options)
            except OptionError:  # a model without what it shows
                return None
    return None
