"""Figures of changes: a map of layers and heads, changes over a swept option, and the 2 × 2."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from mechattn.contrast.contrast import Contrast
from mechattn.errors import OptionError
from mechattn.render.theme import LAYOUT, OTHERS, WITH, WITHOUT, headed, model_caption, quantity_words
from mechattn.render.words import change_words, count_words, percent, says
from mechattn.results.result import Result

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


def change_map(
    result: Result,
    condition: str | None = None,
    quantity: str = "received",
    segment: str = "question",
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
    import plotly.graph_objects as go

    condition = result.condition(condition)
    table = Contrast(result, condition, quantity=quantity, segment=segment).table(bootstrap=False)
    if set(table) & {"segment", "to_segment"}:
        raise OptionError(f"{quantity!r} has more than one number per head, but a map needs one")
    known = bool(table.null.notna().any())
    column = "beyond" if known else "difference"
    names = {"shown": column, "low": f"{column}_low".removeprefix("difference_"), "difference": "difference", "q": "q"}
    names["high"] = names["low"].replace("low", "high")
    wide = {name: table.pivot(index="layer", columns="head", values=of) for name, of in names.items()}
    sure = wide["q"] < 0.05
    figure = go.Figure(_map_and_marks(wide, sure, f"{table.scale.iloc[0]}{'<br>less null' * known}"))
    note = (
        f"{condition}; {int(sure.values.sum())} of {sure.size} heads at q < 0.05; n = {_n(table)}; "
        f"{'null: ' * known}{table.attrs['null']}"
    )
    if table.attrs["smallest_q"] >= 0.05:
        note += f"; too few prompts for any head to reach it (q ≥ {table.attrs['smallest_q']:.2g})"
    if table.attrs["left_out"]:
        note += f"; {len(table.attrs['left_out'])} heads left out (no ratio)"
    relative = "change relative to its null" if known else "change"
    title = f"{model_caption(result)}: {quantity_words(quantity, segment)}, {relative}"
    figure.update_layout(**headed(110, max(320, 160 + 24 * len(sure))), title_text=f"{title}<br><sup>{note}</sup>")
    figure.update_xaxes(title_text="head")
    figure.update_yaxes(title_text="layer", autorange="reversed")
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


def _map_and_marks(wide: dict[str, pd.DataFrame], sure: pd.DataFrame, unit: str) -> list:
    """The heat map of the tested differences, with intervals on hover, and a dot on each significant cell."""
    import plotly.graph_objects as go

    beyond, what = wide["shown"], "beyond the null" if "null" in unit else "change"
    reach = float(np.nanmax(abs(beyond.values))) or 1.0
    heat = go.Heatmap(
        z=beyond.values, x=beyond.columns, y=beyond.index, zmin=-reach, zmax=reach, colorscale="RdBu_r",
        name=what, meta=["change", "q", "low", "high"],
        customdata=np.dstack([wide[name].values for name in ("difference", "q", "low", "high")]),
        hovertemplate=f"layer %{{y}} head %{{x}}<br>{what} %{{z:.3f}} [%{{customdata[2]:.3f}}, %{{customdata[3]:.3f}}]"
        "<br>change %{customdata[0]:.3f}<br>q = %{customdata[1]:.2g}<extra></extra>",
        colorbar=dict(title=unit),
    )  # fmt: skip
    return [heat, sure_marks(sure)]


def sure_marks(sure: pd.DataFrame) -> go.Scatter:
    """A dot on each significant cell of a map [layer head]."""
    import plotly.graph_objects as go

    layer, head = np.nonzero(sure.values)
    return go.Scatter(
        x=sure.columns.values[head], y=sure.index.values[layer], mode="markers", hoverinfo="skip", name="q < 0.05",
        marker=dict(symbol="circle", size=5, color="black"), showlegend=True,
    )  # fmt: skip


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
    import plotly.graph_objects as go

    lines: dict[str, dict[str, str]] = {}
    for name in result.conditions:
        parts = name.split(", ")
        swept = [part for part in parts if part.startswith(f"{option}=")]
        if swept:
            others = ", ".join(part for part in parts if part not in swept)
            lines.setdefault(others, {})[swept[0].removeprefix(f"{option}=")] = name
    if not lines:
        raise OptionError(f"no condition of this result is named {option}=…; run it with conditions=ma.sweep(…)")
    figure = go.Figure()
    for (words, named), colour in zip(lines.items(), cycle((WITH, *OTHERS)), strict=False):
        numeric = all(value.lstrip("-").isdigit() for value in named)
        x = [int(value) for value in named] if numeric else list(named)
        changes = [Contrast(result, name, quantity=quantity, segment=segment).overall(layer) for name in named.values()]
        start = ([0], [0.0]) if numeric else ([], [])  # nothing inserted, so nothing changed
        _interval_line(
            figure, start[0] + x, [None] * len(start[0]) + [c for c, _ in changes], words or quantity, colour
        )
        if changes[0][1] is not None:
            nulls = start[1] + [100 * float(null.estimate) for _, null in changes if null is not None]
            line = dict(dash="dot", color=colour)
            name = f"uniform attention{', ' * bool(words)}{words}" if len(lines) > 1 else "uniform attention"
            figure.add_scatter(x=start[0] + x, y=nulls, name=name, line=line, mode="lines+markers")
    _finish(figure, result, f"{quantity_words(quantity, segment)}, by {option}", layer)
    figure.update_xaxes(title_text="inserted tokens" if option == "count" else option)
    ends = [list(named.items())[-1] for named in lines.values()]
    return says(figure, *(f"{name}: {change_words(result, name, quantity, segment, layer)}." for _, name in ends))


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
    import plotly.graph_objects as go

    figure = go.Figure()
    changes = [Contrast(result, name, quantity=quantity, segment=segment).overall(layer) for name in conditions]
    _interval_line(figure, list(conditions), [change for change, _ in changes], "measured", WITH, mode="markers")
    if all(null is not None for _, null in changes):
        nulls = [100 * float(null.estimate) for _, null in changes if null is not None]
        marker = dict(symbol="line-ew", size=26, line=dict(width=2, color=WITHOUT))
        figure.add_scatter(x=list(conditions), y=nulls, mode="markers", name="uniform attention", marker=marker)
    _finish(figure, result, quantity_words(quantity, segment), layer)
    said = [f"{name} {change_words(result, name, quantity, segment, layer)}" for name in conditions]
    return says(figure, "; ".join(said) + ".")


def _where(layer: int | None) -> str:
    return "mean over layers and heads" if layer is None else f"mean over the heads of layer {layer}"


def _interval_line(
    figure: go.Figure, x: list, changes: list, name: str, colour: str, mode: str = "lines+markers"
) -> None:
    """Estimates in percent with their intervals; None stands for the baseline, 0 by definition."""
    y = [0.0 if c is None else 100 * float(c.estimate) for c in changes]
    above = [0.0 if c is None else 100 * float(c.high - c.estimate) for c in changes]
    below = [0.0 if c is None else 100 * float(c.estimate - c.low) for c in changes]
    bars = dict(type="data", array=above, arrayminus=below, symmetric=False, thickness=1.4)
    marker = dict(size=8, color=colour)
    hover = "%{x}: %{y:.1f} %<extra></extra>"
    figure.add_scatter(x=x, y=y, error_y=bars, name=name, mode=mode, marker=marker, hovertemplate=hover)


def _n(table: pd.DataFrame) -> str:
    """The number of prompts, or of groups of prompts, that a table is over."""
    unit = table.attrs["unit"]
    n = str(table.n.iloc[0]) if unit == "prompts" else f"{table.n.iloc[0]} {unit}"
    return f"{n}, tested by {table.attrs['resampled']}" if "resampled" in table.attrs else n


def _finish(figure: go.Figure, result: Result, what: str, layer: int | None) -> None:
    note = f"{_where(layer)}; n = {count_words(result)}; bars: 95 % t intervals of the log-ratio of each prompt's mean"
    figure.add_hline(0, line_width=1, line_color="#888")
    figure.update_layout(
        **LAYOUT, title_text=f"{model_caption(result)}: change of {what}<br><sup>{note}</sup>", height=440
    )
    figure.update_yaxes(title_text="change from the baseline (%)")
