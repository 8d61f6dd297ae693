"""Figures of received attention by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from mechattn.axes import BASELINE, head_named
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.means import Positions, at_positions, choose_heads
from mechattn.contrast.null_by_position import dilution_at_positions, uniform_at_positions
from mechattn.contrast.quantities import Null, check_layer, values_of
from mechattn.contrast.table import Ranking, Selection
from mechattn.errors import OptionError
from mechattn.render import draw
from mechattn.render.draw import SHADE, THIRD, WITH, WITHOUT
from mechattn.render.figure_declaration import check_heads, listed_or_chosen, several
from mechattn.render.figure_declaration import figure as declare
from mechattn.render.words import (
    band_words,
    change_words,
    mean_words,
    model_caption,
    says,
)
from mechattn.results.result import Result, units_of
from mechattn.stats.intervals import FEWEST

NAME = "received_attention"
DOTTED_WORDS = {
    "dilution": (
        "dotted: dilution (the original tokens keep their attention to each other; by segment)"
    ),
    "uniform": "dotted: uniform attention",
}


@declare(NAME, report=[{}])
def received_attention(
    result: Result,
    layer: int | Sequence[int] | None,
    heads: Sequence[int | str] | None = None,
    condition: str | None = None,
    *,
    top: int | None = None,
    by: Ranking = "difference",
    null: Null | None = None,
    one_based: bool = False,
) -> go.Figure:
    """Plot received attention of some heads without (blue) and with (orange) the inserted tokens.

    The top row shows the original tokens, aligned; the bottom row the whole sequence with the
    inserted span shaded. The dotted line is dilution: what the original tokens would receive if
    they kept their attention to each other, by segment. Where that is not known, and in the
    baseline alone, dotted lines are uniform attention. Lines are means over prompts and bands
    pointwise 95 % t intervals, which end at 0. A key is hidden if fewer than half of the prompts,
    or fewer than 10 of them (all, below 10 prompts), have it.

    Args:
        result: A result with received attention.
        layer: The layer, from 0; a list such as [0, 1, 2] shows the same heads of each; None is for
            heads of any.
        heads: The heads, from 0, or by name, such as "L1H2".
        top: In place of heads: how many to choose by the largest change (in the baseline: the
            largest distance from uniform attention) on one half of the prompts, of each layer or,
            with None, of all; as ``result.compare(…, select="half", top=…)`` does. The figure then
            shows the other half; the run must have used ``keep="prompts"``.
        by: With ``top``: "beyond" chooses by the distance of the change from that of the null.
        condition: The condition in orange; by default the first that isn't the baseline, where
            there is one.
        null: "dilution" or "uniform", as for :class:`mechattn.Contrast`.
        one_based: Count layers and heads from 1 in the titles, as the paper does.

    Raises:
        OptionError: There is no such layer, head, condition or null, or heads cannot be chosen.
    """
    dataset = result[NAME]
    condition = result.shown_condition(condition)
    is_alone = condition == BASELINE
    null_kind = _null_kind(result, [condition], null)
    layers: list[Any] = [layer]
    if isinstance(layer, (list, tuple, range, np.ndarray)):
        layers = list(layer)
    if not layers:
        raise OptionError("layer=[] is empty; give at least one layer, or None for heads of any")
    for number in layers:
        if number is not None:
            check_layer(number, dataset)

    listed, top = listed_or_chosen(heads, top)
    prompts = np.arange(dataset.sizes["prompt"])
    choosing = prompts
    choice = "chosen by hand"
    if top is None:
        Selection(None, None, None if by == "difference" else by)  # refuses what compare refuses
    else:
        Selection("half", top, by)
        units = units_of(result, len(prompts))
        units.refuse_below(2 * FEWEST, " for two halves", instead="")
        choosing, prompts = units.halves()
        largest = "changes" if by == "difference" else "changes relative to the null"
        if is_alone:
            largest = "distances from uniform attention"
        choice = f"with the largest {largest} in the other half of the prompts"

    heads_of_layer: dict[int, list[int]] = {}
    for number in layers:
        if top is None:
            named_heads = _listed(listed, number, dataset)
        else:
            named_heads = choose_heads(result, number, top, condition, choosing, by)
        for head_layer, head in named_heads:
            heads_of_layer.setdefault(head_layer, []).append(head)
    panels = []
    for head_layer, layer_heads in heads_of_layer.items():
        for head in layer_heads:
            title = f"Layer {head_layer + one_based} head {head + one_based}"
            panels.append(_Panel(result, head_layer, head, title, prompts))

    baseline_words = "baseline" if is_alone else f"without {condition}"
    baseline_line = _Line("received_by_origin", BASELINE, baseline_words, WITHOUT)
    aligned_line = _Line("received_by_origin", condition, f"with {condition}", WITH)
    rows = [[baseline_line]]
    if not is_alone:
        rows = [[baseline_line, aligned_line], [aligned_line._replace(quantity="received")]]
    figure = _by_position(panels, rows, null_kind)

    span = _inserted_span(result, condition)
    _shade(figure, span, 2, "all")
    small_print = [
        f"mean over {len(prompts)} prompts, pointwise 95 % bands{band_words(result)}",
        DOTTED_WORDS[null_kind],
        f"heads {choice}",
    ]
    if span is not None:
        small_print.append("shaded: the inserted tokens")
    elif not is_alone:
        small_print.append("inserted at positions that differ between prompts")
    if len(panels) > 1:
        small_print.append("each panel has its own vertical scale")
    heading = f"{model_caption(result)}: received attention"
    draw.title(figure, heading, "; ".join(small_print), 400 if is_alone else 640, 125)
    sentences = []
    for head_layer, layer_heads in heads_of_layer.items():
        sentence = _in_words(
            result, condition, head_layer, layer_heads, prompts, null_kind, one_based
        )
        sentences.append(sentence)
    return says(figure, *sentences)


def _null_kind(result: Result, conditions: Sequence[str], null: Null | None) -> Null:
    """The null that lines by position show: that of the comparison of every condition, where it is
    known by position.
    """
    if null not in (None, *DOTTED_WORDS):
        raise OptionError(
            f'null={null!r}: lines by position show "dilution" or "uniform"; result.compare has'
            " others"
        )
    changed = [name for name in conditions if name != BASELINE]
    if null == "dilution":
        for name in changed:  # refuses where there is none
            values_of(result, name, "received", "question", "dilution")
    return common_null([Contrast(result, name, null=null) for name in changed])


def common_null(contrasts: Sequence[Contrast]) -> Null:
    """The null of all comparisons of a figure: dilution where all have it, else uniform
    attention.
    """
    if {contrast.null_used for contrast in contrasts} == {"dilution"}:
        return "dilution"
    return "uniform"


def _listed(
    heads: Sequence[int | str], layer: int | None, dataset: xr.Dataset
) -> list[tuple[int, int]]:
    """The listed heads with their layers; of any layer, they have to be named."""
    head_count = dataset.sizes["head"]
    if layer is not None:
        return [(layer, head) for head in check_heads(heads, head_count, layer)]

    named = [head_named(head) for head in heads]
    pairs = [pair for pair in named if pair is not None]
    if len(pairs) < len(heads) or not pairs:
        raise OptionError(
            f'heads={list(heads)}: without a layer, give names, such as ["L0H3", "L1H2"]'
        )
    for layer_number in {pair[0] for pair in pairs}:
        check_layer(layer_number, dataset)
        check_heads([head for of_layer, head in pairs if of_layer == layer_number], head_count)
    return pairs


def _in_words(
    result: Result,
    condition: str,
    layer: int,
    heads: Sequence[int],
    prompts: np.ndarray,
    null_kind: Null,
    one_based: bool,
) -> str:
    """The sentence on a layer; empty if there is no change to report."""
    listed = ", ".join(str(head + one_based) for head in heads)
    head_words = f"heads {listed} (mean)" if len(heads) > 1 else f"head {listed}"
    start = f"Attention received by the question's tokens in layer {layer + one_based} {head_words}"
    if condition != BASELINE:
        change = change_words(
            result, condition, layer=layer, heads=heads, prompts=prompts, null=null_kind
        )
        if not change:
            return ""
        return f"{start} with “{condition}”: {change}, {len(prompts)} prompts."

    baseline = result[NAME].sel(condition=BASELINE, layer=layer, segment="question")
    baseline = baseline.isel(prompt=prompts)
    mean = mean_words(result, baseline.received_by_segment.sel(head=list(heads)))
    uniform = float(baseline.received_by_segment_uniform.mean())
    return f"{start}: {mean}, {len(prompts)} prompts; uniform attention would give {uniform:.3g}."


def _inserted_span(result: Result, condition: str) -> tuple[int, int] | None:
    """The first and last inserted position, if these are the same in all prompts."""
    inserted = result["sequences"].origin.sel(condition=condition).values == -1
    if not inserted.any() or (inserted != inserted[0]).any():
        return None
    where = np.flatnonzero(inserted[0])
    return int(where[0]), int(where[-1])


def _shade(figure: go.Figure, span: tuple[int, int] | None, row: int, column: int | str) -> None:
    """Shade inserted positions, if all prompts have them at the same place."""
    if span is None:
        return
    ends = (span[0] - 0.5, span[1] + 0.5)
    figure.add_vrect(*ends, row=row, col=column, fillcolor=SHADE, line_width=0, layer="below")


class _Panel(NamedTuple):
    result: Result
    layer: int
    head: int
    title: str
    prompts: np.ndarray  # those that are shown


class _Line(NamedTuple):
    quantity: str
    condition: str
    label: str
    colour: str


class _NullLine(NamedTuple):
    positions: np.ndarray
    values: np.ndarray
    label: str
    colour: str


@declare(NAME, compares=True)
def received_by_model(
    results: Sequence[Result] | Result,
    layer: int = 0,
    heads: Sequence[int] | int | None = None,
    conditions: tuple[str, str] = ("slash", "sentence"),
    *,
    null: Null | None = None,
    one_based: bool = False,
) -> go.Figure:
    """Plot received attention by position of the sequence under two conditions, for one head per
    model.

    Dotted lines are dilution: what the original tokens would receive if they kept their attention
    to each other, by segment. Where that is not known they are uniform attention, blue if it is the
    same under both. Inserted spans are shaded.

    Args:
        results: One result per model.
        layer: The layer, from 0.
        heads: The head of each model, from 0; or one number for all. By default the one that
            changes most under the first condition, chosen on one half of each model's prompts; the
            figure then shows the other half.
        conditions: The two conditions, the first in orange and the second in green.
        null: "dilution" or "uniform", as for :class:`mechattn.Contrast`.
        one_based: Count layers and heads from 1 in the titles, as the paper does.

    Raises:
        OptionError: There is no such layer, head, condition or null, the numbers of heads and
            models differ, or a head cannot be chosen.
    """
    results = several(results)
    if heads is not None:
        heads = [heads] * len(results) if isinstance(heads, int) else list(heads)
        if len(heads) != len(results):
            raise OptionError(
                f"heads={heads} for {len(results)} models: give one head per model, or one for all"
            )

    panels = []
    null_kinds = set()
    for number, result in enumerate(results):
        check_layer(layer, result[NAME])
        for name in conditions:
            if name != BASELINE:
                result.condition(name)  # refuses a name that the result does not have
        null_kinds.add(_null_kind(result, conditions, null))
        prompts = np.arange(result[NAME].sizes["prompt"])
        if heads is None:
            choosing, prompts = units_of(result, len(prompts)).halves()
            chosen = choose_heads(result, layer, 1, conditions[0], choosing, "difference")
            head = chosen[0][1]
        else:
            (head,) = check_heads([heads[number]], result[NAME].sizes["head"], layer)
        title = f"{model_caption(result)}<br>layer {layer + one_based} head {head + one_based}"
        panels.append(_Panel(result, layer, head, title, prompts))

    null_kind: Null = "dilution" if null_kinds == {"dilution"} else "uniform"
    lines = [
        _Line("received", name, name, colour)
        for name, colour in zip(conditions, (WITH, THIRD), strict=False)
    ]
    figure = _by_position(panels, [lines], null_kind)
    for column, result in enumerate(results, 1):
        for span in {_inserted_span(result, name) for name in conditions}:
            _shade(figure, span, 1, column)

    counts = ", ".join(sorted({str(len(panel.prompts)) for panel in panels}))
    bands = f"bands: pointwise 95 % intervals{band_words(results[0])}"
    small_print = [f"mean over {counts} prompts, {bands}", DOTTED_WORDS[null_kind]]
    if figure.layout.shapes:
        small_print.append("shaded: the inserted tokens")
    if heads is None:
        small_print.append("the head with the largest change in the other half of the prompts")
    heading = f"{' and '.join(conditions)}: received attention"
    draw.title(figure, heading, "; ".join(small_print), 450, 150)
    sentences = []
    for panel in panels:
        place = panel.title.replace("<br>", ", ")
        for name in conditions:
            change = change_words(
                panel.result, name, layer, [panel.head], panel.prompts, null=null_kind
            )
            if change:
                sentences.append(f"{place}, “{name}”: {change}.")
    return says(figure, "Change of the attention received by the question's tokens.", *sentences)


def _by_position(panels: list[_Panel], rows: list[list[_Line]], null_kind: Null) -> go.Figure:
    """A column for each head, with rows of lines over positions, their bands and their null."""
    titles = [panel.title for panel in panels] + [""] * len(panels) * (len(rows) - 1)
    figure = draw.panels(titles, len(rows), vertical_spacing=0.16, horizontal_spacing=0.06)
    in_legend: set[str] = set()
    for column, panel in enumerate(panels, 1):
        for row, lines in enumerate(rows, 1):
            positions = _lines_of_panel(figure, panel, lines, null_kind, column, row, in_legend)
            _cut_first_token(figure, positions, lines, column, row)
    for row, lines in enumerate(rows, 1):
        is_whole = lines[0].quantity == "received"
        words = "position in the sequence" if is_whole else "original token position"
        figure.update_xaxes(title_text=words, row=row)
    figure.update_yaxes(title_text="attention received<br>(probability)", col=1)
    return figure.update_layout(hovermode="x unified")


def _lines_of_panel(
    figure: go.Figure,
    panel: _Panel,
    lines: list[_Line],
    null_kind: Null,
    column: int,
    row: int,
    in_legend: set[str],
) -> list[Positions]:
    """Draw the lines of one panel with their bands, and what the null would give."""
    place = {"column": column, "row": row}
    positions = []
    nulls = []
    for line in lines:
        cell = {"condition": line.condition, "layer": panel.layer, "head": panel.head}
        means = at_positions(panel.result[NAME], line.quantity, cell, panel.prompts)
        is_new = line.label not in in_legend
        draw.line_and_band(figure, means, line.label, line.colour, legend=is_new, **place)
        in_legend.add(line.label)
        positions.append(means)
        null = _null_line(panel, line, null_kind, means)
        if null is not None:
            nulls.append(null)

    first, *others = nulls
    same_null = all(np.array_equal(first.positions, null.positions) for null in others)
    same_null = same_null and all(np.allclose(first.values, null.values) for null in others)
    if others and null_kind == "uniform" and same_null:  # one line would hide the others
        nulls = [first._replace(label="uniform attention", colour=WITHOUT)]
    for null in nulls:
        is_new = null.label not in in_legend
        draw.dotted(
            figure,
            null.positions,
            null.values,
            null.label,
            null.colour,
            **place,
            legendgroup=null.label,
            hovertemplate="%{y:.4f}",
            showlegend=is_new,
        )
        in_legend.add(null.label)
    return positions


def _null_line(panel: _Panel, line: _Line, null_kind: Null, means: Positions) -> _NullLine | None:
    """The null beside a line; the baseline is what dilution is made of, so it has none."""
    if null_kind == "uniform":
        cell = {"condition": line.condition, "layer": panel.layer}
        values = uniform_at_positions(panel.result[NAME], line.quantity, cell, panel.prompts)
        return _NullLine(means.at, values[means.at], f"uniform, {line.label}", line.colour)
    if line.condition == BASELINE:
        return None
    values = dilution_at_positions(
        panel.result, line.quantity, line.condition, panel.layer, panel.head, panel.prompts
    )
    return _NullLine(means.at, values[means.at], f"dilution, {line.label}", line.colour)


def _cut_first_token(
    figure: go.Figure, positions: list[Positions], lines: list[_Line], column: int, row: int
) -> None:
    """End the vertical axis at the largest value but the first token's, and write that one beside
    its place.

    The first token is the sink of most models: it gets a hundred times what any other gets.
    """
    after_first = []
    first_values = []
    for means, line in zip(positions, lines, strict=True):
        upper = np.where(np.isfinite(means.high), means.high, means.mean)
        is_first = means.at == 0
        after_first += upper[~is_first].tolist()
        first_values += [(float(value), line) for value in means.mean[is_first]]
    top = 1.08 * max(after_first, default=0.0)
    if top <= 0:
        return
    figure.update_yaxes(range=[0, top], row=row, col=column)
    beyond = [(value, line) for value, line in first_values if value > top]
    if beyond:
        values = [f"{value:.2g} {line.label}" for value, line in beyond]
        figure.add_annotation(
            x=0,
            y=top,
            text="<br>".join(["↑ first token:", *values]),
            align="left",
            xanchor="left",
            yanchor="top",
            showarrow=False,
            font_size=11,
            row=row,
            col=column,
        )
