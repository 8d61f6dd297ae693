"""Generated prompts: repeated random tokens, and pairs whose versions call for other answers."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from mechattn.errors import OptionError, PromptError, check_choice, check_counts
from mechattn.prompts.fillers import random_tokens, tokens_of
from mechattn.prompts.prompt import LARGEST_COUNT, Prompt
from mechattn.prompts.tokenization import TokenizedModel, own_bos, require_tokenizer

SOURCES = ("ioi", "greater-than", "capitals", "repeated-random")
SHORTEST = 25  # tokens of a random span
LONGEST = 50
_SHORTEST_OF_PAIRS = 3  # a token, what follows it in one version, and in the other
_FEWEST_WORDS = 6  # of as many tokens as most others
_MOST_ROUNDS = 200  # of draws, until the tokens of a span are all different

# The templates of each source, and the words that fill them.
_WORDING = json.loads(Path(__file__).with_name("pairs.json").read_text("utf-8"))
_CAPITALS = _WORDING["capitals"]
_WORDS = {
    "ioi": [f" {name}" for name in _WORDING["names"]],
    "greater-than": [f"{number:02}" for number in range(12, 88)],
    "capitals": [f" {country}" for country in _CAPITALS],
}


def repeated_random(
    model: TokenizedModel,
    limit: int = 64,
    *,
    span: tuple[int, int] = (SHORTEST, LONGEST),
    times: int = 2,
    seed: int = 0,
) -> list[Prompt]:
    """Make prompts of a random span of ordinary tokens, repeated twice or more; each prompt has its
    own span.

    No token occurs twice within a span, so an earlier occurrence of a token is always in an earlier
    copy of the span.

    Args:
        model: The model whose vocabulary tokens are drawn from. A BOS token comes first if the
            model uses one. Without a tokenizer, all ids can be drawn.
        limit: The number of prompts.
        span: The shortest and the longest span, in tokens; all lengths are equally likely.
        times: How often the span occurs.
        seed: The seed of the draws.

    Raises:
        OptionError: There are no or too many prompts, or a span is empty, occurs only once, or
            needs more tokens than the vocabulary has.

    Source:
        Olsson et al. 2022, "In-context learning and induction heads": prefix matching.
    """
    check_counts(most=LARGEST_COUNT, limit=limit)
    check_counts(least=2, times=times)
    _check_span(span, fewest=1)

    prompts = []
    for index in range(limit):
        draw = random.Random(f"repeated {seed} {index}")
        tokens = _distinct(model, draw.randint(*span), draw) * times
        prompts.append(Prompt(tokens=(*_bos(model), *tokens), id=str(index)))
    return prompts


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
        OptionError: There is no such source, or a span is shorter than 3 tokens.
        PromptError: Too few names or numbers have as many tokens as others; the message names the
            rest.

    Source:
        arXiv:2211.00593 (ioi), arXiv:2305.00586 (greater-than); the templates are ours.
    """
    check_choice(SOURCES, source=source)
    check_counts(most=LARGEST_COUNT, limit=limit)
    if source == "repeated-random":
        _check_span(span, fewest=_SHORTEST_OF_PAIRS)
        if same_length:
            span = (span[1], span[1])
        prompts = repeated_random(model, limit, span=span, seed=seed)
        return [_with_other_order(model, prompt, seed) for prompt in prompts]

    tokenizer = require_tokenizer(model)
    count = limit
    if same_length:  # so many that the commonest length nearly always has ``limit`` of them
        count = 8 * limit + 64
    drawn = _drawn(tokenizer, source, count, seed)
    if same_length:
        texts = [prompt.question + prompt.answer for prompt in drawn]
        lengths = [len(tokenizer(text)["input_ids"]) for text in texts]
        usual = Counter(lengths).most_common(1)[0][0]
        drawn = [prompt for prompt, length in zip(drawn, lengths, strict=True) if length == usual]

    return [replace(prompt, id=str(index)) for index, prompt in enumerate(drawn[:limit])]


def _check_span(span: tuple[int, int], fewest: int) -> None:
    """Refuse anything but a shortest and a longest span, of this many tokens at least."""
    shortest, longest = span
    if not fewest <= shortest <= longest:
        raise OptionError(
            f"span={span!r}: give a shortest and a longest span in tokens, of at least {fewest}"
        )


def _bos(model: TokenizedModel) -> list[int]:
    """The BOS token before a prompt, if the model uses one."""
    bos = own_bos(model)
    if bos is None:
        return []
    return [bos]


