"""The look of all figures, and what they are drawn from: panels, points, lines with bands, rules,
maps of heads, titles.
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

# Okabe and Ito (2008), "Color universal design". Their contrast is at least 3 to 1 on white, and
# that of their replacements in DARK on a dark background.
WITHOUT = "#0072b2"  # blue: the reference, such as the baseline or the null
WITH = "#d55e00"  # vermilion: with the inserted tokens
THIRD = "#009e73"  # green: a control
OTHERS = ("#cc79a7", "#56b4e9", "#7a5c00", "#e69f00", "#000000")
COLOURS = (WITHOUT, WITH, THIRD, *OTHERS)  # of lines without a meaning of their own, in order
NEUTRAL = "#f4f4f2"  # no change, on every map of signed numbers
# The colour scales of all figures and pages, which can be read with any colour blindness.
DIVERGING = ((0.0, WITHOUT), (0.5, NEUTRAL), (1.0, WITH))  # less, no change, more
SEQUENTIAL = "Cividis"
FADED = "rgba(255, 255, 255, 0.75)"  # over what is not significant
FADED_CELLS = "faded"  # the name of the trace that fades cells of a map and has no numbers
DARK = {  # the replacements of colours on a dark background
    WITHOUT: "#56b4e9", WITH: "#ff9a4d", THIRD: "#3fcf9f", NEUTRAL: "#262b31", "#000000": "#e6e6e3",
    "#7a5c00": "#c9a227", "#444": "#bbb", FADED: "rgba(22, 24, 28, 0.75)",
}  # fmt: skip
GREY = "#888"
LEAST_MARKED = 0.05  # a smaller fraction of the largest number on a map gets no dot at any q
# The letters that fit into a line of a notebook, which is 700 pixels wide.
_HEADING_LETTERS = 72
_SMALL_PRINT_LETTERS = 110
# The heights of a line, in pixels.
_HEADING_LINE = 22
_SMALL_PRINT_LINE = 17
# What encloses the small print under a heading.
_SMALL_PRINT_START = "<br><sup>"
_SMALL_PRINT_END = "</sup>"
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
    """A colour such as "#0072b2" with an opacity, for a band around a line or a background."""
    red, green, blue = bytes.fromhex(colour.removeprefix("#"))
    return f"rgba({red}, {green}, {blue}, {alpha})"


def condition_colours(names: Sequence[str]) -> list[tuple[str, str]]:
    """The name of each condition with its colour. Only the baseline is blue."""
    colours = cycle(COLOURS[1:])
    names_with_colours = []
    for name in names:
        colour = WITHOUT if name == BASELINE else next(colours)
        names_with_colours.append((name, colour))
    return names_with_colours


def positive(values: np.ndarray) -> np.ndarray:
    """Replace numbers that are not positive with NaN, as a logarithmic axis cannot show them."""
    return np.where(values > 0, values, np.nan)


def within(interval: Interval, units: str) -> Interval:
    """The interval with its ends clipped to 0 and 1 if the units are "probability" or "share"."""
    if units not in ("probability", "share"):
        return interval
    low = np.clip(interval.low, 0, 1)
    high = np.clip(interval.high, 0, 1)
    return interval._replace(low=low, high=high)


def numbered_ticks(count: int) -> dict[str, Any]:
    """The ticks of an axis of layers or heads: at each of up to eight, or else at every fifth.

    More would not fit the panels of a paper.
    """
    return dict(tick0=0, dtick=1 if count <= 8 else 5)


def named_ticks(words: Sequence[str]) -> dict[str, Any]:
    """The ticks of an axis with a word at each whole number from 0."""
    return dict(tickvals=list(range(len(words))), ticktext=list(words))


def panels(titles: Sequence[str] = ("",), **options: Any) -> go.Figure:
    """A figure with empty panels; by default one panel without a title.

    Args:
        titles: The titles of the panels, row by row. By default there is one column for each, and
            further rows have no titles.
        options: Options of plotly's ``make_subplots``, such as rows and cols.
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
    """Draw points with their intervals as bars.

    Args:
        figure: The figure.
        x: The places of the points on the axis.
        estimates: The numbers, and the low and high ends of their intervals [3, point]. A point
            whose ends are NaN has no bar.
        name: The name in the legend.
        colour: The colour of points and bars.
        column: The column of the panel, from 1.
        row: The row of the panel, from 1.
        sideways: Draws the numbers on the horizontal axis and ``x`` on the vertical axis.
        style: Options of plotly's scatter, such as mode="lines+markers", which joins the points.
    """
    estimate, low, high = np.array(estimates, dtype=np.float64)
    bars = dict(
        type="data",
        array=high - estimate,
        arrayminus=estimate - low,
        symmetric=False,
        color=colour,
        thickness=1.5,
        width=5,  # wider than the point, which would hide a short one
    )

    axes = dict(x=x, y=estimate, error_y=bars)
    if sideways:
        axes = dict(x=estimate, y=x, error_x=bars)
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
    spacing: float = 0.14,
    **style: Any,
) -> None:
    """Draw several series of points with intervals, side by side at each word of the axis.

    Args:
        figure: The figure.
        words: The words below the axis, such as conditions.
        series: The name of each series, with its ``estimates`` as for :func:`points`, one for each
            word.
        colours: The colours of the series, in order. They repeat if there are fewer.
        column: The column of the panel, from 1.
        spacing: The distance between two series, where two words are 1 apart.
        style: Options of plotly's scatter.
    """
    middle_index = (len(series) - 1) / 2
    for index, (name, estimates) in enumerate(series):
        points(
            figure,
            np.arange(len(words)) + spacing * (index - middle_index),
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
    """Draw a line, and a band at the points that have an interval.

    Args:
        figure: The figure.
        x: The places of the points on the axis.
        interval: The values of the line, and the ends of the band; NaN for a point without band.
        name: The name in the legend, which has one entry for line and band; None for no entry.
        colour: The colour of the line. The band has a faint version of it.
        column: The column of the panel, from 1.
        row: The row of the panel, from 1.
        style: Options of plotly's scatter for the line, which by default has no markers.
    """
    place = dict(legendgroup=name, row=row, col=column)
    estimate, low, high = interval
    has_band = np.isfinite(low)
    if has_band.any():
        band_x = x[has_band]
        # The outline of the area: along the upper ends, and back along the lower ends.
        figure.add_scatter(
            x=np.concatenate([band_x, band_x[::-1]]),
            y=np.concatenate([high[has_band], low[has_band][::-1]]),
            fill="toself",
            fillcolor=faint(colour),
            line_width=0,
            mode="lines",
            hoverinfo="skip",
            showlegend=False,
            **place,
        )

    style = {"mode": "lines", "line": dict(color=colour, width=1.6)} | style
    figure.add_scatter(x=x, y=estimate, name=name, **place, **style)


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
    """Draw a dotted line, which stands for a null in every figure."""
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
    """Draw a line across a panel at a value with a meaning, such as no change.

    It is vertical at ``x``, or horizontal at ``y``.

    Draw the contents of the panel first, as plotly adds no such line to an empty panel.
    """
    line = dict(width=width, dash=dash, color=colour)
    if x is not None:
        figure.add_vline(x, line=line, row=row, col=column)
    if y is not None:
        figure.add_hline(y, line=line, row=row, col=column)


def head_map(
    table: pd.DataFrame,
    value_column: str,
    q_column: str,
    hover_columns: Mapping[str, str],
    hover: str,
    name: str,
    bar_words: str,
    x_column: str = "head",
) -> go.Figure:
    """Draw a map of heads by layer: orange for positive numbers, blue for negative ones.

    Cells with q ≥ 0.05 are faded. The others have a dot if their number is at least a twentieth of
    the largest.

    Args:
        table: One row per cell, with the columns ``layer`` and ``x_column``.
        value_column: The column whose numbers are coloured.
        q_column: The column of their q-values.
        hover_columns: Columns that ``hover`` may use as ``customdata``, by their labels in the
            figure's table on a page.
        hover: The text of a cell on hover, as a template of plotly's.
        name: The name of the map in the figure's table.
        bar_words: The title of the colour bar.
        x_column: The column on the horizontal axis: "head", or a column of words, whose order is
            kept.
    """
    cells = table.set_index(["layer", x_column]).to_xarray()
    if x_column == "head":
        ticks = numbered_ticks(cells.sizes["head"])
    else:
        ticks = {}
        cells = cells.sel({x_column: table[x_column].unique()})

    x = cells[x_column].values
    y = cells.layer.values
    values = cells[value_column].values
    q = cells[q_column].values

    # The colours are symmetric around 0. A map of zeros needs a range too.
    largest = float(np.nanmax(abs(values))) or 1.0
    bar_title = "<br>".join(wrap(bar_words, 24, break_on_hyphens=False))
    figure = panels()
    figure.add_heatmap(
        z=values,
        x=x,
        y=y,
        zmin=-largest,
        zmax=largest,
        colorscale=DIVERGING,
        name=name,
        meta=list(hover_columns),
        customdata=np.dstack([cells[column].values for column in hover_columns.values()]),
        hovertemplate=f"layer %{{y}} {x_column} %{{x}}<br>{hover}<extra></extra>",
        colorbar=dict(title=dict(text=bar_title, side="right")),
    )

    y_indices, x_indices = np.nonzero((q < 0.05) & (abs(values) >= LEAST_MARKED * largest))
    figure.add_scatter(
        x=x[x_indices],
        y=y[y_indices],
        mode="markers",
        hoverinfo="skip",
        name=f"q < 0.05, and at least {100 * LEAST_MARKED:.0f} % of the largest",
        marker=dict(symbol="circle", size=5, color="black"),
        showlegend=True,
    )
    _fade(figure, x, y, q >= 0.05)

    figure.update_xaxes(title_text=x_column, **ticks)
    figure.update_yaxes(title_text="layer", autorange="reversed", **numbered_ticks(len(y)))
    return figure


def title(figure: go.Figure, heading: str, small_print: str, height: int) -> None:
    """Set the title with its small print, both wrapped to the width of a notebook, and the height.

    Args:
        figure: The figure.
        heading: The heading: the model and what the figure shows.
        small_print: The small print below the heading.
        height: The height in pixels with one line of heading and one of small print. Each further
            line adds to it.
    """
    heading_lines = wrap(heading, _HEADING_LETTERS)
    small_print_lines = wrap(small_print, _SMALL_PRINT_LETTERS)
    further_height = _HEADING_LINE * (len(heading_lines) - 1)
    further_height += _SMALL_PRINT_LINE * (len(small_print_lines) - 1)
    figure.update_layout(
        LAYOUT,
        title_text=title_text("<br>".join(heading_lines), "<br>".join(small_print_lines)),
        height=height + further_height,
        margin_t=MARGIN["t"] + further_height,
    )


def title_above_legend(
    figure: go.Figure, heading: str, small_print: str, height: int, margin_top: int
) -> None:
    """Set the title and the height as :func:`title` does, and put the legend into a row of its own
    under the title.

    Args:
        figure: The figure.
        heading: The heading: the model and what the figure shows.
        small_print: The small print below the heading.
        height: The height in pixels with one line of heading and one of small print.
        margin_top: The room for title and legend above the panels, in pixels, with the same lines.
    """
    title(figure, heading, small_print, height)
    whole_height = figure.layout.height
    further_height = whole_height - height
    # Title and legend start 20 and 66 pixels below the top; plotly counts from the bottom, in
    # fractions of the height.
    title_place = dict(x=0.03, y=1 - 20 / whole_height, yanchor="top")
    legend = dict(
        orientation="h",
        x=0.03,
        xref="container",
        y=1 - (66 + further_height) / whole_height,
        yref="container",
        yanchor="top",
    )
    figure.update_layout(
        title=title_place, legend=legend, margin=dict(l=80, t=margin_top + further_height)
    )


def title_text(heading: str, small_print: str) -> str:
    """A title as plotly writes it: the heading, and under it the small print."""
    return heading + _SMALL_PRINT_START + small_print + _SMALL_PRINT_END


def parts_of_title(text: str) -> tuple[str, str]:
    """The heading and the small print of a :func:`title_text`; the second is empty if there is
    none."""
    heading, _, small_print = text.partition(_SMALL_PRINT_START)
    return heading, small_print.removesuffix(_SMALL_PRINT_END)


def take_heading(figure: go.Figure) -> str:
    """Remove the heading and its room from a figure, and return its words.

    The small print stays as the title.
    """
    layout = figure.layout
    heading, small_print = parts_of_title(layout.title.text)
    heading_height = _HEADING_LINE * len(heading.split("<br>"))
    height = layout.height - heading_height

    # A legend under the title moves up with the small print. plotly counts from the bottom.
    if layout.legend.yref == "container":
        from_top = (1 - layout.legend.y) * layout.height
        layout.legend.y = 1 - (from_top - heading_height) / height
    figure.update_layout(
        title_text=small_print,
        title_font_size=13,
        height=height,
        margin_t=layout.margin.t - heading_height,
    )
    return unescape(heading.replace("<br>", " "))  # names are escaped for plotly


def map_height(table: pd.DataFrame) -> int:
    """The height in pixels of a map with a row for each layer.

    A row has 24 pixels, and title and axis have 160. The height is at least 320, so that the colour
    bar is not too short for its title.
    """
    return max(320, 160 + 24 * table.layer.nunique())


def _fade(figure: go.Figure, x: np.ndarray, y: np.ndarray, is_faded: np.ndarray) -> None:
    """Fade some cells of a map, and explain this in the legend."""
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
