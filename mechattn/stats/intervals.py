"""Moments of values, and confidence intervals over prompts, the unit of replication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import stats

from mechattn.errors import OptionError
from mechattn.stats.units import Units

FEWEST = 3  # prompts or groups that an interval needs
_ROWS = 64  # observations in a block; see row_blocks


class Interval(NamedTuple):
    """An estimate and the ends of its interval, as arrays of the same shape."""

    estimate: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True, eq=False)
class Moments:
    """The count, mean and sum of squared deviations (M2) of each cell's observations, in float64.

    Moments of two sets of observations can be merged (Chan, Golub and LeVeque 1979). A float32 sum
    of squares would lose a small spread.

    Args:
        n: The number of observations of each cell.
        mean: Their mean; 0 in cells without observations.
        m2: The sum of their squared deviations from the mean.
    """

    n: np.ndarray
    mean: np.ndarray
    m2: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray) -> Moments:
        """The moments of observations along the first axis.

        Args:
            values: Observations [observation, *cells]; NaN is left out.
        """
        n = (~np.isnan(values)).sum(axis=0, dtype=np.float64)

        # Two passes: sums of squares would lose the spread of large values.
        total = np.zeros(n.shape)
        for rows in row_blocks(values):
            total += np.nansum(values[rows], axis=0, dtype=np.float64)
        mean = ratio(total, n, otherwise=0.0)

        m2 = np.zeros(n.shape)
        for rows in row_blocks(values):
            deviations = np.where(np.isnan(values[rows]), 0.0, values[rows] - mean)
            m2 += np.square(deviations).sum(axis=0)
        return cls(n, mean, m2)

    @classmethod
    def from_statistics(cls, n: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> Moments:
        """Restore moments from stored statistics.

        The stored mean of no values is NaN, and so is the variance of fewer than two.
        """
        counts = n.astype(np.float64)
        squares_from_mean = np.where(counts > 1, variance * (counts - 1), 0.0)
        return cls(counts, np.where(counts > 0, mean, 0.0), squares_from_mean)

    def merge(self, other: Moments) -> Moments:
        """The moments of both sets of observations together.

        ``M2 = M2₁ + M2₂ + δ² n₁ n₂ / (n₁ + n₂)`` with δ the difference of the means. The last axis
        may have different lengths, as for positions. A cell that one of them lacks has no
        observations there.
        """
        length = max(self.n.shape[-1], other.n.shape[-1])
        first = self._padded(length)
        second = other._padded(length)

        n = first.n + second.n
        second_share = ratio(second.n, n, otherwise=0.0)
        delta = second.mean - first.mean
        mean = first.mean + delta * second_share
        m2 = first.m2 + second.m2 + delta**2 * first.n * second_share
        return Moments(n, mean, m2)

    @property
    def variance(self) -> np.ndarray:
        """The unbiased variance; NaN with fewer than two observations."""
        return ratio(self.m2, self.n - 1)

    @property
    def known_mean(self) -> np.ndarray:
        """The mean; NaN in cells without observations."""
        return np.where(self.n > 0, self.mean, np.nan)

    def interval(self, level: float = 0.95) -> Interval:
        """The t interval of the mean; its ends are NaN with fewer than three observations."""
        error = np.sqrt(ratio(self.variance, self.n))
        quantile = np.where(self.n >= FEWEST, t_quantile(level, self.n - 1), np.nan)
        half_width = quantile * error
        mean = self.known_mean
        return Interval(mean, mean - half_width, mean + half_width)

    def _padded(self, length: int) -> Moments:
        """These moments, with cells without observations appended to the last axis."""
        widths = [(0, 0)] * self.n.ndim
        widths[-1] = (0, length - self.n.shape[-1])
        return Moments(
            n=np.pad(self.n, widths), mean=np.pad(self.mean, widths), m2=np.pad(self.m2, widths)
        )


def ratio(
    numerator: np.ndarray | float,
    denominator: np.ndarray,
    otherwise: np.ndarray | float = np.nan,
) -> np.ndarray:
    """``numerator / denominator`` where the denominator is above 0, and ``otherwise`` elsewhere.

    Args:
        numerator: Numbers that broadcast with the denominators.
        denominator: The denominators.
        otherwise: The value where a denominator is 0, negative or NaN.
    """
    is_positive = denominator > 0
    divisor = np.where(is_positive, denominator, 1)
    return np.where(is_positive, numerator / divisor, otherwise)


def t_quantile(level: float, freedom: np.ndarray | float) -> np.ndarray:
    """The number of standard errors that a t interval reaches on each side: ``t((1 + level) / 2)``.

    Args:
        level: The level of the interval.
        freedom: Degrees of freedom. Infinity gives the normal quantile; 0 or less gives NaN.

    Raises:
        OptionError: The level is not a number from 0.5 to below 1.
    """
    check_level(level)
    upper_end = (1 + level) / 2
    quantile = stats.t.ppf(upper_end, freedom)
    return np.asarray(quantile)


def check_level(level: float) -> None:
    """Refuse a value that cannot be the level of an interval.

    Raises:
        OptionError: The level is not a number from 0.5 to below 1.
    """
    if not isinstance(level, (int, float)) or not 0.5 <= level < 1:
        raise OptionError(f"level={level!r}: give a probability such as 0.95")


def t_interval(values: np.ndarray, level: float = 0.95) -> Interval:
    """The mean along the first axis, with Student's t interval.

    ``mean ± t((1 + level) / 2, n − 1) · s / √n``

    Args:
        values: Numbers of prompts or groups [unit, *cells]; NaN is left out.
        level: The level of the interval.

    Returns:
        The mean of each cell and the ends of its interval [*cells], in the unit of the values. The
        ends are NaN in cells with fewer than three values.

    Raises:
        OptionError: There are fewer than three units, or the level is not a number from 0.5 to
            below 1.
    """
    if len(values) < FEWEST:
        raise OptionError(
            f"an interval over prompts, or over groups of prompts, needs at least {FEWEST},"
            f" but there are {len(values)}"
        )
    moments = Moments.of(np.asarray(values))
    return moments.interval(level)


def row_blocks(values: np.ndarray) -> list[slice]:
    """Split rows into blocks of 64.

    A block and what is computed from it then fit in the processor's cache, which makes
    :meth:`Moments.of` three times as fast.
    """
    starts = range(0, len(values), _ROWS)
    return [slice(start, start + _ROWS) for start in starts]


def ratio_interval(numerator: np.ndarray, denominator: np.ndarray) -> Interval:
    """The ratio of two means over the same units, with Fieller's 95 % interval.

    The interval holds every ratio r for which a t test does not tell the mean of
    ``numerator − r · denominator`` from 0. It is bounded only if the mean denominator differs from
    0 at this level.

    Args:
        numerator: The numerator of each unit and cell [unit, *cells].
        denominator: The denominator of each unit [unit], the same for all cells.

    Returns:
        The ratio of each cell and the ends of its interval [*cells]; all are NaN if the mean
        denominator does not differ from 0.

    Source: Fieller 1954.
    """
    n = len(denominator)
    mean_numerator = numerator.mean(0)
    mean_denominator = denominator.mean()
    numerator_deviations = numerator - mean_numerator
    denominator_deviations = denominator - mean_denominator
    products = np.tensordot(denominator_deviations, numerator_deviations, axes=1)
    covariance = products / (n - 1)

    # The ends are the roots of a r² − 2 b r + c. The mean denominator differs from 0 if a > 0.
    critical = t_quantile(0.95, n - 1) ** 2 / n
    a = mean_denominator**2 - critical * denominator.var(ddof=1)
    b = mean_numerator * mean_denominator - critical * covariance
    c = mean_numerator**2 - critical * numerator.var(0, ddof=1)
    if a <= 0:
        nan = np.full(b.shape, np.nan)
        return Interval(nan, nan, nan)

    middle = b / a
    discriminant = np.maximum(b**2 - a * c, 0.0)
    half_width = np.sqrt(discriminant) / a
    estimate = mean_numerator / mean_denominator
    return Interval(estimate, middle - half_width, middle + half_width)


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """The ends of Wilson's 95 % score interval for a proportion.

    Args:
        successes: The number of successes.
        n: The number of trials, at least 1.
    """
    interval = stats.binomtest(successes, n).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def shrunken(estimate: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Move estimates towards their mean, the more so the larger their errors are.

    ``mean + τ² / (τ² + error²) · (estimate − mean)`` with ``τ² = max(0, variance of the estimates −
    mean of error²)``. The largest of many estimates is too large on average (the winner's curse).
    The largest moved estimate is not, if the true values are roughly normal.

    Args:
        estimate: Estimates [cell]; NaN is left out.
        error: Their standard errors [cell], in the same unit.

    Returns:
        The moved estimates [cell]; all are unchanged if fewer than three are known.

    Source: Efron and Morris 1975; τ² of DerSimonian and Laird 1986, without weights.
    """
    is_known = ~(np.isnan(estimate) | np.isnan(error))
    if is_known.sum() < FEWEST:
        return estimate

    error_variance = error**2
    known_estimates = estimate[is_known]
    mean = known_estimates.mean()
    excess_variance = known_estimates.var(ddof=1) - error_variance[is_known].mean()
    true_variance = max(0.0, float(excess_variance))
    weight = ratio(true_variance, true_variance + error_variance, otherwise=1.0)
    return mean + weight * (estimate - mean)


def relative_change(
    values: np.ndarray, baseline: np.ndarray, units: Units | None = None
) -> Interval:
    """The geometric mean of relative changes over prompts, with a 95 % t interval.

    ``exp(mean log(value / baseline)) − 1``; the interval is computed for the mean log-ratio. With
    groups as units, that is the mean over groups of each group's mean log-ratio.

    Args:
        values: Positive numbers of each prompt [prompt, *cells].
        baseline: Positive numbers of the baseline [prompt, *cells].
        units: The units of replication; by default single prompts.

    Returns:
        The change of each cell, as a fraction of the baseline, and the ends of its interval.
    """
    log_ratio = np.log(values / baseline)
    if units is not None:
        log_ratio = units.means(log_ratio)
    mean, low, high = t_interval(log_ratio)
    return Interval(np.expm1(mean), np.expm1(low), np.expm1(high))
