"""The units of an evaluation, problems or groups; over them mediation, whose answers others follow, and trends."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from mechattn.axes import BASELINE
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.tested import what_is_tested
from mechattn.errors import OptionError
from mechattn.results.result import Result
from mechattn.stats.accuracy import deviation, paired_accuracy, share_difference, share_interval
from mechattn.stats.intervals import FEWEST
from mechattn.stats.paired import paired
from mechattn.stats.resolution import detectable_size
from mechattn.stats.trend import Trend
from mechattn.stats.trend import trend as trend_of
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


def compared(
    evaluation: Evaluation, condition: str, to: str, other: Evaluation, unit: Unit
) -> dict[str, float]:
    """See :meth:`mechattn.evaluation.evaluation.Evaluation.compare`, which explains the arguments."""
    if evaluation._problems() != other._problems():
        raise OptionError(
            "the two evaluations have different problems, but a comparison is by problem"
        )
    first, second = evaluation.right(condition), other.right(to)
    place = {prompt: i for i, prompt in enumerate(other._problems())}
    second = second[
        [place[prompt] for prompt in evaluation._problems()]
    ]  # a file may hold them in another order
    units = units_of(evaluation, unit)
    if units.of is None and first.shape[1] == second.shape[1] == 1:
        return asdict(paired_accuracy(first[:, 0], second[:, 0]))
    d = units.means(first.mean(1) - second.mean(1))
    made, interval = paired(d, bootstrap_ends=False), share_difference(d)
    ends = {
        "difference": float(made.difference),
        "low": float(interval.low),
        "high": float(interval.high),
    }
    found = ends | {"p": float(made.p_flip)}
    if first.shape[1] == second.shape[1] == 1:
        found |= {
            "only_first": int((first & ~second).sum()),
            "only_second": int((~first & second).sum()),
        }
    return found | {"n": made.n, "detectable": deviation(d) * detectable_size(len(d))}


def mediation(
    evaluation: Evaluation,
    total: str,
    through: Mapping[str, str],
    resamples: int,
    seed: int,
    level: float,
    unit: Unit,
) -> pd.DataFrame:
    """See :meth:`mechattn.evaluation.evaluation.Evaluation.mediation`, which explains the arguments."""
    units = units_of(evaluation, unit)
    base, whole = (units.means(evaluation.right(name).mean(1)) for name in (BASELINE, total))
    draws = np.random.default_rng(seed).integers(0, len(base), (resamples, len(base)))
    all_of_it = (whole - base)[draws].mean(1)
    whole_change = share_difference(whole - base, level)
    divided = not whole_change.low <= 0 <= whole_change.high
    rows = []
    for path, name in through.items():
        part = units.means(evaluation.right(name).mean(1)) - base
        share = low = high = float("nan")
        if divided:
            share = float(part.mean() / whole_change.estimate)
            drawn = part[draws].mean(1)[all_of_it != 0] / all_of_it[all_of_it != 0]
            low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
        change = [float(end) for end in share_difference(part, level)]
        rows.append([path, name, *change, share, float(low), float(high)])
    columns = [
        "path",
        "condition",
        "change",
        "change_low",
        "change_high",
        "share",
        "share_low",
        "share_high",
    ]
    made = pd.DataFrame(rows, columns=columns)
    ends = {"low": float(whole_change.low), "high": float(whole_change.high)}
    made.attrs = {
        "total": float(whole_change.estimate),
        **ends,
        "of": total,
        "n": len(base),
        "unit": units.unit,
    }
    return made


def follows(
    evaluation: Evaluation,
    condition: str,
    donors: Mapping[str, str],
    without: str,
    level: float,
    unit: Unit,
) -> dict[str, Any]:
    """See :meth:`mechattn.evaluation.evaluation.Evaluation.follows`, which explains the arguments."""
    if evaluation.samples > 1:
        raise OptionError(
            f"{evaluation.samples} answers per problem: follows needs one answer per problem (samples=1)"
        )
    for name in (without, condition):
        evaluation.right(name)  # raises an error if answers are missing
    each = {(a.prompt, a.condition): a.answer for a in evaluation.answers}
    own, made = (
        {p: each[p, name] for p in evaluation._problems()} for name in (without, condition)
    )
    strangers = [prompt for prompt in own if donors.get(prompt, prompt) not in own]
    if strangers:
        raise OptionError(
            f"the donor of prompt {strangers[0]} is not among the answered problems; give "
            "KeysValues.from_other_prompts().donors of the same prompts"
        )
    apart = [
        p
        for p in own
        if None not in (own[p], own[donors.get(p, p)]) and own[p] != own[donors.get(p, p)]
    ]
    if not apart:
        raise OptionError(
            f"under {without!r} no prompt's answer differs from its donor's, so they cannot be distinguished"
        )
    units = units_of(evaluation._of(apart), unit)
    followed = np.array([made[p] == own[donors[p]] for p in apart], float)
    others = [
        [own[q] for q in own if q not in (p, donors[p]) and own[q] is not None] for p in apart
    ]
    chance = [
        float(np.mean([made[p] == answer for answer in some])) if some else np.nan
        for p, some in zip(apart, others)
    ]
    share = share_interval(units.means(followed), level)
    found = {"followed": float(share.estimate), "low": float(share.low), "high": float(share.high)}
    found |= {"kept": float(np.mean([made[p] == own[p] for p in apart]))}
    found |= {"by_chance": float(np.nanmean(chance)) if len(own) > 2 else float("nan")}
    return {"condition": condition, **found, "n": units.n, "alike": len(own) - len(apart)}


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
    if not isinstance(measured, Result) and not hasattr(measured, "answers"):
        raise OptionError(
            f"measured is of type {type(measured).__name__}: give a result of ma.run or ma.evaluate"
        )
    names = [conditions] if isinstance(conditions, str) else list(conditions)
    if len(set(names)) < 3 or len(set(names)) != len(names):
        raise OptionError(
            f"conditions={names}: give at least three names, each once, in the order of their dose"
        )
    if unknown := [name for name in names if name not in measured.conditions]:
        there = ", ".join(map(repr, measured.conditions))
        raise OptionError(f"there is no condition {unknown[0]!r}; the conditions are {there}")
    if not isinstance(measured, Result):
        units = units_of(measured, unit)
        return trend_of(
            np.stack([units.means(measured.right(n).mean(1)) for n in names], 1), resamples, seed
        )
    if BASELINE in names:
        raise OptionError(
            '"baseline" has no change from itself; name the other conditions, in the order of their dose'
        )
    asked = [
        Contrast(measured, name, quantity=quantity, segment=segment, unit=unit) for name in names
    ]
    each = [what_is_tested(one, layer).values for one in asked]
    return trend_of(np.stack([np.nanmean(one, 1) for one in each], 1), resamples, seed)
