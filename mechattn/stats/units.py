"""Units of replication: prompts, groups of prompts, or random bags where there are many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from scipy import sparse

from mechattn.errors import OptionError

Unit = Literal["auto", "prompt"]
ALONE = 2000  # units: up to this number, each is resampled on its own
_MOST = 1000  # bags


@dataclass(frozen=True, eq=False)
class Units:
    """The units of replication of a set of prompts, in order of first appearance."""

    prompts: int
    # The unit of each prompt, counted from 0; None if every prompt is its own unit.
    of: np.ndarray | None = None

    @classmethod
    def grouped(cls, groups: Sequence[str]) -> Units:
        """One unit per group; if no two prompts share a group, each prompt is a unit."""
        unit_of_prompt, names = pd.factorize(np.array(groups, dtype=object))
        if len(names) == len(groups):
            return cls(len(groups))
        return cls(len(groups), unit_of_prompt)

    @property
    def n(self) -> int:
        """The number of units."""
        if self.of is None:
            return self.prompts
        return int(self.of.max()) + 1

    @property
    def unit(self) -> str:
        """The kind of unit as tables state it: "prompts", or "groups (24 of 96 prompts)"."""
        if self.of is None:
            return "prompts"
        return f"groups ({self.n} of {self.prompts} prompts)"

    @property
    def words(self) -> str:
        """The units in words, such as "24 groups of 96 prompts"."""
        if self.of is None:
            return f"{self.prompts} prompts"
        return f"{self.n} groups of {self.prompts} prompts"

    @property
    def inflation(self) -> float:
        """The largest factor by which the groups can increase the variance of the mean over
        independent prompts.

        ``Σ m_g² / n`` with m_g prompts in group g: Kish's design effect at a correlation of 1
        within groups.
        """
        if self.of is None:
            return 1.0
        sizes = np.bincount(self.of)
        return float((sizes**2).sum() / self.prompts)

    def means(self, values: np.ndarray) -> np.ndarray:
        """The mean of each unit's prompts, for values [prompt, …]; NaN is left out, and single
        prompts are unchanged.

        ``means[g] = mean of values[i] over the prompts i of group g``
        """
        if self.of is None:
            return values
        cells = values.shape[1:]
        rows = values.reshape(len(values), -1).astype(np.float64)
        means = pd.DataFrame(rows).groupby(self.of).mean()
        return means.to_numpy().reshape(self.n, *cells)

    def halves(self) -> tuple[np.ndarray, np.ndarray]:
        """The prompts of one half of the units, and the others, so that no group is on both
        sides."""
        units_of_half, _ = halves_of(self.n)
        unit = self.of
        if unit is None:
            unit = np.arange(self.prompts)
        in_half = np.isin(unit, units_of_half)
        return np.flatnonzero(in_half), np.flatnonzero(~in_half)

    def refuse_below(
        self,
        fewest: int,
        why: str = "",
        instead: str = ', or unit="prompt", which uses single prompts',
    ) -> None:
        """Refuse fewer units than an interval or test needs; ``instead`` is what to do other than
        adding groups.
        """
        if self.n >= fewest:
            return
        if self.of is None:
            raise OptionError(f"there are {self.words}; give at least {fewest}{why}")
        raise OptionError(
            f"there are {self.words}; give prompts of at least {fewest} groups{why}{instead}"
        )


def halves_of(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Two halves of n units, the same ones at each call: drawn at random, as the classes of many
    files alternate.
    """
    order = np.random.default_rng(n).permutation(n)
    middle = (n + 1) // 2
    return np.sort(order[:middle]), np.sort(order[middle:])


@dataclass(frozen=True, eq=False)
class Bags:
    """Random bags of equal size that are resampled in place of very many units: ``⌊n / m⌋`` of
    ``m = ⌈n / 1000⌉``.

    ``n mod m`` bags get one of the remaining units each.
    """

    order: np.ndarray  # the units, one bag after another
    starts: np.ndarray  # the index in ``order`` where each bag begins

    @classmethod
    def drawn(cls, n: int, seed: int) -> Bags | None:
        """Draw bags of n units; None if there are few enough to resample single units."""
        if n <= ALONE:
            return None
        count = resampled(n)
        sizes = np.full(count, n // count)
        sizes[: n - sizes.sum()] += 1
        ends = np.cumsum(sizes)
        generator = np.random.default_rng([seed, 1])  # another stream than that of the resamples
        return cls(order=generator.permutation(n), starts=ends - sizes)

    @property
    def n(self) -> int:
        """The number of bags."""
        return len(self.starts)

    @property
    def words(self) -> str:
        """The bags in words, such as "1,000 random bags of 100" or "876 random bags of 6 or 7"."""
        size, remaining = divmod(len(self.order), self.n)
        words = f"{self.n:,} random bags of {size:,}"
        if remaining:
            words += f" or {size + 1:,}"
        return words

    def means(self, values: np.ndarray) -> np.ndarray:
        """The mean of each bag's units, for values [unit, …]."""
        n_units = len(self.order)
        ends = np.append(self.starts, n_units)
        cells = values.shape[1:]
        membership = (np.ones(n_units), self.order, ends)
        bags = sparse.csr_array(membership, shape=(self.n, n_units))  # [bag, unit]
        sizes = np.diff(ends)
        means: np.ndarray = bags @ values.reshape(n_units, -1)
        means /= sizes[:, None]
        return means.reshape(self.n, *cells)


def resampled(n: int) -> int:
    """The number of units, or bags of units, that are resampled when there are n units."""
    if n <= ALONE:
        return n
    bag_size = -(-n // _MOST)
    return n // bag_size
