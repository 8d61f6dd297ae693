"""Figures of MLP activations, and of the updates of heads: magnitude, orientation and position."""

from __future__ import annotations

import html
from collections.abc import Sequence as Seq
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
        for name, colour in draw.of_conditions([BASELINE, *names]):
            made = mean_over_prompts(result, at.sel(condition=name).transpose("prompt", "bin"))
            least = np.nanmin(_positive(made.high)) / 10
            steps = np.repeat(at.bin.values, 2)[1:]
            low, high = (np.repeat(edge.clip(least), 2)[:-1] for edge in (made.low, made.high))
            draw.ribbon(figure, steps, low, high, colour, column=column, alpha=0.15)
            figure.add_scatter(
                x=at.bin.values, y=_positive(made.estimate), row=1, col=column, name=name, showlegend=column == 1,
                legendgroup=name, line=dict(color=colour, width=1.6, shape="hv"),
            )  # fmt: skip
        thresholds = result.provenance["analyses"][NAME]["thresholds"]
        threshold = float(thresholds[layer] if layer in thresholds else thresholds[str(layer)])
        for x in (-threshold, threshold):
            draw.rule(figure, x=x, dash="dot", column=column)
    figure.update_yaxes(type="log", exponentformat="power", dtick=1)
    figure.update_yaxes(title_text="share of activations", col=1)
    figure.update_xaxes(title_text="activation after the nonlinearity")
    note = "bands: pointwise 95 % intervals; dotted: near-zero threshold"
    draw.title(
        figure,
        "activations of the MLP",
        f"layer {layer}, question tokens; {_n(results)}; {note}",
        480,
        top=150,
    )
    parts = []
    for result in results:
        share = result[NAME].near_zero_by_segment.sel(layer=layer, segment="question")
        words = [
            f"{name} {mean_words(result, share.sel(condition=name))}" for name in [BASELINE, *names]
        ]
        parts.append(f"{model_caption(result)}: {'; '.join(words)}.")
    return says(figure, "Near-zero share:", *parts)


@declare(NAME, compares=True, report=[{}])
def activation_metrics(
    results: Seq[Result] | Result,
    conditions: Seq[str] | None = None,
    layer: int = 0,
    segment: str = "question",
) -> go.Figure:
    """Plot the changes of near-zero share, L1, L2 and Gini coefficient from the baseline, with 95 % intervals.

    Args:
        results: One result per model, with ``MlpActivations``.
        conditions: The conditions; all except the baseline by default.
        layer: The layer, from 0.
        segment: The segment of the tokens.
    """
    results, names = _checked(results, conditions, layer)
    figure, captions = (
        draw.panels(list(_METRICS.values()), horizontal_spacing=0.05),
        [*map(model_caption, results)],
    )
    for column, metric in enumerate(_METRICS, 1):
        asked = [
            [Contrast(r, name, quantity=metric, segment=segment) for name in names] for r in results
        ]
        found = [[one.overall(layer)[0] for one in of_result] for of_result in asked]
        series = [
            (caption, 100 * np.array(changes).T)
            for caption, changes in zip(captions, found, strict=True)
        ]
        draw.side_by_side(figure, names, series, COLOURS[1:], column=column, **_POINTS)
        draw.rule(figure, y=0, column=column)
        if metric == "near_zero":
            said = [
                [f"{n} {percent_words(one)}" for n, one in zip(names, of, strict=True)]
                for of in found
            ]
    figure.update_yaxes(title_text="change from the baseline (%)", col=1)
    note = f"layer {layer}, {segment} tokens; {_n(results)}; bars: 95 % t intervals of the log-ratio of prompts' means"
    draw.title(figure, "changes of the MLP's activations", note, 520, top=130)
    parts = [
        f"{caption}: {'; '.join(words)}." for caption, words in zip(captions, said, strict=True)
    ]
    return says(figure, "Change of the near-zero share:", *parts)


@declare(NAME)
def near_zero_by_class(
    results: Seq[Result] | Result, conditions: Seq[str] | None = None, layer: int = 0
) -> go.Figure:
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
        known = at.transpose("prompt", "condition", "token_class")[:, :, there]
        series = [
            (name, mean_over_prompts(result, known.sel(condition=name)))
            for name in [BASELINE, *names]
        ]
        draw.side_by_side(
            figure, classes, series, COLOURS, column=column, apart=0.8 / len(series), **_POINTS
        )
        counts = at.sel(condition=BASELINE).notnull().sum("prompt").values[there]
        labels = [f"{label}<br>n = {count}" for label, count in zip(classes, counts, strict=True)]
        figure.update_xaxes(ticktext=labels, row=1, col=column)
    figure.update_yaxes(title_text="near-zero share", col=1)
    note = f"layer {layer}; n: prompts with such a token; bars: 95 % t intervals over prompts"
    draw.title(figure, "near-zero activations by class of token", note, 500, top=150)
    at = results[0][NAME].near_zero_by_token_class.sel(layer=layer)
    parts = []
    for kind in classes:
        known = {
            name: at.sel(condition=name, token_class=kind).dropna("prompt")
            for name in [BASELINE, *names[:1]]
        }
        parts.append(
            f"{kind}: {', '.join(f'{name} {mean_words(results[0], of)}' for name, of in known.items())}"
        )
    return says(figure, f"Near-zero share, {model_caption(results[0])}.", "; ".join(parts) + ".")


