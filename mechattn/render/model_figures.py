"""Figures of several models side by side: received attention of one head per model, and the change
of a segment's attention in each model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from mechattn.contrast.contrast import Contrast
from mechattn.contrast.quantities import (
    NULLS,
    Null,
    check_layer,
    inserted_words,
)
from mechattn.errors import OptionError
from mechattn.render import draw
from mechattn.render.attention_figures import (
    DOTTED_WORDS,
    NAME,
    Panel,
    PositionLine,
    by_position,
    chosen_panels,
    common_null,
    listed_panels,
    null_by_position,
    shade,
    shared_inserted_span,
)
from mechattn.render.draw import THIRD, WITH, WITHOUT, faint
from mechattn.render.figure_declaration import declare, head_list, listed_conditions, several
from mechattn.render.words import (
    band_words,
    change_beside_null,
    change_words,
    counts_words,
    heads_words,
    model_caption,
    model_details,
    numbered,
    percent,
    quantity_words,
    says,
)
from mechattn.results.result import Result
from mechattn.stats.intervals import Interval


@declare(NAME, compares=True, chooses_heads=True)
def received_by_model(
    results: Sequence[Result] | Result,
    layer: int = 0,
    heads: Sequence[int | str] | int | str | None = None,
    conditions: tuple[str, str] = ("slash", "sentence"),
    *,
    null: Null | None = None,
) -> go.Figure:
    """Plot received attention by position of the sequence under two conditions, for one head per
    model.

    Dotted lines are dilution: what the original tokens would receive if they kept their attention
    to each other, by segment. If dilution is not known, they are uniform attention, blue if it is
    the same under both conditions. Inserted spans are shaded.

    Args:
        results: One result per model.
        layer: The layer, from 0.
        heads: The head of each model, from 0 or by name, such as "L0H1", or one head for all
            models. By default it is the head that changes most under the first condition, chosen on
            one half of each model's prompts; the figure then shows the other half.
        conditions: The two conditions, the first in orange and the second in green.
        null: "dilution" or "uniform", as for :class:`mechattn.Contrast`.

    Raises:
        OptionError: There is no such layer, head, condition or null, the conditions are not two,
            the numbers of heads and models differ, or a head cannot be chosen.
    """
    results = several(results)
    if len(conditions) != 2:
        raise OptionError(f"conditions={conditions!r}: give two, such as ('slash', 'sentence')")
    for result in results:
        check_layer(layer, result[NAME])
        listed_conditions(result, conditions)  # raises if the result lacks one

    null_kind = null_by_position(results, conditions, null)
    panels = _panels_of_models(results, layer, heads, conditions[0])
    titles = [
        f"{model_caption(panel.result)}<br>layer {panel.layer} head {panel.head}"
        for panel in panels
    ]
    lines = [
        PositionLine("received", name, name, colour)
        for name, colour in zip(conditions, (WITH, THIRD), strict=True)
    ]
    figure = by_position(panels, titles, [lines], null_kind)
    for column, result in enumerate(results, 1):
        # A span that both conditions share is drawn once.
        for span in {shared_inserted_span(result, name) for name in conditions}:
            shade(figure, span, 1, column)

    prompt_counts = sorted({len(panel.prompts) for panel in panels})
    prompt_words = ", ".join(map(str, prompt_counts))
    # The note on groups is the same for all results that have groups, and is written once.
    group_words = "".join({band_words(result) for result in results})
    small_print = [
        f"mean over {prompt_words} prompts, bands: pointwise 95 % intervals{group_words}",
        DOTTED_WORDS[null_kind],
    ]
    if figure.layout.shapes:
        small_print.append("shaded: the inserted tokens")
    if heads is None:
        small_print.append("the head with the largest change in the other half of the prompts")
    heading = f"{' and '.join(conditions)}: received attention"
    draw.title_above_legend(figure, heading, "; ".join(small_print), 450, margin_top=150)

    sentences = ["Change of the attention received by the question's tokens."]
    for panel in panels:
        place = f"{model_caption(panel.result)}, layer {panel.layer} head {panel.head}"
        for name in conditions:
            change = change_words(panel.result, name, layer, [panel.head], panel.prompts, null_kind)
            if change:
                sentences.append(f"{place}, “{name}”: {change}.")

    return says(figure, *sentences)


@declare(NAME, compares=True)
def verdicts(
    results: Sequence[Result] | Result,
    condition: str | None = None,
    segment: str = "question",
    *,
    null: Null | None = None,
) -> go.Figure:
    """Plot the change of a segment's attention in several models beside that under the null, one
    row each.

    The change is that of ``result.verdict``: the change of the mean over all layers and heads, with
    its 95 % interval.

    Args:
        results: Results of several models, or several results of one, in the order of the rows.
        condition: The condition of all results; by default the first of each that isn't the
            baseline.
        segment: A segment that every prompt has.
        null: As for :class:`mechattn.Contrast`. By default it is dilution, or uniform attention if
            one of the results has no dilution.

    Raises:
        OptionError: There are no results, no such condition or segment, or fewer than 3 prompts.
    """
    results = several(results)
    names = [result.condition(condition) for result in results]
    sides = list(zip(results, names, strict=True))
    null_kind = null
    if null_kind is None:
        null_kind = common_null([Contrast(result, name, segment=segment) for result, name in sides])

    verdict_list = [result.verdict(name, segment, null=null_kind) for result, name in sides]
    changes = _percents([verdict.change for verdict in verdict_list])
    null_changes = _percents([verdict.null for verdict in verdict_list])

    figure = draw.panels()
    _verdict_marks(figure, changes, null_changes, NULLS[null_kind])

    # Each number is above or below its mark, clear of the rule at 0.
    numbers = np.concatenate([*changes, *null_changes])
    low = numbers.min(initial=0.0)
    high = numbers.max(initial=0.0)
    near_zero = 0.2 * (high - low)  # the width of a number
    _write_numbers(figure, changes.estimate, near_zero, height=17)
    _write_numbers(figure, null_changes.estimate, near_zero, height=-17)

    heading = f"Change of {quantity_words('received', segment)}"
    if len(set(names)) == 1:
        heading += f" with “{names[0]}”"
    small_print = f"mean over all layers and heads; {counts_words(results)}"
    height = 200 + 64 * len(verdict_list)  # a row has 64 pixels, and title and axis have 200
    draw.title_above_legend(figure, heading, small_print, height, margin_top=120)

    _verdict_axes(figure, _row_labels(results, names, "<br>"), low, high)

    sentences = []
    for label, verdict in zip(_row_labels(results, names, " "), verdict_list, strict=True):
        words = change_beside_null(verdict.change, verdict.null, verdict.null_kind)
        sentences.append(f"{label}: {words}. {heads_words(verdict)}.")

    return says(figure, *sentences)


def _panels_of_models(
    results: Sequence[Result],
    layer: int,
    heads: Sequence[int | str] | int | str | None,
    condition: str,
) -> list[Panel]:
    """The panel of each model, for the head that is given or the one that changes most.

    Raises:
        OptionError: The numbers of heads and models differ, a head does not exist, or a head cannot
            be chosen.
    """
    panels: list[Panel] = []
    if heads is None:
        for result in results:
            panels += chosen_panels(result, [layer], 1, condition, "difference")
        return panels

    head_of_model = head_list(heads)
    if np.ndim(heads) == 0:
        head_of_model *= len(results)
    if len(head_of_model) != len(results):
        raise OptionError(
            f"heads={heads} for {len(results)} models: give one head per model, or one for all"
        )
    for result, head in zip(results, head_of_model, strict=True):
        panels += listed_panels(result, [layer], [head])
    return panels


def _percents(changes: Sequence[Interval]) -> Interval:
    """The changes of all rows in percent, as arrays [row]."""
    rows = 100 * np.array(changes, dtype=np.float64)  # [row, estimate and ends]
    return Interval(*rows.T)


def _verdict_marks(
    figure: go.Figure, changes: Interval, null_changes: Interval, null_name: str
) -> None:
    """Draw a bar from 0 to each change, its point with the interval, and a mark at the null."""
    rows = np.arange(len(changes.estimate))
    figure.add_bar(
        x=changes.estimate,
        y=rows,
        orientation="h",
        width=0.22,
        marker_color=faint(WITH, 0.35),
        showlegend=False,
        hoverinfo="skip",
    )
    draw.points(figure, rows, changes, "measured, with 95 % interval", WITH, sideways=True)
    figure.add_scatter(
        x=null_changes.estimate,
        y=rows,
        name=null_name,
        mode="markers",
        marker=dict(symbol="line-ns-open", size=13, color=WITHOUT, line_width=3),
        hovertemplate=f"{null_name}: %{{x:.1f}} %<extra></extra>",
    )
    draw.rule(figure, x=0)


def _write_numbers(figure: go.Figure, values: np.ndarray, near_zero: float, height: float) -> None:
    """Write the number of each row above or below its mark, and to the side if it is near 0.

    Args:
        figure: The figure.
        values: The number of each row, in percent.
        near_zero: Numbers closer to 0 than this are written to the side, off the rule at 0.
        height: The height of the number over its mark, in pixels; negative for one below it.
    """
    for row, value in enumerate(values.round(3)):
        anchor = "center"
        if abs(value) < near_zero:
            anchor = "left" if value > 0 else "right"
        figure.add_annotation(
            x=value,
            y=row,
            text=percent(value / 100),
            xanchor=anchor,
            yshift=height,
            showarrow=False,
        )


def _row_labels(results: Sequence[Result], conditions: Sequence[str], name_end: str) -> list[str]:
    """The label of each row: its model, its condition and its number of inserted tokens if rows
    differ in them, and a running number if labels are still the same.

    ``name_end`` comes between the model's name and its details, such as a space or a line break.
    """
    insertions = list(map(inserted_words, results, conditions))
    labels = []
    for result, condition, insertion in zip(results, conditions, insertions, strict=True):
        name = result.provenance["model"]["name"]
        words = [f"{name}{name_end}({model_details(result)})"]
        if len(set(conditions)) > 1:
            words.append(condition)
        if len(set(insertions)) > 1:  # more inserted tokens take more attention
            words.append(insertion)
        labels.append(", ".join(words))
    return numbered(labels)


def _verdict_axes(figure: go.Figure, labels: Sequence[str], low: float, high: float) -> None:
    """Label the rows, and leave room for the numbers at the outermost points."""
    width = high - low
    left_room = 0.22 if low < 0 else 0.06
    right_room = 0.22 if high > 0 else 0.06
    figure.update_xaxes(
        nticks=5,
        title_text="change of attention<br>received (%)",
        range=[low - left_room * width, high + right_room * width],
    )

    # From the last row up to the first, which has its number above it.
    figure.update_yaxes(draw.named_ticks(labels), range=[len(labels) - 0.5, -0.8])
