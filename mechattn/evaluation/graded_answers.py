"""A graded answer, its line in a file, and what to know of many before reading their accuracy."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mechattn.axes import BASELINE

_MANY = 0.1  # the share of cut-off or unread answers above which the table says so


@dataclass(frozen=True)
class GradedAnswer:
    """A generated and graded answer.

    Args:
        prompt: The prompt's id.
        condition: The condition.
        sample: The index of the answer among several to the same question.
        text: The generated text.
        tokens: Its token ids.
        answer: The final answer; None if none was found.
        solution: The reference.
        right: Whether the final answer equals the reference.
        finished: Whether the model ended the answer before the limit.
        logprob: Mean log-probability of its tokens, in nats, at temperature 1.
        read: A digest of the token ids that the model read.
    """

    prompt: str
    condition: str
    sample: int
    text: str
    tokens: tuple[int, ...]
    answer: str | None
    solution: str
    right: bool
    finished: bool
    logprob: float = float("nan")
    read: str = ""


def cautions(answers_by_condition: Mapping[str, Sequence[GradedAnswer]]) -> list[str]:
    """The sentences of :attr:`Evaluation.cautions`."""
    cut_off = []
    unread = []
    for name, answers in answers_by_condition.items():
        finished = [answer for answer in answers if answer.finished]
        cut_off_count = len(answers) - len(finished)
        unread_count = sum(answer.answer is None for answer in finished)
        if cut_off_count > _MANY * len(answers):
            cut_off.append(f"{cut_off_count} of {len(answers)} under {name!r}")
        if unread_count > _MANY * len(answers):
            unread.append(f"{unread_count} of {len(answers)} under {name!r}")

    sentences = []
    if cut_off:
        sentences.append(
            f"Careful: many answers were cut off and count as wrong ({', '.join(cut_off)}). "
            "Allow more new_tokens before you compare."
        )

    if unread:
        sentences.append(
            f"Careful: many answers end without a final answer ({', '.join(unread)}). Does the "
            "prompt ask for a mark, such as \\boxed{…}?"
        )

    right = [answer.right for answer in answers_by_condition.get(BASELINE, ())]
    if len(right) > 1 and all(right):
        sentences.append("Careful: every answer of the baseline is right; it can only fall.")
    if len(right) > 1 and not any(right):
        sentences.append("Careful: no answer of the baseline is right; it can only rise.")
    return sentences


def as_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """One JSON object per line."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def is_replaceable(path: Path) -> bool:
    """Whether the path is free, or holds an evaluation, judged by its first line."""
    try:
        with open(path, "rb") as stored:
            first = stored.readline()
        return not first or set(json.loads(first)) == {"provenance"}
    except FileNotFoundError:
        return True
    except (OSError, ValueError, TypeError, RecursionError):
        return False
