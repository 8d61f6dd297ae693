"""Generated prompts: repeated random tokens, and pairs of prompts with different answers."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
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
SHORTEST = 25  # tokens of a random span, by default
LONGEST = 50
_SHORTEST_OF_PAIRS = 3  # tokens: one, its successor in one version, and its successor in the other
_FEWEST_WORDS = 6  # names, numbers or countries to draw from; 6 names give 30 ordered pairs
_MOST_ROUNDS = 200  # of draws before a vocabulary counts as too small for a span

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
    """Make prompts in which a random span of ordinary tokens occurs twice or more.

    Each prompt has its own span. No token occurs twice within a span, so an
    earlier occurrence of a token is always in an earlier copy of the span.

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
        generator = random.Random(f"repeated {seed} {index}")
        tokens = _distinct_tokens(model, generator.randint(*span), generator) * times
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
    """Make pairs of prompts that call for different answers.

    Each prompt, the clean one, has a ``counterpart`` with the same number of tokens, the corrupted
    one. It also has its own answer, and the counterpart's as ``other_answer``. The sources are:

    - "ioi", indirect objects: "Then Anna and Tom went to the store. Tom gave a ring to" Anna. In
      the counterpart Anna gives it to Tom.
    - "greater-than": "The war lasted from the year 1768 to the year 17" and a later year. In the
      counterpart the war begins earlier, and the answer is a year between the two beginnings. Both
      answers differ from both beginnings in their first digit, so the task is the same for a
      tokenizer that splits numbers into digits.
    - "capitals": "The capital of France is" Paris. The counterpart names another country.
    - "repeated-random": a span of random tokens and the beginning of its repetition. The answer is
      the next token. In the counterpart the tokens of the first copy are in another order.

    Only names, numbers and countries with the commonest number of tokens in this tokenizer are
    used.

    Prompts of one template are not independent, so each has its template as its ``group``: 28 of
    "ioi", 12 of "greater-than", 20 of "capitals". Up to that number, each prompt has a template of
    its own. Prompts of random tokens have no group.

    Args:
        model: The model, for its tokenizer and vocabulary.
        source: "ioi", "greater-than", "capitals" or "repeated-random".
        limit: The number of pairs. There are at most 40 of "capitals", one for each country.
        span: The shortest and the longest span of "repeated-random", in tokens.
        same_length: Whether all prompts have the same number of tokens, as patching by position
            needs. This leaves fewer templates and fewer countries. All spans then have the longest
            length, and half of each is repeated.
        seed: The seed of the draws.

    Raises:
        OptionError: There is no such source, the limit is not allowed, or a span is shorter than 3
            tokens or needs more tokens than the vocabulary has.
        ModelError: The source needs a tokenizer, and the model has none.
        PromptError: Too few names, numbers or countries have the same number of tokens.

    Source:
        arXiv:2211.00593 (ioi), arXiv:2305.00586 (greater-than); the templates are ours.
    """
    check_choice(SOURCES, source=source)
    check_counts(most=LARGEST_COUNT, limit=limit)
    if source == "repeated-random":
        _check_span(span, fewest=_SHORTEST_OF_PAIRS)
        if same_length:
            span = (span[1], span[1])
        repeated_prompts = repeated_random(model, limit, span=span, seed=seed)
        return [_with_other_order(model, prompt, seed, same_length) for prompt in repeated_prompts]

    tokenizer = require_tokenizer(model)
    if same_length:
        # Enough that ``limit`` of them nearly always have the commonest length.
        candidates = _from_templates(tokenizer, source, 8 * limit + 64, seed)
        prompts = _of_commonest_length(tokenizer, candidates)[:limit]
    else:
        prompts = _from_templates(tokenizer, source, limit, seed)
    return [replace(prompt, id=str(index)) for index, prompt in enumerate(prompts)]


def _check_span(span: tuple[int, int], fewest: int) -> None:
    """Refuse a span unless it is a shortest and a longest length of at least ``fewest`` tokens."""
    match span:
        case (int(shortest), int(longest)) if fewest <= shortest <= longest:
            return
    raise OptionError(
        f"span={span!r}: give a shortest and a longest span in tokens, of at least {fewest}"
    )


def _distinct_tokens(model: TokenizedModel, count: int, generator: random.Random) -> list[int]:
    """Draw ``count`` ordinary tokens, all different."""
    size = int(model.cfg.d_vocab)
    if size >= count:
        if model.tokenizer is None:
            return generator.sample(range(size), count)

        # Draws are with replacement, so a small vocabulary needs several rounds.
        tokens: dict[int, None] = {}
        for _ in range(_MOST_ROUNDS):
            tokens |= dict.fromkeys(random_tokens(model.tokenizer, size, count, generator))
            if len(tokens) >= count:
                return list(tokens)[:count]

    raise OptionError(
        f"a span of {count} different tokens needs a larger vocabulary than {size}; give a shorter"
        " span"
    )


def _bos(model: TokenizedModel) -> list[int]:
    """The BOS token before a prompt; empty if the model uses none."""
    bos = own_bos(model)
    return [] if bos is None else [bos]


