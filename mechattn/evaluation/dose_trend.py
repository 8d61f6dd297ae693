"""Tests whether attention or accuracy rises or falls with the amount or place of inserted tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from mechattn.axes import BASELINE
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.table import what_is_tested
from mechattn.errors import OptionError
from mechattn.evaluation.answer_units import units_of
from mechattn.evaluation.evaluation import Evaluation
from mechattn.results.result import Result
from mechattn.stats.trend import Trend
from mechattn.stats.trend import trend as trend_of
from mechattn.stats.units import Unit


def trend(
    measured: Result | Evaluation,
    conditions: Seq[str],
    quantity: str = "received",
    segment: str | None = "question",
    *,
    layer: int | None = None,
    unit: Unit = "auto",
    resamples: int = 9999,
    seed: int = 0,
) -> Trend:
    """Test whether a quantity, or accuracy, rises or falls over ordered conditions, such as a sweep of counts.

    Page's test over prompts, two-sided, by permutations of each prompt's values, with the mean of Spearman's ρ within
    prompts. For a result it tests each prompt's mean over heads of the change from the baseline *minus that of the
    null*, because more inserted tokens mean less attention to each by definition. For an evaluation it tests each
    problem's share of right answers; the baseline is a dose of its own if named.

    Args:
        measured: A result, or an evaluation.
        conditions: At least three, in the order of their dose; ``list(ma.sweep(…))`` gives the names of a sweep.
        quantity: For a result: the quantity, as for ``compare``.
        segment: For a result: the segment.
        layer: For a result: one layer; all by default.
        unit: "auto" uses groups of prompts as units if there are any.
        resamples: The number of permutations.
        seed: The seed of the permutations.

    Raises:
        OptionError: There are fewer than three conditions, one does not exist, or ``compare`` refuses the options.
    """
    if not isinstance(measured, (Result, Evaluation)):
        raise OptionError(f"measured is of type {type(measured).__name__}: give a result of ma.run or ma.evaluate")
    names = [conditions] if isinstance(conditions, str) else list(conditions)
    if len(set(names)) < 3 or len(set(names)) != len(names):
        raise OptionError(f"conditions={names}: give at least three names, each once, in the order of their dose")
    if unknown := [name for name in names if name not in measured.conditions]:
        there = ", ".join(map(repr, measured.conditions))
        raise OptionError(f"there is no condition {unknown[0]!r}; the conditions are {there}")
    if isinstance(measured, Evaluation):
        units = units_of(measured, unit)
        return trend_of(np.stack([units.means(measured.right(n).mean(1)) for n in names], 1), resamples, seed)
    if BASELINE in names:
        raise OptionError('"baseline" has no change from itself; name the other conditions, in the order of their dose')
    asked = [Contrast(measured, name, quantity=quantity, segment=segment, unit=unit) for name in names]
    each = [what_is_tested(one, layer).values for one in asked]
    return trend_of(np.stack([np.nanmean(one, 1) for one in each], 1), resamples, seed)
