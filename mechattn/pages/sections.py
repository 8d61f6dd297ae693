"""The sections of a page: the figures that stand open before the map, other figures with how to
read them, and a prompt as the model reads it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mechattn.axes import BASELINE, SEGMENTS
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.means import choose_heads
from mechattn.errors import check_counts, visible
from mechattn.render.attention_figures import received_attention
from mechattn.render.budget_figures import attention_budget, budget_rows
from mechattn.render.draw import take_heading
from mechattn.render.figure_declaration import check_heads, several
from mechattn.render.html_views import in_script
from mechattn.render.model_figures import received_by_model
from mechattn.render.words import choice_words, model_caption, said
from mechattn.results.provenance import matched_control
from mechattn.results.result import Result, units_of
from mechattn.stats.intervals import FEWEST

Drawing = tuple[Callable, Mapping[str, Any]]  # a figure and its options
FIRST_LAYERS = 3  # the paper shows one head in its layers 1, 2 and 3
QUERY_WORDS = {"original": "the original tokens", "all": "all tokens"}
# How to read a figure of received attention.
READING = {
    "measure": (
        "Received attention of a key is the mean attention that {queries} after it pay to it{own}."
    ),
    "baseline": (
        "Blue: the unchanged prompts; dotted: uniform attention. A key's value falls with its"
        " position by definition, as fewer tokens come after it; compare with uniform attention."
    ),
    "condition": (
        "Blue: the unchanged prompt; orange: with the inserted tokens. Top row: the original"
        " tokens, aligned; bottom row: the whole sequence with the inserted span shaded. Part of a"
        " fall is there by definition, as attention is positive and sums to 1; compare with the"
        " dotted line, {null}."
    ),
    "bands": (
        "Bands are pointwise (not simultaneous) 95 % intervals over prompts; keys that too few"
        " prompts have are hidden."
    ),
}
DOTTED_MEANS = {
    "dilution": (
        "what the original tokens would receive if they kept their attention to each other "
        "(dilution; the same share for all tokens of a segment)"
    ),
    "uniform": "what uniform attention would give",
}
CITATION = """\
{title}. {runs}. Made with mechattn {mechattn}, transformer-lens {transformer_lens}.

