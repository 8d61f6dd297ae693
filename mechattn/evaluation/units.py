"""The units of replication of an evaluation: its problems, or their groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mechattn.stats.intervals import FEWEST
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
