"""Writes a self-contained page of results: the main change, a map of all heads, figures and provenance."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mechattn.axes import BASELINE
from mechattn.errors import MemoryOptionError, OptionError
from mechattn.pages.embedded import packed_script, page_script, template
from mechattn.pages.figure_sections import Section, citation, drawn_section, prompt_section
from mechattn.pages.first_screen import (
    VERDICT_COLUMNS,
    ShownModel,
    changes,
    explained,
    flat,
    picture,
    sentence,
    strip_words,
    verdict_rows,
    verdict_sentences,
)  # fmt: skip
from mechattn.pages.map_data import check_memory, instrument
from mechattn.render.declared import listed_or_chosen
from mechattn.render.received_figures import received_attention
from mechattn.render.view import Script, View, check_page_place, save_page
from mechattn.render.words import model_caption
from mechattn.results.result import Result

Figures = Seq[tuple[Callable, Mapping[str, Any]]]


@dataclass(frozen=True)
class About:
    """What a page says of itself.

    Args:
        title: The title.
        subtitle: What is measured, in one line.
        command: The command that made it.
        lead: A template, and what fills it, in place of the first screen.
    """

    title: str
    subtitle: str
    command: str = ""
    lead: tuple[str, Mapping[str, Any]] | None = None


def page(
    result: Result,
    path: str | Path,
    layer: int = 0,
    heads: Seq[int] | None = None,
    force: bool = False,
    *,
    choose: int = 3,
) -> Path:
    """Write a result's page; see :meth:`mechattn.Result.page`."""
    check_page_place(path, force)
    names, which = result.conditions[1:] or [BASELINE], heads_options(result, heads, choose)
    options = [{"layer": layer, "condition": name} | which for name in names]
    figures = [(received_attention, some) for some in options]
    return results_page([result], path, figures, force=force)


def heads_options(result: Result, heads: Seq[int] | None, choose: int) -> dict[str, Any]:
    """The options of ``received_attention`` that select heads; the first heads if the data cannot choose."""
    listed, number = listed_or_chosen(heads, None if heads is not None else choose)
    if number is None:
        return {"heads": listed}
    if "received_per_prompt" in result.datasets.get("received_attention", {}):
        return {"choose": number}
    return {"heads": list(range(min(number, int(result.provenance["model"]["heads"]))))}


def browse(result: Result, maps: Result | None = None) -> View:
    """Show the map of all heads as a view in a notebook.

    Args:
        result: A result.
        maps: A result with attention maps of a few prompts; ``result`` itself by default.
    """
    about = About(f"mechattn: {model_caption(result)}", _subtitle([result]))
    parts = _parts(about, [ShownModel(result, maps)], [])
    body = _environment().get_template("main.html.j2").render(parts)
    scripts = f"""<script type="text/plain" data-packed="data">{parts["data"]}</script>
<script type="module">{parts["script"]}</script>"""
    return View(f"<style>{parts['style']}</style>{body}{scripts}", 900, None)


def write_page(
    path: str | Path, about: About, models: Seq[ShownModel], sections: Seq[Section], force: bool = False
) -> Path:
    """Write one HTML file that makes no network requests; its content security policy forbids them."""
    parts = _parts(about, models, sections)
    if about.lead is not None:
        parts["lead"] = _environment().get_template(about.lead[0]).render(about.lead[1])
    return save_page(path, _environment().get_template("page.html.j2").render(parts), force)


def _environment() -> Any:
    from jinja2 import Environment, PackageLoader

    return Environment(loader=PackageLoader("mechattn.pages"), autoescape=True, trim_blocks=True, lstrip_blocks=True)


def _parts(about: About, models: Seq[ShownModel], sections: Seq[Section]) -> dict[str, Any]:
    """The values for the templates."""
    from mechattn import __version__

    results = [shown.result for shown in models]
    rows = changes(models)
    needed: dict[Script, bool] = {
        "plotly": any(section.figure or section.script == "plotly" for section in sections),
        "circuitsvis": any(section.script == "circuitsvis" for section in sections),
    }
    return {
        "title": about.title,
        "subtitle": about.subtitle,
        "version": __version__,
        "style": template("page.css"),
        "script": page_script(),
        "packed_scripts": [(name, packed_script(name)) for name, wanted in needed.items() if wanted],
        "data": instrument(models),
        "answer": sentence(rows),
        "picture": picture(rows),
        "verdicts": [words for shown in models for words in verdict_sentences(shown)],
        "verdict_columns": VERDICT_COLUMNS,
        "verdict_rows": [row for shown in models for row in verdict_rows(shown)],
        "strips": [strip_words(result) for result in results],
        "sections": sections,
        "citation": citation(about.title, results),
        "provenance": [row for result in results for row in flat(result.provenance)]
        + [("command", about.command)] * bool(about.command),
    }


def results_page(
    results: Seq[Result],
    path: str | Path,
    figures: Figures,
    command: str = "",
    missing: list[str] | None = None,
    force: bool = False,
) -> Path:
    """Write a page for several results, with each figure once per result, or once if it compares models."""
    for result in results:
        check_memory(result)
    of_many = [one for one in figures if "results" in inspect.signature(one[0]).parameters]  # models side by side
    of_one = [one for one in figures if one not in of_many]
    sections: list[Section] = []
    for result in results:
        sections.append(prompt_section(result))
        sections += _drawn(of_one, result, command, missing)
    sections += _drawn(of_many, list(results), command, missing)
    title = f"mechattn: {', '.join(model_caption(result) for result in results)}"
    models = [ShownModel(result, start=_first_shown(figures)) for result in results]
    return write_page(path, About(title, _subtitle(results), command), models, sections, force)


def _first_shown(figures: Figures) -> tuple[int, int] | None:
    """The layer and head that the first figure of received attention shows; head 0 if the data choose."""
    for draw, options in figures:
        if draw is received_attention and "layer" in options:
            heads = options.get("heads")
            return int(options["layer"]), int(heads[0]) if isinstance(heads, list) and heads else 0
    return None


def _subtitle(results: Seq[Result]) -> str:
    """The subtitle of a page."""
    counts = {result["sequences"].sizes["prompt"] for result in results}
    compared = any(len(result.conditions) > 1 for result in results)
    of = "Attention with and without inserted tokens" if compared else "Attention"
    return f"{of}, {', '.join(map(str, counts))} prompts."


def _drawn(figures: Figures, of: Result | Seq[Result], command: str, missing: list[str] | None) -> Iterator[Section]:
    for draw, options in figures:
        try:
            with explained([of] if isinstance(of, Result) else of):
                made = drawn_section(draw, of, options, command)
            yield made
        except MemoryOptionError:
            raise
        except OptionError as error:
            if missing is None:
                raise
            missing.append(f"{draw.__name__}: {error}")
