"""Accuracy of conditions as points with intervals: by condition, over a swept option, and as a map of two options."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.axes import BASELINE
from mechattn.errors import OptionError
from mechattn.render import draw
from mechattn.render.declared import figure as declare
from mechattn.render.plain_names import with_plain_names
from mechattn.render.theme import COLOURS

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

_LEAST_REACH = 10  # points of accuracy: the least range of a map's colours


@declare("evaluation")
def accuracy(tables: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Plot accuracy by condition with 95 % intervals, one colour per model; dotted lines mark the baselines.

    Args:
        tables: The table of ``Evaluation.accuracy()`` for each model, by its name in the figure.
    """
    names = _conditions(tables)
    figure = draw.empty()
    for i, ((model, table), colour) in enumerate(zip(tables.items(), cycle(COLOURS), strict=False)):
        rows = table.set_index("condition").reindex(names)
        place = np.arange(len(names)) + 0.14 * (i - (len(tables) - 1) / 2)
        _points(figure, place, rows, model, colour)
        figure.add_hline(100 * rows.accuracy[BASELINE], line=dict(width=1, dash="dot", color=colour))
    figure.update_xaxes(tickvals=list(range(len(names))), ticktext=names)
    _finish(figure, tables, "accuracy by condition")
    return with_plain_names(figure)


@declare("evaluation")
def accuracy_sweep(tables: Mapping[str, pd.DataFrame], option: str = "count") -> go.Figure:
    """Plot accuracy over the values of a swept option with 95 % intervals, one line per model.

    Args:
        tables: The table of ``Evaluation.accuracy()`` for each model by name, with conditions from ``ma.sweep``.
        option: The swept option.

    Raises:
        OptionError: No condition is named after the option.
    """
    names = [name for name in _conditions(tables) if f"{option}=" in name]
    if not names:
        raise OptionError(f"no condition is named {option}=…; evaluate with conditions=ma.sweep(…)")
    values = [name.split(f"{option}=")[1].split(",")[0] for name in names]
    numeric = all(value.lstrip("-").replace(".", "", 1).isdigit() for value in values)
    start = [BASELINE] if option == "count" else []
    figure = draw.empty()
    for (model, table), colour in zip(tables.items(), cycle(COLOURS), strict=False):
        rows = table.set_index("condition").reindex([*start, *names])
        x = ([0.0] * len(start) + [float(v) for v in values]) if numeric else [*start, *values]
        _points(figure, x, rows, model, colour, mode="lines+markers")
    figure.update_xaxes(title_text="inserted tokens" if option == "count" else option)
    _finish(figure, tables, f"accuracy by {option}")
    return with_plain_names(figure)


@declare("evaluation")
def accuracy_map(table: pd.DataFrame, across: str, down: str, model: str = "") -> go.Figure:
    """Map accuracy over two swept options; don't report the best cell on the same problems.

    ``Evaluation.best`` chooses on one half of the problems and reports the other half.

    Args:
        table: The table of ``Evaluation.accuracy()``, with conditions named after both options.
        across: The option on the horizontal axis.
        down: The option on the vertical axis.
        model: The model's name in the figure.

    Raises:
        OptionError: No condition is named after both options.
    """
    cells = {}
    for name, value in zip(table.condition, table.accuracy, strict=True):
        options = dict(part.split("=", 1) for part in name.split(", ") if "=" in part)
        if across in options and down in options:
            cells[options[down], options[across]] = 100 * value
    if not cells:
        raise OptionError(f"no condition is named {across}=…, {down}=…; sweep over both")
    rows, columns = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    z = [[cells.get((row, column), np.nan) for column in columns] for row in rows]
    base = 100 * float(table.set_index("condition").accuracy[BASELINE])
    reach = max(_LEAST_REACH, float(np.nanmax(np.abs(np.array(z) - base))))  # differences due to chance get no colour
    figure = draw.empty()
    figure.add_heatmap(
        z=z, x=columns, y=rows, colorscale="RdBu", zmin=base - reach, zmax=base + reach, colorbar=dict(title="%"),
        texttemplate="%{z:.1f}",
    )  # fmt: skip
    about = f"n = {_n([table])}; {base:.1f} % in the baseline, white; blue is better"
    figure.update_xaxes(title_text=across, type="category")
    figure.update_yaxes(title_text=down, type="category")
    draw.title(figure, f"{model}: accuracy", about, 420)
    return with_plain_names(figure)


