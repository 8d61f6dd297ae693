"""Measures of the first MLP's activations, and of ARM beside the tokens; one value a prompt."""

from __future__ import annotations

from typing import Literal

import numpy as np

from mechattn.axes import BASELINE
from mechattn.claims.measures import APART, log_ratio, measure, taken
from mechattn.claims.rules import NotApplicable
from mechattn.results.result import Result

_OF = "mlp_activations"
_LARGE = 0.1  # of the activations in the baseline
_CLASSES, _OTHER = ("digit", "operator", "conjunction"), "other"
Statistic = Literal["near_zero", "l1", "l2", "gini", "variance"]


@measure(_OF, "log-ratio")
def activations(result: Result, condition: str, quantity: Statistic = "near_zero") -> np.ndarray:
    """Log-ratio to the baseline of a statistic of the question's activations (near_zero, l1, l2, gini, variance)."""
    of = f"{quantity}_by_segment"
    ours, theirs = (_first(result, of, name, segment="question") for name in (condition, BASELINE))
    return _positive(ours, theirs, quantity)


@measure(_OF, "log-ratio")
def large(result: Result, condition: str) -> np.ndarray:
    """Log-ratio to the baseline of the share of large activations: above the bound that a tenth exceed there."""
    edges = result[_OF].bin.values.astype(np.float64)  # left edges; the first is −∞
    right = np.append(edges[1:], np.inf)
    ours, theirs = (_first(result, "histogram", name) for name in (condition, BASELINE))
    for bound in sorted({abs(edge) for edge in edges[1:]}):
        beyond = (edges >= bound) | (right <= -bound)
        if theirs.mean(0)[beyond].sum() <= _LARGE:
            return _positive(ours[:, beyond].sum(1), theirs[:, beyond].sum(1), "large")
    raise NotApplicable("more than a tenth of the activations lie beyond the last bin")


@measure(_OF, "log-ratio")
def classes_near_zero(result: Result, condition: str = BASELINE) -> np.ndarray:
    """Log-ratio of the share near zero at digits, operators and conjunctions (mean of those there) to the rest."""
    classes = [_first(result, "near_zero_by_token_class", condition, token_class=name) for name in _CLASSES]
    there = np.isfinite(classes)
    mean = np.where(there, classes, 0.0).sum(0) / np.maximum(there.sum(0), 1)
    return _positive(mean, _first(result, "near_zero_by_token_class", condition, token_class=_OTHER), "near_zero")


def distribution_range(result: Result, one: str, other: str) -> tuple[float, float]:
    """What a change can reach that moves mass outward alone, as ARM's does, beside that of the first condition."""
    change = _change(result, one)
    outward = np.where(result[_OF].bin.values[1:] > 0, change < 0, change > 0) * change
    size = np.linalg.norm(change, axis=1)
    low, high = (_over(np.linalg.norm(part, axis=1), size).mean() for part in (change - outward, outward))
    return -float(low), float(high)


@measure(_OF, "number", distribution_range)
def distribution_agreement(result: Result, one: str, other: str) -> np.ndarray:
    """Cosine of two conditions' changes of the cumulative distribution of activations; 0 where one changes nothing."""
    ours, theirs = _change(result, one), _change(result, other)
    return _over((ours * theirs).sum(1), np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1))


def attainable_agreement(result: Result, one: str, other: str) -> np.ndarray:
    """The largest cosine with the first change of any change of the entries that the other condition changes."""
    return np.sqrt(_over(_between(result, one, other, "change_within"), _between(result, one, one)))


def agreement_range(result: Result, one: str, other: str) -> tuple[float, float]:
    """The mean of the largest cosines, both ways."""
    largest = float(attainable_agreement(result, one, other).mean())
    return -largest, largest


@measure(_OF, "number", agreement_range)
def agreement(result: Result, one: str, other: str) -> np.ndarray:
    """Cosine of two conditions' changes, entry by entry; 0 where one changes nothing."""
    norms = np.sqrt(_between(result, one, one) * _between(result, other, other))
    return _over(_between(result, one, other), norms)


@measure(_OF, "share", APART)
def agreement_share(result: Result, one: str, other: str) -> np.ndarray:
    """The cosine of two changes over the largest that any change of the second's entries can have."""
    return _over(agreement(result, one, other), attainable_agreement(result, one, other))


def _first(result: Result, quantity: str, condition: str, **at: str) -> np.ndarray:
    """Of the first layer [prompt, …]."""
    return taken(result, _OF, quantity, condition).isel(layer=0).sel(at).values.astype(np.float64)


def _positive(ours: np.ndarray, theirs: np.ndarray, of: str) -> np.ndarray:
    if not ((ours > 0).all() and (theirs > 0).all()):
        raise NotApplicable(f"in some prompt {of} is 0, and there is no ratio")
    return log_ratio(ours, theirs)


def _change(result: Result, condition: str) -> np.ndarray:
    """Of the share of activations below each edge, from the baseline [prompt, edge]."""
    ours, theirs = (_first(result, "histogram", name).cumsum(1)[:, :-1] for name in (condition, BASELINE))
    return ours - theirs


def _between(result: Result, one: str, other: str, quantity: str = "change_product") -> np.ndarray:
    return _first(result, quantity, one, other_condition=other)


def _over(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    return np.divide(top, bottom, out=np.zeros_like(top), where=bottom > 0)
