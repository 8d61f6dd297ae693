"""Values to compare with published ones: each is a function of a result, and gives one float64
number per prompt.

A value whose unit is "change" is a log-ratio. It is converted to percent after its mean and
interval have been computed.

Each function of ``FUNCTIONS`` takes a result and the selection of a statement: quantities, layers,
a condition and the reference, which is the condition that it is compared with. It returns a value
for each prompt [prompt], and raises ``NotMeasurable`` if the model or the prompts do not have it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr
from jaxtyping import Float
from pydantic import Field
from scipy import stats

from mechattn.axes import BASELINE, SEGMENTS
from mechattn.errors import MechattnError
from mechattn.results.result import Result
from mechattn.toml_sections import Section

PEAKS = 0.1  # the share of the question's tokens that are a head's peaks
QUERIES_AFTER = 8  # the original tokens that must follow a key, as a mean over fewer is noisy
LARGE = 0.1  # the largest share of the reference's activations that count as large
FROM_LAYER = 4  # the blog is about layers 4 and later

PerPrompt = Float[np.ndarray, " prompt"]


class NotMeasurable(MechattnError):
    """A value does not exist for this model or these prompts."""


class ValueSelection(Section):
    """What a value is computed from: quantities by their names in ``ma.run``, conditions and
    layers."""

    quantities: list[str] = Field([])
    condition: str = "slash"
    to: str = BASELINE  # the reference
    layers: list[int] = Field([0])
    less_layers: list[int] = Field([])  # the value in these layers is subtracted

    def in_layers(self, layers: list[int]) -> ValueSelection:
        """The same selection in other layers, without layers to subtract."""
        return self.model_copy(update={"layers": layers, "less_layers": []})


def change(result: Result, selection: ValueSelection) -> PerPrompt:
    """Log-ratio of a quantity of the question between the condition and the reference.

    ``mean over layers of log(mean over heads in the condition / that in the reference)``
    """
    return log_ratio(*of_question(result, selection)).mean(1)


def layers_falling(result: Result, selection: ValueSelection) -> PerPrompt:
    """Share of all measured layers in which a quantity of the question is smaller in the condition
    than in the reference."""
    layers = layers_of(result, selection.quantities[0])
    values, reference = of_question(result, selection.in_layers(layers))
    is_falling = values < reference
    return is_falling.mean(1)


def inserted_beside_question(result: Result, selection: ValueSelection) -> PerPrompt:
    """Log-ratio of what an inserted token receives to what a token of the question receives."""
    received_by_inserted = of_segment(result, selection, selection.condition, "inserted")
    received_by_question = of_segment(result, selection, selection.condition, "question")
    return log_ratio(received_by_inserted, received_by_question).mean(1)


def level(result: Result, selection: ValueSelection) -> PerPrompt:
    """A quantity in the condition, as the mean over heads and layers."""
    return of_segment(result, selection, selection.condition).mean(1)


def affine_share(result: Result, selection: ValueSelection) -> PerPrompt:
    """``1 − |re-routing + new values|``: how much of the change of outputs is dilution and shift.

    The four parts are ``⟨part, change⟩ / ‖change‖²`` and add up to 1. The value is the mean over
    heads and layers.
    """
    rerouting, new_values = [
        selected(result, name, selection, selection.condition) for name in selection.quantities
    ]
    rest = (rerouting + new_values).sel(segment="question")

    share = 1 - abs(rest)
    return share.mean(("layer", "head")).values


def change_at_peaks(result: Result, selection: ValueSelection) -> PerPrompt:
    """Log-ratio of what the peaks of the question receive, as the mean over peaks and heads.

    A head's peaks are the tenth of the question's tokens with the largest geometric mean over the
    condition and the reference. Peaks of one of them alone would be lower in the other without any
    effect.
    """
    changes = []
    for curve, reference in both_curves(result, selection):
        _, token_count = curve.shape
        count = max(1, round(PEAKS * token_count))

        # The product has the same order as the geometric mean.
        largest_first = np.argsort(-curve * reference, axis=1, kind="stable")
        peaks = largest_first[:, :count]

        log_changes = log_ratio(curve, reference)
        at_peaks = np.take_along_axis(log_changes, peaks, axis=1)
        changes.append(at_peaks.mean())
    return np.array(changes)


def peak_moved(result: Result, selection: ValueSelection) -> PerPrompt:
    """Share of a layer's heads whose most attended token of the question differs between the
    condition and the reference."""
    shares = []
    for curve, reference in both_curves(result, selection):
        is_moved = curve.argmax(1) != reference.argmax(1)
        shares.append(is_moved.mean())
    return np.array(shares)


def band_width(result: Result, selection: ValueSelection) -> PerPrompt:
    """Log-ratio of a prompt's distance from the mean of all prompts.

    The distance is the mean over heads and over those positions of the question that every prompt
    has.
    """
    curves, references = zip(*both_curves(result, selection), strict=True)
    return log_ratio(_distances_from_mean(curves), _distances_from_mean(references))


def evenness_apart(result: Result, selection: ValueSelection) -> PerPrompt:
    """How evenly the inserted tokens receive attention, minus the same in the reference.

    Evenness is ``exp(−Σ p log p) / n`` over n inserted tokens, where p is the share of each in what
    all of them receive; the value is the mean over heads.
    """
    evenness = {}
    for condition in (selection.condition, selection.to):
        received = selected(result, f"{selection.quantities[0]}_per_prompt", selection, condition)
        is_inserted = segment_mask(result, condition, "inserted")
        received_by_key = received.isel(layer=0).transpose("prompt", "head", "key").values
        received_if_inserted = np.where(is_inserted[:, None], received_by_key, 0.0)
        # ``entropy`` divides each head's row by its sum, and takes 0 · log 0 as 0.
        entropy = stats.entropy(received_if_inserted, axis=2)
        token_count = is_inserted.sum(1)
        evenness[condition] = np.exp(entropy).mean(1) / token_count
    return evenness[selection.condition] - evenness[selection.to]


def change_of_large(result: Result, selection: ValueSelection) -> PerPrompt:
    """Log-ratio of the share of large activations.

    Activations are large if their absolute value reaches the smallest edge of the histogram that at
    most a tenth of the reference's activations reach, over all prompts.
    """
    values, reference = of_question(result, selection)
    mean_reference = reference.mean((0, 1))

    # The edges of the histogram's bins, from −∞ to ∞.
    lower_edges = dataset_with(result, selection.quantities[0]).bin.values.astype(np.float64)
    upper_edges = np.append(lower_edges[1:], np.inf)
    bounds = sorted({abs(edge) for edge in lower_edges[1:]})

    for bound in bounds:
        is_large = (lower_edges >= bound) | (upper_edges <= -bound)
        if mean_reference[is_large].sum() <= LARGE:
            large_share = values[..., is_large].sum(2)
            return log_ratio(large_share, reference[..., is_large].sum(2)).mean(1)
    raise NotMeasurable(
        f"more than {LARGE:.0%} of the activations lie beyond the histogram's last edge"
    )


def classes_beside_other(result: Result, selection: ValueSelection) -> PerPrompt:
    """Log-ratio of a share at digits, operators and conjunctions to that at other tokens.

    The first is the mean over those of the three classes that the question has.
    """
    shares = selected(result, selection.quantities[0], selection, selection.condition).isel(layer=0)
    share_at_others = shares.sel(token_class="other").values
    share_at_classes = shares.drop_sel(token_class="other").mean("token_class").values
    return log_ratio(share_at_classes, share_at_others)


def updates_at_first(result: Result, selection: ValueSelection) -> PerPrompt:
    """‖update‖ / ‖resid_pre‖ at queries whose strongest target is the first token, divided by its
    mean at all queries.

    Both are means over all heads and all queries but the first, which sees only itself. The value
    is the mean over layers from 4 on.
    """
    measured_layers = layers_of(result, selection.quantities[0])
    layers = [layer for layer in measured_layers if layer >= FROM_LAYER]
    if not layers:
        raise NotMeasurable(f"the model has no layer {FROM_LAYER} or later")
    in_later_layers = selection.in_layers(layers)

    # The statement names the strongest target of a query, then the size of its update.
    target, size = [
        selected(result, f"{name}_per_prompt", in_later_layers, selection.condition).isel(
            key=slice(1, None)
        )
        for name in selection.quantities
    ]

    is_first = target == 0
    at_first = size.where(is_first).mean(("head", "key"))
    ratio = at_first / size.mean(("head", "key"))
    if ratio.isnull().any():
        raise NotMeasurable("in some layer no head looks at the first token most of all")
    return ratio.mean("layer").values


FUNCTIONS = {
    function.__name__: function
    for function in (
        change,
        layers_falling,
        inserted_beside_question,
        level,
        affine_share,
        change_at_peaks,
        peak_moved,
        band_width,
        evenness_apart,
        change_of_large,
        classes_beside_other,
        updates_at_first,
    )
}
# "change" is a log-ratio, "share" lies between 0 and 1, "points" are differences of shares.
UNITS = {
    **dict.fromkeys(FUNCTIONS, "change"),
    "layers_falling": "share",
    "level": "share",
    "affine_share": "share",
    "peak_moved": "share",
    "updates_at_first": "share",
    "evenness_apart": "points",
    "accuracy": "points",  # of answers, not of a result
}


def value_of(result: Result, function: str, selection: ValueSelection) -> PerPrompt:
    """One number per prompt, minus that in ``less_layers`` if there are any.

    Args:
        result: The result of the run that the statement names.
        function: The name of a function in ``FUNCTIONS``.
        selection: What the value is computed from.

    Raises:
        NotMeasurable: The value does not exist for this model or these prompts.
    """
    measure = FUNCTIONS[function]
    values = measure(result, selection)
    if selection.less_layers:
        in_other_layers = selection.in_layers(selection.less_layers)
        values = values - measure(result, in_other_layers)

    if not np.isfinite(values).all():
        raise NotMeasurable("it is undefined in some prompt")
    return values


def dataset_with(result: Result, name: str) -> xr.Dataset:
    """The dataset of a result that holds a quantity.

    Raises:
        NotMeasurable: No dataset holds it.
    """
    for dataset in result.datasets.values():
        if name in dataset or f"{name}_per_prompt" in dataset:
            return dataset
    raise NotMeasurable(f"the model has no {name}")


def layers_of(result: Result, name: str) -> list[int]:
    """The layers in which a quantity was measured."""
    return dataset_with(result, name).layer.values.tolist()


def selected(result: Result, name: str, selection: ValueSelection, condition: str) -> xr.DataArray:
    """A quantity in a condition and in the layers of the selection, in float64.

    Raises:
        NotMeasurable: The result lacks the quantity, a layer or the condition.
    """
    dataset = dataset_with(result, name)
    for layer in selection.layers:
        if layer not in dataset.layer.values:
            raise NotMeasurable(f"the model has no layer {layer} with {name}")
    if condition not in result.conditions:
        raise NotMeasurable(f"the model cannot be run under {condition!r}")
    return dataset[name].sel(condition=condition, layer=selection.layers).astype(np.float64)


def of_question(
    result: Result, selection: ValueSelection
) -> tuple[Float[np.ndarray, "prompt layer *rest"], Float[np.ndarray, "prompt layer *rest"]]:
    """The quantity of the question in the condition and in the reference, as means over heads."""
    values = of_segment(result, selection, selection.condition)
    reference = of_segment(result, selection, selection.to)
    return values, reference


def of_segment(
    result: Result, selection: ValueSelection, condition: str, segment: str = "question"
) -> Float[np.ndarray, "prompt layer *rest"]:
    """The quantity of a segment, as the mean over heads.

    Args:
        result: The result of a run.
        selection: The quantity and the layers.
        condition: The condition.
        segment: The segment; ignored if the quantity is not measured by segment.
    """
    values = selected(result, selection.quantities[0], selection, condition)
    if "segment" in values.dims:
        values = values.sel(segment=segment)
    if "head" in values.dims:
        values = values.mean("head")
    return values.transpose("prompt", "layer", ...).values


def both_curves(result: Result, selection: ValueSelection) -> list[tuple[np.ndarray, np.ndarray]]:
    """What each token of the question receives in the first selected layer, for each prompt: the
    curves [head, key] of the condition and the reference.

    The last eight original tokens are left out, since too few queries follow them.

    Raises:
        NotMeasurable: A prompt has too few tokens.
    """
    name = f"{selection.quantities[0]}_by_origin_per_prompt"
    in_condition, in_reference = [
        selected(result, name, selection, condition).isel(layer=0).transpose("prompt", "head", ...)
        for condition in (selection.condition, selection.to)
    ]

    origins = result["sequences"].origin.sel(condition=BASELINE).values
    ends = (origins >= 0).sum(1) - QUERIES_AFTER
    has_queries = np.arange(origins.shape[1]) < ends[:, None]
    key_masks = has_queries & segment_mask(result, BASELINE, "question")

    curves = []
    for prompt, key_mask in enumerate(key_masks):
        keys = np.flatnonzero(key_mask)
        if not len(keys):
            raise NotMeasurable(f"prompt {prompt} has too few tokens")
        curve = in_condition.values[prompt][:, keys]
        reference = in_reference.values[prompt][:, keys]
        curves.append((curve, reference))
    return curves


def segment_mask(result: Result, condition: str, segment: str) -> np.ndarray:
    """Which positions belong to a segment [prompt, pos]."""
    segments = result["sequences"].segment_index.sel(condition=condition)
    return segments.values == SEGMENTS.index(segment)


def log_ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """``log(numerator / denominator)``.

    Raises:
        NotMeasurable: One of them is 0 or undefined, so there is no ratio.
    """
    if not (np.minimum(numerator, denominator) > 0).all():  # also refuses NaN
        raise NotMeasurable(
            "in some prompt one of the two numbers is undefined or is 0, so there is no ratio"
        )
    return np.log(numerator / denominator)


def _distances_from_mean(curves: Sequence[np.ndarray]) -> PerPrompt:
    """The mean distance of each prompt's curve [head, key] from the mean curve of all prompts."""
    # Questions differ in length, and a mean over prompts needs the same positions of each.
    shortest = min(curve.shape[1] for curve in curves)
    aligned_curves = np.stack([curve[:, :shortest] for curve in curves])
    return abs(aligned_curves - aligned_curves.mean(0)).mean((1, 2))
