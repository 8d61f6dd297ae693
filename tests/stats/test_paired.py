"""Paired comparisons against scipy, and on simulated data whose truth is known."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats

from mechattn.stats import resampling
from mechattn.stats.paired import paired
from mechattn.stats.resampling import drawn_signs, flipped
from mechattn.stats.units import detectable_size, power_of, resolution


def drawn(n, cells, seed=0, mean=0.0, shared=0.0):
    """Normal differences [prompt, cell] with correlation ``shared`` between cells."""
    generator = np.random.default_rng(seed)
    own = generator.normal(size=(n, cells))
    common = generator.normal(size=(n, 1))
    return mean + np.sqrt(1 - shared) * own + np.sqrt(shared) * common


def p_of_all_patterns(d):
    """Of each column, by scipy."""
    options = dict(permutation_type="samples", n_resamples=np.inf)
    return [stats.permutation_test((column,), np.mean, **options).pvalue for column in d.T]


def test_intervals_and_tests_are_those_of_scipy():
    d = drawn(11, 5, mean=0.4)
    made = paired(d, 0.1)
    expected = stats.ttest_1samp(d, 0.0).confidence_interval()
    assert_allclose(made.low, expected.low)
    assert_allclose(made.high, expected.high)
    assert_allclose(made.effect_size, (d.mean(0) - 0.1) / d.std(0, ddof=1))
    assert_allclose(made.p_flip, p_of_all_patterns(d - 0.1))
    assert_allclose(made.q, stats.false_discovery_control(made.p))
    assert_allclose(made.skewness, stats.skew(d - 0.1))
    assert np.isnan(made.low_bootstrap).all(), "bootstrap-t is not given below 20 prompts"


def test_drawn_signs_agree_with_all_signs():
    """At 12 prompts all 4,096 patterns are tried; at 13 they are drawn."""
    d = drawn(13, 6, seed=3, mean=0.3)
    got = flipped(d, drawn_signs(len(d), 40_000, np.random.default_rng(0)))
    assert_allclose(got, p_of_all_patterns(d), atol=0.01)
    assert (got > 0).all()


def test_simultaneous_intervals_hold_for_all_cells_at_once():
    """Of 80 experiments with 40 correlated cells about 95 % have every mean inside; single intervals far fewer."""
    covered = []
    for seed in range(80):
        made = paired(drawn(20, 40, seed=seed, shared=0.5), resamples=999)
        together = (made.low_simultaneous < 0) & (made.high_simultaneous > 0)
        covered.append([together.all(), ((made.low < 0) & (made.high > 0)).all()])
    together, single = np.mean(covered, axis=0)
    assert together > 0.88
    assert single < 0.7


@pytest.mark.parametrize("shared", [0.0, 0.67])
def test_false_discoveries_stay_at_the_nominal_rate(shared):
    """40 cells without an effect and 10 with one; the share of false ones among those with q < 0.05, on average."""
    rates = []
    found = []
    for seed in range(80):
        d = drawn(20, 50, seed=seed, shared=shared)
        d[:, 40:] += 1.0
        significant = paired(d, resamples=1999, bootstrap_ends=False).q < 0.05
        rates.append(significant[:40].sum() / max(1, significant.sum()))
        found.append(significant[40:].mean())
    assert np.mean(rates) <= 0.07
    assert np.mean(found) > 0.7


@pytest.mark.parametrize("n", [12, 64])
def test_skewed_differences_without_an_effect_are_not_found(n):
    """32 correlated exponential cells (skewness 2); sign flips alone find some in a tenth to a fifth of tables."""
    found = []
    for seed in range(60):
        d = stats.expon.ppf(stats.norm.cdf(drawn(n, 32, seed=seed, shared=0.5))) - 1
        made = paired(d, resamples=999, bootstrap_ends=False)
        alone = stats.false_discovery_control(made.p_flip)
        found.append([(made.q < 0.05).any(), (alone < 0.05).any()])
    ours, by_signs = np.mean(found, axis=0)
    assert ours <= 0.1
    assert by_signs > 0.08, "negative control"


def test_a_dominated_cell_does_not_hide_the_others(monkeypatch):
    """Its resamples without that prompt have t* of 10 if their smallest spread is a tenth."""

    def found():
        yes = []
        for seed in range(20):
            d = drawn(24, 32, seed=seed)
            d[:, 0] += 1.3
            d[:, 1] *= 1e-3
            d[0, 1] = -0.6
            yes.append(paired(d, resamples=999, bootstrap_ends=False).q[0] < 0.05)
        return np.mean(yes)

    assert found() > 0.8
    monkeypatch.setattr(resampling, "_smallest_spread_for_p", lambda n, cells: 0.1)
    assert found() < 0.2, "negative control"


def ends(made, of=""):
    """All six ends of the intervals of ``difference`` or, with "beyond_", of ``beyond``."""
    return [
        getattr(made, f"{of}{end}{kind}")
        for kind in ("", "_bootstrap", "_simultaneous")
        for end in ("low", "high")
    ]


@pytest.mark.parametrize("n", [9, 19, 20])
def test_the_intervals_of_what_is_beyond_the_null(n):
    """Each prompt has its own null: the intervals are those of its differences, from the same resamples."""
    d = drawn(n, 6, mean=0.4)
    null = drawn(n, 6, seed=1, mean=0.2)
    made = paired(d, null, resamples=999)
    expected = stats.ttest_rel(d, null).confidence_interval()
    assert_allclose((made.beyond_low, made.beyond_high), expected)
    assert_allclose(ends(made, "beyond_"), ends(paired(d - null, resamples=999)))
    assert_array_equal(ends(made), ends(paired(d, resamples=999)))
    assert not np.allclose(made.beyond_low, made.low - made.null.mean(0)), (
        "negative control: moved, they would be wrong"
    )
    given = [bool(np.isfinite(end).all()) for end in ends(made, "beyond_")]
    assert given == [True, True, n >= 20, n >= 20, n >= 10, n >= 10]


def test_where_no_null_is_known_the_difference_is_tested():
    d = drawn(24, 4, mean=0.3)
    without_null = paired(d, None, resamples=999)
    against_zero = paired(d, resamples=999)
    assert np.isnan([without_null.null, without_null.beyond, *ends(without_null, "beyond_")]).all()
    for name in ("difference", "effect_size", "p", "q", "detectable"):
        assert_array_equal(getattr(without_null, name), getattr(against_zero, name))
    assert_array_equal(ends(without_null), ends(against_zero))


@pytest.mark.parametrize(("n", "tests", "effect"), [(12, 1, 0.9), (20, 32, 1.0), (64, 784, 0.6)])
def test_power_is_that_of_simulated_t_tests(n, tests, effect):
    d = np.random.default_rng(0).normal(effect, 1, (n, 20_000))
    assert power_of(effect, n, tests) == pytest.approx(
        (stats.ttest_1samp(d, 0).pvalue < 0.05 / tests).mean(), abs=0.015
    )
    assert power_of(detectable_size(n, tests), n, tests) == pytest.approx(0.8)


def test_the_detectable_mean_is_that_of_the_resolution_when_few_patterns_are_drawn():
    d = drawn(14, 5)
    effect = resolution(14, 5, resamples=99).detectable
    assert_allclose(paired(d, resamples=99).detectable, effect * d.std(0, ddof=1))


def test_no_spread_and_no_difference():
    made = paired(np.zeros((10, 3)))
    assert (made.p == 1).all()
    assert (made.low_simultaneous == 0).all()
    constant = paired(np.full((24, 2), 0.1))
    assert np.isnan(constant.effect_size).all(), "its standard deviation is rounding, 1e-17"
    assert_allclose(ends(constant), 0.1)
    assert np.isnan(paired(np.zeros((9, 3))).low_simultaneous).all(), (
        "too few prompts for all cells at once"
    )


@pytest.mark.parametrize("n", [8, 24])
def test_the_difference_is_tested_beside_what_is_beyond_the_null(n):
    """A fall that the null explains: nothing is beyond it, but there is a difference; and the other way round."""
    d = drawn(n, 8)
    d[:, :4] -= 3.0
    null = d + 0.1 * drawn(n, 8, seed=2)
    null[:, 4:] += 3.0
    made = paired(d, null, resamples=999)
    assert_array_equal(made.p_difference, paired(d, None, resamples=999).p)
    adjusted = stats.false_discovery_control(made.p_difference)
    assert_array_equal(made.q_difference, adjusted)
    assert (made.q_difference < 0.05).tolist() == [True] * 4 + [False] * 4
    assert (made.q[4:] < 0.05).all(), "the two tests are two"


def test_a_difference_within_rounding_is_none():
    d = 1e-6 + 1e-9 * drawn(12, 2)
    null = drawn(12, 2, seed=1)
    assert (paired(d, null, rounding=1e-5).p_difference == 1).all()
    assert (paired(d, null).p_difference < 0.01).all(), "negative control"


def test_a_cell_without_numbers_changes_no_other():
    d = np.random.default_rng(2).normal(0.3, 1.0, (24, 5)) ** 3
    alone = paired(d, resamples=999)
    beside = paired(np.concatenate([d, np.full((24, 1), np.nan)], axis=1), resamples=999)
    assert np.isnan(beside.p[5])
    for name in ("p", "p_flip", "low_bootstrap", "low_simultaneous", "high_simultaneous"):
        assert_array_equal(getattr(beside, name)[:5], getattr(alone, name))
    assert alone.p.min() < 0.1 < alone.p.max(), "some cells are far out, some are not"


def test_a_cell_far_beyond_all_resamples_has_the_smallest_p():
    """Its own resamples are not looked at; a cell of half its t that they reach has no such p."""
    d = np.random.default_rng(0).normal(0, 1.0, (24, 3))
    d -= d.mean(0)
    d /= d.std(0, ddof=1)
    d += np.array([0.0, 0.6, 60.0])
    found = paired(d, resamples=999)
    assert found.p_family[2] == pytest.approx(2 / 1000)
    assert found.p[0] > 0.9
    assert 2 / 1000 < found.p_family[1] < 0.2
