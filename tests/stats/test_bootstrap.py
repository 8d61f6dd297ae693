"""Bootstrap intervals against loops over resamples, and their coverage on simulated data whose means are known."""

import numpy as np
import pytest
from scipy import stats

from mechattn.stats import bootstrap
from mechattn.stats.bootstrap import (
    of_extremes,
    resample,
    resample_sequentially,
    t_quantiles,
    tails,
    without_noise,
)

TAILS = (0.975, 0.025)


def normal(n, cells, seed, shared=0.0):
    """Differences [prompt, cell] with mean 0 and correlation ``shared`` between cells."""
    generator = np.random.default_rng(seed)
    own, common = generator.normal(size=(n, cells)), generator.normal(size=(n, 1))
    return np.sqrt(1 - shared) * own + np.sqrt(shared) * common


def lognormal(n, cells, seed, shared=0.0):
    return np.exp(normal(n, cells, seed, shared)) - np.exp(0.5)


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
    found = tails(d, np.zeros(d.shape[1]), counts)
    return ends(d, of_extremes(found.largest, found.smallest, level))


def bootstrap_t(d, counts, level):
    """The intervals that each cell's own t* give."""
    return ends(d, t_quantiles(d, counts, level))


def ends(d, quantiles):
    spread = without_noise(d.std(0, ddof=1), d) / np.sqrt(len(d))
    return [d.mean(0) - quantile * spread for quantile in quantiles]


def covered(low, high):
    return bool(((low < 0) & (high > 0)).all())


def signs(d, generator):
    """The usual max-t: the largest |t| of deviations with random signs, so symmetric about 0."""
    n, deviations = len(d), d - d.mean(0)
    flipped = generator.choice([-1.0, 1.0], (499, n, 1)) * deviations
    largest = abs(flipped.mean(1) / (flipped.std(1, ddof=1) / np.sqrt(n))).max(1)
    reach = np.quantile(largest, 0.95) * stats.sem(d)
    return d.mean(0) - reach, d.mean(0) + reach


def widths(ends):
    low, high = ends
    return high - low


@pytest.mark.parametrize("n", [10, 25])
def test_a_sequential_resample_ends_with_the_last_distinct_prompt(n):
    """Every resample has the same number of distinct prompts, and as many draws as collecting so many takes."""
    counts = np.concatenate(resample_sequentially(n, 5_000, np.random.default_rng(0)))
    enough = int(n * (1 - 1 / np.e)) + 1
    assert ((counts > 0).sum(1) == enough).all()
    sizes = counts.sum(1)
    expected = sum(n / (n - found) for found in range(enough))
    spread = np.sqrt(sum(found * n / (n - found) ** 2 for found in range(enough)))
    assert sizes.mean() == pytest.approx(expected, abs=4 * spread / np.sqrt(5_000))
    assert sizes.std() == pytest.approx(spread, rel=0.1)
    np.testing.assert_allclose(counts.mean(0), expected / n, rtol=0.1)
    plain = np.concatenate(resample(n, 5_000, np.random.default_rng(0)))
    assert (plain.sum(1) == n).all()
    assert (plain > 0).sum(1).min() < enough - 1, "a plain resample may have far fewer"


def test_intervals_are_those_of_a_loop_over_the_same_resamples():
    """Correlated, skewed cells, and one whose spread is one prompt's: resamples without that one have none."""
    d = lognormal(25, 4, seed=0, shared=0.5)
    d[:, 3] = np.arange(25) == 7
    error = stats.sem(d)
    plain, sequential = (
        draw(25, 300, np.random.default_rng(1)) for draw in (resample, resample_sequentially)
    )
    t = t_of_each_resample(d, plain)
    got = bootstrap_t(d, plain, 0.95)
    for end, tail in zip(got, TAILS, strict=True):
        np.testing.assert_allclose(end, d.mean(0) - np.quantile(t, tail, axis=0) * error, rtol=1e-8)
    t = t_of_each_resample(d, sequential)
    got = simultaneous(d, sequential, 0.95)
    np.testing.assert_allclose(got[0], d.mean(0) - np.quantile(t.max(1), 0.975) * error, rtol=1e-8)
    np.testing.assert_allclose(got[1], d.mean(0) - np.quantile(t.min(1), 0.025) * error, rtol=1e-8)


def step_down(t, drawn):
    """Adjusted p, written out: the farthest cell against the extremes of all, the next one against those of the rest."""
    left, adjusted, before = list(range(len(t))), np.ones(len(t)), 0.0
    while left:
        cell = max(left, key=lambda i: abs(t[i]))
        far = drawn[:, left].max(1) >= t[cell] if t[cell] > 0 else drawn[:, left].min(1) <= t[cell]
        before = adjusted[cell] = max(before, min(1.0, 2 * (1 + far.sum()) / (1 + len(drawn))))
        left.remove(cell)
    return adjusted


