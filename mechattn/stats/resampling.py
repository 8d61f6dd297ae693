"""Tests and intervals of many means by resampling: sign flips, and the pointwise and the
simultaneous bootstrap-t.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy import stats

from mechattn.stats.intervals import ratio
from mechattn.stats.units import MOST_EXACT

_PATTERNS = 2000  # random sign patterns in a block
_SMALLEST_SPREAD = 0.1  # of a resample, as a fraction of the cell's own; see _studentised
_ROUNDING = 1e-12  # of a cell's largest value: a smaller standard deviation counts as 0
_ROWS = 2000  # resamples in memory at a time: 32 MB as float64 with 2,000 prompts or bags
_COLUMNS = 100  # cells in memory at a time
_PILOT = 500  # resamples that tell which cells lie far out
_FAR = 3  # a t this many times as far out as any t* of the pilot counts as beyond all t*

# How often each prompt is in each resample [resample, prompt], in blocks of resamples.
Counts = list[np.ndarray]
# Sign patterns as packed bits, 1 for −1 [pattern, prompt / 8], in blocks of patterns.
Signs = list[np.ndarray]


# Sign flips.


def flipped(d: np.ndarray, signs: Signs) -> np.ndarray:
    """The two-sided p of sign flips for a mean of 0, for each column of d [prompt, cell].

    ``count`` is the number of patterns that give at least as large a mean. Up to 12 prompts, where
    all patterns are tried, p is ``count / patterns``; with more, where they are random, it is
    ``(1 + count) / (1 + patterns)``. The test is exact if differences are symmetric about 0.

    Args:
        d: Differences [prompt, cell].
        signs: Sign patterns from :func:`drawn_signs`.

    Returns:
        The p of each cell [cell]; NaN in a cell that lacks a prompt's value.
    """
    patterns = sum(map(len, signs))
    means = d.mean(0)
    count = np.where(np.isnan(means), np.nan, 0.0)

    # The values are copied only if some columns need not be tried.
    tried_columns = np.flatnonzero(~_beyond_all(d, patterns))
    values = d
    if len(tried_columns) < d.shape[1]:
        values = d[:, tried_columns]
    # An equal mean must count, although it was summed in a different order.
    observed = abs(means)[tried_columns] * (1 - 1e-12)

    for packed in signs:
        bits = np.unpackbits(packed, axis=1, count=len(d))
        pattern = np.where(bits, -1.0, 1.0)
        flipped_means = abs(pattern @ values) / len(d)
        is_as_large = flipped_means >= observed
        count[tried_columns] += is_as_large.sum(0)

    if len(d) <= MOST_EXACT:
        return count / patterns
    return (1 + count) / (1 + patterns)


def _beyond_all(d: np.ndarray, patterns: int) -> np.ndarray:
    """A mask of the columns that need not be tried: with a probability of less than 1e-15 any of
    the random patterns gives as large a mean.

    ``patterns · P(|Σ s d| ≥ |Σ d|) ≤ patterns · 2 exp(−(Σ d)² / (2 Σ d²))`` (Hoeffding 1963). As
    ``(Σ d)² ≤ n Σ d²``, there are none up to 12 prompts, where all patterns are tried.
    """
    squares = (d**2).sum(0)
    smallest = 2 * squares * np.log(2e15 * patterns)
    return (d.sum(0) ** 2 > smallest) & (squares > 0)


def drawn_signs(n: int, patterns: int, generator: np.random.Generator) -> Signs:
    """All 2ⁿ sign patterns of up to 12 prompts, or random sign patterns of more.

    Args:
        n: The number of prompts.
        patterns: The number of random patterns.
        generator: The generator of random patterns.
    """
    if n <= MOST_EXACT:
        pattern_numbers = np.arange(2**n)[:, None]
        bits = (pattern_numbers >> np.arange(n)) & 1
        return [np.packbits(bits, axis=1)]

    blocks = []
    for rows in _block_sizes(patterns, _PATTERNS):
        signs = generator.choice([-1.0, 1.0], (rows, n))
        blocks.append(np.packbits(signs < 0, axis=1))
    return blocks


# The bootstrap.


def resample(n: int, resamples: int, generator: np.random.Generator) -> Counts:
    """Draw resamples of the plain bootstrap: n prompts with replacement.

    Args:
        n: The number of prompts, or of bags.
        resamples: The number of resamples.
        generator: The generator of the draws.

    Returns:
        How often each prompt was drawn, in blocks [resample, prompt] of uint8.
    """
    shares = np.full(n, 1 / n)
    blocks = []
    for rows in _block_sizes(resamples, _ROWS):
        counts = generator.multinomial(n, shares, rows)
        blocks.append(counts.astype(np.uint8))
    return blocks


def resample_sequentially(n: int, resamples: int, generator: np.random.Generator) -> Counts:
    """Draw resamples of the sequential bootstrap: prompts with replacement, until
    ⌊n (1 − 1/e)⌋ + 1 of them are distinct.

    A plain resample has about that number of distinct prompts on average, but may have far fewer.
    It then has almost no spread and an enormous t, which the maximum over many cells picks up. With
    plain resamples and 256 cells, simultaneous intervals of normal data covered 1.00 (10 prompts)
    and 0.99 (20) instead of 0.95, and with 10 prompts they were 1.6 times as wide.

    Args:
        n: The number of prompts, or of bags.
        resamples: The number of resamples.
        generator: The generator of the draws.

    Returns:
        How often each prompt was drawn, in blocks [resample, prompt] of uint8.

    Source: Rao, Pathak and Koltchinskii 1997. It is as accurate as the plain bootstrap to second
    order: Babu, Pathak and Rao 1999.
    """
    distinct_on_average = n * (1 - np.exp(-1))
    distinct_needed = int(distinct_on_average) + 1

    blocks = []
    for rows in _block_sizes(resamples, _ROWS):
        counts = np.zeros((rows, n), dtype=np.uint8)
        distinct = np.zeros(rows, dtype=int)
        unfinished = np.arange(rows)
        # Add one more prompt to each resample that has too few distinct ones.
        while unfinished.size:
            prompt = generator.integers(n, size=unfinished.size)
            is_new = counts[unfinished, prompt] == 0
            distinct[unfinished] += is_new
            counts[unfinished, prompt] += 1
            unfinished = unfinished[distinct[unfinished] < distinct_needed]
        blocks.append(counts)
    return blocks


def _block_sizes(count: int, most: int) -> list[int]:
    """The sizes of blocks of at most ``most`` rows that make up ``count`` rows."""
    return [min(most, count - start) for start in range(0, count, most)]


def without_noise(deviation: np.ndarray, d: np.ndarray) -> np.ndarray:
    """The standard deviations of columns, with 0 in place of rounding errors.

    Args:
        deviation: The standard deviation of each column [cell].
        d: The columns [prompt, cell].
    """
    largest = abs(d).max(0, initial=0.0)
    return np.where(deviation <= _ROUNDING * largest, 0.0, deviation)


def t_quantiles(d: np.ndarray, counts: Counts, level: float) -> tuple[np.ndarray, np.ndarray]:
    """The quantiles of t* that give the ends of each column's bootstrap-t interval.

    At a level of 0.95 it is ``mean − t*(97.5 %) · s / √n`` to ``mean − t*(2.5 %) · s / √n``, with
    ``t* = (mean* − mean) / (s* / √n*)`` in a resample of size n*.

    Args:
        d: Differences [prompt, cell].
        counts: Resamples of the prompts.
        level: The level of the intervals.

    Returns:
        The upper and the lower quantile of t* [cell].

    Source: Hall 1988.
    """
    upper_and_lower = np.empty((2, d.shape[1]))
    quantiles = [(1 + level) / 2, (1 - level) / 2]
    all_columns = np.arange(d.shape[1])
    for columns, t_star in _t_star_by_columns(d, all_columns, counts, [_SMALLEST_SPREAD]):
        upper_and_lower[:, columns] = np.quantile(t_star[:, 0], quantiles, axis=1)
    upper, lower = upper_and_lower
    return upper, lower


def t_of(mean: np.ndarray, error: np.ndarray) -> np.ndarray:
    """``mean / error``, which is NaN if the mean is.

    With an error of 0 it is infinite, but 0 for a mean of 0.
    """
    without_error = np.where(mean == 0, 0.0, mean + np.copysign(np.inf, mean))  # NaN stays NaN
    return ratio(mean, error, otherwise=without_error)


@dataclass(frozen=True, eq=False)
class Tails:
    """The tails of resampled t over many cells, and the p of each cell's t.

    ``family`` is adjusted for all cells (step-down). It is twice the share of resamples in which
    some cell has a t* as far out as this cell's t, counting only cells whose own t is not further
    out. It is at least the ``family`` of every cell that is further out. ``p`` is that of a cell
    alone: twice the share of its own t* that are as far out. It is at least ``family / cells``,
    since it counts in steps of 1 / resamples, and since a sample in which a long tail is not seen
    looks symmetric. The ``family`` of that bound has a different smallest spread
    (:func:`_smallest_for_p`), so that a cell with all of its spread in one prompt does not decide
    for the others.

    Args:
        upper: The upper quantile over resamples of the largest t* of all cells, at least 0. The
            lower end of simultaneous intervals is ``mean − upper · s / √n``.
        lower: The lower quantile of the smallest t*, at most 0, for their upper end.
        p: Two-sided p of each cell alone [cell].
        family: Two-sided p of each cell, adjusted for all cells [cell].
    """

    upper: float
    lower: float
    p: np.ndarray
    family: np.ndarray


def tails(d: np.ndarray, t: np.ndarray, counts: Counts, level: float) -> Tails:
    """Compare the t of each column of d [prompt, cell] with resamples of all columns.

    A resample uses the same prompts in all cells, which preserves their correlation. Each tail is
    treated by itself, which preserves skewness. A t that is more than three times as far out as any
    t* of the first 500 resamples counts as further out than all t*.

    Args:
        d: Differences [prompt, cell].
        t: The t of each column [cell]; NaN if it is not tested.
        counts: Resamples of the prompts.
        level: The level of the simultaneous intervals.

    Returns:
        The tails, in the order of the columns; both p are NaN in a column that is not tested.

    Source: Romano and Wolf 2005, algorithm 4.1 with the p-values of their 2016 paper.
    """
    order = _nearest_first(t)
    t = _infinite_where_far(d, t, order, counts)
    spreads = [_smallest_for_p(len(d), len(order)), _SMALLEST_SPREAD]
    for_family = 1  # the index of the second spread
    reached = _reached(d, t, order, counts, spreads)
    p = _p_of_each_cell(reached, len(order), len(order))
    largest = reached.furthest[0, for_family]
    smallest = -reached.furthest[1, for_family]
    return Tails(
        upper=float(np.quantile(largest, (1 + level) / 2)),
        lower=float(np.quantile(smallest, (1 - level) / 2)),
        p=p,
        family=reached.p_family[for_family],
    )


def p_values(
    d: np.ndarray, t: np.ndarray, counts: Counts, family_size: int | None = None
) -> np.ndarray:
    """The ``p`` of :func:`tails` alone, in less time: cells that are further out than all t* are
    not resampled.

    Args:
        d: Differences [prompt, cell].
        t: The t of each column [cell]; NaN if it is not tested.
        counts: Resamples of the prompts.
        family_size: The number of cells in the family; by default the number of columns that are
            tested. If the columns are a sample of the family, the lower bound ``family / cells`` of
            p is estimated from them and is at most ``1 / family_size``.
    """
    order = _nearest_first(t)
    if family_size is None:
        family_size = len(order)
    t = _infinite_where_far(d, t, order, counts)
    near = order[np.isfinite(t[order])]
    reached = _reached(d, t, near, counts, [_smallest_for_p(len(d), family_size)])
    return _p_of_each_cell(reached, len(order), family_size)


def _nearest_first(t: np.ndarray) -> np.ndarray:
    """The indices of the tested cells, in the order of their distance from 0.

    The extremes of the cells up to a place are then those of all cells that are not further out.
    """
    order = np.argsort(abs(t), kind="stable")
    return order[~np.isnan(t[order])]


@dataclass(frozen=True, eq=False)
class _Reached:
    """How often resamples reach the t of cells.

    Args:
        p_alone: Twice the share of a cell's own t* that reach its t [cell].
        p_family: Twice the share of resamples in which the most extreme t* of the cells that are
            not further out reaches its t [spread, cell].
        furthest: The furthest t* of all cells in the upper and in the lower tail, in the latter
            with its sign changed [tail, spread, resample].
    """

    p_alone: np.ndarray
    p_family: np.ndarray
    furthest: np.ndarray


def _reached(
    d: np.ndarray, t: np.ndarray, cells: np.ndarray, counts: Counts, spreads: list[float]
) -> _Reached:
    """Resample cells in the order of :func:`_nearest_first`; ``p_alone`` is of the first spread."""
    resamples = sum(map(len, counts))
    furthest = np.zeros((2, len(spreads), resamples))
    p_alone = np.where(np.isnan(t), np.nan, 0.0)
    p_family = np.tile(p_alone + 2 / (1 + resamples), (len(spreads), 1))
    for columns, t_star in _t_star_by_columns(d, cells, counts, spreads):
        for cell, t_star_of_cell in zip(columns, t_star, strict=True):
            both_tails = np.stack([t_star_of_cell, -t_star_of_cell])
            np.maximum(furthest, both_tails, out=furthest)

            tail = int(t[cell] <= 0)
            own_count = np.count_nonzero(both_tails[tail, 0] >= abs(t[cell]))
            family_count = np.count_nonzero(furthest[tail] >= abs(t[cell]), axis=1)
            p_alone[cell] = min(1.0, 2 * own_count / resamples)
            p_family[:, cell] = np.minimum(1.0, 2 * (1 + family_count) / (1 + resamples))

    # Step down: no p is smaller than the p of a cell that is further out.
    furthest_first = cells[::-1]
    p_by_distance = p_family[:, furthest_first]
    p_family[:, furthest_first] = np.maximum.accumulate(p_by_distance, axis=1)
    return _Reached(p_alone, p_family, furthest)


def _p_of_each_cell(reached: _Reached, tested: int, family_size: int) -> np.ndarray:
    """The p of each cell alone, which is at least its part of the family's p."""
    part_of_family = reached.p_family[0] / max(1, tested)
    part_of_family = np.minimum(part_of_family, 1 / max(1, family_size))
    return np.maximum(reached.p_alone, part_of_family)


