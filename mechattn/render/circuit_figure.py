"""The figure of a circuit: its edges drawn over the model."""

from __future__ import annotations

import re
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechattn.render import draw
from mechattn.render.draw import WITH, WITHOUT
from mechattn.render.figure_declaration import declare
from mechattn.render.words import in_digits, interval_of, number_words, says

if TYPE_CHECKING:
    from mechattn.patching.circuit import Circuit

_ARC_POINTS = 9
_HEAD_OR_MLP = re.compile(r"L(\d+)(?:H(\d+)|MLP)")
_WIDEST = 7.0  # pixels, of the edge with the largest score
_BESIDE_THE_AXES = re.compile(r"L\d+H?|embedding|logits")  # of a node's name, what an axis says
# Where an edge enters a head, so that its three inputs are told apart; of the figure's width, as
# the circle of a head is as large in any model.
_SHIFT_OF_INPUT = {"q": -0.01, "v": 0.01}


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
    heads = int(circuit.about["cfg"]["n_heads"])

    # An edge to keys or values that heads share is drawn to each of these heads that writes.
    drawn = {*table.writer, "logits"}
    read_by = {
        reader: [node for node in circuit.graph.nodes_after[reader] if node in drawn]
        for reader in table.reader
    }
    nodes = sorted({*table.writer, *chain.from_iterable(read_by.values())})
    matches = [_HEAD_OR_MLP.match(node) for node in nodes]
    layers = sorted({int(match[1]) for match in matches if match})
    places = {node: _place(node, heads, layers) for node in nodes}

    figure = draw.panels()
    _legend_of_edges(figure)
    largest = table.effect.abs().max()
    for _, edge in table[::-1].iterrows():  # the largest on top
        for node in read_by[edge.reader]:
            _arc(figure, edge, places[edge.writer], places[node], largest, heads)
    _nodes(figure, places)  # after the edges, so that a node covers their ends

    ticks = ["embedding", *map(str, layers), "logits"]
    figure.update_xaxes(
        title_text="head", tickvals=list(range(heads)), showgrid=False, zeroline=False
    )
    figure.update_yaxes(draw.named_ticks(ticks), title_text="layer", showgrid=False)

    carried = _faithfulness_words(circuit, size, q)
    edges = int(circuit.graph.exists.sum())
    about = circuit.about
    note = (
        f"{about['metric']}; {len(table)} of {edges} edges, {about['method']}; ranked on"
        f" {about['ranked_on']}. {carried}"
    )
    heading = f"{about['model']}: circuit"
    draw.title_above_legend(figure, heading, note, 200 + 80 * len(ticks), top=110)
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
    across, heights = np.reshape(list(places.values()), (-1, 2)).T
    figure.add_scatter(
        x=across,
        y=heights,
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
    if q is not None:
        return "What they carry was not measured: circuit(…, sizes=[…]) measures the first edges."
    edges = circuit.size() if size is None else size
    measured = circuit.curve[circuit.curve.edges == edges]
    if measured.empty:
        return f"What they carry was not measured; circuit(…, sizes=[{edges}]) measures a size."

    faithful = measured.iloc[0]
    interval = "(without an interval, as that of the whole effect holds 0)"
    if np.isfinite(faithful.low):
        interval = f"[{_share_words(faithful.low)}, {_share_words(faithful.high)}]"
    return (
        f"On the other half, the first {edges} edges carry"
        f" {_share_words(faithful.faithfulness)} {interval} of the effect, as many random ones"
        f" {_share_words(faithful.random)}."
    )


def _share_words(share: float) -> str:
    """A share in whole percent, which may be negative."""
    return in_digits(round(share, 2), ".0%")


def _arc(
    figure: go.Figure,
    edge: pd.Series,
    start: tuple[float, float],
    end: tuple[float, float],
    largest: float,
    heads: int,
) -> None:
    """Draw an edge; into a head it goes where that reads queries, keys or values.

    Args:
        figure: The figure that gets it.
        edge: A row of the circuit's table.
        start: Where the writer is, across and up.
        end: Where the reader is.
        largest: The largest score of the circuit, whose edge is the widest.
        heads: The heads of a layer, which are the figure's width.
    """
    _, _, reader_input = edge.reader.partition(".")
    x0, y0 = start
    x1, y1 = end
    x1 += heads * _SHIFT_OF_INPUT.get(reader_input, 0.0)

    # Half a sine to the side, so that edges over several layers do not hide each other.
    fraction = np.linspace(0, 1, _ARC_POINTS)
    side = 1 if x1 >= x0 else -1
    width = 0.35 * side * min(1.0, (y1 - y0) / 2)
    bend = width * np.sin(np.pi * fraction)

    q = edge.q_effect
    if np.isnan(q):  # no effect lies below 0, so the comparison is with a random direction
        q = edge.q_beyond_random
    hover = (
        f"{edge.writer} → {edge.reader}<br>"
        f"{number_words(interval_of(edge, 'effect'), '+.3g')}<br>"
        f"q = {q:.2g}<br>random direction {in_digits(edge.random, '+.3g')}"
    )

    colour = WITH if edge.effect > 0 else WITHOUT
    relative_size = abs(edge.effect) / largest
    figure.add_scatter(
        x=x0 + (x1 - x0) * fraction + bend,
        y=y0 + (y1 - y0) * fraction,
        mode="lines",
        hovertext=hover,
        hoverinfo="text",
        line=dict(color=colour, width=max(1.0, _WIDEST * relative_size)),
        opacity=0.75,
        showlegend=False,
    )


def _place(name: str, heads: int, layers: list[int]) -> tuple[float, float]:
    """Where a node is drawn: the embedding at height 0, the layers above it in their order, each
    with its MLP on the right, and the logits at the top."""
    middle = (heads - 1) / 2
    if name == "embedding":
        return middle, 0
    if name == "logits":
        return middle, len(layers) + 1

    match = _HEAD_OR_MLP.match(name)
    assert match is not None  # every other node is a head or an MLP
    height = layers.index(int(match[1])) + 1
    if match[2]:
        return float(match[2]), height
    return heads + 0.3, height + 0.5
