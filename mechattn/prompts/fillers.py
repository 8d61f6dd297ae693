"""Filler as token ids (a repeated text, random tokens, a random sentence), and where it is inserted."""

from __future__ import annotations

import random
from bisect import bisect_right
from typing import Any, Literal

from mechattn.errors import ConditionError, OptionError, check_choice
from mechattn.prompts.prompt import MOST, Prompt
from mechattn.prompts.token_sequences import Sequence

Place = Literal["before_question", "start", "middle", "after_question", "before_answer", "random"]

_MOST = 256  # repetitions per token
_FAR = 10  # tokens away from the requested count
_DETERMINERS = ("the", "a", "every", "this", "that", "one", "another")
_ADJECTIVES = (
    "old", "quiet", "green", "heavy", "small", "strange", "narrow", "warm", "distant", "wooden", "empty", "gentle",
    "broken", "silver", "early", "dusty",
)  # fmt: skip
_NOUNS = (
    "river", "teacher", "window", "garden", "letter", "mountain", "doctor", "bridge", "kitchen", "song", "farmer",
    "lantern", "village", "road", "painter", "cloud", "library", "boat", "neighbour", "horse", "market", "clock",
)  # fmt: skip
_VERBS = (
    "watches", "follows", "remembers", "carries", "paints", "leaves", "finds", "describes", "crosses", "visits",
    "repairs", "admires", "forgets", "hears", "draws", "keeps",
)  # fmt: skip
_PREPOSITIONS = (
    "behind",
    "near",
    "under",
    "beyond",
    "beside",
    "above",
    "across from",
    "in front of",
)
_ADVERBS = ("slowly", "often", "quietly", "never", "always", "gladly", "rarely", "carefully")
_CONJUNCTIONS = ("and", "while", "because", "although", "until", "before")


def repeated(tokenizer: Any, text: str, separator: str, count: int) -> list[int]:
    """The fewest repetitions of a text that give exactly ``count`` tokens."""

    def encode(repetitions: int) -> list[int]:
        return tokenizer(separator.join([text] * repetitions), add_special_tokens=False)[
            "input_ids"
        ]

    low, high = 1, count + 1
    while (
        len(encode(high)) < count and high < _MOST * count
    ):  # a token may hold several repetitions
        high *= 2
    while low < high:  # the length grows with the repetitions: find the first that is long enough
        middle = (low + high) // 2
        low, high = (middle + 1, high) if len(encode(middle)) < count else (low, middle)
    tokens = next(
        (made for made in map(encode, range(low, low + 4)) if len(made) == count), encode(low)
    )
    if len(tokens) != count:
        pieces = [tokenizer.decode([token]) for token in encode(2)]
        near = sorted({len(encode(max(1, low - 1))), len(tokens)})
        raise ConditionError(
            f"{count} tokens are not a whole number of {text!r}: with this tokenizer two of them, separated by "
            f"{separator!r}, become {pieces}. Use count={' or '.join(map(str, near))}, another separator, "
            "or .fitted(model) for the nearest count"
        )
    return tokens


def nearest_count(tokenizer: Any, text: str, separator: str, count: int) -> int:
    """The number of tokens nearest to ``count`` that repetitions can give; the larger if two are as near."""
    for step in range(min(_FAR, count - 1) + 1):
        for near in dict.fromkeys((count + step, count - step)):
            try:
                return len(repeated(tokenizer, text, separator, near))
            except ConditionError:
                continue
    raise ConditionError(
        f"no whole number of {text!r} gives about {count} tokens with this tokenizer; give another text or count"
    )


def random_tokens(tokenizer: Any, size: int, count: int, draw: random.Random) -> list[int]:
    """Ordinary tokens drawn uniformly, with replacement: no special ones, no blanks, no parts of characters."""
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
    made: list[int] = []
    while len(made) < count:
        token = draw.randrange(min(size, len(tokenizer)))
        text = tokenizer.decode([token])
        if token not in special and text.strip() and "\ufffd" not in text:
            made.append(token)
    return made


