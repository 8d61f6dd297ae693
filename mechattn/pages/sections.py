"""The parts of a page: a figure with how to read it, or a prompt as the model reads it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mechattn.axes import BASELINE, SEGMENTS
from mechattn.contrast.contrast import Contrast
from mechattn.markup import visible
from mechattn.pages.provenance_words import citation
from mechattn.render.attention_figures import received_attention
from mechattn.render.budget_figures import attention_budget, budget_rows
from mechattn.render.draw import take_heading
from mechattn.render.figure_declaration import several
from mechattn.render.html_views import in_script
from mechattn.render.words import choice_words, model_caption, said
from mechattn.results.result import Result

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
    choice = "by the data" if options.get("heads") is None else "by hand"
    return f", layer {layers}, heads chosen {choice}, condition “{condition}”"


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
