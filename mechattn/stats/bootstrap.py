"""Bootstrap-t intervals for many means, pointwise and simultaneous."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy import stats

_SMALLEST_SPREAD = 0.1  # of a resample, as a fraction of the cell's own
_ROUNDING = 1e-12  # of the cell's largest value: a smaller standard deviation counts as zero
_ROWS, _COLUMNS = 2000, 100  # resamples and cells in memory at a time
_PILOT, _FAR = 500, 3  # a t this many times as far out as any t* of so many resamples is beyond all

_NUMBERS = 2**23  # numbers in memory at a time if there are many prompts
Counts = list[
    np.ndarray
]  # how often each prompt is in each resample [resample, prompt], in blocks of resamples


def resample(n: int, resamples: int, generator: np.random.Generator) -> Counts:
    """The plain bootstrap: n prompts, drawn with replacement."""
    each, made = np.full(n, 1 / n), []
    for rows in _blocks(resamples):
        counts = np.empty((rows, n), dtype=np.uint8)
        for some in row_blocks(rows, n):
            counts[some] = generator.multinomial(n, each, some.stop - some.start)
        made.append(counts)
    return made


def resample_sequentially(n: int, resamples: int, generator: np.random.Generator) -> Counts:
    """The sequential bootstrap: draws prompts with replacement until there are ⌊n (1 − 1/e)⌋ + 1 distinct ones.

    A plain resample has that number of distinct prompts on average, but may have far fewer. It then has almost no
    spread and an enormous t, which the maximum over many cells picks up: with 256 cells, the simultaneous intervals of
    normal data covered 1.00 (10 prompts) and 0.99 (20), and at 10 prompts they were 1.6 times as wide.

    Source: Rao, Pathak and Koltchinskii 1997. As accurate as the plain one to second order: Babu, Pathak and Rao 1999.
    """
    enough = int(n * (1 - np.exp(-1))) + 1
    made = []
    for rows in _blocks(resamples):
        counts, distinct, live = (
            np.zeros((rows, n), dtype=np.uint8),
            np.zeros(rows, dtype=int),
            np.arange(rows),
        )
        while live.size:
            prompt = generator.integers(n, size=live.size)
            distinct[live] += counts[live, prompt] == 0
            counts[live, prompt] += 1
            live = live[distinct[live] < enough]
        made.append(counts)
    return made


def _blocks(resamples: int) -> list[int]:
    return [min(_ROWS, resamples - start) for start in range(0, resamples, _ROWS)]


def row_blocks(rows: int, n: int) -> list[slice]:
    """Split rows of n numbers into blocks of 64 MiB."""
    step = max(1, _NUMBERS // n)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def without_noise(deviation: np.ndarray, d: np.ndarray) -> np.ndarray:
    """The standard deviations of columns, with 0 in place of what is rounding error."""
    largest = np.maximum(d.max(0, initial=0.0), -d.min(0, initial=0.0))
    return np.where(deviation <= _ROUNDING * largest, 0.0, deviation)


def t_quantiles(
    d: np.ndarray, counts: Counts, level: float, dtype: type[np.floating] = np.float64
) -> tuple[np.ndarray, np.ndarray]:
    """The quantiles of t* for each column of d [prompt, cell] that give the ends of its bootstrap-t interval.

    ``mean − t*(97.5 %) · s / √n`` to ``mean − t*(2.5 %) · s / √n``, with ``t* = (mean* − mean) / (s* / √n)``

    Source: Hall 1988.
    """
    ends = []
    for start in range(0, d.shape[1], _COLUMNS):
        drawn = _studentised(d[:, start : start + _COLUMNS], counts, dtype)[:, 0]
        ends.append(np.quantile(drawn, [(1 + level) / 2, (1 - level) / 2], axis=1))
    upper, lower = np.concatenate(ends, axis=1) if ends else np.empty((2, 0))
    return upper, lower


@dataclass(frozen=True)
class Tails:
    """Resampled t of many cells: the extreme ones over all cells, and how far out each cell's own t lies.

    ``family`` is the two-sided p of each cell adjusted for all of them (step-down): that for the extreme t* of the
    cells that are no further out, and no smaller than that of the cells further out. ``p`` is that of a cell alone,
    twice the share of its own t* that are as far out. These count in steps of 1/resamples, and a sample without its
    long tail looks symmetric, so p is at least a cell's part of the family's p, ``family / cells``, from t* with a
    larger smallest spread, so that a cell with all of its spread in one prompt does not decide for others.
    """

    largest: np.ndarray  # the largest t* of each resample over all cells, or 0
    smallest: np.ndarray
    p: np.ndarray
    family: np.ndarray


def tails(
    d: np.ndarray,
    t: np.ndarray,
    counts: Counts,
    dtype: type[np.floating] = np.float64,
    extremes: bool = True,
) -> Tails:
    """Compare the t of each column of d [prompt, cell] with resamples of all columns.

    A resample uses the same prompts in all cells, which preserves their correlation; each tail is treated by itself,
    which preserves skewness. A t more than three times as far out as any t* of the first 500 resamples counts as
    further out than all; without ``extremes`` such cells are not resampled, and only ``p`` is of use.

    Source: Romano and Wolf 2005, algorithm 4.1 with the p-values of their 2016 paper.
    """
    resamples, cells = sum(map(len, counts)), d.shape[1]
    order = np.argsort(
        abs(t), kind="stable"
    )  # the nearest first, so that the extremes are of cells no further out
    order = order[~np.isnan(t[order])]
    spreads = (_smallest_for_p(len(d), len(order)), *[_SMALLEST_SPREAD] * extremes)
    largest, smallest = np.zeros((2, len(spreads), resamples))
    alone, family = np.zeros(cells), np.full((len(spreads), cells), 2 / (1 + resamples))
    reach = max(
        (abs(drawn).max() for _, drawn in _drawn(d, order, [counts[0][:_PILOT]], dtype)),
        default=0.0,
    )
    near = abs(t) <= _FAR * reach
    for some, of_cells in _drawn(
        d, order if extremes else order[near[order]], counts, dtype, spreads
    ):
        for cell, of_cell in zip(some, of_cells, strict=True):
            np.maximum(largest, of_cell, out=largest)
            np.minimum(smallest, of_cell, out=smallest)
            if not near[cell]:
                continue
            side, furthest = (1, largest) if t[cell] > 0 else (-1, smallest)
            alone[cell] = min(
                1.0, 2 * np.count_nonzero(side * of_cell[0] >= abs(t[cell])) / resamples
            )
            any_out = np.count_nonzero(side * furthest >= abs(t[cell]), axis=1)
            family[:, cell] = np.minimum(1.0, 2 * (1 + any_out) / (1 + resamples))
    family[:, order[::-1]] = np.maximum.accumulate(family[:, order[::-1]], axis=1)
    return Tails(
        largest[-1], smallest[-1], np.maximum(alone, family[0] / max(1, len(order))), family[-1]
    )


def _smallest_for_p(n: int, cells: int) -> float:
    """The smallest spread for p: t* is 1 / smallest in a resample without the prompt that makes all of a cell's spread.

    Here this is the t that a single cell among many needs, so that such a cell does not hide one which has it.
    """
    return max(_SMALLEST_SPREAD, 1 / stats.t.ppf(1 - 0.025 / max(1, cells), n - 1))


def _drawn(
    d: np.ndarray,
    cells: np.ndarray,
    counts: Counts,
    dtype: type[np.floating],
    spreads: tuple[float, ...] = (_SMALLEST_SPREAD,),
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Some cells at a time, and their t* [cell, spread, resample]."""
    for start in range(0, len(cells), _COLUMNS):
        some = cells[start : start + _COLUMNS]
        yield some, _studentised(d[:, some], counts, dtype, spreads)


