"""Values beside published ones: each is a function of a result, and gives one float64 number a
prompt.

A value whose unit is "change" is a log-ratio; it is written in percent once its mean and interval
are taken.

Each function of ``FUNCTIONS`` takes a result and what the statement asks of it: quantities, layers,
a condition and the one that it is compared with. It returns a value for each prompt [prompt], and
raises ``NotMeasurable`` where the model or the prompts have no such value.
"""

from __future__ import annotations

import numpy as np
import xarray as xr
from jaxtyping import Float
from pydantic import Field
from scipy import stats

from mechattn.axes import BASELINE, SEGMENTS
from mechattn.errors import MechattnError
from mechattn.results.result import Result
from mechattn.toml_sections import Section

PEAKS = 0.1  # share of the question's tokens that are a head's peaks
QUERIES_AFTER = 8  # original tokens after a peak, at least: a mean over one or two is hardly one
LARGE = 0.1  # share of the baseline's activations that are large
FROM_LAYER = 4  # the blog speaks of layers 4 and later

PerPrompt = Float[np.ndarray, " prompt"]


class NotMeasurable(MechattnError):
    """A model, or these prompts, do not have what a value is about."""


class Selection(Section):
    """What a value is about: quantities by the names of ``ma.run``, conditions and layers."""

    quantities: list[str] = Field([])
    condition: str = "slash"
    to: str = BASELINE
    layers: list[int] = Field([0])
    less_layers: list[int] = Field([])  # the same of these layers is subtracted

    def in_layers(self, layers: list[int]) -> Selection:
        """The same in other layers, of which nothing is subtracted."""
        return self.model_copy(update={"layers": layers, "less_layers": []})


def change(result: Result, selection: Selection) -> PerPrompt:
    """Log-ratio of what the question has under two conditions; mean over heads, then over
    layers.

    ``mean over layers of log(mean under condition / mean under to)``
    """
    return log_ratio(*after_and_before(result, selection)).mean(1)


def layers_falling(result: Result, selection: Selection) -> PerPrompt:
    """Share of all measured layers in which the question has less than under the other
    condition."""
    layers = measured_layers(result, selection.quantities[0])
    after, before = after_and_before(result, selection.in_layers(layers))
    is_falling = after < before
    return is_falling.mean(1)


def inserted_beside_question(result: Result, selection: Selection) -> PerPrompt:
    """Log-ratio of what an inserted token receives to what a token of the question does."""
    inserted = of_segment(result, selection, selection.condition, "inserted")
    question = of_segment(result, selection, selection.condition, "question")
    return log_ratio(inserted, question).mean(1)


def level(result: Result, selection: Selection) -> PerPrompt:
    """A quantity under one condition, mean over heads and layers."""
    return of_segment(result, selection, selection.condition).mean(1)


def affine_share(result: Result, selection: Selection) -> PerPrompt:
    """Share of the change of outputs that is dilution and shift: 1 − |re-routing + new values|.

    The four parts are ``⟨part, change⟩ / ‖change‖²`` and add up to 1. Mean over heads and layers.
    """
    rerouting, new_values = [
        selected(result, name, selection, selection.condition) for name in selection.quantities
    ]
    rest = (rerouting + new_values).sel(segment="question")

    share = 1 - abs(rest)
    return share.mean(("layer", "head")).values


def change_at_peaks(result: Result, selection: Selection) -> PerPrompt:
    """Log-ratio of what the peaks of the question receive; mean over heads.

    A head's peaks are the tenth of the question's tokens with the largest geometric mean of both
    conditions: peaks of one condition alone would fall in the other without any effect.
    """
    changes = []
    for after, before in both_curves(result, selection):
        _, token_count = after.shape
        count = max(1, round(PEAKS * token_count))

        order = np.argsort(-after * before, axis=1, kind="stable")
        peaks = order[:, :count]

        log_changes = log_ratio(after, before)
        at_peaks = np.take_along_axis(log_changes, peaks, axis=1)
        changes.append(at_peaks.mean())
    return np.array(changes)


