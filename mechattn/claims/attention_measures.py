"""Per-prompt measures of attention and its output from a result, by layer."""

from __future__ import annotations

from math import ceil

import numpy as np
from scipy.stats import rankdata

from mechattn.axes import BASELINE, SEGMENTS
from mechattn.errors import OptionError
from mechattn.results.result import Result

_PEAKS = 0.1  # of the question's tokens
_EARLY = 1 / 6  # of the layers: 0 to 3 of 24
_SINK = 0.1  # of a head's attention
_QUERIES = 8  # after a key, at least: what one or two pay to it is hardly a mean


class NotApplicable(OptionError):
    """A model has not got what a claim is about."""


def fall(result: Result, condition: str, to: str = BASELINE) -> np.ndarray:
    """Log-ratio of what the question receives in layer 0, mean over heads [prompt]."""
    return _log_ratio(_received(result, condition)[:, 0], _received(result, to)[:, 0])


def fall_beyond_uniform(result: Result, condition: str, to: str = BASELINE) -> np.ndarray:
    """The same less that under uniform attention [prompt]."""
    return _beyond_uniform(result, condition, to)[:, 0]


def deeper(result: Result, condition: str, to: str = BASELINE) -> np.ndarray:
    """The same in layers 1 and 2, less layer 0 [prompt]."""
    beyond = _beyond_uniform(result, condition, to)
    if beyond.shape[1] < 2:
        raise NotApplicable("the model has one layer")
    return beyond[:, 1:3].mean(1) - beyond[:, 0]


def peaks(result: Result, condition: str, to: str = BASELINE) -> np.ndarray:
    """Log-ratio at the peaks less that elsewhere in the question, beyond uniform attention, layer 0 [prompt].

    The peaks of a head and prompt are the tenth of the keys with the largest geometric mean of both conditions, among
    those that eight original tokens or more come after.
    """
    data = result["received_attention"].isel(layer=0)
    question = result["sequences"].segment_index.sel(condition=BASELINE).values == SEGMENTS.index("question")
    ours, theirs = (data.received_by_origin_per_prompt.sel(condition=c).values for c in (condition, to))
    null, their_null = (data.received_uniform_by_origin_per_prompt.sel(condition=c).values for c in (condition, to))
    lengths = (result["sequences"].origin.sel(condition=BASELINE).values >= 0).sum(-1)
    found = []
    for prompt, length in enumerate(lengths):
        keys = np.flatnonzero(question[prompt, : max(0, length - _QUERIES)])
        one, other = ours[prompt][:, keys].astype(np.float64), theirs[prompt][:, keys].astype(np.float64)
        expected = np.log(null[prompt, keys] / their_null[prompt, keys])
        there = np.isfinite(expected) & (one > 0).all(0) & (other > 0).all(0)
        found.append(_at_peaks(np.log(one[:, there]), np.log(other[:, there]), expected[there]))
    return np.array(found)


def _at_peaks(one: np.ndarray, other: np.ndarray, expected: np.ndarray) -> float:
    """Of the logarithms of two conditions [head, key]."""
    count = max(1, round(_PEAKS * one.shape[1]))
    if one.shape[1] <= count:
        return float("nan")
    high = np.argsort(np.argsort(-(one + other), axis=1, kind="stable"), axis=1) < count
    beyond = one - other - expected
    means = [np.where(some, beyond, 0.0).sum(1) / some.sum(1) for some in (high, ~high)]
    return float((means[0] - means[1]).mean())


def evenness(result: Result, condition: str) -> np.ndarray:
    """Effective number of inserted tokens by what they receive in layer 0, over their number; mean over heads."""
    data = result["received_attention"].isel(layer=0).received_per_prompt.sel(condition=condition).values
    inserted = result["sequences"].origin.sel(condition=condition).values == -1
    found = []
    for prompt, mask in zip(data, inserted, strict=True):
        received = prompt[:, np.flatnonzero(mask)].astype(np.float64)
        share = received / received.sum(1, keepdims=True)
        entropy = -(share * np.log(np.where(share > 0, share, 1.0))).sum(1)
        found.append((np.exp(entropy) / share.shape[1]).mean())
    return np.array(found)


def evenness_apart(result: Result, one: str, other: str) -> np.ndarray:
    """Evenness in a condition less that in another [prompt]."""
    return evenness(result, one) - evenness(result, other)


def affine_first(result: Result, condition: str) -> np.ndarray:
    """What the affine form misses of the question's outputs in layer 0 [prompt]."""
    return _affine(result, "relative_error", condition)[:, 0]


