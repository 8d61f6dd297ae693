"""Moments of values, and confidence intervals over prompts, the unit of replication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import stats

from mechattn.errors import OptionError
from mechattn.stats.units import ALONE, Units

FEWEST = 3
_ROWS = 64


class Interval(NamedTuple):
    """An estimate and the ends of its interval, as arrays of the same shape."""

    estimate: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class Moments:
    """Per-cell count, mean and sum of squared deviations (M2) in float64, mergeable; NaN means
    absent.

    Merging follows Chan, Golub and LeVeque (1979); a float32 sum of squares would lose a small
    spread.
    """

    n: np.ndarray
    mean: np.ndarray
    m2: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray) -> Moments:
        """Moments of observations stacked along the first axis; NaN marks an absent observation."""
        present = ~np.isnan(values)
        filled = np.where(present, values, 0).astype(np.float64)
        if len(values) == 1:
            return cls(present[0].astype(np.float64), filled[0], np.zeros_like(filled[0]))
        n = present.sum(axis=0, dtype=np.float64)
        mean = np.divide(filled.sum(axis=0), n, out=np.zeros(n.shape), where=n > 0)
        m2 = (np.where(present, values - mean, 0.0) ** 2).sum(axis=0)
        return cls(n, mean, m2)

    @classmethod
    def of_rows(cls, values: np.ndarray) -> Moments:
        """As :meth:`of`, for an interval; without a large temporary array where there are many
        rows.
        """
        if len(values) < FEWEST:
            raise OptionError(
                f"an interval over prompts, or over groups of prompts, needs at least {FEWEST}, "
                f"but there are {len(values)}"
            )
        if len(values) <= ALONE:
            return cls.of(values)
        mean = values.sum(axis=0) / len(values)
        if np.isnan(mean).any():
            return cls.of(values)
        m2 = np.zeros(mean.shape)
        for rows in blocks_of(values):
            deviations = values[rows] - mean
            m2 += np.einsum("i...,i...->...", deviations, deviations)
        return cls(np.full(mean.shape, float(len(values))), mean, m2)

    @classmethod
    def from_statistics(cls, n: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> Moments:
        """Restore moments from stored statistics: NaN is the mean of no values, or the variance of
        fewer than two.
        """
        n = n.astype(np.float64)
        m2 = np.where(n > 1, variance, 0.0) * np.maximum(n - 1, 0)
        return cls(n, np.where(n > 0, mean, 0.0), m2)

    def merge(self, other: Moments) -> Moments:
        """The moments of both sets of observations combined; the last axis is padded to the longer
        one.
        """
        first = self._as_long_as(other)
        second = other._as_long_as(self)
        n = first.n + second.n
        second_share = np.divide(second.n, n, out=np.zeros_like(n), where=n > 0)
        delta = second.mean - first.mean
        mean = first.mean + delta * second_share
        m2 = first.m2 + second.m2 + delta**2 * first.n * second_share
        return Moments(n, mean, m2)

    def _as_long_as(self, other: Moments) -> Moments:
        missing = max(0, other.n.shape[-1] - self.n.shape[-1])
        width = [(0, 0)] * (self.n.ndim - 1) + [(0, missing)]
        return Moments(np.pad(self.n, width), np.pad(self.mean, width), np.pad(self.m2, width))

    @property
    def variance(self) -> np.ndarray:
        """Unbiased variance; NaN below two observations."""
        nan = np.full(self.n.shape, np.nan)
        return np.divide(self.m2, self.n - 1, out=nan, where=self.n > 1)

    @property
    def known_mean(self) -> np.ndarray:
        """The mean; NaN if there were no observations."""
        return np.where(self.n > 0, self.mean, np.nan)

    def interval(self, level: float = 0.95) -> Interval:
        """The t interval for the mean; its ends are NaN below 3 observations."""
        error = np.sqrt(self.variance / np.maximum(self.n, 1))
        half = stats.t.ppf((1 + level) / 2, np.maximum(self.n, 2) - 1) * error
        half = np.where(self.n >= FEWEST, half, np.nan)
        mean = self.known_mean
        return Interval(mean, mean - half, mean + half)


def t_interval(values: np.ndarray, level: float = 0.95) -> Interval:
    """Student's t interval for the mean along the first axis; NaN values are left out.

    ``mean ± t(level, n − 1) · s / √n``
    """
    return Moments.of_rows(np.asarray(values, dtype=np.float64)).interval(level)


def blocks_of(values: np.ndarray) -> list[slice]:
    """Blocks of rows, so that what is computed from each stays in a processor's cache: three times
    as fast.
    """
    return [slice(start, start + _ROWS) for start in range(0, len(values), _ROWS)]


def ratio_interval(above: np.ndarray, below: np.ndarray, level: float = 0.95) -> Interval:
    """The ratio of two means over the same units, with Fieller's interval; NaN where the mean below
    could be 0.

    The ratios r whose ``mean(above − r · below)`` a t test doesn't tell from 0: an interval if the
    mean of ``below`` differs from 0 at this level.

    Source: Fieller 1954.
    """
    n = len(below)
    mean_above = above.mean(0)
    mean_below = below.mean()
    covariance = ((above.T - mean_above[..., None]) @ (below - mean_below)).T / (n - 1)

    # The ends are the roots of a r² − 2 b r + c.
    far = stats.t.ppf((1 + level) / 2, n - 1) ** 2 / n
    a = mean_below**2 - far * below.var(ddof=1)
    b = mean_above * mean_below - far * covariance
    c = mean_above**2 - far * above.var(0, ddof=1)
    if a <= 0:
        nan = np.full(b.shape, np.nan)
        return Interval(nan, nan, nan)
    half = np.sqrt(np.maximum(b**2 - a * c, 0.0)) / a
    return Interval(mean_above / mean_below, b / a - half, b / a + half)


def wilson_interval(successes: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval for a proportion."""
    if not 0 <= successes <= n or n < 1:
        raise OptionError(
            f"{successes} successes in {n} trials: give at least one trial, "
            "and at most as many successes"
        )
    interval = stats.binomtest(successes, n).proportion_ci(level, method="wilson")
    return float(interval.low), float(interval.high)


def shrunken(estimate: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Estimates moved towards their mean by as much as their errors explain their differences; NaN
    is left out.

    ``mean + τ² / (τ² + error²) · (estimate − mean)``, with τ² the variance of estimates beyond
    their errors. The largest of many estimates is too large (the winner's curse); this one is not,
    if true values are about normal.

    Source: Efron and Morris 1975; τ² of DerSimonian and Laird 1986, without weights.
    """
    present = ~(np.isnan(estimate) | np.isnan(error))
    if present.sum() < 3:
        return estimate
    mean = estimate[present].mean()
    noise = error**2
    spread = max(0.0, float(estimate[present].var(ddof=1) - noise[present].mean()))
    total = spread + noise
    weight = np.divide(spread, total, out=np.ones_like(total), where=total > 0)
    return mean + weight * (estimate - mean)


def relative_change(
    values: np.ndarray, baseline: np.ndarray, units: Units | None = None
) -> Interval:
    """Geometric-mean relative change over prompts (first axis) with a 95 % t interval of the
    log-ratio.

    ``exp(mean log(value / baseline)) − 1``; if units are groups, the mean over groups of each
    group's mean.
    """
    log_ratio = np.log(values / baseline)
    if units is not None:
        log_ratio = units.means(log_ratio)
    mean, low, high = t_interval(log_ratio)
    return Interval(np.expm1(mean), np.expm1(low), np.expm1(high))
