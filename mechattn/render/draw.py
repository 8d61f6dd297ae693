"""The look of all figures, and their primitives: panels, points, lines with bands, rules, maps of
heads, titles.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from html import unescape
from itertools import cycle
from textwrap import wrap
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from mechattn.axes import BASELINE
from mechattn.stats.intervals import Interval

# Okabe and Ito (2008), "Color universal design"; contrast of at least 3 to 1 on white and on a dark
# background.
WITHOUT = "#0072b2"  # blue, what is compared with: without the inserted tokens, or the null
WITH = "#d55e00"  # vermilion: with them
THIRD = "#009e73"  # green: a control
OTHERS = ("#cc79a7", "#56b4e9", "#7a5c00", "#e69f00", "#000000")
COLOURS = (WITHOUT, WITH, THIRD, *OTHERS)  # of lines without a meaning of their own, in order
NEUTRAL = "#f4f4f2"  # no change, on every map of signed numbers
# The colour scales of all figures and pages; either is told apart with any colour blindness.
DIVERGING = ((0.0, WITHOUT), (0.5, NEUTRAL), (1.0, WITH))  # less, none, more
SEQUENTIAL = "Cividis"
FADED = "rgba(255, 255, 255, 0.75)"  # over what is not significant
FADED_CELLS = "faded"  # the name of a trace that lies over a map and has no numbers
DARK = {  # on a dark background
    WITHOUT: "#56b4e9", WITH: "#ff9a4d", THIRD: "#3fcf9f", NEUTRAL: "#262b31", "#000000": "#e6e6e3",
    "#7a5c00": "#c9a227", "#444": "#bbb", FADED: "rgba(22, 24, 28, 0.75)",
}  # fmt: skip
GREY = "#888"
LEAST_MARKED = 0.05  # of the largest on a map: what is smaller has no dot, however sure it is
# Letters of a line, which fit into the 700 pixels of a notebook.
_HEADING_LETTERS = 72
_SMALL_PRINT_LETTERS = 110
# The heights of their lines, in pixels.
_HEADING_LINE = 22
_SMALL_PRINT_LINE = 17
# What encloses the small print under a heading.
_NOTE_START = "<br><sup>"
_NOTE_END = "</sup>"
SHADE = "rgba(120, 120, 120, 0.16)"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MARGIN = dict(l=70, r=20, t=90, b=60)
LAYOUT = dict(
    template="plotly_white",
    font=dict(family=FONT, size=13),
    hoverlabel=dict(font_family=FONT),
    margin=MARGIN,
)


def faint(colour: str, alpha: float = 0.2) -> str:
    """The colour of a band around a line of this colour."""
    red, green, blue = bytes.fromhex(colour.removeprefix("#"))
    return f"rgba({red}, {green}, {blue}, {alpha})"


def condition_colours(names: Sequence[str]) -> list[tuple[str, str]]:
    """Each condition with its colour: blue is the baseline's alone."""
    colours = cycle(COLOURS[1:])
    pairs = []
    for name in names:
        colour = WITHOUT if name == BASELINE else next(colours)
        pairs.append((name, colour))
    return pairs


def positive(values: np.ndarray) -> np.ndarray:
    """Replace zeros with NaN, which a logarithmic axis leaves out."""
    return np.where(values > 0, values, np.nan)


def within(interval: Interval, units: str) -> Interval:
    """The interval, which does not go beyond 0 and 1 where these are the bounds of the units."""
    if units not in ("probability", "share"):
        return interval
    low = np.clip(interval.low, 0, 1)
    high = np.clip(interval.high, 0, 1)
    return interval._replace(low=low, high=high)


def steps(count: int) -> dict[str, Any]:
    """An axis of layers or heads: each of up to eight, or every fifth, which fits the panels of a
    paper.
    """
    return dict(tick0=0, dtick=1 if count <= 8 else 5)


def named_ticks(words: Sequence[str]) -> dict[str, Any]:
    """An axis with a word at each number from 0."""
    return dict(tickvals=list(range(len(words))), ticktext=list(words))


def panels(titles: Sequence[str] = ("",), **options: Any) -> go.Figure:
    """Panels with their titles, row by row: by default in one row, and one without a title.

    Args:
        titles: The titles; further panels have none.
        options: As for plotly's ``make_subplots``, such as rows and cols.
    """
    options = {"cols": len(titles)} | options
    return make_subplots(subplot_titles=list(titles), **options)


def points(
    figure: go.Figure,
    x: Any,
    estimates: Any,
    name: str,
    colour: str,
    column: int = 1,
    row: int = 1,
    sideways: bool = False,
    **style: Any,
) -> None:
    """Points, or a line through them, with their intervals as bars.

    Args:
        figure: The figure that gets them.
        x: Where they stand.
        estimates: The numbers, and the low and the high ends of their intervals.
        name: In the legend.
        colour: Of points and bars.
        column: The panel, from 1.
        row: The panel's row, from 1.
        sideways: Whether the numbers are on the horizontal axis, and ``x`` on the other.
        style: As for plotly's scatter.
    """
    middle, low, high = np.array(estimates, dtype=np.float64)
    bars = dict(
        type="data",
        array=high - middle,
        arrayminus=middle - low,
        symmetric=False,
        color=colour,
        thickness=1.5,
        width=5,  # wider than the point, which would hide a short one
    )

    axes = dict(x=x, y=middle, error_y=bars)
    if sideways:
        axes = dict(x=middle, y=x, error_x=bars)
    marker = dict(color=colour, size=6) | style.pop("marker", {})
    style = {"mode": "markers"} | style
    figure.add_scatter(**axes, name=name, row=row, col=column, **style, marker=marker)


