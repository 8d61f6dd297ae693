"""Units of replication: prompts, or groups of prompts that are not independent of each other."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from mechattn.errors import OptionError

Unit = Literal["auto", "prompt"]


@dataclass(frozen=True, eq=False)
class Units:
    """The units of replication of a set of prompts, in order of first appearance.

    Args:
        prompts: The number of prompts.
        of: The unit of each prompt, counted from 0; None if every prompt is its own unit.
    """

    prompts: int
    of: np.ndarray | None = None

    @classmethod
    def grouped(cls, groups: Seq[str]) -> Units:
        """One unit per group; if no two prompts share a group, each prompt is a unit."""
        place = {name: i for i, name in enumerate(dict.fromkeys(groups))}
        alone = len(place) == len(groups)
        return cls(len(groups), None if alone else np.array([place[name] for name in groups]))

    @property
    def n(self) -> int:
        """The number of units."""
        return self.prompts if self.of is None else int(self.of.max()) + 1

    @property
    def unit(self) -> str:
        """The kind of unit as tables state it: "prompts", or "groups (24 of 96 prompts)"."""
        return "prompts" if self.of is None else f"groups ({self.n} of {self.prompts} prompts)"

    @property
    def words(self) -> str:
        """The units in words, such as "24 groups of 96 prompts"."""
        return f"{self.prompts} prompts" if self.of is None else f"{self.n} groups of {self.prompts} prompts"

    @property
    def inflation(self) -> float:
        """The largest factor by which the groups can increase the variance of the mean over independent prompts.

        ``Σ m_g² / n`` with m_g prompts in group g: Kish's design effect at a correlation of 1 within groups.
        """
        return 1.0 if self.of is None else float((np.bincount(self.of) ** 2).sum() / self.prompts)

    def means(self, values: np.ndarray) -> np.ndarray:
        """The mean of each unit's prompts, for values [prompt, …]; NaN is left out, and single prompts are unchanged.

        ``means[g] = mean of values[i] over the prompts i of group g``
        """
        if self.of is None:
            return values
        values = np.asarray(values, dtype=np.float64)
        there = ~np.isnan(values)
        total, count = (np.zeros((self.n, *values.shape[1:])) for _ in range(2))
        np.add.at(total, self.of, np.where(there, values, 0.0))
        np.add.at(count, self.of, there)
        return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)

    def halves(self) -> tuple[np.ndarray, np.ndarray]:
        """The prompts of every other unit, and the remaining ones, so that no group is on both sides."""
        unit = np.arange(self.prompts) if self.of is None else self.of
        return np.flatnonzero(unit % 2 == 0), np.flatnonzero(unit % 2 == 1)

    def refuse_below(
        self, fewest: int, why: str = "", instead: str = ', or unit="prompt", which uses single prompts'
    ) -> None:
        """Refuse fewer units than an interval or test needs; ``instead`` is what to do other than adding groups."""
        if self.n >= fewest:
            return
        if self.of is None:
            raise OptionError(f"there are {self.words}; give at least {fewest}{why}")
        if self.n == 1:
            raise OptionError(
                f"all {self.prompts} prompts are in one group, which gives no interval; give prompts of at least "
                f"{fewest} groups{why}{instead}"
            )
        raise OptionError(f"there are {self.words}; give prompts of at least {fewest} groups{why}{instead}")


def check_unit(unit: str) -> None:
    """Refuse an unknown unit."""
    if unit not in get_args(Unit):
        raise OptionError(f'unit={unit!r}: choose "auto" (groups where prompts have them) or "prompt"')
