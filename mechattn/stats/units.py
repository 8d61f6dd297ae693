"""Units of replication (prompts, groups of prompts, or random bags of very many units), and what
tests over them can find: the smallest p and q, and the power of one test among many.
"""

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

Unit = Literal["auto", "prompt"]  # "auto": groups if there are any; "prompt": always prompts
RESAMPLES = 9999  # the default
MOST_EXACT = 12  # units: up to this number, all sign patterns (4,096) are tried
MOST_SINGLE = 2000  # units: up to this number, each is resampled on its own
_MOST_BAGS = 1000
_SURE = 0.9  # with ``fewest`` units, a test passes alone with at least this probability
_MOST_UNITS = 200  # the largest ``fewest`` that is considered
_MOST_PLANNED = 10**7  # prompts: more than an effect of 0.01 needs


@dataclass(frozen=True)
class Resolution:
    """What sign flips over n units can find in a family of tests (Benjamini-Hochberg).

    Args:
        n: The number of units: prompts, or groups of prompts.
        unit: The kind of unit, such as "prompts".
        tests: The number of tests in the family.
        level: The level of q below which a test is a finding.
        smallest_p: The smallest possible p: ``2^(1 − n)`` up to 12 units, as all sign patterns are
            tried, and ``1 / (1 + patterns)`` with more, as they are drawn. If all tests reach it,
            it is also their q.
        smallest_q: The q of one test at that p if all other tests have a p of 1: ``tests ·
            smallest_p``, at most 1.
        together: The number of tests that must reach the smallest p together for their q to be
            below the level; None if even all of them are too few.
        chance: The probability that one test alone has q below the level if all of its differences
            have the same sign. Up to 12 units it is 0 or 1; with more, drawn patterns may by chance
            repeat the signs of the data.
        fewest: The smallest number of units with which that probability is at least 90 %; None if
            no number is enough, because too few patterns are drawn for so low a level.
        detectable: The effect (d_z) that one test finds with 80 % power if no other has an effect;
            NaN if there are too few units.
        random: What draws of random weights can show (:func:`random_words`); empty if their number
            is not named.
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
        """What the units can find, in words, and the words about random weights, if any."""
        sentences = [self._sentence_about_units(), self.random]
        return "; ".join(filter(None, sentences))

    def _sentence_about_units(self) -> str:
        """Whether one test alone can have q below the level, and otherwise what that needs."""
        units_and_tests = f"with {self.n} {self.unit} and {self.tests} tests"
        smallest_p = f"(smallest p {self.smallest_p:.2g})"
        if self.fewest is None:
            return (
                f"{units_and_tests} no test alone can pass q < {self.level:g} {smallest_p}, however"
                f" many {self.unit} there are: give more resamples"
            )
        if self.n >= self.fewest:
            return (
                f"{units_and_tests} one test alone can pass q < {self.level:g} {smallest_p}; the"
                " smallest effect that q finds in one test alone, with 80 % power, is d_z ="
                f" {self.detectable:.2g}"
            )
        remedy = f"one test alone can with {self.fewest} {self.unit} or more"
        if self.together is None:
            return f"{units_and_tests} no p can pass q < {self.level:g} {smallest_p}; {remedy}"
        if self.together > 1:
            return (
                f"{units_and_tests} no p can pass q < {self.level:g} alone {smallest_p}:"
                f" {self.together} tests must reach it together, or use {self.fewest} {self.unit}"
            )
        return (
            f"{units_and_tests} a test whose neighbours show nothing passes q < {self.level:g} in"
            f" at most {100 * self.chance:.0f} % of draws of the signs, and several that show"
            f" something pass together; {remedy}"
        )


def random_words(draws: int, tests: int, compared: int, level: float = 0.05) -> str:
    """What draws of random weights can show, in words.

    It is the smallest ``q_random`` of one head alone, ``tests / (compared + 1)``. If that is not
    below the level, the number of draws that are enough follows.

    Args:
        draws: The number of random models.
        tests: The number of heads that are tested.
        compared: The number of heads in all draws together.
        level: The level of q below which a test is a finding.
    """
    if not compared:
        return f"with {draws} draws there is no head of a random model to compare with"
    smallest_q = tests / (compared + 1)
    sentence = (
        f"with {draws} draws the smallest q_random of one head alone is {min(1.0, smallest_q):.2g}"
    )
    if smallest_q < level:
        return sentence
    fewest_draws = floor(draws * (tests / level - 1) / compared) + 1
    return f"{sentence}; {fewest_draws} draws would do"


def patterns_needed(resamples: int, cells: int) -> int:
    """The number of random sign patterns: ``resamples``, but at least 20 for each cell.

    The smallest p is ``1 / (1 + patterns)``, so that one cell alone can have q < 0.05.
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
        resamples: The least number of sign patterns, if they are drawn.
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

    # m tests at the smallest p have q = tests · smallest_p / m, which must be below the level.
    together = None
    fewest_together = floor(tests * smallest_p / level) + 1
    if fewest_together <= tests:
        together = fewest_together

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
    """Plan a comparison: the power to find one head by q < 0.05, the effect that is found, or the
    number of prompts that finding it needs.

    The power is ``P(|T| > t(1 − 0.05 / (2 heads), prompts − 1))`` for noncentral T with
    ``effect · √prompts``, for one head with an effect among heads without one. If more heads have
    effects, they are found more easily.

    Args:
        heads: The number of tests in the table, such as layers × heads.
        effect: The mean of the tested difference divided by its standard deviation over prompts
            (d_z).
        prompts: The number of prompts, or of groups.
        sure: The power to reach. It is not used if both effect and prompts are given.

    Returns:
        With effect and prompts, the power, which is 0 if q < 0.05 is impossible. With prompts, the
        smallest effect that is found, NaN if there are too few prompts. With effect, the smallest
        number of prompts.

    Raises:
        OptionError: Both effect and prompts are left out, or a number is out of range.
    """
    check_counts(heads=heads)
    if prompts is not None:
        check_counts(3, prompts=prompts)
    if effect is not None and not 0.01 <= abs(effect) < np.inf:
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
        raise OptionError("give effect=…, prompts=… or both: the one left out is computed")

    # Power grows with the number of prompts, so a binary search finds the first that is enough.
    prompt_counts = range(3, _MOST_PLANNED)
    first_index = bisect_left(prompt_counts, sure, key=lambda n: power_of(abs(effect), n, heads))
    return prompt_counts[first_index]


