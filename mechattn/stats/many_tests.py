"""Tests of very many cells, such as all edges of a model: each as far as a finding needs it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from mechattn.stats import bootstrap
from mechattn.stats.intervals import blocks_of
from mechattn.stats.paired import FEWEST_FOR_ALL, false_discovery, paired, skewed_words
from mechattn.stats.resolution import EXACT, RESAMPLES, enough
from mechattn.stats.units import ALONE

_MANY = 4000  # cells; fewer are tested by `paired`, in a second or two
_LEVEL = 0.05  # of the findings that are exact
_ENOUGH_SEEN = 100  # patterns with as large a mean, after which a cell is tried no further
_FEW_SEEN = 10  # of the first 10,000: with fewer, more patterns may still make a finding
_COLUMNS = 1000  # cells at a time, so that 2,000 patterns of them take 8 MB
_PATTERNS = 2000
_BESIDE = 1000  # cells without a finding that are resampled with the others


class PairedTests(NamedTuple):
    """Two-sided p and q of every cell, and where the tests disagree, in words."""

    p: np.ndarray
    q: np.ndarray
    skewed: str


def paired_tests(d: Float[np.ndarray, "unit cell"], seed: int = 0) -> PairedTests:
    """Test that the mean of each column is 0, as :func:`paired` does, at a cost that suits 70,000.

    ``p = max(p of sign flips, p of the bootstrap-t test)``; ``q`` is Benjamini-Hochberg over all
    columns that are known in every unit. Up to 4,000 columns are tested by ``paired`` itself. Of
    more, the bootstrap-t test is made only where sign flips alone give q < 0.05: p can only rise,
    so no other column is a finding, and what is found does not depend on their p. Sign patterns
    are drawn for a column until 100 have as large a mean (Besag and Clifford 1991), or until it is
    a finding; up to 12 units all patterns are tried.
    """
    units, cells = d.shape
    if cells <= _MANY or units > ALONE:
        statistics = paired(d, None, seed=seed, bootstrap_ends=False)
        return PairedTests(statistics.p, statistics.q, statistics.skewed)

    p_flip = _p_of_flips(d, seed)
    p = p_flip.copy()
    possible = np.flatnonzero(false_discovery(p_flip) < _LEVEL)
    if units >= FEWEST_FOR_ALL and len(possible):
        p[possible] = np.maximum(p[possible], _p_of_resamples(d, possible, seed))
    q = false_discovery(p)
    return PairedTests(p, q, skewed_words(units, _skewness(d), p_flip, q))


def _p_of_flips(d: Float[np.ndarray, "unit cell"], seed: int) -> Float[np.ndarray, " cell"]:
    """The share of sign patterns with as large a mean; NaN where a unit has no value."""
    units = len(d)
    totals = abs(d.sum(0))
    counts = np.zeros(d.shape[1])
    if units <= EXACT:
        # A pattern and its opposite have the same size of mean, so the first sign stays.
        numbers = np.arange(2 ** (units - 1))
        bits = (numbers[:, None] >> np.arange(units)) & 1
        _count(1.0 - 2.0 * bits, d, totals, np.arange(len(counts)), counts)
        return np.where(np.isnan(totals), np.nan, counts / len(numbers))

    generator = np.random.default_rng(seed)
    patterns = enough(RESAMPLES, d.shape[1])
    tried = np.zeros(d.shape[1])
    is_zero = (d == 0).all(0)
    active = np.flatnonzero(~is_zero & ~np.isnan(totals))
    drawn = 0
    while len(active) and drawn < patterns:
        # Twice as many patterns each time, as ever fewer cells are left.
        more = min(max(drawn, _PATTERNS), patterns - drawn)
        for start in range(0, more, _PATTERNS):
            rows = min(_PATTERNS, more - start)
            signs = generator.choice(np.array([-1.0, 1.0]), (rows, units))
            _count(signs, d, totals, active, counts)
        drawn += more
        tried[active] = drawn
        active = active[counts[active] < _ENOUGH_SEEN]
        if drawn >= RESAMPLES:
            q = false_discovery((1 + counts) / (1 + tried))
            undecided = (q[active] >= _LEVEL) & (counts[active] < _FEW_SEEN * drawn / RESAMPLES)
            active = active[undecided]
    p = (1 + counts) / (1 + tried)
    return np.where(np.isnan(totals), np.nan, p)


def _count(
    signs: Float[np.ndarray, "pattern unit"],
    d: Float[np.ndarray, "unit cell"],
    totals: Float[np.ndarray, " cell"],
    active: np.ndarray,
    counts: Float[np.ndarray, " cell"],
) -> None:
    """Add to the counts how many patterns give an active cell a total as large as its own."""
    for start in range(0, len(active), _COLUMNS):
        columns = active[start : start + _COLUMNS]
        # Equal totals count, although they are summed in another order.
        observed = totals[columns] * (1 - 1e-12)
        flipped = np.abs(signs @ d[:, columns])
        counts[columns] += np.count_nonzero(flipped >= observed, axis=0)


def _p_of_resamples(
    d: Float[np.ndarray, "unit cell"], possible: np.ndarray, seed: int
) -> Float[np.ndarray, " possible"]:
    """The p of the bootstrap-t test of possible findings, with some other cells as their family."""
    units, cells = d.shape
    generator = np.random.default_rng(seed)
    counts = bootstrap.resample_sequentially(units, RESAMPLES, generator)
    known = ~np.isnan(d).any(0)
    known[possible] = False
    remaining = np.flatnonzero(known)
    beside = generator.permutation(remaining)[:_BESIDE]
    resampled = np.concatenate([possible, beside])

    values = d[:, resampled]
    mean = values.mean(0)
    deviation = bootstrap.without_noise(values.std(0, ddof=1), values)
    error = deviation / np.sqrt(units)
    t_without_error = np.where(mean == 0, 0.0, np.copysign(np.inf, mean))
    t = np.divide(mean, error, out=t_without_error, where=error > 0)
    tails = bootstrap.tails(values, t, counts, np.float64, extremes=False, tests=cells)
    return tails.p[: len(possible)]


def _skewness(d: Float[np.ndarray, "unit cell"]) -> Float[np.ndarray, " cell"]:
    """The third standardised moment of each column; NaN where nothing varies."""
    mean = d.mean(0)
    second = np.zeros(d.shape[1])
    third = np.zeros(d.shape[1])
    for rows in blocks_of(d):
        deviations = d[rows] - mean
        second += (deviations**2).sum(0) / len(d)
        third += (deviations**3).sum(0) / len(d)
    nan = np.full(d.shape[1], np.nan)
    return np.divide(third, second**1.5, out=nan, where=second > 0)
