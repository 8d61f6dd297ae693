"""Page's test by permutations, against the textbook's statistic, all permutations, and data without a trend."""

from itertools import permutations, product

import numpy as np
import pytest
from scipy import stats

from mechattn.errors import OptionError
from mechattn.stats.trend import trend


def test_every_permutation_by_hand():
    """Four units of three doses: 1,296 orders, ties among them."""
    values = np.array([[0.1, 0.4, 0.9], [0.3, 0.2, 0.8], [0.5, 0.5, 0.7], [0.2, 0.6, 0.4]])
    ranks = stats.rankdata(values, axis=1)
    observed = sum(float(row @ [1, 2, 3]) for row in ranks)
    drawn = [
        sum(float(np.array(row) @ [1, 2, 3]) for row in rows)
        for rows in product(*map(permutations, ranks))
    ]
    above, below = (
        np.mean([sign * d >= sign * observed - 1e-9 for d in drawn]) for sign in (1, -1)
    )
    found = trend(values, resamples=100_000)
    assert found.p == pytest.approx(min(1, 2 * min(above, below)), abs=1e-12)
    by_unit = [stats.spearmanr([1, 2, 3], row).statistic for row in values]
    assert found.rho == pytest.approx(np.mean(by_unit))
    assert (found.n, found.doses) == (4, 3)


def test_pages_statistic_without_ties():
    """Large samples: scipy's own test, which has no ties to mind, agrees."""
    generator = np.random.default_rng(1)
    values = generator.normal(size=(30, 5)) + 0.15 * np.arange(5)
    one_sided = stats.page_trend_test(values).pvalue
    assert trend(values).p == pytest.approx(2 * one_sided, abs=0.005)
    falling = trend(-values)
    assert falling.rho == pytest.approx(-trend(values).rho)


def test_values_without_a_trend_are_found_in_one_case_of_twenty():
    generator = np.random.default_rng(2)
    found = [
        trend(generator.integers(0, 2, (12, 4)), resamples=199, seed=i).p < 0.05 for i in range(300)
    ]
    assert 0.005 < np.mean(found) < 0.09


def test_all_values_equal():
    found = trend(np.ones((5, 3)))
    assert (found.rho, found.p) == (0, 1)


@pytest.mark.parametrize(
    "values", [np.ones((5, 2)), np.ones((2, 3)), np.full((5, 3), np.nan), np.ones(5)]
)
def test_too_little_for_a_trend(values):
    with pytest.raises(OptionError, match="at least three doses and 3 units"):
        trend(values)