def chance(n: int, tests: int, level: float, patterns: int) -> float:
    """The probability that one test alone has q below the level, if all of its differences have the
    same sign.

    That is ``tests · p < level``. Up to 12 units p is ``2^(1 − n)``, the share of patterns that
    keep all signs or flip all. With more it is ``(1 + hits) / (1 + patterns)``, with a binomial
    number of hits: drawn patterns that do so.
    """
    share_of_patterns = 2.0 ** (1 - n)
    if n <= MOST_EXACT:
        return float(tests * share_of_patterns < level)

    # The largest number of hits with tests · (1 + hits) / (1 + patterns) < level.
    most_hits = ceil(level * (1 + patterns) / tests) - 2
    return float(stats.binom.cdf(most_hits, patterns, share_of_patterns))


def power_of(
    effect: float, n: int, tests: int = 1, level: float = 0.05, resamples: int = RESAMPLES
) -> float:
    """The probability that a t test over n units finds an effect (d_z), if no other test finds one.

    It is ``P(|T| > t(1 − level / (2 tests), n − 1))`` for noncentral T with ``effect · √n``, as one
    test alone needs for q < level, times the :func:`chance` that the p of sign flips is as small.
    """
    chance_of_flips = chance(n, tests, level, patterns_needed(resamples, tests))
    critical_t = stats.t.ppf(1 - level / (2 * tests), n - 1)
    shift = effect * np.sqrt(n)
    p_right_sign = stats.nct.sf(critical_t, n - 1, shift)
    # Far below 1e-20 this may be NaN: https://github.com/scipy/scipy/issues/25470
    p_wrong_sign = np.nan_to_num(stats.nct.cdf(-critical_t, n - 1, shift))
    return chance_of_flips * float(p_right_sign + p_wrong_sign)


