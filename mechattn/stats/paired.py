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
FEWEST_IF_SKEWED = 96  # below, false findings among skewed differences are more than 5 % (docs/concepts/intervals.md)
VERY_SKEWED = 5  # lognormal, σ = 2, 96 prompts: some q < 0.05 in 43 % of tables without an effect
FEWEST_FOR_ALL = (
    10  # a sequential resample then holds seven prompts; coverage was measured from here on
)
ROUNDING = 1e-5  # of a log-ratio: how much two float32 computations of the same number may differ
_CHUNK = 2000
_KEPT = 2**26  # bytes of draws kept for the next table
_ENDS = ("low_bootstrap", "high_bootstrap", "low_simultaneous", "high_simultaneous")
Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class Paired:
    """Paired statistics over ``n`` prompts for each cell (such as layer × head), as arrays in the shape of the cells.

    ``difference``, ``null`` and ``beyond`` are means: of the difference, of that under the null, such as uniform
    attention, and of what remains. Tests are of ``beyond``; without a null they are of the difference itself, and null,
    beyond and its intervals are NaN. ``effect_size`` is the tested mean divided by its standard deviation (d_z).

    ``low`` and ``high`` are the ends of t intervals. The bootstrap-t ones are NaN below 20 prompts. The simultaneous
    ones, over all cells by the studentised bootstrap of the largest and the smallest t, are NaN below 10. Coverage of
    these at nominal 95 %, measured with 1 to 256 cells: 93 to 98 % for normal data; for lognormal data (σ = 1) 88 to 97
    % at 10 prompts, 92 to 99 % at 20, 95 to 99 % at 64; for σ = 2 13 to 64 % at 20 and 91 to 95 % at 64.

    ``p`` is two-sided, that the mean is 0: the larger of the sign-flip test's (``p_flip``), which is exact if
    differences are symmetric, and from 10 prompts on the bootstrap-t test's, which allows for ``skewness``.
    ``p_family`` is adjusted for all cells together (step-down over the largest t, Romano and Wolf): the probability
    that any cell without an effect is below 0.05 is 5 %. ``q`` is Benjamini-Hochberg over all cells' p. ``detectable``
    is the smallest mean, up to sign, that q < 0.05 finds with 80 % power if no other cell has an effect (of a t test;
    measured with 32 heads 71 % at 20 prompts and 75 % at 64); NaN with too few prompts for any. ``p_difference`` and
    ``q_difference`` are of the difference itself, whatever is tested.
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
        """Where the tests disagree because differences are skewed, or cannot tell; empty if nothing is to be said."""
        alone, words = false_discovery(self.p_flip) < 0.05, []
        apart, skewed = int((alone & (self.q >= 0.05)).sum()), int((abs(self.skewness) > 1).sum())
        if apart:
            words.append(
                f"in {apart} of {alone.size} tests sign flips alone would say q < 0.05, but the bootstrap-t test, "
                "which allows for skewness, also as seen in other tests, does not"
            )
        fewest = FEWEST_IF_SKEWED if 4 * skewed >= alone.size else FEWEST_FOR_ALL if skewed else 0
        if 4 * (abs(self.skewness) > VERY_SKEWED).sum() >= alone.size > 0:
            fewest = self.n + 1  # no number of prompts is known to be enough
        if self.n < fewest and (self.q < 0.05).any():
            words.append(
                f"with {self.n} units q is not controlled where differences are skewed (|skewness| > 1 in {skewed} of "
                f"{alone.size} tests)"
            )
        return "; ".join(words)


def paired(
    difference: np.ndarray,
    null: np.ndarray | float | None = 0.0,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
    rounding: np.ndarray | float = 0.0,
    bootstrap_ends: bool = True,
) -> Paired:
    """Compute all statistics of paired differences [prompt, *cells], optionally against each prompt's null."""
    difference = np.asarray(difference, dtype=np.float64)
    cells = difference.shape[1:]
    d = difference.reshape(len(difference), -1)
    expected = (
        None
        if null is None
        else np.broadcast_to(np.asarray(null, dtype=np.float64), difference.shape)
    )
    stream = PairedStream(len(d), level, resamples, seed, bootstrap_ends)
    stream.add(d, None if expected is None else expected.reshape(d.shape), rounding)
    made = stream.made()
    shaped = {
        of.name: getattr(made, of.name).reshape(cells) for of in fields(made) if of.name != "n"
    }
    return Paired(n=len(d), **shaped)


