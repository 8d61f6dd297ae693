"""Tests whether answers after a transplant match the prompt's own answer or its donor's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.errors import OptionError
from mechattn.evaluation.answer_units import share_interval, units_of
from mechattn.stats.units import Unit

if TYPE_CHECKING:
    from mechattn.evaluation.evaluation import Evaluation


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
    share = share_interval(followed[:, None], units, level)
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