@declare(NAME, compares=True, report=[{}])
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
    results, names = _checked(results, conditions, layer)
    others = [name for name in names if name != condition]
    if not others:
        raise OptionError(
            f"there is no condition to compare with {condition!r}; run at least one more"
        )
    figure, series, said = draw.panels(), [], []
    for result in results:
        table = result.agreement(condition, others[0], controls=others[1:])
        made = table.loc[table.layer == layer, ["cosine", "cosine_low", "cosine_high"]].to_numpy()
        said += [
            f"cosine with {w} {number_words(Interval(*row))}"
            for w, row in zip(others, made, strict=True)
        ]
        series.append((model_caption(result), made.T))
    draw.side_by_side(figure, others, series, COLOURS[1:], **_POINTS)
    draw.rule(figure, y=0)
    figure.update_yaxes(title_text="cosine", range=[-1.05, 1.05])
    note = f"of changes from the baseline, layer {layer}, question tokens; {_n(results)}; bars: 95 % t intervals"
    draw.title(figure, f"agreement with “{condition}”", note, 460, top=130)
    return says(figure, "; ".join(said) + ".")


def _panels(results: Seq[Result], **options: Any) -> go.Figure:
    """One panel per model, side by side."""
    return draw.panels(
        [model_caption(r).replace(" (", "<br>(") for r in results],
        horizontal_spacing=0.06,
        **options,
    )


def _checked(
    results: Seq[Result] | Result, conditions: Seq[str] | None, layer: int
) -> tuple[list[Result], list[str]]:
    """The results as a list, and the conditions other than the baseline, which all results must have."""
    made = [results] if isinstance(results, Result) else list(results)
    if not made:
        raise OptionError("there are no results to show")
    names = [name for name in (conditions or made[0].conditions) if name != BASELINE]
    for result in made:
        check_layer(layer, result[NAME])
        for name in names:
            result.condition(name)
    if not names:
        why = "this figure shows changes from the baseline, but there is no other condition"
        raise OptionError(f"{why}; run at least one")
    return made, names


def _positive(values: np.ndarray) -> np.ndarray:
    """Replace zeros with NaN: an empty bin is a gap."""
    return np.where(values > 0, values, np.nan)


