"""Figures of the updates that heads add to the residual stream: their magnitude and orientation,
also by position."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from mechattn.analysis.updates import BEFORE_NORM, TopTargetUpdates
from mechattn.axes import BASELINE
from mechattn.contrast.means import summed
from mechattn.contrast.quantities import check_condition
from mechattn.errors import OptionError, check_choice
from mechattn.render import draw
from mechattn.render.draw import WITH
from mechattn.render.figure_declaration import declare
from mechattn.render.words import count_words, mean_words, model_caption, says
from mechattn.results.result import Result

Quantity = Literal["magnitude", "orientation"]
Reading = Literal["mixed", "top_target"]
READINGS = {"mixed": "head_updates", "top_target": "top_target_updates"}
_AXIS_WORDS = {
    "magnitude": "‖update‖ / ‖residual stream‖",
    "orientation": "cosine of update and residual stream",
}
_EXPONENTS = np.arange(-4, 2.5, 0.5)
# The ticks of an axis whose numbers are logarithms.
_LOG_TICKS = {
    "tickvals": _EXPONENTS,
    "ticktext": [f"{10**exponent:.1g}" for exponent in _EXPONENTS],
}
_REFERENCE_RULE: dict[str, Any] = {"colour": WITH, "dash": "dot", "width": 1.5}


@declare(READINGS, report=[{}])
def update_histogram(
    result: Result,
    quantity: Quantity = "magnitude",
    condition: str = BASELINE,
    reading: Reading = "mixed",
) -> go.Figure:
    """Plot the distribution over tokens of each head's update magnitude or orientation, with a
    slider for the layer.

    The dotted line is at 1 / (number of heads) for the magnitude, and at 0 (orthogonal to the
    residual stream) for the orientation. By default a head's whole update is shown;
    reading="top_target" shows only the part from its strongest target, as the published figures do
    (R. Claus, figures 7 and 8).

    Args:
        result: A result with ``HeadUpdates`` (or ``TopTargetUpdates``).
        quantity: "magnitude" or "orientation".
        condition: The condition.
        reading: "mixed" or "top_target".

    Raises:
        OptionError: Updates were not measured in this reading, or there is no such condition,
            quantity or reading.
    """
    check_choice(Quantity, quantity=quantity)
    updates = _updates(result, condition, reading)
    counts = summed(result, updates[f"{quantity}_counts"])
    head_count = counts.sizes["head"]
    if quantity == "magnitude":
        bins = _magnitude_bins(counts)
        reference = np.log10(1 / head_count)
        ticks = _LOG_TICKS
    else:
        bins = _orientation_bins(counts)
        reference = 0.0
        ticks = {}

    bin_dim = f"{quantity}_bin"
    totals = counts.sum(bin_dim)
    # A head without counts has only zeros, and not NaN.
    shares = counts.isel({bin_dim: bins.drawn}) / totals.clip(1)
    figure = _heatmaps(
        shares.transpose("layer", "head", ...),
        bins.middles,
        counts["head"].values,
        [bins.words] * head_count,
        "% of<br>tokens",
        f", head %{{y}}: {quantity} %{{customdata}}: %{{z:.1f}} %",
    )

    draw.rule(figure, **_REFERENCE_RULE, x=reference)
    figure.update_xaxes(
        ticks, title_text=_AXIS_WORDS[quantity], range=_range(figure, "x", reference)
    )
    figure.update_yaxes(title_text="head", **draw.numbered_ticks(head_count))
    return _by_layer(figure, result, updates, reading, f"{quantity} of head updates", height=480)


@declare(READINGS, report=[{}])
def update_map(result: Result, condition: str = BASELINE, reading: Reading = "mixed") -> go.Figure:
    """Plot orientation against magnitude of all heads' updates at all tokens, with a slider for the
    layer.

    Colours are shares of all updates. Updates below 0.0001 or above 100 times the norm of the
    residual stream are outside the map. An update with positive orientation points along the
    residual stream, one with negative orientation against it. (R. Claus, figure 9.)

    Args:
        result: A result with ``HeadUpdates`` (or ``TopTargetUpdates``).
        condition: The condition.
        reading: "mixed" or "top_target".

    Raises:
        OptionError: Updates were not measured in this reading, or there is no such condition or
            reading.
    """
    updates = _updates(result, condition, reading)
    counts = summed(result, updates["joint_counts"])
    magnitudes = _magnitude_bins(counts)
    orientations = _orientation_bins(counts)
    totals = counts.sum(["magnitude_bin", "orientation_bin"])
    shares = counts / totals.clip(1)
    shares = shares.isel(magnitude_bin=magnitudes.drawn, orientation_bin=orientations.drawn)
    figure = _heatmaps(
        shares.transpose("layer", "orientation_bin", "magnitude_bin"),
        magnitudes.middles,
        orientations.middles,
        np.dstack(np.meshgrid(magnitudes.words, orientations.words)),
        "% of<br>updates",
        ": magnitude %{customdata[0]}, orientation %{customdata[1]}: %{z:.2f} %",
    )

    head_count = int(result.provenance["model"]["heads"])
    reference = np.log10(1 / head_count)
    draw.rule(figure, **_REFERENCE_RULE, y=0)
    draw.rule(figure, **_REFERENCE_RULE, x=reference)
    figure.update_xaxes(
        _LOG_TICKS, title_text=_AXIS_WORDS["magnitude"], range=_range(figure, "x", reference)
    )
    figure.update_yaxes(title_text=_AXIS_WORDS["orientation"], range=_range(figure, "y", 0.0))
    subject = "orientation against magnitude of head updates"
    return _by_layer(figure, result, updates, reading, subject, height=560)


@declare(READINGS)
def update_by_position(
    result: Result, condition: str = BASELINE, reading: Reading = "mixed"
) -> go.Figure:
    """Plot the mean magnitude of every head's update by position, with a slider for the layer (R.
    Claus, figure 10).

    Positions that fewer than half of the prompts have are not shown, since only long prompts have
    late positions.

    Args:
        result: A result with ``HeadUpdates(per_query=True)`` (or ``TopTargetUpdates``).
        condition: The condition.
        reading: "mixed" or "top_target".

    Raises:
        OptionError: Updates were not measured for each token in this reading, or there is no such
            condition or reading.
    """
    updates = _updates(result, condition, reading)
    if "magnitude_at" not in updates:
        raise OptionError(
            "the updates of single tokens were not kept: measure them with per_query=True"
        )

    prompt_count = result["sequences"].sizes["prompt"]
    first_prompt = result["sequences"].first_prompt_text.sel(condition=condition).values
    tokens = [html.escape(str(text)).replace("\n", "⏎") for text in first_prompt]

    head_count = updates.sizes["head"]
    bar = dict(title="head", **draw.numbered_ticks(head_count))
    figure = draw.panels()
    for layer in updates.layer.values:
        layer_values = updates.sel(layer=layer).transpose("head", "key", ...)
        magnitude = layer_values.magnitude_at.values
        counts = layer_values.magnitude_at_n.values
        is_shown = np.isfinite(magnitude) & (counts >= prompt_count / 2)
        heads, positions = np.nonzero(is_shown)
        position_words = [f", n = {int(count)}" for count in counts[is_shown]]
        if prompt_count == 1:  # then a position has one token
            position_words = [f" “{tokens[position]}”" for position in positions]
        point_words = f"layer {layer}, head %{{customdata}}, position %{{x}}%{{text}}"
        figure.add_scattergl(
            x=positions,
            y=magnitude[is_shown].astype(np.float32),
            mode="markers",
            name=f"layer {layer}",
            text=position_words,
            customdata=heads,
            marker=dict(size=4, color=heads, colorscale=draw.SEQUENTIAL, colorbar=bar, opacity=0.7),
            hovertemplate=f"{point_words}: %{{y:.3f}}<extra></extra>",
            showlegend=False,
        )

    draw.rule(figure, **_REFERENCE_RULE, y=1 / head_count)
    figure.update_xaxes(title_text="position")
    figure.update_yaxes(title_text=_AXIS_WORDS["magnitude"], type="log")
    return _by_layer(figure, result, updates, reading, "head updates by position", height=500)


def _updates(result: Result, condition: str, reading: str) -> xr.Dataset:
    """The updates of a reading in a condition, with the same names for both readings."""
    check_choice(READINGS, reading=reading)
    check_condition(result, condition)
    dataset = result[READINGS[reading]].sel(condition=condition)
    return dataset.rename(
        {name: str(name).removeprefix(TopTargetUpdates.prefix) for name in dataset}
    )


class _Bins(NamedTuple):
    """The bins of an axis that are drawn: which they are, their middles, and their words."""

    drawn: slice
    middles: np.ndarray
    words: list[str]


def _magnitude_bins(counts: xr.DataArray) -> _Bins:
    """The bins on a logarithmic axis, without the first, which begins at 0, and the open last."""
    edges = counts.magnitude_bin.values[1:]
    return _bins_between(edges, np.log10(edges[:-1]), slice(1, -1))


def _orientation_bins(counts: xr.DataArray) -> _Bins:
    """The bins of cosines, without the empty first one below −1. The last holds only 1."""
    starts = counts.orientation_bin.values[1:]
    return _bins_between([*starts, np.inf], starts, slice(1, None))


def _bins_between(edges: Iterable[float], starts: np.ndarray, drawn: slice) -> _Bins:
    """The bins between these edges, which have the same width on their axis.

    Args:
        edges: The edges, which are stated in words.
        starts: The lower edge of each bin on the axis, which may be logarithmic.
        drawn: Which of all bins they are.
    """
    words = [f"{low:.3g} to {high:.3g}" for low, high in pairwise(edges)]
    return _Bins(drawn, starts + (starts[1] - starts[0]) / 2, words)


def _heatmaps(
    shares: xr.DataArray,
    x: np.ndarray,
    y: np.ndarray,
    cell_words: np.ndarray | Sequence[Sequence[str]],
    bar_title: str,
    hover: str,
) -> go.Figure:
    """A figure with a map for each layer, in which an empty bin is a gap.

    Args:
        shares: Shares of updates [layer, y, x], from 0 to 1.
        x: The middles of the bins across.
        y: The middles of the bins upwards, or the heads.
        cell_words: The words of each bin for the hover text: one [y, x] or several [y, x, word].
        bar_title: The title of the colour bar.
        hover: The hover text of a cell after its layer, as a plotly template.
    """
    figure = draw.panels()
    for layer, layer_values in zip(shares.layer.values, shares.values, strict=True):
        figure.add_heatmap(
            x=x,
            y=y,
            z=draw.positive(100 * layer_values),
            colorscale=draw.SEQUENTIAL,
            reversescale=True,
            zmin=0,
            name=f"layer {layer}",
            colorbar=dict(title=bar_title),
            customdata=cell_words,
            hovertemplate=f"layer {layer}{hover}<extra></extra>",
        )

    return figure


def _range(figure: go.Figure, axis: Literal["x", "y"], reference: float) -> list[float]:
    """The range of an axis, which holds every bin that is filled in any layer, and the reference.

    Args:
        figure: Maps of the layers, which have the same bins.
        axis: "x" or "y".
        reference: The value of the dotted line.
    """
    shown_values = [reference]
    across_axis = {"x": 0, "y": 1}[axis]  # that of z [y, x] along which a bin extends
    for trace in figure.data:
        is_filled = np.isfinite(trace.z).any(across_axis)
        shown_values += trace[axis][is_filled].tolist()

    middles = figure.data[0][axis]
    bin_width = middles[1] - middles[0]
    return [min(shown_values) - bin_width, max(shown_values) + bin_width]


def _by_layer(
    figure: go.Figure,
    result: Result,
    updates: xr.Dataset,
    reading: Reading,
    subject: str,
    height: int,
) -> go.Figure:
    """Finish a figure with one trace per layer: its title, a slider, and a sentence on the
    question's tokens."""
    small_print = f"{updates.condition.values}; {count_words(result)}"
    if reading == "top_target":
        small_print += "; only the part from the strongest target"
    if f"magnitude{BEFORE_NORM}" in updates:
        small_print += "; after the norm that follows attention"

    heading = f"{model_caption(result)}: {subject}"
    layers = updates.layer.values.tolist()
    titles = [draw.title_text(heading, f"layer {layer}; {small_print}") for layer in layers]
    slider_steps = []
    for layer_index, layer in enumerate(layers):
        figure.data[layer_index].visible = layer_index == 0
        is_visible = [trace_index == layer_index for trace_index in range(len(layers))]
        new_values = [{"visible": is_visible}, {"title.text": titles[layer_index]}]
        slider_steps.append(dict(method="update", label=str(layer), args=new_values))

    slider = dict(steps=slider_steps, currentvalue=dict(prefix="layer "), pad=dict(t=50))
    figure.update_layout(draw.LAYOUT, height=height, title_text=titles[0], sliders=[slider])

    question = updates.sel(segment="question")
    magnitude = mean_words(result, question.magnitude)
    orientation = mean_words(result, question.orientation)
    return says(
        figure,
        f"Question tokens, mean over layers and heads: magnitude {magnitude} of the residual"
        f" stream's norm, cosine with it {orientation}.",
    )
