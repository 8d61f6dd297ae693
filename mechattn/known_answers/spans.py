"""The input of the known heads: a unique token, then a repeated span of different tokens."""

from __future__ import annotations

import torch

VOCABULARY, SHORTEST, LONGEST, LENGTH = 48, 8, 24, 48


def repeated_spans(count: int, generator: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [count, 1 + LENGTH], and which of them can be predicted."""
    tokens = torch.full((count, 1 + LENGTH), VOCABULARY - 1)
    foreseen = torch.ones(count, 1 + LENGTH, dtype=torch.bool)
    for row, span in enumerate(torch.randint(SHORTEST, LONGEST + 1, (count,), generator=generator).tolist()):
        drawn = torch.randperm(VOCABULARY - 1, generator=generator)[:span]
        tokens[row, 1:] = drawn.repeat(LENGTH // span + 1)[:LENGTH]
        foreseen[row, : span + 2] = False
    return tokens, foreseen
