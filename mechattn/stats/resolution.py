"""The resolution of sign-flip tests: the smallest p and q for a number of prompts and tests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor

from scipy import stats

from mechattn.errors import OptionError
from mechattn.stats.paired import EXACT, RESAMPLES, enough

SURE = 0.9  # the probability at which ``fewest`` lets one test pass on its own if signs are drawn
_MOST = 200


@dataclass(frozen=True)
class Resolution:
    """The smallest p and q that sign flips over n units can reach in a family of tests (Benjamini-Hochberg).

    Args:
        n: The number of units: prompts, or groups of prompts.
        unit: The kind of unit.
        tests: The number of tests in the family.
        level: The level of q below which a test is a finding.
        smallest_p: The smallest possible p, and so q: ``2^(1 − n)`` if all patterns of signs are tried (up to 12
            units), and ``1 / (1 + resamples)`` if they are drawn.
        smallest_q: The q of one test at that p if no other test is significant: ``tests · smallest_p``.
        together: The number of tests that must reach the smallest p for their q to pass; None if even all would not
            suffice.
        chance: The probability that a single test passes whose differences all have one sign: 0 or 1 up to 12 units;
            with more units, a drawn pattern may by chance equal that of the data.
        fewest: The smallest number of units at which that probability is at least 90 %.
    """

    n: int
    unit: str
    tests: int
    level: float
    smallest_p: float
    smallest_q: float
    together: int | None
    chance: float
    fewest: int

    def __str__(self) -> str:
        """A sentence with these figures."""
        unit = self.unit.partition(" ")[0]
        among = f"with {self.n} {unit} and {self.tests} tests"
        if self.n >= self.fewest:
            return f"{among} one test alone can pass q < {self.level:g} (smallest p {self.smallest_p:.2g})"
        more = f"{self.fewest} would do"
        if self.together is None:
            return f"{among} no p can pass q < {self.level:g} (smallest p {self.smallest_p:.2g}); {more}"
        if self.together > 1:
            alone = f"{among} no p can pass q < {self.level:g} alone (smallest p {self.smallest_p:.2g})"
            return f"{alone}: {self.together} tests have to reach it together; {more}"
        return f"{among} one test alone passes q < {self.level:g} in {100 * self.chance:.0f} % of draws at most; {more}"


def resolution(
    n: int, tests: int, level: float = 0.05, resamples: int = RESAMPLES, unit: str = "prompts"
) -> Resolution:
    """What a number of units can detect in a family of tests."""
    for name, value in (("n", n), ("tests", tests), ("resamples", resamples)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{name}={value!r}: give a whole number, at least 1")
    if not 0 < level < 1:
        raise OptionError(f"level={level!r}: give a probability such as 0.05")
    patterns = enough(resamples, tests)
    p = 2.0 ** (1 - n) if n <= EXACT else 1 / (1 + patterns)
    together = floor(tests * p / level) + 1
    return Resolution(
        n=n,
        unit=unit,
        tests=tests,
        level=level,
        smallest_p=p,
        smallest_q=min(1.0, tests * p),
        together=together if together <= tests else None,
        chance=_chance(n, tests, level, patterns),
        fewest=_fewest(tests, level, patterns),
    )


@lru_cache(maxsize=64)  # the tables of a page ask for the same
def _fewest(tests: int, level: float, patterns: int) -> int:
    """The smallest number of units with which one test alone passes almost surely."""
    fewest = _MOST
    while fewest > 1 and _chance(fewest - 1, tests, level, patterns) >= SURE:
        fewest -= 1
    return fewest


def _chance(n: int, tests: int, level: float, patterns: int) -> float:
    """The probability that a test whose differences all have one sign has q below the level by itself."""
    extreme = 2.0 ** (1 - n)  # the fraction of patterns with as large a mean: all signs kept, or all flipped
    if n <= EXACT:
        return float(tests * extreme < level)
    hits = ceil(level * (1 + patterns) / tests) - 2  # the most allowed: tests · (1 + hits) / (1 + patterns) < level
    return float(stats.binom.cdf(hits, patterns, extreme))
