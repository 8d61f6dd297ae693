"""Figures of MLP activations, and of the updates of heads: magnitude, orientation and position."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from mechattn.analysis.updates import BEFORE_NORM
from mechattn.axes import BASELINE
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.means import mean_over_prompts, summed
from mechattn.contrast.quantities import check_condition, check_layer
from mechattn.errors import OptionError
from mechattn.render import draw
from mechattn.render.draw import COLOURS, WITH
from mechattn.render.figure_declaration import figure as declare
from mechattn.render.figure_declaration import several
from mechattn.render.words import (
    count_words,
    mean_words,
    model_caption,
    number_words,
    percent_words,
    says,
)
from mechattn.results.result import Result
from mechattn.stats.intervals import Interval

NAME = "mlp_activations"
_POINTS: dict[str, Any] = {"marker": dict(size=7), "hovertemplate": "%{customdata}: %{y:.3g}"}
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

    Shows the share of all activations by bin on a logarithmic axis, as means over prompts with
    pointwise 95 % bands. Dotted lines mark plus and minus the near-zero threshold. Activations
    outside the bins are left out.

    Args:
        results: One result per model, with ``MlpActivations``.
        conditions: The conditions other than the baseline; all by default.
        layer: The layer, from 0.
    """
    results, names = _checked(results, conditions, layer)
    figure = _panels(results)
    for column, result in enumerate(results, 1):
        histogram = result[NAME].histogram.sel(layer=layer).isel(bin=slice(1, -1))
        bins = histogram.bin.values
        for name, colour in draw.of_conditions([BASELINE, *names]):
            shares = histogram.sel(condition=name).transpose("prompt", "bin")
            interval = mean_over_prompts(result, shares)
            least = np.nanmin(_positive(interval.high)) / 10
            steps = np.repeat(bins, 2)[1:]
            low = np.repeat(interval.low.clip(least), 2)[:-1]
            high = np.repeat(interval.high.clip(least), 2)[:-1]
            draw.ribbon(figure, steps, low, high, colour, column=column, alpha=0.15)
            figure.add_scatter(
                x=bins,
                y=_positive(interval.estimate),
                row=1,
                col=column,
                name=name,
                showlegend=column == 1,
                legendgroup=name,
                line=dict(color=colour, width=1.6, shape="hv"),
            )
        thresholds = result.provenance["analyses"][NAME]["thresholds"]
        key = layer if layer in thresholds else str(layer)  # as text in a stored result
        threshold = float(thresholds[key])
        for x in (-threshold, threshold):
            draw.rule(figure, x=x, dash="dot", column=column)
    figure.update_yaxes(type="log", exponentformat="power", dtick=1)
    figure.update_yaxes(title_text="share of activations", col=1)
    figure.update_xaxes(title_text="activation after the nonlinearity")
    note = f"layer {layer}, question tokens; {_n(results)}"
    note += "; bands: pointwise 95 % intervals; dotted: near-zero threshold"
    draw.title(figure, "activations of the MLP", note, 480, top=150)
    phrases = []
    for result in results:
        share = result[NAME].near_zero_by_segment.sel(layer=layer, segment="question")
        words = []
        for name in [BASELINE, *names]:
            words.append(f"{name} {mean_words(result, share.sel(condition=name))}")
        phrases.append(f"{model_caption(result)}: {'; '.join(words)}.")
    return says(figure, "Near-zero share:", *phrases)


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
        conditions: The conditions; all except the baseline by default.
        layer: The layer, from 0.
        segment: The segment of the tokens.
    """
    results, names = _checked(results, conditions, layer)
    figure = draw.panels(list(_METRICS.values()), horizontal_spacing=0.05)
    sentences = []
    for column, metric in enumerate(_METRICS, 1):
        series = []
        for result in results:
            changes = []
            for name in names:
                contrast = Contrast(result, name, quantity=metric, segment=segment)
                changes.append(contrast.overall(layer)[0])
            series.append((model_caption(result), 100 * np.array(changes).T))
            if metric == "near_zero":
                words = [
                    f"{name} {percent_words(change)}"
                    for name, change in zip(names, changes, strict=True)
                ]
                sentences.append(f"{model_caption(result)}: {'; '.join(words)}.")
        draw.side_by_side(figure, names, series, COLOURS[1:], column=column, **_POINTS)
        draw.rule(figure, y=0, column=column)
    figure.update_yaxes(title_text="change from the baseline (%)", col=1)
    note = (
        f"layer {layer}, {segment} tokens; {_n(results)}; bars: 95 % t intervals of the log-ratio"
        " of prompts' means"
    )
    draw.title(figure, "changes of the MLP's activations", note, 520, top=130)
    return says(figure, "Change of the near-zero share:", *sentences)


@declare(NAME)
def near_zero_by_class(
    results: Sequence[Result] | Result, conditions: Sequence[str] | None = None, layer: int = 0
) -> go.Figure:
    """Plot the share of near-zero activations by token class: digits, operators, conjunctions and
    others.

    Args:
        results: One result per model, with ``MlpActivations``.
        conditions: The conditions other than the baseline; all by default.
        layer: The layer, from 0.
    """
    results, names = _checked(results, conditions, layer)
    figure = _panels(results, shared_yaxes=True)
    sentences = []
    for column, result in enumerate(results, 1):
        shares = result[NAME].near_zero_by_token_class.sel(layer=layer)
        prompts_with = shares.notnull().all("condition").sum("prompt")
        is_shown = (prompts_with >= 3).values
        classes = shares.token_class.values[is_shown]
        shown = shares.transpose("prompt", "condition", "token_class")[:, :, is_shown]
        series = [
            (name, mean_over_prompts(result, shown.sel(condition=name)))
            for name in [BASELINE, *names]
        ]
        draw.side_by_side(
            figure, classes, series, COLOURS, column=column, apart=0.8 / len(series), **_POINTS
        )
        in_baseline = shares.sel(condition=BASELINE).notnull().sum("prompt").values[is_shown]
        labels = [
            f"{label}<br>n = {count}" for label, count in zip(classes, in_baseline, strict=True)
        ]
        figure.update_xaxes(ticktext=labels, row=1, col=column)
        phrases = []
        for token_class in classes:
            of_class = shares.sel(token_class=token_class)
            words = []
            for name in [BASELINE, *names]:
                of_condition = of_class.sel(condition=name).dropna("prompt")
                words.append(f"{name} {mean_words(result, of_condition)}")
            phrases.append(f"{token_class}: {', '.join(words)}")
        sentences.append(f"{model_caption(result)}: {'; '.join(phrases)}.")
    figure.update_yaxes(title_text="near-zero share", col=1)
    note = f"layer {layer}; n: prompts with such a token; bars: 95 % t intervals over prompts"
    draw.title(figure, "near-zero activations by class of token", note, 500, top=150)
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
        conditions: The others; all by default.
        layer: The layer, from 0.
    """
    results, names = _checked(results, conditions, layer)
    others = [name for name in names if name != condition]
    if not others:
        raise OptionError(
            f"there is no condition to compare with {condition!r}; run at least one more"
        )
    figure = draw.panels()
    series = []
    sentences = []
    for result in results:
        table = result.agreement(condition, others[0], controls=others[1:])
        of_layer = table[table.layer == layer]
        cosines = of_layer[["cosine", "cosine_low", "cosine_high"]].to_numpy()
        words = [
            f"{name} {number_words(Interval(*ends))}"
            for name, ends in zip(others, cosines, strict=True)
        ]
        sentences.append(f"{model_caption(result)}: {'; '.join(words)}.")
        series.append((model_caption(result), cosines.T))
    draw.side_by_side(figure, others, series, COLOURS[1:], **_POINTS)
    draw.rule(figure, y=0)
    figure.update_yaxes(title_text="cosine", range=[-1.05, 1.05])
    note = (
        f"of changes from the baseline, layer {layer}, question tokens; {_n(results)}; bars: 95 % t"
        " intervals"
    )
    draw.title(figure, f"agreement with “{condition}”", note, 460, top=130)
    return says(figure, f"Cosine of the change with that of “{condition}”:", *sentences)


