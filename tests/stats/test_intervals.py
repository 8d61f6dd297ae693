"""Intervals against scipy's own, and their coverage on data with a known mean."""

import numpy as np
import pytest
from scipy import stats

from mechattn.errors import OptionError
from mechattn.stats.intervals import relative_change, t_interval


def test_t_interval_equals_scipy():
    values = np.random.default_rng(0).normal(2, 1, (12, 4))
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    got = t_interval(values)
    np.testing.assert_allclose([got.low, got.high], [expected.low, expected.high], rtol=1e-12)


def test_two_prompts_are_too_few():
    with pytest.raises(OptionError, match="at least 3"):
        t_interval(np.ones((2, 4)))


def test_relative_change_is_that_of_the_geometric_mean():
    change = relative_change(np.array([0.5, 1.0, 2.0]) * 0.8, np.array([0.5, 1.0, 2.0]))
    assert float(change.estimate) == pytest.approx(-0.2)


@pytest.mark.filterwarnings("error")
def test_t_interval_of_a_column_without_observations():
    values = np.array([[1.0, np.nan], [2.0, np.nan], [4.0, np.nan]])
    made = t_interval(values)
    assert made.estimate[0] == pytest.approx(7 / 3)
    assert np.isnan(made.estimate[1])
