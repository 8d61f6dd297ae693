"""Tests and intervals of many means by resampling: sign flips, and the bootstrap-t, pointwise and
simultaneous.
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
_ROUNDING = 1e-12  # of the cell's largest value: a smaller standard deviation counts as zero
_ROWS = 2000  # resamples in memory at a time, of at most 2,000 prompts or bags
_COLUMNS = 100  # cells in memory at a time
_PILOT = 500  # resamples that tell which cells lie far out
_FAR = 3  # a t this many times as far out as any t* of the pilot is beyond all

# How often each prompt is in each resample [resample, prompt], in blocks of resamples.
Counts = list[np.ndarray]
# Sign patterns as bits, 1 for −1 [pattern, prompt / 8], in blocks of patterns.
Signs = list[np.ndarray]


# Sign flips.


def flipped(d: np.ndarray, signs: Signs) -> np.ndarray:
    """The two-sided p of sign flips for a mean of 0, for each column of d [prompt, cell].

    ``count / patterns``, where ``count`` patterns have as large a mean, up to 12 prompts, where all
    are tried; ``(1 + count) / (1 + patterns)`` of random patterns with more. The test is exact if
    differences are symmetric about 0.

    Args:
        d: Differences [prompt, cell].
        signs: Sign patterns from :func:`drawn_signs`.

    Returns:
        The p of each cell [cell]; NaN where a prompt has no value.
    """
    patterns = sum(map(len, signs))
    means = d.mean(0)
    count = np.where(np.isnan(means), np.nan, 0.0)

    # The values are copied only where some columns need not be tried.
    tried = np.flatnonzero(~_beyond_all(d, patterns))
    values = d
    if len(tried) < d.shape[1]:
        values = d[:, tried]
    # Equal means count as as large, although they were summed in another order.
    observed = abs(means)[tried] * (1 - 1e-12)

    for packed in signs:
        bits = np.unpackbits(packed, axis=1, count=len(d))
        pattern = np.where(bits, -1.0, 1.0)
        flipped_means = abs(pattern @ values) / len(d)
        is_as_large = flipped_means >= observed
        count[tried] += is_as_large.sum(0)

    if len(d) <= MOST_EXACT:
        return count / patterns
    return (1 + count) / (1 + patterns)


def _beyond_all(d: np.ndarray, patterns: int) -> np.ndarray:
    """The columns whose mean any of the patterns reaches with a probability below 1e-15, so that
    they need not be tried.

    ``patterns · P(|Σ s d| ≥ |Σ d|) ≤ patterns · 2 exp(−(Σ d)² / (2 Σ d²))`` (Hoeffding 1963).
    """
    squares = (d**2).sum(0)
    smallest = 2 * squares * np.log(2e15 * patterns)
    return (d.sum(0) ** 2 > smallest) & (squares > 0)


def drawn_signs(n: int, patterns: int, generator: np.random.Generator) -> Signs:
    """All 2ⁿ sign patterns of up to 12 prompts, or random ones of more.

    Args:
        n: The number of prompts.
        patterns: The number of random patterns.
        generator: Where they come from.
    """
    if n <= MOST_EXACT:
        numbers = np.arange(2**n)[:, None]
        bits = (numbers >> np.arange(n)) & 1
        return [np.packbits(bits, axis=1)]

    blocks = []
    for rows in _block_sizes(patterns, _PATTERNS):
        signs = generator.choice([-1.0, 1.0], (rows, n))
        blocks.append(np.packbits(signs < 0, axis=1))
    return blocks


# The bootstrap.


def resample(n: int, resamples: int, generator: np.random.Generator) -> Counts:
    """The plain bootstrap: n prompts, drawn with replacement.

    Args:
        n: The number of prompts, or of bags.
        resamples: The number of resamples.
        generator: Where the draws come from.

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
    """The sequential bootstrap: prompts, drawn with replacement until ⌊n (1 − 1/e)⌋ + 1 of them are
    distinct.

    A plain resample has about that number of distinct prompts on average, but may have far fewer.
    It then has almost no spread and an enormous t, which the maximum over many cells picks up: with
    256 cells, the simultaneous intervals of normal data covered 1.00 (10 prompts) and 0.99 (20),
    and at 10 prompts they were 1.6 times as wide.

    Args:
        n: The number of prompts, or of bags.
        resamples: The number of resamples.
        generator: Where the draws come from.

    Returns:
        How often each prompt was drawn, in blocks [resample, prompt] of uint8.

    Source: Rao, Pathak and Koltchinskii 1997. As accurate as the plain one to second order: Babu,
    Pathak and Rao 1999.
    """
    distinct_on_average = n * (1 - np.exp(-1))
    distinct_needed = int(distinct_on_average) + 1

    blocks = []
    for rows in _block_sizes(resamples, _ROWS):
        counts = np.zeros((rows, n), dtype=np.uint8)
        distinct = np.zeros(rows, dtype=int)
        unfinished = np.arange(rows)
        # One more prompt for each resample that has too few distinct ones.
        while unfinished.size:
            prompt = generator.integers(n, size=unfinished.size)
            is_new = counts[unfinished, prompt] == 0
            distinct[unfinished] += is_new
            counts[unfinished, prompt] += 1
            unfinished = unfinished[distinct[unfinished] < distinct_needed]
        blocks.append(counts)
    return blocks


