"""What tests can find: the smallest p and q, and the power of one test among many."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor

import numpy as np
from scipy import optimize, stats

from mechattn.errors import OptionError, check_counts

RESAMPLES = 9999
EXACT = 12  # prompts: all 4,096 sign patterns are tried
SURE = 0.9  # the probability at which ``fewest`` lets one test pass on its own if signs are drawn
_MOST = 200
_MOST_PLANNED = 10**7  # prompts: more than an effect of 0.01 takes


@dataclass(frozen=True)
class Resolution:
    """The smallest p and q that sign flips over n units can reach in a family of tests
    (Benjamini-Hochberg).

    Args:
        n: The number of units: prompts, or groups of prompts.
        unit: The kind of unit.
        tests: The number of tests in the family.
        level: The level of q below which a test is a finding.
        smallest_p: The smallest possible p, and so q: ``2^(1 − n)`` if all patterns of signs are
            tried (up to 12 units), and ``1 / (1 + resamples)`` if they are drawn.
        smallest_q: The q of one test at that p if no other test is significant:
            ``tests · smallest_p``.
        together: The number of tests that must reach the smallest p for their q to pass; None if
            all don't suffice.
        chance: The probability that a single test passes whose differences all have one sign: 0 or
            1 up to 12 units; with more units, a drawn pattern may by chance equal that of the data.
        fewest: The smallest number of units at which that probability is at least 90 %.
        detectable: The effect (d_z) that one test finds with 80 % power if no other has an effect.
        random: The same for ``q_random``, in words; empty unless a number of draws of random
            weights is named.
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
    detectable: float
    random: str = ""

    def __str__(self) -> str:
        """A sentence with these figures."""
        if not self.random:
            return self._sentence_about_units()
        return f"{self._sentence_about_units()}; {self.random}"

    def _sentence_about_units(self) -> str:
        unit = self.unit.partition(" ")[0]
        start = f"with {self.n} {unit} and {self.tests} tests"
        smallest = f"(smallest p {self.smallest_p:.2g})"
        if self.n >= self.fewest:
            return (
                f"{start} one test alone can pass q < {self.level:g} {smallest}; the smallest"
                " effect that q finds in one test alone, with 80 % power, is d_z ="
                f" {self.detectable:.2g}"
            )
        needed = f"one test alone can with {self.fewest} {unit} or more"
        if self.together is None:
            return f"{start} no p can pass q < {self.level:g} {smallest}; {needed}"
        if self.together > 1:
            return (
                f"{start} no p can pass q < {self.level:g} alone {smallest}: {self.together} tests "
                f"must reach it together, or use {self.fewest} {unit}"
            )
        return (
            f"{start} a test whose neighbours show nothing passes q < {self.level:g} in at most"
            f" {100 * self.chance:.0f} % of draws of the signs, and several that show something pass"
            f" together; {needed}"
        )


def random_words(draws: int, tests: int, compared: int, level: float = 0.05) -> str:
    """What draws of random weights can show: the smallest ``q_random`` of one test alone,
    ``tests / (compared + 1)``.

    ``compared`` is the number of heads in all draws; where q cannot be below the level, how many
    draws would do.
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


def enough(resamples: int, cells: int) -> int:
    """The number of sign patterns that the false discovery rate needs for this number of cells: at
    least 20 each.
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
        unit: The kind of unit, for the sentence.

    Raises:
        OptionError: The level is not between 0 and 1.
    """
    if not 0 < level < 1:
        raise OptionError(f"level={level!r}: give a probability such as 0.05")
    patterns = enough(resamples, tests)
    smallest_p = 1 / (1 + patterns)
    if n <= EXACT:
        smallest_p = 2.0 ** (1 - n)

    # With so many tests at the smallest p, their q is below the level.
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
        detectable=detectable_size(n, tests, level),
    )


def power(
    heads: int, *, effect: float | None = None, prompts: int | None = None, sure: float = 0.8
) -> float:
    """Plan a comparison: how surely q < 0.05 finds one head, what it finds, or how many prompts it
    takes.

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
            f"effect={effect!r}: give a mean in standard deviations (d_z), at least 0.01, "
            "such as 0.5"
        )
    if not 0 < sure < 1:
        raise OptionError(f"sure={sure!r}: give a probability such as 0.8")

    if effect is not None and prompts is not None:
        return power_of(abs(effect), prompts, heads)
    if prompts is not None:
        return detectable_size(prompts, heads, sure=sure)
    if effect is None:
        raise OptionError("give effect=…, prompts=… or both: what is left out is computed")
    size = abs(effect)
    counts = range(3, _MOST_PLANNED)
    return counts[bisect_left(counts, sure, key=lambda n: power_of(size, n, heads))]


@lru_cache(maxsize=64)  # the tables of a page ask for the same
def _fewest(tests: int, level: float, patterns: int) -> int:
    """The smallest number of units with which one test alone passes almost surely."""
    fewest = _MOST
    while fewest > 1 and chance(fewest - 1, tests, level, patterns) >= SURE:
        fewest -= 1
    return fewest


def chance(n: int, tests: int, level: float, patterns: int) -> float:
    """The probability that a test whose differences all have one sign has q below the level by
    itself.
    """
    # The fraction of patterns with as large a mean: all signs kept, or all flipped.
    extreme = 2.0 ** (1 - n)
    if n <= EXACT:
        return float(tests * extreme < level)
    # The most drawn patterns that may be as extreme: tests · (1 + hits) / (1 + patterns) < level.
    hits = ceil(level * (1 + patterns) / tests) - 2
    return float(stats.binom.cdf(hits, patterns, extreme))


def power_of(effect: float, n: int, tests: int = 1, level: float = 0.05) -> float:
    """The probability that a t test over n units finds an effect (d_z), if none of the other tests
    finds one.

    ``P(|T| > t(1 − level / (2 tests), n − 1))`` for noncentral T with ``effect · √n``: what q <
    level asks of a test alone; times the probability that sign flips can be as small.
    """
    reachable = chance(n, tests, level, enough(RESAMPLES, tests))
    critical_t = stats.t.ppf(1 - level / (2 * tests), n - 1)
    shift = effect * np.sqrt(n)
    right_sign = stats.nct.sf(critical_t, n - 1, shift)
    # SciPy gives NaN for what is below 1e-20.
    wrong_sign = np.nan_to_num(stats.nct.cdf(-critical_t, n - 1, shift))
    return reachable * float(right_sign + wrong_sign)


@lru_cache(maxsize=256)
def detectable_size(n: int, tests: int = 1, level: float = 0.05, sure: float = 0.8) -> float:
    """The effect (d_z) that :func:`power_of` finds with a given probability; NaN with too few units
    for any.
    """
    patterns = enough(RESAMPLES, tests)
    if n < 3 or chance(n, tests, level, patterns) <= sure:
        return float("nan")
    if power_of(0.0, n, tests, level) >= sure:
        return 0.0
    most = 2.0
    while power_of(most, n, tests, level) < sure:
        most *= 2

    def shortfall(effect: float) -> float:
        return power_of(effect, n, tests, level) - sure

    return float(optimize.brentq(shortfall, 0.0, most))
