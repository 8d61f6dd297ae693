"""The token ids of filler, such as a repeated text or random tokens, and where it is inserted."""

from __future__ import annotations

import json
import random
from bisect import bisect_left, bisect_right
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from mechattn.errors import ConditionError
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.token_sequences import TokenSequence

Place = Literal["before_question", "start", "middle", "after_question", "before_answer", "random"]

_MOST_REPETITIONS = 256  # of a text for each token: one may hold many, such as dots or spaces
_FURTHEST_COUNT = 10  # tokens; a count further away would be another condition
_MOST_DRAWS = 1000  # of sentences, before a count is taken to be out of reach

# The words of random sentences, by their part of speech.
_WORDS = json.loads(Path(__file__).with_name("sentence_words.json").read_text("utf-8"))


def tokens_of(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text on its own, without special tokens before or after it."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def repeated(tokenizer: Any, text: str, separator: str, count: int) -> list[int]:
    """The tokens of a text that is repeated until there are exactly ``count`` tokens.

    Raises:
        ConditionError: No number of repetitions gives this count; the message names counts nearby.
    """

    def encode(repetitions: int) -> list[int]:
        return tokens_of(tokenizer, separator.join([text] * repetitions))

    most = count + 1
    while len(encode(most)) < count and most < _MOST_REPETITIONS * count:
        most *= 2  # a token may hold several repetitions

    # Usually each repetition makes the text longer, but a merge may shorten it by a token or two.
    # The next three numbers of repetitions are therefore tried too.
    fewest = bisect_left(range(1, most), count, key=lambda number: len(encode(number))) + 1
    for repetitions in range(fewest, fewest + 4):
        tokens = encode(repetitions)
        if len(tokens) == count:
            return tokens

    pieces = [tokenizer.decode([token]) for token in encode(2)]
    near_repetitions = (max(1, fewest - 1), fewest)
    near_counts = {len(encode(repetitions)) for repetitions in near_repetitions}
    counts_in_words = " or ".join(map(str, sorted(near_counts)))
    raise ConditionError(
        f"{count} tokens are not a whole number of {text!r}: with this tokenizer two of them,"
        f" separated by {separator!r}, become {pieces}. Use count={counts_in_words}"
        " (one more with own_line=True), or in MeaninglessTokens another separator, or its"
        " .fitted(model) for the nearest count"
    )


def nearest_count(tokenizer: Any, text: str, separator: str, count: int, own_line: bool) -> int:
    """The number of tokens nearest to ``count`` that repetitions of a text can give.

    With ``own_line`` the token of a line break is included. Of two counts that are equally near,
    the larger is returned.

    Raises:
        ConditionError: No count within ten of ``count`` can be reached.
    """
    break_count = 1 if own_line else 0
    for distance in range(_FURTHEST_COUNT + 1):
        for near_count in (count + distance, count - distance):
            with suppress(ConditionError):
                repeated(tokenizer, text, separator, near_count - break_count)
                return near_count

    raise ConditionError(
        f"no whole number of {text!r} gives about {count} tokens with this tokenizer; give another"
        " text or count"
    )


def random_tokens(
    tokenizer: Any, vocabulary_size: int, count: int, generator: random.Random
) -> list[int]:
    """Draw ordinary tokens uniformly, with replacement.

    Special tokens, white space and parts of characters are never drawn.
    """
    special_ids = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
    tokens: list[int] = []
    while len(tokens) < count:
        token = generator.randrange(min(vocabulary_size, len(tokenizer)))
        text = tokenizer.decode([token])
        is_part_of_character = "\ufffd" in text
        if token not in special_ids and text.strip() and not is_part_of_character:
            tokens.append(token)
    return tokens


def line_break(tokenizer: Any) -> list[int]:
    """The token of a line break."""
    return tokens_of(tokenizer, "\n")[-1:]


def numbers_in_order(tokenizer: Any, room: int) -> list[int]:
    """The tokens of "1 2 3 …", up to the last number that fits into ``room`` tokens.

    Raises:
        ConditionError: Not even the first number fits.
    """

    def encode(largest: int) -> list[int]:
        return tokens_of(tokenizer, " ".join(map(str, range(1, largest + 1))))

    last = bisect_right(range(1, room + 1), room, key=lambda largest: len(encode(largest)))
    if not last:
        raise ConditionError(
            "counting needs room for a number and its line breaks; give a larger count"
        )
    return encode(last)


def random_sentence(tokenizer: Any, count: int, generator: random.Random) -> list[int]:
    """The tokens of grammatical English sentences that are unrelated to any question.

    Whole sentences are added until there are at least ``count`` tokens.
    """
    text = _sentence(generator)
    tokens = tokens_of(tokenizer, text)
    while len(tokens) < count:
        text += " " + _sentence(generator)
        tokens = tokens_of(tokenizer, text)
    return tokens


def whole_sentences(tokenizer: Any, count: int, generator: random.Random) -> list[int]:
    """Sentences of :func:`random_sentence`, drawn again until they have exactly ``count`` tokens.

    Raises:
        ConditionError: None of 1,000 draws has that many tokens.
    """
    for _ in range(_MOST_DRAWS):
        tokens = random_sentence(tokenizer, count, generator)
        if len(tokens) == count:
            return tokens
    raise ConditionError(
        f"no whole sentences of {count} tokens in {_MOST_DRAWS} draws; give another count, or"
        " cut=True"
    )


def position_of(place: Place, sequence: TokenSequence, prompt: Prompt, seed: int) -> int:
    """The position before which the filler is inserted.

    Raises:
        ConditionError: The prompt has too few question tokens for this place.
    """
    if place == "start":
        return 1 if sequence.first_part == "bos" else 0
    if place == "before_answer":
        answer_positions = sequence.of_part("answer").nonzero().flatten().tolist()
        return answer_positions[0] if answer_positions else len(sequence)

    positions = sequence.of_part("question").nonzero().flatten().tolist()
    if not positions:
        raise ConditionError(f"{prompt.where} has no question token to insert at")
    if place == "before_question":
        return positions[0]
    if place == "after_question":
        return positions[-1] + 1

    if len(positions) < 2:
        raise ConditionError(
            f"{prompt.where} has only one question token: place={place!r} needs a boundary"
            " between two"
        )

    if place == "middle":
        return positions[len(positions) // 2]
    return random.Random(f"place {seed} {prompt.id}").choice(positions[1:])


def position_behind(marker: str, sequence: TokenSequence, prompt: Prompt, tokenizer: Any) -> int:
    """The position after the first token that completes the text ``marker``.

    Raises:
        ConditionError: The prompt does not contain the text.
    """
    tokens = sequence.tokens.tolist()
    if marker not in tokenizer.decode(tokens):
        raise ConditionError(
            f"{prompt.where} does not contain after={marker!r}; give a text that is in every prompt"
            " as the model reads it, or a place"
        )
    # By bisection, since decoding each beginning of a long prompt takes long.
    counts = range(1, len(tokens))
    return 1 + bisect_left(
        counts, True, key=lambda count: marker in tokenizer.decode(tokens[:count])
    )


def _sentence(generator: random.Random) -> str:
    """A sentence of one or two clauses; what is drawn here and below only varies the sentences."""
    words = _clause(generator)
    if generator.random() < 0.4:
        words += [generator.choice(_WORDS["conjunctions"]), *_clause(generator)]
    text = " ".join(words)
    return text[0].upper() + text[1:] + "."


def _clause(generator: random.Random) -> list[str]:
    """A subject, a verb and an object, perhaps with an adverb and a place."""
    words = _noun_phrase(generator)
    if generator.random() < 0.5:
        words.append(generator.choice(_WORDS["adverbs"]))
    words += [generator.choice(_WORDS["verbs"]), *_noun_phrase(generator)]
    if generator.random() < 0.5:
        words += [generator.choice(_WORDS["prepositions"]), *_noun_phrase(generator)]
    return words


def _noun_phrase(generator: random.Random) -> list[str]:
    """A noun with its determiner, and perhaps an adjective."""
    determiner = generator.choice(_WORDS["determiners"])
    words = [generator.choice(_WORDS["nouns"])]
    if generator.random() < 0.6:
        words.insert(0, generator.choice(_WORDS["adjectives"]))
    if determiner == "a" and words[0][0] in "aeiou":
        determiner = "an"
    return [determiner, *words]
