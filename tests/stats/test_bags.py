"""Bags of units: the same inference at a cost that no longer grows with them."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy import stats

from mechattn.stats.paired import paired
from mechattn.stats.units import MOST_SINGLE, Bags, resampled_count

N = 2400  # 800 bags of 3


@pytest.mark.parametrize("n", [2001, 5256, 100_099])
def test_every_unit_is_in_one_bag_and_bags_are_alike(n):
    bags = Bags.drawn(n, 0)
    sizes = np.diff(bags.starts, append=n)
    assert np.array_equal(np.sort(bags.order), np.arange(n))
    assert sizes.max() - sizes.min() <= 1
    assert 600 < bags.n == resampled_count(n) <= 1000
    assert not np.array_equal(bags.order, Bags.drawn(n, 1).order)
    assert Bags.drawn(MOST_SINGLE, 0) is None, "few units are resampled one by one"


def test_means_are_those_of_a_loop():
    values = np.random.default_rng(0).normal(size=(2005, 2, 3))
    bags = Bags.drawn(2005, 7)
    expected = [values[bag].mean(0) for bag in np.split(bags.order, bags.starts[1:])]
    assert_allclose(bags.means(values), expected, rtol=1e-12)
    # Bags of 3 and of 4: their mean is that of all but for a 45th (1 / √n) of its error.
    apart = abs(bags.means(values).mean(0) - values.mean(0)) / (values.std(0) / np.sqrt(2005))
    assert (apart < 0.2).all()
    assert bags.words == "668 random bags of 3 or 4"


def test_what_needs_no_resampling_is_of_the_units():
    """Cohen's d_z over bags of 3 would be √3 times as large."""
    d = np.random.default_rng(1).normal(0.05, 1, size=(N, 4))
    made = paired(d, 0.01, resamples=99, rounding=0.0)
    expected = stats.ttest_1samp(d, 0.0).confidence_interval()
    assert_allclose([made.low, made.high], [expected.low, expected.high])
    assert_allclose(made.effect_size, (d.mean(0) - 0.01) / d.std(0, ddof=1))
    alone = Bags.drawn(N, 0).means(d - 0.01)
    assert (abs(alone.mean(0) / alone.std(0, ddof=1)) > 1.5 * abs(made.effect_size)).all()


def test_bags_in_the_order_of_a_drift_would_be_wrong(monkeypatch):
    """Negative control: values that grow from the first prompt to the last, and neighbours in one bag."""

    def sizes(order):
        generator = np.random.default_rng(4)
        bags = Bags.drawn(N, 0)
        monkeypatch.setattr(
            Bags, "drawn", classmethod(lambda cls, n, seed: cls(order(bags.order), bags.starts))
        )
        tables = [np.sort(generator.normal(size=(N, 40)), axis=0) for _ in range(8)]
        options = dict(resamples=199, bootstrap_ends=False)
        statistics = [paired(d, None, seed=i, **options) for i, d in enumerate(tables)]
        return np.mean([made.p < 0.05 for made in statistics])

    assert 0.01 < sizes(lambda order: order) < 0.1
    # No test finds anything: the means of bags vary √3 times as much as they should.
    assert sizes(np.sort) < 0.005
