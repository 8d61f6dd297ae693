"""The batch plan: which prompts share a batch, as a pure function of lengths and a memory budget."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from mechattn.functional.rows import BLOCK
from mechattn.results.memory import memory_bytes

# Scores, masked scores, pattern and the working copies of a reduction are in memory at the same time, in float32.
_SQUARES = 6
_LARGEST_BATCH = 64
_FULLEST = 0.75  # a batch is not padded beyond its shortest prompt / 0.75


@dataclass(frozen=True)
class Cost:
    """The memory of a row of a batch, in bytes; it depends only on the row's length, so a plan is reproducible.

    Args:
        heads: Attention heads per layer.
        width: Numbers in memory at the same time for each position: residual stream, MLP, projections.
        square: Whether a layer's whole pattern is in memory (hooks), or blocks of rows (streaming).
    """

    heads: int
    width: int
    square: bool

    def of(self, length: int) -> int:
        """Bytes for one sequence."""
        attention = self.heads * length * (length * _SQUARES if self.square else BLOCK * 2)
        return 4 * (attention + length * self.width)


def batch_plan(lengths: Seq[Seq[int]], cost: Cost, memory: str, sides: Seq[str] = ()) -> list[list[int]]:
    """Group prompts of similar length so that one layer of a batch fits the budget."""
    budget = memory_bytes(memory)
    batches: list[list[int]] = []
    shortest = 0
    side = list(sides) or [""] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda i: (side[i], max(lengths[i]), i)):
        longest = max(lengths[index])
        rows = (len(batches[-1]) + 1 if batches else 1) * len(lengths[index])
        full = rows * cost.of(longest) > budget or rows > _LARGEST_BATCH
        crosses = bool(batches) and side[batches[-1][0]] != side[index]
        if not batches or full or crosses or shortest < _FULLEST * longest:
            batches.append([])
            shortest = longest
        batches[-1].append(index)
    return batches
