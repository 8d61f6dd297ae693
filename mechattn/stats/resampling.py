"""Tests and intervals of many means by resampling: sign flips, and the pointwise and the
simultaneous bootstrap-t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import stats

from mechattn.stats.intervals import ratio
from mechattn.stats.units import MOST_EXACT

_SMALLEST_SPREAD = 0.1  # of a resample, as a fraction of the cell's own; see _Resampled.t_star
_ROUNDING = 1e-12  # of a cell's largest value: a smaller standard deviation counts as 0
_PATTERNS_AT_ONCE = 2000  # 32 MB as float64 with 2,000 prompts or bags
_RESAMPLES_AT_ONCE = 2000  # as for patterns
_CELLS_AT_ONCE = 100  # their t* in 9,999 resamples are 8 MB
_PILOT = 500  # resamples that tell which cells lie far out
_FAR = 3  # a t this many times as far out as any t* of the pilot counts as further out than all t*

# How often each prompt is in each resample [resample, prompt], in blocks of resamples.
Counts = list[np.ndarray]


# Sign flips.


class Signs(NamedTuple):
    """Sign patterns of some prompts."""

    blocks: list[np.ndarray]  # packed bits, 1 for −1 [pattern, prompt / 8], in blocks of patterns
    is_exhaustive: bool  # whether these are all patterns, each once; otherwise they are random


def flipped(differences: np.ndarray, signs: Signs) -> np.ndarray:
    """The two-sided p of sign flips for a mean of 0, for each column of differences [prompt, cell].

    ``count`` is the number of patterns that give at least as large a mean. If all patterns are
    tried, p is ``count / patterns``; if they are random, it is ``(1 + count) / (1 + patterns)``.
    The test is exact if differences are symmetric about 0.

    Args:
        differences: Differences [prompt, cell].
        signs: Sign patterns from :func:`drawn_signs`.

    Returns:
        The p of each cell [cell]; NaN in a cell that lacks a prompt's value.
    """
    pattern_count = sum(map(len, signs.blocks))
    means = differences.mean(0)
    count = np.zeros(len(means))

    # The values are copied only if some columns need not be tried.
    tried_columns = np.flatnonzero(~_is_out_of_reach(differences, pattern_count))
    values = differences
    if len(tried_columns) < len(means):
        values = differences[:, tried_columns]
    # An equal mean must count, although it was summed in a different order.
    observed_means = abs(means)[tried_columns] * (1 - 1e-12)

    for packed_signs in signs.blocks:
        bits = np.unpackbits(packed_signs, axis=1, count=len(differences))
        factors = np.where(bits, -1.0, 1.0)  # [pattern, prompt]
        flipped_means = abs(factors @ values) / len(differences)
        is_as_large = flipped_means >= observed_means
        count[tried_columns] += is_as_large.sum(0)

    if signs.is_exhaustive:
        p = count / pattern_count
    else:
        p = (1 + count) / (1 + pattern_count)
    return np.where(np.isnan(means), np.nan, p)


def drawn_signs(n: int, pattern_count: int, generator: np.random.Generator) -> Signs:
    """All 2ⁿ sign patterns of up to 12 prompts, or random sign patterns of more.

    Args:
        n: The number of prompts.
        pattern_count: The number of random patterns.
        generator: The generator of random patterns.
    """
    if n <= MOST_EXACT:
        pattern_numbers = np.arange(2**n)[:, None]
        bits = (pattern_numbers >> np.arange(n)) & 1
        return Signs([np.packbits(bits, axis=1)], is_exhaustive=True)

    blocks = []
    for block_size in _block_sizes(pattern_count, _PATTERNS_AT_ONCE):
        factors = generator.choice([-1.0, 1.0], (block_size, n))
        blocks.append(np.packbits(factors < 0, axis=1))
    return Signs(blocks, is_exhaustive=False)


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
    for block_size in _block_sizes(resamples, _RESAMPLES_AT_ONCE):
        counts = generator.multinomial(n, shares, block_size)
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
    for block_size in _block_sizes(resamples, _RESAMPLES_AT_ONCE):
        counts = np.zeros((block_size, n), dtype=np.uint8)
        distinct_counts = np.zeros(block_size, dtype=int)
        unfinished_rows = np.arange(block_size)
        # Add one more prompt to each resample that has too few distinct ones.
        while unfinished_rows.size:
            added_prompts = generator.integers(n, size=unfinished_rows.size)
            distinct_counts[unfinished_rows] += counts[unfinished_rows, added_prompts] == 0
            counts[unfinished_rows, added_prompts] += 1
            has_too_few = distinct_counts[unfinished_rows] < distinct_needed
            unfinished_rows = unfinished_rows[has_too_few]
        blocks.append(counts)
    return blocks


def deviation_without_rounding(deviation: np.ndarray, differences: np.ndarray) -> np.ndarray:
    """The standard deviations of columns, with 0 in place of rounding errors.

    Args:
        deviation: The standard deviation of each column [cell].
        differences: The columns [prompt, cell].
    """
    largest_value = abs(differences).max(0, initial=0.0)
    return np.where(deviation <= _ROUNDING * largest_value, 0.0, deviation)


def t_quantiles(
    differences: np.ndarray, counts: Counts, level: float
) -> tuple[np.ndarray, np.ndarray]:
    """The quantiles of t* that give the ends of each column's bootstrap-t interval.

    At a level of 0.95 it is ``mean − t*(97.5 %) · s / √n`` to ``mean − t*(2.5 %) · s / √n``, with
    ``t* = (mean* − mean) / (s* / √n*)`` in a resample of size n*.

    Args:
        differences: Differences [prompt, cell].
        counts: Resamples of the prompts.
        level: The level of the intervals.

    Returns:
        The upper and the lower quantile of t* [cell].

    Source: Hall 1988.
    """
    cell_count = differences.shape[1]
    upper = np.empty(cell_count)
    lower = np.empty(cell_count)
    quantile_levels = [(1 + level) / 2, (1 - level) / 2]
    for columns in _blocks_of(np.arange(cell_count)):
        t_star = _Resampled.of(differences[:, columns], counts).t_star(_SMALLEST_SPREAD)
        upper[columns], lower[columns] = np.quantile(t_star, quantile_levels, axis=1)
    return upper, lower


def t_of(mean: np.ndarray, error: np.ndarray) -> np.ndarray:
    """``mean / error``, which is NaN if either is NaN.

    With an error of 0 it is infinite with the sign of the mean, or 0 for a mean of 0.
    """
    t_without_error = np.where(mean == 0, 0.0, np.copysign(np.inf, mean))
    t = ratio(mean, error, otherwise=t_without_error)
    return np.where(np.isnan(mean) | np.isnan(error), np.nan, t)


@dataclass(frozen=True, eq=False)
class Tails:
    """The tails of resampled t over the tested cells, and the p of each cell's t.

    ``p_adjusted`` is adjusted for all tested cells (step-down). It is twice the share of resamples
    in which the cell itself, or a tested cell whose own t is not further out, has a t* at least as
    far out as the cell's t on the same side. The sample itself counts as one such resample. No
    ``p_adjusted`` is smaller than that of a tested cell that is further out.

    ``p`` is of one cell alone. It is twice the share of the cell's own t* that are at least as far
    out as its t. That share counts in steps of 1 / resamples, and a sample in which a long tail is
    not seen looks symmetric. So ``p`` is at least an adjusted p divided by the number of tested
    cells.

    That adjusted p is computed like ``p_adjusted``, but with a smallest spread that is usually
    larger (:func:`_smallest_spread_for_p`). A cell with all of its spread in one prompt then does
    not decide for the others.

    Args:
        upper: The upper quantile over resamples of the largest t* of the tested cells, at least 0.
            The lower end of simultaneous intervals is ``mean − upper · s / √n``.
        lower: The lower quantile over resamples of the smallest t* of the tested cells, at most 0.
            The upper end of simultaneous intervals is ``mean − lower · s / √n``.
        p: The two-sided p of each cell alone [cell].
        p_adjusted: The two-sided p of each cell, adjusted for all tested cells [cell].
    """

    upper: float
    lower: float
    p: np.ndarray
    p_adjusted: np.ndarray


def tails(differences: np.ndarray, t: np.ndarray, counts: Counts, level: float) -> Tails:
    """Compare the t of each tested column of differences [prompt, cell] with resamples of all
    tested columns.

    A resample uses the same prompts in all cells, which preserves their correlation. Each tail is
    treated by itself, which preserves skewness. A t that is more than three times as far out as any
    t* of the first 500 resamples counts as further out than all t*.

    Args:
        differences: Differences [prompt, cell].
        t: The t of each column [cell]; NaN if it is not tested.
        counts: Resamples of the prompts.
        level: The level of the simultaneous intervals.

    Returns:
        The tails, in the order of the columns; both p are NaN in a column that is not tested.

    Source: Romano and Wolf 2005, algorithm 4.1 with the p-values of their 2016 paper.
    """
    columns = _nearest_first(t)
    t_to_reach = _infinite_where_far(differences, t, columns, counts)
    spread_for_p = _smallest_spread_for_p(len(differences), len(columns))
    reach_for_p = _Reach.start(t_to_reach, counts, spread_for_p)
    reach = _Reach.start(t_to_reach, counts, _SMALLEST_SPREAD)
    _add_columns([reach_for_p, reach], differences, columns, counts)
    return Tails(
        upper=float(np.quantile(reach.largest, (1 + level) / 2)),
        lower=float(np.quantile(reach.smallest, (1 - level) / 2)),
        p=reach_for_p.p(len(columns)),
        p_adjusted=reach.p_adjusted,
    )


def p_values(
    differences: np.ndarray, t: np.ndarray, counts: Counts, family_size: int | None = None
) -> np.ndarray:
    """The ``p`` of :func:`tails` alone, in less time: cells that are further out than all t* are
    not resampled.

    Args:
        differences: Differences [prompt, cell].
        t: The t of each column [cell]; NaN if it is not tested.
        counts: Resamples of the prompts.
        family_size: The number of cells that are tested together; by default the number of tested
            columns. If the columns are a sample of these cells, the lower bound of p (see
            :class:`Tails`) is estimated from the columns and is at most ``1 / family_size``.
    """
    columns = _nearest_first(t)
    if family_size is None:
        family_size = len(columns)
    t_to_reach = _infinite_where_far(differences, t, columns, counts)
    near_columns = columns[np.isfinite(t_to_reach[columns])]
    spread_for_p = _smallest_spread_for_p(len(differences), family_size)
    reach = _Reach.start(t_to_reach, counts, spread_for_p)
    _add_columns([reach], differences, near_columns, counts)
    return reach.p(family_size)


# Private helpers, in the order of their use.


def _is_out_of_reach(differences: np.ndarray, pattern_count: int) -> np.ndarray:
    """A mask of the columns for which no pattern need be tried: any of the random patterns gives as
    large a mean with a probability of less than 1e-15.

    ``patterns · P(|Σ s d| ≥ |Σ d|) ≤ patterns · 2 exp(−(Σ d)² / (2 Σ d²))`` (Hoeffding 1963). As
    ``(Σ d)² ≤ n Σ d²``, there is no such column with up to 12 prompts, where all patterns are
    tried.
    """
    squares = (differences**2).sum(0)
    threshold = 2 * squares * np.log(2e15 * pattern_count)
    return (differences.sum(0) ** 2 > threshold) & (squares > 0)


def _block_sizes(count: int, largest_size: int) -> list[int]:
    """The sizes of blocks of at most ``largest_size`` rows that make up ``count`` rows."""
    return [min(largest_size, count - start) for start in range(0, count, largest_size)]


def _blocks_of(columns: np.ndarray) -> list[np.ndarray]:
    """The indices of columns in blocks, so that the t* of one block are in memory at a time."""
    starts = range(0, len(columns), _CELLS_AT_ONCE)
    return [columns[start : start + _CELLS_AT_ONCE] for start in starts]


@dataclass(frozen=True, eq=False)
class _Resampled:
    """The means of some cells in each resample, in units of the cell's own standard deviation s; 0
    in cells without spread.

    Args:
        mean: ``(mean* − mean) / s`` [cell, resample].
        squared_error: ``(s* / s)² / n*`` in a resample of size n* [cell, resample].
        n: The number of prompts of the sample.
    """

    mean: np.ndarray
    squared_error: np.ndarray
    n: int

    @classmethod
    def of(cls, differences: np.ndarray, counts: Counts) -> _Resampled:
        """Resample the differences of a few cells [prompt, cell]."""
        deviation = deviation_without_rounding(differences.std(0, ddof=1), differences)
        scaled = ratio(differences - differences.mean(0), deviation, otherwise=0.0)
        # One product with the counts gives both the sums of values and the sums of squares.
        powers = np.concatenate([scaled, scaled**2], axis=1).T

        resamples = sum(map(len, counts))
        mean = np.empty((differences.shape[1], resamples))
        squared_error = np.empty_like(mean)
        start = 0
        for count_block in counts:
            size = count_block.sum(1, dtype=np.float64)  # differs between sequential resamples
            block = slice(start, start + len(size))
            weights = count_block.T.astype(np.float64)  # [prompt, resample]
            block_mean, mean_square = np.split(powers @ weights / size, 2)
            variance = (mean_square - block_mean**2) * (size / (size - 1))
            mean[:, block] = block_mean
            squared_error[:, block] = variance / size
            start = block.stop
        return cls(mean, squared_error, len(differences))

    def t_star(self, smallest_spread: float) -> np.ndarray:
        """The t* of each cell [cell, resample].

        ``t* = (mean* − mean) / max(s* / √n*, smallest_spread · s / √n)``. If one prompt makes all
        of a cell's spread, a resample without that prompt has no spread. Its t* would be infinite
        without the smallest spread, and would make all simultaneous intervals infinite.
        """
        smallest_squared_error = smallest_spread**2 / self.n
        error = np.maximum(self.squared_error, smallest_squared_error)
        np.sqrt(error, out=error)  # in place, as these arrays are the largest of a table
        return np.divide(self.mean, error, out=error)


def _nearest_first(t: np.ndarray) -> np.ndarray:
    """The indices of the tested columns, in the order of the distance of their t from 0.

    The extremes of the columns up to one of them are then those of all columns that are not further
    out.
    """
    columns = np.argsort(abs(t), kind="stable")
    return columns[~np.isnan(t[columns])]


def _infinite_where_far(
    differences: np.ndarray, t: np.ndarray, columns: np.ndarray, counts: Counts
) -> np.ndarray:
    """The t of each cell, made infinite if it is far further out than every t* of these columns in
    the first resamples.
    """
    pilot_counts = [counts[0][:_PILOT]]
    furthest_t_star = 0.0
    for column_block in _blocks_of(columns):
        resampled = _Resampled.of(differences[:, column_block], pilot_counts)
        t_star = resampled.t_star(_SMALLEST_SPREAD)
        furthest_t_star = max(furthest_t_star, abs(t_star).max())
    return np.where(abs(t) > _FAR * furthest_t_star, np.copysign(np.inf, t), t)


def _smallest_spread_for_p(n: int, cell_count: int) -> float:
    """The smallest spread of a resample for p, as a fraction of the cell's own.

    If one prompt makes all of a cell's spread, a resample without that prompt has a t* of about
    1 / smallest spread. This fraction makes that t* at most the t with which one cell among many is
    found, so that such a cell does not hide a cell with an effect.
    """
    one_sided = 0.025 / max(1, cell_count)
    needed_t = stats.t.ppf(1 - one_sided, n - 1)
    return max(_SMALLEST_SPREAD, 1 / needed_t)


@dataclass(eq=False)
class _Reach:
    """How often resamples reach the t of cells, which are added in the order of
    :func:`_nearest_first`.

    A tested cell that is never added counts as further out than all t*. The arrays are changed in
    place.

    Args:
        t: The t of each cell [cell]; NaN if it is not tested.
        smallest_spread: The smallest spread for :meth:`_Resampled.t_star`.
        p_alone: Twice the share of a cell's own t* that reach its t [cell].
        p_adjusted: Twice the share of resamples in which the most extreme t* of the cells that are
            not further out reaches its t [cell]. The sample itself counts as one such resample.
        largest: The largest t* of all added cells, at least 0 [resample].
        smallest: The smallest t* of all added cells, at most 0 [resample].
    """

    t: np.ndarray
    smallest_spread: float
    p_alone: np.ndarray
    p_adjusted: np.ndarray
    largest: np.ndarray
    smallest: np.ndarray

    @classmethod
    def start(cls, t: np.ndarray, counts: Counts, smallest_spread: float) -> _Reach:
        """The reach before any cell is added: only the sample itself is as extreme as its t."""
        resamples = sum(map(len, counts))
        is_untested = np.isnan(t)
        return cls(
            t=t,
            smallest_spread=smallest_spread,
            p_alone=np.where(is_untested, np.nan, 0.0),
            p_adjusted=np.where(is_untested, np.nan, 2 / (1 + resamples)),
            largest=np.zeros(resamples),
            smallest=np.zeros(resamples),
        )

    def add(self, column: int, t_star: np.ndarray) -> None:
        """Add a cell's t* [resample] to the extremes, and count how often they reach its t."""
        np.maximum(self.largest, t_star, out=self.largest)
        np.minimum(self.smallest, t_star, out=self.smallest)

        own_t = self.t[column]
        if own_t > 0:
            own_count = np.count_nonzero(t_star >= own_t)
            extreme_count = np.count_nonzero(self.largest >= own_t)
        else:
            own_count = np.count_nonzero(t_star <= own_t)
            extreme_count = np.count_nonzero(self.smallest <= own_t)
        resamples = len(t_star)
        self.p_alone[column] = min(1.0, 2 * own_count / resamples)
        self.p_adjusted[column] = min(1.0, 2 * (1 + extreme_count) / (1 + resamples))

    def p(self, family_size: int) -> np.ndarray:
        """The p of each cell alone, which is at least its part of the adjusted p [cell]."""
        tested_count = np.count_nonzero(~np.isnan(self.t))
        part_of_adjusted = self.p_adjusted / max(1, tested_count)
        return np.maximum(self.p_alone, np.minimum(part_of_adjusted, 1 / max(1, family_size)))


def _add_columns(
    reaches: list[_Reach], differences: np.ndarray, columns: np.ndarray, counts: Counts
) -> None:
    """Resample columns in the order of :func:`_nearest_first`, and add each to several reaches,
    which differ in their smallest spread.
    """
    for column_block in _blocks_of(columns):
        resampled = _Resampled.of(differences[:, column_block], counts)
        for reach in reaches:
            t_star_of_block = resampled.t_star(reach.smallest_spread)
            for column, t_star in zip(column_block, t_star_of_block, strict=True):
                reach.add(column, t_star)

    # Step down: no adjusted p is smaller than that of a cell that is further out.
    furthest_first = columns[::-1]
    for reach in reaches:
        p_by_distance = reach.p_adjusted[furthest_first]
        reach.p_adjusted[furthest_first] = np.maximum.accumulate(p_by_distance)
