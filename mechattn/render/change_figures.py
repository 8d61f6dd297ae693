"""Figures of the change of a mean over heads: by condition, over a swept option, and model by
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechattn.axes import BASELINE
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.quantities import Null
from mechattn.errors import OptionError
from mechattn.render import draw
from mechattn.render.attention_figures import common_null
from mechattn.render.draw import OTHERS, WITH, WITHOUT
from mechattn.render.figure_declaration import declare
from mechattn.render.words import (
    NULL_NAMES,
    beside_null,
    count_words,
    in_digits,
    model_caption,
    percent,
    quantity_words,
    says,
    with_ends,
)
from mechattn.results.result import Result, head_name
from mechattn.stats.paired import ROUNDING

# The null of a condition among others; over an option it is a dotted line.
NULL_MARK = dict(symbol="line-ew", size=18, line=dict(width=2, color=WITHOUT))


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
        OptionError: There is no such condition, quantity, segment or null, or the quantity has
            several numbers per head.
    """
    condition = result.condition(condition)
    contrast = Contrast(result, condition, to, quantity, segment, null=null)
    table = contrast.table(columns="all")
    if table.duplicated(["layer", "head"]).any():
        raise OptionError(f"{quantity!r} has more than one number per head, but a map needs one")

    # What is beyond a null of no change is the change itself.
    has_null = bool(table.null.notna().any())
    is_beyond = has_null and not table.attrs["predicts_no_change"]
    if is_beyond and to != BASELINE:
        # Another condition may have the same null, which then cancels.
        is_beyond = bool((table.null.abs() > ROUNDING).any())

    null_name = NULL_NAMES[contrast.null_used]
    column = "difference"
    number_name = "change"
    beyond = ""
    if is_beyond:
        column = "beyond"
        number_name = f"relative to {null_name}"
        beyond = f" beyond {null_name}"
    hovered = {
        "change": "difference",
        "q": f"q_{column}",
        "low": f"{column}_low",
        "high": f"{column}_high",
    }
    hover = f"{number_name} %{{z:.3f}} [%{{customdata[2]:.3f}}, %{{customdata[3]:.3f}}]"
    hover += "<br>change %{customdata[0]:.3f}<br>q = %{customdata[1]:.2g}"
    quantity_name = quantity_words(quantity, segment)
    bar_words = f"change of {quantity_name}{beyond} ({table.scale.iloc[0]})"
    figure = draw.head_map(table, column, f"q_{column}", hovered, hover, number_name, bar_words)

    versus = ""
    if to != BASELINE:
        versus = f" relative to “{to}”"
    heading = f"{model_caption(result)}: {quantity_name}, change{versus}"
    if is_beyond:
        heading += f", {number_name}" if versus else f" {number_name}"

    small_print = _map_small_print(result, condition, table, column, versus)
    draw.title(figure, heading, small_print, draw.map_height(table), top=110)
    return says(figure, _map_words(table, column, null_name, versus))


def _map_small_print(
    result: Result, condition: str, table: pd.DataFrame, column: str, versus: str
) -> str:
    """How many heads are significant, of how many prompts, and against what."""
    about = table.attrs
    count = count_words(result)
    if "resampled" in about:
        count += f", tested by {about['resampled']}"
    against = about["null"]
    if column == "beyond":
        against = f"against {against}"
    elif table.null.notna().any() and not about["predicts_no_change"]:
        against += " predicts no difference"

    phrases = [
        f"“{condition}”{versus}",
        f"{_significant(table, column)} at q < 0.05",
        f"n = {count}",
        against,
    ]
    if about["smallest_q"] >= 0.05:
        phrases.append(f"too few prompts for any head to reach it (q ≥ {about['smallest_q']:.2g})")
    if about["left_out"]:
        phrases.append(f"{len(about['left_out'])} heads left out (no ratio)")
    return "; ".join(phrases)


def _significant(table: pd.DataFrame, column: str) -> str:
    """How many heads have q < 0.05."""
    is_significant = table[f"q_{column}"] < 0.05
    return f"{int(is_significant.sum())} of {len(table)} heads"


