"""MLP activations: their histogram, four measures of their spread, near-zero shares by token class, agreement."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.axes import BASELINE
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.means import mean_over_prompts
from mechattn.contrast.quantities import check_layer
from mechattn.errors import OptionError
from mechattn.render import draw
from mechattn.render.declared import figure as declare
from mechattn.render.theme import COLOURS, model_caption
from mechattn.render.words import count_words, mean_words, number_words, percent_words, says
from mechattn.results.result import Result
from mechattn.stats.intervals import Interval

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import xarray as xr

NAME = "mlp_activations"
_METRICS = {"near_zero": "near-zero share", "l1": "L1 norm", "l2": "L2 norm", "gini": "Gini coefficient"}


@declare(NAME, report=[{}])
def activation_histogram(
    results: Seq[Result] | Result, conditions: Seq[str] | None = None, layer: int = 0
) -> go.Figure:
    """Plot a histogram of the question's activations after the nonlinearity by condition, one panel per model.

    Shows the share of all activations by bin on a logarithmic axis, as means over prompts with pointwise 95 % bands.
    Dotted lines mark plus and minus the near-zero threshold. Activations outside the bins are left out.

    Args:
        results: One result per model, with ``MlpActivations``.
        conditions: The conditions other than the baseline; all by default.
        layer: The layer, from 0.
    """
    results, names = _checked(results, conditions, layer)
    figure = _panels(results)
    for column, result in enumerate(results, 1):
        at = result[NAME].histogram.sel(layer=layer).isel(bin=slice(1, -1))
        for name, colour in zip([BASELINE, *names], cycle(COLOURS), strict=False):
            made = mean_over_prompts(result, at.sel(condition=name).transpose("prompt", "bin"))
            least = np.nanmin(_positive(made.high)) / 10
            steps = np.repeat(at.bin.values, 2)[1:]
            low, high = (np.repeat(edge.clip(least), 2)[:-1] for edge in (made.low, made.high))
            draw.ribbon(figure, steps, low, high, colour, column=column, alpha=0.15)
            figure.add_scatter(
                x=at.bin.values, y=_positive(made.estimate), row=1, col=column, name=name, showlegend=column == 1,
                legendgroup=name, line=dict(color=colour, width=1.6, shape="hv"),
            )  # fmt: skip
        threshold = _threshold(result, layer)
        for x in (-threshold, threshold):
            figure.add_vline(x, row=1, col=column, line=dict(width=1, dash="dot", color="#888"))
    figure.update_yaxes(type="log", exponentformat="power", dtick=1)
    figure.update_yaxes(title_text="share of activations", col=1)
    figure.update_xaxes(title_text="activation after the nonlinearity")
    note = (
        f"layer {layer}, question tokens; {_n(results)}; bands: pointwise 95 % intervals; dotted: near-zero threshold"
    )
    draw.title(figure, "activations of the MLP", note, 480, top=150)
    parts = [
        f"{model_caption(r)}: " + "; ".join(f"{n} {mean_words(r, _near_zero(r, n, layer))}" for n in [BASELINE, *names])
        for r in results
    ]
    return says(figure, "Near-zero share:", ". ".join(parts) + ".")


@declare(NAME, compares=True, report=[{}])
def activation_metrics(
    results: Seq[Result] | Result, conditions: Seq[str] | None = None, layer: int = 0, segment: str = "question"
) -> go.Figure:
    """Plot the changes of near-zero share, L1, L2 and Gini coefficient from the baseline, with 95 % intervals.

    Args:
        results: One result per model, with ``MlpActivations``.
        conditions: The conditions; all except the baseline by default.
        layer: The layer, from 0.
        segment: The segment of the tokens.
    """
    results, names = _checked(results, conditions, layer)
    figure = draw.panels(list(_METRICS.values()), horizontal_spacing=0.05)
    for column, metric in enumerate(_METRICS, 1):
        for i, (result, colour) in enumerate(zip(results, cycle(COLOURS[1:]), strict=False)):
            made = 100 * np.array([_overall(result, name, metric, segment, layer) for name in names]).T
            place = np.arange(len(names)) + 0.14 * (i - (len(results) - 1) / 2)
            _points(figure, place, made, model_caption(result), colour, column, names)
        draw.zero(figure, row=1, col=column)
        figure.update_xaxes(tickvals=list(range(len(names))), ticktext=list(names), row=1, col=column)
    figure.update_yaxes(title_text="change from the baseline (%)", col=1)
    note = f"layer {layer}, {segment} tokens; {_n(results)}; bars: 95 % t intervals of the log-ratio of prompts' means"
    draw.title(figure, "changes of the MLP's activations", note, 520, top=130)
    parts = [
        f"{model_caption(r)}: "
        + "; ".join(f"{n} {percent_words(_overall(r, n, 'near_zero', segment, layer))}" for n in names)
        for r in results
    ]
    return says(figure, "Change of the near-zero share:", ". ".join(parts) + ".")


@declare(NAME)
def near_zero_by_class(results: Seq[Result] | Result, conditions: Seq[str] | None = None, layer: int = 0) -> go.Figure:
    """Plot the share of near-zero activations by token class: digits, operators, conjunctions and others.

    Args:
        results: One result per model, with ``MlpActivations``.
        conditions: The conditions other than the baseline; all by default.
        layer: The layer, from 0.
    """
    results, names = _checked(results, conditions, layer)
    figure = _panels(results, shared_yaxes=True)
    for column, result in enumerate(results, 1):
        at = result[NAME].near_zero_by_token_class.sel(layer=layer)
        there = (at.notnull().all("condition").sum("prompt") >= 3).values
        classes = at.token_class.values[there]
        for i, (name, colour) in enumerate(zip([BASELINE, *names], cycle(COLOURS), strict=False)):
            made = mean_over_prompts(result, at.sel(condition=name).transpose("prompt", "token_class")[:, there])
            place = np.arange(len(classes)) + 0.8 / (len(names) + 1) * (i - len(names) / 2)
            _points(figure, place, made, name, colour, column, list(classes))
        counts = at.sel(condition=BASELINE).notnull().sum("prompt").values[there]
        labels = [f"{label}<br>n = {count}" for label, count in zip(classes, counts, strict=True)]
        figure.update_xaxes(tickvals=list(range(len(classes))), ticktext=labels, row=1, col=column)
    figure.update_yaxes(title_text="near-zero share", col=1)
    note = f"layer {layer}; n: prompts with such a token; bars: 95 % t intervals over prompts"
    draw.title(figure, "near-zero activations by class of token", note, 500, top=150)
    at = results[0][NAME].near_zero_by_token_class.sel(layer=layer)
    parts = [
        f"{kind}: "
        + ", ".join(
            f"{n} " + mean_words(results[0], at.sel(condition=n, token_class=kind).dropna("prompt"))
            for n in [BASELINE, *names[:1]]
        )
        for kind in classes
    ]
    return says(figure, f"Near-zero share, {model_caption(results[0])}.", "; ".join(parts) + ".")


def _overall(result: Result, condition: str, quantity: str, segment: str, layer: int) -> Interval:
    return Contrast(result, condition, quantity=quantity, segment=segment).overall(layer)[0]


@declare(NAME, compares=True, report=[{}])
def agreement(
    results: Seq[Result] | Result, condition: str, conditions: Seq[str] | None = None, layer: int = 0
) -> go.Figure:
    """Plot the cosine between the changes that conditions make in the question's activations.

    Args:
        results: One result per model, with ``MlpActivations``.
        condition: The condition to compare the others with, such as "slash".
        conditions: The others; all by default.
        layer: The layer, from 0.
    """
    results, names = _checked(results, conditions, layer)
    others = [name for name in names if name != condition]
    if not others:
        raise OptionError(f"there is no condition to compare with {condition!r}; run at least one more")
    figure, said = draw.empty(), []
    for i, (result, colour) in enumerate(zip(results, cycle(COLOURS[1:]), strict=False)):
        table = result.agreement(condition, others[0], controls=others[1:])
        table = table[table.layer == layer]
        made = table[["cosine", "low", "high"]].to_numpy()
        place = np.arange(len(others)) + 0.14 * (i - (len(results) - 1) / 2)
        said += [f"cosine with {w} {number_words(Interval(*row))}" for w, row in zip(others, made, strict=True)]
        _points(figure, place, made.T, model_caption(result), colour, None, others)
    draw.zero(figure)
    figure.update_xaxes(tickvals=list(range(len(others))), ticktext=list(others))
    figure.update_yaxes(title_text="cosine", range=[-1.05, 1.05])
    note = f"of changes from the baseline, layer {layer}, question tokens; {_n(results)}; bars: 95 % t intervals"
    draw.title(figure, f"agreement with “{condition}”", note, 460, top=130)
    return says(figure, "; ".join(said) + ".")


def _panels(results: Seq[Result], **options: Any) -> go.Figure:
    """One panel per model, side by side."""
    return draw.panels([model_caption(r).replace(" (", "<br>(") for r in results], horizontal_spacing=0.06, **options)


def _checked(results: Seq[Result] | Result, conditions: Seq[str] | None, layer: int) -> tuple[list[Result], list[str]]:
    """The results as a list, and the conditions other than the baseline, which all results must have."""
    made = [results] if isinstance(results, Result) else list(results)
    if not made:
        raise OptionError("there are no results to show")
    for result in made:
        check_layer(layer, result[NAME])
        names = [name for name in (conditions or result.conditions) if name != BASELINE]
        for name in names:
            result.condition(name)
    names = [name for name in (conditions or made[0].conditions) if name != BASELINE]
    if not names:
        raise OptionError(
            "this figure shows changes from the baseline, but there is no other condition; run at least one"
        )
    return made, names


def _near_zero(result: Result, condition: str, layer: int) -> xr.DataArray:
    """The near-zero share of the question's activations, one number per prompt."""
    return result[NAME].near_zero_by_segment.sel(condition=condition, layer=layer, segment="question")


def _threshold(result: Result, layer: int) -> float:
    thresholds = result.provenance["analyses"][NAME]["thresholds"]
    return float(thresholds[layer] if layer in thresholds else thresholds[str(layer)])


def _positive(values: np.ndarray) -> np.ndarray:
    """Replace zeros with NaN: on a logarithmic axis an empty bin is a gap."""
    return np.where(values > 0, values, np.nan)


def _points(
    figure: go.Figure, x: np.ndarray, made: Any, name: str, colour: str, column: int | None, words: Seq[str]
) -> None:  # fmt: skip
    """Estimates (estimate, low, high), with the condition or class of each on hover."""
    draw.points(
        figure, x, made, name, colour, column=column, showlegend=column in (None, 1), legendgroup=name,
        marker=dict(size=7), customdata=list(words), hovertemplate="%{customdata}: %{y:.3g}",
    )  # fmt: skip


def _n(results: Seq[Result]) -> str:
    counts = sorted({result["sequences"].sizes["prompt"] for result in results})
    alike = {count_words(result) for result in results}
    return f"n = {alike.pop()}" if len(alike) == 1 else f"n = {', '.join(map(str, counts))} prompts"