@software{{mechattn, title = {{mechattn: what attention does, measured on hooked transformers}}, \
author = {{{{The mechattn developers}}}}, version = {{{mechattn}}}, year = {{{year}}}}}"""


@dataclass(frozen=True)
class Section:
    """A part of a page: its heading, how to read it, its main number, and a figure or tokens.

    Args:
        title: The heading.
        note: How to read it.
        says: Its main number in a sentence.
        figure: The figure as JSON that is safe in a script element.
        height: Of the figure, in pixels.
        tokens: The texts of a prompt's tokens, and their segments.
        leads: Whether it stands open before the map.
        results: What the figure shows.
        citation: How to cite it.
        rows_title: The heading of a folded table; it has ``columns`` and ``rows``.
    """

    title: str
    note: str = ""
    says: str = ""
    figure: str = ""
    height: int = 0
    tokens: Sequence[tuple[str, str]] = ()
    leads: bool = False
    results: Sequence[Result] = ()
    citation: str = ""
    rows_title: str = ""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()

    @property
    def names(self) -> list[str]:
        """The segments that occur, for the legend."""
        segments = {segment for _, segment in self.tokens}
        return [segment for segment in SEGMENTS if segment in segments]


@dataclass(frozen=True)
class HeadChoice:
    """Which heads the lines that lead a page show: those that are named, or those that change most.

    Args:
        layer: The layer, from 0; None is the layer of the head that changes most.
        heads: The heads, from 0; None chooses ``top`` of the layer.
        top: How many heads to choose, or all of a layer that has fewer.
    """

    layer: int | None = None
    heads: Sequence[int] | None = None
    top: int = 3

    @property
    def named_head(self) -> tuple[int, int] | None:
        """The layer and head that were named first; None if the data choose."""
        if not self.heads:
            return None
        return self.layer or 0, int(self.heads[0])


def lead_sections(result: Result, choice: HeadChoice) -> list[Section]:
    """The sections that stand open before the map: the budget, and the paper's lines.

    Heads are chosen by their change on one half of the prompts, and shown on the other half.
    """
    sections = []
    for draw, options in _lead_figures(result, choice):
        section = drawn_section(draw, result, options)
        sections.append(replace(section, leads=True))
    return sections


def _lead_figures(result: Result, choice: HeadChoice) -> list[Drawing]:
    """The figures that lead a page: of the first condition, and beside its control."""
    figures: list[Drawing] = []
    condition = result.shown_condition()
    compares = condition != BASELINE
    control = matched_control(result, condition) if compares else None
    if "attention_budget" in result.datasets:
        compared = [name for name in (condition, control) if name not in (None, BASELINE)]
        figures.append((attention_budget, {"conditions": compared}))
    if "received_attention" not in result.datasets:
        return figures

    layer, heads, top = _line_heads(result, condition, choice)
    options = {"layer": layer, "condition": condition, "heads": heads, "top": top}
    figures.append((received_attention, options))
    if not compares:
        return figures

    first_head = None if heads is None else heads[0]
    if control is not None:
        both = (condition, control)
        figures.append(
            (received_by_model, {"layer": layer, "conditions": both, "heads": first_head})
        )

    first_layers = result["received_attention"].layer.values[:FIRST_LAYERS].tolist()
    if len(first_layers) > 1:
        one_head: dict[str, Any] = {"heads": None, "top": 1}
        if heads is not None:
            one_head = {"heads": heads[:1]}
        figures.append((received_attention, {**options, "layer": first_layers, **one_head}))

    return figures


def _line_heads(
    result: Result, condition: str, choice: HeadChoice
) -> tuple[int, list[int] | None, int | None]:
    """The layer of the lines, and their heads, or how many heads of it the data choose.

    The layer is that of the head that changes most, unless one is named. Without prompts to choose
    by, the first heads are shown.
    """
    head_count = int(result.provenance["model"]["heads"])
    dataset = result["received_attention"]
    layer = choice.layer
    if layer is None:
        layer = int(dataset.layer.values[0])
    if choice.heads is not None:
        return layer, check_heads(choice.heads, head_count, layer), None

    check_counts(top=choice.top)
    top = min(choice.top, head_count)
    units = units_of(result, dataset.sizes["prompt"])
    if "received_per_prompt" not in dataset or units.n < 2 * FEWEST:
        # Nothing to choose by: single prompts were not kept, or there are too few for two halves.
        return layer, list(range(top)), None

    if choice.layer is None:
        choosing, _ = units.halves()
        ((layer, _),) = choose_heads(result, None, 1, condition, choosing, "difference")
    return layer, None, top


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
) -> Section:
    """Turn a figure into a section, described by the text in the figure itself."""
    figure = draw(results, **options)
    title = take_heading(figure)
    note = (inspect.getdoc(draw) or "").split("\n\nArgs:")[0]

    result_list = several(results)
    result = result_list[0]
    table: dict[str, Any] = {}
    if draw is received_attention:
        title += _received_details(result, options)
        note = _received_note(result, options)
    elif draw is attention_budget:
        columns, rows = budget_rows(result, options.get("conditions"))
        table = {"rows_title": "As a table: who pays, and why", "columns": columns, "rows": rows}

    return Section(
        title,
        note,
        **table,
        says=said(figure),
        figure=in_script(figure.to_json()),
        height=int(figure.layout.height or 450),
        results=result_list,
        citation=citation(title, result_list),
    )


def _received_details(result: Result, options: Mapping[str, Any]) -> str:
    """What the title of a figure of received attention adds: layers, choice of heads, condition."""
    condition = result.shown_condition(options.get("condition"))
    layers = ", ".join(map(str, np.atleast_1d(options["layer"])))
    # Heads that are named, or the first ones where there are too few prompts to choose by.
    choice = "chosen" if options.get("heads") is None else "not chosen"
    return f", layer {layers}, heads {choice} by the data, condition “{condition}”"


def _received_note(result: Result, options: Mapping[str, Any]) -> str:
    """How to read a figure of received attention, and by what its heads were chosen."""
    analysis = result.provenance["analyses"]["received_attention"]
    queries = QUERY_WORDS.get(analysis["queries"], f"the {analysis['queries']}")
    own_position = " (its own position counts)" if analysis["include_self"] else ""
    sentences = [READING["measure"].format(queries=queries, own=own_position)]

    condition = result.shown_condition(options.get("condition"))
    if condition == BASELINE:
        return " ".join([*sentences, READING["baseline"], READING["bands"]])

    null_kind = Contrast(result, condition).null_used
    sentences.append(READING["condition"].format(null=DOTTED_MEANS[null_kind]))
    sentences.append(READING["bands"])
    top = options.get("top")
    if isinstance(top, int):
        for layer in np.atleast_1d(options["layer"]).tolist():
            sentences.append(choice_words(result, condition, layer, top))

    return " ".join(filter(None, sentences))


def citation(title: str, results: Sequence[Result]) -> str:
    """How to cite a figure: a caption and a BibTeX entry."""
    versions = results[0].provenance["versions"]
    runs = []
    for result in results:
        count = result.provenance["prompts"]["count"]
        seed = result.provenance["seed"]
        runs.append(f"{model_caption(result)}, {count} prompts, seed {seed}")
    return CITATION.format(
        title=title,
        runs="; ".join(runs),
        mechattn=versions["mechattn"],
        transformer_lens=versions["transformer-lens"],
        year=time_words(results[0])[:4],
    )


def time_words(result: Result) -> str:
    """When the numbers were computed; a range if several runs were merged."""
    time = result.provenance["time"]
    return time if isinstance(time, str) else " to ".join(time)
