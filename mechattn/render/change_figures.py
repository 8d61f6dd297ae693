"""Figures of changes: a map by layer and head, and the mean over heads by condition or over a swept
option.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechattn.axes import BASELINE
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.quantities import Null, segment_of, variable_of
from mechattn.errors import OptionError
from mechattn.prompts.sweeps import SweptCondition, swept_conditions
from mechattn.render import draw
from mechattn.render.attention_figures import common_null
from mechattn.render.draw import OTHERS, WITH, WITHOUT
from mechattn.render.figure_declaration import compared_conditions, declare
from mechattn.render.words import (
    NULL_NAMES,
    change_beside_null,
    count_words,
    in_digits,
    interval_of,
    model_caption,
    number_words,
    percent,
    percent_words,
    quantity_words,
    says,
)
from mechattn.results.result import Result, head_name
from mechattn.stats.paired import ROUNDING

# The mark of the null among conditions. Over a swept option the null is a dotted line.
_NULL_MARK: dict[str, Any] = dict(symbol="line-ew", size=18, line=dict(width=2, color=WITHOUT))


@declare(compares=True, report=[{}])
def change_map(
    result: Result,
    condition: str | None = None,
    quantity: str = "received",
    segment: str = "question",
    *,
    to: str = BASELINE,
    null: Null | None = None,
) -> go.Figure:
    """Map the change of a quantity relative to its null, by layer and head.

    Orange means that the quantity rose more, or fell less, than under the null. Blue means that it
    fell further, or rose less. If no null is known, or if the null predicts no change from ``to``,
    the map shows the change itself, and the title says so. A dot marks a head with q < 0.05 whose
    number is at least a twentieth of the largest. q is Benjamini-Hochberg over the map.

    Args:
        result: A result.
        condition: The condition; by default the first that isn't the baseline.
        quantity: The quantity, as for ``result.compare``.
        segment: The segment that the quantity is about, if it has segments.
        to: The condition to compare with, such as a random sentence of equal length.
        null: As for :class:`mechattn.Contrast`. By default it is dilution, or uniform attention if
            dilution is not known.

    Raises:
        OptionError: There is no such condition, quantity, segment or null, or the quantity has no
            heads, or several numbers per head.
    """
    condition = result.condition(condition)
    contrast = Contrast(result, condition, to, quantity, segment, null=null)
    table = contrast.table(columns="all")
    if "head" not in table:
        raise OptionError(f"{quantity!r} has no heads, which a map needs; use by_layer")
    if table.duplicated(["layer", "head"]).any():
        raise OptionError(f"{quantity!r} has more than one number per head, but a map needs one")

    null_words = table.attrs["null"]
    if _is_beyond_null(contrast, table):
        column = "beyond"
        beyond_words = f" beyond {NULL_NAMES[contrast.null_used]}"
        null_words = f"against {null_words}"
        sentence = _beyond_sentence(contrast, table)
    else:
        column = "difference"
        beyond_words = ""
        if table.null.notna().any() and not table.attrs["predicts_no_change"]:
            null_words += " predicts no difference"
        sentence = _difference_sentence(contrast, table)

    hover_columns = {
        "change": "difference",
        "q": f"q_{column}",
        "low": f"{column}_low",
        "high": f"{column}_high",
    }
    map_name = f"change{beyond_words}"
    hover = f"{map_name} %{{z:.3f}} [%{{customdata[2]:.3f}}, %{{customdata[3]:.3f}}]"
    hover += "<br>change %{customdata[0]:.3f}<br>q = %{customdata[1]:.2g}"
    quantity_name = quantity_words(quantity, table.segment.iloc[0])
    bar_words = f"change of {quantity_name}{beyond_words} ({table.scale.iloc[0]})"
    figure = draw.head_map(
        table,
        value_column=column,
        q_column=f"q_{column}",
        hover_columns=hover_columns,
        hover=hover,
        name=map_name,
        bar_words=bar_words,
    )

    heading = f"{model_caption(result)}: {quantity_name}, change{_relative_to(to)}{beyond_words}"
    significant = _significant_words(table, column)
    small_print = _map_small_print(contrast, table.attrs, significant, null_words)
    draw.title_above_legend(figure, heading, small_print, draw.map_height(table), margin_top=110)
    return says(figure, sentence)


@declare(compares=True, report=[{}])
def changes(
    result: Result,
    conditions: Sequence[str] | None = None,
    quantity: str = "received",
    segment: str = "question",
    layer: int | None = None,
    *,
    to: str = BASELINE,
    over: str = "",
    null: Null | None = None,
) -> go.Figure:
    """Plot the change of a quantity by condition, or over the values of a swept option, with 95 %
    intervals and nulls.

    A condition can be compared with its variants. Inserted tokens receive attention and move the
    other tokens apart. Masked tokens only move the others apart. Unshifted tokens only receive
    attention.

    Args:
        result: A result; with ``over`` one whose conditions come from ``ma.sweep``.
        conditions: Names of conditions, in the order shown; by default all but the baseline and
            ``to``.
        quantity: A positive quantity.
        segment: The segment that the quantity is about, if it has segments.
        layer: One layer; by default the mean over all.
        to: The condition to compare with, such as a random sentence of equal length.
        over: The swept option on the horizontal axis, such as "count". Each combination of other
            options gives a line.
        null: As for :class:`mechattn.Contrast`. By default it is dilution, or uniform attention if
            dilution is not known for all conditions.

    Raises:
        OptionError: There is no such condition, none is named after the option, one inserts a
            different number of tokens than ``to``, or the quantity has no relative change.
    """
    names = compared_conditions(result, conditions, to)
    lines = [Line(name="measured", suffix="", conditions=names, x=names)]
    if over:
        lines = swept_lines(names, over, quantity)

    null_kind = null
    if null is None:
        null_kind = common_null(
            [
                Contrast(result, name, to, quantity, segment)
                for line in lines
                for name in line.conditions
            ]
        )

    figure = draw.panels()
    sentences = []
    for line, colour in zip(lines, cycle((WITH, *OTHERS))):
        contrasts = [
            Contrast(result, name, to, quantity, segment, null=null_kind)
            for name in line.conditions
        ]
        phrases = _draw_changes(figure, line, contrasts, layer, over, colour)
        if over:
            phrases = phrases[-1:]  # the sentence gives the last value of each line
        sentences.append(f"{'; '.join(phrases)}.")
    draw.rule(figure, y=0)

    shown_segment = segment_of(variable_of(result, quantity), segment)
    quantity_name = f"{quantity_words(quantity, shown_segment)}{_relative_to(to)}"
    heading = f"{model_caption(result)}: change of {quantity_name}"
    if over:
        heading += f", by {over}"
        figure.update_xaxes(title_text=option_words(over))
    figure.update_yaxes(title_text=f"change of {quantity_name} (%)", nticks=8)

    mean_of = "layers and heads"
    if layer is not None:
        mean_of = f"the heads of layer {layer}"
    small_print = (
        f"mean over {mean_of}; n = {count_words(result)}; bars: 95 % t intervals of the log-ratio"
        " of each prompt's mean"
    )
    draw.title(figure, heading, small_print, 440)
    return says(figure, *sentences)


def option_words(option: str) -> str:
    """The title of the axis of a swept option."""
    return "inserted tokens" if option == "count" else option


class Line(NamedTuple):
    """The conditions of a line: one line of a sweep, or all conditions without a sweep."""

    name: str  # in the legend
    suffix: str  # distinguishes several lines in the legend, such as ", slash"
    conditions: Sequence[str]
    x: Sequence[str | float]  # a value for each condition


def swept_lines(conditions: Sequence[str], over: str, quantity: str) -> list[Line]:
    """The lines over a swept option: one for each combination of the other options.

    Args:
        conditions: Names of conditions. Those without the option are left out.
        over: The swept option.
        quantity: The name of a line whose conditions have no other options.

    Raises:
        OptionError: No condition is named after the option.
    """
    by_other_options: dict[str, list[SweptCondition]] = {}
    for condition in swept_conditions(conditions, over):
        by_other_options.setdefault(condition.without_option, []).append(condition)

    lines = []
    for other_options, line_conditions in by_other_options.items():
        suffix = ""
        if other_options and len(by_other_options) > 1:
            suffix = f", {other_options}"
        line = Line(
            name=other_options or quantity,
            suffix=suffix,
            conditions=[condition.name for condition in line_conditions],
            x=[condition.value for condition in line_conditions],
        )
        lines.append(line)
    return lines


def _is_beyond_null(contrast: Contrast, table: pd.DataFrame) -> bool:
    """Whether the change beyond the null is known, and differs from the change itself."""
    if table.null.isna().all() or table.attrs["predicts_no_change"]:
        return False
    if contrast.to == BASELINE:
        return True
    # Two conditions may have the same null, whose difference is then 0.
    return bool((table.null.abs() > ROUNDING).any())


def _relative_to(condition: str) -> str:
    """The condition that a change is relative to, in words; empty for the baseline."""
    if condition == BASELINE:
        return ""
    return f" relative to “{condition}”"


def _map_small_print(
    contrast: Contrast, about: Mapping[Any, Any], significant: str, null_words: str
) -> str:
    """The small print of a map: the condition, the significant heads, the prompts and the null.

    Args:
        contrast: The comparison.
        about: The attributes of its table.
        significant: The number of significant heads, in words.
        null_words: The null, in words.
    """
    sample = count_words(contrast.result)
    if "resampled" in about:
        sample += f", tested by {about['resampled']}"

    phrases = [
        f"“{contrast.condition}”{_relative_to(contrast.to)}",
        f"{significant} at q < 0.05",
        f"n = {sample}",
        null_words,
    ]
    if about["smallest_p"] >= 0.05:  # q is never smaller
        phrases.append(f"too few prompts for any head to reach it (q ≥ {about['smallest_p']:.2g})")
    if about["left_out"]:
        phrases.append(f"{len(about['left_out'])} heads left out (no {about['scale']})")
    return "; ".join(phrases)


def _significant_words(table: pd.DataFrame, column: str) -> str:
    """How many heads have q < 0.05, such as "3 of 32 heads"."""
    is_significant = table[f"q_{column}"] < 0.05
    return f"{int(is_significant.sum())} of {len(table)} heads"


def _difference_sentence(contrast: Contrast, table: pd.DataFrame) -> str:
    """The number of heads that changed, and the head that changed most."""
    significant = _significant_words(table, "difference")
    null_words = f"; {table.attrs['null']}" if contrast.to == BASELINE else ""
    head_words = _head_words(_furthest(table, "difference"))
    return (
        f"{significant} changed{_relative_to(contrast.to)} at q < 0.05{null_words}."
        f" The largest change is in {head_words}{_selected_words(table)}."
    )


def _beyond_sentence(contrast: Contrast, table: pd.DataFrame) -> str:
    """The number of heads that differ from the null, and the head that differs most."""
    null_name = NULL_NAMES[contrast.null_used]
    furthest = _furthest(table, "beyond")
    null_change = in_digits(furthest.null, "+.3f")
    if furthest.scale == "log-ratio":
        times = f"{np.exp(furthest.beyond):.2f} × {null_name}"
        null_change = f"{percent(furthest.change_null)} ({times})"
    return (
        f"{_significant_words(table, 'beyond')} differ from {null_name} at q < 0.05. The largest"
        f" difference is in {_head_words(furthest)}, under {null_name}"
        f" {null_change}{_selected_words(table)}."
    )


def _furthest(table: pd.DataFrame, column: str) -> pd.Series:
    """The row whose number in a column is furthest from 0."""
    return table.iloc[np.nanargmax(table[column].abs())]


def _head_words(row: pd.Series) -> str:
    """The name of a head with its change and interval."""
    words = number_words(interval_of(row, "difference"), "+.3f")
    if row.scale == "log-ratio":
        words = percent_words(interval_of(row, "change"))
    return f"{head_name(row.layer, row['head'])}: {words}"


def _selected_words(table: pd.DataFrame) -> str:
    """The warning that a head was selected, as the end of a sentence; empty if the table has one
    row."""
    if len(table) == 1:
        return ""
    return (
        f"; it was selected as the largest of {len(table)}, so its interval is too optimistic "
        '(select="half" avoids this)'
    )


def _draw_changes(
    figure: go.Figure,
    line: Line,
    contrasts: Sequence[Contrast],
    layer: int | None,
    over: str,
    colour: str,
) -> list[str]:
    """Draw the changes of a line in percent, and the changes under the null if all are known.

    Returns:
        Each change in words.
    """
    x = list(line.x)
    percents: list[np.ndarray] = []  # the estimate and its ends at each x
    null_percents: list[float] = []
    if over == "count" and contrasts[0].to == BASELINE:
        # A count of 0 is the baseline, which does not change.
        x = [0.0, *x]
        percents = [np.zeros(3)]
        null_percents = [0.0]

    phrases = []
    has_null = True
    for contrast in contrasts:
        change, null_change = contrast.overall(layer)
        percents.append(100 * np.array(change))
        if null_change is None:
            has_null = False
        else:
            null_percents.append(100 * float(null_change.estimate))
        words = change_beside_null(change, null_change, contrast.null_used)
        phrases.append(f"{contrast.condition}: {words}")

    if over:
        mode = "lines+markers"
        null_mark = {}
    else:
        mode = "markers"
        null_mark = _NULL_MARK
    hover = "%{x}: %{y:.1f} %<extra></extra>"
    estimates = np.transpose(percents)
    draw.points(figure, x, estimates, line.name, colour, mode=mode, hovertemplate=hover)
    if has_null:
        null_name = NULL_NAMES[contrasts[0].null_used] + line.suffix
        draw.dotted(
            figure,
            x,
            null_percents,
            null_name,
            colour,
            mode=mode,
            hovertemplate=f"%{{x}}, {null_name}: %{{y:.1f}} %<extra></extra>",
            marker=null_mark,
        )
    return phrases
