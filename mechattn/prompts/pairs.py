"""Pairs each sequence of a batch with the baseline of its prompt, and aligns their tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mechattn.prompts.sequences import PADDING, Batch


@dataclass(frozen=True)
class Pairs:
    """Every sequence of a batch paired with the baseline of its prompt; a baseline with itself.

    Args:
        batch: The sequences.
        baseline: The row of each sequence's baseline.
        place: The position of each original token in the sequence; 0 where there is none.
        original: Which original tokens exist, by position in the baseline.
        segment: The segment of each original token, by its index in ``SEGMENTS``; −2 where there is none.
        reach: For each position, the number of original tokens at or before it, in the pair with the most.
    """

    batch: Batch
    baseline: Int[Tensor, " pair"]
    place: Int[Tensor, "pair original"]
    original: Bool[Tensor, "pair original"]
    segment: Int[Tensor, "pair original"]
    reach: tuple[int, ...]


def pairs_of(batch: Batch, baseline: str) -> Pairs:
    """The pairs of a batch that holds all conditions of its prompts."""
    first = {prompt: row for row, (prompt, name) in enumerate(batch.rows) if name == baseline}
    device = batch.tokens.device
    origin = batch.origin.cpu()
    exists = origin >= 0
    place = torch.zeros(len(batch.rows), int(exists.sum(-1).max()), dtype=torch.long)
    original = torch.zeros_like(place, dtype=torch.bool)
    pair, position = exists.nonzero(as_tuple=True)
    place[pair, origin[pair, position]] = position
    original[pair, origin[pair, position]] = True
    segment = batch.segment.cpu().gather(1, place).masked_fill(~original, PADDING)
    return Pairs(
        batch=batch,
        baseline=torch.tensor([first[prompt] for prompt, _ in batch.rows], device=device),
        place=place.to(device),
        original=original.to(device),
        segment=segment.to(device),
        reach=tuple(exists.cumsum(-1).amax(0).tolist()),
    )
