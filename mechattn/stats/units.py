"""Units of replication (prompts, groups of prompts, or random bags where there are many), and what
tests over them can find: the smallest p and q, and the power of one test among many."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor
from typing import Literal

import numpy as np
import pandas as pd
from scipy import optimize, sparse, stats

from mechattn.errors import OptionError, check_counts

Unit = Literal["auto", "prompt"]  # groups where there are any, or prompts all the same
RESAMPLES = 9999  # by default
MOST_EXACT = 12  # prompts: all 4,096 sign patterns are tried
MOST_SINGLE = 2000  # units: up to this number, each is resampled on its own
_MOST_BAGS = 1000
_SURE = 0.9  # ``fewest`` units let a test pass alone with at least this probability
_MOST_UNITS = 200  # that ``fewest`` considers
_MOST_PLANNED = 10**7  # prompts: more than an effect of 0.01 takes


@dataclass(frozen=True)
class Resolution:
    """The smallest p and q that sign flips over n units can reach in a family of tests
    (Benjamini-Hochberg).

    Args:
        n: The number of units: prompts, or groups of prompts.
        unit: The kind of unit, such as "prompts".
        tests: The number of tests in the family.
        level: The level of q below which a test is a finding.
        smallest_p: The smallest possible p: ``2^(1 − n)`` if all patterns of signs are tried (up to
            12 units), and ``1 / (1 + patterns)`` if they are drawn. It is also the smallest q, that
            of tests which all reach it.
        smallest_q: The q of one test at that p if no other test is significant:
            ``tests · smallest_p``.
        together: The number of tests that must reach the smallest p for their q to pass; None if
            all don't suffice.
        chance: The probability that a test whose differences all have one sign passes by itself: 0
            or 1 up to 12 units; with more units, a drawn pattern may by chance equal that of the
            data.
        fewest: The smallest number of units with which that probability is at least 90 %; None if
            no number is enough, as too few patterns of signs are drawn for so low a level.
        detectable: The effect (d_z) that one test finds with 80 % power if no other has an effect.
        random: What draws of random weights can show (:func:`random_words`); empty unless their
            number is named.
    """

    n: int
    unit: str
    tests: int
    level: float
    smallest_p: float
    smallest_q: float
    together: int | None
    chance: float
    fewest: int | None
    detectable: float
    random: str = ""

    def __str__(self) -> str:
        """These figures in a sentence, and the one about random weights, if any."""
        sentences = [self._sentence_about_units(), self.random]
        return "; ".join(filter(None, sentences))

    def _sentence_about_units(self) -> str:
        """Whether one test alone can pass, and otherwise what it takes, in words."""
        start = f"with {self.n} {self.unit} and {self.tests} tests"
        smallest = f"(smallest p {self.smallest_p:.2g})"
        if self.fewest is None:
            return (
                f"{start} no test alone can pass q < {self.level:g} {smallest}, however many"
                f" {self.unit} there are: give more resamples"
            )
        if self.n >= self.fewest:
            return (
                f"{start} one test alone can pass q < {self.level:g} {smallest}; the smallest"
                " effect that q finds in one test alone, with 80 % power, is d_z ="
                f" {self.detectable:.2g}"
            )
        needed = f"one test alone can with {self.fewest} {self.unit} or more"
        if self.together is None:
            return f"{start} no p can pass q < {self.level:g} {smallest}; {needed}"
        if self.together > 1:
            return (
                f"{start} no p can pass q < {self.level:g} alone {smallest}: {self.together} tests"
                f" must reach it together, or use {self.fewest} {self.unit}"
            )
        return (
            f"{start} a test whose neighbours show nothing passes q < {self.level:g} in at most"
            f" {100 * self.chance:.0f} % of draws of the signs, and several that show something"
            f" pass together; {needed}"
        )


def random_words(draws: int, tests: int, compared: int, level: float = 0.05) -> str:
    """What draws of random weights can show: the smallest ``q_random`` of one head alone,
    ``tests / (compared + 1)``, and how many draws would do where that is not below the level.

    Args:
        draws: The number of random models.
        tests: The number of heads that are tested.
        compared: The number of heads in all draws together.
        level: The level of q below which a test is a finding.
    """
    if not compared:
        return f"with {draws} draws there is no head of a random model to compare with"
    smallest = tests / (compared + 1)
    sentence = (
        f"with {draws} draws the smallest q_random of one head alone is {min(1.0, smallest):.2g}"
    )
    if smallest < level:
        return sentence
    fewest_draws = floor(draws * (tests / level - 1) / compared) + 1
    return f"{sentence}; {fewest_draws} draws would do"


def patterns_needed(resamples: int, cells: int) -> int:
    """The number of sign patterns: at least 20 for each cell, so that one cell alone can have
    q < 0.05, as the smallest p is ``1 / (1 + patterns)``.
    """
    return max(resamples, 20 * cells)


def resolution(
    n: int, tests: int, level: float = 0.05, resamples: int = RESAMPLES, unit: str = "prompts"
) -> Resolution:
    """What a number of units can detect in a family of tests.

    Args:
        n: The number of units: prompts, or groups of prompts.
        tests: The number of tests in the family.
        level: The level of q below which a test is a finding.
        resamples: The number of sign patterns at least, where they are drawn.
        unit: The kind of unit, such as "prompts".

    Raises:
        OptionError: The level is not between 0 and 1.
    """
    if not 0 < level < 1:
        raise OptionError(f"level={level!r}: give a probability such as 0.05")
    patterns = patterns_needed(resamples, tests)
    smallest_p = 1 / (1 + patterns)
    if n <= MOST_EXACT:
        smallest_p = 2.0 ** (1 - n)

    # m tests at the smallest p have q = tests · smallest_p / m, which is to be below the level.
    needed = floor(tests * smallest_p / level) + 1
    together: int | None = needed
    if needed > tests:
        together = None

    return Resolution(
        n=n,
        unit=unit,
        tests=tests,
        level=level,
        smallest_p=smallest_p,
        smallest_q=min(1.0, tests * smallest_p),
        together=together,
        chance=chance(n, tests, level, patterns),
        fewest=_fewest(tests, level, patterns),
        detectable=detectable_size(n, tests, level, resamples=resamples),
    )


def power(
    heads: int, *, effect: float | None = None, prompts: int | None = None, sure: float = 0.8
) -> float:
    """Plan a comparison: how surely q < 0.05 finds one head, how large an effect it finds, or how
    many prompts it takes.

    ``P(|T| > t(1 − 0.05 / (2 heads), prompts − 1))`` for noncentral T with ``effect · √prompts``:
    one head with an effect among heads without one. More heads with effects are found more easily.

    Args:
        heads: The number of tests in the table, such as layers × heads.
        effect: The mean of the tested difference divided by its standard deviation over prompts
            (d_z).
        prompts: The number of prompts, or of groups.
        sure: The power to reach, where effect or prompts is left out.

    Returns:
        The power (0 where q cannot be reached), the effect or the number of prompts: what is not
        given.

    Raises:
        OptionError: Both effect and prompts are left out, or a number is out of range.
    """
    check_counts(heads=heads)
    if prompts is not None:
        check_counts(3, prompts=prompts)
    if effect is not None and abs(effect) < 0.01:
        raise OptionError(
            f"effect={effect!r}: give a mean in standard deviations (d_z), at least 0.01,"
            " such as 0.5"
        )
    if not 0 < sure < 1:
        raise OptionError(f"sure={sure!r}: give a probability such as 0.8")

    if effect is not None and prompts is not None:
        return power_of(abs(effect), prompts, heads)
    if prompts is not None:
        return detectable_size(prompts, heads, sure=sure)
    if effect is None:
        raise OptionError("give effect=…, prompts=… or both: what is left out is computed")

    # Power grows with the number of prompts, so a binary search finds the first that is enough.
    counts = range(3, _MOST_PLANNED)
    enough = bisect_left(counts, sure, key=lambda n: power_of(abs(effect), n, heads))
    return counts[enough]


@lru_cache(maxsize=64)  # the tables of a page ask for the same
def _fewest(tests: int, level: float, patterns: int) -> int | None:
    """The smallest number of units with which one test alone passes with a probability of at least
    90 %; None if there is none.
    """
    fewest = _MOST_UNITS
    if chance(fewest, tests, level, patterns) < _SURE:
        return None
    while fewest > 1 and chance(fewest - 1, tests, level, patterns) >= _SURE:
        fewest -= 1
    return fewest


def chance(n: int, tests: int, level: float, patterns: int) -> float:
    """The probability that a test whose differences all have one sign has q below the level by
    itself.

    ``tests · p < level``, where p is ``2^(1 − n)`` up to 12 units, and ``(1 + hits) / (1 +
    patterns)`` with binomial hits otherwise: drawn patterns that keep all signs, or flip all.
    """
    extreme = 2.0 ** (1 - n)
    if n <= MOST_EXACT:
        return float(tests * extreme < level)

    most_hits = ceil(level * (1 + patterns) / tests) - 2
    return float(stats.binom.cdf(most_hits, patterns, extreme))


def power_of(
    effect: float, n: int, tests: int = 1, level: float = 0.05, resamples: int = RESAMPLES
) -> float:
    """The probability that a t test over n units finds an effect (d_z), if none of the other tests
    finds one.

    ``P(|T| > t(1 − level / (2 tests), n − 1))`` for noncentral T with ``effect · √n``: what q <
    level asks of a test alone; times the probability that sign flips can be as small.
    """
    reachable = chance(n, tests, level, patterns_needed(resamples, tests))
    critical_t = stats.t.ppf(1 - level / (2 * tests), n - 1)
    shift = effect * np.sqrt(n)
    right_sign = stats.nct.sf(critical_t, n - 1, shift)
    # Far below 1e-20 this may be NaN: https://github.com/scipy/scipy/issues/25470
    wrong_sign = np.nan_to_num(stats.nct.cdf(-critical_t, n - 1, shift))
    return reachable * float(right_sign + wrong_sign)


@lru_cache(maxsize=256)
def detectable_size(
    n: int, tests: int = 1, level: float = 0.05, sure: float = 0.8, resamples: int = RESAMPLES
) -> float:
    """The effect (d_z) that a test finds with probability ``sure`` (:func:`power_of`); NaN where no
    effect is large enough.
    """
    patterns = patterns_needed(resamples, tests)
    if n < 3 or chance(n, tests, level, patterns) <= sure:
        return float("nan")

    def excess_power(effect: float) -> float:
        """Power beyond what is asked for: below 0 where the effect is too small."""
        return power_of(effect, n, tests, level, resamples) - sure

    if excess_power(0.0) >= 0:
        return 0.0
    large_enough = 2.0
    while excess_power(large_enough) < 0:
        large_enough *= 2

    return float(optimize.brentq(excess_power, 0.0, large_enough))


@dataclass(frozen=True, eq=False)
class Units:
    """The units of replication of a set of prompts, in order of first appearance."""

    prompts: int
    # The group of each prompt, counted from 0; None if every prompt is its own unit.
    group_of_prompt: np.ndarray | None = None

    @classmethod
    def grouped(cls, groups: Sequence[str]) -> Units:
        """One unit per group; if no two prompts share a group, each prompt is a unit."""
        group_of_prompt, names = pd.factorize(np.array(groups, dtype=object))
        if len(names) == len(groups):
            return cls(len(groups))
        return cls(len(groups), group_of_prompt)

    @property
    def n(self) -> int:
        """The number of units."""
        if self.group_of_prompt is None:
            return self.prompts
        return int(self.group_of_prompt.max()) + 1

    @property
    def kind(self) -> Literal["prompts", "groups"]:
        """The kind of unit."""
        if self.group_of_prompt is None:
            return "prompts"
        return "groups"

    @property
    def unit(self) -> str:
        """The kind of unit as tables state it: "prompts", or "groups (24 of 96 prompts)"."""
        if self.group_of_prompt is None:
            return self.kind
        return f"{self.kind} ({self.n} of {self.prompts} prompts)"

    @property
    def words(self) -> str:
        """The units in words, such as "24 groups of 96 prompts"."""
        if self.group_of_prompt is None:
            return f"{self.prompts} prompts"
        return f"{self.n} groups of {self.prompts} prompts"

    @property
    def inflation(self) -> float:
        """The largest factor by which the variance of a mean over prompts can exceed that over
        independent ones.

        ``Σ m_g² / n`` for n prompts, m_g of them in group g: Kish's design effect at a correlation
        of 1 within groups.
        """
        if self.group_of_prompt is None:
            return 1.0
        sizes = np.bincount(self.group_of_prompt)
        return float((sizes**2).sum() / self.prompts)

    def means(self, values: np.ndarray) -> np.ndarray:
        """The mean of each unit's prompts, for values [prompt, …]; NaN is left out.

        ``means[g] = mean of values[i] over the prompts i of group g``; where prompts are the units,
        the values themselves.
        """
        if self.group_of_prompt is None:
            return values
        cells = values.shape[1:]
        rows = values.reshape(len(values), -1).astype(np.float64)
        means = pd.DataFrame(rows).groupby(self.group_of_prompt).mean()
        return means.to_numpy().reshape(self.n, *cells)

    def halves(self) -> tuple[np.ndarray, np.ndarray]:
        """The prompts of one half of the units, and the others, so that no group is on both
        sides."""
        if self.group_of_prompt is None:
            return halves_of(self.n)
        units_of_half, _ = halves_of(self.n)
        in_half = np.isin(self.group_of_prompt, units_of_half)
        return np.flatnonzero(in_half), np.flatnonzero(~in_half)

    def refuse_below(
        self,
        fewest: int,
        why: str = "",
        instead: str = ', or unit="prompt", which uses single prompts',
    ) -> None:
        """Refuse fewer units than an interval or test needs.

        Args:
            fewest: The number that it needs.
            why: What they are needed for, as the end of a sentence, such as " for two halves".
            instead: What can be done other than to add groups, as the end of that sentence.

        Raises:
            OptionError: There are fewer.
        """
        if self.n >= fewest:
            return
        if self.group_of_prompt is None:
            raise OptionError(f"there are {self.words}; give at least {fewest}{why}")
        raise OptionError(
            f"there are {self.words}; give prompts of at least {fewest} groups{why}{instead}"
        )


def halves_of(n: int) -> tuple[np.ndarray, np.ndarray]:
    """The indices of two halves of n units, which are the same at each call; if n is odd, the first
    has one more.

    They are drawn at random, as in many files two classes of prompts alternate.
    """
    order = np.random.default_rng(n).permutation(n)
    middle = (n + 1) // 2
    return np.sort(order[:middle]), np.sort(order[middle:])


@dataclass(frozen=True, eq=False)
class Bags:
    """Random bags of units that are resampled in place of very many units: ``⌊n / m⌋`` bags of
    ``m = ⌈n / 1000⌉``.

    Units that are left over go to the first bags, one to each.
    """

    order: np.ndarray  # the units, one bag after another
    starts: np.ndarray  # the index in ``order`` where each bag begins

    @classmethod
    def drawn(cls, n: int, seed: int) -> Bags | None:
        """Draw bags of n units; None for up to 2,000, which are resampled one by one."""
        if n <= MOST_SINGLE:
            return None
        count = resampled_count(n)
        size, left_over = divmod(n, count)
        sizes = np.full(count, size)
        sizes[:left_over] += 1
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
        size, left_over = divmod(len(self.order), self.n)
        words = f"{self.n:,} random bags of {size:,}"
        if left_over:
            words += f" or {size + 1:,}"
        return words

    def means(self, values: np.ndarray) -> np.ndarray:
        """The mean of each bag's units, for values [unit, …]."""
        units = len(self.order)
        row_starts = np.append(self.starts, units)
        membership = sparse.csr_array(  # 1 where a unit is in a bag [bag, unit]
            (np.ones(units), self.order, row_starts), shape=(self.n, units)
        )
        sizes = np.diff(row_starts)
        means: np.ndarray = membership @ values.reshape(units, -1)
        means /= sizes[:, None]
        return means.reshape(self.n, *values.shape[1:])


def resampled_count(n: int) -> int:
    """The number of units, or bags of units, that are resampled when there are n units."""
    if n <= MOST_SINGLE:
        return n
    bag_size = ceil(n / _MOST_BAGS)
    return n // bag_size
