"""Figures of patching: a circuit's edges drawn over the model, maps of effects, and effects beside
their controls.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechattn.axes import head_name
from mechattn.errors import OptionError
from mechattn.render import draw
from mechattn.render.draw import GREY, THIRD, WITH, WITHOUT
from mechattn.render.figure_declaration import figure as declare
from mechattn.render.words import in_digits, number_words, says
from mechattn.stats.intervals import Interval

if TYPE_CHECKING:
    from mechattn.patching.circuit import Circuit
    from mechattn.patching.effects import Patching

# What a map shows of a cell besides its effect.
_HOVERED = {
    "share": "; %{NUMBER:.1%} of the whole effect",
    "random": "<br>random direction %{NUMBER:.3g}",
    "other_prompt": "<br>from another prompt %{NUMBER:.3g}",
}
_CONTROL_MARK: dict[str, Any] = dict(size=7, line_width=1.6)
_POINTS = 9  # of an arc
_OF_LAYER = re.compile(r"L(\d+)(?:H(\d+)|MLP)")  # a head or an MLP
_WIDEST = 7.0
_BESIDE_THE_AXES = re.compile(r"L\d+H?|embedding|logits")  # of a node's name, what an axis says
# Where an edge enters a head, so that its three inputs are told apart.
_ASIDE = {"q": -0.15, "v": 0.15}


@declare("circuit")
def circuit_map(circuit: Circuit, size: int | None = None, q: float | None = None) -> go.Figure:
    """Draw a circuit's edges between heads, MLPs, the embedding and the logits; wider edges have
    larger scores. Layers without an edge are left out.

    A positive score (vermilion) means that the other version's output raises the metric. An edge
    enters a head on the left as queries, in the middle as keys, on the right as values.

    Args:
        circuit: The result of ``circuit``.
        size: As for ``Circuit.kept``.
        q: As for ``Circuit.kept``.

    Returns:
        The figure; on hover each edge has its score with its interval, its q and the score of a
        random direction.
    """
    table = circuit.table(size, q)
    heads = int(circuit.about["heads"])

    # An edge to keys or values that heads share is drawn to each of these heads that writes.
    drawn = {*table.writer, "logits"}
    read_by = {
        reader: [node for node in circuit.graph.read_by(reader) if node in drawn]
        for reader in table.reader
    }
    readers = chain.from_iterable(read_by.values())
    nodes = sorted({*table.writer, *readers})

    matches = [_OF_LAYER.match(node) for node in nodes]
    layers = sorted({int(match[1]) for match in matches if match})
    places = {node: _place(node, heads, layers) for node in nodes}

    figure = draw.panels()
    _legend_of_edges(figure)

    largest = table.effect.abs().max()
    for row in table[::-1].itertuples():  # the largest on top
        for node in read_by[row.reader]:
            _arc(figure, row, places[row.writer], places[node], largest)

    # After the edges, so that a node covers their ends.
    _nodes(figure, places)

    carried = _faithfulness_words(circuit, size, q)
    ticks = ["embedding", *map(str, layers), "logits"]
    figure.update_xaxes(
        title_text="head",
        tickvals=list(range(heads)),
        showgrid=False,
        zeroline=False,
    )
    figure.update_yaxes(
        title_text="layer",
        tickvals=list(range(-1, len(layers) + 1)),
        ticktext=ticks,
        showgrid=False,
    )

    edges = int(circuit.graph.exists.sum())
    note = "{metric}; {kept} of {edges} edges, {method}; ranked on {ranked_on}. {carried}".format(
        **circuit.about,
        kept=len(table),
        edges=edges,
        carried=carried,
    )
    heading = f"{circuit.about['model']}: circuit"
    height = 200 + 80 * len(ticks)
    draw.title(figure, heading, note, height, top=110)
    return says(figure, f"{len(table)} edges on a way from the embedding to the logits. {carried}")


def _legend_of_edges(figure: go.Figure) -> None:
    """An entry of the legend for each colour of edges, which have none of their own."""
    for colour, verb in ((WITHOUT, "lowers"), (WITH, "raises")):
        figure.add_scatter(
            x=[None],
            y=[None],
            mode="lines",
            line=dict(color=colour, width=4),
            name=f"the other output {verb} the metric",
        )


def _nodes(figure: go.Figure, places: dict[str, tuple[float, float]]) -> None:
    """A circle for each node, with what the axes do not say of its name."""
    figure.add_scatter(
        x=[across for across, _ in places.values()],
        y=[row for _, row in places.values()],
        mode="markers+text",
        text=[_BESIDE_THE_AXES.sub("", node) for node in places],
        hovertext=list(places),
        hoverinfo="text",
        textfont=dict(size=10),
        showlegend=False,
        marker=dict(size=26, color=draw.NEUTRAL, line=dict(width=1.5, color="#444")),
    )


def _faithfulness_words(circuit: Circuit, size: int | None, q: float | None) -> str:
    """What the circuit carries on the half of the prompts that did not rank its edges."""
    edges = circuit.size() if size is None else size
    measured = circuit.curve[circuit.curve.edges == edges]
    if q is not None or measured.empty:
        return f"What they carry was not measured; circuit(…, sizes=[{edges}]) measures a size."

    faithful = measured.iloc[0]
    interval = "(without an interval, as that of the whole effect holds 0)"
    if np.isfinite(faithful.low):
        interval = f"[{faithful.low:.0%}, {faithful.high:.0%}]"

    random_share = round(faithful.random, 2) + 0.0  # not "-0%"
    return (
        f"On the other half, the first {edges} edges carry {faithful.faithfulness:.0%} {interval} of"
        f" the effect, as many random ones {random_share:.0%}."
    )


def _arc(
    figure: go.Figure,
    edge: Any,
    start: tuple[float, float],
    end: tuple[float, float],
    largest: float,
) -> None:
    """Draw an edge, which enters a head where its queries, keys or values are.

    Args:
        figure: The figure that gets it.
        edge: A row of the circuit's table.
        start: Where the writer is, across and up.
        end: Where the reader is.
        largest: The largest score of the circuit, whose edge is the widest.
    """
    _, _, reader_input = edge.reader.partition(".")
    x0, y0 = start
    x1, y1 = end
    x1 += _ASIDE.get(reader_input, 0.0)

    # Half a sine to the side, so that edges over several layers do not hide each other.
    way = np.linspace(0, 1, _POINTS)
    side = 1 if x1 >= x0 else -1
    width = 0.35 * side * min(1.0, (y1 - y0) / 2)
    bend = width * np.sin(np.pi * way)

    q = edge.q_effect
    if np.isnan(q):
        q = edge.q_beyond_random
    hover = (
        f"{edge.writer} → {edge.reader}<br>"
        f"{edge.effect:+.3g} [{edge.effect_low:+.3g}, {edge.effect_high:+.3g}]<br>"
        f"q = {q:.2g}<br>random direction {edge.random:+.3g}"
    )

    colour = WITH if edge.effect > 0 else WITHOUT
    relative_size = abs(edge.effect) / largest
    figure.add_scatter(
        x=x0 + (x1 - x0) * way + bend,
        y=y0 + (y1 - y0) * way,
        mode="lines",
        hovertext=hover,
        hoverinfo="text",
        line=dict(color=colour, width=max(1.0, _WIDEST * relative_size)),
        opacity=0.75,
        showlegend=False,
    )


def _place(name: str, heads: int, layers: list[int]) -> tuple[float, float]:
    """Where a node is drawn; layers count upwards, the MLPs are on the right."""
    match = _OF_LAYER.match(name)
    if match is None:  # the embedding below, or the logits above
        row = -1
        if name == "logits":
            row = len(layers)
        return (heads - 1) / 2, row

    row = layers.index(int(match[1]))
    if match[2]:
        return float(match[2]), row
    return heads + 0.3, row + 0.5


@declare("patching")
def patching_map(patching: Patching) -> go.Figure:
    """Map mean patching effects by layer and head, or layer and segment; dots mark q < 0.05
    (over the map) and at least a twentieth of the largest.

    Orange means that the answer's metric rose, blue that it fell. Heads that were not requested are
    empty.

    Args:
        patching: The result of ``patch``.

    Raises:
        OptionError: The effects are not of heads, or of layers by segment.
    """
    if patching.labels[0] != "layer" or len(patching.labels) != 2:
        raise OptionError(
            f"a map needs heads or layers in rows and columns; these are by {patching.labels}"
        )

    across = patching.labels[1]
    table = patching.table()
    has_share = bool(table.share.notna().all())
    q_column = f"q_{table.attrs['tested']}"
    columns = {
        "effect": "effect",
        "low": "effect_low",
        "high": "effect_high",
        "q": q_column,
    }
    hover = (
        "effect %{z:.3g} [%{customdata[0]:.3g}, %{customdata[1]:.3g}]<br>q = %{customdata[2]:.2g}"
    )
    for column, form in _HOVERED.items():
        if column in table and (has_share or column != "share"):
            place = len(columns) - 1  # the first column is the colour
            hover += form.replace("NUMBER", f"customdata[{place}]")
            columns[column] = column

    figure = draw.head_map(table, columns, "effect", _effect_on(patching), hover, across)
    note = f"{patching.about['metric']}; {_run_words(patching)}"
    heading = f"{patching.about['model']}: patching effect by {across}"
    draw.title(figure, heading, note, draw.map_height(table), top=110)

    largest_row = int(np.nanargmax(table.effect.abs()))
    largest = table.iloc[largest_row]
    cells = table[patching.labels].to_dict("records")
    ends = [np.asarray(largest[end]) for end in ("effect", "effect_low", "effect_high")]
    effect = number_words(Interval(*ends))
    if has_share:
        effect += f", {largest.share:.0%} of the whole effect"

    significant = int((table[q_column] < 0.05).sum())
    return says(
        figure,
        f"{significant} of {len(table)} {across}s at q < 0.05."
        f" Largest: {_cell_words(cells[largest_row])},"
        f" {effect}; it was selected as the largest, so its interval is too optimistic"
        ' (table(select="half") avoids this).',
    )


@declare("patching")
def patching_effects(
    patching: Patching, top: int | None = 12, select: Literal["half"] | None = None
) -> go.Figure:
    """Plot patching effects as points with 95 % intervals beside both controls, the largest first.

    Filled points differ from 0 and from each control that was measured (all q < 0.05, and an
    interval without 0). The controls stand a little lower. Those that are far off are at the edge,
    with their number.

    Args:
        patching: The result of ``patch``.
        top: The number of rows; None for all.
        select: "half" ranks them on one half of the prompts and draws the other half.

    Raises:
        OptionError: There are too few prompts, or an option is not allowed.
    """
    table = patching.table(top, select).iloc[::-1]
    cells = table[patching.labels].to_dict("records")
    labels = [_cell_words(cell) for cell in cells]
    rows = np.arange(len(table))

    # q_effect is NaN where no effect is below 0.
    q = table.filter(regex="^q_").max(axis=1)
    has_interval_without_0 = table.effect_low * table.effect_high > 0
    differs = (q < 0.05) & has_interval_without_0
    compared = "from 0"
    if patching.controls:
        compared = "from 0 and from each control"

    figure = draw.panels()
    _effect_points(figure, table, differs, q, compared)
    low, high = _control_points(figure, table, rows - 0.36)
    draw.rule(figure, x=0)

    note = _run_words(patching, f"q over {table.attrs['family']}; bars: 95 % intervals; ")
    heading = f"{patching.about['model']}: patching effects"
    height = 190 + 30 * len(table)
    draw.title(figure, heading, note, height, top=120)

    room = 0.05 * (high - low)
    figure.update_xaxes(
        title_text=_effect_on(patching),
        range=[low - room, high + room],
    )
    figure.update_yaxes(
        tickvals=rows,
        ticktext=labels,
        zeroline=False,
        range=[-0.8, len(table) - 0.4],
    )

    sentence = f"{int(differs.sum())} of {len(table)} rows differ {compared} (q < 0.05)"
    if table.attrs["skewed"]:
        sentence += f"; {table.attrs['skewed']}"
    return says(figure, f"{sentence}.")


def _effect_points(
    figure: go.Figure, table: pd.DataFrame, differs: pd.Series, q: pd.Series, compared: str
) -> None:
    """The effects with their intervals, a row each; those that differ are filled."""
    rows = np.arange(len(table))
    for words, mask, fill in (
        (f"effect: differs {compared} (q < 0.05)", differs, WITH),
        ("effect: does not", ~differs, "white"),
    ):
        estimates = table.loc[mask, ["effect", "effect_low", "effect_high"]]
        outline = dict(color=WITH, width=1.6)
        draw.points(
            figure,
            rows[mask],
            estimates.values.T,
            words,
            WITH,
            sideways=True,
            marker=dict(color=fill, line=outline, size=8),
            customdata=q[mask],
            hovertemplate="%{y}: %{x:+.3g}, q = %{customdata:.2g}",
        )


def _control_points(
    figure: go.Figure, table: pd.DataFrame, places: np.ndarray
) -> tuple[float, float]:
    """The controls of each row, where they were measured.

    Args:
        figure: The figure that gets them.
        table: The effects, a row each.
        places: Where the controls of each row stand.

    Returns:
        The least and the largest number that is drawn, effects included.
    """
    drawn_values = table[["effect_low", "effect_high"]].values.ravel()
    low = drawn_values.min(initial=0.0)
    high = drawn_values.max(initial=0.0)
    if "random" in table:
        low = min(low, table.random.min())
        high = max(high, table.random.max())
        figure.add_scatter(
            x=table.random,
            y=places,
            name="random direction of the same norm",
            mode="markers",
            marker=_CONTROL_MARK | dict(symbol="x-thin-open", color=GREY),
        )

    if "other_prompt" in table and table.other_prompt.notna().any():
        # Another prompt may do a hundred times as much, beside which no effect could be seen.
        reach = 0.5 * (high - low)
        clipped = table.other_prompt.clip(low - reach, high + reach)
        _other_prompts(figure, table.other_prompt, clipped, places)
        low = min(low, clipped.min())
        high = max(high, clipped.max())

    return low, high


def _other_prompts(
    figure: go.Figure, effects: pd.Series, clipped: pd.Series, places: np.ndarray
) -> None:
    """The effects of other prompts; those that are far off are at the edge, with their number."""
    is_left = effects < clipped
    is_right = effects > clipped
    numbers = effects.map(lambda effect: in_digits(effect, ".3g"))
    symbol = np.select(
        [is_left, is_right],
        ["triangle-left-open", "triangle-right-open"],
        "diamond-open",
    )
    figure.add_scatter(
        x=clipped,
        y=places,
        name="from another prompt",
        mode="markers+text",
        text=np.where(is_left | is_right, numbers, ""),
        textposition=np.where(is_right, "middle left", "middle right"),
        marker=_CONTROL_MARK | dict(symbol=symbol, color=THIRD),
        customdata=effects,
        meta=["x"],
        hovertemplate="%{y}: %{customdata:+.3g}",
    )


def _cell_words(cell: dict[str, Any]) -> str:
    """What a row is: "L1H2", "layer 1", a set's name; then its segment or position."""
    labels = dict(cell)
    words = []
    if "layer" in labels:
        layer = labels.pop("layer")
        head = labels.pop("head", None)
        layer_words = f"layer {layer}"
        if head is not None:
            layer_words = head_name(layer, head)
        words.append(layer_words)

    words += map(str, labels.values())
    return ", ".join(words)


def _run_words(patching: Patching, details: str = "") -> str:
    """How the effects were measured, and the whole effect that they are part of."""
    about = patching.about
    return (
        f"{about['direction']}, {about['method']}; n = {patching.units.words}; {details}"
        f"whole effect {number_words(patching.whole)}"
    )


def _effect_on(patching: Patching) -> str:
    """The words on an axis of effects, which are changes of the metric."""
    return f"effect on the {patching.about['metric'].removeprefix('a ')}"
