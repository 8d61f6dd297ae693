"""The units of replication of an evaluation: problems, or groups of problems."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mechattn.stats.intervals import FEWEST, Interval, t_interval, wilson_interval
from mechattn.stats.units import Unit, Units, check_unit

if TYPE_CHECKING:
    from mechattn.evaluation.evaluation import Evaluation

_NEGLIGIBLE = 1.1  # in a variance: a factor of 1.05 in the width of an interval


def units_of(evaluation: Evaluation, unit: Unit) -> Units:
    """The problems, or their groups, in the order of ``Evaluation.right``."""
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
    """The fraction of answers with a property, with an interval within 0 and 1."""
    share = float(units.means(values.mean(1)).mean())
    if share in (0, 1) or (units.of is None and values.shape[1] == 1):
        low, high = wilson_interval(round(share * units.n), units.n, level)
        return Interval(np.array(share), np.array(low), np.array(high))
    return within(t_interval(units.means(values.mean(1)), level))


def within(made: Interval) -> Interval:
    """The same interval, clipped to 0 and 1."""
    return Interval(made.estimate, np.clip(made.low, 0, 1), np.clip(made.high, 0, 1))
