"""A table of the numbers that a figure draws."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechattn.errors import OptionError
from mechattn.render.draw import FADED_CELLS
from mechattn.render.print_size import without_markup


def figure_table(figure: go.Figure) -> pd.DataFrame:
    """The numbers that a figure draws, as a table with a row for each point or cell.

    The columns are panel, series, x_is, x, y_is, y, z_is, z, low and high. ``x_is``, ``y_is`` and
    ``z_is`` are the titles of the axes and of a map's colour bar. ``low`` and ``high`` are the ends
    of intervals, also of those that are only shown on hover. If an axis has words instead of
    numbers, ``x`` or ``y`` is the word. A column that would be empty is left out.

    Args:
        figure: A figure of ``mechattn.render``.

    Raises:
        OptionError: The figure draws no series of numbers, as that of a circuit.
    """
    tables = [_trace_table(figure, trace) for trace in figure.data if _is_series(trace)]
    if not tables:
        raise OptionError(
            "this figure draws no series of numbers; circuit.table() has the edges of a circuit"
        )

    table = pd.concat(tables, ignore_index=True)
    columns = ["panel", "series", "x_is", "x", "y_is", "y", "z_is", "z", "low", "high"]
    table = table.reindex(columns=columns).dropna(axis=1, how="all")
    return table.map(_without_tags)


def _without_tags(cell: Any) -> Any:
    """A cell of the table, without the tags for plotly that words may have."""
    if isinstance(cell, str):
        return without_markup(cell)
    return cell


def _is_series(trace: Any) -> bool:
    """Whether a trace has numbers of its own.

    Bands, traces without a name, traces that fade a map, and traces that only make an entry in the
    legend have none.
    """
    is_band = getattr(trace, "fill", None) == "toself"  # a heatmap has no property ``fill``
    if trace.name in (None, FADED_CELLS) or is_band:
        return False

    # A trace that only makes an entry in the legend has x = [None].
    return pd.notna(np.atleast_1d(trace.x)).any()


def _trace_table(figure: go.Figure, trace: Any) -> pd.DataFrame:
    """The rows of a trace: its numbers, the titles of their axes, and the ends of intervals."""
    x_axis = _axis(figure, trace, "x")
    y_axis = _axis(figure, trace, "y")
    x = np.asarray(trace.x)
    y = np.asarray(trace.y)
    columns: dict[str, Any] = {
        "panel": _panel_title(figure, x_axis, y_axis),
        "series": trace.name,
        "x_is": x_axis.title.text,
        "y_is": y_axis.title.text,
    }

    if trace.type == "heatmap":
        cell_x, cell_y = np.meshgrid(x, y)
        z = np.asarray(trace.z, dtype=np.float64)
        columns["z_is"] = trace.colorbar.title.text
        columns |= {"x": cell_x.ravel(), "y": cell_y.ravel(), "z": z.ravel()}
    else:
        columns |= {"x": _in_words(x, x_axis), "y": _in_words(y, y_axis)}
        # A trace has bars along at most one axis.
        for numbers, bars in ((x, trace.error_x), (y, trace.error_y)):
            if bars.array is not None:
                columns["low"] = numbers - bars.arrayminus
                columns["high"] = numbers + bars.array

    if trace.meta:
        # The numbers on hover, whose names are in ``meta``. They may be the ends of a band or of a
        # cell's interval, or an x beyond the axis, whose point is drawn at the edge.
        customdata = np.asarray(trace.customdata).reshape(-1, len(trace.meta))
        hover_numbers = pd.DataFrame(customdata, columns=list(trace.meta))
        columns |= hover_numbers.filter(["x", "low", "high"]).to_dict("list")

    return pd.DataFrame(columns)


def _axis(figure: go.Figure, trace: Any, letter: Literal["x", "y"]) -> Any:
    """The horizontal or vertical axis of a trace."""
    name = trace[f"{letter}axis"] or letter  # such as "x2", which is layout.xaxis2
    return figure.layout[f"{letter}axis{name[1:]}"]


def _panel_title(figure: go.Figure, x_axis: Any, y_axis: Any) -> str:
    """The title over a panel; empty if it has none."""
    if x_axis.domain is None:  # a figure that was made without make_subplots
        return ""
    left, right = x_axis.domain
    _, top = y_axis.domain

    # plotly keeps the titles of panels as annotations of the whole figure, each above the middle of
    # its panel.
    for annotation in figure.select_annotations(dict(xref="paper", yref="paper")):
        if left < annotation.x < right and np.isclose(annotation.y, top):
            return annotation.text
    return ""


def _in_words(numbers: np.ndarray, axis: Any) -> np.ndarray:
    """The words at some places of an axis; the numbers themselves if the axis does not have a word
    at each whole number from 0."""
    words = np.array(axis.ticktext or [], dtype=object)
    if not len(words) or list(axis.tickvals) != list(range(len(words))):
        return numbers

    # Series side by side are drawn a little to the left or right of their word.
    word_indices = np.rint(numbers.astype(np.float64)).astype(int)
    return words[word_indices.clip(0, len(words) - 1)]