def _panels(results: Sequence[Result], **options: Any) -> go.Figure:
    """One panel per model, side by side."""
    captions = [model_caption(result).replace(" (", "<br>(") for result in results]
    return draw.panels(captions, horizontal_spacing=0.06, **options)


def _checked(
    results: Sequence[Result] | Result, conditions: Sequence[str] | None, layer: int
) -> tuple[list[Result], list[str]]:
    """The results as a list, and the conditions other than the baseline, which all results must
    have.
    """
    result_list = several(results)
    names = [name for name in conditions or result_list[0].conditions if name != BASELINE]
    for result in result_list:
        check_layer(layer, result[NAME])
        for name in names:
            result.condition(name)
    if not names:
        why = "this figure shows changes from the baseline, but there is no other condition"
        raise OptionError(f"{why}; run at least one")
    return result_list, names


def _positive(values: np.ndarray) -> np.ndarray:
    """Replace zeros with NaN: an empty bin is a gap."""
    return np.where(values > 0, values, np.nan)


def _n(results: Sequence[Result]) -> str:
    words = {count_words(result) for result in results}
    if len(words) == 1:
        return f"n = {words.pop()}"
    counts = sorted({result["sequences"].sizes["prompt"] for result in results})
    return f"n = {', '.join(map(str, counts))} prompts"


