"""Conditions: what is done to a prompt's tokens before the model reads them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

from mechattn.errors import ConditionError, OptionError
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.sequences import Sequence, insert
from mechattn.prompts.templates import TokenizedModel, require_tokenizer, tokenize

Place = Literal["before_question", "start", "before_answer", "random"]


@runtime_checkable
class Condition(Protocol):
    """Turns a prompt into the sequence that the model reads; the same seed and prompt give the same sequence."""

    def apply(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> Sequence: ...


@dataclass(frozen=True)
class Baseline:
    """The prompt as it is."""

    def apply(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> Sequence:
        """The prompt's own tokens."""
        return tokenize(prompt, model)


@dataclass(frozen=True)
class MeaninglessTokens:
    """A run of one repeated text, ``count`` tokens long, put into the prompt (arXiv:2510.01032: 55 × "/").

    Args:
        text: What is repeated.
        count: How many *tokens* are inserted, at least 1.
        place: "before_question"; "start" (after BOS, before everything else); "before_answer" (at the end where there
            is no answer); "random" (one run at a token boundary inside the question, drawn for each prompt).
        separator: What stands between two repetitions.
    """

    text: str = "/"
    count: int = 55
    place: Place = "before_question"
    separator: str = " "

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or isinstance(self.count, bool) or not isinstance(self.count, int):
            raise OptionError(f"text={self.text!r}, count={self.count!r}: give a text and a whole number of tokens")
        if not self.text:
            raise OptionError('text="": give the text that is to be repeated, "/" for example')
        if self.count < 1:
            raise OptionError(f"count={self.count}: insert at least one token; the baseline is always run beside it")
        if self.place not in get_args(Place):
            raise OptionError(f"place={self.place!r}: choose one of {', '.join(map(repr, get_args(Place)))}")

    def apply(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> Sequence:
        """The prompt's tokens with the run inserted on token ids.

        Raises:
            ConditionError: ``count`` tokens are no whole number of repetitions, or the place doesn't exist here.
        """
        sequence = tokenize(prompt, model)
        return insert(sequence, self.filler(model), _position(self.place, sequence, prompt, seed))

    def filler(self, model: TokenizedModel) -> list[int]:
        """The token ids of the run: the most repetitions that give exactly ``count`` tokens."""
        tokenizer = require_tokenizer(model)

        def encode(repetitions: int) -> list[int]:
            text = self.separator.join([self.text] * repetitions)
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        lengths: dict[int, int] = {}
        low, high = 1, self.count + 1
        while low < high:  # the length grows with the repetitions: find the first that is long enough
            middle = (low + high) // 2
            lengths[middle] = len(encode(middle))
            low, high = (middle + 1, high) if lengths[middle] < self.count else (low, middle)
        tokens = encode(low)
        if len(tokens) != self.count:
            pieces = [tokenizer.decode([token]) for token in encode(2)]
            near = sorted({len(encode(max(1, low - 1))), len(tokens)})
            raise ConditionError(
                f"{self.count} tokens are no whole number of {self.text!r}: in this tokenizer two of them, separated "
                f"by {self.separator!r}, become {pieces}. Use count={' or '.join(map(str, near))}, or another separator"
            )
        return tokens


def _position(place: Place, sequence: Sequence, prompt: Prompt, seed: int) -> int:
    """The position before which the run is put."""
    if place == "start":
        return int(sequence.of_segment("bos")[0])
    segment = "answer" if place == "before_answer" else "question"
    where = sequence.of_segment(segment).nonzero().flatten().tolist()
    if place == "before_answer":
        return where[0] if where else len(sequence)
    if not where:
        raise ConditionError(f'prompt {prompt.id} ("{prompt.excerpt}") has no question token to insert before')
    if place == "before_question":
        return where[0]
    if len(where) < 2:
        raise ConditionError(
            f'prompt {prompt.id} ("{prompt.excerpt}") has one question token only: place="random" needs a boundary '
            "between two"
        )
    return random.Random(f"place {seed} {prompt.id}").choice(where[1:])
