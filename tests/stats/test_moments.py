"""Moments against numpy in float64, merged in any split."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from mechattn.stats.intervals import Moments

VALUES = np.random.default_rng(0).normal(100, 0.01, (500, 3)).astype(np.float32)


def assert_same(a: Moments, b: Moments, tolerance=1e-10):
    for part in ("n", "mean", "m2"):
        assert_allclose(getattr(a, part), getattr(b, part), rtol=tolerance, atol=tolerance)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), cut=st.integers(1, 9))
def test_merging_two_parts_equals_one_pass(seed, cut):
    values = np.random.default_rng(seed).normal(3, 2, (10, 2, 5))
    values[values > 5] = np.nan
    assert_same(Moments.of(values[:cut]).merge(Moments.of(values[cut:])), Moments.of(values))


def test_mean_and_variance_equal_numpy():
    moments = Moments.of(VALUES)
    exact = VALUES.astype(np.float64)
    assert_allclose(moments.known_mean, exact.mean(0), rtol=1e-12)
    assert_allclose(moments.variance, exact.var(0, ddof=1), rtol=1e-9)


def test_a_float32_sum_of_squares_would_be_noticed():
    naive = (VALUES**2).mean(0) - VALUES.mean(0) ** 2
    assert (abs(naive / Moments.of(VALUES).variance - 1) > 0.5).any()


def test_a_longer_row_widens_the_moments():
    short = np.ones((2, 3))
    long = np.full((2, 5), 2.0)
    merged = Moments.of(short).merge(Moments.of(long))
    assert merged.n.tolist() == [4, 4, 4, 2, 2]
    assert merged.known_mean.tolist() == [1.5, 1.5, 1.5, 2, 2]
