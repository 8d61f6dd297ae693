"""Bootstrap intervals against loops over resamples, and their coverage on simulated data whose means are known."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats

from mechattn.stats import resampling
from mechattn.stats.resampling import (
    deviation_without_rounding,
    p_values,
    resample,
    resample_sequentially,
    t_quantiles,
    tails,
)
from tests.stats.test_paired import drawn as normal


def lognormal(n, cells, seed, shared=0.0):
    return np.exp(normal(n, cells, seed, shared=shared)) - np.exp(0.5)


def t_of_each_resample(d, counts, smallest=0.1):
    """t* [resample, cell], one resample after another, each written out as its prompts."""
    made = []
    for row in np.concatenate(counts):
        drawn = np.repeat(d, row, axis=0)
        error = np.maximum(stats.sem(drawn), smallest * stats.sem(d))
        made.append((drawn.mean(0) - d.mean(0)) / error)
    return np.array(made)


def t_of(d):
    return d.mean(0) / stats.sem(d)


def simultaneous(d, counts, level):
    """The intervals that the extreme t* of all cells give."""
    extremes = tails(d, np.zeros(d.shape[1]), counts, level)
    return ends(d, (extremes.upper, extremes.lower))


def bootstrap_t(d, counts, level):
    """The intervals that each cell's own t* give."""
    return ends(d, t_quantiles(d, counts, level))


def ends(d, quantiles):
    spread = deviation_without_rounding(d.std(0, ddof=1), d) / np.sqrt(len(d))
    return [d.mean(0) - quantile * spread for quantile in quantiles]


def covered(low, high):
    return ((low < 0) & (high > 0)).all()


def widths(ends):
    low, high = ends
    return high - low


def test_a_t_without_a_known_error_is_not_infinite():
    assert np.isnan(resampling.t_of(1.0, np.nan))


def test_a_sequential_resample_ends_with_the_last_distinct_prompt():
    """Every resample has the same number of distinct prompts, and as many draws as collecting so many takes."""
    n = 10
    counts = np.concatenate(resample_sequentially(n, 5_000, np.random.default_rng(0)))
    enough = int(n * (1 - 1 / np.e)) + 1
    assert ((counts > 0).sum(1) == enough).all()

    distinct = np.arange(enough)
    expected = (n / (n - distinct)).sum()
    assert counts.sum(1).mean() == pytest.approx(expected, rel=0.02)
    assert_allclose(counts.mean(0), expected / n, rtol=0.1)

    plain = np.concatenate(resample(n, 5_000, np.random.default_rng(0)))
    assert (plain.sum(1) == n).all()
    assert (plain > 0).sum(1).min() < enough - 1, "a plain resample may have far fewer"


def test_intervals_are_those_of_a_loop_over_the_same_resamples():
    """Correlated, skewed cells, and one whose spread is one prompt's: resamples without that one have none."""
    d = lognormal(25, 4, seed=0, shared=0.5)
    d[:, 3] = np.arange(25) == 7
    error = stats.sem(d)
    plain, sequential = (
        draw(25, 120, np.random.default_rng(1)) for draw in (resample, resample_sequentially)
    )
    t = t_of_each_resample(d, plain)
    expected = d.mean(0) - np.quantile(t, [0.975, 0.025], axis=0) * error
    assert_allclose(bootstrap_t(d, plain, 0.95), expected, rtol=1e-8)
    t = t_of_each_resample(d, sequential)
    low = d.mean(0) - np.quantile(t.max(1), 0.975) * error
    high = d.mean(0) - np.quantile(t.min(1), 0.025) * error
    assert_allclose(simultaneous(d, sequential, 0.95), [low, high], rtol=1e-8)