Reading = Literal["mixed", "top_target"]
READINGS = {"mixed": "head_updates", "top_target": "top_target_updates"}
_AXIS = {
    "magnitude": "‖update‖ / ‖residual stream‖",
    "orientation": "cosine of update and residual stream",
}
_HEAT: dict[str, Any] = {"colorscale": draw.SEQUENTIAL, "reversescale": True, "zmin": 0}
_RULE: dict[str, Any] = {"colour": WITH, "dash": "dot", "width": 1.5}


@declare(READINGS, report=[{}])
def update_histogram(
    result: Result,
    quantity: Literal["magnitude", "orientation"] = "magnitude",
    condition: str = BASELINE,
    reading: Reading = "mixed",
) -> go.Figure:
    """Plot the distribution over tokens of each head's update magnitude or orientation, with a
    slider for the layer.

    The dotted line is 1 / heads for the magnitude and 0 (orthogonal to the residual stream) for the
    orientation. (R. Claus, figures 7 and 8. These show a head's whole update; reading="top_target"
    shows only the part from its strongest target, like the published ones.)

    Args:
        result: A result with ``HeadUpdates`` (or ``TopTargetUpdates``).
        quantity: "magnitude" or "orientation".
        condition: The condition.
        reading: "mixed" or "top_target".

    Raises:
        OptionError: The quantity was not measured.
    """
    if quantity not in ("magnitude", "orientation"):
        raise OptionError(f'quantity={quantity!r}: choose "magnitude" or "orientation"')
    counts = _counts(result, f"{quantity}_counts", condition, reading)
    is_magnitude = quantity == "magnitude"
    bins = counts[f"{quantity}_bin"].values
    inner = slice(1, -1) if is_magnitude else slice(1, None)
    heads = counts.sizes["head"]
    x = _middles(bins)[inner]
    if is_magnitude:
        x = np.log10(x)
    figure = draw.panels()
    for layer in counts.layer.values:
        of_layer = counts.sel(layer=layer).transpose("head", ...)
        with np.errstate(invalid="ignore"):  # a head that adds nothing has no counts
            percent = 100 * of_layer.values / of_layer.values.sum(-1, keepdims=True)
        figure.add_heatmap(
            x=x,
            y=of_layer["head"].values,
            z=_positive(percent[:, inner]),
            **_HEAT,
            colorbar=dict(title="% of<br>tokens"),
            customdata=np.broadcast_to(_ranges(bins)[inner], (heads, len(x))),
            hovertemplate=(
                f"layer {layer}, head %{{y}}: {quantity} %{{customdata}}: %{{z:.1f}}"
                " %<extra></extra>"
            ),
        )
    uniform = np.log10(1 / heads) if is_magnitude else 0.0
    draw.rule(figure, **_RULE, x=uniform)
    reach = draw.reach(figure, "x", uniform, is_magnitude)
    figure.update_xaxes(title_text=_AXIS[quantity], **reach)
    figure.update_yaxes(title_text="head", **draw.steps(heads))
    return _finished(figure, result, condition, reading, f"{quantity} of head updates", counts, 480)


