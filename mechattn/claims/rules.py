"""The rules that turn numbers into verdicts, fixed before anything is measured; pure functions of numbers."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from mechattn.stats.intervals import FEWEST, t_interval

Word = Literal["supported", "contradicted", "cannot be told", "not applicable"]
WORDS: tuple[Word, ...] = ("supported", "contradicted", "cannot be told", "not applicable")
Side = Literal["above", "below"]
POWER = 0.8
FEWEST_DRAWS = 3  # random models: the spread of fewer says nothing


@dataclass(frozen=True)
class Rule:
    """The number has to lie on one side of a line, and further there than with random weights.

    Args:
        side: On which side of the line the claim puts the number.
        line: The line: no effect and the smallest effect that would matter.
        margin: How much further on that side than with random weights it has to be at least, in the same units.
    """

    side: Side
    line: float
    margin: float

    @property
    def sign(self) -> float:
        """1 where more supports the claim, −1 where less does."""
        return 1.0 if self.side == "above" else -1.0


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval.

    Args:
        value: The mean over units.
        low: Lower end.
        high: Upper end.
        n: How many units: prompts, problems, or groups of them.
        detectable: How far from a line the truth has to be for its side to be told with 80 % power.
    """

    value: float
    low: float
    high: float
    n: int
    detectable: float


@dataclass(frozen=True)
class Chance:
    """How far a number is from that of random weights of the same architecture.

    Args:
        apart: The number less the mean over the draws, paired by unit.
        draws: The number in each draw.
        spread: Half the width of the interval that a further draw lies in with 95 %, by the spread of the draws.
    """

    apart: Estimate
    draws: tuple[float, ...]
    spread: float


@dataclass(frozen=True)
class Outcome:
    """What a rule says, and why."""

    word: Word
    why: str


def decide(rule: Rule, found: Estimate, chance: Chance | None = None, by_definition: bool = False) -> Outcome:
    """The verdict of one number.

    Supported: the whole interval is on the predicted side of the line, and the number is further there than random
    weights put it. Contradicted: the whole interval is on the other side, so that there is no effect, one too small to
    matter, or the opposite one. Else it cannot be told.

    Args:
        rule: The line.
        found: The number.
        chance: The same number beside that of random weights; None where there is none to compare with.
        by_definition: The claim holds whatever was learned, so random weights are no null of it.
    """
    if not np.isfinite([found.value, found.low, found.high]).all():
        few = f"{found.n} values, and an interval takes {FEWEST} at least"
        return Outcome("cannot be told", few if found.n < FEWEST else "some values are no numbers")
    near, far = (found.low, found.high) if rule.side == "above" else (found.high, found.low)
    if rule.sign * (far - rule.line) < 0:
        return Outcome("contradicted", f"the whole interval is {'below' if rule.sign > 0 else 'above'} the line")
    if rule.sign * (near - rule.line) <= 0:
        return Outcome("cannot be told", "the interval reaches over the line")
    if by_definition:
        return Outcome("supported", "it holds without any training")
    return _beyond_chance(rule, chance)


def _beyond_chance(rule: Rule, chance: Chance | None) -> Outcome:
    if chance is None:
        return Outcome("cannot be told", "there are no random weights to compare with")
    nearest = chance.apart.low if rule.side == "above" else chance.apart.high
    if not rule.sign * nearest > max(rule.margin, chance.spread):
        return Outcome("cannot be told", "random weights of the same architecture come as far")
    return Outcome("supported", f"the whole interval is {rule.side} the line, and further than random weights come")


def together(outcomes: Seq[Outcome]) -> Outcome:
    """A claim of several parts: supported by all of them, contradicted by any, else it cannot be told."""
    for word in ("not applicable", "contradicted", "cannot be told"):
        for outcome in outcomes:
            if outcome.word == word:
                return outcome
    return outcomes[0]


def estimated(values: np.ndarray, least: float = 0.0) -> Estimate:
    """The mean of one value a unit, with its t interval, and what this number of units can tell.

    Args:
        values: One a unit.
        least: Half the width of the interval at least, where values may all be alike by chance.
    """
    values = np.asarray(values, dtype=np.float64)
    n = len(values)
    if n < FEWEST or not np.isfinite(values).all():
        none = float("nan")
        return Estimate(float(values.mean()) if n else none, none, none, n, none)
    mean, low, high = (float(end) for end in t_interval(values))
    low, high = min(low, mean - least), max(high, mean + least)
    error = values.std(ddof=1) / np.sqrt(n)
    detectable = float((stats.t.ppf(0.975, n - 1) + stats.t.ppf(POWER, n - 1)) * error)
    return Estimate(mean, low, high, n, max(detectable, least))


def beside_chance(values: np.ndarray, draws: Seq[np.ndarray]) -> Chance | None:
    """A number beside that of random models, all [unit]; None of fewer than three draws.

    ``spread = t(0.975, k − 1) · s · √(1 + 1/k)`` of the k draws' means: the prediction interval of one draw more.
    """
    if len(draws) < FEWEST_DRAWS:
        return None
    means = np.array([draw.mean() for draw in draws])
    k = len(means)
    spread = float(stats.t.ppf(0.975, k - 1) * means.std(ddof=1) * np.sqrt(1 + 1 / k))
    return Chance(estimated(values - np.mean(draws, axis=0)), tuple(map(float, means)), spread)
