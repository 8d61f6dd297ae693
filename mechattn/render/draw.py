"""The primitives of which figures are made: panels, points, lines with bands, maps of heads, sliders, titles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.render.theme import LAYOUT, faint, headed

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

GREY = "#888"


def panels(titles: Seq[str], rows: int = 1, **options: Any) -> go.Figure:
    """Panels side by side, or below each other, with their titles."""
    from plotly.subplots import make_subplots

    return make_subplots(rows, len(titles) // rows, subplot_titles=list(titles), **options)


def empty() -> go.Figure:
    """One panel."""
    import plotly.graph_objects as go

    return go.Figure()


def at(column: int | None, row: int = 1) -> dict[str, int]:
    """Where a trace goes: into a panel, or into a figure that has only one."""
    return {} if column is None else {"row": row, "col": column}


def points(
    figure: go.Figure, x: Any, estimates: Any, name: str, colour: str, column: int | None = None,
    sideways: bool = False, **style: Any,
) -> None:  # fmt: skip
    """Points, or a line through them, with their intervals (estimate, low, high) as bars."""
    middle, low, high = (np.asarray(end, dtype=np.float64) for end in estimates)
    bars = dict(type="data", array=high - middle, arrayminus=middle - low, symmetric=False, thickness=1.3)
    axes = dict(x=middle, y=x, error_x=bars) if sideways else dict(x=x, y=middle, error_y=bars)
    style = {"mode": "markers"} | style | {"marker": dict(color=colour, size=8) | style.get("marker", {})}
    figure.add_scatter(**axes, name=name, **at(column), **style)


def ribbon(
    figure: go.Figure, x: Any, low: Any, high: Any, colour: str, *, column: int, alpha: float = 0.2, **style: Any
) -> None:  # fmt: skip
    """The area between two lines."""
    outline = dict(x=np.concatenate([x, x[::-1]]), y=np.concatenate([high, low[::-1]]))
    figure.add_scatter(
        **outline, fill="toself", fillcolor=faint(colour, alpha), line_width=0, mode="lines", hoverinfo="skip",
        showlegend=False, **at(column), **style,
    )  # fmt: skip


def dotted(
    figure: go.Figure, x: Any, y: Any, name: str, colour: str, *, column: int | None = None, row: int = 1, **style: Any
) -> None:  # fmt: skip
    """A dotted line, which is a null in every figure."""
    line = dict(color=colour, dash="dot", width=1.3)
    figure.add_scatter(**{"x": x, "y": y, "name": name, "mode": "lines", "line": line} | at(column, row) | style)


def zero(figure: go.Figure, **where: Any) -> None:
    """A line at no change."""
    figure.add_hline(0, line_width=1, line_color=GREY, **where)


def reference(figure: go.Figure, colour: str, *, x: float | None = None, y: float | None = None) -> None:
    """A dotted line across the panel at a value with a meaning."""
    line = dict(dash="dot", width=1.5, color=colour)
    figure.add_vline(x, line=line) if x is not None else figure.add_hline(y, line=line)


def head_map(cells: Mapping[str, pd.DataFrame], name: str, unit: str, hover: str, across: str = "head") -> go.Figure:
    """Heads by layer in red and blue, the first of ``cells``, with the others on hover and a dot where q < 0.05."""
    import plotly.graph_objects as go

    (_, shown), *others = cells.items()
    reach, sure = float(np.nanmax(abs(shown.values))) or 1.0, cells["q"] < 0.05
    heat = go.Heatmap(
        z=shown.values, x=shown.columns, y=shown.index, zmin=-reach, zmax=reach, colorscale="RdBu_r", name=name,
        meta=[label for label, _ in others], customdata=np.dstack([wide.values for _, wide in others]),
        hovertemplate=f"layer %{{y}} {across} %{{x}}<br>{hover}<extra></extra>", colorbar=dict(title=unit),
    )  # fmt: skip
    layer, place = np.nonzero(sure.values)
    marks = go.Scatter(
        x=sure.columns.values[place], y=sure.index.values[layer], mode="markers", hoverinfo="skip", name="q < 0.05",
        marker=dict(symbol="circle", size=5, color="black"), showlegend=True,
    )  # fmt: skip
    figure = go.Figure([heat, marks])
    figure.update_xaxes(title_text=across)
    figure.update_yaxes(title_text="layer", autorange="reversed")
    return figure


def title(figure: go.Figure, heading: str, note: str, height: int, top: int | None = None) -> None:
    """The title with its small print; with ``top``, the legend has a row of its own under it."""
    layout = LAYOUT | {"height": height} if top is None else headed(top, height)
    figure.update_layout(**layout, title_text=f"{heading}<br><sup>{note}</sup>")


def by_layer_slider(figure: go.Figure, layers: Seq[int], words: Callable[[int], str], height: int) -> None:
    """A slider that shows one trace, and its title, for each layer."""
    steps = [
        dict(
            method="update", label=str(layer),
            args=[{"visible": [i == number for i in range(len(layers))]}, {"title.text": words(layer)}]
        )
        for number, layer in enumerate(layers)
    ]  # fmt: skip
    slider = dict(steps=steps, currentvalue=dict(prefix="layer "), pad=dict(t=50))
    figure.update_layout(**LAYOUT | {"height": height, "title_text": words(layers[0]), "sliders": [slider]})
