"""Measures of received attention and of the affine form, one value a prompt."""

from __future__ import annotations

from typing import Literal

import numpy as np

from mechattn.axes import BASELINE
from mechattn.claims.measure import by_head, later, log_ratio, null, places, taken
from mechattn.claims.rules import NotApplicable
from mechattn.results.result import Result

Layers = Literal["first", "later"]
_RECEIVED, _AFFINE = "received_attention", "affine_shift"
_PEAKS = 0.1  # of the question's tokens
_QUERIES = 8  # after a key, at least: what one or two pay to it is hardly a mean


def fall(result: Result, condition: str, to: str = BASELINE) -> np.ndarray:
    """Log-ratio of what the question's tokens receive in layer 0, mean over heads."""
    return log_ratio(*(_received(result, name)[:, 0] for name in (condition, to)))


def fall_beyond_uniform(result: Result, condition: str, to: str = BASELINE) -> np.ndarray:
    """The fall less that of a head that is blind to content."""
    return _beyond(result, condition, to)[:, 0]


def deeper(result: Result, condition: str, to: str = BASELINE) -> np.ndarray:
    """The fall beyond a blind head's in layers 1 and 2, less that in layer 0."""
    beyond = _beyond(result, condition, to)
    return later(beyond)[:, :2].mean(1) - beyond[:, 0]


def peaks(result: Result, condition: str, to: str = BASELINE) -> np.ndarray:
    """The fall at the peaks less that elsewhere in the question, beyond a blind head's, layer 0.

    The peaks of a head and prompt are the tenth of the keys with the largest geometric mean of both conditions, among
    those that eight original tokens or more come after.
    """
    ours, theirs = (_by_origin(result, name, "") for name in (condition, to))
    blind = "_blind" if "received_blind_by_origin_per_prompt" in result[_RECEIVED] else "_uniform"
    expected = log_ratio(*(_by_origin(result, name, blind) for name in (condition, to)))
    question = places(result, BASELINE, "question")
    lengths = (taken(result, "sequences", "origin", BASELINE).values >= 0).sum(-1)
    found = []
    for prompt, length in enumerate(lengths):
        keys = np.flatnonzero(question[prompt, : max(0, length - _QUERIES)])
        one, other, null_of = ours[prompt][:, keys], theirs[prompt][:, keys], expected[prompt][:, keys]
        there = np.isfinite(null_of).all(0) & (one > 0).all(0) & (other > 0).all(0)
        found.append(_at_peaks(np.log(one[:, there]), np.log(other[:, there]), null_of[:, there]))
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


def peak_moved(result: Result, condition: str, layer: int = 1) -> np.ndarray:
    """Share of a layer's heads whose most attended token of the question is another one than in the baseline."""
    if layer >= result[_RECEIVED].sizes["layer"]:
        raise NotApplicable(f"the model has no layer {layer}")
    question = places(result, BASELINE, "question")
    tops = []
    for name in (condition, BASELINE):
        values = _by_origin(result, name, "", layer)
        keys = question[:, None, : values.shape[-1]]
        tops.append(np.where(keys & np.isfinite(values), values, -1.0).argmax(-1))
    return (tops[0] != tops[1]).mean(-1)


def peak_moved_apart(result: Result, condition: str) -> np.ndarray:
    """The share of heads whose peak moves in layer 1, less that in layer 0."""
    return peak_moved(result, condition, 1) - peak_moved(result, condition, 0)


def filler_beside_question(result: Result, condition: str) -> np.ndarray:
    """Log-ratio of what an inserted token receives to what one of the question does, beyond a blind head's, layer 0."""
    logs = []
    for quantity in ("received_by_segment", _null_of(result)):
        values = taken(result, _RECEIVED, quantity, condition).isel(layer=0).astype(np.float64)
        values = values.mean("head") if "head" in values.dims else values
        logs.append(log_ratio(*(values.sel(segment=name).values for name in ("inserted", "question"))))
    return logs[0] - logs[1]


def evenness(result: Result, condition: str) -> np.ndarray:
    """Effective number of inserted tokens by what they receive in layer 0, over their number; mean over heads."""
    data = taken(result, _RECEIVED, "received_per_prompt", condition).isel(layer=0).values
    found = []
    for prompt, mask in zip(data, places(result, condition, "inserted"), strict=True):
        received = prompt[:, np.flatnonzero(mask)].astype(np.float64)
        share = received / received.sum(1, keepdims=True)
        entropy = -(share * np.log(np.where(share > 0, share, 1.0))).sum(1)
        found.append((np.exp(entropy) / share.shape[1]).mean())
    return np.array(found)


def evenness_range(result: Result, condition: str) -> tuple[float, float]:
    """One token may receive all, or each as much as the next."""
    return 1 / int(places(result, condition, "inserted").sum(1).min()), 1.0


def evenness_apart(result: Result, one: str, other: str) -> np.ndarray:
    """Evenness in a condition less that in another."""
    return evenness(result, one) - evenness(result, other)


def band(result: Result, condition: str, to: str = BASELINE) -> np.ndarray:
    """Log-ratio of a prompt's distance from the mean of all, over heads of layer 0 and the question's places."""
    shortest = int(places(result, BASELINE, "question").sum(1).min())
    found = []
    for name in (condition, to):
        values = _by_origin(result, name, "")
        first = places(result, BASELINE, "question").argmax(1)
        aligned = np.stack([v[:, at : at + shortest - 1] for v, at in zip(values, first, strict=True)])
        found.append(abs(aligned - aligned.mean(0)).mean((1, 2)))
    return log_ratio(*found)


