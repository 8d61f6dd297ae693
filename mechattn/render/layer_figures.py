"""Figures by layer: one number per head as a strip of points, means over heads, and λ with the
errors of the affine form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from mechattn.axes import BASELINE
from mechattn.contrast.means import mean_over_prompts, overall_mean
from mechattn.contrast.quantities import (
    NULLS,
    Null,
    in_parts,
    in_segment,
    values_beside_null,
)
from mechattn.errors import OptionError
from mechattn.render import draw
from mechattn.render.draw import OTHERS, THIRD, WITH, WITHOUT, faint
from mechattn.render.figure_declaration import declare, listed_conditions
from mechattn.render.words import (
    NULL_NAMES,
    count_words,
    in_digits,
    mean_words,
    model_caption,
    says,
)
from mechattn.results.result import Result
from mechattn.stats.intervals import Interval

_AFFINE = "affine_shift"


@declare(report=[{"quantity": "self_share"}, {"quantity": "first_share"}])
def heads_by_layer(
    result: Result,
    quantity: str = "self_share",
    segment: str = "question",
    conditions: Sequence[str] | None = None,
) -> go.Figure:
    """Plot one number per head by layer, one panel per condition: a strip of points, sorted within
    each layer.

    Heads of different layers are unrelated, so no line joins them. Hover for the head, its mean
    over prompts and its 95 % interval. The dotted line is the mean of the null over heads, if there
    is a null: dilution, or uniform attention. (R. Claus, captions of figures 4 to 6.)

    Args:
        result: A result with ``AttentionFocus``, or another analysis with one number per head.
        quantity: The quantity, such as "self_share", "first_share", "concentration",
            "entropy_share", "value_drain".
        segment: The segment of the queries, if the quantity has segments.
        conditions: The conditions, one per panel; all by default. Those in which no prompt has a
            value are left out.

    Raises:
        OptionError: There is no such quantity, segment or condition, no prompt has a value, or the
            quantity has no heads or several numbers per head.
    """
    layer_quantity = _LayerQuantity.of(result, quantity, segment, conditions)
    variable = layer_quantity.variable
    if "head" not in variable.dims:
        raise OptionError(f"{quantity!r} has no heads; use by_layer")

    shown_conditions = layer_quantity.conditions
    figure = draw.panels(shown_conditions, shared_yaxes=True, horizontal_spacing=0.04)
    for column, (name, colour) in enumerate(draw.condition_colours(shown_conditions), 1):
        _strips(figure, result, variable.sel(condition=name), name, colour, column)
        draw.rule(figure, y=0, column=column)
        _null_line(figure, layer_quantity, name, colour, column)

    drawn_words = f"n = {count_words(result)}; a point per head, sorted within each layer"
    return _titled(figure, layer_quantity, f"{layer_quantity.title}, every head", drawn_words, 460)


@declare(
    report=[{"quantity": name} for name in ("span_mass", "block_magnitude", "shift_rank_one_share")]
)
def by_layer(
    result: Result,
    quantity: str,
    segment: str = "question",
    conditions: Sequence[str] | None = None,
) -> go.Figure:
    """Plot a quantity by layer, as the mean over heads: one line per condition, with 95 %
    intervals. The dotted line is the null, if there is one.

    Args:
        result: A result.
        quantity: The quantity, such as "first_alpha", "span_mass", "magnitude", or
            "block_magnitude", which has one panel per block.
        segment: The segment of the queries or tokens, if the quantity has segments.
        conditions: The conditions; all by default. Those in which no prompt has a value are left
            out.

    Raises:
        OptionError: There is no such quantity, segment or condition, no prompt has a value, or the
            quantity has several numbers per head.
    """
    layer_quantity = _LayerQuantity.of(result, quantity, segment, conditions)
    variable = layer_quantity.variable

    values_by_title = {"": variable}
    if "block" in variable.dims:
        values_by_title = {str(name): variable.sel(block=name) for name in variable.block.values}

    hover = "layer %{x}: %{y:.3f} [%{customdata[0]:.3f}, %{customdata[1]:.3f}]"
    figure = draw.panels(list(values_by_title), horizontal_spacing=0.08)
    for column, panel_values in enumerate(values_by_title.values(), 1):
        for name, colour in draw.condition_colours(layer_quantity.conditions):
            means = _over_heads(result, panel_values.sel(condition=name))
            interval = draw.within(means, variable.attrs["units"])
            draw.line_and_band(
                figure,
                panel_values.layer.values,
                interval,
                name,
                colour,
                column=column,
                customdata=np.stack([interval.low, interval.high], -1),
                meta=["low", "high"],
                mode="lines+markers",
                line=dict(color=colour),
                hovertemplate=f"{hover}<extra>{name}</extra>",
            )
            _null_line(figure, layer_quantity, name, colour, column)

    drawn_words = f"n = {count_words(result)}; bands: 95 % intervals"
    if "head" in variable.dims:
        drawn_words = f"mean over heads; {drawn_words}"
    return _titled(figure, layer_quantity, f"{layer_quantity.title} by layer", drawn_words, 440)


@declare(_AFFINE, compares=True, report=[{}])
def scale_by_layer(
    result: Result, condition: str | None = None, segment: str = "question"
) -> go.Figure:
    """Plot λ by layer on the left, and the errors of the affine form on the right.

    On the left are λ of every head, its mean over heads, and λ under uniform attention (dotted). A
    thin line is not one head: values are sorted within each layer, so that lines do not cross. On
    the right are the means over heads of the relative output error and of the total variation. Bars
    are 95 % t intervals of the mean over heads.

    Args:
        result: A result with ``AffineShift``.
        condition: The condition; by default the first that isn't the baseline.
        segment: The segment of the queries.

    Raises:
        OptionError: There is no such segment or condition, or the affine form has no error because
            no query of the segment is in the baseline.
    """
    condition = result.condition(condition)
    dataset = in_segment(result[_AFFINE].sel(condition=condition), segment)
    if not _has_values(result, dataset.relative_error):
        raise OptionError(
            f"segment={segment!r}: no query there is in the baseline and in {condition!r}, so the"
            " affine form has no error to plot; choose another segment"
        )
    layers = dataset.layer.values

    titles = ["attention left to the original keys (λ)", "what λ · output + Σσ misses"]
    figure = draw.panels(titles)
    head_means = mean_over_prompts(result, dataset.scale.transpose("prompt", "layer", "head"))
    for sorted_means in np.sort(head_means.estimate, axis=1).T:
        figure.add_scatter(
            x=layers,
            y=sorted_means,
            mode="lines",
            showlegend=False,
            hoverinfo="skip",
            line=dict(width=0.7, color=faint(WITH, 0.45)),
            row=1,
            col=1,
        )

    for values, name, colour, column in (
        (dataset.scale, "λ, mean of the heads", WITH, 1),
        (dataset.relative_error, "relative output error", THIRD, 2),
        (dataset.total_variation, "total variation", OTHERS[1], 2),
    ):
        line = dict(color=colour, width=2)
        interval = _over_heads(result, values)
        draw.points(figure, layers, interval, name, colour, column, mode="lines+markers", line=line)

    uniform = _over_heads(result, dataset.scale_uniform).estimate
    draw.dotted(figure, layers, uniform, "λ, uniform attention", WITHOUT)
    figure.update_xaxes(title_text="layer", **draw.numbered_ticks(len(layers)))
    figure.update_yaxes(rangemode="tozero")
    heading = f"{model_caption(result)}: the affine reading"
    small_print = f"{condition}, {segment} queries, n = {count_words(result)}; bars: 95 % intervals"
    draw.title_above_legend(figure, heading, small_print, 470, margin_top=150)
    return says(
        figure,
        f"Means over layers and heads with “{condition}”: λ = {mean_words(result, dataset.scale)},"
        f" {mean_words(result, dataset.scale_uniform)} under uniform attention; the affine form"
        f" misses {mean_words(result, dataset.relative_error)} of the output's norm.",
    )


@dataclass(frozen=True, eq=False)
class _LayerQuantity:
    """A quantity that a figure shows by layer, with its null.

    Args:
        result: The result.
        quantity: The name of the quantity, as the user gave it.
        segment: The segment of the queries or tokens, if the quantity has segments.
        conditions: The shown conditions, in which at least one prompt has a value.
        variable: The values in all conditions of the result [prompt, condition, layer, …].
        null: The values under the null; None if there is no null.
        null_kind: The kind of null.
    """

    result: Result
    quantity: str
    segment: str
    conditions: Sequence[str]
    variable: xr.DataArray
    null: xr.DataArray | None
    null_kind: Null

    @classmethod
    def of(
        cls, result: Result, quantity: str, segment: str, conditions: Sequence[str] | None
    ) -> _LayerQuantity:
        """The quantity in the conditions in which at least one prompt has a value.

        Raises:
            OptionError: There is no such quantity, segment or condition, the quantity has several
                numbers per head, or no prompt has a value.
        """
        names = listed_conditions(result, conditions)
        if not names:
            raise OptionError("conditions=[] is empty; give at least one, or omit it for all")

        variable, null, null_kind = values_beside_null(result, quantity, segment, names)
        measured_names = [
            name for name in names if _has_values(result, variable.sel(condition=name))
        ]
        if not measured_names:
            absent_words = repr(quantity)
            remedy = "other conditions"
            if "segment" in variable.coords:
                absent_words += f" in the segment {segment!r}"
                remedy = "another segment or other conditions"
            condition_words = ", ".join(map(repr, names))
            raise OptionError(
                f"no prompt has {absent_words} with {condition_words}; choose {remedy}"
            )
        return cls(result, quantity, segment, measured_names, variable, null, null_kind)

    @property
    def title(self) -> str:
        """The words for the quantity in a title."""
        return str(self.variable.attrs.get("long_name") or self.quantity.replace("_", " "))

    def null_of(self, condition: str) -> xr.DataArray | None:
        """The values of the null in a condition.

        None if there is no null, and for dilution in the baseline, which is the baseline itself.
        """
        if self.null is None or (condition == BASELINE and self.null_kind == "dilution"):
            return None
        return self.null.sel(condition=condition)

    def small_print(self, drawn_words: str) -> str:
        """The text under a title: the segment, what is drawn, and the null or why there is none."""
        phrases = []
        if "segment" in self.variable.coords:
            phrases.append(f"{self.segment} tokens")
        phrases.append(drawn_words)

        reason = self.variable.attrs.get("no_null")
        if self.null is not None:
            phrases.append(f"dotted: {NULLS[self.null_kind]}")
        elif reason:
            phrases.append(f"no null: {reason}")
        return "; ".join(phrases)


def _has_values(result: Result, values: xr.DataArray) -> bool:
    """Whether any prompt has a value. Reads some prompts at a time."""
    parts = in_parts(values, "prompt", result.memory)
    return any(bool(part.notnull().any()) for part in parts)


def _strips(
    figure: go.Figure, result: Result, values: xr.DataArray, name: str, colour: str, column: int
) -> None:
    """Draw a strip of points for each layer: one point per head, the largest value on the left."""
    interval = mean_over_prompts(result, values.transpose("prompt", "layer", "head"))
    mean, low, high = draw.within(interval, values.attrs["units"])
    layer_count, head_count = mean.shape
    table = pd.DataFrame(
        {
            "layer": np.repeat(values.layer.values, head_count),
            "head": np.tile(values["head"].values, layer_count),
            "mean": mean.ravel(),
            "low": low.ravel(),
            "high": high.ravel(),
        }
    )
    table = table.sort_values(["layer", "mean"], ascending=[True, False], kind="stable")
    offsets = np.zeros(1)  # a single head is drawn at its layer
    if head_count > 1:
        # Layers are 1 apart, so that 0.4 is left between two strips.
        offsets = np.linspace(-0.3, 0.3, head_count)
    hover = (
        "L%{customdata[0]}H%{customdata[1]}: %{y:.3f} [%{customdata[2]:.3f}, %{customdata[3]:.3f}]"
    )
    figure.add_scatter(
        x=table.layer + np.tile(offsets, layer_count),
        y=table["mean"],
        customdata=table[["layer", "head", "low", "high"]].to_numpy(),
        mode="markers",
        showlegend=False,
        name=name,
        meta=["layer", "head", "low", "high"],
        marker=dict(size=4, color=colour),
        hovertemplate=f"{hover}<extra></extra>",
        row=1,
        col=column,
    )


def _null_line(
    figure: go.Figure, layer_quantity: _LayerQuantity, condition: str, colour: str, column: int
) -> None:
    """Draw the mean over heads of a condition's null by layer, if it has one."""
    null = layer_quantity.null_of(condition)
    if null is None:
        return
    name = NULL_NAMES[layer_quantity.null_kind]
    draw.dotted(
        figure,
        null.layer.values,
        _over_heads(layer_quantity.result, null).estimate,
        name,
        colour,
        column=column,
        showlegend=False,
        hovertemplate=f"{name}: %{{y:.3f}}<extra></extra>",
    )