def side_by_side(
    figure: go.Figure,
    words: Sequence[str],
    series: Collection[tuple[str, Any]],
    colours: Sequence[str],
    *,
    column: int = 1,
    apart: float = 0.14,
    **style: Any,
) -> None:
    """Points with intervals for each word, several series beside each other.

    Args:
        figure: The figure that gets them.
        words: What stands below the axis, such as conditions.
        series: Names with (estimates, low, high), a number for each word.
        colours: Of the series, in order.
        column: The panel, from 1.
        apart: The distance of the series; 1 is that of the words.
        style: As for plotly's scatter.
    """
    middle = (len(series) - 1) / 2
    for index, (name, estimates) in enumerate(series):
        points(
            figure,
            np.arange(len(words)) + apart * (index - middle),
            estimates,
            name,
            colours[index % len(colours)],
            column,
            customdata=list(words),
            legendgroup=name,
            **style,
        )

    figure.update_xaxes(named_ticks(words), row=1, col=column)


def line_and_band(
    figure: go.Figure,
    x: np.ndarray,
    interval: Interval,
    name: str | None,
    colour: str,
    *,
    column: int = 1,
    row: int = 1,
    **style: Any,
) -> None:
    """A line, and a band where it has an interval.

    Args:
        figure: The figure that gets them.
        x: The places of the line.
        interval: Its values, and the ends of the band; NaN where there is none.
        name: In the legend, which has both as one entry.
        colour: Of the line; the band is a faint one.
        column: The panel, from 1.
        row: The panel's row, from 1.
        style: Of the line, as for plotly's scatter; by default it is thin and has no marks.
    """
    estimate, low, high = interval
    style = {"mode": "lines", "line": dict(color=colour, width=1.6)} | style
    has_band = np.isfinite(low)
    if has_band.any():
        band = (x[has_band], low[has_band], high[has_band])
        ribbon(figure, *band, colour, column=column, row=row, legendgroup=name)

    figure.add_scatter(x=x, y=estimate, name=name, legendgroup=name, row=row, col=column, **style)


def ribbon(
    figure: go.Figure,
    x: Any,
    low: Any,
    high: Any,
    colour: str,
    *,
    column: int = 1,
    row: int = 1,
    alpha: float = 0.2,
    **style: Any,
) -> None:
    """The area between two lines."""
    figure.add_scatter(
        x=np.concatenate([x, x[::-1]]),
        y=np.concatenate([high, low[::-1]]),
        fill="toself",
        fillcolor=faint(colour, alpha),
        line_width=0,
        mode="lines",
        hoverinfo="skip",
        showlegend=False,
        row=row,
        col=column,
        **style,
    )


def dotted(
    figure: go.Figure,
    x: Any,
    y: Any,
    name: str,
    colour: str,
    *,
    column: int = 1,
    row: int = 1,
    **style: Any,
) -> None:
    """A dotted line, which is a null in every figure."""
    line = dict(color=colour, dash="dot", width=1.3)
    style = {"mode": "lines"} | style
    figure.add_scatter(x=x, y=y, name=name, line=line, row=row, col=column, **style)


def rule(
    figure: go.Figure,
    *,
    x: float | None = None,
    y: float | None = None,
    colour: str = GREY,
    dash: str | None = None,
    width: float = 1,
    column: int = 1,
    row: int = 1,
) -> None:
    """A line across a panel at a value with a meaning, such as no change: upright at ``x``, or
    level at ``y``.

    plotly draws none across an empty panel, so what it crosses comes first.
    """
    line = dict(width=width, dash=dash, color=colour)
    if x is not None:
        figure.add_vline(x, line=line, row=row, col=column)
    if y is not None:
        figure.add_hline(y, line=line, row=row, col=column)


