"""Shares near 0 and 1: coverage on simulated answers whose shares are known, beside the t interval's."""

import numpy as np
import pytest
from scipy import stats

from mechattn.errors import OptionError
from mechattn.stats.accuracy import share_difference, share_interval
from mechattn.stats.intervals import ratio_interval, shrunken, t_interval, wilson_interval


def answered(share, alike, n, samples, generator):
    """The share of right answers of each of n problems, whose difficulties correlate answers by ``alike``."""
    odds = generator.beta(share * (1 - alike) / alike, (1 - share) * (1 - alike) / alike, n)
    return generator.binomial(samples, odds) / samples


def coverage(interval, truth, draws):
    ends = [interval(each) for each in draws]
    return np.mean([low <= truth <= high for _, low, high in ends])


@pytest.mark.parametrize(("share", "n"), [(0.5, 20), (0.98, 20), (0.05, 24)])
def test_intervals_of_shares_cover(share, n):
    """At nominal 95 %; the binomial error of 300 draws is 1.3 points."""
    generator = np.random.default_rng(n)
    draws = [answered(share, 0.5, n, 8, generator) for _ in range(300)]
    assert coverage(share_interval, share, draws) >= 0.92
    if share != 0.5:
        assert coverage(t_interval, share, draws) < 0.88, "negative control"


def test_single_answers_have_wilsons_interval():
    for right in (0, 3, 20):
        made = share_interval(np.repeat([1.0, 0.0], [right, 20 - right]))
        assert (made.low, made.high) == pytest.approx(wilson_interval(right, 20))
    with pytest.raises(OptionError, match="give shares, between 0 and 1"):
        share_interval(np.array([0.5, 1.5]))


@pytest.mark.parametrize(("first", "second"), [(0.98, 0.9), (0.5, 0.6)])
def test_intervals_of_differences_cover(first, second):
    generator = np.random.default_rng(0)
    draws = [
        answered(first, 0.7, 12, 8, generator) - answered(second, 0.7, 12, 8, generator)
        for _ in range(250)
    ]
    assert coverage(share_difference, first - second, draws) >= 0.91
    if first == 0.98:
        assert coverage(t_interval, first - second, draws) < 0.88, "negative control"
    assert share_difference(np.zeros(12)).high > 0.1, "a difference of 0 is not sure"


def test_a_ratio_interval_inverts_the_t_test():
    generator = np.random.default_rng(3)
    below = generator.normal(2, 1, 20)
    above = below[:, None] * [0.5, 0.0] + generator.normal(0, 0.4, (20, 2))
    made = ratio_interval(above, below)
    for cell in range(2):
        tried = np.linspace(-1, 2, 6001)
        kept = tried[stats.ttest_1samp(above[:, [cell]] - tried * below[:, None], 0).pvalue >= 0.05]
        assert (made.low[cell], made.high[cell]) == pytest.approx((kept[0], kept[-1]), abs=1e-3)
    assert np.isnan(ratio_interval(above, below - below.mean())).all(), "the mean below could be 0"


def test_shrunken_estimates_of_the_largest_are_right_on_average():
    """The largest of 64 measured values is too large by itself."""
    generator = np.random.default_rng(0)
    error = np.full(64, 0.8)
    differences = []
    for _ in range(300):
        truth = generator.normal(0, 1, 64)
        measured = generator.normal(truth, error)
        top = measured.argmax()
        differences.append(
            [measured[top] - truth[top], shrunken(measured, error)[top] - truth[top]]
        )
    plain, ours = np.mean(differences, axis=0)
    assert abs(ours) < 0.15
    assert plain > 0.6, "negative control"
