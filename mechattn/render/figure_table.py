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
    tables = []
    for trace in figure.data:
        is_band = getattr(trace, "fill", None) == "toself"
        is_hidden = trace.name in (None, "faded") or is_band
        if is_hidden or not pd.notna(np.atleast_1d(np.asarray(trace.x))).any():
            continue
        columns = {"panel": _panel_title(figure, trace), "series": trace.name}
        columns |= _trace_columns(figure, trace)
        tables.append(pd.DataFrame(columns))
    if not tables:
        raise OptionError(
            "this figure draws no series of numbers; circuit.table() has the edges of a circuit"
        )
    table = pd.concat(tables, ignore_index=True).reindex(columns=TABLE_COLUMNS)
    table = table.dropna(axis=1, how="all")
    return table.map(lambda cell: plain(cell) if isinstance(cell, str) else cell)


def _axis(figure: go.Figure, trace: Any, kind: str) -> Any:
    """The axis of a trace, "x" or "y"."""
    name = trace[f"{kind}axis"] or kind  # plotly's "x2" is layout.xaxis2
    return figure.layout[f"{kind}axis{name[1:]}"]


def _panel_title(figure: go.Figure, trace: Any) -> str:
    """The words over the panel of a trace; a figure of one panel has none."""
    left, right = _axis(figure, trace, "x").domain or (1, 0)
    top = (_axis(figure, trace, "y").domain or (0, 1))[1]
    for note in figure.select_annotations(dict(xref="paper", yref="paper")):
        if left < note.x < right and np.isclose(note.y, top):
            return note.text
    return ""


def _trace_columns(figure: go.Figure, trace: Any) -> dict[str, Any]:
    """The numbers of a trace with the words of their axes, and the ends of their intervals."""
    values = {"x": np.asarray(trace.x), "y": np.asarray(trace.y)}
    columns: dict[str, Any] = {}
    if trace.type == "heatmap":
        x, y = np.meshgrid(values["x"], values["y"])
        values = {"x": x.ravel(), "y": y.ravel()}
        columns["z_is"] = trace.colorbar.title.text
        columns["z"] = np.asarray(trace.z, dtype=np.float64).ravel()
    for kind, numbers in values.items():
        axis = _axis(figure, trace, kind)
        columns[f"{kind}_is"] = axis.title.text
        columns[kind] = _in_words(numbers, axis)
        bars = getattr(trace, f"error_{kind}", None)
        if bars is not None and bars.array is not None:
            columns["low"] = numbers - bars.arrayminus
            columns["high"] = numbers + bars.array
    if isinstance(trace.meta, (list, tuple)) and trace.type != "heatmap":
        # The ends of a band, or a number that is drawn at the edge.
        hover_numbers = np.asarray(trace.customdata).reshape(len(values["x"]), -1)
        for name, numbers in zip(trace.meta, hover_numbers.T):
            if name in ("x", "low", "high"):
                columns[name] = numbers
    return columns


def _in_words(numbers: np.ndarray, axis: Any) -> np.ndarray:
    """Places on an axis as the words beside it, where it has words."""
    if axis.ticktext is None or not len(axis.ticktext):
        return numbers
    words = np.array(axis.ticktext, dtype=object)
    if list(axis.tickvals) != list(range(len(words))):
        return numbers
    indices = np.rint(numbers.astype(np.float64)).astype(int)
    return words[indices.clip(0, len(words) - 1)]
