"""Figures of the change of a mean over heads: by condition, over a swept option, and model by
model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, cycle
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechattn.axes import BASELINE
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.quantities import Null
from mechattn.errors import OptionError
from mechattn.prompts.sweeps import SweptCondition, swept_conditions
from mechattn.render import draw
from mechattn.render.attention_figures import common_null
from mechattn.render.draw import OTHERS, WITH, WITHOUT
from mechattn.render.figure_declaration import declare
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

# The null of a condition among others; over an option it is a dotted line.
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
    """Map the change of a quantity relative to its null by layer and head; dots mark q < 0.05
    and at least a twentieth of the largest.

    Orange means that it rose more, or fell less, than under the null; blue that it fell further, or
    rose less. Where no null is known, or it predicts no change from ``to``, the map shows the
    change itself, and the title says so. q is Benjamini-Hochberg over the map.

    Args:
        result: A result.
        condition: The condition; the first that isn't the baseline by default.
        quantity: The quantity, as for ``result.compare``.
        segment: The segment that it is about.
        to: The condition to compare with, such as a random sentence of as many tokens.
        null: As for :class:`mechattn.Contrast`: by default dilution, or uniform attention where
            that is not known.

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

    against = table.attrs["null"]
    if _is_beyond_null(contrast, table):
        column = "beyond"
        beyond = f" beyond {NULL_NAMES[contrast.null_used]}"
        against = f"against {against}"
        sentence = _beyond_sentence(contrast, table)
    else:
        column = "difference"
        beyond = ""
        if table.null.notna().any() and not table.attrs["predicts_no_change"]:
            against += " predicts no difference"
        sentence = _difference_sentence(contrast, table)

    hovered = {
        "change": "difference",
        "q": f"q_{column}",
        "low": f"{column}_low",
        "high": f"{column}_high",
    }
    name = f"change{beyond}"
    hover = f"{name} %{{z:.3f}} [%{{customdata[2]:.3f}}, %{{customdata[3]:.3f}}]"
    hover += "<br>change %{customdata[0]:.3f}<br>q = %{customdata[1]:.2g}"
    quantity_name = quantity_words(quantity, segment)
    bar_words = f"change of {quantity_name}{beyond} ({table.scale.iloc[0]})"
    figure = draw.head_map(table, column, f"q_{column}", hovered, hover, name, bar_words)

    heading = f"{model_caption(result)}: {quantity_name}, change{_relative_to(to)}{beyond}"
    significant = _significant(table, column)
    small_print = _map_small_print(contrast, table.attrs, significant, against)
    draw.title_above_legend(figure, heading, small_print, draw.map_height(table), top=110)
    return says(figure, sentence)


def _is_beyond_null(contrast: Contrast, table: pd.DataFrame) -> bool:
    """Whether the change beyond the null is known, and another number than the change itself."""
    if table.null.isna().all() or table.attrs["predicts_no_change"]:
        return False
    if contrast.to == BASELINE:
        return True
    # Another condition may have the same null, which then cancels.
    return bool((table.null.abs() > ROUNDING).any())


def _relative_to(condition: str) -> str:
    """What a change is relative to, where it is not the baseline."""
    if condition == BASELINE:
        return ""
    return f" relative to “{condition}”"


def _map_small_print(
    contrast: Contrast, about: Mapping[Any, Any], significant: str, against: str
) -> str:
    """How many heads are significant, of how many prompts, and against what."""
    count = count_words(contrast.result)
    if "resampled" in about:
        count += f", tested by {about['resampled']}"

    phrases = [
        f"“{contrast.condition}”{_relative_to(contrast.to)}",
        f"{significant} at q < 0.05",
        f"n = {count}",
        against,
    ]
    if about["smallest_p"] >= 0.05:  # q is never smaller
        phrases.append(f"too few prompts for any head to reach it (q ≥ {about['smallest_p']:.2g})")
    if about["left_out"]:
        phrases.append(f"{len(about['left_out'])} heads left out (no ratio)")
    return "; ".join(phrases)


def _significant(table: pd.DataFrame, column: str) -> str:
    """How many heads have q < 0.05."""
    is_significant = table[f"q_{column}"] < 0.05
    return f"{int(is_significant.sum())} of {len(table)} heads"


def _difference_sentence(contrast: Contrast, table: pd.DataFrame) -> str:
    """The number of heads that changed, and the head that changed most."""
    significant = f"{_significant(table, 'difference')} changed{_relative_to(contrast.to)}"
    null = f"; {table.attrs['null']}" if contrast.to == BASELINE else ""
    head = _head_words(_furthest(table, "difference"))
    return f"{significant} at q < 0.05{null}. The largest change is in {head}{_selected(table)}."


def _beyond_sentence(contrast: Contrast, table: pd.DataFrame) -> str:
    """The number of heads that differ from the null, and the head that is furthest from it."""
    null_name = NULL_NAMES[contrast.null_used]
    furthest = _furthest(table, "beyond")
    null_change = in_digits(furthest.null, "+.3f")
    if furthest.scale == "log-ratio":
        times = f"{np.exp(furthest.beyond):.2f} × {null_name}"
        null_change = f"{percent(furthest.change_null)} ({times})"
    return (
        f"{_significant(table, 'beyond')} differ from {null_name} at q < 0.05. The largest"
        f" difference is in {_head_words(furthest)}, under {null_name}"
        f" {null_change}{_selected(table)}."
    )


def _furthest(table: pd.DataFrame, column: str) -> pd.Series:
    """The row with the largest number of a column, of either sign."""
    row = int(np.nanargmax(table[column].abs()))
    return table.iloc[row]


