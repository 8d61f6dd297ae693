"""The rules that turn numbers into verdicts, fixed before anything is measured, and each claim's verdict by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, isfinite, nan
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from scipy import special, stats

from mechattn.claims.measures import NotApplicable, with_unit
from mechattn.results.result import units_of
from mechattn.stats.intervals import FEWEST, t_interval

if TYPE_CHECKING:
    from mechattn.claims.register import Claim, Measuring, Part

Word = Literal[
    "supported", "contradicted", "no more than untrained", "cannot be told", "not testable here", "not applicable",
    "holds", "does not hold",
]  # fmt: skip
WORDS: tuple[Word, ...] = Word.__args__  # type: ignore[attr-defined]
Side = Literal["above", "below"]
Shown = Callable[[float], str]  # a number in words
OTHER: dict[Side, Side] = {"above": "below", "below": "above"}
LEVEL, POWER = 0.95, 0.8
ONE_SIDED = (1 - LEVEL) / 2
FEWEST_DRAWS = 3  # random models: the spread of fewer says nothing
_ROUNDING = 1e-6  # of float32


@dataclass(frozen=True)
class Rule:
    """The number has to lie on one side of a line, and further there than with random weights, by the margin."""

    side: Side  # where the claim puts the number
    line: float
    margin: float
    opposite: float  # the line beyond which, on the other side, the claim is contradicted

    @property
    def sign(self) -> float:
        """1 where more supports the claim, −1 where less does."""
        return 1.0 if self.side == "above" else -1.0


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval, over n units: prompts, problems, or groups of them."""

    value: float
    low: float
    high: float
    n: int
    detectable: (
        float  # how far from a line the truth has to be for its side to be told with 80 % power
    )
    exact: float | None = None  # two-sided p of an exact paired test of no difference
    levels: tuple[float, float] | None = (
        None  # the accuracies whose difference it is: the other one, and its own
    )
    floor: float = 0.0  # the least distance from a line that this n could tell, whatever the data
    skewness: float = 0.0  # of the units

    def beyond(self, line: float, sign: float) -> float:
        """One-sided p of lying above a line, or below it with sign −1: by the interval, and allowing for skewness.

        The larger p counts; the second one is of ``t + a · (2t² + 1) / 6 + a² · t³ / 27`` with ``a = skewness / √n``.

        Source:
            Hall 1992, On the removal of skewness by transformation.
        """
        far = sign * (self.value - line)
        width = self.value - self.low if (sign > 0) == (far > 0) else self.high - self.value
        if width <= 0:
            return float(far <= 0)
        if self.exact is not None:  # of accuracies: by the normal distribution
            return float(special.ndtr(-far / width * special.ndtri(1 - ONE_SIDED)))
        t, a = (
            far / width * special.stdtrit(self.n - 1, 1 - ONE_SIDED),
            sign * self.skewness / self.n**0.5,
        )
        return float(
            special.stdtr(self.n - 1, -min(t, t + a * (2 * t**2 + 1) / 6 + a**2 * t**3 / 27))
        )


