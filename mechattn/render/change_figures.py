"""Figures of the change of a mean over heads: by condition, over a swept option, and model by
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechattn.axes import BASELINE
from mechattn.contrast.contrast import Contrast, Verdict
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
    model_caption,
    percent,
    quantity_words,
    says,
)
from mechattn.results.result import Result
from mechattn.stats.intervals import Interval
from mechattn.stats.paired import ROUNDING


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
    """
    condition = result.condition(condition)
    contrast = Contrast(result, condition, to, quantity, segment, null=null)
    table = contrast.table(columns="all")
    if table.duplicated(["layer", "head"]).any():
        raise OptionError(f"{quantity!r} has more than one number per head, but a map needs one")
    has_null = bool(table.null.notna().any())
    predicts_change = has_null and table.attrs["null"] != "no difference"
    if to != BASELINE:
        predicts_change = predicts_change and bool((table.null.abs() > ROUNDING).any())
    null_name = NULL_NAMES[contrast.null_used]
    column = "beyond" if predicts_change else "difference"
    shown_words = f"relative to {null_name}" if predicts_change else "change"

    columns = {
        "shown": column,
        "change": "difference",
        "q": f"q_{column}",
        "low": f"{column}_low",
        "high": f"{column}_high",
    }
    hover = f"{shown_words} %{{z:.3f}} [%{{customdata[2]:.3f}}, %{{customdata[3]:.3f}}]"
    hover += "<br>change %{customdata[0]:.3f}<br>q = %{customdata[1]:.2g}"
    bar_words = f"change of {quantity_words(quantity, segment)}"
    if predicts_change:
        bar_words += f" beyond {null_name}"
    bar_words += f" ({table.scale.iloc[0]})"
    figure = draw.head_map(table, columns, shown_words, bar_words, hover)

    versus = "" if to == BASELINE else f" relative to “{to}”"
    small_print = _map_small_print(result, condition, table, column, versus)
    what_changed = f"change{versus}"
    if predicts_change:
        what_changed += f", {shown_words}" if versus else f" {shown_words}"
    heading = f"{model_caption(result)}: {quantity_words(quantity, segment)}, {what_changed}"
    draw.title(figure, heading, small_print, draw.map_height(table), top=110)
    return says(figure, _map_words(table, column, null_name, versus))


def _map_small_print(
    result: Result, condition: str, table: pd.DataFrame, column: str, versus: str
) -> str:
    """How many heads are significant, of how many prompts, and against what."""
    count = count_words(result)
    if "resampled" in table.attrs:
        count += f", tested by {table.attrs['resampled']}"
    significant = int((table[f"q_{column}"] < 0.05).sum())
    against = table.attrs["null"]
    if column == "beyond":
        against = f"against {against}"
    elif table.null.notna().any():
        against += " predicts no difference"
    phrases = [
        f"“{condition}”{versus}",
        f"{significant} of {len(table)} heads at q < 0.05",
        f"n = {count}",
        against,
    ]
    smallest_q = table.attrs["smallest_q"]
    if smallest_q >= 0.05:
        phrases.append(f"too few prompts for any head to reach it (q ≥ {smallest_q:.2g})")
    if table.attrs["left_out"]:
        phrases.append(f"{len(table.attrs['left_out'])} heads left out (no ratio)")
    return "; ".join(phrases)


def _map_words(table: pd.DataFrame, column: str, null_name: str, versus: str) -> str:
    """The number of significant heads, and the head furthest from the null (without it: most
    changed).
    """
    largest = table.iloc[int(np.nanargmax(table[column].abs()))]
    is_ratio = table.scale.iloc[0] == "log-ratio"
    if is_ratio:
        names = ("change", "change_low", "change_high", "change_null")
        change, low, high, null_change = (percent(largest[name]) for name in names)
    else:
        names = ("difference", "difference_low", "difference_high", "null")
        change, low, high, null_change = (
            f"{largest[name]:+.3f}".replace("-", "−") for name in names
        )
    head = f"L{largest.layer:.0f}H{largest['head']:.0f}: {change} [{low}, {high}]"
    picked = ""
    if len(table) > 1:
        picked = (
            f"; it was selected as the largest of {len(table)}, so its interval is too optimistic "
            '(select="half" avoids this)'
        )
    significant = int((table[f"q_{column}"] < 0.05).sum())
    count = f"{significant} of {len(table)} heads"
    if column == "beyond":
        times = f" ({np.exp(largest.beyond):.2f} × {null_name})" if is_ratio else ""
        return (
            f"{count} differ from {null_name} at q < 0.05. The largest difference is in {head}, "
            f"under {null_name} {null_change}{times}{picked}."
        )
    null = "" if versus else f"; {table.attrs['null']}"
    return f"{count} changed{versus} at q < 0.05{null}. The largest change is in {head}{picked}."


