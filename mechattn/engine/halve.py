"""A batch that doesn't fit the memory is measured in halves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from mechattn.engine.collect import TakesValues
from mechattn.errors import ModelError
from mechattn.prompts.sequences import Batch

Measure = Callable[[Batch, Seq[TakesValues]], None]
_CPU = ("not enough memory", "can't allocate memory", "cannot allocate memory", "out of memory")


class _Once:
    """Hands on the values of layers that have not been taken yet: a batch may have failed in the middle."""

    def __init__(self, collector: TakesValues, taken: frozenset[int]) -> None:
        self.collector, self.before, self.taken = collector, taken, set(taken)

    def add(self, layer: int, batch: Batch, values: Mapping[str, Tensor]) -> None:
        """Take the values of one layer for one batch."""
        if layer not in self.before:
            self.collector.add(layer, batch, values)
            self.taken.add(layer)


def measure_halving(
    measure: Measure, made: Callable[[Seq[int]], Batch], indices: Seq[int], collectors: Seq[TakesValues]
) -> list[int]:
    """Measure some prompts together; where the memory doesn't hold them, each half of them, and so on.

    Args:
        measure: Runs the model on a batch and hands the values to collectors.
        made: Makes the batch of some prompts.
        indices: The prompts.
        collectors: Where the values go; layers that a failed batch has measured already are not added again.

    Returns:
        How many prompts were in each batch that didn't fit.

    Raises:
        ModelError: A single prompt with its conditions doesn't fit.
    """
    return _halved(measure, made, indices, collectors, [frozenset[int]()] * len(collectors))


def _halved(
    measure: Measure,
    made: Callable[[Seq[int]], Batch],
    indices: Seq[int],
    collectors: Seq[TakesValues],
    taken: Seq[frozenset[int]],
) -> list[int]:
    once = [_Once(collector, layers) for collector, layers in zip(collectors, taken, strict=True)]
    try:
        measure(made(indices), once)
        return []
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    # Outside of the except, where the error no longer holds the tensors of the pass.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if len(indices) == 1:
        raise ModelError(
            f"the memory does not hold a batch of prompt number {indices[0]} alone with all its conditions ({reason}); "
            "give fewer conditions at a time, a shorter prompt, or a machine with more memory"
        )
    middle = len(indices) // 2
    done = [frozenset(one.taken) for one in once]
    failed = [len(indices)]
    for half in (indices[:middle], indices[middle:]):
        failed += _halved(measure, made, half, collectors, done)
    return failed


def is_out_of_memory(error: Any) -> bool:
    """Whether a device or the machine had no memory left."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _CPU)
