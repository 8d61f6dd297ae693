"""Figures of MLP activations: their distribution, size and sparsity, and how conditions change
them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from mechattn.axes import BASELINE
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.means import mean_over_prompts
from mechattn.contrast.quantities import check_layer
from mechattn.errors import OptionError
from mechattn.render import draw
from mechattn.render.draw import COLOURS
from mechattn.render.figure_declaration import (
    compared_conditions,
    declare,
    listed_conditions,
    several,
)
from mechattn.render.words import (
    counts_words,
    interval_of,
    mean_words,
    model_caption,
    model_sentence,
    number_words,
    percent_words,
    says,
)
from mechattn.results.result import Result
from mechattn.stats.intervals import FEWEST, Interval

NAME = "mlp_activations"
_POINT_STYLE: dict[str, Any] = {"marker": dict(size=7), "hovertemplate": "%{customdata}: %{y:.3g}"}
_METRICS = {
    "near_zero": "near-zero share",
    "l1": "L1 norm",
    "l2": "L2 norm",
    "gini": "Gini coefficient",
}


@declare(NAME, report=[{}])
def activation_histogram(
    results: Sequence[Result] | Result, conditions: Sequence[str] | None = None, layer: int = 0
) -> go.Figure:
    """Plot a histogram of the question's activations after the nonlinearity by condition, one panel
    per model.

    The share of activations in each bin is on a logarithmic axis, as the mean over prompts with a
    pointwise 95 % band. Dotted lines mark plus and minus the near-zero threshold. Activations
    outside the bins are not shown.

    Args:
        results: One result per model, with ``MlpActivations``.
        conditions: The conditions other than the baseline; all by default.
        layer: The layer, from 0.

    Raises:
        OptionError: There is no such layer or condition, or no condition besides the baseline.
    """
    results, conditions = _checked_results(results, conditions, layer)
    shown_conditions = [BASELINE, *conditions]
    figure = _panel_of_each_model(results)
    sentences = []
    for column, result in enumerate(results, 1):
        _histogram_lines(figure, result, shown_conditions, layer, column)

        # The size up to which an activation of this layer counts as near zero.
        threshold = result.provenance["analyses"][NAME]["thresholds"][str(layer)]
        for x in (-threshold, threshold):
            draw.rule(figure, x=x, dash="dot", column=column)

        share = result[NAME].near_zero_by_segment.sel(layer=layer, segment="question")
        phrases = []
        for name in shown_conditions:
            share_words = mean_words(result, share.sel(condition=name))
            phrases.append(f"{name} {share_words}")
        sentences.append(model_sentence(result, phrases))

    # "10⁻³" at each power of ten.
    figure.update_yaxes(type="log", exponentformat="power", dtick=1)
    figure.update_yaxes(title_text="share of activations", col=1)
    figure.update_xaxes(title_text="activation after the nonlinearity")

    small_print = f"layer {layer}, question tokens; n = {counts_words(results)}"
    small_print += "; bands: pointwise 95 % intervals; dotted: near-zero threshold"
    draw.title_above_legend(figure, "activations of the MLP", small_print, 480, margin_top=150)
    return says(figure, "Near-zero share:", *sentences)


@declare(NAME, compares=True, report=[{}])
def activation_metrics(
    results: Sequence[Result] | Result,
    conditions: Sequence[str] | None = None,
    layer: int = 0,
    segment: str = "question",
) -> go.Figure:
    """Plot the changes of near-zero share, L1, L2 and Gini coefficient from the baseline, with 95 %
    intervals.

    Args:
        results: One result per model, with ``MlpActivations``.
        conditions: The conditions other than the baseline; all by default.
        layer: The layer, from 0.
        segment: The segment of the tokens.

    Raises:
        OptionError: There is no such layer, condition or segment, or no condition besides the
            baseline.
    """
    results, conditions = _checked_results(results, conditions, layer)
    figure = draw.panels(list(_METRICS.values()), horizontal_spacing=0.05)
    sentences = []
    for column, metric in enumerate(_METRICS, 1):
        series = []
        for result in results:
            changes = []
            phrases = []
            for name in conditions:
                contrast = Contrast(result, name, quantity=metric, segment=segment)
                change, _ = contrast.overall(layer)
                changes.append(change)
                phrases.append(f"{name} {percent_words(change)}")

            percents = 100 * np.transpose(changes)  # [estimate and ends, condition]
            series.append((model_caption(result), percents))
            if metric == "near_zero":
                sentences.append(model_sentence(result, phrases))

        draw.side_by_side(figure, conditions, series, COLOURS[1:], column=column, **_POINT_STYLE)
        draw.rule(figure, y=0, column=column)

    figure.update_yaxes(title_text="change from the baseline (%)", col=1)
    small_print = (
        f"layer {layer}, {segment} tokens; n = {counts_words(results)}; bars: 95 % t intervals of"
        " the log-ratio of prompts' means"
    )
    draw.title_above_legend(
        figure, "changes of the MLP's activations", small_print, 520, margin_top=130
    )
    return says(figure, "Change of the near-zero share:", *sentences)


@declare(NAME)
def near_zero_by_class(
    results: Sequence[Result] | Result, conditions: Sequence[str] | None = None, layer: int = 0
) -> go.Figure:
    """Plot the share of near-zero activations by class of the question's tokens: digits, operators,
    conjunctions and others.

    A class that fewer than three prompts have is left out.

    Args:
        results: One result per model, with ``MlpActivations``.
        conditions: The conditions other than the baseline; all by default.
        layer: The layer, from 0.

    Raises:
        OptionError: There is no such layer or condition, no condition besides the baseline, or no
            class of token that three prompts have.
    """
    results, conditions = _checked_results(results, conditions, layer)
    shown_conditions = [BASELINE, *conditions]
    figure = _panel_of_each_model(results, shared_yaxes=True)
    sentences = []
    for column, result in enumerate(results, 1):
        counts, intervals = _shares_by_class(result, shown_conditions, layer)
        classes = counts.token_class.values
        spacing = 0.8 / len(shown_conditions)  # classes are 1 apart
        series = intervals.items()
        draw.side_by_side(
            figure, classes, series, COLOURS, column=column, spacing=spacing, **_POINT_STYLE
        )

        labels = [
            f"{token_class}<br>n = {count}" for token_class, count in counts.to_series().items()
        ]
        figure.update_xaxes(ticktext=labels, row=1, col=column)
        phrases = []
        for name, interval in intervals.items():
            class_words = ", ".join(_interval_phrases(classes, interval))
            phrases.append(f"{name}: {class_words}")
        sentences.append(model_sentence(result, phrases))

    figure.update_yaxes(title_text="near-zero share", col=1)
    small_print = (
        f"layer {layer}; n: prompts with such a token in each condition; bars: 95 % t intervals"
        " over prompts"
    )
    draw.title_above_legend(
        figure, "near-zero activations by class of token", small_print, 500, margin_top=150
    )
    return says(figure, "Near-zero share.", *sentences)


@declare(NAME, compares=True, report=[{}])
def agreement(
    results: Sequence[Result] | Result,
    condition: str,
    conditions: Sequence[str] | None = None,
    layer: int = 0,
) -> go.Figure:
    """Plot the cosine between the changes that conditions make in the question's activations.

    Args:
        results: One result per model, with ``MlpActivations``.
        condition: The condition to compare the others with, such as "slash".
        conditions: The other conditions; all by default.
        layer: The layer, from 0.

    Raises:
        OptionError: There is no such layer or condition, or no condition to compare with.
    """
    results, controls = _checked_results(results, conditions, layer, to=condition)
    figure = draw.panels()
    series = []
    sentences = []
    for result in results:
        result.condition(condition)  # raises for the baseline
        table = result.agreement(condition, controls[0], controls=controls[1:])
        layer_rows = table[table.layer == layer]
        cosines = interval_of(layer_rows, "cosine")
        series.append((model_caption(result), cosines))
        sentences.append(model_sentence(result, _interval_phrases(controls, cosines)))

    draw.side_by_side(figure, controls, series, COLOURS[1:], **_POINT_STYLE)
    draw.rule(figure, y=0)
    figure.update_yaxes(title_text="cosine", range=[-1.05, 1.05])

    small_print = (
        f"of changes from the baseline, layer {layer}, question tokens; n = {counts_words(results)}"
        "; bars: 95 % t intervals"
    )
    draw.title_above_legend(
        figure, f"agreement with “{condition}”", small_print, 460, margin_top=130
    )
    return says(figure, f"Cosine of the change with that of “{condition}”:", *sentences)


def _checked_results(
    results: Sequence[Result] | Result,
    conditions: Sequence[str] | None,
    layer: int,
    to: str = BASELINE,
) -> tuple[list[Result], list[str]]:
    """The results as a list, and the names of the conditions that are compared with ``to``.

    Raises:
        OptionError: A result lacks a condition or the layer, or there is no condition to compare.
    """
    result_list = several(results)
    names = compared_conditions(result_list[0], conditions, to)
    for result in result_list:
        check_layer(layer, result[NAME])
        listed_conditions(result, names)  # raises if this result lacks one

    return result_list, names


def _panel_of_each_model(results: Sequence[Result], **options: Any) -> go.Figure:
    """Empty panels side by side, one per model."""
    captions = [model_caption(result).replace(" (", "<br>(") for result in results]
    return draw.panels(captions, horizontal_spacing=0.06, **options)


def _histogram_lines(
    figure: go.Figure, result: Result, conditions: Sequence[str], layer: int, column: int
) -> None:
    """Draw the share of activations in each bin as steps with a band, one line per condition."""
    histogram = result[NAME].histogram.sel(layer=layer)
    edges = histogram.bin.values[1:]  # the first bin begins at −∞
    histogram = histogram.isel(bin=slice(1, -1))  # the outermost bins are open
    step_ends = np.repeat(edges, 2)[1:-1]

    for name, colour in draw.condition_colours(conditions):
        shares = histogram.sel(condition=name).transpose("prompt", "bin")
        interval = mean_over_prompts(result, shares)

        # A logarithmic axis cannot show zeros, so the band stops at a tenth of its smallest upper
        # end. With fewer than three prompts all ends are NaN and stay so.
        floor = 0.1 * np.min(interval.high, where=interval.high > 0, initial=1.0)
        low = interval.low.clip(floor)
        high = interval.high.clip(floor)
        bin_values = [draw.positive(interval.estimate), low, high]
        steps = Interval(*np.repeat(bin_values, 2, axis=1))
        draw.line_and_band(figure, step_ends, steps, name, colour, column=column)


def _shares_by_class(
    result: Result, conditions: Sequence[str], layer: int
) -> tuple[xr.DataArray, dict[str, Interval]]:
    """The near-zero share of each class of token that enough prompts have.

    All conditions show the same prompts: those with such a token in each condition.

    Returns:
        The number of prompts [token_class], and for each condition the shares of these classes.

    Raises:
        OptionError: Too few prompts have any class.
    """
    shares = result[NAME].near_zero_by_token_class.sel(layer=layer, condition=conditions)
    has_class = shares.notnull().all("condition")
    counts = has_class.sum("prompt")
    counts = counts[counts >= FEWEST]
    if not counts.size:
        raise OptionError(
            f"no class of token occurs in the questions of {FEWEST} prompts of"
            f" {model_caption(result)}; run more prompts"
        )

    shares = shares.where(has_class).sel(token_class=counts.token_class)
    intervals = {}
    for name in conditions:
        condition_shares = shares.sel(condition=name).transpose("prompt", "token_class")
        intervals[name] = mean_over_prompts(result, condition_shares)
    return counts, intervals


def _interval_phrases(names: Sequence[str], interval: Interval) -> list[str]:
    """Each name with its number and interval. The parts of ``interval`` are arrays [name]."""
    return [
        f"{name} {number_words(Interval(*ends))}"
        for name, ends in zip(names, np.transpose(interval), strict=True)
    ]
