"""The units of an evaluation, problems or their groups; and over them mediation, and whose answers others follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.axes import BASELINE
from mechattn.errors import OptionError
from mechattn.stats.accuracy import deviation, paired_accuracy, share_difference, share_interval
from mechattn.stats.intervals import FEWEST
from mechattn.stats.paired import paired
from mechattn.stats.resolution import detectable_size
from mechattn.stats.units import Unit, Units, check_unit

if TYPE_CHECKING:
    import pandas as pd

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


def compared(evaluation: Evaluation, condition: str, to: str, other: Evaluation, unit: Unit) -> dict[str, float]:
    """See :meth:`mechattn.evaluation.evaluation.Evaluation.compare`, which explains the arguments."""
    if evaluation._problems() != other._problems():
        raise OptionError("the two evaluations have different problems, but a comparison is by problem")
    first, second = evaluation.right(condition), other.right(to)
    place = {prompt: i for i, prompt in enumerate(other._problems())}
    second = second[[place[prompt] for prompt in evaluation._problems()]]  # a file may hold them in another order
    units = units_of(evaluation, unit)
    if units.of is None and first.shape[1] == second.shape[1] == 1:
        return asdict(paired_accuracy(first[:, 0], second[:, 0]))
    d = units.means(first.mean(1) - second.mean(1))
    made, interval = paired(d), share_difference(d)
    one = first.shape[1] == second.shape[1] == 1
    return {
        "difference": float(made.difference),
        "low": float(interval.low),
        "high": float(interval.high),
        "p": float(made.p_flip),
        **({"only_first": int((first & ~second).sum()), "only_second": int((~first & second).sum())} if one else {}),
        "n": made.n,
        "detectable": deviation(d) * detectable_size(len(d)),
    }


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
    import pandas as pd

    units = units_of(evaluation, unit)
    base, whole = (units.means(evaluation.right(name).mean(1)) for name in (BASELINE, total))
    draws = np.random.default_rng(seed).integers(0, len(base), (resamples, len(base)))
    all_of_it = (whole - base)[draws].mean(1)
    whole_change = paired(whole - base, level=level)
    divided = not whole_change.low <= 0 <= whole_change.high
    rows = []
    for path, name in through.items():
        part = units.means(evaluation.right(name).mean(1)) - base
        share = low = high = float("nan")
        if divided:
            share = float(part.mean() / whole_change.difference)
            drawn = part[draws].mean(1)[all_of_it != 0] / all_of_it[all_of_it != 0]
            low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
        change = paired(part, level=level)
        rows.append(
            {
                "path": path,
                "condition": name,
                "change": float(change.difference),
                "change_low": float(change.low),
                "change_high": float(change.high),
                "share": share,
                "low": float(low),
                "high": float(high),
            }
        )
    made = pd.DataFrame(rows)
    ends = {"low": float(whole_change.low), "high": float(whole_change.high)}
    made.attrs = {"total": float(whole_change.difference), **ends, "of": total, "n": len(base), "unit": units.unit}
    return made


def follows(
    evaluation: Evaluation, condition: str, donors: Mapping[str, str], without: str, level: float, unit: Unit
) -> dict[str, Any]:
    """See :meth:`mechattn.evaluation.evaluation.Evaluation.follows`, which explains the arguments."""
    if evaluation.samples > 1:
        raise OptionError(f"{evaluation.samples} answers per problem: follows needs one answer per problem (samples=1)")
    own, made = (_answers(evaluation, name) for name in (without, condition))
    strangers = [prompt for prompt in own if donors.get(prompt, prompt) not in own]
    if strangers:
        raise OptionError(
            f"the donor of prompt {strangers[0]} is not among the answered problems; give "
            "KeysValues.from_other_prompts().donors of the same prompts"
        )
    apart = [p for p in own if None not in (own[p], own[donors.get(p, p)]) and own[p] != own[donors.get(p, p)]]
    if not apart:
        raise OptionError(
            f"under {without!r} no prompt's answer differs from its donor's, so they cannot be distinguished"
        )
    units = units_of(evaluation._of(apart), unit)
    followed = np.array([made[p] == own[donors[p]] for p in apart], float)
    others = [[own[q] for q in own if q not in (p, donors[p]) and own[q] is not None] for p in apart]
    chance = [
        float(np.mean([made[p] == answer for answer in some])) if some else np.nan for p, some in zip(apart, others)
    ]
    share = share_interval(units.means(followed), level)
    return {
        "condition": condition,
        "followed": float(share.estimate),
        "low": float(share.low),
        "high": float(share.high),
        "kept": float(np.mean([made[p] == own[p] for p in apart])),
        "by_chance": float(np.nanmean(chance)) if len(own) > 2 else float("nan"),
        "n": units.n,
        "alike": len(own) - len(apart),
    }


def _answers(evaluation: Evaluation, condition: str) -> dict[str, str | None]:
    """The final answer to each problem under a condition."""
    evaluation.right(condition)  # raises an error if answers are missing
    return {a.prompt: a.answer for a in evaluation.answers if a.condition == condition}
