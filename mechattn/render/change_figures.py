"""Figures of changes: maps of heads for a condition and for patching, changes over a swept option, and the 2 × 2."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.contrast.contrast import Contrast
from mechattn.errors import OptionError
from mechattn.render import draw
from mechattn.render.declared import figure as declare
from mechattn.render.draw import OTHERS, WITH, WITHOUT
from mechattn.render.words import beside_null, count_words, model_caption, percent, quantity_words, says
from mechattn.results.result import Result

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from mechattn.patching.effects import Patching


@declare(compares=True, report=[{}])
def change_map(
    result: Result, condition: str | None = None, quantity: str = "received", segment: str = "question"
) -> go.Figure:
    """Map the change of a quantity minus that of its null by layer and head; dots mark q < 0.05.

    Red means that it rose more, or fell less, than the null; blue that it fell further, or rose less. Without a null
    the map shows the change itself, and the title says so. q is Benjamini-Hochberg over the map.

    Args:
        result: A result.
        condition: The condition; the first that isn't the baseline by default.
        quantity: The quantity, as for ``result.compare``.
        segment: The segment that it is about.
    """
    condition = result.condition(condition)
    table = Contrast(result, condition, quantity=quantity, segment=segment).table()
    if set(table) & {"segment", "to_segment"}:
        raise OptionError(f"{quantity!r} has more than one number per head, but a map needs one")
    known = bool(table.null.notna().any())
    column, what = ("beyond", "beyond the null") if known else ("difference", "change")
    low, high = (f"{column}_{end}".removeprefix("difference_") for end in ("low", "high"))
    columns = {"shown": column, "change": "difference", "q": "q", "low": low, "high": high}
    hover = f"{what} %{{z:.3f}} [%{{customdata[2]:.3f}}, %{{customdata[3]:.3f}}]"
    hover += "<br>change %{customdata[0]:.3f}<br>q = %{customdata[1]:.2g}"
    figure = draw.head_map(table, columns, what, f"{table.scale.iloc[0]}{'<br>less null' * known}", hover)
    unit, resampled = table.attrs["unit"], table.attrs.get("resampled")
    n = f"{table.n.iloc[0]}{'' if unit == 'prompts' else f' {unit}'}{f', tested by {resampled}' if resampled else ''}"
    note = (
        f"{condition}; {int((table.q < 0.05).sum())} of {len(table)} heads at q < 0.05; n = {n}; "
        f"{'null: ' * known}{table.attrs['null']}"
    )
    if table.attrs["smallest_q"] >= 0.05:
        note += f"; too few prompts for any head to reach it (q ≥ {table.attrs['smallest_q']:.2g})"
    if table.attrs["left_out"]:
        note += f"; {len(table.attrs['left_out'])} heads left out (no ratio)"
    relative = "change relative to its null" if known else "change"
    heading = f"{model_caption(result)}: {quantity_words(quantity, segment)}, {relative}"
    draw.title(figure, heading, note, _map_height(table), top=110)
    return says(figure, _map_words(table, column))


def _map_words(table: pd.DataFrame, column: str) -> str:
    """The number of significant heads, and the head furthest from the null (without a null: most changed)."""
    far = table.loc[table[column].abs().idxmax()]
    sure = f"{int((table.q < 0.05).sum())} of {len(table)} heads"
    if table.scale.iloc[0] == "log-ratio":
        value, low, high, null = (percent(np.expm1(part)) for part in (far.difference, far.low, far.high, far.null))
    else:
        parts = (far.difference, far.low, far.high, far.null)
        value, low, high, null = (f"{part:+.3f}".replace("-", "−") for part in parts)
    head = f"layer {far.layer:.0f} head {far['head']:.0f}: {value} [{low}, {high}]"
    picked = (
        f"it was selected as the largest of {len(table)}, so its interval is too optimistic "
        '(select="half" avoids this).'
    )
    if column == "beyond":
        return f"{sure} differ from the null at q < 0.05. The largest difference is in {head}, null {null}; {picked}"
    return f"{sure} changed at q < 0.05; {table.attrs['null']}. The largest change is in {head}; {picked}"


@declare("patching")
def patching_map(patching: Patching) -> go.Figure:
    """Map mean patching effects by layer and head, or layer and segment; dots mark q < 0.05 (over the map).

    Red means that the answer's metric rose, blue that it fell. Heads that were not requested are empty.

    Args:
        patching: The result of ``patch``.

    Raises:
        OptionError: The effects are not of heads, or of layers by segment.
    """
    if patching.labels[0] != "layer" or len(patching.labels) != 2:
        raise OptionError(f"a map needs heads or layers in rows and columns; these are by {patching.labels}")
    across, table = patching.labels[1], patching.table()
    known = bool(table.share.notna().all())
    hover = "effect %{z:.3g} [%{customdata[0]:.3g}, %{customdata[1]:.3g}]<br>q = %{customdata[2]:.2g}"
    hover += "; %{customdata[3]:.1%} of the whole effect" * known + "<br>random direction %{customdata[4]:.3g}"
    columns = {name: name for name in ("effect", "low", "high", "q", "share", "random")}
    figure = draw.head_map(table, columns, "effect", "effect", hover, across)
    about, (whole, low, high) = patching.about, patching.whole
    note = (
        f"{about['metric']}; {about['direction']}, {about['method']}; n = {patching.units.words}; whole effect "
        f"{whole:+.3g} [{low:+.3g}, {high:+.3g}]"
    )
    heading = f"{about['model']}: patching effect by {across}"
    draw.title(figure, heading, note, _map_height(table), top=110)
    largest = table.effect.abs().idxmax()
    top = table.loc[largest]
    return says(
        figure,
        f"{int((table.q < 0.05).sum())} of {len(table)} {across}s at q < 0.05. Largest: layer {top.layer:.0f} {across} "
        f"{table[across][largest]}, {top.effect:+.3g} [{top.low:+.3g}, {top.high:+.3g}]"
        + f", {top.share:.0%} of the whole effect" * known
        + '; it was selected as the largest, so its interval is too optimistic (table(select="half") avoids this).',
    )


def _map_height(table: pd.DataFrame) -> int:
    return max(320, 160 + 24 * table.layer.nunique())


@declare()
def sweep(
    result: Result,
    option: str = "count",
    quantity: str = "received",
    segment: str = "question",
    layer: int | None = None,
) -> go.Figure:
    """Plot the change of a quantity over the values of a swept option, with 95 % intervals and the null.

    Args:
        result: A run whose conditions come from ``ma.sweep``.
        option: The option on the horizontal axis; each combination of other options gives a line.
        quantity: A positive quantity.
        segment: The segment that it is about.
        layer: One layer; the mean over all by default.

    Raises:
        OptionError: No condition of the result is named after the option.
    """
    lines: dict[str, dict[str, str]] = {}
    for name in result.conditions:
        parts = name.split(", ")
        swept = [part for part in parts if part.startswith(f"{option}=")]
        if swept:
            others = ", ".join(part for part in parts if part not in swept)
            lines.setdefault(others, {})[swept[0].removeprefix(f"{option}=")] = name
    if not lines:
        raise OptionError(f"no condition of this result is named {option}=…; run it with conditions=ma.sweep(…)")
    figure, said = draw.panels(), []
    for (words, named), colour in zip(lines.items(), cycle((WITH, *OTHERS)), strict=False):
        numeric = all(value.lstrip("-").isdigit() for value in named)
        x = [int(value) for value in named] if numeric else list(named)
        changes = [Contrast(result, name, quantity=quantity, segment=segment).overall(layer) for name in named.values()]
        start = [0] * numeric  # nothing inserted, so nothing changed
        shown = [(0.0, 0.0, 0.0) for _ in start] + [change for change, _ in changes]
        _percents(figure, start + x, shown, words or quantity, colour, "lines+markers")
        if changes[0][1] is not None:
            nulls = [0.0 for _ in start] + [100 * float(null.estimate) for _, null in changes if null is not None]
            name = f"uniform attention{', ' * bool(words)}{words}" if len(lines) > 1 else "uniform attention"
            draw.dotted(figure, start + x, nulls, name, colour, mode="lines+markers")
        said.append(f"{list(named.values())[-1]}: {beside_null(*changes[-1])}.")
    _finish(figure, result, f"{quantity_words(quantity, segment)}, by {option}", layer)
    figure.update_xaxes(title_text="inserted tokens" if option == "count" else option)
    return says(figure, *said)


@declare(compares=True, report=[{}])
def two_by_two(
    result: Result,
    conditions: Seq[str],
    quantity: str = "received",
    segment: str = "question",
    layer: int | None = None,
) -> go.Figure:
    """Plot the change of a quantity in a condition and its variants, with 95 % intervals and nulls.

    As inserted, tokens receive attention and move the others apart; masked, they only move them apart; unshifted, they
    only receive attention.

    Args:
        result: A result.
        conditions: Names of conditions, in the order shown.
        quantity: A positive quantity.
        segment: The segment that it is about.
        layer: One layer; the mean over all by default.
    """
    figure = draw.panels()
    changes = [Contrast(result, name, quantity=quantity, segment=segment).overall(layer) for name in conditions]
    _percents(figure, list(conditions), [change for change, _ in changes], "measured", WITH, "markers")
    if all(null is not None for _, null in changes):
        nulls = [100 * float(null.estimate) for _, null in changes if null is not None]
        marker = dict(symbol="line-ew", size=26, line=dict(width=2, color=WITHOUT))
        figure.add_scatter(x=list(conditions), y=nulls, mode="markers", name="uniform attention", marker=marker)
    _finish(figure, result, quantity_words(quantity, segment), layer)
    said = [f"{name} {beside_null(*change)}" for name, change in zip(conditions, changes, strict=True)]
    return says(figure, "; ".join(said) + ".")


def _percents(figure: go.Figure, x: list, changes: Seq[Any], name: str, colour: str, mode: str) -> None:
    """Relative changes in percent, with their intervals."""
    hover = "%{x}: %{y:.1f} %<extra></extra>"
    draw.points(figure, x, 100 * np.array(changes, dtype=np.float64).T, name, colour, mode=mode, hovertemplate=hover)


def _finish(figure: go.Figure, result: Result, what: str, layer: int | None) -> None:
    where = "mean over layers and heads" if layer is None else f"mean over the heads of layer {layer}"
    note = f"{where}; n = {count_words(result)}; bars: 95 % t intervals of the log-ratio of each prompt's mean"
    draw.rule(figure, y=0)
    draw.title(figure, f"{model_caption(result)}: change of {what}", note, 440)
    figure.update_yaxes(title_text="change from the baseline (%)")