@dataclass(frozen=True)
class Chance:
    """How far a number is from its mean over random models, paired by unit; and the number in each of them."""

    apart: Estimate
    draws: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Of the draws."""
        return float(np.mean(self.draws))

    @property
    def spread(self) -> float:
        """``t(0.975, k − 1) · s · √(1 + 1/k)``: half the prediction interval of one more draw."""
        return float(special.stdtrit(len(self.draws) - 1, 1 - ONE_SIDED)) * self._scale

    @property
    def _scale(self) -> float:
        return float(np.std(self.draws, ddof=1) * np.sqrt(1 + 1 / len(self.draws)))

    def beyond(self, margin: float, sign: float) -> float:
        """One-sided p: further than random weights by a margin, and than one more draw would be."""
        far = sign * self.apart.value
        scale = self._scale
        draw = (
            float(special.stdtr(len(self.draws) - 1, -far / scale))
            if scale > 0
            else float(far <= 0)
        )
        return max(draw, self.apart.beyond(sign * margin, sign))


@dataclass(frozen=True)
class Outcome:
    """What a rule says, and why."""

    word: Word
    why: str
    p: float | None = (
        None  # of the tests behind both verdicts, two-sided; None where nothing was tested
    )
    told: tuple[float, float] | None = (
        None  # supported from there on, contradicted from there on, with 80 % power
    )


def bounds(rule: Rule, chance: Chance | None) -> tuple[float, float]:
    """What a number has to lie beyond to support a claim, and to contradict it."""
    up, down = rule.sign * rule.line, rule.sign * rule.opposite
    if chance is not None:
        away, mean = max(rule.margin, chance.spread), rule.sign * chance.mean
        up, down = max(up, mean + away), min(down, mean - away)
    return rule.sign * up, rule.sign * down


def undecidable(
    rule: Rule,
    chance: Chance | None,
    attainable: tuple[float, float],
    floor: float = 0.0,
    shown: Shown = str,
) -> str:
    """Why this model, at this size, can reach one verdict alone, or none; empty where it can reach both."""
    worst, best = sorted(rule.sign * end for end in attainable)
    for reach, sign, word, i in ((best, 1, "supported", 0), (worst, -1, "contradicted", 1)):
        needed, alone = (
            sign * rule.sign * bounds(rule, beside)[i] + floor for beside in (chance, None)
        )
        if sign * reach <= needed + _ROUNDING:
            why = (
                "random weights reach as far"
                if sign * reach > alone + _ROUNDING
                else "out of reach"
            )
            why = (
                "too few values can differ"
                if floor and sign * reach > alone - floor + _ROUNDING
                else why
            )
            end, line = rule.sign * reach, rule.sign * sign * needed
            return f"{word} would take beyond {shown(line)}, and this model can reach {shown(end)}: {why}"
    return ""


def both_sides(rule: Rule, found: Estimate, chance: Chance | None) -> tuple[float, float]:
    """One-sided p of "supported" and of "contradicted": beyond the line and, where they were run, random weights."""
    p = []
    for line, sign in ((rule.line, rule.sign), (rule.opposite, -rule.sign)):
        each = [found.beyond(line, sign)]
        if found.exact is not None and sign * line >= 0:
            each.append(found.exact / 2 if sign * found.value > 0 else 1 - found.exact / 2)
        if chance is not None:
            each.append(chance.beyond(rule.margin, sign))
        p.append(max(each))
    return p[0], p[1]


def decide(
    rule: Rule,
    found: Estimate,
    chance: Chance | None = None,
    attainable: tuple[float, float] = (-inf, inf),
    shown: Shown = str,
) -> Outcome:
    """The verdict of one number, the same for both directions (docs/concepts/the-paper.md says when which)."""
    if not all(map(isfinite, (found.value, found.low, found.high))):
        few = f"{found.n} values, and an interval takes {FEWEST} at least"
        return Outcome("cannot be told", few if found.n < FEWEST else "some values are no numbers")
    if why := undecidable(rule, chance, attainable, found.floor, shown):
        return Outcome("not testable here", why)
    (supports, against), told = both_sides(rule, found, chance), _told(rule, found, chance)
    yes = supports <= ONE_SIDED or supports < against
    p = min(1.0, 2 * (supports if yes else against))
    if p > 1 - LEVEL:
        for line, sign, side in (
            (rule.line, rule.sign, rule.side),
            (rule.opposite, -rule.sign, OTHER[rule.side]),
        ):
            if chance is not None and found.beyond(line, sign) <= ONE_SIDED:
                why = f"the whole interval is {side} the line, but no further than random weights of the architecture"
                return Outcome("no more than untrained", f"{why} come", p, told)
        return Outcome("cannot be told", "the interval reaches over the line", p, told)
    further = "" if chance is None else ", and further than random weights put it"
    further += ", but short of what was published" if yes and against <= ONE_SIDED else ""
    word: Word = "supported" if yes else "contradicted"
    return Outcome(
        word,
        f"the whole interval is {rule.side if yes else OTHER[rule.side]} the line{further}",
        p,
        told,
    )


def _told(rule: Rule, found: Estimate, chance: Chance | None) -> tuple[float, float]:
    """The power of the whole rule: how far beyond what it takes the truth has to be."""
    ends = []
    for line, sign in ((rule.line, rule.sign), (rule.opposite, -rule.sign)):
        end = sign * line + found.detectable
        if (
            chance is not None
        ):  # beyond a further draw the value has to be, and beyond the margin its interval
            level, power = special.stdtrit(chance.apart.n - 1, [1 - ONE_SIDED, POWER])
            noise = chance.apart.detectable
            away = max(rule.margin + noise, chance.spread + noise * power / (level + power))
            end = max(end, sign * chance.mean + away)
        ends.append(float(sign * end))
    return ends[0], ends[1]


def together(outcomes: Seq[Outcome]) -> Outcome:
    """A claim of several parts: supported by all of them; contradicted by any, at a level divided by their number."""
    if len(outcomes) == 1:
        return outcomes[0]
    for word in ("does not hold", "not testable here"):
        for outcome in outcomes:
            if outcome.word == word:
                return replace(outcome, p=None, told=None)
    tested = [outcome for outcome in outcomes if outcome.p is not None]
    if len(tested) < len(outcomes):  # some are no numbers, or all hold
        return next(outcome for outcome in outcomes if outcome.p is None)
    against = min(
        (o for o in tested if o.word == "contradicted"), key=lambda o: o.p or 0.0, default=None
    )
    if against is not None:
        p = min(1.0, len(outcomes) * (against.p or 0.0))
        lost = Outcome(
            "cannot be told",
            "one part is contradicted by itself, but not counted with the others",
            p,
        )
        return replace(against, p=p, told=None) if p <= 1 - LEVEL else lost
    weakest = max(tested, key=lambda o: (o.word != "supported", o.p or 0.0))
    return replace(weakest, p=max(o.p or 0.0 for o in tested), told=None)


def family(p: Seq[float | None]) -> list[float | None]:
    """Benjamini-Hochberg over all cells of a page that were tested."""
    known = [x for x in p if x is not None]
    q = iter(stats.false_discovery_control(known) if known else ())
    return [None if x is None else float(next(q)) for x in p]


def estimated(values: np.ndarray, least: float = 0.0) -> Estimate:
    """The mean of one value a unit, with its t interval, half of it ``least`` at least, and what this n can tell."""
    values = np.asarray(values, dtype=np.float64)
    n = len(values)
    if n < FEWEST or not np.isfinite(values).all():
        return Estimate(float(values.mean()) if n else nan, nan, nan, n, nan)
    mean, low, high = (float(end) for end in t_interval(values))
    low, high = min(low, mean - least), max(high, mean + least)
    error = values.std(ddof=1) / np.sqrt(n)
    detectable = float(special.stdtrit(n - 1, [1 - ONE_SIDED, POWER]).sum() * error)
    skewness = float(stats.skew(values)) if error > 0 else 0.0
    return Estimate(mean, low, high, n, max(detectable, least), skewness=skewness)


def beside_chance(values: np.ndarray, draws: Seq[np.ndarray]) -> Chance | None:
    """A number beside that of random models, all [unit]; None of fewer than three draws that have it."""
    there = [draw for draw in draws if len(draw) == len(values) and np.isfinite(draw).all()]
    if len(there) < FEWEST_DRAWS:
        return None
    return Chance(
        estimated(values - np.mean(there, axis=0)), tuple(float(draw.mean()) for draw in there)
    )


@dataclass(frozen=True)
class Evidence:
    """What was measured of one model."""

    runs: Mapping[str, Any]  # the result or evaluation of each run that was made
    draws: Mapping[str, Seq[np.ndarray]] = field(
        default_factory=dict
    )  # of a part, "KEY/0": each random model's [unit]
    drawn: frozenset[str] = frozenset()  # the runs that random models were asked for
    missing: Mapping[str, Outcome] = field(
        default_factory=dict
    )  # of runs that were not made: their verdict
    model: str = (
        ""  # its name and that of the prompts, for which a claim may have published numbers
    )
    prompts: str = ""


@dataclass(frozen=True)
class JudgedPart:
    """What was found of one part of a claim, and what its rule says."""

    part: Part
    rule: Rule  # for this model and these prompts
    estimate: Estimate
    chance: Chance | None  # None where no random weights were run
    attainable: tuple[float, float]
    outcome: Outcome


@dataclass(frozen=True)
class Judged:
    """The verdict of a claim of one model."""

    claim: Claim
    outcome: Outcome
    parts: tuple[JudgedPart, ...] = ()  # empty where nothing was found
    control: Estimate | None = None
    q: float | None = None  # over all cells of the page; None where nothing was tested


def judged(claim: Claim, evidence: Evidence) -> Judged:
    """Measure and decide one claim."""
    if claim.needs in evidence.missing:
        return Judged(claim, evidence.missing[claim.needs])
    try:
        parts = tuple(_part(claim, i, evidence) for i in range(len(claim.parts)))
    except NotApplicable as error:
        return Judged(claim, Outcome("not applicable", str(error)))
    try:
        control = found(claim.control, evidence.runs[claim.needs]) if claim.control else None
    except NotApplicable:
        control = None
    return Judged(claim, together([part.outcome for part in parts]), parts, control)


def _part(claim: Claim, i: int, evidence: Evidence) -> JudgedPart:
    part, of = claim.parts[i], evidence.runs[claim.needs]
    rule, estimate, attainable = (
        part.rule_of(evidence.model, evidence.prompts),
        found(part, of),
        part.attainable(of),
    )
    draws = evidence.draws.get(f"{claim.key}/{i}", ())
    chance = beside_chance(units(part, of), draws) if draws else None
    if claim.identity:
        holds = (
            rule.sign * ((estimate.high if part.side == "below" else estimate.low) - part.line) > 0
        )
        why = f"{part.side} {part.line:g} by arithmetic, in any model"
        outcome = Outcome("holds" if holds else "does not hold", why)
    elif claim.compared and chance is None and claim.needs in evidence.drawn:
        outcome = Outcome(
            "cannot be told", "there are no random weights of this architecture to compare with"
        )
    else:
        beside, shown = chance if claim.compared else None, partial(with_unit, kind=part.kind)
        outcome = decide(rule, estimate, beside, attainable, shown)
    return JudgedPart(part, rule, estimate, chance, attainable, outcome)


def found(measuring: Measuring, of: Any) -> Estimate:
    """A number with its interval."""
    return (
        made
        if isinstance(made := measuring(of), Estimate)
        else estimated(units_of(of, len(made)).means(made))
    )


def units(measuring: Measuring, of: Any) -> np.ndarray:
    """A value for each unit: a prompt, or a group of them."""
    made = measuring(of)
    return units_of(of, len(made)).means(made)


def corrected(models: Seq[Seq[Judged]]) -> list[tuple[Judged, ...]]:
    """The verdicts of all models as one family: what does not hold over all cells of the page cannot be told."""
    cells = [one for some in models for one in some]
    q = iter(family([one.outcome.p for one in cells]))
    made = [[replace(one, q=next(q)) for one in some] for some in models]
    lost = "by itself {}, but not over the {} cells of this page (q = {:.2g})"
    for some in made:
        for i, one in enumerate(some):
            word = one.outcome.word
            if one.q is not None and one.q > 1 - LEVEL and word in ("supported", "contradicted"):
                why = lost.format(word, len(cells), one.q)
                some[i] = replace(one, outcome=replace(one.outcome, word="cannot be told", why=why))
    return [tuple(some) for some in made]
