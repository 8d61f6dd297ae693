"""Repeated random tokens, which reveal induction heads: only the earlier copy predicts the next token."""

from __future__ import annotations

import random

from mechattn.errors import OptionError
from mechattn.prompts.fillers import random_tokens
from mechattn.prompts.prompt import MOST, Prompt
from mechattn.prompts.templates import TokenizedModel, own_bos

SHORTEST, LONGEST = 25, 50


def repeated_random(
    model: TokenizedModel,
    limit: int = 64,
    *,
    span: tuple[int, int] = (SHORTEST, LONGEST),
    times: int = 2,
    seed: int = 0,
) -> list[Prompt]:
    """Make prompts of a random span of ordinary tokens, repeated twice or more; each prompt has its own span.

    No token occurs twice within a span, so an earlier occurrence of a token is always in an earlier copy of the span.

    Args:
        model: The model whose vocabulary tokens are drawn from. A BOS token comes first if the model uses one. Without
            a tokenizer, all ids can be drawn.
        limit: The number of prompts.
        span: The shortest and the longest span, in tokens; all lengths are equally likely.
        times: How often the span occurs.
        seed: The seed of the draws.

    Raises:
        OptionError: There are no or too many prompts, or a span is empty, occurs only once, or needs more tokens than
            the vocabulary has.

    Source:
        Olsson et al. 2022, "In-context learning and induction heads": prefix matching.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise OptionError(f"limit={limit!r}: give a whole number of prompts, at least 1")
    if limit > MOST:
        raise OptionError(f"limit={limit}: at most {MOST:,} prompts are generated")
    shortest, longest = span
    if not 1 <= shortest <= longest or times < 2:
        raise OptionError(
            f"span={span!r}, times={times!r}: give a shortest and a longest span, and at least two repetitions"
        )
    bos = own_bos(model)
    made = []
    for index in range(limit):
        draw = random.Random(f"repeated {seed} {index}")
        tokens = _distinct(model, draw.randint(shortest, longest), draw)
        made.append(Prompt(tokens=(*([] if bos is None else [bos]), *tokens * times), id=str(index)))
    return made


def _distinct(model: TokenizedModel, count: int, draw: random.Random) -> list[int]:
    size = int(model.cfg.d_vocab)
    if model.tokenizer is None and size >= count:
        return draw.sample(range(size), count)
    found: dict[int, None] = {}
    for _ in range(
        200 if size >= count else 0
    ):  # draws are with replacement, so a small vocabulary needs several rounds
        found |= dict.fromkeys(random_tokens(model.tokenizer, size, count, draw))
        if len(found) >= count:
            return list(found)[:count]
    raise OptionError(f"a span of {count} different tokens needs a larger vocabulary than {size}; give a shorter span")
