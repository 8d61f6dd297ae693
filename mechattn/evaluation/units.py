"""The units of replication of an evaluation: its problems, or their groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mechattn.stats.intervals import FEWEST, Interval, t_interval, wilson_interval
from mechattn.stats.units import Unit, Units, check_unit

if TYPE_CHECKING:
    from mechattn.evaluation.evaluation import Evaluation

_NEGLIGIBLE = 1.1  # in a variance: a factor of 1.05 in an interval's width


def units_of(evaluation: Evaluation, unit: Unit) -> Units:
    """The problems, or their groups, in the order of ``Evaluation.right``.

    If so few share a group that it could widen an interval by 5 % at most, problems are the units: near 0 and 1, the
    score interval and McNemar's test are better than a t interval.

    Raises:
        OptionError: No such unit, or too few groups.
    """
    check_unit(unit)
    problems = list(dict.fromkeys(answer.prompt for answer in evaluation.answers))
    groups = evaluation.provenance.get("groups", {})
    if unit == "prompt" or not groups:
        return Units(len(problems))
    units = Units.grouped([groups.get(prompt, prompt) for prompt in problems])
    if units.inflation <= _NEGLIGIBLE:
        return Units(len(problems))
    units.refuse_below(FEWEST)
    return units


def share_interval(values: np.ndarray, units: Units, level: float) -> Interval:
    """The share of answers of which something holds, with its interval within 0 and 1.

    Wilson's for one answer per problem, and where all answers agree, since a t interval would then be a point;
    otherwise a t interval over the units.

    Args:
        values: 1 where it holds, otherwise 0 [problem, sample].
        units: The problems, or their groups.
        level: The probability that the interval covers the share.
    """
    share = float(units.means(values.mean(1)).mean())
    if share in (0, 1) or (units.of is None and values.shape[1] == 1):
        low, high = wilson_interval(round(share * units.n), units.n, level)
        return Interval(np.array(share), np.array(low), np.array(high))
    return within(t_interval(units.means(values.mean(1)), level))


def within(made: Interval) -> Interval:
    """The same interval, cut off at 0 and 1."""
    return Interval(made.estimate, np.clip(made.low, 0, 1), np.clip(made.high, 0, 1))
