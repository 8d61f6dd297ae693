"""Right and wrong answers: shares, pass@k, paired comparisons and detectable differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

from mechattn.errors import OptionError, check_counts
from mechattn.stats.intervals import t_interval, t_quantile, wilson_interval

# So many units away from the edge, or differing, give half of the weight to the measured variance,
# the rest to the prior one: the numbers with which the intervals cover 95 % in simulations
# (experiments/simulations).
_FEW_OFF_EDGE = 5.0
_FEW_DIFFERING = 3.0


@dataclass(frozen=True)
class PairedAccuracy:
    """A comparison of two conditions on the same problems.

    Args:
        difference: Accuracy of the first minus that of the second.
        low: Lower end of its interval (Newcombe's hybrid score interval for pairs).
        high: Upper end.
        p: Mid-p McNemar test.
        only_first: The number of problems that only the first gets right.
        only_second: The number of problems that only the second gets right.
        n: The number of problems.
        detectable: The smallest difference detectable with 80 % power at this rate of disagreement.
    """

    difference: float
    low: float
    high: float
    p: float
    only_first: int
    only_second: int
    n: int
    detectable: float


def paired_accuracy(
    first: Sequence[bool] | np.ndarray, second: Sequence[bool] | np.ndarray
) -> PairedAccuracy:
    """Compare the accuracy of two conditions on the same problems, one answer to each.

    Args:
        first: Whether the first condition's answer is right [problem].
        second: Whether the second condition's is, in the same order.

    Raises:
        OptionError: There is no problem, or the two have different numbers of problems.

    Source: the interval of Newcombe, method 10, Statistics in Medicine 1998.
    """
    first = np.asarray(first, dtype=bool)
    second = np.asarray(second, dtype=bool)
    n = len(first)
    if not n or len(second) != n:
        raise OptionError(f"{n} and {len(second)} answers: give one of each to every problem")

    first_right = int(first.sum())
    second_right = int(second.sum())
    both_right = int((first & second).sum())
    only_first = first_right - both_right
    only_second = second_right - both_right
    low, high = _newcombe(first_right, second_right, both_right, n)
    disagreement = (only_first + only_second) / n
    return PairedAccuracy(
        difference=(only_first - only_second) / n,
        low=low,
        high=high,
        p=mcnemar_mid_p(only_first, only_second),
        only_first=only_first,
        only_second=only_second,
        n=n,
        detectable=detectable_difference(n, disagreement),
    )


def mcnemar_mid_p(only_first: int, only_second: int) -> float:
    """The two-sided mid-p McNemar test: the exact p-value, in which the observed outcome counts
    half on each side.

    ``p = 2 P(X ≤ b) − P(X = b)`` with b the smaller count and X binomial.

    The exact test is conservative. Source: Fagerland, Lydersen and Laake, BMC Medical Research
    Methodology 2013.

    Args:
        only_first: The number of problems that only the first gets right.
        only_second: The number of problems that only the second gets right.
    """
    n = only_first + only_second
    if not n:
        return 1.0

    # Which of the two is right where they disagree, as the tosses of a coin.
    fewer = min(only_first, only_second)
    two_sided = 2 * stats.binom.cdf(fewer, n, 0.5)
    mid_p = two_sided - stats.binom.pmf(fewer, n, 0.5)
    return float(min(1.0, mid_p))


def _newcombe(first_right: int, second_right: int, both_right: int, n: int) -> tuple[float, float]:
    """The interval of a difference of two shares by Newcombe's method 10: Wilson's interval of
    each, combined with φ, the correlation of the answers.

    ``low = p₁ − p₂ − √(a² − 2 φ a b + b²)``, where a is how far the first interval reaches below
    its share and b how far the second reaches above its own; ``high`` is the other way round.
    """
    covariance: float = n * both_right - first_right * second_right
    if covariance > 0:  # the method's continuity correction
        covariance = max(covariance - n / 2, 0)
    # As floats: the product of four counts may have more than 64 bits.
    margins = float(first_right) * (n - first_right) * second_right * (n - second_right)
    phi = 0.0
    if margins:
        phi = covariance / np.sqrt(margins)

    first_low, first_high = wilson_interval(first_right, n)
    second_low, second_high = wilson_interval(second_right, n)
    first_share = first_right / n
    second_share = second_right / n
    reach_below = _combined_reach(phi, first_share - first_low, second_high - second_share)
    reach_above = _combined_reach(phi, first_high - first_share, second_share - second_low)
    difference = first_share - second_share
    return difference - reach_below, difference + reach_above


def _combined_reach(phi: float, first: float, second: float) -> float:
    """``√(a² − 2 φ a b + b²)``: how far the interval of a difference reaches, from the reaches of
    both shares.
    """
    squared = first**2 - 2 * phi * first * second + second**2
    return float(np.sqrt(max(squared, 0)))


def detectable_difference(n: int, disagreement: float) -> float:
    """The smallest difference in accuracy that McNemar's test at the 5 % level detects with 80 %
    power.

    ``n d² = (z(97.5 %) √ψ + z(80 %) √(ψ − d²))²`` with ψ the share of problems on which the two
    disagree; if it is smaller than d, all disagreement is in one direction and ψ = d. Source:
    Connor, Biometrics 1987.

    Args:
        n: The number of problems.
        disagreement: The share of problems on which the two disagree.

    Returns:
        The difference of two accuracies, at most 1 even where that is not detected.

    Raises:
        OptionError: The disagreement is not a share between 0 and 1, or there is no problem.
    """
    check_counts(n=n)
    if not 0 <= disagreement <= 1:
        raise OptionError(
            f"disagreement={disagreement}: give the share of problems on which the answers differ"
        )
    z_level = stats.norm.ppf(0.975)
    z_power = stats.norm.ppf(0.8)

    def shortfall(difference: float) -> float:
        """``n d²`` less what it has to be: below 0 where the difference is not detected."""
        share = max(disagreement, difference)
        spread = np.sqrt(max(share - difference**2, 0))
        needed = z_level * np.sqrt(share) + z_power * spread
        return n * difference**2 - needed**2

    if shortfall(1.0) <= 0:
        return 1.0
    return float(optimize.brentq(shortfall, 1e-12, 1.0))


def pass_at_k(right: np.ndarray, samples: int, k: int) -> np.ndarray:
    """Unbiased probability per problem that one of k answers is right:
    ``1 − C(n − c, k) / C(n, k)``, that of a right one among k drawn without replacement.

    Args:
        right: c, the number of right answers per problem.
        samples: n, the number of answers per problem.
        k: The number of answers drawn.

    Returns:
        The probability per problem, in the shape of ``right``.

    Raises:
        OptionError: k is not between 1 and the number of samples.

    Source: Chen et al., arXiv:2107.03374.
    """
    if not 1 <= k <= samples:
        raise OptionError(
            f"k={k} with {samples} answers per problem: give k from 1 to the number of answers"
        )
    return np.asarray(stats.hypergeom.sf(0, samples, right, k))


class ShareInterval(NamedTuple):
    """A share, or a difference of shares, and the ends of its interval."""

    estimate: float
    low: float
    high: float


def share_interval(values: np.ndarray, level: float = 0.95) -> ShareInterval:
    """The mean of units' shares, each between 0 and 1, with a score interval within 0 and 1; NaN is
    left out.

    Wilson's interval for ``n / φ`` trials with Student's t, where φ is the variance between units
    as a fraction of ``p (1 − p)``, drawn towards 1 where few units differ from 0 (or 1, whichever
    is nearer): when all are right there is no variance to measure, and each unit counts as one
    trial. Without averages, where each unit is 0 or 1, it is Wilson's interval. Coverage at nominal
    95 %, measured with beta-binomial answers, 12 to 200 problems of 8 answers and shares of 0.5 to
    0.99: 95 to 100 %, but for 12 problems at 0.99 (90 to 100 %).

    Args:
        values: The share of each unit, such as of right answers to a problem [unit].
        level: The level of the interval.

    Returns:
        The share and the ends of its interval; NaN without any value.

    Raises:
        OptionError: The level is not a number from 0.5 to below 1.
    """
    shares = values[~np.isnan(values)]
    n = len(shares)
    if not n:
        return ShareInterval(np.nan, np.nan, np.nan)

    # How many trials of one answer each the units are worth, and the degrees of freedom of that.
    mean = float(shares.mean())
    single_spread = mean * (1 - mean)  # the variance if each unit were 0 or 1
    trials: float = n
    freedom = np.inf
    is_single_answer = np.isin(shares, (0, 1)).all()
    if n > 1 and not is_single_answer:
        freedom = n - 1
        measured_ratio = min(1.0, float(shares.var(ddof=1)) / single_spread)
        # Where few units differ from the edge, the measured variance says little: φ is drawn
        # towards 1.
        nearer_edge = round(mean)
        off_edge = int((shares != nearer_edge).sum())
        weight = off_edge / (off_edge + _FEW_OFF_EDGE)
        trials = n / (weight * measured_ratio + 1 - weight)
    quantile = float(t_quantile(level, freedom))

    # Wilson's interval.
    shrink = 1 + quantile**2 / trials
    centre = (mean + quantile**2 / (2 * trials)) / shrink
    score_variance = single_spread / trials + quantile**2 / (4 * trials**2)
    half = quantile / shrink * np.sqrt(score_variance)
    low = float(np.clip(centre - half, 0, mean))
    high = float(np.clip(centre + half, mean, 1))
    return ShareInterval(mean, low, high)


def share_difference(d: np.ndarray) -> ShareInterval:
    """The mean of units' differences between two shares, with a 95 % t interval that few differing
    units don't shrink to 0.

    The variance is drawn towards that of one unit of +1 and one of −1 among ``n + 2`` (as Bonett
    and Price 2012 do for single answers) where few units differ at all, and is never below the
    measured one.

    Args:
        d: The difference of each unit's shares, between −1 and 1 [unit].

    Returns:
        The mean difference and the ends of its interval, cut off at −1 and 1.

    Raises:
        OptionError: There are fewer than three units.
    """
    n = len(d)
    mean = float(t_interval(d).estimate)
    error = share_deviation(d) / np.sqrt(n)
    half = t_quantile(0.95, n - 1) * error
    low, high = np.clip([mean - half, mean + half], -1, 1)
    return ShareInterval(mean, float(low), float(high))


def share_deviation(d: np.ndarray) -> float:
    """The standard deviation of units' differences that :func:`share_difference` takes.

    ``√max(s², w s² + (1 − w) · 2 / (n + 2))`` with ``w = differing / (differing + 3)``, where 2 /
    (n + 2) is the variance of one +1 and one −1 among n + 2.
    """
    differing = int((d != 0).sum())
    weight = differing / (differing + _FEW_DIFFERING)
    measured = float(d.var(ddof=1))
    prior = 2 / (len(d) + 2)
    drawn = weight * measured + (1 - weight) * prior
    return float(np.sqrt(max(measured, drawn)))
