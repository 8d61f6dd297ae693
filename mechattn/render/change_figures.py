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

from mechattn.axes import BASELINE, head_name
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.quantities import NULLS, Null
from mechattn.errors import OptionError
from mechattn.render import draw
from mechattn.render.attention_figures import NAME, common_null
from mechattn.render.draw import OTHERS, WITH, WITHOUT, faint
from mechattn.render.figure_declaration import figure as declare
from mechattn.render.figure_declaration import several
from mechattn.render.words import (
    NULL_NAMES,
    beside_null,
    count_words,
    heads_words,
    in_digits,
    model_caption,
    numbered,
    percent,
    quantity_words,
    says,
    with_ends,
)
from mechattn.results.result import Result
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
    columns = {
        "shown": column,
        "change": "difference",
        "q": f"q_{column}",
        "low": f"{column}_low",
        "high": f"{column}_high",
    }

    hover = f"{number_name} %{{z:.3f}} [%{{customdata[2]:.3f}}, %{{customdata[3]:.3f}}]"
    hover += "<br>change %{customdata[0]:.3f}<br>q = %{customdata[1]:.2g}"
    quantity_name = quantity_words(quantity, segment)
    bar_words = f"change of {quantity_name}{beyond} ({table.scale.iloc[0]})"
    figure = draw.head_map(table, columns, number_name, bar_words, hover)

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
    mode = "lines+markers" if over else "markers"
    sentences = []
    for line, colour in zip(lines, cycle((WITH, *OTHERS))):
        contrasts = [
            Contrast(result, name, to, quantity, segment, null=null) for name in line.conditions
        ]
        ends, nulls, phrases = _overall(contrasts, layer)
        if over:
            phrases = phrases[-1:]  # the last value speaks for its line
        sentences.append(f"{'; '.join(phrases)}.")

        x = line.x
        if over == "count" and to == BASELINE:
            # Where nothing is inserted, nothing changes.
            x = [0, *x]
            ends = np.column_stack([np.zeros(3), ends])
            nulls = [0.0, *nulls]

        draw.points(
            figure,
            x,
            ends,
            line.name,
            colour,
            mode=mode,
            hovertemplate="%{x}: %{y:.1f} %<extra></extra>",
        )

        # A null that is not known for all of a line is not drawn.
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

    quantity_name = quantity_words(quantity, segment)
    if to != BASELINE:
        quantity_name += f" relative to “{to}”"
    heading = f"{model_caption(result)}: change of {quantity_name}"
    if over:
        heading += f", by {over}"
    heads = "mean over layers and heads"
    if layer is not None:
        heads = f"mean over the heads of layer {layer}"

    draw.rule(figure, y=0)
    bars = "bars: 95 % t intervals of the log-ratio of each prompt's mean"
    note = f"{heads}; n = {count_words(result)}; {bars}"
    draw.title(figure, heading, note, 440)

    option_words = over or None
    if over == "count":
        option_words = "inserted tokens"
    figure.update_yaxes(title_text=f"change of {quantity_name} (%)", nticks=8)
    figure.update_xaxes(title_text=option_words)
    return says(figure, *sentences)


def _overall(
    contrasts: Sequence[Contrast], layer: int | None
) -> tuple[np.ndarray, list[float], list[str]]:
    """The changes with their intervals [estimate and ends, contrast] in percent, those under the
    null where it is known, and each in words."""
    changes = []
    nulls = []
    phrases = []
    for contrast in contrasts:
        change, null_change = contrast.overall(layer)
        changes.append(change)
        if null_change is not None:
            nulls.append(100 * float(null_change.estimate))
        words = beside_null(change, null_change, contrast.null_used)
        phrases.append(f"{contrast.condition}: {words}")

    percents = 100 * np.array(changes, dtype=np.float64)
    return percents.T, nulls, phrases


class _Line(NamedTuple):
    """The conditions of one line of a sweep; without a sweep, all conditions."""

    name: str  # in the legend
    null_suffix: str  # tells the nulls of several lines apart
    conditions: Sequence[str]
    x: Sequence[str | int]  # a value for each condition


def _lines_of(names: Sequence[str], over: str, quantity: str) -> list[_Line]:
    """The lines of a figure of changes, each from left to right."""
    if not over:
        distinct_names = list(dict.fromkeys(names))
        return [_Line("measured", "", distinct_names, distinct_names)]

    swept = _swept_lines(names, over)
    lines = []
    for other_options, condition_by_value in swept.items():
        x: list[str | int] = list(condition_by_value)
        if all(value.lstrip("-").isdigit() for value in condition_by_value):
            x = [int(value) for value in condition_by_value]

        null_suffix = ""
        if other_options and len(swept) > 1:
            null_suffix = f", {other_options}"
        conditions = list(condition_by_value.values())
        lines.append(_Line(other_options or quantity, null_suffix, conditions, x))
    return lines