def _n(results: Seq[Result]) -> str:
    counts = sorted({result["sequences"].sizes["prompt"] for result in results})
    alike = {count_words(result) for result in results}
    return f"n = {alike.pop()}" if len(alike) == 1 else f"n = {', '.join(map(str, counts))} prompts"


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
    """Plot the distribution over tokens of each head's update magnitude or orientation, with a slider for the layer.

    The dotted line is 1 / heads for the magnitude and 0 (orthogonal to the residual stream) for the orientation. (R.
    Claus, figures 7 and 8. These show a head's whole update; reading="top_target" shows only the part from its
    strongest target, like the published ones.)

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
    bins = counts[f"{quantity}_bin"].values
    shown = slice(1, -1) if quantity == "magnitude" else slice(1, None)
    figure, heads = draw.panels(), counts.sizes["head"]
    for layer in counts.layer.values:
        here = counts.sel(layer=layer).transpose("head", ...)
        with np.errstate(invalid="ignore"):  # a head that adds nothing has no counts
            share = 100 * here.values / here.values.sum(-1, keepdims=True)
        x = _middles(bins)[shown]
        figure.add_heatmap(
            x=np.log10(x) if quantity == "magnitude" else x, y=here["head"].values, z=_positive(share[:, shown]),
            **_HEAT, colorbar=dict(title="% of<br>tokens"),
            customdata=np.broadcast_to(_ranges(bins)[shown], (heads, len(x))),
            hovertemplate=f"layer {layer}, head %{{y}}: {quantity} %{{customdata}}: %{{z:.1f}} %<extra></extra>",
        )  # fmt: skip
    uniform = np.log10(1 / heads) if quantity == "magnitude" else 0.0
    draw.rule(figure, **_RULE, x=uniform)
    figure.update_xaxes(
        title_text=_AXIS[quantity], **draw.reach(figure, "x", uniform, quantity == "magnitude")
    )
    figure.update_yaxes(title_text="head", **draw.steps(heads))
    return _finished(figure, result, condition, reading, f"{quantity} of head updates", counts, 480)


@declare(READINGS, report=[{}])
def update_map(result: Result, condition: str = BASELINE, reading: Reading = "mixed") -> go.Figure:
    """Plot orientation against magnitude of all heads' updates at all tokens, with a slider for the layer.

    Shares are of all updates; updates below 0.0001 or above 100 times the residual stream are outside the map. One
    with negative orientation reduces the residual stream, one with positive adds to it. (R. Claus, figure 9.)

    Args:
        result: A result with ``HeadUpdates`` (or ``TopTargetUpdates``).
        condition: The condition.
        reading: "mixed" or "top_target".

    Raises:
        OptionError: The quantity was not measured.
    """
    counts = _counts(result, "joint_counts", condition, reading)
    sizes, turns = counts.magnitude_bin.values, counts.orientation_bin.values
    figure = draw.panels()
    for layer in counts.layer.values:
        every = counts.sel(layer=layer).transpose("orientation_bin", "magnitude_bin").values
        z = every[1:, 1:-1]
        words = [
            [f"magnitude {m}, orientation {o}" for m in _ranges(sizes)[1:-1]]
            for o in _ranges(turns)[1:]
        ]
        figure.add_heatmap(
            x=np.log10(_middles(sizes)[1:-1]), y=_middles(turns)[1:],
            z=_positive(100 * z / max(1, every.sum())),
            **_HEAT, colorbar=dict(title="% of<br>updates"), customdata=words,
            hovertemplate=f"layer {layer}: %{{customdata}}: %{{z:.2f}} %<extra></extra>",
        )  # fmt: skip
    draw.rule(figure, **_RULE, y=0)
    uniform = np.log10(1 / int(result.provenance["model"]["heads"]))
    draw.rule(figure, **_RULE, x=uniform)
    figure.update_xaxes(title_text=_AXIS["magnitude"], **draw.reach(figure, "x", uniform, True))
    figure.update_yaxes(title_text=_AXIS["orientation"], **draw.reach(figure, "y", 0.0))
    return _finished(
        figure,
        result,
        condition,
        reading,
        "orientation against magnitude of head updates",
        counts,
        560,
    )


@declare(READINGS)
def update_by_position(
    result: Result, condition: str = BASELINE, reading: Reading = "mixed"
) -> go.Figure:
    """Plot the mean magnitude of every head's update by position, with a slider for the layer (R. Claus, figure 10).

    Positions are hidden if fewer than half of the prompts have them: late positions come only from long prompts.

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
    values, n = dataset[name], dataset[f"{name}_n"]
    prompts = result["sequences"].sizes["prompt"]
    texts = None
    if prompts == 1:
        first = result["sequences"].first_prompt_text.sel(condition=condition).values
        texts = [html.escape(str(text)).replace("\n", "⏎") for text in first]
    heads, figure = values.sizes["head"], draw.panels()
    bar = dict(title="head", **draw.steps(heads))
    for layer in values.layer.values:
        y = values.sel(layer=layer).transpose("head", "key").values
        many = n.sel(layer=layer).transpose("head", "key").values
        head, key = np.nonzero(np.isfinite(y) & (many >= prompts / 2))
        words = [
            f"head {h}, position {k}"
            + (f", n = {int(many[h, k])}" if texts is None else f" “{texts[k]}”")
            for h, k in zip(head, key, strict=True)
        ]
        figure.add_scattergl(
            x=key, y=y[head, key].astype(np.float32), mode="markers", text=words,
            marker=dict(size=4, color=head, colorscale=draw.SEQUENTIAL, colorbar=bar, opacity=0.7),
            hovertemplate=f"layer {layer}, %{{text}}: %{{y:.3f}}<extra></extra>", showlegend=False,
        )  # fmt: skip
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
    """The middle of each bin, on a log scale for magnitudes; the outermost bins are as wide as their neighbours."""
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
    """Set the title, a slider with one step per layer, and the sentence on the question's tokens."""
    note = f"{condition}; {count_words(result)}"
    note += "; only the part from the strongest target" if reading == "top_target" else ""
    if f"{_prefix(reading)}magnitude{BEFORE_NORM}" in result[READINGS[reading]]:
        note += "; after the norm that follows attention"
    layers, title = values.layer.values.tolist(), f"{model_caption(result)}: {what}"
    draw.by_layer_slider(
        figure, layers, lambda layer: f"{title}<br><sup>layer {layer}; {note}</sup>", height
    )
    dataset, prefix = _dataset(result, reading, condition).sel(segment="question"), _prefix(reading)
    size, turn = (
        mean_words(result, dataset[f"{prefix}{name}"]) for name in ("magnitude", "orientation")
    )
    means = f"magnitude {size} of the residual stream's norm, cosine with it {turn}"
    return says(figure, f"Question tokens, mean over layers and heads: {means}.")