def line_break(tokenizer: Any) -> list[int]:
    """The token of a line break."""
    return tokenizer("\n", add_special_tokens=False)["input_ids"][-1:]


def counted(tokenizer: Any, room: int) -> list[int]:
    """As many whole numbers of "1 2 3 …" as ``room`` tokens hold; a ``ConditionError`` if they hold none."""

    def encode(last: int) -> list[int]:
        return tokenizer(" ".join(map(str, range(1, last + 1))), add_special_tokens=False)[
            "input_ids"
        ]

    last = bisect_right(range(1, room + 1), room, key=lambda last: len(encode(last)))
    if not last:
        raise ConditionError(
            "counting needs room for a number and its line breaks; give a larger count"
        )
    return encode(last)


def random_sentence(tokenizer: Any, count: int, draw: random.Random) -> list[int]:
    """Grammatical English unrelated to any question, cut to exactly ``count`` tokens."""
    text = _sentence(draw)
    while len(tokens := tokenizer(text, add_special_tokens=False)["input_ids"]) < count:
        text += " " + _sentence(draw)
    return tokens[:count]


def _sentence(draw: random.Random) -> str:
    """A sentence of one or two clauses."""
    words = _clause(draw)
    if draw.random() < 0.4:
        words += [draw.choice(_CONJUNCTIONS), *_clause(draw)]
    text = " ".join(words)
    return text[0].upper() + text[1:] + "."


def _clause(draw: random.Random) -> list[str]:
    words = _noun_phrase(draw)
    if draw.random() < 0.5:
        words.append(draw.choice(_ADVERBS))
    words += [draw.choice(_VERBS), *_noun_phrase(draw)]
    if draw.random() < 0.5:
        words += [draw.choice(_PREPOSITIONS), *_noun_phrase(draw)]
    return words


def _noun_phrase(draw: random.Random) -> list[str]:
    determiner, noun = draw.choice(_DETERMINERS), draw.choice(_NOUNS)
    following = [*([draw.choice(_ADJECTIVES)] if draw.random() < 0.6 else []), noun]
    if determiner == "a" and following[0][0] in "aeiou":
        determiner = "an"
    return [determiner, *following]


def check_run(count: int, place: str) -> None:
    if isinstance(count, bool) or not isinstance(count, int):
        raise OptionError(f"count={count!r}: give a whole number of tokens")
    if count < 1:
        raise OptionError(
            f"count={count}: insert at least one token; the baseline is always run too"
        )
    if count > MOST:
        raise OptionError(f"count={count}: insert at most {MOST:,} tokens")
    check_choice(Place, place=place)


def position(place: Place, sequence: Sequence, prompt: Prompt, seed: int) -> int:
    """The position before which the filler is inserted."""
    if place == "start":
        return 1 if sequence.first_part == "bos" else 0
    segment = "answer" if place == "before_answer" else "question"
    where = sequence.of_part(segment).nonzero().flatten().tolist()
    if place == "before_answer":
        return where[0] if where else len(sequence)
    if not where:
        raise ConditionError(f"{prompt.where} has no question token to insert at")
    if place in ("before_question", "after_question"):
        return where[0] if place == "before_question" else where[-1] + 1
    if len(where) < 2:
        raise ConditionError(
            f"{prompt.where} has only one question token: place={place!r} needs a boundary between two"
        )
    if place == "middle":
        return where[len(where) // 2]
    return random.Random(f"place {seed} {prompt.id}").choice(where[1:])


def behind(marker: str, sequence: Sequence, prompt: Prompt, tokenizer: Any) -> int:
    """The position after the first token that completes a text, found by bisection."""
    tokens = sequence.tokens.tolist()
    if marker not in tokenizer.decode(tokens):
        raise ConditionError(
            f"{prompt.where} does not contain after={marker!r}; give a text that is in every prompt as the model reads "
            "it, or a place"
        )
    low, high = 1, len(tokens)
    while low < high:
        middle = (low + high) // 2
        low, high = (
            (low, middle) if marker in tokenizer.decode(tokens[:middle]) else (middle + 1, high)
        )
    return low
