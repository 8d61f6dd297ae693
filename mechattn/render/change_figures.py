"""Figures of the change of a mean over heads: by condition, over a swept option, and model by model."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import cycle
from typing import Any

import numpy as np
import plotly.graph_objects as go

from mechattn.axes import BASELINE
from mechattn.contrast.contrast import Contrast
from mechattn.errors import OptionError
from mechattn.render import draw
from mechattn.render.attention_figures import NAME
from mechattn.render.draw import OTHERS, WITH, WITHOUT, faint
from mechattn.render.figure_declaration import figure as declare
from mechattn.render.words import (
    beside_null,
    count_words,
    heads_words,
    model_caption,
    percent,
    quantity_words,
    says,
)
from mechattn.results.result import Result


@declare(compares=True, report=[{}])
def changes(
    result: Result,
    conditions: Seq[str] | None = None,
    quantity: str = "received",
    segment: str = "question",
    layer: int | None = None,
    *,
    to: str = BASELINE,
    over: str = "",
) -> go.Figure:
    """Plot the change of a quantity by condition, or over the values of a swept option, with 95 % intervals and nulls.

    Of a condition and its variants: as inserted, tokens receive attention and move the others apart; masked, they only
    move them apart; unshifted, they only receive attention.

    Args:
        result: A result; with ``over`` one whose conditions come from ``ma.sweep``.
        conditions: Names of conditions, in the order shown; all but the baseline and ``to`` by default.
        quantity: A positive quantity.
        segment: The segment that it is about.
        layer: One layer; the mean over all by default.
        to: The condition to compare with, such as a random sentence of as many tokens.
        over: The swept option on the horizontal axis, such as "count"; each combination of other options gives a line.

    Raises:
        OptionError: There is no such condition, or none that is named after the option; or one inserts another number
            of tokens than ``to``.
    """
    others = [name for name in result.conditions[1:] if name != to]
    names = list((others or [result.condition()]) if conditions is None else conditions)
    lines = _swept(names, over) if over else {"": {name: name for name in names}}
    figure, said, mode = draw.panels(), [], "lines+markers" if over else "markers"
    for (words, named), colour in zip(lines.items(), cycle((WITH, *OTHERS)), strict=False):
        found = [
            Contrast(result, n, to, quantity, segment, null="uniform").overall(layer)
            for n in named.values()
        ]
        numeric = bool(over) and all(value.lstrip("-").isdigit() for value in named)
        start = [(0.0, 0.0, 0.0)] * (
            numeric and to == BASELINE
        )  # nothing inserted, so nothing changed
        x = [0] * len(start) + list(map(int, named) if numeric else named)
        ends = 100 * np.array([*start, *(change for change, _ in found)], dtype=np.float64).T
        label = words or (quantity if over else "measured")
        draw.points(
            figure,
            x,
            ends,
            label,
            colour,
            mode=mode,
            hovertemplate="%{x}: %{y:.1f} %<extra></extra>",
        )
        nulls = [null for _, null in found if null is not None]
        if len(nulls) == len(found):
            y = [0.0] * len(start) + [100 * float(null.estimate) for null in nulls]
            null_name = "uniform attention" + (f", {words}" if words and len(lines) > 1 else "")
            if over:
                draw.dotted(figure, x, y, null_name, colour, mode=mode)
            else:
                marker = dict(symbol="line-ew", size=18, line=dict(width=2, color=WITHOUT))
                figure.add_scatter(x=x, y=y, mode=mode, name=null_name, marker=marker)
        shown = list(zip(named.values(), found, strict=True))[
            -1 if over else 0 :
        ]  # of a sweep the last
        said.append("; ".join(f"{name}: {beside_null(*change)}" for name, change in shown) + ".")
    where = (
        "mean over layers and heads" if layer is None else f"mean over the heads of layer {layer}"
    )
    note = f"{where}; n = {count_words(result)}; bars: 95 % t intervals of the log-ratio of each prompt's mean"
    what = quantity_words(quantity, segment) + f" relative to “{to}”" * (to != BASELINE)
    draw.rule(figure, y=0)
    draw.title(
        figure, f"{model_caption(result)}: change of {what}{f', by {over}' * bool(over)}", note, 440
    )
    figure.update_yaxes(title_text=f"change of {what} (%)", nticks=8)
    figure.update_xaxes(title_text="inserted tokens" if over == "count" else over or None)
    return says(figure, *said)


def _swept(names: Seq[str], option: str) -> dict[str, dict[str, str]]:
    """The conditions of a sweep by the value of the option, for each combination of the others."""
    lines: dict[str, dict[str, str]] = {}
    for name in names:
        parts = name.split(", ")
        swept = [part for part in parts if part.startswith(f"{option}=")]
        if swept:
            others = ", ".join(part for part in parts if part not in swept)
            lines.setdefault(others, {})[swept[0].removeprefix(f"{option}=")] = name
    if not lines:
        raise OptionError(
            f"no condition of this result is named {option}=…; run it with conditions=ma.sweep(…)"
        )
    return lines


@declare(NAME, compares=True)
def verdicts(
    results: Seq[Result] | Result, condition: str | None = None, segment: str = "question"
) -> go.Figure:
    """Plot the change of a segment's attention in several models beside what uniform attention would do, one row each.

    The number is that of ``result.verdict``: the change of the mean over all layers and heads, with its 95 % interval.

    Args:
        results: Results of several models, or several results of one, in the order shown.
        condition: The condition of all of them; by default the first of each that isn't the baseline.
        segment: A segment that every prompt has.

    Raises:
        OptionError: There are no results, no such condition or segment, or fewer than 3 prompts.
    """
    results = [results] if isinstance(results, Result) else list(results)
    if not results:
        raise OptionError("results=[] is empty; give at least one result with received attention")
    names = [result.condition(condition) for result in results]
    found = [
        result.verdict(name, segment, null="uniform")
        for result, name in zip(results, names, strict=True)
    ]
    words = _rows(results, names)
    change, null = (
        100 * np.array(of, dtype=np.float64)
        for of in zip(*((one.change, one.null) for one in found))
    )
    figure, rows = draw.panels(), np.arange(len(found))
    for row, value in enumerate(change[:, 0]):
        line = dict(color=faint(WITH, 0.35), width=14)
        figure.add_scatter(
            x=[0, value], y=[row, row], mode="lines", line=line, showlegend=False, hoverinfo="skip"
        )
    draw.points(figure, rows, change.T, "measured, with 95 % interval", WITH, sideways=True)
    figure.add_scatter(
        x=null[:, 0], y=rows, name="if every head attended uniformly", mode="markers",
        marker=dict(symbol="line-ns-open", size=13, color=WITHOUT, line_width=3),
    )  # fmt: skip
    low, high = min(0, change.min(), null.min()), max(0, change.max(), null.max())
    for ends, shift in (
        (change, 17),
        (null, -17),
    ):  # above or below what they say, clear of the rule at 0
        for row, value in enumerate(ends[:, 0].round(3)):
            near = abs(value) < 0.2 * (high - low)
            anchor = ("left" if value > 0 else "right") if near else "center"
            where: dict[str, Any] = dict(xanchor=anchor, yshift=shift, showarrow=False)
            figure.add_annotation(x=value, y=row, text=percent(value / 100), **where)
    draw.rule(figure, x=0)
    one = f" with “{names[0]}”" if len(set(names)) == 1 else ""
    counts = " or ".join(dict.fromkeys(map(count_words, results)))
    note = f"mean over all layers and heads; {counts}"
    draw.title(
        figure,
        f"Change of {quantity_words('received', segment)}{one}",
        note,
        200 + 64 * len(found),
        top=120,
    )
    room = [
        (0.22 if end else 0.06) * (high - low) for end in (low, high)
    ]  # for the words at the outermost points
    what = "change of attention<br>received (%)"
    figure.update_xaxes(nticks=8, title_text=what, range=[low - room[0], high + room[1]])
    labels = [word.replace(" (", "<br>(", 1) for word in words]
    figure.update_yaxes(tickvals=rows, ticktext=labels, range=[len(found) - 0.5, -0.8])
    pairs = zip(words, found, strict=True)
    return says(
        figure, *(f"{row}: {beside_null(v.change, v.null)}. {heads_words(v)}." for row, v in pairs)
    )


def _inserted(result: Result, condition: str) -> str:
    """How many tokens a condition inserts, in words; the range over prompts."""
    each = (result["sequences"].origin.sel(condition=condition) == -1).sum("pos").values
    low, high = int(each.min()), int(each.max())
    return f"{low} tokens inserted" if low == high else f"{low} to {high} tokens inserted"


def _rows(results: Seq[Result], conditions: Seq[str]) -> list[str]:
    """What each row is: its model, its condition where they differ, and a number where that is not enough."""
    words = [model_caption(result) for result in results]
    if len(set(conditions)) > 1:
        words = [f"{model}, {name}" for model, name in zip(words, conditions, strict=True)]
    counts = [_inserted(result, name) for result, name in zip(results, conditions, strict=True)]
    if len(set(counts)) > 1:  # what takes more tokens takes more attention
        words = [f"{row}, {count}" for row, count in zip(words, counts, strict=True)]
    return [
        f"{row}, result {words[: i + 1].count(row)}" if words.count(row) > 1 else row
        for i, row in enumerate(words)
    ]
