"""Writes a self-contained page of results: the main change, a map of all heads, sections of figures, provenance."""

from __future__ import annotations

import html
import inspect
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.axes import BASELINE, SEGMENTS
from mechattn.contrast.contrast import Contrast
from mechattn.errors import MemoryOptionError, OptionError
from mechattn.markup import visible
from mechattn.pages.embedded import packed_script, page_script, template
from mechattn.pages.first_screen import (
    VERDICT_COLUMNS,
    ShownModel,
    changes,
    explained,
    flat,
    layer_sentence,
    more_of_the_answer,
    picture,
    premise,
    sentence,
    strip_words,
    time_words,
    verdict_rows,
    verdict_sentences,
)  # fmt: skip
from mechattn.pages.lead_figures import CHANGING_MOST, Shown, lead_figures
from mechattn.pages.page_data import check_memory, instrument, named_data
from mechattn.pages.plain_table import plain_tables
from mechattn.render.attention_figures import received_attention
from mechattn.render.budget_figures import attention_budget, budget_rows
from mechattn.render.figure_declaration import listed_or_chosen
from mechattn.render.html_views import Script, View, check_page_place, in_script, save_page
from mechattn.render.words import choice_words, model_caption, said
from mechattn.results.result import Result, alike_words

if TYPE_CHECKING:
    from mechattn.pages.widget import Browser

Figures = Seq[tuple[Callable, Mapping[str, Any]]]
DOTTED_MEANS = {
    "dilution": "what the original tokens would receive if they kept their attention to each other (dilution; the same "
    "share for all tokens of a segment)",
    "uniform": "what uniform attention would give",
}
# The page of docs/concepts on each analysis.
CONCEPTS = {
    "received-attention": ("received_attention", "attention_map"),
    "attention-focus": ("attention_focus", "score_decomposition"),
    "attention-sinks": ("attention_sinks",),
    "affine-shift": ("affine_shift",),
    "segment-flow": ("segment_flow",),
    "attention-budget": ("attention_budget",),
    "head-updates": (
        "head_updates",
        "top_target_updates",
        "block_updates",
        "direct_logits",
        "segment_logits",
    ),
    "mlp-activations": ("mlp_activations",),
}


@dataclass(frozen=True)
class Section:
    """A part of a page: its heading, how to read it, its main number in a sentence, and a figure, a view or tokens."""

    title: str
    note: str = ""
    says: str = ""
    figure: str = ""  # as JSON that is safe in a script element
    height: int = 0
    view: str = ""  # HTML
    script: str = ""  # the library that the view needs
    tokens: Seq[tuple[str, str]] = ()  # their texts and segments
    leads: bool = False  # stands open before the map
    made: Seq[tuple[str, str]] = ()
    citation: str = ""
    rows_title: str = ""  # of a folded table
    columns: Seq[str] = ()
    rows: Seq[Seq[str]] = ()

    @property
    def names(self) -> list[str]:
        """The segments that occur, for the legend."""
        present = {name for _, name in self.tokens}
        return [name for name in SEGMENTS if name in present]


@dataclass(frozen=True)
class About:
    """What a page says of itself, and a template with what fills it, in place of the first screen."""

    title: str
    subtitle: str
    command: str = ""
    lead: tuple[str, Mapping[str, Any]] | None = None


def page(
    result: Result,
    path: str | Path,
    layer: int | None = None,
    heads: Seq[int] | None = None,
    force: bool = False,
    *,
    top: int = 3,
) -> Path:
    """Write a result's page; see :meth:`mechattn.Result.page`."""
    check_page_place(path, force)
    return results_page([result], path, [], force=force, shown=Shown(layer, heads, top))


def heads_options(result: Result, heads: Seq[int] | None, top: int) -> dict[str, Any]:
    """The options of ``received_attention`` that select heads; the first heads if the data cannot choose."""
    listed, number = listed_or_chosen(heads, None if heads is not None else top)
    if number is None:
        return {"heads": listed}
    if "received_per_prompt" in result.datasets.get("received_attention", {}):
        return {"top": number}
    return {
        "heads": range(min(number, int(result.provenance["model"]["heads"])))
    }  # a list is what a reader named


def browse(result: Result, maps: Result | None = None, *, live: bool = True) -> View | Browser:
    """Show the map of all heads in a notebook: a widget where the extra ``widget`` is installed, else a view.

    The widget's ``selected`` is the head clicked, such as "L1H2"; setting it selects the head. ``table()`` returns its
    rows of ``result.compare``, ``pattern(model)`` its attention on the prompt whose pattern was clicked.

    Args:
        result: A result.
        maps: A result with attention maps of a few prompts; ``result`` itself by default.
        live: Whether to return the widget; a view also shows on a site, where no Python listens.
    """
    about = About(f"mechattn: {model_caption(result)}", _subtitle([result]))
    parts = _parts(about, [ShownModel(result, maps)], [])
    body = _environment().get_template("main.html.j2").render(parts)
    scripts = f"""<script type="text/plain" data-packed="data">{parts["data"]}</script>
<script type="module">{parts["script"]}</script>"""
    view = View(f"<style>{parts['style']}</style>{body}{scripts}", 900, None)
    try:
        from mechattn.pages.widget import Browser
    except ModuleNotFoundError:
        return view
    return Browser(view, result, maps) if live else view