def _map_words(table: pd.DataFrame, column: str, null_name: str, versus: str) -> str:
    """The number of significant heads, and the head furthest from the null (without it: most
    changed).
    """
    furthest_row = int(np.nanargmax(table[column].abs()))
    furthest = table.iloc[furthest_row]
    is_ratio = table.scale.iloc[0] == "log-ratio"
    if is_ratio:
        names = ["change", "change_low", "change_high", "change_null"]
        numbers = [percent(number) for number in furthest[names]]
    else:
        names = ["difference", "difference_low", "difference_high", "null"]
        numbers = [in_digits(number, "+.3f") for number in furthest[names]]

    *interval, null_change = numbers
    name = head_name(furthest.layer, furthest["head"])
    head = f"{name}: {with_ends(*interval)}"
    picked = ""
    if len(table) > 1:
        picked = (
            f"; it was selected as the largest of {len(table)}, so its interval is too optimistic "
            '(select="half" avoids this)'
        )

    count = _significant(table, column)
    if column == "difference":
        null = ""
        if not versus:
            null = f"; {table.attrs['null']}"
        return (
            f"{count} changed{versus} at q < 0.05{null}. The largest change is in {head}{picked}."
        )

    times = ""
    if is_ratio:
        ratio = np.exp(furthest.beyond)
        times = f" ({ratio:.2f} × {null_name})"
    return (
        f"{count} differ from {null_name} at q < 0.05. The largest difference is in {head}, "
        f"under {null_name} {null_change}{times}{picked}."
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
    names = list(conditions or [name for name in result.conditions[1:] if name != to])
    names = names or [result.condition()]
    lines = _lines_of(names, over, quantity)
    if null is None:
        drawn = [name for line in lines for name in line.conditions]
        null = common_null([Contrast(result, name, to, quantity, segment) for name in drawn])

    figure = draw.panels()
    sentences = []
    for line, colour in zip(lines, cycle((WITH, *OTHERS))):
        contrasts = [
            Contrast(result, name, to, quantity, segment, null=null) for name in line.conditions
        ]
        phrases = _draw_changes(figure, line, contrasts, layer, over, colour)
        if over:
            phrases = phrases[-1:]  # the last value speaks for its line
        sentences.append(f"{'; '.join(phrases)}.")
    draw.rule(figure, y=0)

    quantity_name = quantity_words(quantity, segment)
    if to != BASELINE:
        quantity_name += f" relative to “{to}”"
    heading = f"{model_caption(result)}: change of {quantity_name}"
    if over:
        heading += f", by {over}"
        option_words = "inserted tokens" if over == "count" else over
        figure.update_xaxes(title_text=option_words)
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
    over: str,
    colour: str,
) -> list[str]:
    """Draw the changes of a line in percent, and those under the null where it is known for all.

    Returns:
        Each change in words.
    """
    x = list(line.x)
    changes: list[np.ndarray] = []
    nulls: list[float] = []
    phrases = []
    if over == "count" and contrasts[0].to == BASELINE:
        # Where nothing is inserted, nothing changes.
        x = [0.0, *x]
        changes = [np.zeros(3)]
        nulls = [0.0]

    for contrast in contrasts:
        change, null_change = contrast.overall(layer)
        changes.append(100 * np.array(change))
        if null_change is not None:
            nulls.append(100 * float(null_change.estimate))
        words = beside_null(change, null_change, contrast.null_used)
        phrases.append(f"{contrast.condition}: {words}")

    mode = "lines+markers" if over else "markers"
    hover = "%{x}: %{y:.1f} %<extra></extra>"
    draw.points(figure, x, np.transpose(changes), line.name, colour, mode=mode, hovertemplate=hover)
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
            marker={} if over else NULL_MARK,
        )
    return phrases


class _Line(NamedTuple):
    """The conditions of one line of a sweep; without a sweep, all conditions."""

    name: str  # in the legend
    null_suffix: str  # tells the nulls of several lines apart
    conditions: Sequence[str]
    x: Sequence[str | float]  # a value for each condition


def _lines_of(names: Sequence[str], over: str, quantity: str) -> list[_Line]:
    """The lines of a figure of changes, each from left to right."""
    names = list(dict.fromkeys(names))
    if not over:
        return [_Line("measured", "", names, names)]

    swept: dict[str, list[SweptCondition]] = {}
    for condition in swept_conditions(names, over):
        swept.setdefault(condition.without_option, []).append(condition)

    lines = []
    for other_options, conditions in swept.items():
        null_suffix = ""
        if other_options and len(swept) > 1:
            null_suffix = f", {other_options}"
        line_names = [condition.name for condition in conditions]
        x = numbers_or_words([condition.value for condition in conditions])
        lines.append(_Line(other_options or quantity, null_suffix, line_names, x))
    return lines


class SweptCondition(NamedTuple):
    """A condition of a sweep.

    Args:
        name: Its name, such as "slash, count=5, place=start".
        value: The value of the option in it, such as "5".
        without_option: The rest of the name, such as "slash, place=start".
    """

    name: str
    value: str
    without_option: str


def swept_conditions(names: Sequence[str], option: str) -> list[SweptCondition]:
    """The conditions that are named after a swept option, in their order.

    Args:
        names: Names of conditions, as ``ma.sweep`` gives them.
        option: The option, such as "count".

    Raises:
        OptionError: No condition is named after the option.
    """
    conditions = []
    for name in names:
        rest = []
        value = None
        for phrase in name.split(", "):
            if phrase.startswith(f"{option}="):
                value = phrase.removeprefix(f"{option}=")
            else:
                rest.append(phrase)
        if value is not None:
            conditions.append(SweptCondition(name, value, ", ".join(rest)))

    if not conditions:
        raise OptionError(
            f"no condition is named {option}=…; run or evaluate with conditions=ma.sweep(…)"
        )
    return conditions


def numbers_or_words(values: Sequence[str]) -> Sequence[str | float]:
    """The values of a swept option on an axis: as numbers, if all of them are."""
    try:
        return [float(value) for value in values]
    except ValueError:
        return values
