"""One self-contained page from results: the verdict, one prompt, the figures, the provenance; it opens offline."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from mechattn.axes import BASELINE
from mechattn.errors import OptionError
from mechattn.pages.sections import Section, drawn_section, prompt_section
from mechattn.pages.verdicts import VERDICT_COLUMNS, explained, flat, strip_words, verdict_rows, verdicts
from mechattn.render.html import check_page_place, save_page
from mechattn.render.received_figures import listed_or_chosen, received_attention
from mechattn.render.theme import DARK, faint, model_caption
from mechattn.render.view import in_script, view_script
from mechattn.results.result import Result


def page(
    result: Result,
    path: str | Path,
    layer: int = 0,
    heads: Seq[int] | None = None,
    force: bool = False,
    *,
    choose: int = 3,
) -> Path:
    """Write a page that opens offline: the verdict, received attention under each condition, the provenance.

    Args:
        result: A result with received attention.
        path: The HTML file.
        layer: The layer that is drawn, from 0.
        heads: The heads, from 0; without them some are chosen.
        force: Replace a file that mechattn did not write.
        choose: How many to choose by the largest change on one half of the prompts, shown on the other, where the run
            has kept ``positions="prompts"``; else the first so many.

    Raises:
        MechattnError: The figures cannot be drawn, or the file cannot be written, or is somebody's own.
    """
    check_page_place(path, force)
    names, which = result.conditions[1:] or [BASELINE], heads_options(result, heads, choose)
    options = [{"layer": layer, "condition": name} | which for name in names]
    return results_page([result], path, [(received_attention, some) for some in options], force=force)


def heads_options(result: Result, heads: Seq[int] | int | None, choose: int) -> dict[str, Any]:
    """The options of ``received_attention`` that say which heads: the first where there is nothing to choose by."""
    listed, number = listed_or_chosen(heads, None if heads is not None else choose)
    if number is None:
        return {"heads": listed}
    if "received_per_prompt" in result.datasets.get("received_attention", {}):
        return {"choose": number}
    return {"heads": list(range(min(number, int(result.provenance["model"]["heads"]))))}


def write_page(
    path: str | Path,
    title: str,
    subtitle: str,
    results: Seq[Result],
    sections: Seq[Section],
    command: str = "",
    force: bool = False,
) -> Path:
    """Write one HTML file that makes no request to anywhere; its content policy forbids any.

    Raises:
        OutputError: It cannot be written, or would replace a file that mechattn did not write (not with ``force``).
    """
    from jinja2 import Environment, PackageLoader

    from mechattn import __version__

    environment = Environment(
        loader=PackageLoader("mechattn.pages"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    text = environment.get_template("page.html.j2").render(
        title=title,
        subtitle=subtitle,
        version=__version__,
        style=_template("page.css"),
        script=_template("page.js").replace("/*COLOURS*/ {}", in_script(json.dumps(_dark()))),
        verdicts=[words for r in results for words in verdicts(r)[:1]] if len(results) == 1 else [],
        more_verdicts=[words for r in results for words in verdicts(r)[1:]] if len(results) == 1 else [],
        verdict_columns=VERDICT_COLUMNS,
        verdict_rows=[row for r in results for row in verdict_rows(r)] if len(results) > 1 else [],
        strips=[strip_words(result) for result in results],
        sections=sections,
        provenance=[row for result in results for row in flat(result.provenance)]
        + [("command", command)] * bool(command),
        plotly=view_script("plotly") if any(s.figure or s.script == "plotly" for s in sections) else "",
        view_script=view_script() if any(s.script == "circuitsvis" for s in sections) else "",
    )
    return save_page(path, text, force)


def _template(name: str) -> str:
    return files("mechattn.pages").joinpath("templates", name).read_text(encoding="utf-8")


def _dark() -> dict[str, str]:
    """Each colour of the figures and what stands for it on a dark ground, faint ones too."""
    faints = {faint(a).rsplit(",", 1)[0]: faint(b).rsplit(",", 1)[0] for a, b in DARK.items() if len(a) == len(b) == 7}
    return DARK | faints


def results_page(
    results: Seq[Result],
    path: str | Path,
    figures: Seq[tuple[Callable, Mapping[str, Any]]],
    command: str = "",
    missing: list[str] | None = None,
    force: bool = False,
) -> Path:
    """A page of some results: each figure for each of them, or once where it shows several models side by side.

    Args:
        results: One result a model.
        path: The HTML file.
        figures: Functions of ``mechattn.render``, and their options.
        command: What was typed.
        missing: Takes a sentence for each figure that cannot be drawn; without it such a figure is an error.
        force: Replace a file that mechattn did not write.
    """
    of_one = [one for one in figures if not _of_many(one[0])]
    of_many = [one for one in figures if _of_many(one[0])]
    sections: list[Section] = []
    for result in results:
        sections.append(prompt_section(result, contents=model_caption(result)))
        sections += _drawn(of_one, result, command, missing)
    sections += [replace(made, contents=made.title) for made in _drawn(of_many, list(results), command, missing)]
    counts = {result["sequences"].sizes["prompt"] for result in results}
    compared = any(len(result.conditions) > 1 for result in results)
    of = "Attention with and without inserted tokens" if compared else "Attention"
    subtitle = f"{of}, {', '.join(map(str, counts))} prompts."
    title = f"mechattn: {', '.join(model_caption(result) for result in results)}"
    return write_page(path, title, subtitle, results, sections, command, force)


def _drawn(
    figures: Seq[tuple[Callable, Mapping[str, Any]]],
    of: Result | Seq[Result],
    command: str,
    missing: list[str] | None,
) -> Iterator[Section]:
    for draw, options in figures:
        try:
            with explained([of] if isinstance(of, Result) else of):
                made = drawn_section(draw, of, options, command)
            yield made
        except OptionError as error:
            if missing is None:
                raise
            missing.append(f"{draw.__name__}: {error}")


def _of_many(draw: Callable) -> bool:
    """Whether a figure shows several models side by side."""
    return "results" in inspect.signature(draw).parameters
