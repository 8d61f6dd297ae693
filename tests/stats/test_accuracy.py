"""Accuracy against enumeration, scipy, published examples, and simulated answers."""

from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from mechattn.errors import OptionError
from mechattn.stats.accuracy import (
    best_of_k,
    detectable_difference,
    distinct_ngrams,
    mcnemar_mid_p,
    paired_accuracy,
    pass_at_k,
)


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_by_enumeration(n):
    for right in range(n + 1):
        answers = [i < right for i in range(n)]
        for k in range(1, n + 1):
            draws = list(combinations(answers, k))
            expected = sum(any(draw) for draw in draws) / len(draws)
            assert float(pass_at_k(np.array([right]), n, k)[0]) == pytest.approx(expected)


def test_k_out_of_range():
    for k in (0, 21):
        with pytest.raises(OptionError, match=f"k={k} with 20 answers"):
            pass_at_k(np.array([0, 3, 20]), 20, k)
        with pytest.raises(OptionError, match=f"k={k} with 20 answers"):
            best_of_k(np.ones((3, 20)), np.ones((3, 20)), k)


def test_best_of_k_by_enumeration():
    """Every draw of k answers, the highest score of which is looked up; ties go to the earlier one."""
    rng = np.random.default_rng(0)
    right, score = rng.random((5, 6)) < 0.5, rng.integers(0, 4, (5, 6)).astype(float)
    for k in range(1, 7):
        draws = list(combinations(range(6), k))
        expected = [
            np.mean([r[max(draw, key=lambda i: (s[i], -i))] for draw in draws])
            for r, s in zip(right, score)
        ]
        np.testing.assert_allclose(best_of_k(right, score, k), expected, atol=1e-12)
    assert not np.allclose(best_of_k(right, -score, 3), best_of_k(right, score, 3)), (
        "the order of scores matters"
    )


@pytest.mark.parametrize(("b", "c"), [(0, 0), (1, 0), (5, 5), (2, 9), (9, 2), (0, 12), (30, 41)])
def test_mid_p_by_enumeration(b, c):
    n = b + c
    probabilities = stats.binom.pmf(np.arange(n + 1), n, 0.5)
    observed = probabilities[b]
    as_extreme = probabilities[np.abs(np.arange(n + 1) - n / 2) >= abs(b - n / 2) - 1e-9].sum()
    expected = 1.0 if b == c else as_extreme - observed
    assert mcnemar_mid_p(b, c) == pytest.approx(expected, abs=1e-12)
    if n:
        assert mcnemar_mid_p(b, c) <= stats.binomtest(min(b, c), n).pvalue + 1e-12


def test_newcombe_example():
    """Newcombe 1998, table II: 36 both, 12 first alone, 2 second alone, 0 neither: 0.2 [0.0569, 0.3404]."""
    first = [True] * 36 + [True] * 12 + [False] * 2
    second = [True] * 36 + [False] * 12 + [True] * 2
    made = paired_accuracy(first, second)
    assert made.difference == pytest.approx(0.2)
    assert (made.low, made.high) == (
        pytest.approx(0.0569, abs=1e-4),
        pytest.approx(0.3404, abs=1e-4),
    )
    assert (made.only_first, made.only_second, made.n) == (12, 2, 50)


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
    some = list(simulated(d, 350))
    assert 0.76 < np.mean([made.p < 0.05 for made in some]) < 0.86
    assert 0.92 < np.mean([made.low <= d <= made.high for made in some]) < 0.975
    none = list(simulated(0.0, 1000, seed=1))
    assert 0.03 < np.mean([made.p < 0.05 for made in none]) < 0.062
    assert 0.93 < np.mean([made.low <= 0 <= made.high for made in none]) < 0.97


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
    assert 0.72 < np.mean([mcnemar_mid_p(int(count), 0) < 0.05 for count in counts]) < 0.95


def test_bad_input():
    with pytest.raises(OptionError, match="3 answers against 2"):
        paired_accuracy([True] * 3, [True] * 2)
    with pytest.raises(OptionError, match="at least one problem"):
        paired_accuracy([], [])


def test_distinct_ngrams():
    assert distinct_ngrams([[1, 2, 3], [1, 2, 4]], 2) == pytest.approx(3 / 4)
    assert distinct_ngrams([[1, 1, 1, 1]], 1) == pytest.approx(1 / 4)
    assert np.isnan(distinct_ngrams([[1]], 2))
