"""Plots of one number per head by layer: every head as a line, or the mean over heads by condition."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.contrast.blocks import in_parts
from mechattn.contrast.means import mean_over_prompts
from mechattn.contrast.quantities import by_layer as values_by_layer
from mechattn.contrast.quantities import check_condition
from mechattn.errors import OptionError
from mechattn.render import draw
from mechattn.render.declared import figure as declare
from mechattn.render.theme import COLOURS, model_caption
from mechattn.render.words import count_words, mean_words, says
from mechattn.results.result import Result

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import xarray as xr

_WORDS = {
    "self_share": "strongest target: the query itself",
    "first_share": "strongest target: the first token",
    "previous_share": "strongest target: the token before",
    "self_mass": "attention to the query itself",
    "first_mass": "attention to the first token",
    "previous_mass": "attention to the token before",
    "duplicate_mass": "attention to earlier occurrences of the same token",
    "induction_mass": "attention to the tokens after them",
    "inserted_mass": "attention to the inserted tokens",
    "concentration": "p(1) − p(2)",
}


@declare(report=[{"quantity": "self_share"}, {"quantity": "first_share"}])
def heads_by_layer(
    result: Result, quantity: str = "self_share", segment: str = "question", conditions: Seq[str] | None = None
) -> go.Figure:
    """Plot one number per head over the layers, one panel per condition; lines are sorted within each layer.

    A line is a rank, not a head, as heads of different layers are unrelated; sorting keeps lines from crossing. Hover
    for the head, its mean over prompts and its 95 % interval. The dotted line is uniform attention, if that is a null.
    (R. Claus, figures 4 to 6, as their captions describe them.)

    Args:
        result: A result with ``AttentionFocus``, or another analysis with one number per head.
        quantity: The quantity, such as "self_share", "first_share", "concentration", "entropy_share", "value_drain".
        segment: The segment of the queries, if the quantity has segments.
        conditions: The conditions, one per panel; all by default.

    Raises:
        OptionError: There is no such quantity, segment or condition, or the quantity has no heads.
    """
    names = _names(result, conditions)
    variable, null = values_by_layer(result, quantity, segment)
    if "head" not in variable.dims:
        raise OptionError(f"{quantity!r} has no heads; use by_layer")
    figure = draw.panels(names, shared_yaxes=True, horizontal_spacing=0.04)
    layers = variable.layer.values
    for column, name in enumerate(names, 1):
        values = variable.sel(condition=name).transpose("prompt", "layer", "head")
        mean, low, high = mean_over_prompts(result, values)
        order = np.argsort(mean, axis=1)[:, ::-1]
        for rank in range(mean.shape[1]):
            at = np.arange(len(layers)), order[:, rank]
            shown = np.stack([variable["head"].values[order[:, rank]], low[at], high[at]], -1)
            figure.add_scatter(
                x=layers, y=mean[at], customdata=shown, mode="lines+markers", showlegend=False, row=1, col=column,
                name=f"{name}, rank {rank}", meta=["head", "low", "high"],
                line=dict(width=1.2, color=_shade(rank, mean.shape[1])), marker=dict(size=5),
                hovertemplate="layer %{x}, head %{customdata[0]}: %{y:.3f} [%{customdata[1]:.3f}, "
                "%{customdata[2]:.3f}]<extra></extra>",
            )  # fmt: skip
        draw.zero(figure, row=1, col=column)
    for column, name in enumerate(names if null is not None else [], 1):
        _null_line(figure, null.sel(condition=name), "#555", column)  # type: ignore[union-attr]
    figure.update_xaxes(title_text="layer", dtick=max(1, len(layers) // 12))
    figure.update_yaxes(title_text=f"{quantity}<br>({variable.attrs['units']})", col=1)
    note = f"{_of(variable, segment)}n = {count_words(result)}; lines sorted within each layer"
    note += _null_words(variable, null)
    draw.title(figure, f"{model_caption(result)}: {_WORDS.get(quantity, quantity)}, every head", note, 460)
    return says(figure, _means(result, variable, null, names))


@declare(report=[{"quantity": "span_mass"}, {"quantity": "block_magnitude"}])
def by_layer(result: Result, quantity: str, segment: str = "question", conditions: Seq[str] | None = None) -> go.Figure:
    """Plot the mean over heads by layer, one line per condition, with 95 % intervals and the uniform null (dotted).

    Args:
        result: A result.
        quantity: The quantity, such as "first_alpha", "span_mass", "magnitude", "block_magnitude" (one panel per
            block).
        segment: The segment of the queries or tokens, if the quantity has segments.
        conditions: The conditions; by default all that have the quantity.

    Raises:
        OptionError: There is no such quantity, segment or condition.
    """
    names = _names(result, conditions)
    variable, null = values_by_layer(result, quantity, segment)
    names = [name for name in names if _has_any(result, variable.sel(condition=name))]
    panels = [str(b) for b in variable.block.values] if "block" in variable.dims else [None]
    figure = draw.panels([p or "" for p in panels], horizontal_spacing=0.08)
    for column, panel in enumerate(panels, 1):
        one = variable if panel is None else variable.sel(block=panel)
        for name, colour in zip(names, cycle(COLOURS), strict=False):
            _line(figure, result, one.sel(condition=name), name, colour, column)
            if null is not None:
                _null_line(figure, null.sel(condition=name), colour, column)
    figure.update_xaxes(title_text="layer", dtick=max(1, variable.sizes["layer"] // 12))
    figure.update_yaxes(title_text=f"{quantity}<br>({variable.attrs['units']})", col=1)
    heads = "mean over heads; " if "head" in variable.dims else ""
    note = f"{_of(variable, segment)}{heads}n = {count_words(result)}; bands: 95 % intervals"
    note += _null_words(variable, null)
    draw.title(figure, f"{model_caption(result)}: {_WORDS.get(quantity, quantity)} by layer", note, 440)
    return says(figure, _means(result, variable, null, names))


def _has_any(result: Result, values: xr.DataArray) -> bool:
    """Whether there is a number at all."""
    return any(bool(part.notnull().any()) for part in in_parts(values, "prompt", result.memory))


def _null_line(figure: go.Figure, null: xr.DataArray, colour: str, column: int) -> None:
    """The value under uniform attention in each layer, dotted."""
    style: dict[str, Any] = dict(showlegend=False, hovertemplate="uniform: %{y:.3f}<extra></extra>")
    draw.dotted(figure, null.layer.values, null.mean("prompt").values, "uniform", colour, column=column, **style)


def _null_words(variable: xr.DataArray, null: xr.DataArray | None) -> str:
    """A note on the null, or on why there is none."""
    if null is not None:
        return "; dotted: uniform attention"
    return f"; no null: {variable.attrs['no_null']}" if variable.attrs.get("no_null") else ""


def _means(result: Result, variable: xr.DataArray, null: xr.DataArray | None, names: Seq[str]) -> str:
    """The mean of each condition with its null; the intervals are over prompts."""

    def beside(name: str) -> str:
        if null is None:
            return ""
        return f" (uniform attention: {mean_words(result, null.sel(condition=name)).partition(' ')[0]})"

    parts = [f"{name} {mean_words(result, variable.sel(condition=name))}{beside(name)}" for name in names]
    over = " and ".join(f"{dim}s" for dim in variable.dims if dim not in ("prompt", "condition"))
    what = str(variable.name).removesuffix("_by_segment")
    return f"{what} ({variable.attrs['units']}), mean over {over}: {'; '.join(parts)}."


def _line(figure: go.Figure, result: Result, values: xr.DataArray, words: str, colour: str, column: int) -> None:
    """A line over layers with its band."""
    over = ["head"] if "head" in values.dims else []
    mean, low, high = mean_over_prompts(result, values.transpose("prompt", "layer", ...), over)
    x = values.layer.values
    draw.ribbon(figure, x, low, high, colour, column=column, legendgroup=words)
    figure.add_scatter(
        x=x, y=mean, customdata=np.stack([low, high], -1), name=words, legendgroup=words, showlegend=column == 1,
        meta=["low", "high"], mode="lines+markers", line=dict(color=colour), row=1, col=column,
        hovertemplate="layer %{x}: %{y:.3f} [%{customdata[0]:.3f}, %{customdata[1]:.3f}]<extra>" + words + "</extra>",
    )  # fmt: skip


def _names(result: Result, conditions: Seq[str] | None) -> list[str]:
    """The conditions, by default all."""
    names = list(result.conditions if conditions is None else conditions)
    if not names:
        raise OptionError("conditions=[] is empty; give at least one, or omit it for all")
    for name in names:
        check_condition(result, name)
    return names


def _of(variable: xr.DataArray, segment: str) -> str:
    return f"{segment} tokens; " if "segment" in variable.coords else ""


def _shade(rank: int, count: int) -> str:
    """A shade from dark to light blue, by rank."""
    part = rank / max(1, count - 1)
    low, high = (11, 61, 120), (158, 197, 232)
    return "rgb(" + ", ".join(str(round(a + part * (b - a))) for a, b in zip(low, high, strict=True)) + ")"
