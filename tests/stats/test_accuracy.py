"""Accuracy against enumeration, scipy, published examples, and simulated answers."""

from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from mechattn.errors import OptionError
from mechattn.stats.accuracy import (
    detectable_difference,
    mcnemar_mid_p,
    paired_accuracy,
    pass_at_k,
)


@pytest.mark.parametrize("n", [1, 6])
def test_pass_at_k_by_enumeration(n):
    for right in range(n + 1):
        answers = [i < right for i in range(n)]
        for k in range(1, n + 1):
            draws = list(combinations(answers, k))
            expected = sum(any(draw) for draw in draws) / len(draws)
            assert float(pass_at_k(np.array([right]), n, k)[0]) == pytest.approx(expected)


@pytest.mark.parametrize(("b", "c"), [(0, 0), (5, 5), (2, 9), (0, 12), (30, 41)])
def test_mid_p_by_enumeration(b, c):
    n = b + c
    outcomes = np.arange(n + 1)
    probabilities = stats.binom.pmf(outcomes, n, 0.5)
    is_as_extreme = abs(outcomes - n / 2) >= abs(b - n / 2) - 1e-9
    expected = probabilities[is_as_extreme].sum() - probabilities[b]
    if b == c:
        expected = 1.0
    assert mcnemar_mid_p(b, c) == pytest.approx(expected, abs=1e-12)


def test_newcombe_example():
    """Newcombe 1998, table II: 36 both, 12 first alone, 2 second alone, 0 neither: 0.2 [0.0569, 0.3404]."""
    first = [True] * 36 + [True] * 12 + [False] * 2
    second = [True] * 36 + [False] * 12 + [True] * 2
    comparison = paired_accuracy(first, second)
    assert comparison.difference == pytest.approx(0.2)
    assert (comparison.low, comparison.high) == pytest.approx((0.0569, 0.3404), abs=1e-4)
    assert (comparison.only_first, comparison.only_second, comparison.n) == (12, 2, 50)


def simulated(difference, runs, n=200, disagreement=0.2, seed=0):
    rng = np.random.default_rng(seed)
    shares = [(disagreement + difference) / 2, (disagreement - difference) / 2, 0.5, 0.3]
    for counts in rng.multinomial(n, shares, size=runs):
        first = np.repeat([True, False, True, False], counts)
        second = np.repeat([False, True, True, False], counts)
        yield paired_accuracy(first, second)


def test_power_and_nominal_rate():
    """A difference as large as is called detectable is found in 80 % of runs; none in 5 %; intervals cover 95 %."""
    d = detectable_difference(200, 0.2)
    some = list(simulated(d, 200))
    assert 0.73 < np.mean([made.p < 0.05 for made in some]) < 0.88
    assert 0.91 < np.mean([made.low <= d <= made.high for made in some]) < 0.985
    none = list(simulated(0.0, 300, seed=1))
    assert 0.02 < np.mean([made.p < 0.05 for made in none]) < 0.08
    assert 0.92 < np.mean([made.low <= 0 <= made.high for made in none]) < 0.98


def test_detectable_difference():
    assert detectable_difference(500, 0.1) < detectable_difference(100, 0.1)
    assert detectable_difference(3, 0.1) == 1, "with three problems nothing is found"
    with pytest.raises(OptionError, match="give the share"):
        detectable_difference(100, 1.2)


@pytest.mark.parametrize("disagreement", [0.0, 0.005])
def test_detectable_where_answers_hardly_differ(disagreement):
    """All disagreement on one side: found in about 80 % of simulated runs."""
    d = detectable_difference(200, disagreement)
    counts = np.random.default_rng(0).binomial(200, d, 4000)
    values, times = np.unique(counts, return_counts=True)
    is_found = [mcnemar_mid_p(int(value), 0) < 0.05 for value in values]
    assert 0.72 < np.average(is_found, weights=times) < 0.95


@pytest.mark.parametrize(("first", "second"), [([], []), ([True], [True, False, True])])
def test_answers_that_are_not_paired_are_refused(first, second):
    with pytest.raises(OptionError, match="give one answer per problem for each condition"):
        paired_accuracy(first, second)


def test_many_problems_do_not_overflow():
    """The product of four counts is beyond 64 bits; the interval is then that of the normal distribution."""
    rng = np.random.default_rng(0)
    n = 140_000
    first = rng.random(n) < 0.6
    second = np.where(rng.random(n) < 0.8, first, rng.random(n) < 0.5)
    many = paired_accuracy(first, second)
    difference = first.mean() - second.mean()
    d = first.astype(float) - second
    half = 1.96 * d.std() / n**0.5
    assert many.low == pytest.approx(difference - half, abs=1e-5)
    assert many.high == pytest.approx(difference + half, abs=1e-5)