def _head_words(row: pd.Series) -> str:
    """The name of a head with its change and interval."""
    words = number_words(interval_of(row, "difference"), "+.3f")
    if row.scale == "log-ratio":
        words = percent_words(interval_of(row, "change"))
    return f"{head_name(row.layer, row['head'])}: {words}"


def _selected(table: pd.DataFrame) -> str:
    """The warning that a head was selected, where there was a choice."""
    if len(table) == 1:
        return ""
    return (
        f"; it was selected as the largest of {len(table)}, so its interval is too optimistic "
        '(select="half" avoids this)'
    )


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

    Of a condition and its variants: as inserted, tokens receive attention and move the others
    apart; masked, they only move them apart; unshifted, they only receive attention.

    Args:
        result: A result; with ``over`` one whose conditions come from ``ma.sweep``.
        conditions: Names of conditions, in the order shown; all but the baseline and ``to`` by
            default.
        quantity: A positive quantity.
        segment: The segment that it is about.
        layer: One layer; the mean over all by default.
        to: The condition to compare with, such as a random sentence of as many tokens.
        over: The swept option on the horizontal axis, such as "count"; each combination of other
            options gives a line.
        null: As for :class:`mechattn.Contrast`: by default dilution, or uniform attention where
            that is not known for all conditions.

    Raises:
        OptionError: There is no such condition, or none that is named after the option; or one
            inserts another number of tokens than ``to``.
    """
    if conditions is None:
        result.condition()  # refuses a result of the baseline alone
        conditions = [name for name in result.conditions[1:] if name != to]
    if not conditions:
        raise OptionError(
            f"there is no condition to compare with {to!r}; give at least one in conditions"
        )
    lines = _lines_of(conditions, over, quantity)
    if null is None:
        names = chain.from_iterable(line.conditions for line in lines)
        null = common_null([Contrast(result, name, to, quantity, segment) for name in names])

    figure = draw.panels()
    sentences = []
    for line, colour in zip(lines, cycle((WITH, *OTHERS))):
        contrasts = [
            Contrast(result, name, to, quantity, segment, null=null) for name in line.conditions
        ]
        phrases = _draw_changes(figure, line, contrasts, layer, colour)
        if over:
            phrases = phrases[-1:]  # the last value speaks for its line
        sentences.append(f"{'; '.join(phrases)}.")
    draw.rule(figure, y=0)

    quantity_name = f"{quantity_words(quantity, segment)}{_relative_to(to)}"
    heading = f"{model_caption(result)}: change of {quantity_name}"
    if over:
        heading += f", by {over}"
        figure.update_xaxes(title_text=option_words(over))
    figure.update_yaxes(title_text=f"change of {quantity_name} (%)", nticks=8)

    heads = "mean over layers and heads"
    if layer is not None:
        heads = f"mean over the heads of layer {layer}"
    bars = "bars: 95 % t intervals of the log-ratio of each prompt's mean"
    draw.title(figure, heading, f"{heads}; n = {count_words(result)}; {bars}", 440)
    return says(figure, *sentences)


def _draw_changes(
    figure: go.Figure,
    line: _Line,
    contrasts: Sequence[Contrast],
    layer: int | None,
    colour: str,
) -> list[str]:
    """Draw the changes of a line in percent, and those under the null where it is known for all.

    Returns:
        Each change in words.
    """
    x = list(line.x)
    percents: list[np.ndarray] = []  # the estimate and its ends at each x
    nulls: list[float] = []
    phrases = []
    if line.over == "count" and contrasts[0].to == BASELINE:
        # Where nothing is inserted, nothing changes.
        x = [0.0, *x]
        percents = [np.zeros(3)]
        nulls = [0.0]

    for contrast in contrasts:
        change, null_change = contrast.overall(layer)
        percents.append(100 * np.array(change))
        if null_change is not None:
            nulls.append(100 * float(null_change.estimate))
        words = change_beside_null(change, null_change, contrast.null_used)
        phrases.append(f"{contrast.condition}: {words}")

    mode = "markers"
    null_mark = _NULL_MARK
    if line.over:
        mode = "lines+markers"
        null_mark = {}
    hover = "%{x}: %{y:.1f} %<extra></extra>"
    estimates = np.transpose(percents)
    draw.points(figure, x, estimates, line.name, colour, mode=mode, hovertemplate=hover)
    if len(nulls) == len(x):
        null_name = NULL_NAMES[contrasts[0].null_used] + line.null_suffix
        draw.dotted(
            figure,
            x,
            nulls,
            null_name,
            colour,
            mode=mode,
            hovertemplate=f"%{{x}}, {null_name}: %{{y:.1f}} %<extra></extra>",
            marker=null_mark,
        )
    return phrases


class _Line(NamedTuple):
    """The conditions of one line of a sweep; without a sweep, all conditions."""

    name: str  # in the legend
    null_suffix: str  # tells the nulls of several lines apart
    conditions: Sequence[str]
    x: Sequence[str | float]  # a value for each condition
    over: str  # the swept option; "" without a sweep


def _lines_of(conditions: Sequence[str], over: str, quantity: str) -> list[_Line]:
    """The lines of a figure of changes."""
    names = list(dict.fromkeys(conditions))
    if not over:
        return [_Line("measured", "", names, names, over)]

    swept: dict[str, list[SweptCondition]] = {}
    for condition in swept_conditions(names, over):
        swept.setdefault(condition.without_option, []).append(condition)

    lines = []
    for other_options, swept_alike in swept.items():
        null_suffix = ""
        if other_options and len(swept) > 1:
            null_suffix = f", {other_options}"
        line_names = [condition.name for condition in swept_alike]
        x = [condition.value for condition in swept_alike]
        lines.append(_Line(other_options or quantity, null_suffix, line_names, x, over))
    return lines


def option_words(option: str) -> str:
    """What the axis of a swept option says."""
    return "inserted tokens" if option == "count" else option