@declare(READINGS, report=[{}])
def update_map(result: Result, condition: str = BASELINE, reading: Reading = "mixed") -> go.Figure:
    """Plot orientation against magnitude of all heads' updates at all tokens, with a slider for the
    layer.

    Shares are of all updates; updates below 0.0001 or above 100 times the residual stream are
    outside the map. One with negative orientation reduces the residual stream, one with positive
    adds to it. (R. Claus, figure 9.)

    Args:
        result: A result with ``HeadUpdates`` (or ``TopTargetUpdates``).
        condition: The condition.
        reading: "mixed" or "top_target".

    Raises:
        OptionError: The quantity was not measured.
    """
    counts = _counts(result, "joint_counts", condition, reading)
    magnitudes = counts.magnitude_bin.values
    orientations = counts.orientation_bin.values
    words = [
        [f"magnitude {size}, orientation {turn}" for size in _ranges(magnitudes)[1:-1]]
        for turn in _ranges(orientations)[1:]
    ]
    figure = draw.panels()
    for layer in counts.layer.values:
        of_layer = counts.sel(layer=layer).transpose("orientation_bin", "magnitude_bin").values
        percent = 100 * of_layer[1:, 1:-1] / max(1, of_layer.sum())
        figure.add_heatmap(
            x=np.log10(_middles(magnitudes)[1:-1]),
            y=_middles(orientations)[1:],
            z=_positive(percent),
            **_HEAT,
            colorbar=dict(title="% of<br>updates"),
            customdata=words,
            hovertemplate=f"layer {layer}: %{{customdata}}: %{{z:.2f}} %<extra></extra>",
        )
    uniform = np.log10(1 / int(result.provenance["model"]["heads"]))
    draw.rule(figure, **_RULE, y=0)
    draw.rule(figure, **_RULE, x=uniform)
    figure.update_xaxes(title_text=_AXIS["magnitude"], **draw.reach(figure, "x", uniform, True))
    figure.update_yaxes(title_text=_AXIS["orientation"], **draw.reach(figure, "y", 0.0))
    what = "orientation against magnitude of head updates"
    return _finished(figure, result, condition, reading, what, counts, 560)


