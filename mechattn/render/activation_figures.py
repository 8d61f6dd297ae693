"""MLP activations: their histogram, four measures of their spread, near-zero shares by token class, agreement."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.axes import BASELINE
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.quantities import check_layer
from mechattn.errors import OptionError
from mechattn.render.theme import OTHERS, THIRD, WITH, WITHOUT, faint, headed, model_caption
from mechattn.render.words import count_words, mean_words, number_words, over_units, percent_words, says
from mechattn.results.result import Result
from mechattn.stats.intervals import Interval, t_interval

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import xarray as xr

NAME = "mlp_activations"
_COLOURS = (WITH, THIRD, *OTHERS)
_METRICS = {"near_zero": "near-zero share", "l1": "L1 norm", "l2": "L2 norm", "gini": "Gini coefficient"}


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
        for name, colour in zip([BASELINE, *names], cycle((WITHOUT, *_COLOURS)), strict=False):
            made = t_interval(over_units(result, at.sel(condition=name).transpose("prompt", "bin")))
            _band(figure, at.bin.values, made.low, made.high, colour, column)
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
    figure.update_layout(**_layout("activations of the MLP", note, 480, top=150))
    parts = [
        f"{model_caption(r)}: " + "; ".join(f"{n} {mean_words(r, _near_zero(r, n, layer))}" for n in [BASELINE, *names])
        for r in results
    ]
    return says(figure, "Near-zero share:", ". ".join(parts) + ".")


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
    from plotly.subplots import make_subplots

    results, names = _checked(results, conditions, layer)
    figure = make_subplots(1, 4, subplot_titles=list(_METRICS.values()), horizontal_spacing=0.05)
    for column, metric in enumerate(_METRICS, 1):
        for i, (result, colour) in enumerate(zip(results, cycle(_COLOURS), strict=False)):
            made = [100 * np.array(_overall(result, name, metric, segment, layer)) for name in names]
            place = np.arange(len(names)) + 0.14 * (i - (len(results) - 1) / 2)
            _points(figure, place, np.array(made), model_caption(result), colour, column, column == 1, names)
        figure.add_hline(0, row=1, col=column, line_width=1, line_color="#888")
        figure.update_xaxes(tickvals=list(range(len(names))), ticktext=list(names), row=1, col=column)
    figure.update_yaxes(title_text="change from the baseline (%)", col=1)
    note = f"layer {layer}, {segment} tokens; {_n(results)}; bars: 95 % t intervals of the log-ratio of prompts' means"
    figure.update_layout(**_layout("changes of the MLP's activations", note, 520))
    parts = [
        f"{model_caption(r)}: "
        + "; ".join(f"{n} {percent_words(_overall(r, n, 'near_zero', segment, layer))}" for n in names)
        for r in results
    ]
    return says(figure, "Change of the near-zero share:", ". ".join(parts) + ".")


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
        for i, (name, colour) in enumerate(zip([BASELINE, *names], cycle((WITHOUT, *_COLOURS)), strict=False)):
            made = t_interval(over_units(result, at.sel(condition=name).transpose("prompt", "token_class"))[:, there])
            place = np.arange(len(classes)) + 0.8 / (len(names) + 1) * (i - len(names) / 2)
            _points(figure, place, np.array(made).T, name, colour, column, column == 1, list(classes))
        counts = at.sel(condition=BASELINE).notnull().sum("prompt").values[there]
        labels = [f"{label}<br>n = {count}" for label, count in zip(classes, counts, strict=True)]
        figure.update_xaxes(tickvals=list(range(len(classes))), ticktext=labels, row=1, col=column)
    figure.update_yaxes(title_text="near-zero share", col=1)
    note = f"layer {layer}; n: prompts with such a token; bars: 95 % t intervals over prompts"
    figure.update_layout(**_layout("near-zero activations by class of token", note, 500, top=150))
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


def agreement(
    results: Seq[Result] | Result,
    condition: str,
    conditions: Seq[str] | None = None,
    layer: int = 0,
) -> go.Figure:
    """Plot the cosine between the changes that conditions make in the question's activations.

    Args:
        results: One result per model, with ``MlpActivations``.
        condition: The condition to compare the others with, such as "slash".
        conditions: The others; all by default.
        layer: The layer, from 0.
    """
    import plotly.graph_objects as go

    results, names = _checked(results, conditions, layer)
    others = [name for name in names if name != condition]
    if not others:
        raise OptionError(f"there is no condition to compare with {condition!r}; run at least one more")
    figure, said = go.Figure(), []
    for i, (result, colour) in enumerate(zip(results, cycle(_COLOURS), strict=False)):
        table = result.agreement(condition, others[0], controls=others[1:])
        table = table[table.layer == layer]
        made = table[["cosine", "low", "high"]].to_numpy()
        place = np.arange(len(others)) + 0.14 * (i - (len(results) - 1) / 2)
        said += [f"cosine with {w} {number_words(Interval(*row))}" for w, row in zip(others, made, strict=True)]
        _points(figure, place, made, model_caption(result), colour, None, True, others)
    figure.add_hline(0, line_width=1, line_color="#888")
    figure.update_xaxes(tickvals=list(range(len(others))), ticktext=list(others))
    figure.update_yaxes(title_text="cosine", range=[-1.05, 1.05])
    note = f"of changes from the baseline, layer {layer}, question tokens; {_n(results)}; bars: 95 % t intervals"
    figure.update_layout(**_layout(f"agreement with “{condition}”", note, 460))
    return says(figure, "; ".join(said) + ".")


def _panels(results: Seq[Result], **options: Any) -> go.Figure:
    """One panel per model, side by side."""
    from plotly.subplots import make_subplots

    titles = [model_caption(result).replace(" (", "<br>(") for result in results]
    return make_subplots(1, len(results), subplot_titles=titles, horizontal_spacing=0.06, **options)


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


def _band(figure: go.Figure, x: np.ndarray, low: np.ndarray, high: np.ndarray, colour: str, column: int) -> None:
    least = np.nanmin(_positive(high)) / 10
    steps = np.repeat(x, 2)[1:]
    top, bottom = (np.repeat(edge.clip(least), 2)[:-1] for edge in (high, low))
    outline = dict(x=np.concatenate([steps, steps[::-1]]), y=np.concatenate([top, bottom[::-1]]))
    figure.add_scatter(
        **outline, row=1, col=column, fill="toself", fillcolor=faint(colour, 0.15), line=dict(width=0),
        hoverinfo="skip", showlegend=False,
    )  # fmt: skip


def _points(
    figure: go.Figure, x: np.ndarray, made: np.ndarray, name: str, colour: str, column: int | None, legend: bool,
    words: Seq[str],
) -> None:  # fmt: skip
    """Estimates [point, (estimate, low, high)], drawn with their intervals."""
    estimate, low, high = made.T
    bars = dict(type="data", array=high - estimate, arrayminus=estimate - low, symmetric=False, thickness=1.3)
    where = {} if column is None else {"row": 1, "col": column}
    figure.add_scatter(
        x=x, y=estimate, error_y=bars, mode="markers", name=name, showlegend=legend, legendgroup=name,
        marker=dict(color=colour, size=7), customdata=list(words), hovertemplate="%{customdata}: %{y:.3g}", **where,
    )  # fmt: skip


def _n(results: Seq[Result]) -> str:
    counts = sorted({result["sequences"].sizes["prompt"] for result in results})
    alike = {count_words(result) for result in results}
    return f"n = {alike.pop()}" if len(alike) == 1 else f"n = {', '.join(map(str, counts))} prompts"


def _layout(title: str, note: str, height: int, top: int = 130) -> dict:
    return headed(top, height) | {"title_text": f"{title}<br><sup>{note}</sup>"}
