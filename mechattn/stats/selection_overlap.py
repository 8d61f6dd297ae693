"""The overlap of two selections, and its expectation by chance."""

from __future__ import annotations

from functools import cache

import numpy as np
from scipy import stats

from mechattn.stats.paired import paired


def jaccard(one: np.ndarray, other: np.ndarray) -> float:
    """``|A ∩ B| / |A ∪ B|`` of two masks; NaN if both are empty."""
    union = int((one | other).sum())
    return int((one & other).sum()) / union if union else float("nan")


@cache
def jaccard_by_chance(one: int, other: int, of: int) -> float:
    """The expected Jaccard index of two random subsets of these sizes, out of ``of`` elements.

    ``Σ_i P(i) · i / (a + b − i)``, with hypergeometric i, the size of the intersection. NaN if both sets are empty.
    """
    if not one + other:
        return float("nan")
    shared = np.arange(min(one, other) + 1)
    return float((stats.hypergeom(of, one, other).pmf(shared) * shared / (one + other - shared)).sum())


def largest(d: np.ndarray, count: int) -> np.ndarray:
    """The columns of d [unit, cell] with the largest means, up to sign; ties go to the earlier column."""
    chosen = np.zeros(d.shape[1], dtype=bool)
    chosen[np.argsort(-abs(d.mean(0)), kind="stable")[:count]] = True
    return chosen


def significant(d: np.ndarray, resamples: int) -> np.ndarray:
    """The columns of d [unit, cell] with q < 0.05 by the test of ``compare``."""
    return paired(d, None, resamples=resamples).q < 0.05


def random_halves(n: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Two random disjoint halves of n; if n is odd, one is left out."""
    order = generator.permutation(n)
    return order[: n // 2], order[n // 2 : 2 * (n // 2)]