def head_map(
    table: pd.DataFrame,
    column: str,
    q_column: str,
    hovered: Mapping[str, str],
    hover: str,
    name: str,
    bar_words: str,
    across: str = "head",
) -> go.Figure:
    """Heads by layer in orange and blue: a dot where q < 0.05 and the number is not tiny, faded
    where q is larger.

    Args:
        table: A row a cell, with ``layer`` and ``across``.
        column: The column whose numbers are coloured.
        q_column: The column of their q-values.
        hovered: Columns that the words on hover may use, by their labels in a table of the figure.
        hover: What is said of a cell, as a template of plotly's.
        name: The name of the map in a table of the figure.
        bar_words: The title of the bar of colours.
        across: The column on the horizontal axis: "head", or one of words, which keep their order.
    """
    cells = table.set_index(["layer", across]).to_xarray()
    if across == "head":
        ticks = steps(cells.sizes["head"])
    else:
        ticks = {}
        cells = cells.sel({across: table[across].unique()})

    x = cells[across].values
    y = cells.layer.values
    coloured = cells[column].values
    q = cells[q_column].values

    # Both colours end at the same distance from 0, which is in the middle; a map of zeros has a
    # scale too.
    largest = float(np.nanmax(abs(coloured))) or 1.0
    bar_title = "<br>".join(wrap(bar_words, 24, break_on_hyphens=False))
    figure = panels()
    figure.add_heatmap(
        z=coloured,
        x=x,
        y=y,
        zmin=-largest,
        zmax=largest,
        colorscale=DIVERGING,
        name=name,
        meta=list(hovered),
        customdata=np.dstack([cells[hover_column].values for hover_column in hovered.values()]),
        hovertemplate=f"layer %{{y}} {across} %{{x}}<br>{hover}<extra></extra>",
        colorbar=dict(title=dict(text=bar_title, side="right")),
    )

    rows, columns = np.nonzero((q < 0.05) & (abs(coloured) >= LEAST_MARKED * largest))
    figure.add_scatter(
        x=x[columns],
        y=y[rows],
        mode="markers",
        hoverinfo="skip",
        name=f"q < 0.05, and at least {100 * LEAST_MARKED:.0f} % of the largest",
        marker=dict(symbol="circle", size=5, color="black"),
        showlegend=True,
    )
    _fade(figure, x, y, q >= 0.05)

    figure.update_xaxes(title_text=across, **ticks)
    figure.update_yaxes(title_text="layer", autorange="reversed", **steps(len(y)))
    return figure


def _fade(figure: go.Figure, x: np.ndarray, y: np.ndarray, is_faded: np.ndarray) -> None:
    """Fade cells of a map, with an entry in the legend."""
    figure.add_heatmap(
        x=x,
        y=y,
        z=np.where(is_faded, 0.0, np.nan),
        name=FADED_CELLS,
        colorscale=[[0, FADED], [1, FADED]],
        showscale=False,
        hoverinfo="skip",
    )
    figure.add_scatter(
        x=[None],
        y=[None],
        mode="markers",
        name="faded: q ≥ 0.05",
        marker=dict(symbol="square", size=9, color=FADED, line=dict(color=GREY, width=1)),
        showlegend=True,
    )


def title(figure: go.Figure, heading: str, note: str, height: int) -> None:
    """Set the title with its small print, in lines that fit, and the height.

    Args:
        figure: The figure.
        heading: What it shows, and of which model.
        note: The small print.
        height: In pixels, for a heading and a note of one line each.
    """
    heading_lines = wrap(heading, _HEADING_LETTERS)
    note_lines = wrap(note, _SMALL_PRINT_LETTERS)
    further_height = _HEADING_LINE * (len(heading_lines) - 1)
    further_height += _SMALL_PRINT_LINE * (len(note_lines) - 1)
    figure.update_layout(
        LAYOUT,
        title_text="<br>".join(heading_lines) + _NOTE_START + "<br>".join(note_lines) + _NOTE_END,
        height=height + further_height,
        margin_t=MARGIN["t"] + further_height,
    )


def title_above_legend(figure: go.Figure, heading: str, note: str, height: int, top: int) -> None:
    """Set the title and the height as :func:`title` does, and put the legend into a row of its own
    under the title, at any width.

    Args:
        figure: The figure.
        heading: What it shows, and of which model.
        note: The small print.
        height: In pixels, for a heading and a note of one line each.
        top: The room for title and legend above the panels, in pixels, for the same.
    """
    title(figure, heading, note, height)
    whole_height = figure.layout.height
    further_height = whole_height - height
    # Title and legend start 20 and 66 pixels below the top; plotly counts from the bottom, in
    # fractions of the height.
    place = dict(x=0.03, y=1 - 20 / whole_height, yanchor="top")
    legend = dict(
        orientation="h",
        x=0.03,
        xref="container",
        y=1 - (66 + further_height) / whole_height,
        yref="container",
        yanchor="top",
    )
    margin = dict(l=80, t=top + further_height)
    figure.update_layout(title=place, legend=legend, margin=margin)


def take_heading(figure: go.Figure) -> str:
    """Remove the title but for its small print, with the room that it takes; return its words."""
    layout = figure.layout
    # From the title, whose names are escaped: what :func:`title` was given is not.
    heading, _, note = layout.title.text.partition(_NOTE_START)
    room = _HEADING_LINE * len(heading.split("<br>"))
    height = layout.height - room

    # A legend under the title keeps its distance from the top, of a lower figure.
    if layout.legend.yref == "container":
        layout.legend.y = 1 - ((1 - layout.legend.y) * layout.height - room) / height
    margin = {"t": layout.margin.t - room}
    note = note.removesuffix(_NOTE_END)
    figure.update_layout(title_text=note, title_font_size=13, height=height, margin=margin)
    return unescape(heading.replace("<br>", " "))


def map_height(table: pd.DataFrame) -> int:
    """The height of a figure with a row for each layer, in pixels."""
    return max(320, 160 + 24 * table.layer.nunique())
