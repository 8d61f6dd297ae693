"""The numbers that a figure draws, as a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechattn.errors import OptionError
from mechattn.render.print_size import plain

TABLE_COLUMNS = ["panel", "series", "x_is", "x", "y_is", "y", "z_is", "z", "low", "high"]


def figure_table(figure: go.Figure) -> pd.DataFrame:
    """The numbers that a figure draws: panel, series, x_is, x, y_is, y, z_is, z (of maps), low and
    high (of intervals).

    ``x_is`` … are the words of the axes. A place that has words beside its axis is named by these.

    Args:
        figure: A figure of ``mechattn.render``.

    Raises:
        OptionError: It draws no series of numbers, as a circuit's.
    """
    tables = [_trace_table(figure, trace) for trace in figure.data if _is_series(trace)]
    if not tables:
        raise OptionError(
            "this figure draws no series of numbers; circuit.table() has the edges of a circuit"
        )

    table = pd.concat(tables, ignore_index=True).reindex(columns=TABLE_COLUMNS)
    table = table.dropna(axis=1, how="all")
    return table.map(lambda cell: plain(cell) if isinstance(cell, str) else cell)


def _is_series(trace: Any) -> bool:
    """Whether a trace has numbers of its own: it isn't a band, an entry of the legend alone, or
    what fades a map."""
    if trace.name in (None, "faded") or getattr(trace, "fill", None) == "toself":
        return False
    return pd.notna(np.atleast_1d(trace.x)).any()


def _trace_table(figure: go.Figure, trace: Any) -> pd.DataFrame:
    """The numbers of a trace with the words of their axes, and the ends of their intervals."""
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
        x, y = np.meshgrid(x, y)
        columns |= {
            "x": x.ravel(),
            "y": y.ravel(),
            "z_is": trace.colorbar.title.text,
            "z": np.asarray(trace.z, dtype=np.float64).ravel(),
        }
        return pd.DataFrame(columns)

    columns |= {"x": _in_words(x, x_axis), "y": _in_words(y, y_axis)}
    for numbers, bars in (
        (x, getattr(trace, "error_x", None)),
        (y, getattr(trace, "error_y", None)),
    ):
        if bars is not None and bars.array is not None:
            columns["low"] = numbers - bars.arrayminus
            columns["high"] = numbers + bars.array

    if trace.meta:
        # The ends of a band, or a number that is drawn at the edge.
        customdata = np.asarray(trace.customdata).reshape(len(x), -1)
        hover_numbers = pd.DataFrame(customdata, columns=list(trace.meta))
        columns |= hover_numbers.filter(["x", "low", "high"]).to_dict("list")

    return pd.DataFrame(columns)


def _axis(figure: go.Figure, trace: Any, kind: str) -> Any:
    """The axis of a trace, "x" or "y"."""
    name = trace[f"{kind}axis"] or kind  # plotly's "x2" is layout.xaxis2
    return figure.layout[f"{kind}axis{name[1:]}"]


def _panel_title(figure: go.Figure, x_axis: Any, y_axis: Any) -> str:
    """The words over a panel; a figure of one panel has none."""
    left, right = x_axis.domain or (1, 0)
    _, top = y_axis.domain or (0, 1)
    for note in figure.select_annotations(dict(xref="paper", yref="paper")):
        if left < note.x < right and np.isclose(note.y, top):
            return note.text
    return ""


def _in_words(numbers: np.ndarray, axis: Any) -> np.ndarray:
    """Places on an axis as the words beside it, where it has a word at each number from 0."""
    words = np.array(axis.ticktext or [], dtype=object)
    if not len(words) or list(axis.tickvals) != list(range(len(words))):
        return numbers
    indices = np.rint(numbers.astype(np.float64)).astype(int)
    return words[indices.clip(0, len(words) - 1)]