@lru_cache(maxsize=256)
def detectable_size(
    n: int, tests: int = 1, level: float = 0.05, sure: float = 0.8, resamples: int = RESAMPLES
) -> float:
    """The effect (d_z) that a test finds with probability ``sure`` (:func:`power_of`).

    It is NaN if no effect is large enough, and 0 if none is needed.
    """
    patterns = patterns_needed(resamples, tests)
    if n < 3 or chance(n, tests, level, patterns) <= sure:
        return float("nan")

    def excess_power(effect: float) -> float:
        """The power minus ``sure``; negative if the effect is too small."""
        return power_of(effect, n, tests, level, resamples) - sure

    if excess_power(0.0) >= 0:
        return 0.0
    largest_effect = 2.0  # of those that are searched
    while excess_power(largest_effect) < 0:
        largest_effect *= 2

    return float(optimize.brentq(excess_power, 0.0, largest_effect))


@dataclass(frozen=True, eq=False)
class Units:
    """The units of replication of a set of prompts, in order of first appearance."""

    prompts: int
    # The group of each prompt, counted from 0; None if every prompt is its own unit.
    group_of_prompt: np.ndarray | None = None

    @classmethod
    def grouped(cls, groups: Sequence[str]) -> Units:
        """Units from the group of each prompt; prompts are the units if no two share a group."""
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
        """The largest factor by which grouping can raise the variance of a mean over prompts.

        ``Σ m_g² / n`` for n prompts, m_g of them in group g: Kish's design effect at a correlation
        of 1 within groups, compared with independent prompts.
        """
        if self.group_of_prompt is None:
            return 1.0
        sizes = np.bincount(self.group_of_prompt)
        return float((sizes**2).sum() / self.prompts)

    def means(self, values: np.ndarray) -> np.ndarray:
        """The mean of each unit's prompts [unit, …], for values [prompt, …]; NaN is left out.

        ``means[g] = mean of values[i] over the prompts i of group g``. If prompts are the units,
        these are the values themselves, not a copy.
        """
        if self.group_of_prompt is None:
            return values
        columns = values.reshape(len(values), -1).astype(np.float64)
        means = pd.DataFrame(columns).groupby(self.group_of_prompt).mean()
        return means.to_numpy().reshape(self.n, *values.shape[1:])

    def halves(self) -> tuple[np.ndarray, np.ndarray]:
        """The indices of the prompts of one half of the units, and those of the other half."""
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
            instead: The alternative to more groups, as the end of that sentence.

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
    """The indices of two random halves of n units, the same at each call.

    If n is odd, the first has one more. They are random because in many files two classes of
    prompts alternate.
    """
    order = np.random.default_rng(n).permutation(n)
    middle = (n + 1) // 2
    return np.sort(order[:middle]), np.sort(order[middle:])


@dataclass(frozen=True, eq=False)
class Bags:
    """Random bags of units, which are resampled in place of very many units.

    There are ``⌊n / m⌋`` bags of ``m = ⌈n / 1000⌉`` units. Units that are left over go to the first
    bags, one to each.
    """

    order: np.ndarray  # the units, one bag after another
    starts: np.ndarray  # the index in ``order`` where each bag begins

    @classmethod
    def drawn(cls, n: int, seed: int) -> Bags | None:
        """Draw bags of n units; None for up to 2,000 units, which are resampled one by one."""
        if n <= MOST_SINGLE:
            return None
        count = resampled_count(n)
        size, left_over = divmod(n, count)
        sizes = np.full(count, size)
        sizes[:left_over] += 1
        ends = np.cumsum(sizes)
        generator = np.random.default_rng([seed, 1])  # independent of the stream of resamples
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
        """The mean of each bag's units [bag, …], for values [unit, …]."""
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


@lru_cache(maxsize=64)  # the tables of a page have the same arguments
def _fewest(tests: int, level: float, patterns: int) -> int | None:
    """The smallest number of units with which :func:`chance` is at least 90 %; None if even 200 are
    too few.
    """
    fewest = _MOST_UNITS
    if chance(fewest, tests, level, patterns) < _SURE:
        return None
    while fewest > 1 and chance(fewest - 1, tests, level, patterns) >= _SURE:
        fewest -= 1
    return fewest