class _Change(NamedTuple):
    """The relative change of a condition, that under its null, and which null that is."""

    condition: str
    change: Interval
    null_change: Interval | None
    null_kind: Null

    @property
    def words(self) -> str:
        return f"{self.condition}: {beside_null(self.change, self.null_change, self.null_kind)}"


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
        conditions = [name for name in result.conditions[1:] if name != to]
        conditions = conditions or [result.condition()]
    names = list(conditions)
    lines = _swept(names, over) if over else {"": {name: name for name in names}}
    if null is None:
        drawn = [
            name for conditions_by_value in lines.values() for name in conditions_by_value.values()
        ]
        null = common_null([Contrast(result, name, to, quantity, segment) for name in drawn])

    figure = draw.panels()
    mode = "lines+markers" if over else "markers"
    sentences = []
    for (line_words, conditions_by_value), colour in zip(lines.items(), cycle((WITH, *OTHERS))):
        line_changes = []
        for condition in conditions_by_value.values():
            contrast = Contrast(result, condition, to, quantity, segment, null=null)
            change, null_change = contrast.overall(layer)
            line_changes.append(_Change(condition, change, null_change, contrast.null_used))

        x: list[int | str] = list(conditions_by_value)
        ends: list[Sequence[Any]] = [change.change for change in line_changes]
        null_ends = [change.null_change for change in line_changes]
        null_y = [100 * float(end.estimate) for end in null_ends if end is not None]
        has_null = len(null_y) == len(null_ends)
        if over and all(value.lstrip("-").isdigit() for value in conditions_by_value):
            x = [int(value) for value in conditions_by_value]
            if to == BASELINE:  # nothing inserted, so nothing changed
                x = [0, *x]
                ends = [(0.0, 0.0, 0.0), *ends]
                null_y = [0.0, *null_y]
        draw.points(
            figure,
            x,
            100 * np.array(ends, dtype=np.float64).T,
            line_words or (quantity if over else "measured"),
            colour,
            mode=mode,
            hovertemplate="%{x}: %{y:.1f} %<extra></extra>",
        )
        if has_null:
            null_name = NULL_NAMES[line_changes[0].null_kind]
            if line_words and len(lines) > 1:
                null_name += f", {line_words}"
            hover = f"%{{x}}, {null_name}: %{{y:.1f}} %<extra></extra>"
            if over:
                draw.dotted(figure, x, null_y, null_name, colour, mode=mode, hovertemplate=hover)
            else:
                marker = dict(symbol="line-ew", size=18, line=dict(width=2, color=WITHOUT))
                figure.add_scatter(
                    x=x, y=null_y, mode=mode, name=null_name, marker=marker, hovertemplate=hover
                )
        told = line_changes[-1:] if over else line_changes  # of a sweep the last
        sentences.append("; ".join(change.words for change in told) + ".")

    quantity_name = quantity_words(quantity, segment)
    if to != BASELINE:
        quantity_name += f" relative to “{to}”"
    heads = "mean over layers and heads"
    if layer is not None:
        heads = f"mean over the heads of layer {layer}"
    bars = "bars: 95 % t intervals of the log-ratio of each prompt's mean"
    heading = f"{model_caption(result)}: change of {quantity_name}"
    if over:
        heading += f", by {over}"
    draw.rule(figure, y=0)
    draw.title(figure, heading, f"{heads}; n = {count_words(result)}; {bars}", 440)
    figure.update_yaxes(title_text=f"change of {quantity_name} (%)", nticks=8)
    figure.update_xaxes(title_text="inserted tokens" if over == "count" else over or None)
    return says(figure, *sentences)