def _distinct(model: TokenizedModel, count: int, draw: random.Random) -> list[int]:
    """This number of ordinary tokens, all different."""
    size = int(model.cfg.d_vocab)
    if size >= count:
        if model.tokenizer is None:
            return draw.sample(range(size), count)

        # Draws are with replacement, so a small vocabulary needs several rounds.
        drawn: dict[int, None] = {}
        for _ in range(_MOST_ROUNDS):
            drawn |= dict.fromkeys(random_tokens(model.tokenizer, size, count, draw))
            if len(drawn) >= count:
                return list(drawn)[:count]

    raise OptionError(
        f"a span of {count} different tokens needs a larger vocabulary than {size}; give a shorter"
        " span"
    )


def _drawn(tokenizer: Any, source: str, count: int, seed: int) -> list[Prompt]:
    """This number of pairs from templates; each template comes once before any comes again."""
    templates = _WORDING["templates"][source]
    in_turn = random.Random(f"templates of {source} {seed}").sample(templates, len(templates))
    words = _of_usual_length(tokenizer, _WORDS[source])
    if source == "capitals":  # each country once
        random.Random(f"{source} {seed}").shuffle(words)
        count = min(count, len(words))

    prompts = []
    for index in range(count):
        draw = random.Random(f"{source} {seed} {index}")
        template = in_turn[index % len(templates)]
        if source == "ioi":
            fields = _indirect_object(draw, template, words)
        elif source == "greater-than":
            fields = _greater_than(draw, template, words)
        else:
            fields = _capital(draw, template, words, words[index])
        prompts.append(Prompt(template="joined", group=template, **fields))

    return prompts


def _indirect_object(draw: random.Random, template: str, names: list[str]) -> dict[str, Any]:
    """Who gets the thing: the name that is not repeated."""
    receiver, giver = draw.sample(names, 2)
    place = draw.choice(_WORDING["places"])
    thing = draw.choice(_WORDING["things"])
    first, second = draw.sample([receiver, giver], 2)
    scene = partial(template.format, first=first, second=second, place=place, thing=thing)
    return {
        "question": scene(giver=giver),
        "counterpart": scene(giver=receiver),
        "answer": f" {receiver}",
        "other_answer": f" {giver}",
    }


def _greater_than(draw: random.Random, template: str, numbers: list[str]) -> dict[str, Any]:
    """A year after the beginning; the other version begins early."""
    early = draw.choice([number for number in numbers if 20 < int(number) < 40])
    late = draw.choice([number for number in numbers if 60 <= int(number) < 80])
    between = draw.choice([number for number in numbers if early[0] < number[0] < late[0]])
    after_late = draw.choice([number for number in numbers if number[0] > late[0]])
    century = draw.randrange(11, 20)
    written = partial(template.format, event=draw.choice(_WORDING["events"]), century=century)
    return {
        "question": written(year=late),
        "counterpart": written(year=early),
        "answer": after_late,
        "other_answer": between,
    }


def _capital(
    draw: random.Random, template: str, countries: list[str], country: str
) -> dict[str, Any]:
    """The capital of a country; the other version asks for another."""
    other_country = draw.choice([other for other in countries if other != country])
    return {
        "question": template.format(country=country),
        "counterpart": template.format(country=other_country),
        "answer": f" {_CAPITALS[country]}",
        "other_answer": f" {_CAPITALS[other_country]}",
    }


def _with_other_order(model: TokenizedModel, prompt: Prompt, seed: int) -> Prompt:
    """A span and the beginning of its repetition; in the other version the first copy is in another
    order.
    """
    draw = random.Random(f"repeated-random {seed} {prompt.id}")
    bos = _bos(model)
    repeated = list(prompt.tokens[len(bos) :])
    span = repeated[: len(repeated) // 2]
    cut = draw.randrange(1, len(span))
    last_token = span[cut - 1]
    answer = span[cut]

    # The last token must have a successor in the other order too, and another one.
    while True:
        other_order = draw.sample(span, len(span))
        other_answer = dict(pairwise(other_order)).get(last_token)
        if other_answer is not None and other_answer != answer:
            break

    return Prompt(
        tokens=(*bos, *span, *span[:cut]),
        counterpart=(*bos, *other_order, *span[:cut]),
        answer_tokens=(answer,),
        other_answer=(other_answer,),
        id=prompt.id,
    )


def _of_usual_length(tokenizer: Any, words: Sequence[str]) -> list[str]:
    """The words that are as many tokens as most others, without the space before them."""
    sizes = {word.strip(): len(tokens_of(tokenizer, word)) for word in words}
    usual_size = Counter(sizes.values()).most_common(1)[0][0]
    usual = [word for word, size in sizes.items() if size == usual_size]
    if len(usual) < _FEWEST_WORDS:
        unusual = [f"{word!r} ({size})" for word, size in sizes.items() if size != usual_size]
        raise PromptError(
            f"only {len(usual)} words are {usual_size} tokens with this tokenizer; other numbers of"
            f" tokens: {', '.join(unusual)}"
        )
    return usual
