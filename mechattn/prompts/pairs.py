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
        make, words = _indirect_object, _alike(tokenizer, [f" {name}" for name in _NAMES])
    else:
        make, words = _greater_than, _alike(tokenizer, [f"{n:02}" for n in range(12, 88)])
    made = [
        Prompt(id=str(index), template="joined", **make(draw, words))
        for index, draw in enumerate(draws)
    ]
    _check_lengths(tokenizer, made)
    return made


def _indirect_object(draw: random.Random, words: Sequence[str]) -> dict[str, Any]:
    one, two = (name.strip() for name in draw.sample(list(words), 2))
    scene, act = _SCENES[draw.randrange(len(_SCENES))]
    place, thing = draw.choice(_PLACES), draw.choice(_THINGS)
    first = scene.format(*draw.sample([one, two], 2), place)
    question, counterpart = (f"{first} {act.format(0, 0, 0, giver, thing)}" for giver in (two, one))
    return {
        "question": question,
        "counterpart": counterpart,
        "answer": f" {one}",
        "other_answer": f" {two}",
    }


def _greater_than(draw: random.Random, words: Sequence[str]) -> dict[str, Any]:
    start = draw.choice([number for number in words if 20 < int(number) < 45])
    end = draw.choice([number for number in words if 55 < int(number) < 80])
    lower = draw.choice([number for number in words if number[0] < start[0]])
    century, event = draw.randrange(11, 20), draw.choice(_EVENTS)
    lasted = f"The {event} lasted from the year {century}"
    question, counterpart = (f"{lasted}{year} to the year {century}" for year in (end, start))
    after = draw.choice([number for number in words if number[0] > end[0]])
    return {
        "question": question,
        "counterpart": counterpart,
        "answer": after,
        "other_answer": lower,
    }


def _shuffled(model: TokenizedModel, prompt: Prompt, draw: random.Random) -> Prompt:
    """A span and the beginning of its repetition; in the other version the first copy is in another order."""
    bos = [] if own_bos(model) is None else [prompt.tokens[0]]
    both = list(prompt.tokens[len(bos) :])
    span = both[: len(both) // 2]
    cut = draw.randrange(1, len(span))
    other = span
    while span[cut - 1] == other[-1] or other[(at := other.index(span[cut - 1])) + 1] == span[cut]:
        other = draw.sample(span, len(span))
    return Prompt(
        tokens=(*bos, *span, *span[:cut]),
        counterpart=(*bos, *other, *span[:cut]),
        answer_tokens=(span[cut],),
        other_answer=(other[at + 1],),
        id=prompt.id,
    )


def _alike(tokenizer: Any, words: Sequence[str]) -> list[str]:
    """The words that are as many tokens as most others."""
    sizes = {word: len(tokenizer(word, add_special_tokens=False)["input_ids"]) for word in words}
    usual = Counter(sizes.values()).most_common(1)[0][0]
    some = [word for word in words if sizes[word] == usual]
    if len(some) < _FEWEST_WORDS:
        rest = ", ".join(
            f"{word.strip()!r} ({size})" for word, size in sizes.items() if size != usual
        )
        raise PromptError(
            f"only {len(some)} words are {usual} tokens with this tokenizer; other numbers of tokens: {rest}"
        )
    return some


def _check_lengths(tokenizer: Any, made: Sequence[Prompt]) -> None:
    """Refuse versions of other lengths, which a tokenizer that looks at neighbouring words could make."""
    for prompt in made:
        sizes = [
            len(tokenizer(text)["input_ids"]) for text in (prompt.question, prompt.counterpart)
        ]
        if sizes[0] != sizes[1]:
            raise PromptError(
                f'the versions of prompt {prompt.id} are {sizes[0]} and {sizes[1]} tokens: "{prompt.question}" and '
                f'"{prompt.counterpart}"'
            )