def peak_moved(result: Result, selection: Selection) -> PerPrompt:
    """Share of a layer's heads whose most attended token of the question is another one."""
    moved = []
    for after, before in both_curves(result, selection):
        is_moved = after.argmax(1) != before.argmax(1)
        moved.append(is_moved.mean())
    return np.array(moved)


def band_width(result: Result, selection: Selection) -> PerPrompt:
    """Log-ratio of a prompt's mean distance from the mean of all prompts, over heads and places of
    the question."""
    distances = []
    for curves in zip(*both_curves(result, selection), strict=True):
        # Questions differ in length; a mean needs the same places of each.
        shortest = min(curve.shape[1] for curve in curves)
        aligned = np.stack([curve[:, :shortest] for curve in curves])

        from_mean = abs(aligned - aligned.mean(0))
        distances.append(from_mean.mean((1, 2)))

    after, before = distances
    return log_ratio(after, before)


def evenness_apart(result: Result, selection: Selection) -> PerPrompt:
    """How evenly the inserted tokens receive attention, less the same under the other condition;
    mean over heads.

    ``exp(−Σ p log p) / n`` over n inserted tokens, with p the share of each in what all of them
    receive.
    """
    evenness = {}
    for condition in (selection.condition, selection.to):
        received = selected(result, f"{selection.quantities[0]}_per_prompt", selection, condition)
        inserted = in_segment(result, condition, "inserted")

        received_by_key = received.isel(layer=0).transpose("prompt", "head", "key").values
        # The entropy of each head's shares: they are made to sum to 1, and 0 · log 0 is 0.
        entropy = stats.entropy(np.where(inserted[:, None], received_by_key, 0.0), axis=2)
        even_tokens = np.exp(entropy).mean(1)
        evenness[condition] = even_tokens / inserted.sum(1)
    return evenness[selection.condition] - evenness[selection.to]


def change_of_large(result: Result, selection: Selection) -> PerPrompt:
    """Log-ratio of the share of large activations: beyond the bound that a tenth of the baseline's
    exceed."""
    after, before = after_and_before(result, selection)
    mean_before = before.mean((0, 1))

    # The edges of the histogram's bins, from −∞ to ∞.
    left = dataset_with(result, selection.quantities[0]).bin.values.astype(np.float64)
    right = np.append(left[1:], np.inf)
    bounds = sorted({abs(edge) for edge in left[1:]})

    for bound in bounds:
        beyond = (left >= bound) | (right <= -bound)
        if mean_before[beyond].sum() <= LARGE:
            return log_ratio(after[..., beyond].sum(2), before[..., beyond].sum(2)).mean(1)
    raise NotMeasurable("more than a tenth of the activations lie beyond the histogram's last bin")


def classes_beside_other(result: Result, selection: Selection) -> PerPrompt:
    """Log-ratio of a share at digits, operators and conjunctions (mean of those there) to that at
    other tokens."""
    shares = selected(result, selection.quantities[0], selection, selection.condition).isel(layer=0)
    other = shares.sel(token_class="other").values
    classes = shares.drop_sel(token_class="other").mean("token_class").values
    return log_ratio(classes, other)


def updates_at_first(result: Result, selection: Selection) -> PerPrompt:
    """‖update‖ / ‖hidden state‖ where the strongest target is the first token, over the mean of its
    layer.

    Over all heads and all tokens after the first, which sees no other; mean over layers from 4 on.
    """
    layers = measured_layers(result, selection.quantities[0])[FROM_LAYER:]
    if not layers:
        raise NotMeasurable(f"the model has no layer {FROM_LAYER}")
    later = selection.in_layers(layers)

    by_token = []
    for name in selection.quantities:
        values = selected(result, f"{name}_per_prompt", later, selection.condition)
        by_token.append(values.isel(key=slice(1, None)))
    target, size = by_token

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