def _swept_lines(names: Sequence[str], option: str) -> dict[str, dict[str, str]]:
    """The conditions of a sweep by the value of the option, for each combination of the others."""
    lines: dict[str, dict[str, str]] = {}
    for condition in swept_conditions(names, option):
        line = lines.setdefault(condition.without_option, {})
        line[condition.value] = condition.name
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

    The number is that of ``result.verdict``: the change of the mean over all layers and heads, with
    its 95 % interval.

    Args:
        results: Results of several models, or several results of one, in the order shown.
        condition: The condition of all of them; by default the first of each that isn't the
            baseline.
        segment: A segment that every prompt has.
        null: As for :class:`mechattn.Contrast`: by default dilution, or uniform attention where one
            of the results has no dilution.

    Raises:
        OptionError: There are no results, no such condition or segment, or fewer than 3 prompts.
    """
    results = several(results)
    names = [result.condition(condition) for result in results]
    pairs = list(zip(results, names, strict=True))
    if null is None:
        contrasts = [Contrast(result, name, segment=segment) for result, name in pairs]
        null = common_null(contrasts)

    # Estimate, low and high end of each row, in percent.
    verdict_list = [result.verdict(name, segment, null=null) for result, name in pairs]
    change = 100 * np.array([verdict.change for verdict in verdict_list], dtype=np.float64)
    null_change = 100 * np.array([verdict.null for verdict in verdict_list], dtype=np.float64)

    figure = draw.panels()
    rows = np.arange(len(verdict_list))
    _verdict_marks(figure, rows, change, null_change[:, 0], NULLS[null])

    # Numbers stand above or below what they say, clear of the rule at 0.
    low = min(0, change.min(), null_change.min())
    high = max(0, change.max(), null_change.max())
    near_zero = 0.2 * (high - low)
    _number_notes(figure, change[:, 0], near_zero, 17)
    _number_notes(figure, null_change[:, 0], near_zero, -17)

    heading = f"Change of {quantity_words('received', segment)}"
    if len(set(names)) == 1:
        heading += f" with “{names[0]}”"
    counts = dict.fromkeys(count_words(result) for result in results)
    note = f"mean over all layers and heads; {' or '.join(counts)}"
    height = 200 + 64 * len(verdict_list)
    draw.title(figure, heading, note, height, top=120)

    row_words = _rows(results, names)
    _verdict_axes(figure, row_words, low, high)

    sentences = []
    for words, verdict in zip(row_words, verdict_list, strict=True):
        changed = beside_null(verdict.change, verdict.null, verdict.null_kind)
        sentences.append(f"{words}: {changed}. {heads_words(verdict)}.")

    return says(figure, *sentences)


def _verdict_axes(figure: go.Figure, row_words: Sequence[str], low: float, high: float) -> None:
    """The rows in words, and room for the numbers at the outermost points."""
    left = 0.22 if low else 0.06
    right = 0.22 if high else 0.06
    width = high - low
    figure.update_xaxes(
        nticks=5,
        title_text="change of attention<br>received (%)",
        range=[low - left * width, high + right * width],
    )

    labels = [words.replace(" (", "<br>(", 1) for words in row_words]
    figure.update_yaxes(
        tickvals=list(range(len(labels))),
        ticktext=labels,
        range=[len(labels) - 0.5, -0.8],
    )


def _verdict_marks(
    figure: go.Figure, rows: np.ndarray, change: np.ndarray, null: np.ndarray, null_name: str
) -> None:
    """A bar from 0 to each change, its point with the interval, and a mark at the null."""
    figure.add_bar(
        x=change[:, 0],
        y=rows,
        orientation="h",
        width=0.22,
        marker_color=faint(WITH, 0.35),
        showlegend=False,
        hoverinfo="skip",
    )
    draw.points(figure, rows, change.T, "measured, with 95 % interval", WITH, sideways=True)
    figure.add_scatter(
        x=null,
        y=rows,
        name=null_name,
        mode="markers",
        marker=dict(symbol="line-ns-open", size=13, color=WITHOUT, line_width=3),
        hovertemplate=f"{null_name}: %{{x:.1f}} %<extra></extra>",
    )
    draw.rule(figure, x=0)


def _number_notes(figure: go.Figure, values: np.ndarray, near_zero: float, shift: float) -> None:
    """The number of each row, above or below its mark; those near 0 beside it."""
    for row, value in enumerate(values.round(3)):
        anchor = "center"
        if abs(value) < near_zero:
            anchor = "left" if value > 0 else "right"
        figure.add_annotation(
            x=value,
            y=row,
            text=percent(value / 100),
            xanchor=anchor,
            yshift=shift,
            showarrow=False,
        )


def _inserted(result: Result, condition: str) -> str:
    """How many tokens a condition inserts, in words; the range over prompts."""
    is_inserted = result["sequences"].origin.sel(condition=condition) == -1
    counts = sorted(set(is_inserted.sum("pos").values.tolist()))
    if len(counts) == 1:
        return f"{counts[0]} tokens inserted"
    return f"{counts[0]} to {counts[-1]} tokens inserted"


def _rows(results: Sequence[Result], conditions: Sequence[str]) -> list[str]:
    """What each row is: its model, its condition where they differ, and a number where that is not
    enough.
    """
    counts = [_inserted(result, name) for result, name in zip(results, conditions, strict=True)]
    rows = []
    for result, condition, count in zip(results, conditions, counts, strict=True):
        words = [model_caption(result)]
        if len(set(conditions)) > 1:
            words.append(condition)
        if len(set(counts)) > 1:  # what takes more tokens takes more attention
            words.append(count)
        rows.append(", ".join(words))
    return numbered(rows)