def _block_sizes(count: int, most: int) -> list[int]:
    """The sizes of blocks of at most ``most`` rows, so that few are unpacked at a time."""
    return [min(most, count - start) for start in range(0, count, most)]


def without_noise(deviation: np.ndarray, d: np.ndarray) -> np.ndarray:
    """The standard deviations of columns, with 0 in place of what is rounding error.

    Args:
        deviation: Standard deviations [cell].
        d: The values that they are of [prompt, cell].
    """
    largest = abs(d).max(0, initial=0.0)
    return np.where(deviation <= _ROUNDING * largest, 0.0, deviation)


def t_quantiles(d: np.ndarray, counts: Counts, level: float) -> tuple[np.ndarray, np.ndarray]:
    """The quantiles of t* for each column of d [prompt, cell] that give the ends of its bootstrap-t
    interval.

    ``mean − t*(97.5 %) · s / √n`` to ``mean − t*(2.5 %) · s / √n`` at a level of 0.95, with
    ``t* = (mean* − mean) / (s* / √n*)`` of each resample, whose size is n*.

    Args:
        d: Differences [prompt, cell].
        counts: Resamples of these prompts.
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
    """``mean / error``; with an error of 0 infinite, but 0 for a mean of 0."""
    without_error = np.where(mean == 0, 0.0, np.copysign(np.inf, mean))
    return ratio(mean, error, otherwise=without_error)


@dataclass(frozen=True, eq=False)
class Tails:
    """Resampled t of many cells: the extreme ones over all cells, and how far out each cell's own t
    lies.

    ``family`` is the two-sided p of each cell adjusted for all of them (step-down): twice the share
    of resamples in which any of the cells that are no further out has a t* as far out, and no
    smaller than the p of the cells further out. ``p`` is that of a cell alone, twice the share of
    its own t* that are as far out, but at least ``family / cells``: it counts in steps of
    1/resamples, and a sample without its long tail looks symmetric. That family has another
    smallest spread (:func:`_smallest_for_p`), so that a cell with all of its spread in one prompt
    does not decide for others.

    Args:
        upper: The upper quantile of the largest t* of each resample over all cells, or 0. The lower
            end of simultaneous intervals is ``mean − upper · s / √n``.
        lower: The lower quantile of the smallest t*, or 0, for the upper end.
        p: Two-sided p of each cell alone [cell].
        family: Two-sided p of each cell, adjusted for all of them [cell].
    """

    upper: float
    lower: float
    p: np.ndarray
    family: np.ndarray


def tails(d: np.ndarray, t: np.ndarray, counts: Counts, level: float) -> Tails:
    """Compare the t of each column of d [prompt, cell] with resamples of all columns.

    A resample uses the same prompts in all cells, which preserves their correlation; each tail is
    treated by itself, which preserves skewness. A t more than three times as far out as any t* of
    the first 500 resamples counts as further out than all.

    Args:
        d: Differences [prompt, cell].
        t: The t of each column [cell]; NaN for those that are not tested.
        counts: Resamples of these prompts.
        level: The level of the simultaneous intervals.

    Returns:
        The tails, in the order of the columns; the p of a column that is not tested are NaN.

    Source: Romano and Wolf 2005, algorithm 4.1 with the p-values of their 2016 paper.
    """
    order = _nearest_first(t)
    t = _infinite_where_far(d, t, order, counts)
    for_family = 1  # in the list of spreads
    spreads = [_smallest_for_p(len(d), len(order)), _SMALLEST_SPREAD]
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
    """Return ``tails(…).p`` without the rest, in less time, as cells that are further out than all
    t* are not resampled.

    Args:
        d: Differences [prompt, cell].
        t: The t of each column [cell]; NaN for those that are not tested.
        counts: Resamples of these prompts.
        family_size: The number of cells in the family, of which the columns may be a sample: a
            cell's part of the family's p is then estimated from these columns, and at most
            ``1 / family_size``. By default the number of columns that are tested.
    """
    order = _nearest_first(t)
    if family_size is None:
        family_size = len(order)
    t = _infinite_where_far(d, t, order, counts)
    near = order[np.isfinite(t[order])]
    reached = _reached(d, t, near, counts, [_smallest_for_p(len(d), family_size)])
    return _p_of_each_cell(reached, len(order), family_size)


def _nearest_first(t: np.ndarray) -> np.ndarray:
    """The cells that are tested, the nearest to 0 first, so that the extremes up to a cell are
    those of the cells that are no further out.
    """
    order = np.argsort(abs(t), kind="stable")
    return order[~np.isnan(t[order])]


@dataclass(frozen=True, eq=False)
class _Reached:
    """How often resamples reach the t of cells.

    Args:
        p_alone: Twice the share of a cell's own t* that reach its t [cell].
        p_family: Twice the share of the extreme t* of all cells that are no further out
            [spread, cell].
        furthest: The furthest t* of all cells in the upper and in the lower tail, there with its
            sign changed [tail, spread, resample].
    """

    p_alone: np.ndarray
    p_family: np.ndarray
    furthest: np.ndarray


def _reached(
    d: np.ndarray, t: np.ndarray, cells: np.ndarray, counts: Counts, spreads: list[float]
) -> _Reached:
    """Resample cells, which come the nearest first; ``p_alone`` is of the first of the spreads."""
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

    # Step down: no p is smaller than those of the cells further out.
    furthest_first = cells[::-1]
    p_by_distance = p_family[:, furthest_first]
    p_family[:, furthest_first] = np.maximum.accumulate(p_by_distance, axis=1)
    return _Reached(p_alone, p_family, furthest)


def _p_of_each_cell(reached: _Reached, tested: int, family_size: int) -> np.ndarray:
    """A cell's own p, which is at least its part of the family's."""
    part_of_family = reached.p_family[0] / max(1, tested)
    part_of_family = np.minimum(part_of_family, 1 / max(1, family_size))
    return np.maximum(reached.p_alone, part_of_family)


def _infinite_where_far(
    d: np.ndarray, t: np.ndarray, order: np.ndarray, counts: Counts
) -> np.ndarray:
    """The t, made infinite where the first few resamples show it so far out that none will reach
    it.
    """
    pilot = [counts[0][:_PILOT]]
    furthest = 0.0
    for _, t_star in _t_star_by_columns(d, order, pilot, [_SMALLEST_SPREAD]):
        furthest = max(furthest, abs(t_star).max())
    return np.where(abs(t) > _FAR * furthest, np.copysign(np.inf, t), t)


def _smallest_for_p(n: int, cells: int) -> float:
    """The smallest spread for p.

    A resample without the prompt that makes all of a cell's spread has a t* of 1 / smallest. So
    that such a cell does not hide one with an effect, this is no more than the t that one cell
    among many needs to be found.
    """
    one_sided = 0.025 / max(1, cells)
    needed_t = stats.t.ppf(1 - one_sided, n - 1)
    return max(_SMALLEST_SPREAD, 1 / needed_t)


def _t_star_by_columns(
    d: np.ndarray, order: np.ndarray, counts: Counts, spreads: list[float]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield a few columns of d at a time, in this order, and their t* [cell, spread, resample]."""
    for start in range(0, len(order), _COLUMNS):
        columns = order[start : start + _COLUMNS]
        t_star = _studentised(d[:, columns], counts, spreads)
        yield columns, t_star


def _studentised(d: np.ndarray, counts: Counts, spreads: list[float]) -> np.ndarray:
    """t* [cell, spread, resample] for each smallest spread; 0 in cells without spread.

    ``t* = (mean* − mean) / max(s* / √n*, smallest · s / √n)``. If one prompt causes all of a cell's
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
    # In units of each cell's own spread, so that one smallest error suits all.
    scaled = ratio(d - d.mean(0), deviation, otherwise=0.0)
    # One product with the counts gives the sums of values and of squares.
    powers = np.concatenate([scaled, scaled**2], axis=1).T

    resamples = sum(map(len, counts))
    t_star = np.empty((cells, len(spreads), resamples))
    start = 0
    for block in counts:
        size = block.sum(1, dtype=np.float64)  # n*, in which sequential resamples differ
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
