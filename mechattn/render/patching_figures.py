"""Figures of patching: a circuit's edges drawn over the model, maps of effects, and effects beside their controls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import plotly.graph_objects as go

from mechattn.axes import head_name
from mechattn.errors import OptionError
from mechattn.render import draw
from mechattn.render.draw import GREY, THIRD, WITH
from mechattn.render.figure_declaration import figure as declare
from mechattn.render.words import number_words, says
from mechattn.stats.intervals import Interval

if TYPE_CHECKING:
    from mechattn.patching.circuit import Circuit
    from mechattn.patching.effects import Patching

_POINTS = 9  # of an arc
_WIDEST = 7.0
_ASIDE = {
    "q": -0.15,
    "v": 0.15,
}  # where an edge enters a head, so that its three inputs are told apart


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
            x=x, y=y, mode="markers+text", text=[name.rpartition("H")[2] for name in places], hovertext=list(places),
            hoverinfo="text", textfont=dict(size=10), showlegend=False,
            marker=dict(size=26, color=[draw.NEUTRAL if name in used else draw.SHADE for name in places],
                        line=dict(width=1.5, color=["#444" if name in used else GREY for name in places])),
        )
    )  # fmt: skip
    drawn.update_xaxes(
        title_text="head", showgrid=False, zeroline=False, tickvals=list(range(heads))
    )
    ticks = ["embedding", *map(str, range(layers)), "logits"]
    drawn.update_yaxes(
        title_text="layer", tickvals=list(range(-1, layers + 1)), ticktext=ticks, showgrid=False
    )
    asked = len(table) if q is not None else circuit.size() if size is None else size
    faithful = circuit.curve.iloc[(circuit.curve.edges - asked).abs().argmin()]
    interval = f"[{faithful.low:.0%}, {faithful.high:.0%}]"
    interval = (
        interval
        if np.isfinite(faithful.low)
        else "(without an interval, as that of the whole effect holds 0)"
    )
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
    reader, _, part = row.reader.partition(".")
    (x0, y0), (x1, y1) = places[row.writer], places[reader]
    x1 += _ASIDE.get(part, 0.0)
    t = np.linspace(0, 1, _POINTS)
    bend = 0.35 * np.sin(np.pi * t) * (1 if x1 >= x0 else -1) * min(1.0, (y1 - y0) / 2)
    q = row.q_beyond_random if np.isnan(row.q_effect) else row.q_effect
    said = f"{row.writer} → {row.reader}<br>{row.effect:+.3g} [{row.effect_low:+.3g}, {row.effect_high:+.3g}]"
    said += f"<br>q = {q:.2g}<br>random direction {row.random:+.3g}"
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


@declare("patching")
def patching_map(patching: Patching) -> go.Figure:
    """Map mean patching effects by layer and head, or layer and segment; dots mark q < 0.05 (over the map).

    Orange means that the answer's metric rose, blue that it fell. Heads that were not requested are empty.

    Args:
        patching: The result of ``patch``.

    Raises:
        OptionError: The effects are not of heads, or of layers by segment.
    """
    if patching.labels[0] != "layer" or len(patching.labels) != 2:
        raise OptionError(
            f"a map needs heads or layers in rows and columns; these are by {patching.labels}"
        )
    across, table = patching.labels[1], patching.table()
    known = bool(table.share.notna().all())
    hover = (
        "effect %{z:.3g} [%{customdata[0]:.3g}, %{customdata[1]:.3g}]<br>q = %{customdata[2]:.2g}"
    )
    hover += (
        "; %{customdata[3]:.1%} of the whole effect" * known
        + "<br>random direction %{customdata[4]:.3g}"
    )
    q = f"q_{table.attrs['tested']}"
    columns = {"effect": "effect", "low": "effect_low", "high": "effect_high", "q": q}
    columns |= {"share": "share", "random": "random"}
    about, whole = patching.about, number_words(patching.whole)
    figure = draw.head_map(table, columns, "effect", _effect_on(patching), hover, across)
    note = f"{about['metric']}; {about['direction']}, {about['method']}; n = {patching.units.words}; whole effect {whole}"
    heading = f"{about['model']}: patching effect by {across}"
    draw.title(figure, heading, note, draw.map_height(table), top=110)
    at = int(np.nanargmax(table.effect.abs()))
    top, where = table.iloc[at], _cell_words(table[patching.labels].to_dict("records")[at])
    found = number_words(Interval(*np.array([top.effect, top.effect_low, top.effect_high])))
    found += f", {top.share:.0%} of the whole effect" * known
    return says(
        figure,
        f"{int((table[q] < 0.05).sum())} of {len(table)} {across}s at q < 0.05. Largest: {where}, {found}; it was "
        'selected as the largest, so its interval is too optimistic (table(select="half") avoids this).',
    )


@declare("patching")
def patching_effects(
    patching: Patching, top: int | None = 12, select: Literal["half"] | None = None
) -> go.Figure:
    """Plot patching effects as points with 95 % intervals beside both controls, the largest first.

    Filled points differ from 0 and from a random direction of the same norm (both q < 0.05, and an interval without 0).
    The controls stand a little lower. Those that are far off are at the edge, with their number.

    Args:
        patching: The result of ``patch``.
        top: The number of rows; None for all.
        select: "half" ranks them on one half of the prompts and draws the other half.

    Raises:
        OptionError: There are too few prompts, or an option is not allowed.
    """
    table = patching.table(top, select).iloc[::-1]
    where = [_cell_words(cell) for cell in table[patching.labels].to_dict("records")]
    q, figure, rows = (
        table[["q_effect", "q_beyond_random"]].max(axis=1),
        draw.panels(),
        np.arange(len(table)),
    )
    sure = (q < 0.05) & (table.effect_low * table.effect_high > 0)
    names = (
        "differs from 0 and from random (q < 0.05)",
        "does not differ from both",
    )  # q_effect is NaN where no effect is below 0
    for name, some, fill in zip(names, (sure, ~sure), (WITH, "white"), strict=True):
        ends = table.loc[some, ["effect", "effect_low", "effect_high"]].values.T
        marker = dict(color=fill, line=dict(color=WITH, width=1.6), size=8)
        more = dict(customdata=q[some], hovertemplate="%{y}: %{x:+.3g}, q = %{customdata:.2g}")
        draw.points(
            figure, rows[some], ends, f"effect: {name}", WITH, None, True, marker=marker, **more
        )
    shown = [0.0, *table.effect_low, *table.effect_high, *table.random]
    far_off, lower = 0.5 * (max(shown) - min(shown)), rows - 0.36
    inner = min(shown) - far_off, max(shown) + far_off
    mark: dict[str, Any] = dict(size=7, line_width=1.6)
    figure.add_scatter(
        x=table.random, y=lower, name="random direction of the same norm", mode="markers",
        marker=mark | dict(symbol="x-thin-open", color=GREY),
    )  # fmt: skip
    if (
        "other_prompt" in table and (other := table.other_prompt).notna().any()
    ):  # far off: at the edge, with its number
        far = [other < inner[0], other > inner[1]]
        shown += other.clip(*inner).dropna().tolist()
        symbol = np.select(far, ["triangle-left-open", "triangle-right-open"], "diamond-open")
        text = np.where(far[0] | far[1], other.map(lambda x: f"{x:.3g}".replace("-", "−")), "")
        at = np.where(far[1], "middle left", "middle right")
        figure.add_scatter(
            x=other.clip(*inner), y=lower, name="from another prompt", mode="markers+text", text=text, textposition=at,
            marker=mark | dict(symbol=symbol, color=THIRD), customdata=other, meta=["x"],
            hovertemplate="%{y}: %{customdata:+.3g}",
        )  # fmt: skip
    draw.rule(figure, x=0)
    about, whole = patching.about, number_words(patching.whole)
    note = f"{about['direction']}, {about['method']}; n = {patching.units.words}; q over {table.attrs['family']}; "
    note += f"bars: 95 % intervals; whole effect {whole}"
    draw.title(figure, f"{about['model']}: patching effects", note, 190 + 30 * len(table), top=120)
    room = 0.05 * (max(shown) - min(shown))
    figure.update_xaxes(
        title_text=_effect_on(patching), range=[min(shown) - room, max(shown) + room]
    )
    figure.update_yaxes(
        tickvals=rows, ticktext=where, zeroline=False, range=[-0.8, len(table) - 0.4]
    )
    found = f"{int(sure.sum())} of {len(table)} rows differ from 0 and from a random direction (q < 0.05)"
    skewed = table.attrs["skewed"]
    return says(figure, f"{found}{f'; {skewed}' * bool(skewed)}.")


def _cell_words(cell: dict[str, Any]) -> str:
    """What a row is: "L1H2", "layer 1", a set's name; then its segment or position."""
    if {"layer", "head"} <= cell.keys():
        first = [head_name(cell.pop("layer"), cell.pop("head"))]
    else:
        first = [f"layer {cell.pop('layer')}"] if "layer" in cell else []
    return ", ".join([*first, *map(str, cell.values())])


def _effect_on(patching: Patching) -> str:
    """The words on an axis of effects, which are changes of the metric."""
    return f"effect on the {patching.about['metric'].removeprefix('a ')}"
