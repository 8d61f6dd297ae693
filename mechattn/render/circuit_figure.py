"""The figure of a circuit: its edges drawn over the model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechattn.render import draw
from mechattn.render.draw import WITH, WITHOUT
from mechattn.render.figure_declaration import declare
from mechattn.render.words import in_digits, interval_of, number_words, says

if TYPE_CHECKING:
    from mechattn.patching.circuit import Circuit

_ARC_POINTS = 9  # enough that an edge looks smooth
_HEAD_OR_MLP = re.compile(r"L(?P<layer>\d+)(?:H(?P<head>\d+)|MLP)")
_WIDEST = 7.0  # the width in pixels of the edge with the largest score
# How far to the side an edge is bent, in distances between two heads: less than half of one, so that
# an edge straight up stays nearer to its own head than to the next.
_LARGEST_BEND = 0.35
# The part of a node's name that an axis shows, and that its circle therefore leaves out.
_ON_THE_AXES = re.compile(r"L\d+H?|embedding|logits")
# How far to the side of a head's middle an edge enters its queries and values, as a fraction of the
# figure's width, because the circle of a head has the same size in any model.
_SHIFT_OF_INPUT = {"q": -0.01, "v": 0.01}


class _Place(NamedTuple):
    """Where a node is drawn."""

    across: float  # in heads, from 0
    up: float  # in layers that have an edge, from 0 for the embedding


@declare("circuit")
def circuit_map(circuit: Circuit, size: int | None = None, q: float | None = None) -> go.Figure:
    """Draw a circuit's edges between heads, MLPs, the embedding and the logits.

    Wider edges have larger scores. A positive score (vermilion) means that the other version's
    output raises the metric. An edge enters a head on the left as queries, in the middle as keys
    and on the right as values. Layers without an edge are left out.

    Args:
        circuit: The result of ``circuit``.
        size: As for ``Circuit.kept``.
        q: As for ``Circuit.kept``.

    Returns:
        The figure. On hover, an edge shows its score with its interval, its q and the score of a
        random direction.
    """
    table = circuit.table(size, q)
    head_count = int(circuit.about["cfg"]["n_heads"])

    # Heads may share keys or values. An edge to these is drawn to each of the heads that writes.
    writers = {*table.writer, "logits"}
    nodes_of_reader = {
        reader: [node for node in circuit.graph.nodes_after[reader] if node in writers]
        for reader in table.reader
    }
    nodes = sorted({*table.writer, *chain.from_iterable(nodes_of_reader.values())})
    matches = [_HEAD_OR_MLP.match(node) for node in nodes]
    layers = sorted({int(match["layer"]) for match in matches if match})
    places = {node: _place(node, head_count, layers) for node in nodes}

    figure = draw.panels()
    _edges(figure, table, nodes_of_reader, places, head_count)
    _nodes(figure, places)  # after the edges, so that a node covers their ends

    ticks = ["embedding", *map(str, layers), "logits"]
    figure.update_xaxes(
        title_text="head", tickvals=list(range(head_count)), showgrid=False, zeroline=False
    )
    figure.update_yaxes(draw.named_ticks(ticks), title_text="layer", showgrid=False)

    faithfulness = _faithfulness_words(circuit, size, q)
    model_edges = int(circuit.graph.exists.sum())
    about = circuit.about
    small_print = (
        f"{about['metric']}; {len(table)} of {model_edges} edges, {circuit.edges.method_words};"
        f" ranked on {about['ranked_on']}. {faithfulness}"
    )
    heading = f"{about['model']}: circuit"
    draw.title_above_legend(figure, heading, small_print, 200 + 80 * len(ticks), margin_top=110)
    return says(
        figure, f"{len(table)} edges on paths from the embedding to the logits. {faithfulness}"
    )


def _place(node: str, head_count: int, layers: list[int]) -> _Place:
    """The place of a node.

    The embedding is at height 0, the layers are above it in their order, and the logits are at the
    top. The MLP of a layer is on the right of its heads and a little higher.
    """
    match = _HEAD_OR_MLP.match(node)
    if match is None:  # the embedding or the logits
        top = len(layers) + 1
        return _Place((head_count - 1) / 2, top if node == "logits" else 0)

    height = layers.index(int(match["layer"])) + 1
    if match["head"] is None:  # an MLP
        return _Place(head_count + 0.3, height + 0.5)
    return _Place(float(match["head"]), height)


def _edges(
    figure: go.Figure,
    table: pd.DataFrame,
    nodes_of_reader: Mapping[str, Sequence[str]],
    places: Mapping[str, _Place],
    head_count: int,
) -> None:
    """Draw the edges of a circuit's table, each to all nodes that its reader is an input of.

    Each colour has an entry in the legend, since single edges have none.
    """
    for colour, verb in ((WITHOUT, "lowers"), (WITH, "raises")):
        figure.add_scatter(
            x=[None],
            y=[None],
            mode="lines",
            line=dict(color=colour, width=4),
            name=f"the other output {verb} the metric",
        )

    q_column = f"q_{table.attrs['tested']}"
    largest_score = table.effect.abs().max()
    for _, edge in table[::-1].iterrows():  # the largest on top
        _, _, head_input = edge.reader.partition(".")
        shift = head_count * _SHIFT_OF_INPUT.get(head_input, 0.0)
        relative_size = abs(edge.effect) / largest_score
        colour = WITH if edge.effect > 0 else WITHOUT
        hover = (
            f"{edge.writer} → {edge.reader}<br>"
            f"{number_words(interval_of(edge, 'effect'), '+.3g')}<br>"
            f"q = {edge[q_column]:.2g}<br>random direction {in_digits(edge.random, '+.3g')}"
        )
        for node in nodes_of_reader[edge.reader]:
            middle = places[node]
            end = _Place(middle.across + shift, middle.up)
            x, y = _arc(places[edge.writer], end)
            figure.add_scatter(
                x=x,
                y=y,
                mode="lines",
                hovertext=hover,
                hoverinfo="text",
                line=dict(color=colour, width=max(1.0, _WIDEST * relative_size)),
                opacity=0.75,
                showlegend=False,
            )


def _arc(start: _Place, end: _Place) -> tuple[np.ndarray, np.ndarray]:
    """The points of an edge, across and up.

    It is bent by half a sine, so that edges over several layers do not hide each other. One that
    rises by less than two layers is bent less.
    """
    width = end.across - start.across
    rise = end.up - start.up
    fraction = np.linspace(0, 1, _ARC_POINTS)
    side = 1 if width >= 0 else -1
    bend = _LARGEST_BEND * side * min(1.0, rise / 2) * np.sin(np.pi * fraction)
    return start.across + width * fraction + bend, start.up + rise * fraction


def _nodes(figure: go.Figure, places: Mapping[str, _Place]) -> None:
    """Draw a circle for each node, with the part of its name that the axes do not show."""
    figure.add_scatter(
        x=[place.across for place in places.values()],
        y=[place.up for place in places.values()],
        mode="markers+text",
        text=[_ON_THE_AXES.sub("", node) for node in places],
        hovertext=list(places),
        hoverinfo="text",
        textfont=dict(size=10),
        showlegend=False,
        marker=dict(size=26, color=draw.NEUTRAL, line=dict(width=1.5, color="#444")),
    )


def _faithfulness_words(circuit: Circuit, size: int | None, q: float | None) -> str:
    """The share of the effect that the circuit carries, on the half of the prompts that did not
    rank its edges; or that this was not measured, and how to measure it."""
    if q is not None:
        return "What they carry was not measured: circuit(…, sizes=[…]) measures the first edges."
    edge_count = circuit.size() if size is None else size
    rows = circuit.curve[circuit.curve.edges == edge_count]
    if rows.empty:
        return (
            f"What they carry was not measured: circuit(…, sizes=[{edge_count}]) measures this"
            " size."
        )

    row = rows.iloc[0]
    interval = "(without an interval, since that of the whole effect contains 0)"
    if np.isfinite(row.low):
        interval = f"[{_share_words(row.low)}, {_share_words(row.high)}]"
    return (
        f"On the other half, the first {edge_count} edges carry {_share_words(row.faithfulness)}"
        f" {interval} of the effect, and the same number of random ones {_share_words(row.random)}."
    )


def _share_words(share: float) -> str:
    """A share in whole percent; it may be negative."""
    return in_digits(round(share, 2), ".0%")
