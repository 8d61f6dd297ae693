"""Plans batches that fit in memory, and halves those that do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from mechattn.errors import ModelError
from mechattn.functional.attention import BLOCK
from mechattn.results.result import memory_bytes

# Scores, masked scores, pattern and the working copies of a reduction are in memory at the same
# time, in float32.
_SQUARES = 6
_FLOAT32 = 4  # bytes
_LARGEST_BATCH = 64
_FULLEST = 0.75  # a batch is not padded beyond its shortest prompt / 0.75
_CPU_WORDS = (
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "out of memory",
)
Measured = TypeVar("Measured")


@dataclass(frozen=True)
class Cost:
    """The memory of a row of a batch, in bytes; it depends only on the row's length, so a plan is
    reproducible."""

    heads: int  # attention heads per layer
    width: int  # numbers in memory at the same time for each position: residual stream, MLP, projections
    square: (
        bool  # whether a layer's whole pattern is in memory (hooks), or blocks of rows (streaming)
    )

    def of(self, length: int) -> int:
        """Bytes for one sequence."""
        row = 2 * BLOCK
        if self.square:
            row = _SQUARES * length
        attention = self.heads * length * row
        return _FLOAT32 * (attention + length * self.width)


def batch_plan(
    lengths: Sequence[Sequence[int]], cost: Cost, memory: str, sides: Sequence[str] = ()
) -> list[list[int]]:
    """Group prompts of similar length so that one layer of a batch fits the budget."""
    budget = memory_bytes(memory)
    longest_of = [max(own) for own in lengths]
    side_of = list(sides) or [""] * len(lengths)
    order = sorted(
        range(len(lengths)), key=lambda index: (side_of[index], longest_of[index], index)
    )

    batches: list[list[int]] = []
    shortest = 0
    for index in order:
        longest = longest_of[index]
        if batches:
            batch = batches[-1]
            rows = (len(batch) + 1) * len(lengths[index])
            is_full = rows * cost.of(longest) > budget or rows > _LARGEST_BATCH
            is_other_side = side_of[batch[0]] != side_of[index]
            if not is_full and not is_other_side and shortest >= _FULLEST * longest:
                batch.append(index)
                continue

        batches.append([index])
        shortest = longest
    return batches


def in_halves(
    indices: Sequence[int], measure: Callable[[Sequence[int]], Measured]
) -> tuple[list[Measured], list[int]]:
    """Measure some prompts together; if they don't fit in memory, each half of them, and so on."""
    measured = []
    too_large = []
    waiting = [list(indices)]
    while waiting:
        batch = waiting.pop(0)
        try:
            measured.append(measure(batch))
            continue
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__

        # Outside the except block, where the error no longer keeps the tensors of the pass alive.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

        if len(batch) == 1:
            raise ModelError(
                f"a batch of prompt number {batch[0]} alone with all its conditions does not fit in"
                f" memory ({reason}); use fewer conditions per run, a shorter prompt, or a machine"
                " with more memory"
            )

        too_large.append(len(batch))
        middle = len(batch) // 2
        waiting[:0] = [batch[:middle], batch[middle:]]
    return measured, too_large


def is_out_of_memory(error: Any) -> bool:
    """Whether a device or the machine had no memory left."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in message for words in _CPU_WORDS)