def affine_deeper(result: Result, condition: str) -> np.ndarray:
    """The same, mean of the layers after it [prompt]."""
    return _later(_affine(result, "relative_error", condition))


def total_variation_first(result: Result, condition: str) -> np.ndarray:
    """How far attention to the original tokens is re-routed in layer 0 [prompt]."""
    return _affine(result, "total_variation", condition)[:, 0]


def total_variation_deeper(result: Result, condition: str) -> np.ndarray:
    """The same, mean of the layers after it [prompt]."""
    return _later(_affine(result, "total_variation", condition))


def scale_spread(result: Result, condition: str) -> np.ndarray:
    """Standard deviation of λ over layers and heads over its mean [prompt]."""
    scale = _heads(result, "affine_shift", "scale", condition)
    flat = scale.reshape(len(scale), -1)
    return flat.std(1) / flat.mean(1)


def early_less_late(result: Result, quantity: str) -> np.ndarray:
    """A quantity of the baseline in the first sixth of the layers less that in the others [prompt]."""
    by_layer = _heads(result, "attention_focus", quantity, BASELINE).mean(-1)
    cut = _cut(by_layer.shape[1])
    return by_layer[:, :cut].mean(1) - by_layer[:, cut:].mean(1)


def late_less_early(result: Result, quantity: str) -> np.ndarray:
    """The same the other way round [prompt]."""
    return -early_less_late(result, quantity)


def sink_and_update(result: Result) -> np.ndarray:
    """Rank correlation over later heads of attention to the first token with the size of the update [prompt]."""
    mass, size = (
        _heads(result, data, name, BASELINE)
        for data, name in (("attention_focus", "first_mass"), ("head_updates", "magnitude"))
    )
    cut = _cut(mass.shape[1])
    mass, size = (part[:, cut:].reshape(len(part), -1) for part in (mass, size))
    ranks = [rankdata(part, axis=1) for part in (mass, size)]
    centred = [part - part.mean(1, keepdims=True) for part in ranks]
    norms = np.sqrt((centred[0] ** 2).sum(1) * (centred[1] ** 2).sum(1))
    product = (centred[0] * centred[1]).sum(1)
    return np.divide(product, norms, out=np.zeros_like(norms), where=norms > 0)  # all alike: no correlation


def check_sinks(result: Result) -> None:
    """Refuse a model in which no later head looks at the first token.

    Raises:
        NotApplicable: None has a tenth of its attention there.
    """
    mass = _heads(result, "attention_focus", "first_mass", BASELINE).mean(0)
    if mass[_cut(len(mass)) :].max() < _SINK:
        raise NotApplicable(f"no later head has {100 * _SINK:.0f} % of its attention on the first token")


def magnitude(result: Result, condition: str) -> np.ndarray:
    """Size of updates beside the hidden state, mean over layers and heads [prompt]."""
    return _heads(result, "head_updates", "magnitude", condition).mean((1, 2))


def turned(result: Result, condition: str) -> np.ndarray:
    """|cosine| of updates and hidden state, mean over layers and heads [prompt]."""
    return abs(_heads(result, "head_updates", "orientation", condition)).mean((1, 2))


def _heads(result: Result, dataset: str, quantity: str, condition: str) -> np.ndarray:
    """Values of the question [prompt, layer, head]."""
    found = result[dataset][quantity].sel(condition=condition, segment="question")
    return found.transpose("prompt", "layer", "head").values.astype(np.float64)


def _received(result: Result, condition: str) -> np.ndarray:
    """What the question receives, mean over heads [prompt, layer]."""
    return _heads(result, "received_attention", "received_by_segment", condition).mean(-1)


def _beyond_uniform(result: Result, condition: str, to: str) -> np.ndarray:
    null = result["received_attention"].received_by_segment_uniform.sel(segment="question")
    expected, reference = (
        null.sel(condition=c).transpose("prompt", "layer").values.astype(np.float64) for c in (condition, to)
    )
    measured = _log_ratio(_received(result, condition), _received(result, to))
    return measured - _log_ratio(expected, reference)


def _affine(result: Result, quantity: str, condition: str) -> np.ndarray:
    return _heads(result, "affine_shift", quantity, condition).mean(-1)


def _later(by_layer: np.ndarray) -> np.ndarray:
    if by_layer.shape[1] < 2:
        raise NotApplicable("the model has one layer")
    return by_layer[:, 1:].mean(1)


def _cut(layers: int) -> int:
    """How many layers are early."""
    if layers < 2:
        raise NotApplicable("the model has one layer")
    return ceil(_EARLY * layers)


def _log_ratio(values: np.ndarray, baseline: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(values / baseline)
