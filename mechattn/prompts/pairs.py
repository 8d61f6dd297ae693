"""Generated pairs of prompts, each with another version that calls for another answer."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from mechattn.errors import PromptError, check_choice
from mechattn.prompts.datasets import LONGEST, SHORTEST, check_limit, repeated_random
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.tokenization import TokenizedModel, own_bos, require_tokenizer

_SOURCES = ("ioi", "greater-than", "repeated-random")
_SCENES = (
    ("Then {0} and {1} went to the {2}.", "{3} gave a {4} to"),
    ("After lunch {0} and {1} were at the {2}, and", "{3} handed a {4} to"),
    ("When {0} and {1} met in the {2},", "{3} offered a {4} to"),
)
_NAMES = (
    "Tom", "Ben", "Omar", "Luca", "Ravi", "Sam", "Noah", "Ivan", "Hugo", "Eli", "Adam", "Finn", "Anna", "Mia", "Sara",
    "Lena", "Zoe", "Ines", "Ruth", "Tara", "Nora", "Emma", "Yuki", "Leila",
)  # fmt: skip
_PLACES = ("store", "park", "school", "garden", "station", "office", "market", "library")
_THINGS = ("book", "drink", "letter", "ball", "key", "ring", "basket", "ticket")
_EVENTS = ("war", "journey", "strike", "voyage", "project", "dispute", "reign", "trial")
_FEWEST_WORDS = 6


def pairs(
    model: TokenizedModel,
    source: str,
    limit: int = 64,
    *,
    span: tuple[int, int] = (SHORTEST, LONGEST),
    seed: int = 0,
) -> list[Prompt]:
    """Make pairs of prompts: each has a ``counterpart`` of as many tokens, an answer, and the counterpart's answer.

    "ioi", indirect objects: "Then Anna and Tom went to the store. Tom gave a ring to" Anna; in the other version Anna
    gives it to Tom. "greater-than": "The war lasted from the year 1732 to the year 17" and a year after it; in the
    other version the war begins late, and the answer is a year before it. "repeated-random": a span of random
    tokens and the beginning of its repetition, whose next token is the answer; in the other version the tokens of the
    first copy are in another order. Names and numbers are as many tokens as most others in this
    tokenizer.

    Args:
        model: The model, for its tokenizer and vocabulary.
        source: "ioi", "greater-than" or "repeated-random".
        limit: The number of pairs.
        span: Of "repeated-random": the shortest and the longest span, in tokens.
        seed: The seed of the draws.

    Raises:
        OptionError: There is no such source.
        PromptError: Too few names or numbers have as many tokens as others; the message names the rest.

    Source:
        arXiv:2211.00593 (ioi), arXiv:2305.00586 (greater-than); the templates are ours.
    """
    check_choice(_SOURCES, source=source)
    check_limit(limit)
    draws = [random.Random(f"{source} {seed} {index}") for index in range(limit)]
    if source == "repeated-random":
        prompts = repeated_random(model, limit, span=span, seed=seed)
        return [_shuffled(model, prompt, draw) for prompt, draw in zip(prompts, draws, strict=True)]
    tokenizer = require_tokenizer(model)
    if source == "ioi":
        names = _of_usual_length(tokenizer, [f" {name}" for name in _NAMES])
        texts = [_indirect_object(draw, names) for draw in draws]
    else:
        numbers = _of_usual_length(tokenizer, [f"{number:02}" for number in range(12, 88)])
        texts = [_greater_than(draw, numbers) for draw in draws]

    prompts = [
        Prompt(id=str(index), template="joined", **fields) for index, fields in enumerate(texts)
    ]
    _check_lengths(tokenizer, prompts)
    return prompts


def _indirect_object(draw: random.Random, names: Sequence[str]) -> dict[str, Any]:
    receiver, giver = (name.strip() for name in draw.sample(list(names), 2))
    scene, act = _SCENES[draw.randrange(len(_SCENES))]
    place = draw.choice(_PLACES)
    thing = draw.choice(_THINGS)
    first_name, second_name = draw.sample([receiver, giver], 2)
    beginning = scene.format(first_name, second_name, place)
    return {
        "question": f"{beginning} {act.format(0, 0, 0, giver, thing)}",
        "counterpart": f"{beginning} {act.format(0, 0, 0, receiver, thing)}",
        "answer": f" {receiver}",
        "other_answer": f" {giver}",
    }


def _greater_than(draw: random.Random, numbers: Sequence[str]) -> dict[str, Any]:
    early = draw.choice([number for number in numbers if 20 < int(number) < 45])
    late = draw.choice([number for number in numbers if 55 < int(number) < 80])
    before_early = draw.choice([number for number in numbers if number[0] < early[0]])
    century = draw.randrange(11, 20)
    event = draw.choice(_EVENTS)
    after_late = draw.choice([number for number in numbers if number[0] > late[0]])
    return {
        "question": f"The {event} lasted from the year {century}{late} to the year {century}",
        "counterpart": f"The {event} lasted from the year {century}{early} to the year {century}",
        "answer": after_late,
        "other_answer": before_early,
    }


def _shuffled(model: TokenizedModel, prompt: Prompt, draw: random.Random) -> Prompt:
    """A span and the beginning of its repetition; in the other version the first copy is in another order."""
    bos = [] if own_bos(model) is None else [prompt.tokens[0]]
    repeated = list(prompt.tokens[len(bos) :])
    span = repeated[: len(repeated) // 2]
    cut = draw.randrange(1, len(span))
    last_token = span[cut - 1]
    answer = span[cut]

    # The last token must have a successor in the other order too, and another one.
    other_order = draw.sample(span, len(span))
    other_answer = _successor(other_order, last_token)
    while other_answer is None or other_answer == answer:
        other_order = draw.sample(span, len(span))
        other_answer = _successor(other_order, last_token)
    return Prompt(
        tokens=(*bos, *span, *span[:cut]),
        counterpart=(*bos, *other_order, *span[:cut]),
        answer_tokens=(answer,),
        other_answer=(other_answer,),
        id=prompt.id,
    )


def _successor(tokens: Sequence[int], token: int) -> int | None:
    """What follows a token the first time; None if it is the last."""
    position = tokens.index(token) + 1
    return tokens[position] if position < len(tokens) else None


def _of_usual_length(tokenizer: Any, words: Sequence[str]) -> list[str]:
    """The words that are as many tokens as most others."""
    sizes = {word: len(tokenizer(word, add_special_tokens=False)["input_ids"]) for word in words}
    usual_size = Counter(sizes.values()).most_common(1)[0][0]
    usual = [word for word in words if sizes[word] == usual_size]
    if len(usual) < _FEWEST_WORDS:
        rest = ", ".join(
            f"{word.strip()!r} ({size})" for word, size in sizes.items() if size != usual_size
        )
        raise PromptError(
            f"only {len(usual)} words are {usual_size} tokens with this tokenizer; other numbers of tokens: {rest}"
        )
    return usual


def _check_lengths(tokenizer: Any, prompts: Sequence[Prompt]) -> None:
    """Refuse versions of other lengths, which a tokenizer that looks at neighbouring words could make."""
    for prompt in prompts:
        size = len(tokenizer(prompt.question)["input_ids"])
        other_size = len(tokenizer(prompt.counterpart)["input_ids"])
        if size != other_size:
            raise PromptError(
                f'the versions of prompt {prompt.id} are {size} and {other_size} tokens: "{prompt.question}" and '
                f'"{prompt.counterpart}"'
            )
