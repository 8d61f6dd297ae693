"""The page of verdicts: claims by models, each claim's quote, rule and figures, and maps of all heads."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from mechattn import render
from mechattn.claims.register import Claim, Register
from mechattn.claims.verdicts import Verdicts, counted
from mechattn.claims.words import TABLES, rows, said, table_of
from mechattn.errors import OptionError
from mechattn.pages.figure_sections import Section, drawn_section
from mechattn.pages.page import heads_options, write_page
from mechattn.results.result import Result
from mechattn.store.atomic_writes import write_whole

_KINDS = {"supported": "supported", "contradicted": "contradicted", "cannot be told": "cannot"}
_NEEDS = {"activation_metrics": "mlp_activations", "agreement": "mlp_activations", "scale_by_layer": "affine_shift"}
_NEEDS |= {"heads_by_layer": "attention_focus", "update_histogram": "head_updates"}

Results = Mapping[str, Result]


def write(verdicts: Verdicts, results: Seq[Results], out: Path, force: bool) -> Path:
    """Write the page, the JSON and the Markdown; the page shows figures of each model's results."""
    made = {"verdicts.json": verdicts.to_json(), "verdicts.md": verdicts.to_markdown() + "\n"}
    for name, text in made.items():
        write_whole(out / name, lambda new, text=text: new.write_text(text, encoding="utf-8"))  # type: ignore[misc]
    sections, links = _sections(verdicts.register, results)
    about = verdicts.register.about
    of = ", ".join(model.name for model in verdicts.models)
    subtitle = f"{len(verdicts.register.claims)} claims of {'; '.join(about.sources.values())}, judged for {of}."
    lead = ("claims.html.j2", _lead(verdicts, links))
    shown = [next(iter(some.values())) for some in results if some]
    title, command = f"{about.title}, claim by claim", verdicts.about["command"]
    return write_page(out / "index.html", title, subtitle, shown, sections, command, force, lead=lead)


def _lead(verdicts: Verdicts, links: dict[tuple[int, str], str]) -> dict[str, Any]:
    """What the template is filled with."""
    register = verdicts.register
    groups = [
        {"title": title, "claims": [_row(verdicts, i, links) for i in some]}
        for which, title in TABLES.items()
        if (some := [i for i, claim in enumerate(register.claims) if table_of(claim) == which])
    ]
    models = [
        {**vars(m), "size": m.caption.removeprefix(m.name).strip(" ()"), "counts": counted(m.judged)}
        for m in verdicts.models
    ]
    return {"answer": answer(verdicts), "models": models, "groups": groups, "register": register, **verdicts.about}


def answer(verdicts: Verdicts) -> str:
    """The first sentences: how many cells of the sources' own claims came out how."""
    theirs = [
        one for m in verdicts.models for one in m.judged if one.claim.origin == "stated" and not one.claim.identity
    ]
    claims, models = len(theirs) // len(verdicts.models), len(verdicts.models)
    of = f"{claims} claims that the sources state" + (f" × {models} models" if models > 1 else " in this model")
    return f"{of}: {counted(theirs)}. A verdict is of that model on these prompts, not of the sources’ models."


def _row(verdicts: Verdicts, i: int, links: dict[tuple[int, str], str]) -> dict[str, Any]:
    """A claim in the table, and all that stands behind it."""
    claim = verdicts.register.claims[i]
    cells = []
    for at, model in enumerate(verdicts.models):
        one = verdicts.content["claims"][i]["verdicts"][model.name]
        kind, link = _KINDS.get(one["verdict"], "not"), links.get((at, claim.figure), "")
        cells.append({**one, "model": model.name, "kind": kind, "link": link})
    register = verdicts.register
    made = {"key": claim.key, "title": claim.title, "published": claim.published, "exploratory": claim.exploratory}
    return {**made, "says": said(claim, register), "about": rows(claim, register).items(), "cells": cells}


def _sections(register: Register, results: Seq[Results]) -> tuple[list[Section], dict[tuple[int, str], str]]:
    """Figures of every model, and the address of each: by the model's number and the claim's ``figure``."""
    sections: list[Section] = []
    links: dict[tuple[int, str], str] = {}
    for at, some in enumerate(results):
        for claim in register.claims:
            result = _shown(claim, some)
            if not claim.figure or (at, claim.figure) in links or result is None:
                continue
            kind, _, quantity = claim.figure.partition(":")
            try:
                section = drawn_section(getattr(render, kind), result, _options(kind, quantity, result))
            except OptionError:  # a model without what it shows
                continue
            sections.append(section)
            links[at, claim.figure] = f"section-{len(sections)}"
    return sections, links


def _shown(claim: Claim, results: Results) -> Result | None:
    """The result of the claim's own run, if it has what the figure draws, else of any that has."""
    needs = _NEEDS.get(claim.figure.partition(":")[0], "received_attention")
    there = [name for name, result in results.items() if needs in result.datasets]
    return results[claim.needs if claim.needs in there else there[0]] if there else None


def _options(kind: str, quantity: str, result: Result) -> dict[str, Any]:
    """Which condition, layer and quantity a figure shows."""
    condition = next(iter(result.conditions[1:]), "baseline")
    options: dict[str, Any] = {} if kind in ("activation_metrics", "update_histogram") else {"condition": condition}
    options |= {"layer": 0} if kind in ("received_attention", "agreement", "activation_metrics") else {}
    options |= heads_options(result, None, 3) if kind == "received_attention" else {}
    return {"quantity": quantity} if quantity else options
