"""What a model reads: token ids, and for every position where it comes from and which segment it belongs to."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mechattn.axes import SEGMENTS

INSERTED = -1


@dataclass(frozen=True)
class Sequence:
    """Token ids with their provenance.

    Args:
        tokens: Token ids.
        origin: For each position its index in the baseline sequence, −1 where it was inserted.
        segment: For each position the index of its segment in ``SEGMENTS``.
        hides: The original tokens cannot see the inserted ones.
        keeps_positions: The original tokens keep the position ids of the baseline.
    """

    tokens: Int[Tensor, " pos"]
    origin: Int[Tensor, " pos"]
    segment: Int[Tensor, " pos"]
    hides: bool = False
    keeps_positions: bool = False

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def inserted(self) -> Bool[Tensor, " pos"]:
        """Which positions were inserted by a condition."""
        return self.origin == INSERTED

    @property
    def position_ids(self) -> Int[Tensor, " pos"]:
        """What RoPE or a position embedding is told: 0, 1, 2 …; or the ids of the baseline.

        An inserted token then has the id just before that of the next token, so ids may be negative.
        """
        ids = torch.arange(len(self))
        if self.keeps_positions:
            following = len(self) - int(self.inserted.sum())
            for position in reversed(range(len(self))):
                following = following - 1 if self.inserted[position] else int(self.origin[position])
                ids[position] = following
        return ids

    def of_segment(self, name: str) -> Bool[Tensor, " pos"]:
        """Which positions belong to the segment ``name``."""
        return self.segment == SEGMENTS.index(name)


def baseline_sequence(tokens: Seq[int], segments: Seq[str]) -> Sequence:
    """A sequence into which nothing was inserted."""
    codes = torch.tensor([SEGMENTS.index(s) for s in segments], dtype=torch.long)
    return Sequence(torch.tensor(list(tokens), dtype=torch.long), torch.arange(len(tokens)), codes)


def insert(sequence: Sequence, filler: Seq[int], at: int) -> Sequence:
    """The sequence with ``filler`` put before position ``at``; the original tokens stay the same tokens."""

    def spliced(old: Tensor, new: Tensor) -> Tensor:
        return torch.cat([old[:at], new, old[at:]])

    count = len(filler)
    longer = Sequence(
        spliced(sequence.tokens, torch.tensor(list(filler), dtype=torch.long)),
        spliced(sequence.origin, torch.full((count,), INSERTED)),
        spliced(sequence.segment, torch.full((count,), SEGMENTS.index("inserted"))),
    )
    assert torch.equal(longer.tokens[~longer.inserted], sequence.tokens), "an insertion changed the original tokens"
    return longer


@dataclass(frozen=True)
class Batch:
    """Sequences padded on the right to one length; padding has origin and segment −2 and never counts.

    ``rows[i]`` says which prompt and which condition row ``i`` is. ``hidden`` are the positions that original tokens
    cannot see, None where there is none; ``position_ids`` None where all are 0, 1, 2 ….
    """

    tokens: Int[Tensor, "batch pos"]
    origin: Int[Tensor, "batch pos"]
    segment: Int[Tensor, "batch pos"]
    lengths: Int[Tensor, " batch"]
    rows: tuple[tuple[int, str], ...]
    hidden: Bool[Tensor, "batch pos"] | None = None
    position_ids: Int[Tensor, "batch pos"] | None = None

    @property
    def real(self) -> Bool[Tensor, "batch pos"]:
        """Which positions hold a token rather than padding."""
        return self.segment >= 0

    @property
    def inserted(self) -> Bool[Tensor, "batch pos"]:
        """Which positions were inserted by a condition."""
        return self.origin == INSERTED

    def of_segment(self, name: str) -> Bool[Tensor, "batch pos"]:
        """Which positions belong to the segment ``name``."""
        return self.segment == SEGMENTS.index(name)

    def members(self) -> Bool[Tensor, "batch segment pos"]:
        """Membership of every position in every segment, in the order of ``SEGMENTS``."""
        return self.segment[:, None, :] == torch.arange(len(SEGMENTS), device=self.segment.device)[:, None]

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device."""
        tensors = ("tokens", "origin", "segment", "lengths", "hidden", "position_ids")
        given = {name: getattr(self, name) for name in tensors}
        return replace(self, **{name: value.to(device) for name, value in given.items() if value is not None})


PADDING = -2


def pad_right(sequences: Seq[Sequence], rows: Seq[tuple[int, str]], pad_token: int) -> Batch:
    """Put sequences into one batch, padded on the right."""

    def padded(parts: list[Tensor], value: int) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=value)

    hidden = padded([s.inserted & s.hides for s in sequences], 0) if any(s.hides for s in sequences) else None
    kept = any(s.keeps_positions for s in sequences)
    return Batch(
        tokens=padded([s.tokens for s in sequences], pad_token),
        origin=padded([s.origin for s in sequences], PADDING),
        segment=padded([s.segment for s in sequences], PADDING),
        lengths=torch.tensor([len(s) for s in sequences]),
        rows=tuple(rows),
        hidden=hidden,
        position_ids=padded([s.position_ids for s in sequences], 0) if kept else None,
    )
