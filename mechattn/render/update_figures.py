"""Figures of head updates: magnitude, orientation and position, with a slider for the layer."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mechattn.axes import BASELINE
from mechattn.contrast.means import summed
from mechattn.contrast.quantities import check_condition
from mechattn.errors import OptionError
from mechattn.render import draw
from mechattn.render.declared import figure as declare
from mechattn.render.draw import WITH
from mechattn.render.words import count_words, mean_words, model_caption, says
from mechattn.results.result import Result

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import xarray as xr

Reading = Literal["mixed", "top_target"]
READINGS = {"mixed": "head_updates", "top_target": "top_target_updates"}
_AXIS = {"magnitude": "‖update‖ / ‖residual stream‖", "orientation": "cosine of update and residual stream"}
_DECADES: dict[str, Any] = {"tickvals": list(range(-4, 3)), "ticktext": [f"{10.0**t:g}" for t in range(-4, 3)]}
_HEAT: dict[str, Any] = {
    "colorscale": [[0, "#ffffff"], [0.02, "#dbe9f6"], [0.25, "#6aaed6"], [1, "#08306b"]],
    "zmin": 0,
}
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
            x=np.log10(x) if quantity == "magnitude" else x, y=here["head"].values, z=share[:, shown],
            **_HEAT, colorbar=dict(title="% of<br>tokens"),
            customdata=np.broadcast_to(_ranges(bins)[shown], (heads, len(x))),
            hovertemplate=f"layer {layer}, head %{{y}}: {quantity} %{{customdata}}: %{{z:.1f}} %<extra></extra>",
        )  # fmt: skip
    draw.rule(figure, **_RULE, x=np.log10(1 / heads) if quantity == "magnitude" else 0)
    figure.update_xaxes(title_text=_AXIS[quantity], **(_DECADES if quantity == "magnitude" else {}))
    figure.update_yaxes(title_text="head", dtick=max(1, heads // 16))
    return _finished(figure, result, condition, reading, f"{quantity} of head updates", counts, 480)


@declare(READINGS, report=[{}])
def update_map(result: Result, condition: str = BASELINE, reading: Reading = "mixed") -> go.Figure:
    """Plot orientation against magnitude of all heads' updates at all tokens, with a slider for the layer.

    Shares are of all updates; updates below 0.0001 or above 100 times the residual stream are outside the map. An
    update with negative orientation reduces the residual stream, one with positive orientation adds to it. (R. Claus,
    figure 9.)

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
        words = [[f"magnitude {m}, orientation {o}" for m in _ranges(sizes)[1:-1]] for o in _ranges(turns)[1:]]
        figure.add_heatmap(
            x=np.log10(_middles(sizes)[1:-1]), y=_middles(turns)[1:],
            z=np.where(z > 0, 100 * z / max(1, every.sum()), np.nan),
            **_HEAT, colorbar=dict(title="% of<br>updates"), customdata=words,
            hovertemplate=f"layer {layer}: %{{customdata}}: %{{z:.2f}} %<extra></extra>",
        )  # fmt: skip
    draw.rule(figure, **_RULE, y=0)
    draw.rule(figure, **_RULE, x=np.log10(1 / int(result.provenance["model"]["heads"])))
    figure.update_xaxes(title_text=_AXIS["magnitude"], **_DECADES)
    figure.update_yaxes(title_text=_AXIS["orientation"])
    return _finished(figure, result, condition, reading, "orientation against magnitude of head updates", counts, 560)


@declare(READINGS)
def update_by_position(result: Result, condition: str = BASELINE, reading: Reading = "mixed") -> go.Figure:
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
        raise OptionError("the updates of single tokens were not kept: measure HeadUpdates(per_query=True)")
    values, n = dataset[name], dataset[f"{name}_n"]
    prompts = result["sequences"].sizes["prompt"]
    texts = None
    if prompts == 1:
        first = result["sequences"].first_prompt_text.sel(condition=condition).values
        texts = [html.escape(str(text)).replace("\n", "⏎") for text in first]
    heads, figure = values.sizes["head"], draw.panels()
    for layer in values.layer.values:
        y = values.sel(layer=layer).transpose("head", "key").values
        many = n.sel(layer=layer).transpose("head", "key").values
        head, key = np.nonzero(np.isfinite(y) & (many >= prompts / 2))
        words = [
            f"head {h}, position {k}" + (f", n = {int(many[h, k])}" if texts is None else f" “{texts[k]}”")
            for h, k in zip(head, key, strict=True)
        ]
        figure.add_scattergl(
            x=key, y=y[head, key].astype(np.float32), mode="markers", text=words,
            marker=dict(size=4, color=head, colorscale="Viridis", colorbar=dict(title="head"), opacity=0.7),
            hovertemplate=f"layer {layer}, %{{text}}: %{{y:.3f}}<extra></extra>", showlegend=False,
        )  # fmt: skip
    draw.rule(figure, **_RULE, y=1 / heads)
    figure.update_xaxes(title_text="position")
    figure.update_yaxes(title_text=_AXIS["magnitude"], type="log")
    return _finished(figure, result, condition, reading, "head updates by position", values, 500)


def _prefix(reading: str) -> str:
    return "top_target_" if reading == "top_target" else ""


def _dataset(result: Result, reading: str, condition: str) -> xr.Dataset:
    """The updates of a condition."""
    if reading not in READINGS:
        raise OptionError(f'reading={reading!r}: choose "mixed" or "top_target"')
    check_condition(result, condition)
    name = READINGS[reading]
    if name not in result.datasets:
        analysis = name.title().replace("_", "")
        raise OptionError(f"this result has no {name}; run it with analyses=[{analysis}(), …]")
    return result[name].sel(condition=condition)


def _counts(result: Result, name: str, condition: str, reading: str) -> xr.DataArray:
    """Counts summed over prompts."""
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
    """Each bin in words."""
    ends = [*edges[1:], np.inf]
    return np.array([f"{a:.3g} to {b:.3g}" for a, b in zip(edges, ends, strict=True)])


def _finished(
    figure: go.Figure, result: Result, condition: str, reading: str, what: str, values: xr.DataArray, height: int
) -> go.Figure:
    """Set the title, a slider with one step per layer, and the sentence on the question's tokens."""
    note = f"{condition}; {count_words(result)}"
    note += "; only the part from the strongest target" if reading == "top_target" else ""
    title = f"{model_caption(result)}: {what}"

    def words(layer: int) -> str:
        return f"{title}<br><sup>layer {layer}; {note}</sup>"

    draw.by_layer_slider(figure, values.layer.values.tolist(), words, height)
    dataset, prefix = _dataset(result, reading, condition).sel(segment="question"), _prefix(reading)
    size, turn = (mean_words(result, dataset[f"{prefix}{name}"]) for name in ("magnitude", "orientation"))
    return says(
        figure,
        f"Question tokens, mean over layers and heads: magnitude {size} of the residual stream's norm, cosine with it "
        f"{turn}.",
    )