def test_the_p_of_all_cells_together_are_those_of_a_step_down_written_out(monkeypatch):
    d = lognormal(24, 9, seed=2, shared=0.5)
    d[:, :3] += 0.8
    d[:, 3] -= 1.0
    counts, t = resample_sequentially(24, 300, np.random.default_rng(1)), t_of(d)
    drawn = t_of_each_resample(d, counts)
    monkeypatch.setattr(bootstrap, "_COLUMNS", 4)
    got = tails(d, t, counts)
    np.testing.assert_allclose(got.family, step_down(t, drawn))
    mild = t_of_each_resample(d, counts, smallest=1 / stats.t.isf(0.025 / 9, 23))
    own = np.minimum(1, 2 * np.where(t > 0, mild >= t, mild <= t).mean(0))
    np.testing.assert_allclose(got.p, np.maximum(own, step_down(t, mild) / 9))
    assert (got.p > own).any(), "negative control: the part of the family counts"
    at_once = np.where(t > 0, drawn.max(1)[:, None] >= t, drawn.min(1)[:, None] <= t)
    once = np.minimum(1, 2 * (1 + at_once.sum(0)) / 301)
    assert (got.family <= once).all()
    assert (got.family < once).any(), "negative control: one step for all would be larger"


def test_cells_and_resamples_that_are_held_a_few_at_a_time_give_the_same(monkeypatch):
    d, counts = lognormal(20, 7, seed=1), resample_sequentially(20, 50, np.random.default_rng(0))
    whole = *bootstrap_t(d, counts, 0.9), *simultaneous(d, counts, 0.9)
    monkeypatch.setattr(bootstrap, "_COLUMNS", 3)
    cut = [counts[0][:20], counts[0][20:40], counts[0][40:]]
    np.testing.assert_allclose((*bootstrap_t(d, cut, 0.9), *simultaneous(d, cut, 0.9)), whole)


@pytest.mark.parametrize(("n", "shared"), [(20, 0.0), (64, 0.67)])
def test_simultaneous_intervals_of_lognormal_data_cover(n, shared):
    """Measured .96 to .98."""
    found = []
    for seed in range(200):
        counts = resample_sequentially(n, 499, np.random.default_rng(seed))
        found.append(covered(*simultaneous(lognormal(n, 32, seed, shared), counts, 0.95)))
    assert np.mean(found) >= 0.91


def test_random_signs_would_not_cover_lognormal_data():
    """Negative control: a symmetric reference, right for normal data, covers .17 and .58 where it should .95."""

    def coverage(draw, shared):
        generator = np.random.default_rng(0)
        return np.mean(
            [covered(*signs(draw(20, 32, seed, shared), generator)) for seed in range(60)]
        )

    assert coverage(normal, 0.0) > 0.87
    assert coverage(lognormal, 0.0) < 0.4
    assert coverage(lognormal, 0.67) < 0.8


def test_plain_resamples_would_be_too_wide():
    """Negative control of the sequential ones: of 10 prompts some plain resamples hold hardly any spread."""
    d, generator = normal(10, 200, seed=0), np.random.default_rng(0)
    plain = simultaneous(d, resample(10, 999, generator), 0.95)
    sequential = simultaneous(d, resample_sequentially(10, 999, generator), 0.95)
    assert np.median(widths(plain)) > 1.3 * np.median(widths(sequential))


def test_one_prompt_that_makes_all_of_a_cells_spread_does_not_make_the_others_endless(monkeypatch):
    """Resamples without it have a spread of rounding, and t* of millions."""
    d = normal(20, 30, seed=0)
    counts = resample_sequentially(20, 999, np.random.default_rng(0))
    without = widths(simultaneous(d, counts, 0.95))
    wild = 1e-9 * normal(20, 1, seed=1)
    wild[3] = 1.0
    both = np.hstack([d, wild])
    widened = widths(simultaneous(both, counts, 0.95))[:30]
    assert (widened < 6 * without).all()
    monkeypatch.setattr(bootstrap, "_SMALLEST_SPREAD", 1e-12)
    assert (widths(simultaneous(both, counts, 0.95))[:30] > 1e5 * without).all(), "negative control"


def test_cells_that_differ_by_rounding_only_are_left_out():
    """Their spread would be 1e-17, and one of them would widen the intervals of all."""
    d, counts = normal(24, 5, seed=0), resample_sequentially(24, 200, np.random.default_rng(0))
    constant = np.full((24, 1), 1.0)
    constant[3] += 4e-16
    assert constant.std() > 0
    low, high = simultaneous(np.hstack([d, constant]), counts, 0.95)
    expected = simultaneous(d, counts, 0.95)
    np.testing.assert_array_equal((low[:5], high[:5]), expected)
    np.testing.assert_allclose((low[5], high[5]), 1.0)


def test_no_cells():
    counts = resample(20, 50, np.random.default_rng(0))
    for made in (
        bootstrap_t(np.empty((20, 0)), counts, 0.95),
        simultaneous(np.empty((20, 0)), counts, 0.95),
    ):
        assert [end.shape for end in made] == [(0,), (0,)]
