"""Mean and variance of arrays that arrive one prompt at a time: (n, mean, M2), mergeable, NaN meaning absent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Moments:
    """Per-cell count, mean and sum of squared deviations (M2) in float64.

    Merging follows Chan, Golub and LeVeque (1979); a float32 sum of squares would lose a small spread.
    """

    n: np.ndarray
    mean: np.ndarray
    m2: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray) -> Moments:
        """Moments of observations stacked along the first axis; NaN marks an absent observation."""
        present = ~np.isnan(values)
        n = present.sum(axis=0).astype(np.float64)
        filled = np.where(present, values, 0).astype(np.float64)
        mean = np.divide(filled.sum(axis=0), n, out=np.zeros(n.shape), where=n > 0)
        m2 = (np.where(present, values - mean, 0.0) ** 2).sum(axis=0)
        return cls(n, mean, m2)

    @classmethod
    def from_statistics(cls, n: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> Moments:
        """Restore moments from stored statistics: NaN is the mean of no values, or the variance of fewer than two."""
        n = n.astype(np.float64)
        return cls(n, np.where(n > 0, mean, 0.0), np.where(n > 1, variance, 0.0) * np.maximum(n - 1, 0))

    def merge(self, other: Moments) -> Moments:
        """The moments of both sets of observations combined; the last axis is padded to the longer one."""
        a, b = _padded(self, other), _padded(other, self)
        n = a.n + b.n
        share = np.divide(b.n, n, out=np.zeros_like(n), where=n > 0)
        delta = b.mean - a.mean
        return Moments(n, a.mean + delta * share, a.m2 + b.m2 + delta**2 * a.n * share)

    @property
    def variance(self) -> np.ndarray:
        """Unbiased variance; NaN below two observations."""
        return np.where(self.n > 1, self.m2 / np.maximum(self.n - 1, 1), np.nan)

    @property
    def known_mean(self) -> np.ndarray:
        """The mean; NaN if there were no observations."""
        return np.where(self.n > 0, self.mean, np.nan)


def _padded(one: Moments, other: Moments) -> Moments:
    missing = other.n.shape[-1] - one.n.shape[-1]
    if missing <= 0:
        return one
    width = [(0, 0)] * (one.n.ndim - 1) + [(0, missing)]
    return Moments(*(np.pad(part, width) for part in (one.n, one.mean, one.m2)))
