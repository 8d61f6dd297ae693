"""Whose answers a condition gives after a transplant: a problem's own, or those of its source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.errors import OptionError
from mechattn.stats.accuracy import share_interval
from mechattn.stats.units import Unit

if TYPE_CHECKING:
    from mechattn.evaluation.evaluation import Evaluation


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
            is_equal = [answers[prompt] == answer for answer in unrelated]
            by_chance.append(np.mean(is_equal))

    units = evaluation._restricted_to(distinct)._units(unit)
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
    evaluation.right(condition)  # refuses where one is missing

    answers = evaluation._first_answers(condition)
    return {prompt: answers[prompt].answer for prompt in evaluation._problems()}
