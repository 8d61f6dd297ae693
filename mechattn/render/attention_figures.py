"""Figures of received attention by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from mechattn.axes import BASELINE, INSERTED
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.means import (
    Positions,
    at_positions,
    choose_heads,
    dilution_at_positions,
    overall_mean,
    uniform_at_positions,
)
from mechattn.contrast.quantities import Null, check_layer, inserted_counts, values_of
from mechattn.contrast.table import Ranking
from mechattn.errors import OptionError, check_choice, check_counts
from mechattn.render import draw
from mechattn.render.draw import SHADE, WITH, WITHOUT
from mechattn.render.figure_declaration import PageWords, check_heads, declare, head_list
from mechattn.render.words import (
    band_words,
    change_words,
    mean_words,
    model_caption,
    received_note,
    received_title_end,
    says,
)
from mechattn.results.result import Result, head_named, units_of
from mechattn.stats.intervals import FEWEST, Interval

NAME = "received_attention"
DOTTED_WORDS = {
    "dilution": (
        "dotted: dilution (the original tokens keep their attention to each other; by segment)"
    ),
    "uniform": "dotted: uniform attention",
}

# The title of the horizontal axis, by quantity.
_AXIS_WORDS = {
    "received_by_origin": "original token position",
    "received": "position in the sequence",
}
# What ranks the heads of a condition, in words.
_RANK_WORDS = {"difference": "changes", "beyond": "changes relative to the null"}


class Panel(NamedTuple):
    """A head, and the prompts whose mean is shown."""

    result: Result
    layer: int
    head: int
    prompts: np.ndarray  # their indices


class PositionLine(NamedTuple):
    """A line of each panel: received attention by position in a condition."""

    quantity: str  # "received_by_origin" at the original tokens, "received" at all positions
    condition: str
    label: str
    colour: str


class _NullLine(NamedTuple):
    """The values of the null at the positions of a line."""

    positions: np.ndarray
    values: np.ndarray
    label: str
    colour: str


def _page_words(words: PageWords, result: Result, options: Mapping[str, Any]) -> PageWords:
    """The words beside the figure on a page: how to read it, and the end of its title."""
    note = received_note(result, options)
    return replace(words, note=note, title_end=received_title_end(result, options))


@declare(NAME, report=[{}], add_words=_page_words)
def received_attention(
    result: Result,
    layer: int | Sequence[int] | None,
    heads: Sequence[int | str] | None = None,
    condition: str | None = None,
    *,
    top: int | None = None,
    by: Ranking = "difference",
    null: Null | None = None,
) -> go.Figure:
    """Plot received attention of some heads without (blue) and with (orange) the inserted tokens.

    The top row shows the original tokens, aligned. The bottom row shows the whole sequence, with
    the inserted span shaded. Lines are means over prompts, and bands are pointwise 95 % t intervals
    within 0 and 1. A key is shown if at least half of the prompts have it, and at least 10 of them
    (or all, if there are fewer than 10 prompts).

    The dotted line is dilution: what the original tokens would receive if they kept their attention
    to each other, by segment. If dilution is not known, and in the baseline, dotted lines are
    uniform attention.

    Args:
        result: A result with received attention.
        layer: The layer, from 0. A list such as [0, 1, 2] shows the same heads of each layer. With
            None, heads have names such as "L1H2", or are chosen from all layers.
        heads: The heads, from 0, or by name, such as "L1H2".
        condition: The condition in orange. By default it is the first that isn't the baseline, or
            the baseline if there is no other.
        top: The number of heads to choose, instead of ``heads``: of each layer, or of all with
            ``layer=None``. One half of the prompts chooses the heads with the largest change, as
            ``result.compare(…, select="half", top=…)`` does; in the baseline, those furthest from
            uniform attention. The figure shows the other half. The run must have used
            ``keep="prompts"``.
        by: With ``top``, "beyond" chooses by the distance of the change from that of the null. In
            the baseline it has no effect.
        null: "dilution" or "uniform", as for :class:`mechattn.Contrast`. In the baseline it has no
            effect.

    Raises:
        OptionError: There is no such layer, head, condition or null, or heads cannot be chosen.
    """
    condition = result.shown_condition(condition)
    null_kind = null_by_position([result], [condition], null)
    layers = _layers(result[NAME], layer)

    check_choice(Ranking, by=by)
    panels, choice = _panels(result, layers, heads, top, condition, by)
    titles = [f"Layer {panel.layer} head {panel.head}" for panel in panels]
    figure = by_position(panels, titles, _lines_by_row(condition), null_kind)
    span = shared_inserted_span(result, condition)  # None in the baseline, which has one row
    shade(figure, span, 2, "all")

    prompts = panels[0].prompts
    small_print = [
        f"mean over {len(prompts)} prompts, pointwise 95 % bands{band_words(result)}",
        DOTTED_WORDS[null_kind],
        f"heads {choice}",
    ]
    if span is not None:
        small_print.append("shaded: the inserted tokens")
    elif inserted_counts(result, condition).any():
        small_print.append("the inserted tokens are not one span that all prompts share")

    if len(panels) > 1:
        small_print.append("each panel has its own vertical scale")
    heading = f"{model_caption(result)}: received attention"
    height = 400 if condition == BASELINE else 640  # with one row of panels or two
    draw.title_above_legend(figure, heading, "; ".join(small_print), height, margin_top=125)

    sentences = []
    for shown_layer in dict.fromkeys(panel.layer for panel in panels):
        layer_heads = [panel.head for panel in panels if panel.layer == shown_layer]
        words = _layer_words(result, condition, shown_layer, layer_heads, prompts, null_kind)
        sentences.append(words)
    return says(figure, *sentences)


def listed_panels(
    result: Result, layers: Sequence[int | None], heads: Sequence[int | str] | int | str
) -> list[Panel]:
    """A panel for each listed head of each layer.

    Raises:
        OptionError: There is no such head or layer, or a layer is None and a head has no name such
            as "L1H2".
    """
    dataset = result[NAME]
    measured_heads = dataset["head"].values.tolist()
    prompts = np.arange(dataset.sizes["prompt"])
    names_or_numbers = head_list(heads)

    panels = []
    for layer, head in product(layers, names_or_numbers):
        if layer is None:
            layer_and_head = head_named(head)
            if layer_and_head is None:
                raise OptionError(
                    f"heads={names_or_numbers}: without a layer, give names,"
                    ' such as ["L0H3", "L1H2"]'
                )
            layer, _ = layer_and_head
            check_layer(layer, dataset)
        (number,) = check_heads(head, measured_heads, layer)
        panels.append(Panel(result, layer, number, prompts))
    return panels


def chosen_panels(
    result: Result, layers: Sequence[int | None], top: int, condition: str, by: Ranking
) -> list[Panel]:
    """A panel for each head that :func:`choose_heads` chooses of each layer, on one half of the
    prompts. The panels show the other half.

    Raises:
        OptionError: There are too few prompts for two halves, or heads cannot be chosen.
    """
    units = units_of(result)
    units.refuse_below(2 * FEWEST, " for two halves", instead="")
    choice_prompts, shown_prompts = units.halves()

    panels = []
    for layer in layers:
        for head_layer, head in choose_heads(result, layer, top, condition, choice_prompts, by):
            panels.append(Panel(result, head_layer, head, shown_prompts))
    return panels


def null_by_position(
    results: Sequence[Result], conditions: Sequence[str], null: Null | None
) -> Null:
    """The null that lines by position show: ``null``, or by default the common null of all
    comparisons with the baseline.

    Raises:
        OptionError: Lines by position have no such null, or a result lacks its values.
    """
    if null not in (None, *DOTTED_WORDS):
        raise OptionError(
            f'null={null!r}: lines by position show "dilution" or "uniform"; result.compare has'
            " others"
        )

    contrasts = []
    for result in results:
        for name in conditions:
            if name == BASELINE:
                continue
            if null == "dilution":
                # Raises for a result without dilution.
                values_of(result, name, "received", "question", null)
            contrasts.append(Contrast(result, name, null=null))

    return common_null(contrasts)


def common_null(contrasts: Sequence[Contrast]) -> Null:
    """The null of a figure with several comparisons: dilution if all of them use it, and otherwise
    uniform attention (also if there are no comparisons)."""
    null_kinds = {contrast.null_used for contrast in contrasts}
    return "dilution" if null_kinds == {"dilution"} else "uniform"


def shared_inserted_span(result: Result, condition: str) -> tuple[int, int] | None:
    """The first and last position of the inserted tokens, which are one span in all prompts.

    None if nothing is inserted, if the positions differ between prompts, or if other tokens stand
    between the inserted ones.
    """
    origin = result["sequences"].origin.sel(condition=condition)
    is_inserted = origin.values == INSERTED  # [prompt, pos]
    prompts_differ = (is_inserted != is_inserted[0]).any()
    if not is_inserted.any() or prompts_differ:
        return None

    positions = np.flatnonzero(is_inserted[0])
    first = int(positions[0])
    last = int(positions[-1])
    if len(positions) <= last - first:  # a token between them was not inserted
        return None
    return first, last


def shade(figure: go.Figure, span: tuple[int, int] | None, row: int, column: int | str) -> None:
    """Shade the inserted positions in a panel, or in a row of panels with "all"; draws nothing
    without a span."""
    if span is None:
        return
    first, last = span
    style = dict(fillcolor=SHADE, line_width=0, layer="below")
    figure.add_vrect(first - 0.5, last + 0.5, row=row, col=column, **style)


def by_position(
    panels: Sequence[Panel],
    titles: Sequence[str],
    lines_by_row: Sequence[Sequence[PositionLine]],
    null_kind: Null,
) -> go.Figure:
    """Draw a column of panels for each head: lines over positions, with their bands and nulls.

    Args:
        panels: The heads.
        titles: A title for each of them.
        lines_by_row: The lines of each row of panels.
        null_kind: The null that is drawn.
    """
    figure = draw.panels(
        titles, rows=len(lines_by_row), vertical_spacing=0.16, horizontal_spacing=0.06
    )

    for column, panel in enumerate(panels, 1):
        for row, lines in enumerate(lines_by_row, 1):
            means_of_lines = [_draw_line(figure, panel, line, column, row) for line in lines]
            for null_line in _null_lines(panel, lines, means_of_lines, null_kind):
                draw.dotted(
                    figure,
                    null_line.positions,
                    null_line.values,
                    null_line.label,
                    null_line.colour,
                    column=column,
                    row=row,
                    legendgroup=null_line.label,
                    hovertemplate="%{y:.4f}",
                )
            _cut_first_token(figure, means_of_lines, lines, column, row)

    for row, lines in enumerate(lines_by_row, 1):
        quantity = lines[0].quantity  # all lines of a row have the same
        figure.update_xaxes(title_text=_AXIS_WORDS[quantity], row=row)

    figure.update_yaxes(title_text="attention received<br>(probability)", col=1)
    return figure.update_layout(hovermode="x unified")


def _layers(dataset: xr.Dataset, layer: int | Sequence[int] | None) -> list[int | None]:
    """The layers of a figure as a list; its only element is None for heads of all layers.

    Raises:
        OptionError: The list is empty, or a layer was not measured.
    """
    if layer is None:
        return [None]

    layers = np.atleast_1d(layer).tolist()
    if not layers:
        raise OptionError("layer=[] is empty; give at least one layer, or None for heads of any")
    for number in layers:
        check_layer(number, dataset)
    return layers


def _panels(
    result: Result,
    layers: Sequence[int | None],
    heads: Sequence[int | str] | int | str | None,
    top: int | None,
    condition: str,
    by: Ranking,
) -> tuple[list[Panel], str]:
    """The panels of the listed or chosen heads, and how the heads were chosen, in words."""
    if heads is not None and top is None:
        if by != "difference":
            raise OptionError(f"by={by!r} ranks heads: give top=… too, the number of heads")
        return listed_panels(result, layers, heads), "as given"

    if heads is not None or top is None:
        raise OptionError(
            f"heads={heads!r}, top={top!r}: give one of the two, such as heads=[0, 3] or top=3"
        )
    check_counts(top=top)
    rank_words = _RANK_WORDS[by]
    if condition == BASELINE:
        rank_words = "distances from uniform attention"
    choice = f"with the largest {rank_words} in the other half of the prompts"
    return chosen_panels(result, layers, top, condition, by), choice


def _lines_by_row(condition: str) -> list[list[PositionLine]]:
    """The lines of the top row (original tokens) and of the bottom row (whole sequence).

    The baseline has one row.
    """
    if condition == BASELINE:
        return [[PositionLine("received_by_origin", BASELINE, "baseline", WITHOUT)]]

    without = PositionLine("received_by_origin", BASELINE, f"without {condition}", WITHOUT)
    aligned = PositionLine("received_by_origin", condition, f"with {condition}", WITH)
    whole_sequence = PositionLine("received", condition, f"with {condition}", WITH)
    return [[without, aligned], [whole_sequence]]


def _layer_words(
    result: Result,
    condition: str,
    layer: int,
    heads: Sequence[int],
    prompts: np.ndarray,
    null_kind: Null,
) -> str:
    """The sentence on the heads of a layer: the change of their mean, or in the baseline the mean
    next to uniform attention.

    Empty if the change is not known.
    """
    head_words = f"head {heads[0]}"
    if len(heads) > 1:
        head_words = f"heads {', '.join(map(str, heads))} (mean)"
    subject = f"Attention received by the question's tokens in layer {layer} {head_words}"
    prompt_words = f"{len(prompts)} prompts"
    if condition != BASELINE:
        change = change_words(result, condition, layer, heads, prompts, null_kind)
        if not change:
            return ""
        return f"{subject} with “{condition}”: {change}, {prompt_words}."

    baseline = result[NAME].sel(condition=BASELINE, layer=layer, segment="question")
    baseline = baseline.isel(prompt=prompts)
    mean = mean_words(result, baseline.received_by_segment.sel(head=heads))
    uniform = overall_mean(result, baseline.received_by_segment_uniform).estimate
    return f"{subject}: {mean}, {prompt_words}; uniform attention would give {uniform:.3g}."


def _draw_line(
    figure: go.Figure, panel: Panel, line: PositionLine, column: int, row: int
) -> Positions:
    """Draw a line with its band, and return its means by position."""
    cell = {"condition": line.condition, "layer": panel.layer, "head": panel.head}
    means = at_positions(panel.result[NAME], line.quantity, cell, panel.prompts)
    interval = draw.within(Interval(means.mean, means.low, means.high), "probability")
    draw.line_and_band(
        figure,
        means.positions,
        interval,
        line.label,
        line.colour,
        column=column,
        row=row,
        customdata=np.stack([means.n, interval.low, interval.high], -1),
        meta=["n", "low", "high"],
        hovertemplate="%{y:.4f} (n = %{customdata[0]})",
    )
    return means


def _null_lines(
    panel: Panel,
    lines: Sequence[PositionLine],
    means_of_lines: Sequence[Positions],
    null_kind: Null,
) -> list[_NullLine]:
    """The null of each line of a panel; with dilution none for the baseline, which is its own null.

    A panel has one or two lines. If uniform attention is the same for both, it is returned once.
    """
    null_lines = []
    for line, means in zip(lines, means_of_lines, strict=True):
        if null_kind == "uniform":
            cell = {"condition": line.condition, "layer": panel.layer}
            values = uniform_at_positions(panel.result[NAME], line.quantity, cell, panel.prompts)
        elif line.condition == BASELINE:
            continue
        else:
            values = dilution_at_positions(
                panel.result,
                line.quantity,
                line.condition,
                panel.layer,
                panel.head,
                panel.prompts,
            )
        label = f"{null_kind}, {line.label}"
        null_lines.append(_NullLine(means.positions, values[means.positions], label, line.colour))

    if null_kind == "uniform" and len(null_lines) == 2:
        first, second = null_lines
        same_positions = np.array_equal(first.positions, second.positions)
        if same_positions and np.allclose(first.values, second.values):
            # Drawn separately, the second would hide the first.
            return [first._replace(label="uniform attention", colour=WITHOUT)]
    return null_lines


def _cut_first_token(
    figure: go.Figure,
    means_of_lines: Sequence[Positions],
    lines: Sequence[PositionLine],
    column: int,
    row: int,
) -> None:
    """End the vertical axis at the largest value of the other tokens, and write a larger value of
    the first token next to its place.

    The first token is the sink of most models. It can get a hundred times what others get, which
    would then all seem to be 0.
    """
    largest = 0.0
    for means in means_of_lines:
        # With fewer than three prompts a mean has no interval.
        upper = np.where(np.isfinite(means.high), means.high, means.mean)
        largest = max(largest, upper[means.positions > 0].max(initial=0.0))
    if largest <= 0:
        return
    axis_end = 1.08 * largest  # leaves a margin above the lines
    figure.update_yaxes(range=[0, axis_end], row=row, col=column)

    text_lines = ["↑ first token:"]
    for means, line in zip(means_of_lines, lines, strict=True):
        # One number, or none if too few prompts have the token.
        for value in means.mean[means.positions == 0]:
            if value > axis_end:
                text_lines.append(f"{value:.2g} {line.label}")

    if len(text_lines) > 1:
        figure.add_annotation(
            x=0,
            y=axis_end,
            text="<br>".join(text_lines),
            align="left",
            xanchor="left",
            yanchor="top",
            showarrow=False,
            font_size=11,
            row=row,
            col=column,
        )
