"""A circuit drawn over the model: layers above each other, heads beside each other, an arc for every edge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.render import draw
from mechattn.render.declared import figure as declare
from mechattn.render.words import says

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from mechattn.patching.circuit import Circuit

_POINTS = 9  # of an arc
_WIDEST = 7.0
_ASIDE = {"q": -0.15, "v": 0.15}  # where an edge enters a head, so that its three inputs are told apart


@declare("circuit")
def circuit_map(circuit: Circuit, size: int | None = None, q: float | None = None) -> go.Figure:
    """Draw a circuit's edges between heads, MLPs, the embedding and the logits; wider edges have larger scores.

    A positive score (vermilion) means that the other version's output raises the metric. An edge enters a head on the
    left as queries, in the middle as keys, on the right as values.

    Args:
        circuit: The result of ``circuit``.
        size: As for ``Circuit.kept``.
        q: As for ``Circuit.kept``.
    """
    import plotly.graph_objects as go

    table, heads = circuit.table(size, q), int(circuit.about["heads"])
    layers, drawn = int(circuit.about["cfg"]["n_layers"]), draw.panels()
    places = {name: _place(name, heads, layers) for name in (*circuit.graph.writers, "logits")}
    largest = table.effect.abs().max() if len(table) else 1.0
    for row in table[::-1].itertuples():  # the largest on top
        drawn.add_trace(_arc(row, places, largest))
    used = {*table.writer, *(name.partition(".")[0] for name in table.reader)}
    x, y = zip(*places.values(), strict=True)
    drawn.add_trace(
        go.Scatter(
            x=x, y=y, mode="markers+text", text=[_short(name) for name in places], hovertext=list(places),
            hoverinfo="text", textfont=dict(size=10), showlegend=False,
            marker=dict(size=26, color=[draw.NEUTRAL if name in used else draw.SHADE for name in places],
                        line=dict(width=1.5, color=["#444" if name in used else draw.GREY for name in places])),
        )
    )  # fmt: skip
    drawn.update_xaxes(title_text="head", showgrid=False, zeroline=False, tickvals=list(range(heads)))
    ticks = ["embedding", *map(str, range(layers)), "logits"]
    drawn.update_yaxes(title_text="layer", tickvals=list(range(-1, layers + 1)), ticktext=ticks, showgrid=False)
    asked = len(table) if q is not None else circuit.size() if size is None else size
    faithful = circuit.curve.iloc[(circuit.curve.edges - asked).abs().argmin()]
    interval = f"[{faithful.low:.0%}, {faithful.high:.0%}]"
    interval = interval if np.isfinite(faithful.low) else "(without an interval, as that of the whole effect holds 0)"
    note = (
        f"{circuit.about['metric']}; {len(table)} of {int(circuit.graph.exists.sum())} edges, "
        f"{circuit.about['method']}; ranked on {circuit.about['ranked_on']}"
    )
    draw.title(drawn, f"{circuit.about['model']}: circuit", note, 200 + 110 * (layers + 2))
    return says(
        drawn,
        f"{len(table)} edges. On the other half, {int(faithful.edges)} edges carry {faithful.faithfulness:.0%} "
        f"{interval} of the effect, as many random ones {faithful.random:.0%}.",
    )


def _arc(row: Any, places: Mapping[str, tuple[float, float]], largest: float) -> go.Scatter:
    """An edge, which enters a head where its queries, keys or values are."""
    import plotly.graph_objects as go

    reader, _, part = row.reader.partition(".")
    (x0, y0), (x1, y1) = places[row.writer], places[reader]
    x1 += _ASIDE.get(part, 0.0)
    t = np.linspace(0, 1, _POINTS)
    bend = 0.35 * np.sin(np.pi * t) * (1 if x1 >= x0 else -1) * min(1.0, (y1 - y0) / 2)
    q = row.q_beyond_random if np.isnan(row.q_effect) else row.q_effect
    said = (
        f"{row.writer} → {row.reader}<br>{row.effect:+.3g} [{row.effect_low:+.3g}, {row.effect_high:+.3g}]"
        f"<br>q = {q:.2g}"
        f"<br>random direction {row.random:+.3g}"
    )
    return go.Scatter(
        x=x0 + (x1 - x0) * t + bend, y=y0 + (y1 - y0) * t, mode="lines", hovertext=said, hoverinfo="text",
        line=dict(color=draw.WITH if row.effect > 0 else draw.WITHOUT,
                  width=max(1.0, _WIDEST * abs(row.effect) / largest)),
        opacity=0.75, showlegend=False,
    )  # fmt: skip


def _place(name: str, heads: int, layers: int) -> tuple[float, float]:
    """Where a node is drawn; layers count upwards, the MLPs are on the right."""
    if name in ("embedding", "logits"):
        return (heads - 1) / 2, -1.0 if name == "embedding" else float(layers)
    layer, what, head = name[1:].partition("H") if "H" in name else name[1:].partition("MLP")
    return (float(head), float(layer)) if what == "H" else (heads + 0.3, int(layer) + 0.5)


def _short(name: str) -> str:
    return name if "H" not in name else name[name.index("H") + 1 :]