def _infinite_where_far(
    d: np.ndarray, t: np.ndarray, order: np.ndarray, counts: Counts
) -> np.ndarray:
    """The t of each cell, made infinite if it is far further out than every t* of the first
    resamples.
    """
    pilot = [counts[0][:_PILOT]]
    furthest = 0.0
    for _, t_star in _t_star_by_columns(d, order, pilot, [_SMALLEST_SPREAD]):
        furthest = max(furthest, abs(t_star).max())
    return np.where(abs(t) > _FAR * furthest, np.copysign(np.inf, t), t)


def _smallest_for_p(n: int, cells: int) -> float:
    """The smallest spread of a resample for p, as a fraction of the cell's own.

    If one prompt makes all of a cell's spread, a resample without it has a t* of about
    1 / smallest spread. That is at most the t that one cell among many needs to be found, so that
    such a cell does not hide one with an effect.
    """
    one_sided = 0.025 / max(1, cells)
    needed_t = stats.t.ppf(1 - one_sided, n - 1)
    return max(_SMALLEST_SPREAD, 1 / needed_t)


def _t_star_by_columns(
    d: np.ndarray, order: np.ndarray, counts: Counts, spreads: list[float]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the indices of some columns at a time, in this order, and their t*
    [cell, spread, resample].
    """
    for start in range(0, len(order), _COLUMNS):
        columns = order[start : start + _COLUMNS]
        t_star = _studentised(d[:, columns], counts, spreads)
        yield columns, t_star


def _studentised(d: np.ndarray, counts: Counts, spreads: list[float]) -> np.ndarray:
    """The t* of some cells, with each smallest spread [cell, spread, resample]; 0 in cells without
    spread.

    ``t* = (mean* − mean) / max(s* / √n*, smallest · s / √n)``. If one prompt makes all of a cell's
    spread, a resample without it has none, and its infinite t* would make all simultaneous
    intervals infinite.

    Args:
        d: Differences of a few cells [prompt, cell].
        counts: Resamples of these prompts.
        spreads: The smallest spreads, each a fraction of the cell's own.
    """
    n, cells = d.shape
    deviation = d.std(0, ddof=1)
    deviation = without_noise(deviation, d)
    # In units of each cell's own spread, so that all cells have the same smallest error.
    scaled = ratio(d - d.mean(0), deviation, otherwise=0.0)
    # One product with the counts gives both the sums of values and the sums of squares.
    powers = np.concatenate([scaled, scaled**2], axis=1).T

    resamples = sum(map(len, counts))
    t_star = np.empty((cells, len(spreads), resamples))
    start = 0
    for block in counts:
        size = block.sum(1, dtype=np.float64)  # n*, which differs between sequential resamples
        stop = start + len(size)

        weights = block.T.astype(np.float64)  # [prompt, resample]
        sums = powers @ weights
        mean, mean_square = np.split(sums / size, 2)
        variance = (mean_square - mean**2) * (size / (size - 1))
        squared_error = variance / size

        for index, smallest in enumerate(spreads):
            smallest_error = smallest**2 / n
            error = np.sqrt(np.maximum(squared_error, smallest_error))
            np.divide(mean, error, out=t_star[:, index, start:stop])
        start = stop
    return t_star