def affine_missed(result: Result, condition: str, layers: Layers = "first") -> np.ndarray:
    """‖out' − λ · out − Σσ‖ / ‖out'‖ of the question's queries, mean over heads and layers."""
    return _layers(by_head(result, _AFFINE, "relative_error", condition), layers)


def affine_identity(result: Result, condition: str) -> np.ndarray:
    """What the affine form misses in layer 0 where only the inserted keys differ: 0 but for rounding.

    Raises:
        NotApplicable: A window of layer 0 pushes original keys out, so that more than the inserted keys differs.
    """
    seen = taken(result, _AFFINE, "scale_at_uniform_per_prompt", condition).isel(layer=0).values
    inserted, question = (places(result, condition, name)[:, : seen.shape[1]] for name in ("inserted", "question"))
    expected = 1 - inserted.cumsum(1) / np.arange(1, seen.shape[1] + 1)
    if not np.allclose(seen[question], expected[question], atol=1e-4):
        raise NotApplicable("queries of layer 0 do not see all keys before them (a window, or learned sinks)")
    return affine_missed(result, condition)


def affine_explained(result: Result, condition: str, layers: Layers = "first") -> np.ndarray:
    """Share of the change of outputs that is dilution and shift, by ⟨part, change⟩ / ‖change‖²; less what overshoots.

    All parts add up to 1, and the others are re-routing and new values: 1 − |their share|, mean over heads and layers.
    """
    parts = [by_head(result, _AFFINE, f"change_by_{part}", condition) for part in ("rerouting", "new_values")]
    return 1 - _layers(np.abs(parts[0] + parts[1]), layers)


def affine_explained_apart(result: Result, condition: str) -> np.ndarray:
    """That share in the later layers less that in the first."""
    return affine_explained(result, condition, "later") - affine_explained(result, condition, "first")


def best_affine_missed(result: Result, condition: str) -> np.ndarray:
    """What out' ≈ a · out + b misses of how the question's outputs differ, ‖·‖ / ‖out' − mean‖, mean of later layers.

    One a for each head, fitted on every other prompt and measured on the rest, whose b is their own.
    """
    xx, xy, yy = (later(by_head(result, _AFFINE, f"fit_{name}", condition)) for name in ("before", "both", "after"))
    a = xy[::2].sum(0) / xx[::2].sum(0)
    return np.asarray(np.sqrt(np.maximum(yy - 2 * a * xy + a**2 * xx, 0) / yy)[1::2].mean((1, 2)))


def one_direction(result: Result, condition: str) -> np.ndarray:
    """s₁² / Σ s² of the shifts Σσ of all later queries, layer 0, mean over heads."""
    return by_head(result, _AFFINE, "shift_rank_one_share", condition)[:, 0].mean(-1)


def one_direction_apart(result: Result, one: str, other: str) -> np.ndarray:
    """The share of one direction in a condition less that in another."""
    return one_direction(result, one) - one_direction(result, other)


def lambda_spread(result: Result, condition: str) -> np.ndarray:
    """Standard deviation of λ over its mean, over the question's queries of a head of layer 0; mean over heads."""
    scale = taken(result, _AFFINE, "scale_at_per_prompt", condition).isel(layer=0)
    values = scale.transpose("prompt", "head", "key").values.astype(np.float64)
    found = []
    for of_heads, asks in zip(values, places(result, condition, "question"), strict=True):
        of_queries = of_heads[:, np.flatnonzero(asks)]
        found.append((of_queries.std(1) / of_queries.mean(1)).mean())
    return np.array(found)


def lambda_spread_range(result: Result, condition: str) -> tuple[float, float]:
    """λ lies in [0, 1]: of n values at most √(n − 1)."""
    return 0.0, float(np.sqrt(places(result, condition, "question").sum(1).min() - 1))


def _received(result: Result, condition: str) -> np.ndarray:
    """What the question receives, mean over heads [prompt, layer]."""
    return by_head(result, _RECEIVED, "received_by_segment", condition).mean(-1)


def _null_of(result: Result) -> str:
    blind = "received_by_segment_blind"
    return blind if blind in result[_RECEIVED] else "received_by_segment_uniform"


def _beyond(result: Result, condition: str, to: str) -> np.ndarray:
    measured = log_ratio(*(_received(result, name) for name in (condition, to)))
    return measured - log_ratio(*(null(result, _RECEIVED, "received_by_segment", name) for name in (condition, to)))


def _by_origin(result: Result, condition: str, of: str, layer: int = 0) -> np.ndarray:
    """What each original key receives [prompt, head or 1, key]."""
    found = taken(result, _RECEIVED, f"received{of}_by_origin_per_prompt", condition).isel(layer=layer)
    found = found if "head" in found.dims else found.expand_dims("head")
    return found.transpose("prompt", "head", "original_key").values.astype(np.float64)


def _layers(values: np.ndarray, layers: Layers) -> np.ndarray:
    """Mean over heads and over the layers [prompt]."""
    of_layers = values.mean(-1)
    return of_layers[:, 0] if layers == "first" else later(of_layers).mean(1)
