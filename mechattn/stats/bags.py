"""Bags: random sets of equally many units, which are resampled in their place where units are very many."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import sparse

ALONE = 2000  # units: up to so many each is resampled by itself
_MOST = 1000  # bags


@dataclass(frozen=True, eq=False)
class Bags:
    """Which units are in which bag.

    ``m = ⌈n / 1000⌉`` units in each of ``⌊n / m⌋`` bags; the ``n mod m`` that are left are one more in as many bags.

    Args:
        order: The units, bag after bag.
        starts: Where each bag begins.
    """

    order: np.ndarray
    starts: np.ndarray

    @classmethod
    def drawn(cls, n: int, seed: int) -> Bags | None:
        """Bags of n units; None where they are few enough to be resampled one by one."""
        if n <= ALONE:
            return None
        count = resampled(n)
        sizes = np.full(count, n // count)
        sizes[: n - sizes.sum()] += 1
        order = np.random.default_rng([seed, 1]).permutation(n)  # another stream than that of the resamples
        return cls(order, np.concatenate([[0], np.cumsum(sizes)[:-1]]))

    @property
    def n(self) -> int:
        """How many bags there are."""
        return len(self.starts)

    @property
    def words(self) -> str:
        """Such as "1,000 random bags of 100", "876 random bags of 6 or 7"."""
        least, rest = divmod(len(self.order), self.n)
        return f"{self.n:,} random bags of {least:,}" + (f" or {least + 1:,}" if rest else "")

    def means(self, values: np.ndarray) -> np.ndarray:
        """The mean of each bag's units, of values [unit, …]."""
        ends = np.append(self.starts, len(self.order))
        sums = sparse.csr_array((np.ones(len(self.order)), self.order, ends), shape=(self.n, len(self.order)))
        made: np.ndarray = sums @ values.reshape(len(values), -1) / np.diff(ends)[:, None]
        return made.reshape(self.n, *values.shape[1:])


def resampled(n: int) -> int:
    """How many units, or bags of them, are resampled where there are n units."""
    return n if n <= ALONE else n // -(-n // _MOST)
