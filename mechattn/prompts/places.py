"""Where tokens are inserted into a prompt."""

from __future__ import annotations

import random
from typing import Any, Literal, get_args

from mechattn.errors import ConditionError, OptionError
from mechattn.prompts.prompt import MOST, Prompt
from mechattn.prompts.sequences import Sequence

Place = Literal["before_question", "start", "middle", "after_question", "before_answer", "random"]


def check_run(count: int, place: str) -> None:
    if isinstance(count, bool) or not isinstance(count, int):
        raise OptionError(f"count={count!r}: give a whole number of tokens")
    if count < 1:
        raise OptionError(f"count={count}: insert at least one token; the baseline is always run too")
    if count > MOST:
        raise OptionError(f"count={count}: insert at most {MOST:,} tokens")
    check_place(place)


def check_place(place: str) -> None:
    if place not in get_args(Place):
        raise OptionError(f"place={place!r}: choose one of {', '.join(map(repr, get_args(Place)))}")


def position(place: Place, sequence: Sequence, prompt: Prompt, seed: int) -> int:
    """The position before which the filler is inserted."""
    if place == "start":
        return int(sequence.of_segment("bos")[0])
    segment = "answer" if place == "before_answer" else "question"
    where = sequence.of_segment(segment).nonzero().flatten().tolist()
    if place == "before_answer":
        return where[0] if where else len(sequence)
    if not where:
        raise ConditionError(f'prompt {prompt.id} ("{prompt.excerpt}") has no question token to insert at')
    if place in ("before_question", "after_question"):
        return where[0] if place == "before_question" else where[-1] + 1
    if len(where) < 2:
        raise ConditionError(
            f'prompt {prompt.id} ("{prompt.excerpt}") has only one question token:  place={place!r} needs a boundary '
            "between two"
        )
    if place == "middle":
        return where[len(where) // 2]
    return random.Random(f"place {seed} {prompt.id}").choice(where[1:])


def behind(marker: str, sequence: Sequence, prompt: Prompt, tokenizer: Any) -> int:
    """The position after the first token that completes a text, found by bisection."""
    tokens = sequence.tokens.tolist()
    if marker not in tokenizer.decode(tokens):
        raise ConditionError(
            f'prompt {prompt.id} ("{prompt.excerpt}") does not contain after={marker!r}; give a text that is in every '
            "prompt as the model reads it, or a place"
        )
    low, high = 1, len(tokens)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if marker in tokenizer.decode(tokens[:middle]) else (middle + 1, high)
    return low
