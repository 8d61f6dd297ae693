"""Generated pairs of prompts, each with another version that calls for another answer."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mechattn.errors import PromptError, check_choice, check_counts
from mechattn.prompts.datasets import LONGEST, SHORTEST, repeated_random
from mechattn.prompts.prompt import MOST, Prompt
from mechattn.prompts.tokenization import TokenizedModel, own_bos, require_tokenizer

_SOURCES = ("ioi", "greater-than", "capitals", "repeated-random")
_SCENES = (
    "Then {first} and {second} went to the {place}. {giver} gave a {thing} to",
    "After lunch {first} and {second} were at the {place}, and {giver} handed a {thing} to",
    "When {first} and {second} met in the {place}, {giver} offered a {thing} to",
    "While {first} and {second} were walking to the {place}, {giver} passed a {thing} to",
    "Years ago {first} and {second} worked at the {place}. One day {giver} lent a {thing} to",
    (
        "It was raining, so {first} and {second} stayed in the {place}, where {giver} showed a"
        " {thing} to"
    ),
    "Before the trip {first} and {second} stopped at the {place}. There {giver} sold a {thing} to",
    (
        "All had left the {place} except {first} and {second}. In the silence {giver} threw a"
        " {thing} to"
    ),
    (
        "On Monday {first} and {second} shared a table in the {place}, and {giver} pushed a {thing}"
        " over to"
    ),
    "Because {first} and {second} had won, {giver} took a {thing} from the {place} and gave it to",
    (
        "The {place} was closed, so {first} and {second} sat outside until {giver} promised a"
        " {thing} to"
    ),
    "As soon as {first} and {second} arrived at the {place}, {giver} delivered a {thing} to",
    (
        "Last summer {first} and {second} cleaned the {place}. Afterwards {giver} presented a"
        " {thing} to"
    ),
    (
        "No one knew that {first} and {second} were in the {place}, or that {giver} slipped a"
        " {thing} to"
    ),
    "To say goodbye, {first} and {second} came back to the {place}, and {giver} left a {thing} to",
    (
        "Late at night {first} and {second} found a {thing} near the {place}. {giver} wanted to"
        " give it to"
    ),
    "Even though {first} and {second} had argued at the {place}, {giver} returned the {thing} to",
    (
        "A teacher asked {first} and {second} to tidy the {place}, and {giver} carried a {thing}"
        " over to"
    ),
    (
        "In the story {first} and {second} live above a {place}. In the first chapter {giver} sends"
        " a {thing} to"
    ),
    (
        "Two weeks later {first} and {second} had dinner near the {place}, and {giver} still owed a"
        " {thing} to"
    ),
    "Our neighbours {first} and {second} run the {place}. This morning {giver} mailed a {thing} to",
    (
        "At the {place} somebody took a picture of {first} and {second} just as {giver} tossed a"
        " {thing} to"
    ),
    (
        "The queue at the {place} was long, so {first} and {second} talked, and {giver} described a"
        " {thing} to"
    ),
    "If {first} and {second} meet at the {place} again, {giver} will bring a {thing} to",
    (
        "Since the {place} had only one {thing}, {first} and {second} drew lots, and {giver} gave"
        " it to"
    ),
    "Once {first} and {second} had locked the {place}, {giver} gave the last {thing} to",
    (
        "The {place} was full of guests, and {first} and {second} hid in a corner, where {giver}"
        " returned a {thing} to"
    ),
    (
        "For a while {first} and {second} looked around the {place}, and then {giver} recommended a"
        " {thing} to"
    ),
)
_SPANS = (
    "The {event} lasted from the year {century}{year} to the year {century}",
    "The {event} began in the year {century}{year} and ended in the year {century}",
    "From {century}{year} on, the {event} dragged on until {century}",
    "Chroniclers date the {event} from {century}{year} to {century}",
    (
        "The museum shows letters from the {event}, which were written between {century}{year} and"
        " {century}"
    ),
    "He was born in {century}{year}, saw the {event} as a child, and died in {century}",
    "It says in the book that the {event} started in {century}{year} and was over by {century}",
    "Taxes rose all through the {event}, first in {century}{year} and again in {century}",
    (
        "The bridge was begun in {century}{year}; because of the {event} it was not finished until"
        " {century}"
    ),
    "A first account of the {event} was printed in {century}{year}, a second one in {century}",
    "The treaty of {century}{year} did not end the {event}; that of {century}",
    "The town grew quickly after {century}{year}, and by the end of the {event} in {century}",
)
_CAPITALS_ASKED = (
    "The capital of {country} is",
    "The capital city of {country} is called",
    "I have never been to {country}, but I know that its capital is",
    "Question: What is the capital of {country}? Answer:",
    "The government of {country} has its seat in the city of",
    "On a map of {country}, the capital is marked with a star:",
    "The largest embassies in {country} are in its capital,",
    "If you travel to {country}, begin in the capital,",
    "Our tour of {country} ended in the capital,",
    "The president of {country} gave a speech in the capital,",
    "In geography we learned that the capital of {country} is",
    "Most ministries of {country} are in its capital,",
    "After two days on the train through {country} we reached the capital,",
    "She reports from {country} for a newspaper and lives in the capital,",
    "The national library of {country} is in the capital,",
    "Few tourists who visit {country} miss its capital,",
    "The old part of the capital of {country},",
    "The flight to {country} lands near the capital,",
    "Many people moved from the villages of {country} to its capital,",
    "The parliament of {country} meets in",
)
_CAPITALS = {
    "France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Russia": "Moscow",
    "China": "Beijing", "Egypt": "Cairo", "Greece": "Athens", "Portugal": "Lisbon", "Austria": "Vienna",
    "Hungary": "Budapest", "Poland": "Warsaw", "Ireland": "Dublin", "Norway": "Oslo", "Sweden": "Stockholm",
    "Finland": "Helsinki", "Denmark": "Copenhagen", "Belgium": "Brussels", "Turkey": "Ankara", "Iran": "Tehran",
    "Iraq": "Baghdad", "Syria": "Damascus", "Lebanon": "Beirut", "Cuba": "Havana", "Peru": "Lima",
    "Chile": "Santiago", "Canada": "Ottawa", "Kenya": "Nairobi", "Ghana": "Accra", "Nigeria": "Abuja",
    "Thailand": "Bangkok", "Vietnam": "Hanoi", "Nepal": "Kathmandu", "Ukraine": "Kyiv", "Romania": "Bucharest",
    "Bulgaria": "Sofia", "Serbia": "Belgrade", "Croatia": "Zagreb", "Australia": "Canberra",
}  # fmt: skip
_NAMES = (
    "Tom", "Ben", "Omar", "Luca", "Ravi", "Sam", "Noah", "Ivan", "Hugo", "Eli", "Adam", "Finn", "Anna", "Mia", "Sara",
    "Lena", "Zoe", "Ines", "Ruth", "Tara", "Nora", "Emma", "Yuki", "Leila",
)  # fmt: skip
_PLACES = ("store", "park", "school", "garden", "station", "office", "market", "library")
_THINGS = ("book", "drink", "letter", "ball", "key", "ring", "basket", "ticket")
_EVENTS = ("war", "journey", "strike", "voyage", "project", "dispute", "reign", "trial")
_FEWEST_WORDS = 6

# By source: the texts with gaps, and the words that fill them in both versions.
_TEMPLATES = {"ioi": _SCENES, "greater-than": _SPANS, "capitals": _CAPITALS_ASKED}
_WORDS = {
    "ioi": [f" {name}" for name in _NAMES],
    "greater-than": [f"{number:02}" for number in range(12, 88)],
    "capitals": [f" {country}" for country in _CAPITALS],
}


def pairs(
    model: TokenizedModel,
    source: str,
    limit: int = 64,
    *,
    span: tuple[int, int] = (SHORTEST, LONGEST),
    same_length: bool = False,
    seed: int = 0,
) -> list[Prompt]:
    """Make pairs of prompts: each has a ``counterpart`` of as many tokens, an answer, and the
    counterpart's answer.

    "ioi", indirect objects: "Then Anna and Tom went to the store. Tom gave a ring to" Anna; in the
    other version Anna gives it to Tom. "greater-than": "The war lasted from the year 1768 to the
    year 17" and a year after it; in the other version the war begins early, and the answer is a
    year between the two beginnings. Both answers differ from both beginnings in their first digit,
    so that a tokenizer that splits numbers into digits compares the same. "capitals": "The capital
    of France is" Paris; the other version names another country. "repeated-random": a span of
    random tokens and the beginning of its repetition, whose next token is the answer; in the other
    version the tokens of the first copy are in another order. Names, numbers and countries are as
    many tokens as most others in this tokenizer.

    Prompts of one template are not independent, so each has its template as its ``group``: 28 of
    "ioi", 12 of "greater-than", 20 of "capitals". Up to that number, each prompt has a template of
    its own.

    Args:
        model: The model, for its tokenizer and vocabulary.
        source: "ioi", "greater-than", "capitals" or "repeated-random".
        limit: The number of pairs; of "capitals" there are at most 40, one for each country.
        span: Of "repeated-random": the shortest and the longest span, in tokens.
        same_length: Give only prompts that are all as many tokens, as patching by position needs;
            fewer templates are then left.
        seed: The seed of the draws.

    Raises:
        OptionError: There is no such source.
        PromptError: Too few names or numbers have as many tokens as others; the message names the
            rest.

    Source:
        arXiv:2211.00593 (ioi), arXiv:2305.00586 (greater-than); the templates are ours.
    """
    check_choice(_SOURCES, source=source)
    check_counts(most=MOST, limit=limit)
    if source == "repeated-random":
        draws = [random.Random(f"{source} {seed} {index}") for index in range(limit)]
        if same_length:
            span = (span[1], span[1])
        prompts = repeated_random(model, limit, span=span, seed=seed)
        shuffled = []
        for prompt, draw in zip(prompts, draws, strict=True):
            shuffled.append(_shuffled(model, prompt, draw))
        return shuffled

    tokenizer = require_tokenizer(model)
    count = limit
    if same_length:
        count = 8 * limit + 64  # most lengths are rarer than this
    drawn = [
        Prompt(template="joined", **fields) for fields in _texts(tokenizer, source, count, seed)
    ]
    if same_length:
        texts = [prompt.question + prompt.answer for prompt in drawn]
        lengths = [len(tokenizer(text)["input_ids"]) for text in texts]
        usual = Counter(lengths).most_common(1)[0][0]
        drawn = [prompt for prompt, length in zip(drawn, lengths, strict=True) if length == usual]

    return [replace(prompt, id=str(index)) for index, prompt in enumerate(drawn[:limit])]


def _texts(tokenizer: Any, source: str, count: int, seed: int) -> list[dict[str, Any]]:
    """The texts of this number of pairs; each template comes once before any comes again."""
    templates = _in_turn(_TEMPLATES[source], f"{source} {seed}")
    words = _of_usual_length(tokenizer, _WORDS[source])
    if source == "capitals":  # each country once
        random.Random(f"{source} {seed}").shuffle(words)
        count = min(count, len(words))

    texts = []
    for index in range(count):
        draw = random.Random(f"{source} {seed} {index}")
        template = templates[index % len(templates)]
        if source == "ioi":
            fields = _indirect_object(draw, template, words)
        elif source == "greater-than":
            fields = _greater_than(draw, template, words)
        else:
            fields = _capital(draw, template, words, words[index])
        texts.append({**fields, "group": template})

    return texts


def _in_turn(templates: Sequence[str], seed: str) -> list[str]:
    """The templates in an order of this seed."""
    return random.Random(f"templates of {seed}").sample(templates, len(templates))


def _indirect_object(draw: random.Random, template: str, names: Sequence[str]) -> dict[str, Any]:
    """Who gets the thing: the name that is not repeated."""
    receiver, giver = (name.strip() for name in draw.sample(list(names), 2))
    place = draw.choice(_PLACES)
    thing = draw.choice(_THINGS)
    first, second = draw.sample([receiver, giver], 2)
    scene = partial(template.format, first=first, second=second, place=place, thing=thing)
    return {
        "question": scene(giver=giver),
        "counterpart": scene(giver=receiver),
        "answer": f" {receiver}",
        "other_answer": f" {giver}",
    }


def _greater_than(draw: random.Random, template: str, numbers: Sequence[str]) -> dict[str, Any]:
    """A year after the beginning; the other version begins early."""
    early = draw.choice([number for number in numbers if 20 < int(number) < 40])
    late = draw.choice([number for number in numbers if 60 <= int(number) < 80])
    between = draw.choice([number for number in numbers if early[0] < number[0] < late[0]])
    after_late = draw.choice([number for number in numbers if number[0] > late[0]])
    century = draw.randrange(11, 20)
    written = partial(template.format, event=draw.choice(_EVENTS), century=century)
    return {
        "question": written(year=late),
        "counterpart": written(year=early),
        "answer": after_late,
        "other_answer": between,
    }


def _capital(draw: random.Random, template: str, words: Sequence[str], word: str) -> dict[str, Any]:
    """The capital of a country; the other version asks for another."""
    other_word = draw.choice([other for other in words if other != word])
    country = word.strip()
    other_country = other_word.strip()
    return {
        "question": template.format(country=country),
        "counterpart": template.format(country=other_country),
        "answer": f" {_CAPITALS[country]}",
        "other_answer": f" {_CAPITALS[other_country]}",
    }


def _shuffled(model: TokenizedModel, prompt: Prompt, draw: random.Random) -> Prompt:
    """A span and the beginning of its repetition; in the other version the first copy is in another
    order.
    """
    bos = []
    if own_bos(model) is not None:
        bos.append(prompt.tokens[0])
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
    if position == len(tokens):
        return None
    return tokens[position]


def _of_usual_length(tokenizer: Any, words: Sequence[str]) -> list[str]:
    """The words that are as many tokens as most others."""
    sizes = {word: len(tokenizer(word, add_special_tokens=False)["input_ids"]) for word in words}
    usual_size = Counter(sizes.values()).most_common(1)[0][0]
    usual = [word for word in words if sizes[word] == usual_size]
    if len(usual) < _FEWEST_WORDS:
        unusual = [word for word in words if sizes[word] != usual_size]
        rest = ", ".join(f"{word.strip()!r} ({sizes[word]})" for word in unusual)
        raise PromptError(
            f"only {len(usual)} words are {usual_size} tokens with this tokenizer; other numbers of"
            f" tokens: {rest}"
        )
    return usual