@declare(READINGS)
def update_by_position(
    result: Result, condition: str = BASELINE, reading: Reading = "mixed"
) -> go.Figure:
    """Plot the mean magnitude of every head's update by position, with a slider for the layer (R.
    Claus, figure 10).

    Positions are hidden if fewer than half of the prompts have them: late positions come only from
    long prompts.

    Args:
        result: A result with ``HeadUpdates(per_query=True)`` (or ``TopTargetUpdates``).
        condition: The condition.
        reading: "mixed" or "top_target".

    Raises:
        OptionError: The quantity was not measured for each token.
    """
    dataset = _dataset(result, reading, condition)
    name = f"{_prefix(reading)}magnitude_at"
    if name not in dataset:
        raise OptionError(
            "the updates of single tokens were not kept: measure HeadUpdates(per_query=True)"
        )
    values = dataset[name]
    counts = dataset[f"{name}_n"]
    prompts = result["sequences"].sizes["prompt"]
    texts = None
    if prompts == 1:
        first = result["sequences"].first_prompt_text.sel(condition=condition).values
        texts = [html.escape(str(text)).replace("\n", "⏎") for text in first]
    heads = values.sizes["head"]
    bar = dict(title="head", **draw.steps(heads))
    figure = draw.panels()
    for layer in values.layer.values:
        y = values.sel(layer=layer).transpose("head", "key").values
        n = counts.sel(layer=layer).transpose("head", "key").values
        head, key = np.nonzero(np.isfinite(y) & (n >= prompts / 2))
        words = []
        for head_index, position in zip(head, key, strict=True):
            rest = f", n = {int(n[head_index, position])}"
            if texts is not None:
                rest = f" “{texts[position]}”"
            words.append(f"head {head_index}, position {position}{rest}")
        figure.add_scattergl(
            x=key,
            y=y[head, key].astype(np.float32),
            mode="markers",
            text=words,
            marker=dict(size=4, color=head, colorscale=draw.SEQUENTIAL, colorbar=bar, opacity=0.7),
            hovertemplate=f"layer {layer}, %{{text}}: %{{y:.3f}}<extra></extra>",
            showlegend=False,
        )
    draw.rule(figure, **_RULE, y=1 / heads)
    figure.update_xaxes(title_text="position")
    figure.update_yaxes(title_text=_AXIS["magnitude"], type="log")
    return _finished(figure, result, condition, reading, "head updates by position", values, 500)


def _prefix(reading: str) -> str:
    return "top_target_" if reading == "top_target" else ""


def _dataset(result: Result, reading: str, condition: str) -> xr.Dataset:
    if reading not in READINGS:
        raise OptionError(f'reading={reading!r}: choose "mixed" or "top_target"')
    check_condition(result, condition)
    name = READINGS[reading]
    if name not in result.datasets:
        analysis = name.title().replace("_", "")
        raise OptionError(f"this result has no {name}; run it with analyses=[{analysis}(), …]")
    return result[name].sel(condition=condition)


def _counts(result: Result, name: str, condition: str, reading: str) -> xr.DataArray:
    return summed(result, _dataset(result, reading, condition)[f"{_prefix(reading)}{name}"])


def _middles(edges: np.ndarray) -> np.ndarray:
    """The middle of each bin, on a log scale for magnitudes; the outermost bins are as wide as
    their neighbours.
    """
    if edges[0] == 0:
        inner = np.log10(edges[1:])
        step = inner[1] - inner[0]
        return 10 ** np.array([inner[0] - step / 2, *(inner + step / 2)])
    step = edges[2] - edges[1]
    return np.array([edges[1] - step / 2, *(edges[1:] + step / 2)])


def _ranges(edges: np.ndarray) -> np.ndarray:
    ends = [*edges[1:], np.inf]
    return np.array([f"{a:.3g} to {b:.3g}" for a, b in zip(edges, ends, strict=True)])


def _finished(
    figure: go.Figure,
    result: Result,
    condition: str,
    reading: str,
    what: str,
    values: xr.DataArray,
    height: int,
) -> go.Figure:
    """Set the title, a slider with one step per layer, and the sentence on the question's
    tokens."""
    prefix = _prefix(reading)
    note = f"{condition}; {count_words(result)}"
    if reading == "top_target":
        note += "; only the part from the strongest target"
    if f"{prefix}magnitude{BEFORE_NORM}" in result[READINGS[reading]]:
        note += "; after the norm that follows attention"
    title = f"{model_caption(result)}: {what}"

    def layer_title(layer: int) -> str:
        return f"{title}<br><sup>layer {layer}; {note}</sup>"

    draw.by_layer_slider(figure, values.layer.values.tolist(), layer_title, height)
    question = _dataset(result, reading, condition).sel(segment="question")
    magnitude = mean_words(result, question[f"{prefix}magnitude"])
    orientation = mean_words(result, question[f"{prefix}orientation"])
    means = f"magnitude {magnitude} of the residual stream's norm, cosine with it {orientation}"
    return says(figure, f"Question tokens, mean over layers and heads: {means}.")
