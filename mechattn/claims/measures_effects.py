"""Measures of what inserted tokens and ARM do: to the first MLP's activations, one value a prompt, and to answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from mechattn.axes import BASELINE
from mechattn.claims.measures import APART, NotApplicable, log_ratio, measure, taken
from mechattn.claims.rules import Estimate, estimated
from mechattn.evaluation.answer_units import units_of
from mechattn.evaluation.evaluation import Evaluation
from mechattn.results.result import Result
from mechattn.stats.accuracy import detectable_difference, pass_at_k
from mechattn.stats.intervals import wilson_interval

_OF = "mlp_activations"
_LARGE = 0.1  # of the activations in the baseline
_CLASSES, _OTHER = ("digit", "operator", "conjunction"), "other"
Statistic = Literal["near_zero", "l1", "l2", "gini", "variance"]
Tries = Annotated[int, Field(ge=1, le=1000)]


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


def accuracy_range(evaluation: Evaluation, condition: str, to: str = BASELINE, k: int = 1) -> tuple[float, float]:
    """A model at 99 % cannot gain more than a point."""
    _check(evaluation, to)
    n = evaluation.samples
    level = float(pass_at_k(evaluation.right(to).sum(1), n, min(k, n)).mean())
    return -level, 1 - level


@measure("answers", "points", accuracy_range)
def accuracy_apart(evaluation: Evaluation, condition: str, to: str = BASELINE) -> Estimate:
    """Share of problems solved less that under another condition (Newcombe's interval, McNemar's test)."""
    _check(evaluation, condition, to)
    made = evaluation.compare(condition, to)
    value, low, high, detectable, p = (float(made[name]) for name in ("difference", "low", "high", "detectable", "p"))
    n, exact = int(made["n"]), p if units_of(evaluation, "auto").of is None else None
    levels = (float(evaluation.right(to).mean()), float(evaluation.right(condition).mean()))
    return Estimate(value, low, high, n, detectable, exact, levels, detectable_difference(n, 0.0))


@measure("answers", "points", accuracy_range)
def pass_apart(evaluation: Evaluation, condition: str, to: str = BASELINE, k: Tries = 3) -> Estimate:
    """pass@k less that under another condition."""
    _check(evaluation, condition, to)
    if evaluation.samples < k:
        raise NotApplicable(f"{evaluation.samples} answers to each problem were drawn, and pass@{k} takes {k} or more")
    each = [pass_at_k(evaluation.right(name).sum(1), evaluation.samples, k) for name in (condition, to)]
    values = units_of(evaluation, "auto").means(each[0] - each[1])
    alike = float(wilson_interval(0, len(values))[1])
    made = estimated(values, least=alike if np.ptp(values) == 0 else 0.0)  # no spread is no certainty
    return replace(made, levels=(float(each[1].mean()), float(each[0].mean())), floor=alike)


def _check(evaluation: Evaluation, *names: str) -> None:
    for name in names:
        if name not in evaluation.conditions:
            raise NotApplicable(f"no problem was answered under {name!r}")