def of_extremes(largest: np.ndarray, smallest: np.ndarray, level: float) -> tuple[float, float]:
    """The t of the lower and the upper end of simultaneous intervals."""
    return float(np.quantile(largest, (1 + level) / 2)), float(
        np.quantile(smallest, (1 - level) / 2)
    )


def _studentised(
    d: np.ndarray,
    counts: Counts,
    dtype: type[np.floating],
    spreads: tuple[float, ...] = (_SMALLEST_SPREAD,),
) -> np.ndarray:
    """t* [cell, spread, resample] for each smallest spread; 0 in cells without spread.

    If one prompt causes all of a cell's spread, a resample without it has none, and its infinite t* would make all
    simultaneous intervals infinite. So the standard error s* / √n* is at least this fraction of s / √n.
    """
    deviation, cells = without_noise(d.std(0, ddof=1), d), d.shape[1]
    scaled = np.divide(d - d.mean(0), deviation, out=np.zeros_like(d), where=deviation > 0)
    powers = np.concatenate([scaled, scaled**2], axis=1).T.astype(dtype)
    made, start = np.empty((cells, len(spreads), sum(map(len, counts))), dtype=dtype), 0
    for block in counts:
        for rows in row_blocks(*block.shape):
            drawn = block[rows].astype(dtype)
            size = drawn.sum(1)
            mean, variance = np.split(powers @ drawn.T / size, 2)
            variance -= mean**2
            variance *= size / (size - 1)
            for at, smallest in enumerate(spreads):
                spread = np.sqrt(np.maximum(variance / size, smallest**2 / len(d)))
                np.divide(mean, spread, out=made[:, at, start : start + len(size)])
            start += len(size)
    return made