def _with_other_order(
    model: TokenizedModel, prompt: Prompt, seed: int, same_length: bool
) -> Prompt:
    """The pair of a prompt of :func:`repeated_random`, whose second copy is cut short.

    The cut is drawn for each prompt, or lies in the middle of the span if all prompts are to have
    the same length.
    """
    generator = random.Random(f"repeated-random {seed} {prompt.id}")
    bos = _bos(model)
    copies = list(prompt.tokens[len(bos) :])
    first_copy = copies[: len(copies) // 2]
    if same_length:
        cut = len(first_copy) // 2
    else:
        cut = generator.randrange(1, len(first_copy))
    beginning = first_copy[:cut]
    answer = first_copy[cut]

    # In the other order the last token must have a successor too, and a different one.
    while True:
        other_copy = generator.sample(first_copy, len(first_copy))
        successors = dict(pairwise(other_copy))
        other_answer = successors.get(beginning[-1])
        if other_answer is not None and other_answer != answer:
            break

    return Prompt(
        tokens=(*bos, *first_copy, *beginning),
        counterpart=(*bos, *other_copy, *beginning),
        answer_tokens=(answer,),
        other_answer=(other_answer,),
        id=prompt.id,
    )


def _from_templates(tokenizer: Any, source: str, count: int, seed: int) -> list[Prompt]:
    """Pairs from the templates of a source; each template occurs once before any occurs again.

    There are ``count`` of them, but not more of "capitals" than there are countries.
    """
    templates = _WORDING["templates"][source]
    order_generator = random.Random(f"templates of {source} {seed}")
    template_order = order_generator.sample(templates, len(templates))
    words = _of_commonest_size(tokenizer, _WORDS[source])
    if source == "capitals":  # each country once
        random.Random(f"{source} {seed}").shuffle(words)
        count = min(count, len(words))

    prompts = []
    for index in range(count):
        generator = random.Random(f"{source} {seed} {index}")
        template = template_order[index % len(templates)]
        if source == "ioi":
            fields = _indirect_object(generator, template, words)
        elif source == "greater-than":
            fields = _greater_than(generator, template, words)
        else:
            fields = _capital(generator, template, words, words[index])
        prompts.append(Prompt(template="joined", group=template, **fields))

    return prompts


def _of_commonest_length(tokenizer: Any, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts that have the commonest number of tokens with their answers."""
    by_length = defaultdict(list)
    for prompt in prompts:
        token_ids = tokenizer(prompt.question + prompt.answer)["input_ids"]
        by_length[len(token_ids)].append(prompt)
    return max(by_length.values(), key=len)


def _of_commonest_size(tokenizer: Any, words: Sequence[str]) -> list[str]:
    """The words with the commonest number of tokens, without the space before them.

    Raises:
        PromptError: They are too few; the message lists the others.
    """
    sizes = {word.strip(): len(tokens_of(tokenizer, word)) for word in words}
    commonest_size, _ = Counter(sizes.values()).most_common(1)[0]
    usable = [word for word, size in sizes.items() if size == commonest_size]
    if len(usable) < _FEWEST_WORDS:
        unusable = [f"{word!r} ({size})" for word, size in sizes.items() if size != commonest_size]
        raise PromptError(
            f"only {len(usable)} words have {commonest_size} tokens with this tokenizer; other"
            f" numbers of tokens: {', '.join(unusable)}"
        )
    return usable


def _indirect_object(generator: random.Random, template: str, names: list[str]) -> dict[str, Any]:
    """The fields of a prompt whose answer is the receiver, the name that occurs only once."""
    receiver, giver = generator.sample(names, 2)
    place = generator.choice(_WORDING["places"])
    thing = generator.choice(_WORDING["things"])
    first, second = generator.sample([receiver, giver], 2)
    scene = partial(template.format, first=first, second=second, place=place, thing=thing)
    return {
        "question": scene(giver=giver),
        "counterpart": scene(giver=receiver),
        "answer": f" {receiver}",
        "other_answer": f" {giver}",
    }


def _greater_than(generator: random.Random, template: str, numbers: list[str]) -> dict[str, Any]:
    """The fields of a prompt whose answer is a year after its beginning.

    All four numbers differ in their first digit, for tokenizers that split numbers into digits.
    """
    # The counterpart begins in the 20s or 30s and the prompt in the 60s or 70s: this leaves whole
    # decades between the two beginnings, and the 80s after the later one.
    early_year = _number_between(generator, numbers, 21, 39)
    late_year = _number_between(generator, numbers, 60, 79)
    early_decade = int(early_year) // 10 * 10
    late_decade = int(late_year) // 10 * 10
    year_between = _number_between(generator, numbers, early_decade + 10, late_decade - 1)
    year_after = _number_between(generator, numbers, late_decade + 10, 99)
    century = generator.randrange(11, 20)
    event = generator.choice(_WORDING["events"])
    sentence = partial(template.format, event=event, century=century)
    return {
        "question": sentence(year=late_year),
        "counterpart": sentence(year=early_year),
        "answer": year_after,
        "other_answer": year_between,
    }


def _number_between(generator: random.Random, numbers: list[str], lowest: int, highest: int) -> str:
    """Draw one of the numbers from ``lowest`` to ``highest``.

    Raises:
        PromptError: There is none.
    """
    candidates = [number for number in numbers if lowest <= int(number) <= highest]
    if not candidates:
        raise PromptError(
            f"greater-than needs a number from {lowest} to {highest}, and all of these have an"
            " unusual number of tokens with this tokenizer; use another source"
        )
    return generator.choice(candidates)


def _capital(
    generator: random.Random, template: str, countries: list[str], country: str
) -> dict[str, Any]:
    """The fields of a prompt whose answer is the capital of ``country``."""
    other_country = generator.choice([other for other in countries if other != country])
    return {
        "question": template.format(country=country),
        "counterpart": template.format(country=other_country),
        "answer": f" {_CAPITALS[country]}",
        "other_answer": f" {_CAPITALS[other_country]}",
    }
