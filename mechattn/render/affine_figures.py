"""The affine form by layer: attention left to the original keys, the error of the form, and the rank of the shift."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.axes import BASELINE
from mechattn.contrast.means import mean_over_prompts
from mechattn.errors import OptionError
from mechattn.render import draw
from mechattn.render.declared import figure as declare
from mechattn.render.theme import OTHERS, THIRD, WITH, WITHOUT, faint, model_caption
from mechattn.render.words import count_words, mean_words, says
from mechattn.results.result import Result

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import xarray as xr

NAME = "affine_shift"


@declare(NAME, compares=True, report=[{}])
def scale_by_layer(result: Result, condition: str | None = None, segment: str = "question") -> go.Figure:
    """Plot λ of every head by layer, its mean, and uniform attention's λ; on the right, the error of the affine form.

    Thin lines are heads, sorted within each layer so that they don't cross. Bars are 95 % t intervals over prompts of
    the mean over heads.

    Args:
        result: A result with ``AffineShift``.
        condition: The condition; the first that isn't the baseline by default.
        segment: The segment of the queries.
    """
    condition = result.condition(condition)
    at = result[NAME].sel(condition=condition, segment=segment)
    layers = at.layer.values
    figure = draw.panels(["attention left to the original keys (λ)", "what λ · output + Σσ misses"])
    heads = np.sort(mean_over_prompts(result, at.scale.transpose("prompt", "layer", "head")).estimate, axis=1)
    for line in heads.T:
        figure.add_scatter(x=layers, y=line, row=1, col=1, mode="lines", showlegend=False, hoverinfo="skip",
                           line=dict(width=0.7, color=faint(WITH, 0.45)))  # fmt: skip
    _bars(figure, result, at.scale, "λ, mean of the heads", WITH, 1)
    uniform = at.scale_uniform.mean("prompt").transpose("layer").values
    draw.dotted(figure, layers, uniform, "λ, uniform attention", WITHOUT, column=1)
    _bars(figure, result, at.relative_error, "relative output error", THIRD, 2)
    _bars(figure, result, at.total_variation, "total variation", OTHERS[1], 2)
    figure.update_xaxes(title_text="layer", dtick=1 if len(layers) <= 16 else None)
    figure.update_yaxes(rangemode="tozero")
    words = f"{condition}, {segment} queries, n = {count_words(result)}"
    draw.title(figure, f"{model_caption(result)}: the affine reading", f"{words}; bars: 95 % intervals", 440)
    figure.update_layout(margin_t=120)
    return says(
        figure,
        f"Means over layers and heads with “{condition}”: λ = {mean_words(result, at.scale)}, "
        f"{mean_words(result, at.scale_uniform)} under uniform attention; the affine form misses "
        f"{mean_words(result, at.relative_error)} of the output's norm.",
    )


@declare(NAME, compares=True, report=[{}])
def shift_rank(result: Result, conditions: Seq[str] | None = None) -> go.Figure:
    """Plot the share of the shift Σσ along its first direction by layer, as a mean over heads, for each condition.

    Args:
        result: A result with ``AffineShift``.
        conditions: The conditions; all but the baseline by default.
    """
    names = [name for name in result.conditions if name != BASELINE] if conditions is None else list(conditions)
    if not names:
        raise OptionError("the baseline has no shift; run a condition that inserts tokens")
    share = result[NAME].shift_rank_one_share
    figure = draw.empty()
    for name, colour in zip(names, (WITH, THIRD, WITHOUT, *OTHERS) * 4, strict=False):
        values = share.sel(condition=result.condition(name))
        if not values.isnull().all():
            _bars(figure, result, values, name, colour, None)
    figure.update_xaxes(title_text="layer", dtick=1 if share.sizes["layer"] <= 16 else None)
    figure.update_yaxes(title_text="s₁² / Σ s²")
    note = "of the matrix of shifts [query, d_head], mean over heads; 95 % intervals over prompts"
    draw.title(figure, f"{model_caption(result)}: rank of the shift", note, 420)
    parts = [
        f"{name} {mean_words(result, share.sel(condition=name))}"
        for name in names
        if share.sel(condition=name).notnull().any()
    ]
    return says(figure, f"Share of the first direction, mean over layers: {'; '.join(parts)}.")


def _bars(figure: go.Figure, result: Result, values: xr.DataArray, name: str, colour: str, column: int | None) -> None:
    """Means over prompts and heads, by layer, with t intervals."""
    made = mean_over_prompts(result, values, ["head"] if "head" in values.dims else [])
    style: dict[str, Any] = dict(mode="lines+markers", line=dict(color=colour, width=2))
    draw.points(figure, values.layer.values, made, name, colour, column=column, **style)
