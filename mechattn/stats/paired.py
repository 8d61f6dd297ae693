"""Statistics for many paired differences: intervals, sign-flip tests, false discovery rate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy import stats

from mechattn.stats import bootstrap
from mechattn.stats.intervals import Moments, blocks_of
from mechattn.stats.resolution import EXACT, RESAMPLES, detectable_size, enough
from mechattn.stats.units import Bags

FEWEST_FOR_BOOTSTRAP = 20
# Below, false findings among skewed differences are more than 5 % (docs/concepts/intervals.md).
FEWEST_IF_SKEWED = 96
VERY_SKEWED = 5  # lognormal, σ = 2, 96 prompts: some q < 0.05 in 43 % of tables without an effect
# A sequential resample then holds seven prompts; coverage was measured from here on.
FEWEST_FOR_ALL = 10
ROUNDING = 1e-5  # of a log-ratio: how much two float32 computations of the same number may differ
_CHUNK = 2000
_KEPT = 2**26  # bytes of draws kept for the next table
Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class Paired:
    """Paired statistics over ``n`` prompts for each cell (such as layer × head), as arrays in the
    shape of the cells.

    ``difference``, ``null`` and ``beyond`` are means: of the difference, of that under the null,
    such as uniform attention, and of what remains. Tests are of ``beyond``; without a null they are
    of the difference itself, and null, beyond and its intervals are NaN. ``effect_size`` is the
    tested mean divided by its standard deviation (d_z).

    ``low`` and ``high`` are the ends of t intervals. The bootstrap-t ones are NaN below 20 prompts.
    The simultaneous ones, over all cells by the studentised bootstrap of the largest and the
    smallest t, are NaN below 10. Coverage of these at nominal 95 %, measured with 1 to 256 cells:
    93 to 98 % for normal data; for lognormal data (σ = 1) 88 to 97 % at 10 prompts, 92 to 99 % at
    20, 95 to 99 % at 64; for σ = 2 13 to 64 % at 20 and 91 to 95 % at 64.

    ``p`` is two-sided, that the mean is 0: the larger of the sign-flip test's (``p_flip``), which
    is exact if differences are symmetric, and from 10 prompts on the bootstrap-t test's, which
    allows for ``skewness``. ``p_family`` is adjusted for all cells together (step-down over the
    largest t, Romano and Wolf): the probability that any cell without an effect is below 0.05 is 5
    %. ``q`` is Benjamini-Hochberg over all cells' p. ``detectable`` is the smallest mean, up to
    sign, that q < 0.05 finds with 80 % power if no other cell has an effect (of a t test; measured
    with 32 heads 71 % at 20 prompts and 75 % at 64); NaN with too few prompts for any.
    ``p_difference`` and ``q_difference`` are of the difference itself, whatever is tested.
    """

    n: int
    difference: np.ndarray
    low: np.ndarray
    high: np.ndarray
    low_bootstrap: np.ndarray
    high_bootstrap: np.ndarray
    low_simultaneous: np.ndarray
    high_simultaneous: np.ndarray
    null: np.ndarray
    beyond: np.ndarray
    beyond_low: np.ndarray
    beyond_high: np.ndarray
    beyond_low_bootstrap: np.ndarray
    beyond_high_bootstrap: np.ndarray
    beyond_low_simultaneous: np.ndarray
    beyond_high_simultaneous: np.ndarray
    effect_size: np.ndarray
    skewness: np.ndarray
    p: np.ndarray
    p_flip: np.ndarray
    p_family: np.ndarray
    q: np.ndarray
    detectable: np.ndarray
    p_difference: np.ndarray
    q_difference: np.ndarray

    @property
    def skewed(self) -> str:
        """Where the tests disagree because differences are skewed, or cannot tell; empty if nothing
        is to be said.
        """
        return skewed_words(self.n, self.skewness, self.p_flip, self.q)


def skewed_words(units: int, skewness: np.ndarray, p_flip: np.ndarray, q: np.ndarray) -> str:
    """Where sign flips and the bootstrap-t test disagree because differences are skewed, in
    words."""
    tests = q.size
    sentences = []

    significant_flips = false_discovery(p_flip) < 0.05
    disagreeing = int((significant_flips & (q >= 0.05)).sum())
    if disagreeing:
        sentences.append(
            f"in {disagreeing} of {tests} tests sign flips alone would say q < 0.05, but the "
            "bootstrap-t test, which allows for skewness, also as seen in other tests, does not"
        )

    skewed = int((abs(skewness) > 1).sum())
    very_skewed = int((abs(skewness) > VERY_SKEWED).sum())
    controlled_from = 0  # units
    if skewed:
        controlled_from = FEWEST_FOR_ALL
    if 4 * skewed >= tests:
        controlled_from = FEWEST_IF_SKEWED
    if 4 * very_skewed >= tests > 0:
        controlled_from = units + 1  # no number of prompts is known to be enough
    if units < controlled_from and (q < 0.05).any():
        sentences.append(
            f"with {units} units q is not controlled where differences are skewed "
            f"(|skewness| > 1 in {skewed} of {tests} tests)"
        )
    return "; ".join(sentences)


def paired(
    difference: np.ndarray,
    null: np.ndarray | float | None = 0.0,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
    rounding: np.ndarray | float = 0.0,
    bootstrap_ends: bool = True,
) -> Paired:
    """Compute all statistics of paired differences [prompt, *cells], optionally against each
    prompt's null.
    """
    difference = np.asarray(difference, dtype=np.float64)
    cells = difference.shape[1:]
    flat = difference.reshape(len(difference), -1)
    expected = None
    if null is not None:
        null = np.asarray(null, dtype=np.float64)
        expected = np.broadcast_to(null, difference.shape).reshape(flat.shape)

    stream = PairedStream(len(flat), level, resamples, seed, bootstrap_ends)
    stream.add(flat, expected, rounding)
    statistics = stream.statistics()
    shaped = {}
    for field in fields(statistics):
        if field.name != "n":
            shaped[field.name] = getattr(statistics, field.name).reshape(cells)
    return Paired(n=len(flat), **shaped)


class PairedStream:
    """Paired statistics for cells added in blocks, so that the values of all cells never have to
    fit in memory.

    All cells share the draws, which preserves the correlation of their errors for simultaneous
    intervals. There are two kinds of resamples, since the largest t of many cells is far off in
    plain resamples of few units (stats/bootstrap.py). Means, t intervals, effect sizes and
    detectable differences use single units. With more than 2,000 units, the bootstrap and the sign
    flips use the means of random bags of units (stats/units.py), in float32. Most of the time goes
    into the ends of bootstrap intervals; without ``bootstrap_ends`` these and ``p_family`` are NaN.
    """

    def __init__(
        self, n: int, level: float, resamples: int, seed: int, bootstrap_ends: bool = True
    ) -> None:
        self.n = n
        self.level = level
        self.resamples = resamples
        self.seed = seed
        self.bootstrap_ends = bootstrap_ends
        self.bags = Bags.drawn(n, seed)
        self._dtype = np.float64 if self.bags is None else np.float32
        self._blocks: list[Columns] = []  # each array [unit or bag, cell], or [cell]

    def add(self, d: np.ndarray, expected: np.ndarray | None, rounding: np.ndarray | float) -> None:
        """Add some cells [unit, cell] with their values under the null; None if no null is
        known."""
        cells = d.shape[1]
        if expected is None:
            tested = without_rounding(d.copy(), rounding)
            null = np.full(cells, np.nan)
        else:
            tested = without_rounding(d - expected, rounding)
            null = expected.mean(0)
            null = np.where(abs(null) <= rounding, 0.0, null)

        difference = _intervals(d, self.level)
        beyond = difference
        if not np.array_equal(d, tested):
            beyond = _intervals(tested, self.level)

        mean = beyond["mean"]
        deviation = beyond["deviation"]
        all_rounding = np.ones(cells, dtype=bool)
        third_moment = np.zeros(cells)
        for rows in blocks_of(tested):
            all_rounding &= (abs(d[rows]) <= rounding).all(0)
            third_moment += ((tested[rows] - mean) ** 3).sum(0) / len(d)
        population_deviation = deviation * np.sqrt((len(d) - 1) / len(d))

        block = {
            "all_rounding": all_rounding,
            "null": null,
            "effect_size": _divided(mean, deviation),
            "skewness": _divided(third_moment, population_deviation**3),
            "differences": d,
            "beyond_null": tested,
        }
        for name, column in difference.items():
            block[name] = column
        for name, column in beyond.items():
            block[f"beyond_{name}"] = column
        if self.bags is not None:
            block["differences"] = self.bags.means(d)
            block["beyond_null"] = self.bags.means(tested)
        self._blocks.append(block)

    def statistics(self) -> Paired:
        """The statistics of all cells, in the order in which they were added."""
        columns = {}
        for name in self._blocks[0]:
            columns[name] = np.concatenate([block[name] for block in self._blocks], axis=-1)
        without_null = np.isnan(columns["null"])
        draws = self._draws(*columns["beyond_null"].shape)

        beyond_ends, tails = self._bootstrap("beyond_", columns["beyond_null"], columns, draws)
        p_flip = self._p_flip(columns["beyond_null"], columns["beyond_mean"], draws)
        p = _with_tails(p_flip, tails)
        p_family = np.full(p.shape, np.nan)
        if tails and self.bootstrap_ends:
            p_family = np.maximum(p, tails.family)

        ends = beyond_ends
        p_difference = p
        if not np.array_equal(columns["differences"], columns["beyond_null"]):
            ends, p_of_changes = self._of_differences(columns, draws)
            p_difference = np.where(without_null, p, p_of_changes)

        def where_null(column: np.ndarray) -> np.ndarray:
            """What is beyond a null is unknown where there is none."""
            return np.where(without_null, np.nan, column)

        return Paired(
            n=self.n,
            difference=columns["mean"],
            low=columns["low"],
            high=columns["high"],
            low_bootstrap=ends.low,
            high_bootstrap=ends.high,
            low_simultaneous=ends.low_simultaneous,
            high_simultaneous=ends.high_simultaneous,
            null=columns["null"],
            beyond=where_null(columns["beyond_mean"]),
            beyond_low=where_null(columns["beyond_low"]),
            beyond_high=where_null(columns["beyond_high"]),
            beyond_low_bootstrap=where_null(beyond_ends.low),
            beyond_high_bootstrap=where_null(beyond_ends.high),
            beyond_low_simultaneous=where_null(beyond_ends.low_simultaneous),
            beyond_high_simultaneous=where_null(beyond_ends.high_simultaneous),
            effect_size=columns["effect_size"],
            skewness=columns["skewness"],
            p=p,
            p_flip=p_flip,
            p_family=p_family,
            q=false_discovery(p),
            detectable=columns["beyond_deviation"] * detectable_size(self.n, max(1, p.size)),
            p_difference=p_difference,
            q_difference=false_discovery(p_difference),
        )

    def _draws(self, units: int, cells: int) -> Draws:
        """The random draws for all cells; kept for the next table where they are small."""
        patterns = enough(self.resamples, cells)
        draw = _draws
        if units * (2 * self.resamples + patterns // 8) <= _KEPT:
            draw = _kept_draws
        return draw(units, self.resamples, patterns, self.seed)

    def _of_differences(self, columns: Columns, draws: Draws) -> tuple[_Ends, np.ndarray]:
        """The ends of intervals, and the p, of the differences themselves, without their null."""
        ends, tails = self._bootstrap("", columns["differences"], columns, draws)
        if np.isnan(columns["null"]).all():
            return ends, columns["null"]  # no p is asked for
        p_flip = self._p_flip(columns["differences"], columns["mean"], draws)
        p = np.where(columns["all_rounding"], 1.0, _with_tails(p_flip, tails))
        return ends, p

    def _p_flip(self, d: np.ndarray, mean: np.ndarray, draws: Draws) -> np.ndarray:
        """The p of each column of d [unit, cell] by sign flips."""
        return np.where(np.isnan(mean), np.nan, flipped(d, draws.signs, self._dtype))

    def _bootstrap(
        self, prefix: str, d: np.ndarray, columns: Columns, draws: Draws
    ) -> tuple[_Ends, bootstrap.Tails | None]:
        """The ends of bootstrap intervals around the units' means, NaN if there are few units; and
        the tests.
        """
        mean = columns[f"{prefix}mean"]
        error = columns[f"{prefix}deviation"] / np.sqrt(self.n)
        nan = np.full(mean.shape, np.nan)

        low = nan
        high = nan
        if draws.plain and self.bootstrap_ends:
            upper, lower = bootstrap.t_quantiles(d, draws.plain, self.level, self._dtype)
            low = mean - upper * error
            high = mean - lower * error
        if not draws.sequential or not mean.size:
            return _Ends(low, high, nan, nan), None

        t_without_error = np.where(mean == 0, 0.0, np.copysign(np.inf, mean))
        t = np.divide(mean, error, out=t_without_error, where=error > 0)
        tails = bootstrap.tails(d, t, draws.sequential, self._dtype, self.bootstrap_ends)
        if not self.bootstrap_ends:
            return _Ends(low, high, nan, nan), tails

        largest, smallest = bootstrap.of_extremes(tails.largest, tails.smallest, self.level)
        # A simultaneous interval is at least as wide as the pointwise ones.
        pointwise_low = np.fmin(columns[f"{prefix}low"], low)
        pointwise_high = np.fmax(columns[f"{prefix}high"], high)
        low_simultaneous = np.minimum(mean - largest * error, pointwise_low)
        high_simultaneous = np.maximum(mean - smallest * error, pointwise_high)
        return _Ends(low, high, low_simultaneous, high_simultaneous), tails


class _Ends(NamedTuple):
    """The ends of bootstrap-t intervals, pointwise and simultaneous."""

    low: np.ndarray
    high: np.ndarray
    low_simultaneous: np.ndarray
    high_simultaneous: np.ndarray


def _with_tails(p_flip: np.ndarray, tails: bootstrap.Tails | None) -> np.ndarray:
    """The larger p of sign flips and of the bootstrap-t test, where there are enough units for
    it."""
    if tails is None:
        return p_flip
    return np.maximum(p_flip, tails.p)


def _divided(above: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """NaN where nothing varies."""
    nan = np.full(above.shape, np.nan)
    return np.divide(above, deviation, out=nan, where=deviation > 0)


class Draws(NamedTuple):
    """The random draws for a number of units: both kinds of resamples, and signs."""

    plain: bootstrap.Counts
    sequential: bootstrap.Counts
    signs: list[np.ndarray]  # patterns as bits, in blocks


def _draws(n: int, resamples: int, patterns: int, seed: int) -> Draws:
    generator = np.random.default_rng(seed)
    plain: bootstrap.Counts = []
    sequential: bootstrap.Counts = []
    if n >= FEWEST_FOR_BOOTSTRAP:
        plain = bootstrap.resample(n, resamples, generator)
    if n >= FEWEST_FOR_ALL:
        sequential = bootstrap.resample_sequentially(n, resamples, generator)
    signs = list(drawn_signs(n, patterns, generator))
    return Draws(plain, sequential, signs)


_kept_draws = lru_cache(maxsize=1)(_draws)  # a page makes a hundred tables with the same draws


def _intervals(d: np.ndarray, level: float) -> Columns:
    """The t interval for the mean of each column, with the mean and standard deviation."""
    moments = Moments.of_rows(d)
    _, low, high = moments.interval(level)
    # A cell that some unit lacks has no mean and no test, only the interval of the others.
    incomplete = moments.n < len(d)
    deviation = bootstrap.without_noise(np.sqrt(moments.variance), d)
    return {
        "low": low,
        "high": high,
        "mean": np.where(incomplete, np.nan, moments.mean),
        "deviation": np.where(incomplete, np.nan, deviation),
    }


def without_rounding(difference: np.ndarray, rounding: np.ndarray | float = ROUNDING) -> np.ndarray:
    """Replace differences within the rounding error by 0, in place."""
    for rows in blocks_of(difference):
        difference[rows][abs(difference[rows]) <= rounding] = 0.0
    return difference


def flipped(
    d: np.ndarray, signs: Iterable[np.ndarray], dtype: type[np.floating] = np.float64
) -> np.ndarray:
    """Two-sided p of mean 0 for each column of d [prompt, cell]: the fraction of sign patterns with
    as large a mean.

    Below 13 prompts all patterns are tried; with more, ``(1 + count) / (1 + resamples)`` of random
    patterns. The test is exact if differences are symmetric about 0. ``dtype`` is that of the sums.
    """
    signs = list(signs)
    patterns = sum(map(len, signs))
    count = np.zeros(d.shape[1])
    tried = np.flatnonzero(~_beyond_all(d, patterns))
    values = d
    if len(tried) < d.shape[1]:
        values = d[:, tried]
    values = values.astype(dtype, copy=False)
    # Equal means count, although they were summed in another order.
    slack = 1e-12 if dtype is np.float64 else 1e-5
    observed = abs(d.mean(0))[tried] * (1 - slack)

    if len(tried):
        for packed in signs:
            for rows in bootstrap.row_blocks(len(packed), len(d)):
                bits = np.unpackbits(packed[rows], axis=1, count=len(d))
                flipped_means = abs((1 - 2 * bits.astype(dtype)) @ values) / len(d)
                count[tried] += (flipped_means >= observed).sum(0)
    if len(d) <= EXACT:
        return count / patterns
    return (1 + count) / (1 + patterns)


def _beyond_all(d: np.ndarray, patterns: int) -> np.ndarray:
    """The columns whose mean a pattern reaches with a probability below 1e-15, which need not be
    tried.

    ``P(|Σ s d| ≥ |Σ d|) ≤ 2 exp(−(Σ d)² / (2 Σ d²))`` (Hoeffding 1963), multiplied by the number of
    patterns.
    """
    squares = (d**2).sum(0)
    far: np.ndarray = d.sum(0) ** 2 > 2 * squares * np.log(2e15 * max(patterns, 1))
    return far & (squares > 0)


def drawn_signs(n: int, resamples: int, generator: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield sign patterns as bits, 1 for −1 [pattern, prompt / 8], in blocks: all 2ⁿ, or random
    ones.
    """
    if n <= EXACT:
        yield np.packbits((np.arange(2**n)[:, None] >> np.arange(n)) & 1, axis=1)
        return
    for start in range(0, resamples, _CHUNK):
        rows = min(_CHUNK, resamples - start)
        packed = []
        for block in bootstrap.row_blocks(rows, n):
            signs = generator.choice([-1.0, 1.0], (block.stop - block.start, n))
            packed.append(np.packbits(signs < 0, axis=1))
        yield np.concatenate(packed)


def false_discovery(p: np.ndarray) -> np.ndarray:
    """Benjamini-Hochberg over all p that are not NaN."""
    q = np.full(p.shape, np.nan)
    tested = ~np.isnan(p)
    if tested.any():
        q[tested] = stats.false_discovery_control(p[tested])
    return q