@declare("evaluation")
def by_samples(tables: Mapping[str, pd.DataFrame], model: str = "") -> go.Figure:
    """Plot pass@k, or the accuracy of the best of k, over k: one colour per condition, one dash style per table.

    Args:
        tables: The table of ``Evaluation.pass_at_k([1, 2, …])`` or ``best_of`` for each measure, by its name in the
            figure.
        model: The model's name in the figure.

    Raises:
        OptionError: There are no tables.
    """
    colours = dict(zip(_conditions(tables), cycle(COLOURS), strict=False))
    figure = draw.empty()
    for (measure, table), dash in zip(tables.items(), cycle(("solid", "dash", "dot")), strict=False):
        for name, rows in table.groupby("condition", sort=False):
            renamed = rows.rename(columns={"estimate": "accuracy"}).set_index("condition")
            _points(figure, rows.k.to_list(), renamed, f"{name}, {measure}", colours[name], dash, mode="lines+markers")
    figure.update_xaxes(title_text="answers to each question (k)")
    figure.update_yaxes(title_text="probability of a right answer (%)", rangemode="tozero")
    note = "bars: 95 % intervals over problems"
    draw.title(figure, f"{model}: {' and '.join(tables)}", note, 460)
    return with_plain_names(figure)


@declare("evaluation")
def diversity(tables: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Plot the diversity of the answers to one question by condition, one colour per model.

    Args:
        tables: The table of ``Evaluation.diversity()`` for each model, by its name in the figure.
    """

    names, figure = _conditions(tables), draw.empty()
    for (model, table), colour in zip(tables.items(), cycle(COLOURS), strict=False):
        rows = table.rename(columns={"estimate": "accuracy"}).set_index("condition").reindex(names)
        _points(figure, names, rows, model, colour)
    n = int(next(iter(tables.values())).n.iloc[0])
    figure.update_yaxes(title_text=f"distinct {n}-grams (% of all)")
    note = "of all answers to one question; bars: 95 % intervals over questions"
    draw.title(figure, "diversity of answers", note, 420)
    return with_plain_names(figure)


def _conditions(tables: Mapping[str, pd.DataFrame]) -> list[str]:
    if not tables:
        raise OptionError("there are no tables to show; give {model: evaluation.accuracy()}")
    return list(dict.fromkeys(name for table in tables.values() for name in table.condition))


def _points(
    figure: go.Figure, x: Any, rows: pd.DataFrame, name: str, colour: str, dash: str = "", **style: Any
) -> None:
    """The accuracies of a table's rows in percent."""
    style |= {"line": dict(dash=dash)} if dash else {}
    draw.points(
        figure, x, [100 * rows[column] for column in ("accuracy", "low", "high")], name, colour,
        customdata=list(rows.index), hovertemplate="%{customdata}: %{y:.1f} %<extra></extra>", **style,
    )  # fmt: skip


def _n(tables: Seq[pd.DataFrame]) -> str:
    """The number of problems, or of groups of problems, that the tables are over."""
    counts = sorted({int(table.n.iloc[0]) for table in tables})
    units = {table.attrs.get("unit", "prompts") for table in tables}
    what = "problems" if units == {"prompts"} else units.pop() if len(units) == 1 else "problems or groups of them"
    return f"{', '.join(map(str, counts))} {what}"


def _finish(figure: go.Figure, tables: Mapping[str, pd.DataFrame], title: str) -> None:
    note = f"n = {_n(list(tables.values()))}; bars: 95 % intervals"
    figure.update_yaxes(title_text="right answers (%)", rangemode="tozero")
    draw.title(figure, title, note, 460)
