"""Bags: random groups of units of equal size, which are resampled in place of single units if there are very many."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import sparse

ALONE = 2000  # units: up to this number, each is resampled on its own
_MOST = 1000  # bags


@dataclass(frozen=True, eq=False)
class Bags:
    """The assignment of units to bags.

    Each of the ``⌊n / m⌋`` bags holds ``m = ⌈n / 1000⌉`` units; ``n mod m`` bags get one of the remaining units each.

    Args:
        order: The units, one bag after another.
        starts: The index in ``order`` where each bag begins.
    """

    order: np.ndarray
    starts: np.ndarray

    @classmethod
    def drawn(cls, n: int, seed: int) -> Bags | None:
        """Draw bags of n units; None if there are few enough to resample single units."""
        if n <= ALONE:
            return None
        count = resampled(n)
        sizes = np.full(count, n // count)
        sizes[: n - sizes.sum()] += 1
        order = np.random.default_rng([seed, 1]).permutation(n)  # a stream other than that of the resamples
        return cls(order, np.concatenate([[0], np.cumsum(sizes)[:-1]]))

    @property
    def n(self) -> int:
        """The number of bags."""
        return len(self.starts)

    @property
    def words(self) -> str:
        """The bags in words, such as "1,000 random bags of 100" or "876 random bags of 6 or 7"."""
        least, rest = divmod(len(self.order), self.n)
        return f"{self.n:,} random bags of {least:,}" + (f" or {least + 1:,}" if rest else "")

    def means(self, values: np.ndarray) -> np.ndarray:
        """The mean of each bag's units, for values [unit, …]."""
        ends = np.append(self.starts, len(self.order))
        sums = sparse.csr_array((np.ones(len(self.order)), self.order, ends), shape=(self.n, len(self.order)))
        made: np.ndarray = sums @ values.reshape(len(values), -1)
        made /= np.diff(ends)[:, None]
        return made.reshape(self.n, *values.shape[1:])


def resampled(n: int) -> int:
    """The number of units, or bags of units, that are resampled when there are n units."""
    return n if n <= ALONE else n // -(-n // _MOST)