def step_down(t, drawn):
    """Adjusted p, written out: the farthest cell against the extremes of all, the next one against those of the rest."""
    farthest_first = np.argsort(-abs(t))
    adjusted = np.ones(len(t))
    before = 0.0
    for place, cell in enumerate(farthest_first):
        left = farthest_first[place:]
        outwards = np.sign(t[cell]) * drawn[:, left]
        is_as_far = outwards.max(1) >= abs(t[cell])
        before = max(before, two_sided(is_as_far.sum(), len(drawn)))
        adjusted[cell] = before
    return adjusted


def two_sided(count, resamples):
    return np.minimum(1.0, 2 * (1 + count) / (1 + resamples))


def test_family_p_values_equal_a_written_out_step_down(monkeypatch):
    d = lognormal(24, 9, seed=2, shared=0.5)
    d[:, :3] += 0.8
    d[:, 3] -= 1.0
    t = t_of(d)
    counts = resample_sequentially(24, 150, np.random.default_rng(1))
    drawn = t_of_each_resample(d, counts)
    monkeypatch.setattr(resampling, "_CELLS_AT_ONCE", 4)
    got = tails(d, t, counts, 0.95)
    assert_array_equal(p_values(d, t, counts), got.p)
    assert_allclose(got.p_adjusted, step_down(t, drawn))

    mild = t_of_each_resample(d, counts, smallest=1 / stats.t.isf(0.025 / 9, 23))
    is_as_far = np.where(t > 0, mild >= t, mild <= t)
    p_alone = np.minimum(1, 2 * is_as_far.mean(0))
    assert_allclose(got.p, np.maximum(p_alone, step_down(t, mild) / 9))
    assert (got.p > p_alone).any(), "negative control: the part of the family counts"

    upper = drawn.max(1)[:, None] >= t
    lower = drawn.min(1)[:, None] <= t
    in_one_step = two_sided(np.where(t > 0, upper, lower).sum(0), 150)
    assert (got.p_adjusted < in_one_step).any(), (
        "negative control: one step for all would be larger"
    )


@pytest.mark.parametrize(("n", "shared"), [(20, 0.0), (64, 0.67)])
def test_simultaneous_intervals_of_lognormal_data_cover(n, shared):
    """Measured .96 to .98; intervals that are symmetric and adjusted for as many cells cover far less."""
    found = []
    for seed in range(80):
        d = lognormal(n, 32, seed, shared)
        counts = resample_sequentially(n, 499, np.random.default_rng(seed))
        symmetric = stats.ttest_1samp(d, 0).confidence_interval(1 - 0.05 / 32)
        found.append([covered(*simultaneous(d, counts, 0.95)), covered(*symmetric)])
    ours, by_t = np.mean(found, axis=0)
    assert ours >= 0.9
    assert by_t < 0.85, "negative control"


def test_plain_resamples_would_be_too_wide():
    """Negative control of the sequential ones: of 10 prompts some plain resamples hold hardly any spread."""
    d = normal(10, 200, seed=0)
    generator = np.random.default_rng(0)
    plain = simultaneous(d, resample(10, 999, generator), 0.95)
    sequential = simultaneous(d, resample_sequentially(10, 999, generator), 0.95)
    assert np.median(widths(plain)) > 1.3 * np.median(widths(sequential))


def test_one_outlying_prompt_leaves_other_cells_finite(monkeypatch):
    """Resamples without it have a spread of rounding, and t* of millions."""
    d = normal(20, 30, seed=0)
    counts = resample_sequentially(20, 999, np.random.default_rng(0))
    without = widths(simultaneous(d, counts, 0.95))
    wild = 1e-9 * normal(20, 1, seed=1)
    wild[3] = 1.0
    both = np.hstack([d, wild])
    widened = widths(simultaneous(both, counts, 0.95))[:30]
    assert (widened < 6 * without).all()
    monkeypatch.setattr(resampling, "_SMALLEST_SPREAD", 1e-12)
    assert (widths(simultaneous(both, counts, 0.95))[:30] > 1e5 * without).all(), "negative control"
