"""Sign-flip tests of many means: exact if differences are symmetric about 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from mechattn.stats.resolution import EXACT

_CHUNK = 2000  # random patterns in a block


def flipped(d: np.ndarray, signs: Iterable[np.ndarray]) -> np.ndarray:
    """Two-sided p of mean 0 for each column of d [prompt, cell]: the fraction of sign patterns with
    as large a mean.

    Below 13 prompts all patterns are tried; with more, ``(1 + count) / (1 + resamples)`` of random
    patterns. The test is exact if differences are symmetric about 0.

    Args:
        d: Differences [prompt, cell].
        signs: Blocks of sign patterns as bits, from :func:`drawn_signs`.

    Returns:
        The p of each cell [cell].
    """
    signs = list(signs)
    patterns = sum(map(len, signs))
    count = np.zeros(d.shape[1])

    # A copy of the values only where some columns need not be tried.
    tried = np.flatnonzero(~_beyond_all(d, patterns))
    values = d
    if len(tried) < d.shape[1]:
        values = d[:, tried]
    # Equal means count, although they were summed in another order.
    observed = abs(d.mean(0))[tried] * (1 - 1e-12)

    for packed in signs:
        bits = np.unpackbits(packed, axis=1, count=len(d))
        pattern = np.where(bits, -1.0, 1.0)
        flipped_means = abs(pattern @ values) / len(d)
        is_as_large = flipped_means >= observed
        count[tried] += is_as_large.sum(0)

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
    smallest = 2 * squares * np.log(2e15 * patterns)
    is_far: np.ndarray = d.sum(0) ** 2 > smallest
    return is_far & (squares > 0)


def drawn_signs(n: int, resamples: int, generator: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield sign patterns as bits, 1 for −1 [pattern, prompt / 8], in blocks: all 2ⁿ, or random
    ones.

    Args:
        n: The number of prompts.
        resamples: The number of random patterns, from 13 prompts on.
        generator: Where they come from.
    """
    if n <= EXACT:
        numbers = np.arange(2**n)[:, None]
        bits = (numbers >> np.arange(n)) & 1
        yield np.packbits(bits, axis=1)
        return

    for start in range(0, resamples, _CHUNK):
        rows = min(_CHUNK, resamples - start)
        signs = generator.choice([-1.0, 1.0], (rows, n))
        yield np.packbits(signs < 0, axis=1)
