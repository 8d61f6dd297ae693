"""Tests of very many cells, such as all edges of a model, with most work on possible findings."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from mechattn.stats import resampling
from mechattn.stats.paired import (
    FEWEST_FOR_SIMULTANEOUS,
    column_moments,
    false_discovery,
    paired,
    skewed_words,
    skewness,
)
from mechattn.stats.resampling import drawn_signs, flipped
from mechattn.stats.units import MOST_SINGLE, RESAMPLES, patterns_needed

_SEED = 0  # of sign flips and resamples
_MOST_OF_PAIRED = 4000  # cells: `paired` tests this number in a second or two
_LEVEL = 0.05  # a cell with a q below this is a finding
_FIRST_PATTERNS = 1000  # sign patterns that are tried on every cell
_ENOUGH_HITS = 100  # patterns with at least as large a mean: p is then known to about 10 %
_CELLS_AT_ONCE = 1000  # 2,000 patterns of them take 16 MB
_SAMPLED_CELLS = 1000  # cells that are no findings, resampled together with the possible findings


class PairedTests(NamedTuple):
    """Two-sided p and q of every cell, and in words where skewed differences make tests
    disagree or unreliable.
    """

    p: np.ndarray
    q: np.ndarray
    skewed: str


def paired_tests(differences: Float[np.ndarray, "unit cell"]) -> PairedTests:
    """Test whether the mean of each column is 0, as :func:`paired` does, for up to about 70,000
    columns.

    ``p = max(p of sign flips, p of the bootstrap-t test)``. ``q`` is Benjamini-Hochberg over all
    columns without a NaN. ``paired`` itself tests up to 4,000 columns, and any number of columns of
    more than 2,000 units. Otherwise only columns with q < 0.05 by sign flips alone have the
    bootstrap-t test. It can only raise p, so no other column is a finding, and the findings do not
    depend on the p of others.

    Args:
        differences: Differences [unit, cell]; a column with a NaN is not tested.

    Returns:
        The p and q of each column, NaN where it is not tested.
    """
    values = np.asarray(differences, dtype=np.float64)
    units, cells = values.shape
    if cells <= _MOST_OF_PAIRED or units > MOST_SINGLE:
        statistics = paired(values, None, bootstrap_ends=False)
        return PairedTests(statistics.p, statistics.q, statistics.skewed)

    p_flip = _p_of_flips(values)
    p = p_flip.copy()
    candidates = np.flatnonzero(false_discovery(p_flip) < _LEVEL)
    if units >= FEWEST_FOR_SIMULTANEOUS and len(candidates):
        p_bootstrap = _p_of_resamples(values, candidates)
        p[candidates] = np.maximum(p[candidates], p_bootstrap)

    q = false_discovery(p)
    skewness_of_values = skewness(values, column_moments(values))
    return PairedTests(p, q, skewed_words(units, skewness_of_values, p_flip, q))


def _p_of_flips(values: Float[np.ndarray, "unit cell"]) -> Float[np.ndarray, " cell"]:
    """The p of sign flips of each column: the share of patterns with at least as large a mean.

    It is NaN if a unit has no value. A column is tried again with ten times the patterns until 100
    of them have at least as large a mean, the column is a finding, or the number of patterns that
    ``paired`` uses is reached (after Besag and Clifford 1991). Its p comes from the latest patterns
    alone, so ``P(p ≤ α) ≤ α`` holds, except that a column just above the threshold of q is
    tried once more. With up to 12 units all patterns are tried at once.
    """
    units, cells = values.shape
    generator = np.random.default_rng(_SEED)
    most_patterns = patterns_needed(RESAMPLES, cells)
    patterns = _FIRST_PATTERNS
    p = np.full(cells, np.nan)
    undecided_columns = np.flatnonzero(~np.isnan(values).any(0))

    while True:
        # All columns share the patterns, and some columns are in memory at a time.
        signs = drawn_signs(units, patterns, generator)
        for start in range(0, len(undecided_columns), _CELLS_AT_ONCE):
            columns = undecided_columns[start : start + _CELLS_AT_ONCE]
            p[columns] = flipped(values[:, columns], signs)
        if signs.is_exhaustive or patterns == most_patterns:
            return p

        is_undecided = p < _ENOUGH_HITS / patterns
        if patterns >= RESAMPLES:
            is_undecided &= false_discovery(p) >= _LEVEL
        undecided_columns = np.flatnonzero(is_undecided)
        patterns = min(10 * patterns, most_patterns)


def _p_of_resamples(
    values: Float[np.ndarray, "unit cell"], candidates: np.ndarray
) -> Float[np.ndarray, " candidate"]:
    """The p of the bootstrap-t test of candidates, columns that may be findings. A random sample of
    the other tested columns stands for the rest of their family.
    """
    units = len(values)
    generator = np.random.default_rng(_SEED)
    counts = resampling.resample_sequentially(units, RESAMPLES, generator)

    tested_columns = np.flatnonzero(~np.isnan(values).any(0))
    other_columns = generator.permutation(np.setdiff1d(tested_columns, candidates))
    resampled_columns = np.concatenate([candidates, other_columns[:_SAMPLED_CELLS]])
    resampled_values = values[:, resampled_columns]
    moments = column_moments(resampled_values)
    t = resampling.t_of(moments["mean"], moments["deviation"] / np.sqrt(units))

    p = resampling.p_values(resampled_values, t, counts, family_size=len(tested_columns))
    return p[: len(candidates)]