class PairedStream:
    """Paired statistics for cells added in blocks, so that the values of all cells never have to fit in memory.

    All cells share the draws, which preserves the correlation of their errors for simultaneous intervals. There are two
    kinds of resamples, since the largest t of many cells is far off in plain resamples of few units
    (stats/bootstrap.py). Means, t intervals, effect sizes and detectable differences use single units. With more than
    2,000 units, the bootstrap and the sign flips use the means of random bags of units (stats/units.py), in float32.
    Most of the time goes into the ends of bootstrap intervals; without ``bootstrap_ends`` these and ``p_family`` are
    NaN.
    """

    def __init__(
        self, n: int, level: float, resamples: int, seed: int, bootstrap_ends: bool = True
    ) -> None:
        self.n, self.level, self.resamples, self.seed = n, level, resamples, seed
        self.bootstrap_ends = bootstrap_ends
        self.bags = Bags.drawn(n, seed)
        self._dtype = np.float64 if self.bags is None else np.float32
        self._parts: list[Columns] = []  # each [unit or bag, cell], or [cell]

    def add(self, d: np.ndarray, expected: np.ndarray | None, rounding: np.ndarray | float) -> None:
        """Add some cells [unit, cell] with their values under the null; None if no null is known."""
        tested = without_rounding(
            d - (np.zeros(d.shape) if expected is None else expected), rounding
        )
        unknown = np.full(d.shape[1], np.nan if expected is None else 0.0)
        null = np.zeros(d.shape[1]) if expected is None else expected.mean(0)
        null = np.where(abs(null) <= rounding, 0.0, null)
        ends = _intervals(d, self.level)
        beyond = ends if np.array_equal(d, tested) else _intervals(tested, self.level)
        mean, deviation = beyond["mean"], beyond["deviation"]
        cubes, varies, nan = np.zeros(mean.shape), deviation > 0, np.full(mean.shape, np.nan)
        none = np.ones(mean.shape, dtype=bool)
        for rows in blocks_of(tested):
            none &= (abs(d[rows]) <= rounding).all(0)
            cubes += ((tested[rows] - mean) ** 3).sum(0) / len(d)
        cubed = (deviation * np.sqrt((len(d) - 1) / len(d))) ** 3
        made = {"none": none, "unknown": unknown, "difference": ends["mean"]}
        made |= {"null": null + unknown, "beyond": mean + unknown}
        made["effect_size"] = np.divide(mean, deviation, out=nan.copy(), where=varies)
        made |= {
            "skewness": np.divide(cubes, cubed, out=nan, where=varies),
            "detectable": deviation,
        }
        made |= ends | {f"beyond_{name}": end for name, end in beyond.items()}
        made |= {"beyond_low": beyond["low"] + unknown, "beyond_high": beyond["high"] + unknown}
        bags = (lambda values: values) if self.bags is None else self.bags.means
        self._parts.append(made | {"resampled": bags(d), "tested": bags(tested)})

    def made(self) -> Paired:
        """The statistics of all cells, in the order in which they were added."""
        made = {
            name: np.concatenate([part[name] for part in self._parts], axis=-1)
            for name in self._parts[0]
        }
        d, tested = made.pop("resampled"), made.pop("tested")
        patterns = enough(self.resamples, d.shape[1])
        few = len(d) * (2 * self.resamples + patterns // 8) <= _KEPT
        draws = (_kept_draws if few else _draws)(len(d), self.resamples, patterns, self.seed)
        beyond, found = self._ends("beyond_", tested, made, draws)
        p, p_flip = self._p(tested, made["beyond_mean"], found, draws)
        made["p_family"] = (
            np.maximum(p, found.family)
            if found and self.bootstrap_ends
            else np.full(p.shape, np.nan)
        )
        unknown, none, p_difference = made.pop("unknown"), made.pop("none"), p
        if np.array_equal(d, tested):
            made |= {name: beyond[f"beyond_{name}"] for name in _ENDS}
        else:
            ends, of_difference = self._ends("", d, made, draws)
            made |= ends
            if not np.isnan(unknown).all():
                p_difference = np.where(
                    none, 1.0, self._p(d, made["mean"], of_difference, draws)[0]
                )
                p_difference = np.where(np.isnan(unknown), p, p_difference)
        made |= {name: end + unknown for name, end in beyond.items()}
        for name in ("mean", "deviation", "beyond_mean", "beyond_deviation"):
            made.pop(name)
        made["detectable"] = made["detectable"] * detectable_size(self.n, max(1, p.size))
        made |= {"p_difference": p_difference, "q_difference": false_discovery(p_difference)}
        return Paired(n=self.n, p=p, p_flip=p_flip, q=false_discovery(p), **made)

    def _p(
        self, d: np.ndarray, mean: np.ndarray, found: bootstrap.Tails | None, draws: Draws
    ) -> tuple[np.ndarray, np.ndarray]:
        """The p of each column of d [unit, cell], and those of sign flips alone."""
        p_flip = np.where(np.isnan(mean), np.nan, flipped(d, draws.signs, self._dtype))
        if found is None:
            return p_flip, p_flip
        return np.maximum(p_flip, found.p), p_flip

    def _ends(
        self, of: str, d: np.ndarray, made: Columns, draws: Draws
    ) -> tuple[Columns, bootstrap.Tails | None]:
        """The ends of bootstrap intervals around the units' means, NaN if there are few units; and the tests."""
        mean, error = made[f"{of}mean"], made[f"{of}deviation"] / np.sqrt(self.n)
        own_low, own_high, low, high = (np.full(mean.shape, np.nan) for _ in range(4))
        found = None
        if draws.plain and self.bootstrap_ends:
            upper, lower = bootstrap.t_quantiles(d, draws.plain, self.level, self._dtype)
            own_low, own_high = mean - upper * error, mean - lower * error
        if draws.sequential and mean.size:
            t = np.divide(
                mean,
                error,
                out=np.where(mean == 0, 0.0, np.copysign(np.inf, mean)),
                where=error > 0,
            )
            found = bootstrap.tails(d, t, draws.sequential, self._dtype, self.bootstrap_ends)
            if self.bootstrap_ends:
                most, least = bootstrap.of_extremes(found.largest, found.smallest, self.level)
                low, high = mean - most * error, mean - least * error
                low = np.minimum(
                    low, np.fmin(made[f"{of}low"], own_low)
                )  # at least the pointwise one
                high = np.maximum(high, np.fmax(made[f"{of}high"], own_high))
        ends = (own_low, own_high, low, high)
        return {f"{of}{name}": end for name, end in zip(_ENDS, ends, strict=True)}, found


class Draws(NamedTuple):
    """The random draws for a number of units: both kinds of resamples, and signs."""

    plain: bootstrap.Counts
    sequential: bootstrap.Counts
    signs: list[np.ndarray]  # patterns as bits, in blocks


def _draws(n: int, resamples: int, patterns: int, seed: int) -> Draws:
    generator = np.random.default_rng(seed)
    plain = bootstrap.resample(n, resamples, generator) if n >= FEWEST_FOR_BOOTSTRAP else []
    sequential = (
        bootstrap.resample_sequentially(n, resamples, generator) if n >= FEWEST_FOR_ALL else []
    )
    return Draws(plain, sequential, list(drawn_signs(n, patterns, generator)))


_kept_draws = lru_cache(maxsize=1)(_draws)  # a page makes a hundred tables with the same draws


def _intervals(d: np.ndarray, level: float) -> Columns:
    """The t interval for the mean of each column, with the mean and standard deviation."""
    found = Moments.of_rows(d)
    _, low, high = found.interval(level)
    gone = np.where(found.n < len(d), np.nan, 0.0)
    deviation = bootstrap.without_noise(np.sqrt(found.variance), d) + gone
    return {"low": low, "high": high, "mean": found.mean + gone, "deviation": deviation}


def without_rounding(difference: np.ndarray, rounding: np.ndarray | float = ROUNDING) -> np.ndarray:
    """Replace differences within the rounding error by 0, in place."""
    for rows in blocks_of(difference):
        difference[rows][abs(difference[rows]) <= rounding] = 0.0
    return difference


def flipped(
    d: np.ndarray, signs: Iterable[np.ndarray], dtype: type[np.floating] = np.float64
) -> np.ndarray:
    """Two-sided p of mean 0 for each column of d [prompt, cell]: the fraction of sign patterns with as large a mean.

    Below 13 prompts all patterns are tried; with more, ``(1 + count) / (1 + resamples)`` of random patterns. The test
    is exact if differences are symmetric about 0. ``dtype`` is that of the sums.
    """
    signs = list(signs)
    tried, count = sum(map(len, signs)), np.zeros(d.shape[1])
    some = np.flatnonzero(~_beyond_all(d, tried))
    part = (d if len(some) == d.shape[1] else d[:, some]).astype(dtype, copy=False)
    slack = (
        1e-12 if dtype is np.float64 else 1e-5
    )  # equal means count, although summed in another order
    observed = abs(d.mean(0))[some] * (1 - slack)
    for packed in signs if len(some) else []:
        for rows in bootstrap.row_blocks(len(packed), len(d)):
            pattern = 1 - 2 * np.unpackbits(packed[rows], axis=1, count=len(d)).astype(dtype)
            count[some] += (abs(pattern @ part) / len(d) >= observed).sum(0)
    return count / tried if len(d) <= EXACT else (1 + count) / (1 + tried)


def _beyond_all(d: np.ndarray, tried: int) -> np.ndarray:
    """The columns whose mean a pattern reaches with a probability below 1e-15, which need not be tried.

    ``P(|Σ s d| ≥ |Σ d|) ≤ 2 exp(−(Σ d)² / (2 Σ d²))`` (Hoeffding 1963), multiplied by the number tried.
    """
    squares = (d**2).sum(0)
    far: np.ndarray = d.sum(0) ** 2 > 2 * squares * np.log(2e15 * max(tried, 1))
    return far & (squares > 0)


def drawn_signs(n: int, resamples: int, generator: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield sign patterns as bits, 1 for −1 [pattern, prompt / 8], in blocks: all 2ⁿ, or random ones."""
    if n <= EXACT:
        yield np.packbits((np.arange(2**n)[:, None] >> np.arange(n)) & 1, axis=1)
        return
    for start in range(0, resamples, _CHUNK):
        rows = min(_CHUNK, resamples - start)
        bits = [
            generator.choice([-1.0, 1.0], (r.stop - r.start, n)) < 0
            for r in bootstrap.row_blocks(rows, n)
        ]
        yield np.concatenate([np.packbits(some, axis=1) for some in bits])


def false_discovery(p: np.ndarray) -> np.ndarray:
    """Benjamini-Hochberg over all p that are not NaN."""
    q, known = np.full(p.shape, np.nan), ~np.isnan(p)
    if known.any():
        q[known] = stats.false_discovery_control(p[known])
    return q