def write_page(
    path: str | Path,
    about: About,
    models: Seq[ShownModel],
    sections: Seq[Section],
    force: bool = False,
) -> Path:
    """Write one HTML file that makes no network requests; its content security policy forbids them."""
    parts = _parts(about, models, sections)
    if about.lead is not None:
        parts["lead"] = _environment().get_template(about.lead[0]).render(about.lead[1])
    return save_page(path, _environment().get_template("page.html.j2").render(parts), force)


def _environment() -> Any:
    from jinja2 import Environment, PackageLoader

    return Environment(
        loader=PackageLoader("mechattn.pages"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _parts(about: About, models: Seq[ShownModel], sections: Seq[Section]) -> dict[str, Any]:
    """The values for the templates."""
    from mechattn import __version__

    results = [shown.result for shown in models]
    rows, data = changes(models), named_data(models)
    answer = [sentence(rows, layer_sentence(models)), *more_of_the_answer(models)]
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
        "packed_scripts": [
            (name, packed_script(name)) for name, wanted in needed.items() if wanted
        ],
        "data": instrument(data),
        "tables": plain_tables(data),
        "answer": " ".join(filter(None, answer)),
        "picture_open": not any("attention_budget" in result.datasets for result in results),
        "picture": picture(rows),
        "premise": premise(models),
        "verdicts": [words for shown in models for words in verdict_sentences(shown)],
        "verdict_columns": VERDICT_COLUMNS,
        "verdict_rows": [row for shown in models for row in verdict_rows(shown)],
        "strips": [strip_words(result) for result in results],
        "lead_sections": [section for section in sections if section.leads],
        "sections": [section for section in sections if not section.leads],
        "concepts": concepts(results),
        "citation": citation(about.title, results),
        "provenance": [row for result in results for row in flat(result.provenance)]
        + [("command", about.command)] * bool(about.command),
    }


def concepts(results: Seq[Result]) -> list[str]:
    """The files of the docs that say what was measured and how it was compared."""
    measured = {name for result in results for name in result.datasets}
    names = [name for name, analyses in CONCEPTS.items() if measured.intersection(analyses)]
    return [f"docs/concepts/{name}.md" for name in [*names, "comparisons"]]


def results_page(
    results: Seq[Result],
    path: str | Path,
    figures: Figures,
    command: str = "",
    missing: list[str] | None = None,
    force: bool = False,
    shown: Shown = CHANGING_MOST,
) -> Path:
    """Write a page for several results, with each figure once per result, or once if it compares models."""
    for result in results:
        check_memory(result)
    compares_models = [
        figure for figure in figures if "results" in inspect.signature(figure[0]).parameters
    ]
    of_one_model = [figure for figure in figures if figure not in compares_models]
    sections: list[Section] = []
    for result in results:
        sections += lead_sections(result, shown, command)
    for result in results:
        sections.append(prompt_section(result))
        sections += _drawn(of_one_model, result, command, missing)
    sections += _drawn(compares_models, list(results), command, missing)
    title = f"mechattn: {', '.join(model_caption(result) for result in results)}"
    models = [ShownModel(result, start=shown.named_head) for result in results]
    return write_page(path, About(title, _subtitle(results), command), models, sections, force)


def lead_sections(result: Result, shown: Shown, command: str = "") -> list[Section]:
    """The sections that stand open before the map."""
    with explained([result]):
        drawings = lead_figures(result, shown)
        sections = [drawn_section(draw, result, options, command) for draw, options in drawings]
    return [replace(section, leads=True) for section in sections]


def _subtitle(results: Seq[Result]) -> str:
    """The subtitle of a page."""
    counts = {result["sequences"].sizes["prompt"] for result in results}
    compared = any(len(result.conditions) > 1 for result in results)
    of = "Attention with and without inserted tokens" if compared else "Attention"
    alike = dict.fromkeys(filter(None, map(alike_words, results)))
    return " ".join([f"{of}, {', '.join(map(str, counts))} prompts.", *alike])


def _drawn(
    figures: Figures, of: Result | Seq[Result], command: str, missing: list[str] | None
) -> Iterator[Section]:
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


def prompt_section(result: Result, condition: str | None = None) -> Section:
    """The first prompt of a result as the model reads it, with each segment marked."""
    condition = result.shown_condition(condition)
    title = f"{model_caption(result)}: one prompt as the model reads it, condition “{condition}”"
    first = result["sequences"].sel(condition=condition)
    coded = zip(
        first.first_prompt_text.values, first.segment_index.isel(prompt=0).values, strict=True
    )
    tokens = [(visible(str(text)), SEGMENTS[code]) for text, code in coded if code >= 0]
    return Section(title, "The first of the prompts.", tokens=tokens)


def drawn_section(
    draw: Callable, results: Result | Seq[Result], options: Mapping[str, Any], command: str = ""
) -> Section:
    """Turn a figure into a section, described by the text in the figure itself."""
    figure = draw(results, **options)
    of = [results] if isinstance(results, Result) else list(results)
    heading, _, under = figure.layout.title.text.partition("<br><sup>")
    title = html.unescape(heading.replace("<br>", " "))
    figure.update_layout(title_text=under.removesuffix("</sup>"), title_font_size=13)
    if draw is received_attention:
        how = "heads chosen by the data" if options.get("heads") is None else "heads chosen by hand"
        shown, layers = (
            of[0].shown_condition(options.get("condition")),
            np.atleast_1d(options["layer"]).tolist(),
        )
        title += f", layer {', '.join(map(str, layers))}, {how}, condition “{shown}”"
        notes = [_received_note(of[0], shown)]
        top = options.get("top")
        if isinstance(top, int) and shown != BASELINE:
            notes += [choice_words(of[0], shown, layer, top) for layer in layers]
        note = " ".join(filter(None, notes))
    else:
        note = (inspect.getdoc(draw) or "").split("\n\nArgs:")[0]
    table: dict[str, Any] = {}
    if draw is attention_budget:
        columns, rows = budget_rows(of[0], options.get("conditions"))
        table = {"rows_title": "As a table: who pays, and why", "columns": columns, "rows": rows}
    return Section(
        title,
        note,
        **table,
        says=said(figure),
        figure=in_script(figure.to_json()),
        height=int(figure.layout.height or 450),
        made=[row for result in of for row in _made_rows(result, command)],
        citation=citation(title, of),
    )


def _received_note(result: Result, condition: str) -> str:
    """How to read lines of received attention."""
    options = result.provenance["analyses"]["received_attention"]
    query_words = {"original": "the original tokens", "all": "all tokens"}
    queries = query_words.get(options["queries"], f"the {options['queries']}")
    self_too = " (its own position counts)" if options["include_self"] else ""
    sentences = [
        f"Received attention of a key is the mean attention that {queries} after it pay to it{self_too}."
    ]
    if condition == BASELINE:
        sentences += [
            "Blue: the unchanged prompts; dotted: uniform attention.",
            "A key's value falls with its position by definition, as fewer tokens come after it; compare with uniform "
            "attention.",
        ]
    else:
        null_kind = Contrast(result, condition).null_used
        sentences += [
            "Blue: the unchanged prompt; orange: with the inserted tokens. Top row: the original tokens, aligned; "
            "bottom row: the whole sequence with the inserted span shaded.",
            "Part of a fall is there by definition, as attention is positive and sums to 1; compare with the dotted "
            f"line, {DOTTED_MEANS[null_kind]}.",
        ]
    sentences.append(
        "Bands are pointwise (not simultaneous) 95 % intervals over prompts; keys that too few prompts have are hidden."
    )
    return " ".join(sentences)


def view_section(view: View, title: str, note: str) -> Section:
    """Turn a view into a section."""
    return Section(title, note, view=view.body, script=view.script or "")


def _made_rows(result: Result, command: str = "") -> list[tuple[str, str]]:
    """How the numbers of a figure were made."""
    about, model = result.provenance, result.provenance["model"]
    rows = [("model", model_caption(result)), ("architecture", model["architecture"])]
    rows += [
        (name, str(model[name]))
        for name in ("revision", "weights", "dtype", "verified")
        if model.get(name) is not None
    ]
    rows += [("prompts", f"{about['prompts']['count']}, hash {about['prompts']['hash']}")]
    rows += [(f"condition {name}", made["written"]) for name, made in about["conditions"].items()]
    rows += [
        ("seed", str(about["seed"])),
        ("engine", about["engine"]),
        ("made", time_words(result)),
    ]
    rows += [
        ("versions", ", ".join(f"{name} {version}" for name, version in about["versions"].items()))
    ]
    return rows + [("command", command)] * bool(command)


def citation(title: str, results: Seq[Result]) -> str:
    """How to cite a figure: a caption and a BibTeX entry."""
    about = results[0].provenance
    version, year = about["versions"]["mechattn"], time_words(results[0])[:4]
    of = "; ".join(
        f"{model_caption(r)}, {r.provenance['prompts']['count']} prompts, seed {r.provenance['seed']}"
        for r in results
    )
    return (
        f"{title}. {of}. Made with mechattn {version}, transformer-lens {about['versions']['transformer-lens']}.\n\n"
        f"@software{{mechattn, title = {{mechattn: what attention does, measured on hooked transformers}}, "
        f"author = {{{{The mechattn developers}}}}, version = {{{version}}}, year = {{{year}}}}}"
    )
