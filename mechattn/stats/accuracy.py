"""Statistics for right and wrong answers: pass@k, paired comparisons and detectable differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, special, stats

from mechattn.errors import OptionError
from mechattn.stats.intervals import wilson_interval


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
    first: Sequence[bool] | np.ndarray, second: Sequence[bool] | np.ndarray, level: float = 0.95
) -> PairedAccuracy:
    """Compare the accuracy of two conditions on the same problems.

    Raises:
        OptionError: The numbers of problems differ or are 0.
    """
    a, b = np.asarray(first, dtype=bool), np.asarray(second, dtype=bool)
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise OptionError(
            f"{len(a)} answers against {len(b)}: give both an answer to every problem, and at least one problem"
        )
    only_first, only_second = int((a & ~b).sum()), int((~a & b).sum())
    low, high = _newcombe(a, b, level)
    return PairedAccuracy(
        difference=float(a.mean() - b.mean()),
        low=low,
        high=high,
        p=mcnemar_mid_p(only_first, only_second),
        only_first=only_first,
        only_second=only_second,
        n=len(a),
        detectable=detectable_difference(len(a), (only_first + only_second) / len(a)),
    )


def mcnemar_mid_p(only_first: int, only_second: int) -> float:
    """The two-sided mid-p McNemar test: the exact p-value minus half the probability of the observed outcome.

    The exact test is conservative. Source: Fagerland, Lydersen and Laake, BMC Medical Research Methodology 2013.
    """
    n, least = only_first + only_second, min(only_first, only_second)
    if not n:
        return 1.0
    return float(min(1.0, 2 * stats.binom.cdf(least, n, 0.5) - stats.binom.pmf(least, n, 0.5)))


def _newcombe(a: np.ndarray, b: np.ndarray, level: float) -> tuple[float, float]:
    """Newcombe's method 10 (Statistics in Medicine 1998): Wilson's intervals, with the correlation of the answers."""
    n = len(a)
    both, neither = int((a & b).sum()), int((~a & ~b).sum())
    only_first, only_second = int((a & ~b).sum()), int((~a & b).sum())
    margins = (both + only_first) * (neither + only_second) * (both + only_second) * (neither + only_first)
    covariance: float = both * neither - only_first * only_second
    if covariance > 0:
        covariance = max(covariance - n / 2, 0)
    phi = covariance / np.sqrt(margins) if margins else 0.0
    p1, p2 = a.mean(), b.mean()
    (low1, high1), (low2, high2) = (wilson_interval(int(x.sum()), n, level) for x in (a, b))
    down, up = p1 - low1, high1 - p1
    down2, up2 = p2 - low2, high2 - p2
    below = np.sqrt(max(down**2 - 2 * phi * down * up2 + up2**2, 0))
    above = np.sqrt(max(up**2 - 2 * phi * up * down2 + down2**2, 0))
    return float(p1 - p2 - below), float(p1 - p2 + above)


def detectable_difference(n: int, disagreement: float, power: float = 0.8, level: float = 0.95) -> float:
    """The smallest difference in accuracy that McNemar's test detects with a given power.

    ``n d² = (z(level) √ψ + z(power) √(ψ − d²))²`` with ψ the share of problems on which the two disagree; if it is
    smaller than d, all disagreement is in one direction and ψ = d. Source: Connor, Biometrics 1987.

    Raises:
        OptionError: The disagreement is not a share between 0 and 1.
    """
    if not 0 <= disagreement <= 1:
        raise OptionError(f"disagreement={disagreement}: give the share of problems on which the answers differ")
    alpha, beta = stats.norm.ppf((1 + level) / 2), stats.norm.ppf(power)

    def short(d: float) -> float:
        share = max(disagreement, d)
        return n * d**2 - (alpha * np.sqrt(share) + beta * np.sqrt(max(share - d**2, 0))) ** 2

    return 1.0 if short(1.0) <= 0 else float(optimize.brentq(short, 1e-12, 1.0))


def pass_at_k(right: np.ndarray, samples: int, k: int) -> np.ndarray:
    """Unbiased probability per problem that one of k answers is right: ``1 − C(n − c, k) / C(n, k)``.

    Args:
        right: c, the number of right samples per problem.
        samples: n, the number of answers per problem.
        k: The number of answers drawn.

    Raises:
        OptionError: k is not between 1 and the number of samples.

    Source:
        Chen et al., arXiv:2107.03374.
    """
    _check_k(k, samples)
    wrong = samples - np.asarray(right)[..., None] - np.arange(k)
    return 1 - np.prod(np.clip(wrong, 0, None) / (samples - np.arange(k)), axis=-1)


def best_of_k(right: np.ndarray, score: np.ndarray, k: int) -> np.ndarray:
    """Unbiased probability per problem that the highest-scoring of k answers is right.

    The answer of rank i (0 is the best) of n is the best of k in ``C(n − 1 − i, k − 1)`` of ``C(n, k)`` draws.

    Args:
        right: Whether each answer is right [problem, sample].
        score: The score of each answer [problem, sample]; ties go to the earlier sample.
        k: The number of answers drawn.

    Raises:
        OptionError: k is not between 1 and the number of samples.
    """
    samples = right.shape[1]
    _check_k(k, samples)
    ranked = np.take_along_axis(right, np.argsort(-score, axis=1, kind="stable"), 1)
    return ranked @ (special.comb(samples - 1 - np.arange(samples), k - 1) / special.comb(samples, k))


def _check_k(k: int, samples: int) -> None:
    if not 1 <= k <= samples:
        raise OptionError(f"k={k} with {samples} answers per problem: give k from 1 to the number of answers")


def distinct_ngrams(answers: Sequence[Sequence[int]], n: int) -> float:
    """The number of distinct n-grams divided by all n-grams in the answers to one problem; NaN if all are too short.

    Source: "distinct-n" of Li et al., arXiv:1510.03055.
    """
    grams = [tuple(tokens[i : i + n]) for tokens in answers for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else float("nan")
