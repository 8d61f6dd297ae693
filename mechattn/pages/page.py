"""Writes a self-contained page: the main change, a map of all heads, figures, provenance."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.axes import BASELINE, SEGMENTS
from mechattn.contrast.contrast import Contrast
from mechattn.errors import MemoryOptionError, OptionError
from mechattn.markup import visible
from mechattn.pages.embedded import packed_plotly, page_script, template
from mechattn.pages.first_screen import (
    VERDICT_COLUMNS,
    ShownModel,
    changes,
    explained,
    flat,
    layer_sentence,
    more_of_the_answer,
    own_attention_sentences,
    picture,
    sentence,
    strip_words,
    time_words,
    verdict_rows,
    verdict_sentences,
)  # fmt: skip
from mechattn.pages.lead_figures import CHANGING_MOST, Shown, lead_figures
from mechattn.pages.page_data import check_memory, instrument, named_data
from mechattn.pages.plain_table import plain_tables
from mechattn.pages.subtitle import subtitle
from mechattn.render.attention_figures import received_attention
from mechattn.render.budget_figures import attention_budget, budget_rows
from mechattn.render.draw import take_heading
from mechattn.render.figure_declaration import listed_or_chosen
from mechattn.render.html_views import View, check_page_place, in_script, save_page
from mechattn.render.words import choice_words, model_caption, said
from mechattn.results.result import Result

if TYPE_CHECKING:
    from mechattn.pages.widget import Browser

Figures = Sequence[tuple[Callable, Mapping[str, Any]]]
DOTTED_MEANS = {
    "dilution": (
        "what the original tokens would receive if they kept their attention to each other "
        "(dilution; the same share for all tokens of a segment)"
    ),
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
QUERY_WORDS = {"original": "the original tokens", "all": "all tokens"}


@dataclass(frozen=True)
class Section:
    """A part of a page: its heading, how to read it, its main number, and a figure or tokens."""

    title: str
    note: str = ""
    says: str = ""
    figure: str = ""  # as JSON that is safe in a script element
    height: int = 0
    tokens: Sequence[tuple[str, str]] = ()  # their texts and segments
    leads: bool = False  # stands open before the map
    made: Sequence[tuple[str, str]] = ()
    citation: str = ""
    rows_title: str = ""  # of a folded table
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()

    @property
    def names(self) -> list[str]:
        """The segments that occur, for the legend."""
        segments = {segment for _, segment in self.tokens}
        return [segment for segment in SEGMENTS if segment in segments]


@dataclass(frozen=True)
class About:
    """What a page says of itself, and a template with what fills it, in place of the first
    screen."""

    title: str
    subtitle: str
    command: str = ""
    lead: tuple[str, Mapping[str, Any]] | None = None


def page(
    result: Result,
    path: str | Path,
    layer: int | None = None,
    heads: Sequence[int] | None = None,
    force: bool = False,
    *,
    top: int = 3,
) -> Path:
    """Write a result's page; see :meth:`mechattn.Result.page`."""
    check_page_place(path, force)
    return results_page([result], path, [], force=force, shown=Shown(layer, heads, top))


def heads_options(result: Result, heads: Sequence[int] | None, top: int) -> dict[str, Any]:
    """The options of ``received_attention`` that select heads; the first, if no prompts were
    kept."""
    if heads is not None:
        listed, _ = listed_or_chosen(heads, None)
        return {"heads": listed}
    listed_or_chosen(None, top)
    if "received_per_prompt" in result.datasets.get("received_attention", {}):
        return {"top": top}
    count = min(top, int(result.provenance["model"]["heads"]))
    return {"heads": range(count)}  # a list is what a reader named


def browse(result: Result, maps: Result | None = None, *, live: bool = True) -> View | Browser:
    """Show the map of all heads in a notebook: a widget with the extra ``widget``, else a view.

    The widget's ``selected`` is the head clicked, such as "L1H2"; setting it selects the head.
    ``table()`` returns its rows of ``result.compare``, ``pattern(model)`` its attention on the
    prompt whose pattern was clicked.

    Args:
        result: A result.
        maps: A result with attention maps of a few prompts; ``result`` itself by default.
        live: Whether to return the widget; a view also shows on a site, where no Python listens.
    """
    about = About(f"mechattn: {model_caption(result)}", subtitle([result]))
    values = _template_values(about, [ShownModel(result, maps)], [])
    body = _environment().get_template("main.html.j2").render(values)
    style = f"<style>{values['style']}</style>"
    scripts = f"""<script type="text/plain" data-packed="data">{values["data"]}</script>
<script type="module">{values["script"]}</script>"""
    view = View(style + body + scripts, height=900, script=None)

    if not live:
        return view
    try:
        from mechattn.pages.widget import Browser
    except ModuleNotFoundError:
        return view
    return Browser(view, result, maps)