def _swept(names: Sequence[str], option: str) -> dict[str, dict[str, str]]:
    """The conditions of a sweep by the value of the option, for each combination of the others."""
    lines: dict[str, dict[str, str]] = {}
    for name in names:
        options = name.split(", ")
        swept = [text for text in options if text.startswith(f"{option}=")]
        if swept:
            rest = ", ".join(text for text in options if text not in swept)
            lines.setdefault(rest, {})[swept[0].removeprefix(f"{option}=")] = name
    if not lines:
        raise OptionError(
            f"no condition of this result is named {option}=…; run it with conditions=ma.sweep(…)"
        )
    return lines


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
    if null is None:
        null = common_null(
            [
                Contrast(result, name, segment=segment)
                for result, name in zip(results, names, strict=True)
            ]
        )
    verdict_list = [
        result.verdict(name, segment, null=null)
        for result, name in zip(results, names, strict=True)
    ]

    change = 100 * np.array([verdict.change for verdict in verdict_list], dtype=np.float64)
    null_change = 100 * np.array([verdict.null for verdict in verdict_list], dtype=np.float64)
    rows = np.arange(len(verdict_list))
    figure = draw.panels()
    for row, value in enumerate(change[:, 0]):
        line = dict(color=faint(WITH, 0.35), width=14)
        figure.add_scatter(
            x=[0, value], y=[row, row], mode="lines", line=line, showlegend=False, hoverinfo="skip"
        )
    draw.points(figure, rows, change.T, "measured, with 95 % interval", WITH, sideways=True)
    figure.add_scatter(
        x=null_change[:, 0],
        y=rows,
        name=NULLS[null],
        mode="markers",
        marker=dict(symbol="line-ns-open", size=13, color=WITHOUT, line_width=3),
        hovertemplate=f"{NULLS[null]}: %{{x:.1f}} %<extra></extra>",
    )

    low = min(0, change.min(), null_change.min())
    high = max(0, change.max(), null_change.max())
    # Numbers stand above or below what they say, clear of the rule at 0.
    for column, shift in ((change, 17), (null_change, -17)):
        for row, value in enumerate(column[:, 0].round(3)):
            anchor = "center"
            if abs(value) < 0.2 * (high - low):
                anchor = "left" if value > 0 else "right"
            figure.add_annotation(
                x=value,
                y=row,
                text=percent(value / 100),
                xanchor=anchor,
                yshift=shift,
                showarrow=False,
            )
    draw.rule(figure, x=0)

    heading = f"Change of {quantity_words('received', segment)}"
    if len(set(names)) == 1:
        heading += f" with “{names[0]}”"
    counts = " or ".join(dict.fromkeys(count_words(result) for result in results))
    note = f"mean over all layers and heads; {counts}"
    draw.title(figure, heading, note, 200 + 64 * len(verdict_list), top=120)
    # Room for the words at the outermost points.
    left = (0.22 if low else 0.06) * (high - low)
    right = (0.22 if high else 0.06) * (high - low)
    axis_words = "change of attention<br>received (%)"
    figure.update_xaxes(nticks=5, title_text=axis_words, range=[low - left, high + right])
    row_words = _rows(results, names)
    labels = [words.replace(" (", "<br>(", 1) for words in row_words]
    figure.update_yaxes(tickvals=rows, ticktext=labels, range=[len(verdict_list) - 0.5, -0.8])
    sentences = [
        _row_sentence(words, verdict)
        for words, verdict in zip(row_words, verdict_list, strict=True)
    ]
    return says(figure, *sentences)


def _row_sentence(words: str, verdict: Verdict) -> str:
    """A row of the figure of verdicts in words."""
    change = beside_null(verdict.change, verdict.null, verdict.null_kind)
    return f"{words}: {change}. {heads_words(verdict)}."


def _inserted(result: Result, condition: str) -> str:
    """How many tokens a condition inserts, in words; the range over prompts."""
    is_inserted = result["sequences"].origin.sel(condition=condition) == -1
    counts = is_inserted.sum("pos").values
    low = int(counts.min())
    high = int(counts.max())
    if low == high:
        return f"{low} tokens inserted"
    return f"{low} to {high} tokens inserted"


def _rows(results: Sequence[Result], conditions: Sequence[str]) -> list[str]:
    """What each row is: its model, its condition where they differ, and a number where that is not
    enough.
    """
    words = [model_caption(result) for result in results]
    if len(set(conditions)) > 1:
        words = [f"{model}, {name}" for model, name in zip(words, conditions, strict=True)]
    counts = [_inserted(result, name) for result, name in zip(results, conditions, strict=True)]
    if len(set(counts)) > 1:  # what takes more tokens takes more attention
        words = [f"{row}, {count}" for row, count in zip(words, counts, strict=True)]
    numbered = []
    for index, row in enumerate(words):
        if words.count(row) > 1:
            row = f"{row}, result {words[: index + 1].count(row)}"
        numbered.append(row)
    return numbered
