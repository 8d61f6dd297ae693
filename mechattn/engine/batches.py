"""Which prompts share a batch (a pure function of lengths and a memory budget), and halves of one that is too large."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from mechattn.errors import ModelError
from mechattn.functional.rows import BLOCK
from mechattn.results.result import memory_bytes

# Scores, masked scores, pattern and the working copies of a reduction are in memory at the same time, in float32.
_SQUARES = 6
_LARGEST_BATCH = 64
_CPU = ("not enough memory", "can't allocate memory", "cannot allocate memory", "out of memory")
_FULLEST = 0.75  # a batch is not padded beyond its shortest prompt / 0.75
Fitting = TypeVar("Fitting")


@dataclass(frozen=True)
class Cost:
    """The memory of a row of a batch, in bytes; it depends only on the row's length, so a plan is reproducible."""

    heads: int  # attention heads per layer
    width: int  # numbers in memory at the same time for each position: residual stream, MLP, projections
    square: bool  # whether a layer's whole pattern is in memory (hooks), or blocks of rows (streaming)

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


def in_halves(indices: Seq[int], measure: Callable[[Seq[int]], Fitting]) -> tuple[list[Fitting], list[int]]:
    """Measure some prompts together; if they don't fit in memory, each half of them, and so on."""
    measured, too_large, waiting = [], [], [list(indices)]
    while waiting:
        some = waiting.pop(0)
        try:
            measured.append(measure(some))
            continue
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        # Outside the except block, where the error no longer keeps the tensors of the pass alive.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if len(some) == 1:
            raise ModelError(
                f"a batch of prompt number {some[0]} alone with all its conditions does not fit in memory ({reason}); "
                f"use fewer conditions per run, a shorter prompt, or a machine with more memory"
            )
        too_large.append(len(some))
        waiting[:0] = [some[: len(some) // 2], some[len(some) // 2 :]]
    return measured, too_large


def is_out_of_memory(error: Any) -> bool:
    """Whether a device or the machine had no memory left."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _CPU)
