"""The units of an evaluation, problems or groups; over them mediation, whose answers others follow,
and trends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """See :meth:`mechattn.evaluation.evaluation.Evaluation.compare`, which explains the
    arguments."""
    if evaluation._problems() != other._problems():
        raise OptionError(
            "the two evaluations have different problems, but a comparison is by problem"
        )
    right_under_first = evaluation.right(condition)
    # A file may hold the problems in another order.
    right_under_second = other._of(list(evaluation._problems())).right(to)

    units = units_of(evaluation, unit)
    is_single_answer = right_under_first.shape[1] == right_under_second.shape[1] == 1
    if units.of is None and is_single_answer:
        return asdict(paired_accuracy(right_under_first[:, 0], right_under_second[:, 0]))

    differences = units.means(right_under_first.mean(1) - right_under_second.mean(1))
    test = paired(differences, bootstrap_ends=False)
    interval = share_difference(differences)
    figures: dict[str, float] = {
        "difference": float(test.difference),
        "low": float(interval.low),
        "high": float(interval.high),
        "p": float(test.p_flip),
    }
    if is_single_answer:
        figures["only_first"] = int((right_under_first & ~right_under_second).sum())
        figures["only_second"] = int((~right_under_first & right_under_second).sum())
    figures["n"] = test.n
    figures["detectable"] = deviation(differences) * detectable_size(len(differences))
    return figures


def mediation(
    evaluation: Evaluation,
    total: str,
    through: Mapping[str, str],
    resamples: int,
    seed: int,
    level: float,
    unit: Unit,
) -> pd.DataFrame:
    """See :meth:`mechattn.evaluation.evaluation.Evaluation.mediation`, which explains the
    arguments."""
    units = units_of(evaluation, unit)
    baseline = units.means(evaluation.right(BASELINE).mean(1))
    total_change = units.means(evaluation.right(total).mean(1)) - baseline
    total_interval = share_difference(total_change, level)
    is_divided = not total_interval.low <= 0 <= total_interval.high

    # The same resamples for the whole and for each path, so that a share is a ratio within one.
    generator = np.random.default_rng(seed)
    draws = generator.integers(0, len(baseline), (resamples, len(baseline)))
    drawn_totals = total_change[draws].mean(1)
    is_defined = drawn_totals != 0
    tail = (1 - level) / 2

    rows = []
    for path, name in through.items():
        path_change = units.means(evaluation.right(name).mean(1)) - baseline
        path_interval = share_difference(path_change, level)
        row = {
            "path": path,
            "condition": name,
            "change": float(path_interval.estimate),
            "change_low": float(path_interval.low),
            "change_high": float(path_interval.high),
            "share": np.nan,
            "share_low": np.nan,
            "share_high": np.nan,
        }
        if is_divided:
            drawn_changes = path_change[draws].mean(1)
            drawn_shares = drawn_changes[is_defined] / drawn_totals[is_defined]
            row["share"] = float(path_change.mean() / total_interval.estimate)
            row["share_low"] = float(np.quantile(drawn_shares, tail))
            row["share_high"] = float(np.quantile(drawn_shares, 1 - tail))
        rows.append(row)

    table = pd.DataFrame(rows)
    table.attrs = {
        "total": float(total_interval.estimate),
        "low": float(total_interval.low),
        "high": float(total_interval.high),
        "of": total,
        "n": len(baseline),
        "unit": units.unit,
    }
    return table


def follows(
    evaluation: Evaluation,
    condition: str,
    sources: Mapping[str, str],
    without: str,
    level: float,
    unit: Unit,
) -> dict[str, Any]:
    """See :meth:`mechattn.evaluation.evaluation.Evaluation.follows`, which explains the
    arguments."""
    if evaluation.samples > 1:
        raise OptionError(
            f"{evaluation.samples} answers per problem: follows needs one answer per problem "
            "(samples=1)"
        )
    own_answers = _answers_under(evaluation, without)
    answers = _answers_under(evaluation, condition)
    strangers = [prompt for prompt in own_answers if sources.get(prompt, prompt) not in own_answers]
    if strangers:
        raise OptionError(
            f"the source of prompt {strangers[0]} is not among the answered problems; give "
            "KeysValues.from_other_prompts().sources of the same prompts"
        )

    distinct = []  # the prompts whose own answer and whose source's can be told apart
    for prompt, own_answer in own_answers.items():
        source_answer = own_answers[sources.get(prompt, prompt)]
        if None not in (own_answer, source_answer) and own_answer != source_answer:
            distinct.append(prompt)
    if not distinct:
        raise OptionError(
            f"under {without!r} no prompt's answer differs from its source's, so they cannot be "
            "distinguished"
        )

    followed = [answers[prompt] == own_answers[sources[prompt]] for prompt in distinct]
    unchanged = [answers[prompt] == own_answers[prompt] for prompt in distinct]
    by_chance = []  # the share of the other problems' answers that this one equals
    for prompt in distinct:
        unrelated = [
            answer
            for problem, answer in own_answers.items()
            if problem not in (prompt, sources[prompt]) and answer is not None
        ]
        if unrelated:
            by_chance.append(np.mean([answers[prompt] == answer for answer in unrelated]))

    units = units_of(evaluation._of(distinct), unit)
    share = share_interval(units.means(np.array(followed, float)), level)
    return {
        "condition": condition,
        "followed": float(share.estimate),
        "low": float(share.low),
        "high": float(share.high),
        "kept": float(np.mean(unchanged)),
        "by_chance": float(np.mean(by_chance)) if by_chance else float("nan"),
        "n": units.n,
        "alike": len(own_answers) - len(distinct),
    }


def _answers_under(evaluation: Evaluation, condition: str) -> dict[str, str | None]:
    """The final answer to each problem under a condition; an error where one is missing."""
    evaluation.right(condition)
    answers = {a.prompt: a.answer for a in evaluation.answers if a.condition == condition}
    return {prompt: answers[prompt] for prompt in evaluation._problems()}


def trend(
    measured: Result | Evaluation,
    conditions: Sequence[str],
    quantity: str = "received",
    segment: str | None = "question",
    *,
    layer: int | None = None,
    unit: Unit = "auto",
    resamples: int = 9999,
    seed: int = 0,
) -> Trend:
    """Test whether a quantity, or accuracy, rises or falls over ordered conditions, such as a sweep
    of counts.

    Page's test over prompts, two-sided, by permutations of each prompt's values, with the mean of
    Spearman's ρ within prompts. For a result it tests each prompt's mean over heads of the change
    from the baseline *minus that of the null*, because more inserted tokens mean less attention to
    each by definition. For an evaluation it tests each problem's share of right answers; the
    baseline is a dose of its own if named.

    Args:
        measured: A result, or an evaluation.
        conditions: At least three, in the order of their dose; ``list(ma.sweep(…))`` gives the
            names of a sweep.
        quantity: For a result: the quantity, as for ``compare``.
        segment: For a result: the segment.
        layer: For a result: one layer; all by default.
        unit: "auto" uses groups of prompts as units if there are any.
        resamples: The number of permutations.
        seed: The seed of the permutations.

    Raises:
        OptionError: There are fewer than three conditions, one does not exist, or ``compare``
            refuses the options.
    """
    if not isinstance(measured, Result) and not hasattr(measured, "answers"):
        raise OptionError(
            f"measured is of type {type(measured).__name__}: give a result of ma.run or ma.evaluate"
        )
    names = list(conditions)
    if isinstance(conditions, str):
        names = [conditions]
    if len(set(names)) < 3 or len(set(names)) != len(names):
        raise OptionError(
            f"conditions={names}: give at least three names, each once, in the order of their dose"
        )
    unknown = [name for name in names if name not in measured.conditions]
    if unknown:
        have = ", ".join(map(repr, measured.conditions))
        raise OptionError(f"there is no condition {unknown[0]!r}; the conditions are {have}")

    values = []  # of each condition [unit]
    if isinstance(measured, Result):
        if BASELINE in names:
            raise OptionError(
                '"baseline" has no change from itself; name the other conditions, in the order of '
                "their dose"
            )
        for name in names:
            contrast = Contrast(measured, name, quantity=quantity, segment=segment, unit=unit)
            values.append(np.nanmean(what_is_tested(contrast, layer).values, 1))
    else:
        units = units_of(measured, unit)
        for name in names:
            values.append(units.means(measured.right(name).mean(1)))
    return trend_of(np.stack(values, 1), resamples, seed)