def value_of(result: Result, function: str, selection: Selection) -> PerPrompt:
    """One number a prompt; less that of other layers, where there are some to subtract.

    Args:
        result: The result of the run that the statement names.
        function: The name of a function in ``FUNCTIONS``.
        selection: What the value is about.

    Raises:
        NotMeasurable: The model, or these prompts, do not have it.
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
        NotMeasurable: None does.
    """
    for dataset in result.datasets.values():
        if name in dataset or f"{name}_per_prompt" in dataset:
            return dataset
    raise NotMeasurable(f"the model has no {name}")


def measured_layers(result: Result, name: str) -> list[int]:
    """The layers in which a quantity was measured."""
    return dataset_with(result, name).layer.values.tolist()


def selected(result: Result, name: str, selection: Selection, condition: str) -> xr.DataArray:
    """A quantity under a condition in the layers that are asked for, in float64.

    Raises:
        NotMeasurable: The result lacks the quantity, a layer or the condition.
    """
    dataset = dataset_with(result, name)
    for layer in selection.layers:
        if layer not in dataset.layer.values:
            raise NotMeasurable(f"the model has no layer {layer}")
    if condition not in result.conditions:
        raise NotMeasurable(f"the model cannot be run under {condition!r}")
    return dataset[name].sel(condition=condition, layer=selection.layers).astype(np.float64)


def after_and_before(
    result: Result, selection: Selection
) -> tuple[Float[np.ndarray, "prompt layer *rest"], Float[np.ndarray, "prompt layer *rest"]]:
    """What the question has under the condition, and under that it is compared with."""
    after = of_segment(result, selection, selection.condition)
    before = of_segment(result, selection, selection.to)
    return after, before


def of_segment(
    result: Result, selection: Selection, condition: str, segment: str = "question"
) -> Float[np.ndarray, "prompt layer *rest"]:
    """The quantity of a segment, mean over heads.

    Args:
        result: The result of a run.
        selection: Which quantity, and in which layers.
        condition: The condition.
        segment: The segment, where the quantity is measured by segment.
    """
    values = selected(result, selection.quantities[0], selection, condition)
    if "segment" in values.dims:
        values = values.sel(segment=segment)
    if "head" in values.dims:
        values = values.mean("head")
    return values.transpose("prompt", "layer", ...).values


def both_curves(result: Result, selection: Selection) -> list[tuple[np.ndarray, np.ndarray]]:
    """What each token of the question receives in a layer under both conditions, [head, key], for
    each prompt.

    Without the last eight original tokens, which hardly any token follows.

    Raises:
        NotMeasurable: Some prompt has too few tokens.
    """
    name = f"{selection.quantities[0]}_by_origin_per_prompt"
    received = []
    for condition in (selection.condition, selection.to):
        values = selected(result, name, selection, condition).isel(layer=0)
        received.append(values.transpose("prompt", "head", ...))
    after, before = received

    origins = result["sequences"].origin.sel(condition=BASELINE).values
    last = (origins >= 0).sum(1) - QUERIES_AFTER
    is_read = np.arange(origins.shape[1]) < last[:, None]

    curves = []
    for prompt, is_key in enumerate(is_read & in_segment(result, BASELINE, "question")):
        keys = np.flatnonzero(is_key)
        if not len(keys):
            raise NotMeasurable(f"prompt {prompt} has too few tokens")
        curves.append((after.values[prompt][:, keys], before.values[prompt][:, keys]))
    return curves


def in_segment(result: Result, condition: str, segment: str) -> np.ndarray:
    """Which positions hold a segment [prompt, pos]."""
    segments = result["sequences"].segment_index.sel(condition=condition)
    return segments.values == SEGMENTS.index(segment)


def log_ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """``log(above / below)``.

    Raises:
        NotMeasurable: One of them is 0 or undefined, so there is no ratio.
    """
    if not ((above > 0).all() and (below > 0).all()):
        raise NotMeasurable("in some prompt one of the two numbers is 0, so there is no ratio")
    return np.log(above / below)