def write_page(
    path: str | Path,
    about: About,
    models: Sequence[ShownModel],
    sections: Sequence[Section],
    force: bool = False,
) -> Path:
    """Write one HTML file that makes no network requests; its content security policy forbids
    them."""
    environment = _environment()
    values = _template_values(about, models, sections)
    if about.lead is not None:
        lead_template, lead_values = about.lead
        values["lead"] = environment.get_template(lead_template).render(lead_values)
    text = environment.get_template("page.html.j2").render(values)
    return save_page(path, text, force)


def _environment() -> Any:
    from jinja2 import Environment, PackageLoader

    return Environment(
        loader=PackageLoader("mechattn.pages"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _template_values(
    about: About, models: Sequence[ShownModel], sections: Sequence[Section]
) -> dict[str, Any]:
    """The values for the templates."""
    from mechattn import __version__

    results = [model.result for model in models]
    rows = changes(models)
    data = named_data(models)
    answer = own_attention_sentences(models)
    received = sentence(rows, layer_sentence(models))
    if answer and received:
        received = f"Received attention is another measure. {received}"
    answer += [*more_of_the_answer(models), received]

    provenance_rows = [row for result in results for row in flat(result.provenance)]
    if about.command:
        provenance_rows.append(("command", about.command))

    return {
        "title": about.title,
        "subtitle": about.subtitle,
        "version": __version__,
        "style": template("page.css"),
        "script": page_script(),
        "plotly": packed_plotly() if any(section.figure for section in sections) else "",
        "data": instrument(data),
        "tables": plain_tables(data),
        "answer": list(filter(None, answer)),
        "picture_open": not any("attention_budget" in result.datasets for result in results),
        "picture": picture(rows),
        "verdicts": [words for model in models for words in verdict_sentences(model)],
        "verdict_columns": VERDICT_COLUMNS,
        "verdict_rows": [row for model in models for row in verdict_rows(model)],
        "strips": [strip_words(result) for result in results],
        "lead_sections": [section for section in sections if section.leads],
        "sections": [section for section in sections if not section.leads],
        "concepts": concepts(results),
        "citation": citation(about.title, results),
        "provenance": provenance_rows,
    }


def concepts(results: Sequence[Result]) -> list[str]:
    """The files of the docs that say what was measured and how it was compared."""
    measured = {name for result in results for name in result.datasets}
    names = [name for name, analyses in CONCEPTS.items() if measured.intersection(analyses)]
    return [f"docs/concepts/{name}.md" for name in [*names, "comparisons"]]


def results_page(
    results: Sequence[Result],
    path: str | Path,
    figures: Figures,
    command: str = "",
    missing: list[str] | None = None,
    force: bool = False,
    shown: Shown = CHANGING_MOST,
) -> Path:
    """Write a page with each figure once per result, or once if the figure compares models."""
    for result in results:
        check_memory(result)

    figures_of_models: list[tuple[Callable, Mapping[str, Any]]] = []
    figures_of_result: list[tuple[Callable, Mapping[str, Any]]] = []
    for draw, options in figures:
        compares_models = "results" in inspect.signature(draw).parameters
        target = figures_of_models if compares_models else figures_of_result
        target.append((draw, options))

    sections: list[Section] = []
    for result in results:
        sections += lead_sections(result, shown, command)
    for result in results:
        sections.append(prompt_section(result))
        sections += _drawn_sections(figures_of_result, result, command, missing)
    sections += _drawn_sections(figures_of_models, list(results), command, missing)

    title = f"mechattn: {', '.join(map(model_caption, results))}"
    about = About(title, subtitle(results), command)
    models = [ShownModel(result, start=shown.named_head) for result in results]
    return write_page(path, about, models, sections, force)


def lead_sections(result: Result, shown: Shown, command: str = "") -> list[Section]:
    """The sections that stand open before the map."""
    with explained([result]):
        drawings = lead_figures(result, shown)
        sections = [drawn_section(draw, result, options, command) for draw, options in drawings]
    return [replace(section, leads=True) for section in sections]


def _drawn_sections(
    figures: Figures, results: Result | list[Result], command: str, missing: list[str] | None
) -> list[Section]:
    """The sections of figures; those that lack something are named in ``missing``, if it is a
    list."""
    sections = []
    for draw, options in figures:
        try:
            with explained(results if isinstance(results, list) else [results]):
                section = drawn_section(draw, results, options, command)
        except MemoryOptionError:
            raise
        except OptionError as error:
            if missing is None:
                raise
            missing.append(f"{draw.__name__}: {error}")
        else:
            sections.append(section)
    return sections


def prompt_section(result: Result, condition: str | None = None) -> Section:
    """The first prompt of a result as the model reads it, with each segment marked."""
    condition = result.shown_condition(condition)
    title = f"{model_caption(result)}: one prompt as the model reads it, condition “{condition}”"
    sequences = result["sequences"].sel(condition=condition)
    texts = sequences.first_prompt_text.values
    segment_indices = sequences.segment_index.isel(prompt=0).values
    tokens = [
        (visible(str(text)), SEGMENTS[index])
        for text, index in zip(texts, segment_indices, strict=True)
        if index >= 0  # below, beyond the end of the prompt
    ]
    return Section(title, "The first of the prompts.", tokens=tokens)


def drawn_section(
    draw: Callable,
    results: Result | Sequence[Result],
    options: Mapping[str, Any],
    command: str = "",
) -> Section:
    """Turn a figure into a section, described by the text in the figure itself."""
    figure = draw(results, **options)
    result_list = [results] if isinstance(results, Result) else list(results)
    title = take_heading(figure)
    note = (inspect.getdoc(draw) or "").split("\n\nArgs:")[0]
    if draw is received_attention:
        (result,) = result_list
        title += _received_details(result, options)
        note = _received_note(result, options)

    table: dict[str, Any] = {}
    if draw is attention_budget:
        columns, rows = budget_rows(result_list[0], options.get("conditions"))
        table = {"rows_title": "As a table: who pays, and why", "columns": columns, "rows": rows}

    return Section(
        title,
        note,
        **table,
        says=said(figure),
        figure=in_script(figure.to_json()),
        height=int(figure.layout.height or 450),
        made=[row for result in result_list for row in _provenance_rows(result, command)],
        citation=citation(title, result_list),
    )


def _received_details(result: Result, options: Mapping[str, Any]) -> str:
    """What the title of a figure of received attention adds: layers, choice of heads, condition."""
    condition = result.shown_condition(options.get("condition"))
    layers = ", ".join(map(str, np.atleast_1d(options["layer"]).tolist()))
    choice = "by the data" if options.get("heads") is None else "by hand"
    return f", layer {layers}, heads chosen {choice}, condition “{condition}”"


def _received_note(result: Result, options: Mapping[str, Any]) -> str:
    """How to read a figure of received attention, and by what its heads were chosen."""
    analysis = result.provenance["analyses"]["received_attention"]
    queries = QUERY_WORDS.get(analysis["queries"], f"the {analysis['queries']}")
    own_position = " (its own position counts)" if analysis["include_self"] else ""
    condition = result.shown_condition(options.get("condition"))
    sentences = [
        f"Received attention of a key is the mean attention that {queries} after it pay to "
        f"it{own_position}."
    ]
    if condition == BASELINE:
        sentences += [
            "Blue: the unchanged prompts; dotted: uniform attention.",
            (
                "A key's value falls with its position by definition, as fewer tokens come after"
                " it; compare with uniform attention."
            ),
        ]
    else:
        null_kind = Contrast(result, condition).null_used
        sentences += [
            (
                "Blue: the unchanged prompt; orange: with the inserted tokens. Top row: the"
                " original tokens, aligned; bottom row: the whole sequence with the inserted span"
                " shaded."
            ),
            (
                "Part of a fall is there by definition, as attention is positive and sums to 1;"
                f" compare with the dotted line, {DOTTED_MEANS[null_kind]}."
            ),
        ]
    sentences.append(
        "Bands are pointwise (not simultaneous) 95 % intervals over prompts; keys that too few "
        "prompts have are hidden."
    )

    top = options.get("top")
    if isinstance(top, int) and condition != BASELINE:
        for layer in np.atleast_1d(options["layer"]).tolist():
            sentences.append(choice_words(result, condition, layer, top))
    return " ".join(filter(None, sentences))


def _provenance_rows(result: Result, command: str) -> list[tuple[str, str]]:
    """How the numbers of a figure were made."""
    provenance = result.provenance
    model = provenance["model"]
    prompts = provenance["prompts"]
    rows = [("model", model_caption(result)), ("architecture", model["architecture"])]
    for name in ("revision", "weights", "dtype", "verified"):
        if model.get(name) is not None:
            rows.append((name, str(model[name])))

    rows.append(("prompts", f"{prompts['count']}, hash {prompts['hash']}"))
    for name, condition in provenance["conditions"].items():
        rows.append((f"condition {name}", condition["written"]))

    versions = [f"{name} {version}" for name, version in provenance["versions"].items()]
    rows += [
        ("seed", str(provenance["seed"])),
        ("engine", provenance["engine"]),
        ("made", time_words(result)),
        ("versions", ", ".join(versions)),
    ]
    if command:
        rows.append(("command", command))
    return rows


def citation(title: str, results: Sequence[Result]) -> str:
    """How to cite a figure: a caption and a BibTeX entry."""
    versions = results[0].provenance["versions"]
    version = versions["mechattn"]
    year = time_words(results[0])[:4]
    runs = []
    for result in results:
        count = result.provenance["prompts"]["count"]
        seed = result.provenance["seed"]
        runs.append(f"{model_caption(result)}, {count} prompts, seed {seed}")
    return (
        f"{title}. {'; '.join(runs)}. Made with mechattn {version}, transformer-lens "
        f"{versions['transformer-lens']}.\n\n"
        "@software{mechattn, title = {mechattn: what attention does, measured on hooked "
        "transformers}, author = {{The mechattn developers}}, "
        f"version = {{{version}}}, year = {{{year}}}}}"
    )
