"""Tests of very many cells find what `paired` finds, and p are those of a loop over sign patterns."""

from itertools import product

import numpy as np
import pytest

from mechattn.stats import many_tests
from mechattn.stats.many_tests import paired_tests
from mechattn.stats.paired import paired


@pytest.fixture(autouse=True)
def _screened(monkeypatch):
    """As if a few cells were very many."""
    monkeypatch.setattr(many_tests, "_MOST_OF_PAIRED", 10)


def differences(units, cells, effects, seed=0, skewed=False):
    """Columns of noise, the first few of them with an effect."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(units, cells))
    if skewed:
        noise = np.exp(noise) - np.exp(0.5)
    noise[:, :effects] += 2.5
    return noise


def test_p_are_those_of_a_loop_over_all_sign_patterns():
    d = differences(8, 40, 6)
    sums = [abs(np.array(signs) @ d) for signs in product([-1, 1], repeat=8)]
    expected = (np.array(sums) >= abs(d.sum(0)) * (1 - 1e-12)).mean(0)
    np.testing.assert_allclose(paired_tests(d).p, expected, rtol=1e-12)
    other = paired_tests(np.roll(d, 1, axis=1)).p
    assert abs(other - expected).max() > 0.1, "a shifted column would be noticed"


@pytest.mark.parametrize(("units", "skewed"), [(11, False), (12, True), (24, False), (24, True)])
def test_findings_are_those_of_all_tests_on_all_cells(units, skewed):
    d = differences(units, 300, 30, seed=units, skewed=skewed)
    screened = paired_tests(d)
    full = paired(d, None, bootstrap_ends=False)
    is_found = screened.q < 0.05
    assert 20 < is_found.sum() < 60
    assert not is_found[full.q >= 0.05].any()
    assert (is_found != (full.q < 0.05)).sum() <= 1, "patterns that are drawn decide a close one"
    np.testing.assert_allclose(screened.q[is_found], full.q[is_found], atol=0.02)


def test_p_values_of_stopped_cells_stay_valid():
    p = paired_tests(differences(20, 4000, 0, seed=3)).p
    for level in (0.02, 0.1, 0.5):
        error = np.sqrt(level * (1 - level) / 4000)
        assert abs((p < level).mean() - level) < 4 * error


def test_incomplete_columns_are_untested_and_zeros_have_no_effect():
    d = differences(14, 60, 20)
    d[3, 5] = np.nan
    d[:, 50] = 0.0
    tests = paired_tests(d)
    assert np.isnan(tests.p[5])
    assert tests.p[50] == 1
    assert (np.delete(tests.q, 5)[:19] < 0.05).sum() > 10
