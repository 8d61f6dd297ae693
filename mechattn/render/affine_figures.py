"""The affine form by layer: attention left to the original keys, the error of the form, and the rank of the shift."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np

from mechattn.axes import BASELINE
from mechattn.contrast.blocks import in_parts, prompt_means
from mechattn.errors import OptionError
from mechattn.render.theme import LAYOUT, OTHERS, THIRD, WITH, WITHOUT, faint, model_caption
from mechattn.render.words import count_words, mean_words, over_units, says
from mechattn.results.result import Result
from mechattn.stats.intervals import t_interval

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import xarray as xr

NAME = "affine_shift"


def scale_by_layer(result: Result, condition: str | None = None, segment: str = "question") -> go.Figure:
    """Plot λ of every head by layer, its mean, and uniform attention's λ; on the right, the error of the affine form.

    Thin lines are heads, sorted within each layer so that they don't cross. Bars are 95 % t intervals over prompts of
    the mean over heads.

    Args:
        result: A result with ``AffineShift``.
        condition: The condition; the first that isn't the baseline by default.
        segment: The segment of the queries.
    """
    from plotly.subplots import make_subplots

    condition = result.condition(condition)
    at = result[NAME].sel(condition=condition, segment=segment)
    layers = at.layer.values
    figure = make_subplots(
        1, 2, subplot_titles=["attention left to the original keys (λ)", "what λ · output + Σσ misses"]
    )
    means = [
        part.mean("prompt").transpose("layer", "head").values for part in in_parts(at.scale, "layer", result.memory)
    ]
    heads = np.sort(np.concatenate(means), axis=1)
    for line in heads.T:
        figure.add_scatter(x=layers, y=line, row=1, col=1, mode="lines", showlegend=False, hoverinfo="skip",
                           line=dict(width=0.7, color=faint(WITH, 0.45)))  # fmt: skip
    _bars(figure, result, at.scale, "λ, mean of the heads", WITH, 1)
    uniform = at.scale_uniform.mean("prompt").transpose("layer").values
    dotted = dict(dash="dot", color=WITHOUT)
    figure.add_scatter(x=layers, y=uniform, row=1, col=1, name="λ, uniform attention", mode="lines", line=dotted)
    _bars(figure, result, at.relative_error, "relative output error", THIRD, 2)
    _bars(figure, result, at.total_variation, "total variation", OTHERS[1], 2)
    figure.update_xaxes(title_text="layer", dtick=1 if len(layers) <= 16 else None)
    figure.update_yaxes(rangemode="tozero")
    words = f"{condition}, {segment} queries, n = {count_words(result)}"
    figure.update_layout(
        **LAYOUT | {"margin": dict(l=60, r=20, t=120, b=60)},
        title_text=f"{model_caption(result)}: the affine reading<br><sup>{words}; bars: 95 % intervals</sup>",
        height=440,
    )
    return says(
        figure,
        f"Means over layers and heads with “{condition}”: λ = {mean_words(result, at.scale)}, "
        f"{mean_words(result, at.scale_uniform)} under uniform attention; the affine form misses "
        f"{mean_words(result, at.relative_error)} of the output's norm.",
    )


def shift_rank(result: Result, conditions: Seq[str] | None = None) -> go.Figure:
    """Plot the share of the shift Σσ along its first direction by layer, as a mean over heads, for each condition.

    Args:
        result: A result with ``AffineShift``.
        conditions: The conditions; all but the baseline by default.
    """
    import plotly.graph_objects as go

    names = [name for name in result.conditions if name != BASELINE] if conditions is None else list(conditions)
    if not names:
        raise OptionError("the baseline has no shift; run a condition that inserts tokens")
    share = prompt_means(result[NAME].shift_rank_one_share, ["head"], result.memory)
    figure = go.Figure()
    for name, colour in zip(names, (WITH, THIRD, WITHOUT, *OTHERS) * 4, strict=False):
        values = share.sel(condition=result.condition(name))
        if not values.isnull().all():
            _bars(figure, result, values, name, colour, None)
    figure.update_xaxes(title_text="layer", dtick=1 if share.sizes["layer"] <= 16 else None)
    figure.update_yaxes(title_text="s₁² / Σ s²")
    note = "of the matrix of shifts [query, d_head], mean over heads; 95 % intervals over prompts"
    figure.update_layout(
        **LAYOUT, title_text=f"{model_caption(result)}: rank of the shift<br><sup>{note}</sup>", height=420
    )
    parts = [
        f"{name} {mean_words(result, share.sel(condition=name))}"
        for name in names
        if share.sel(condition=name).notnull().any()
    ]
    return says(figure, f"Share of the first direction, mean over layers: {'; '.join(parts)}.")


def _bars(figure: go.Figure, result: Result, values: xr.DataArray, name: str, colour: str, column: int | None) -> None:
    """Means over prompts, by layer, with t intervals."""
    each = prompt_means(values, ["head"], result.memory) if "head" in values.dims else values
    interval = t_interval(over_units(result, each.transpose("prompt", "layer")))
    bars = dict(type="data", array=interval.high - interval.estimate, thickness=1.2)
    where = {} if column is None else {"row": 1, "col": column}
    style = dict(color=colour, width=2)
    figure.add_scatter(
        x=values.layer.values, y=interval.estimate, error_y=bars, name=name, mode="lines+markers", line=style, **where
    )  # fmt: skip
