"""Many paired differences at once: intervals, simultaneous intervals, sign-flip tests, false discovery rate, power."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy import stats

from mechattn.stats.intervals import FEWEST, t_interval

FEWEST_FOR_BOOTSTRAP = 20
FEWEST_FOR_MAX_T = 10  # signs of n deviations give |t| up to about n: below, too little for many heads
_EXACT = 12  # prompts: 4,096 patterns of signs are all tried
_CHUNK = 2000


@dataclass(frozen=True)
class Paired:
    """One number a cell (say layer × head), over prompts; every array has the shape of a prompt's cells.

    Args:
        n: Prompts.
        difference: Mean difference.
        low: Lower end of its t interval.
        high: Upper end.
        low_bootstrap: Lower end of the bootstrap-t interval; NaN below 20 prompts.
        high_bootstrap: Upper end.
        low_simultaneous: Lower end of the interval that holds for all cells at once (max-t); NaN below 10 prompts.
        high_simultaneous: Upper end.
        null: Mean difference under the null, such as uniform attention.
        beyond: Mean of difference − null.
        effect_size: That, over its standard deviation between prompts (Cohen's d_z).
        p: Two-sided sign-flip test of difference = null.
        q: Benjamini-Hochberg over all cells.
        detectable: The smallest |difference − null| that a single t test at 5 % finds with a power of 80 %.
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
    effect_size: np.ndarray
    p: np.ndarray
    q: np.ndarray
    detectable: np.ndarray


def paired(
    difference: np.ndarray, null: np.ndarray | float = 0.0, *, level: float = 0.95, resamples: int = 9999, seed: int = 0
) -> Paired:
    """Everything about paired differences [prompt, *cells], each prompt's own null beside it.

    Args:
        difference: The difference of each prompt in each cell.
        null: The same under the null.
        level: Of the intervals.
        resamples: Bootstrap samples, and patterns of signs where they are too many to try all (12 prompts and more);
            raised to 20 for each cell, so that the false discovery rate can be reached.
        seed: Of the resampling.

    Raises:
        OptionError: Fewer than 3 prompts.
    """
    difference = np.asarray(difference, dtype=np.float64)
    cells = difference.shape[1:]
    d = difference.reshape(len(difference), -1)
    null = np.broadcast_to(np.asarray(null, dtype=np.float64), difference.shape).reshape(d.shape)
    interval = t_interval(d, level)
    n, deviation = len(d), (d - null).std(0, ddof=1)
    generator = np.random.default_rng(seed)
    low, high = _bootstrap_t(d, level, resamples, generator)
    reach = _max_t(d, level, resamples, generator) * d.std(0, ddof=1) / np.sqrt(n)
    reach = np.full_like(reach, np.nan) if n < FEWEST_FOR_MAX_T else reach
    p = sign_flip(d - null, max(resamples, 20 * d.shape[1]), generator)
    beyond = (d - null).mean(0)
    power = stats.t.ppf(0.975, n - 1) + stats.t.ppf(0.8, n - 1)
    made = dict(
        difference=interval.estimate,
        low=interval.low,
        high=interval.high,
        low_bootstrap=low,
        high_bootstrap=high,
        low_simultaneous=interval.estimate - reach,
        high_simultaneous=interval.estimate + reach,
        null=null.mean(0),
        beyond=beyond,
        effect_size=np.divide(beyond, deviation, out=np.full_like(beyond, np.nan), where=deviation > 0),
        p=p,
        q=stats.false_discovery_control(p) if p.size else p,
        detectable=power * deviation / np.sqrt(n),
    )
    return Paired(n=n, **{name: value.reshape(cells) for name, value in made.items()})


def sign_flip(d: np.ndarray, resamples: int, generator: np.random.Generator) -> np.ndarray:
    """Two-sided p of mean 0 for each column of d [prompt, cell]: how many patterns of signs give as large a mean.

    All of them below 13 prompts; ``(1 + count) / (1 + resamples)`` of drawn ones beyond. Exact where differences are
    symmetric about 0.
    """
    observed = abs(d.mean(0)) * (1 - 1e-12)  # equal means, summed in another order, count
    count = np.zeros(d.shape[1])
    tried = 0
    for signs in _signs(len(d), resamples, generator):
        count += (abs(signs @ d) / len(d) >= observed).sum(0)
        tried += len(signs)
    return count / tried if len(d) <= _EXACT else (1 + count) / (1 + tried)


def _signs(n: int, resamples: int, generator: np.random.Generator) -> Iterator[np.ndarray]:
    """Patterns of signs [pattern, prompt], some at a time: all 2ⁿ, or drawn."""
    if n <= _EXACT:
        yield 1.0 - 2.0 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
        return
    for start in range(0, resamples, _CHUNK):
        yield generator.choice([-1.0, 1.0], (min(_CHUNK, resamples - start), n))


def _max_t(d: np.ndarray, level: float, resamples: int, generator: np.random.Generator) -> float:
    """The quantile of the largest |t| over all cells, from random signs of the deviations: cells may correlate."""
    n = len(d)
    deviations = d - d.mean(0)
    squares = (deviations**2).sum(0)
    moving = squares > 0
    if not moving.any():
        return 0.0
    deviations, squares = deviations[:, moving], squares[moving]
    largest = []
    for start in range(0, resamples, _CHUNK):
        signs = generator.choice([-1.0, 1.0], (min(_CHUNK, resamples - start), n))
        mean = signs @ deviations / n
        variance = np.maximum(squares - n * mean**2, squares * 1e-12) / (n - 1)
        largest.append((abs(mean) / np.sqrt(variance / n)).max(1))
    return max(float(np.quantile(np.concatenate(largest), level)), float(stats.t.ppf((1 + level) / 2, n - 1)))


def _bootstrap_t(
    d: np.ndarray, level: float, resamples: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Bootstrap-t interval of the mean of each column; NaN below 20 prompts."""
    n, mean = len(d), d.mean(0)
    if n < max(FEWEST, FEWEST_FOR_BOOTSTRAP):
        return np.full(d.shape[1], np.nan), np.full(d.shape[1], np.nan)
    error = d.std(0, ddof=1) / np.sqrt(n)
    counts = generator.multinomial(n, np.full(n, 1 / n), resamples)
    low, high = np.empty_like(mean), np.empty_like(mean)
    for start in range(0, d.shape[1], _CHUNK // 20):
        part = slice(start, start + _CHUNK // 20)
        centred = d[:, part] - mean[part]
        drawn = counts @ centred / n
        spread = np.maximum(counts @ centred**2 / n - drawn**2, 0) * n / (n - 1)
        t = np.divide(drawn, np.sqrt(spread / n), out=np.zeros_like(drawn), where=spread > 0)
        ends = np.quantile(t, [(1 + level) / 2, (1 - level) / 2], axis=0)
        low[part], high[part] = mean[part] - ends[0] * error[part], mean[part] - ends[1] * error[part]
    return low, high
