"""Random tokens, repeated: only what stood there before tells what comes next, so induction heads show themselves."""

from __future__ import annotations

import random

from mechattn.errors import OptionError
from mechattn.prompts.fillers import random_tokens
from mechattn.prompts.prompt import Prompt
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
    """Prompts of a span of ordinary tokens, drawn anew for each prompt, that is read twice or more.

    Within a span no token comes twice, so that an earlier place of a token is always the one in an earlier span.

    Args:
        model: Its vocabulary is drawn from; a BOS token stands first where it reads text after one. Of a model without
            a tokenizer all ids are drawn.
        limit: How many prompts.
        span: The shortest and the longest span, in tokens; each length is as likely as another.
        times: How often the span is read.
        seed: Which prompts.

    Raises:
        OptionError: A span is empty, it is read once, or the vocabulary has too few tokens for it.

    Source:
        Olsson et al. 2022, "In-context learning and induction heads": prefix matching.
    """
    shortest, longest = span
    if not 1 <= shortest <= longest or times < 2:
        raise OptionError(f"span={span!r}, times={times!r}: give a shortest and a longest span, read twice at least")
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
    for _ in range(200 if size >= count else 0):  # draws with replacement: a small vocabulary needs several
        found |= dict.fromkeys(random_tokens(model.tokenizer, size, count, draw))
        if len(found) >= count:
            return list(found)[:count]
    raise OptionError(f"a span of {count} different tokens needs a larger vocabulary than {size}; give a shorter span")