def _over_heads(result: Result, values: xr.DataArray) -> Interval:
    """The mean over prompts of each prompt's mean over heads [layer, …]; values without heads are
    averaged over prompts only."""
    averaged_dims = ["head"] if "head" in values.dims else []
    return mean_over_prompts(result, values.transpose("prompt", "layer", ...), averaged_dims)


def _titled(
    figure: go.Figure, layer_quantity: _LayerQuantity, subject: str, drawn_words: str, height: int
) -> go.Figure:
    """Set the title, the titles of the axes and the sentence of a figure, and return it.

    Args:
        figure: The figure.
        layer_quantity: What it shows.
        subject: What follows the model's name in the title.
        drawn_words: What is drawn, for the small print.
        height: The height for one line of title and one of small print, in pixels.
    """
    heading = f"{model_caption(layer_quantity.result)}: {subject}"
    draw.title(figure, heading, layer_quantity.small_print(drawn_words), height)

    variable = layer_quantity.variable
    figure.update_xaxes(title_text="layer", **draw.numbered_ticks(variable.sizes["layer"]))
    axis_words = f"{layer_quantity.title}<br>({variable.attrs['units']})"
    figure.update_yaxes(title_text=axis_words, col=1)
    return says(figure, _sentence(layer_quantity))


def _sentence(layer_quantity: _LayerQuantity) -> str:
    """The mean over layers, heads and prompts in each condition, with that of the null in
    parentheses."""
    result = layer_quantity.result
    variable = layer_quantity.variable

    phrases = []
    for condition in layer_quantity.conditions:
        mean = mean_words(result, variable.sel(condition=condition))
        phrase = f"{condition} {mean}"
        null = layer_quantity.null_of(condition)
        if null is not None:
            null_mean = in_digits(overall_mean(result, null).estimate, ".3g")
            phrase += f" ({NULL_NAMES[layer_quantity.null_kind]}: {null_mean})"
        phrases.append(phrase)

    name = str(variable.name).removesuffix("_by_segment")  # the suffix of stored variables
    averaged_dims = [f"{dim}s" for dim in variable.dims if dim not in ("prompt", "condition")]
    dim_words = " and ".join(averaged_dims)
    return f"{name} ({variable.attrs['units']}), mean over {dim_words}: {'; '.join(phrases)}."
