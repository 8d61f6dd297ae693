"""The batch plan: which prompts go through the model together, a pure function of lengths and a memory budget."""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq

from mechattn.errors import OptionError

_UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
# Scores, masked scores, pattern and the working copies of a reduction live at the same time, in float32.
_SQUARES = 6
_LARGEST_BATCH = 64


def memory_bytes(memory: str) -> int:
    """The number of bytes of a budget such as "2GiB".

    Raises:
        OptionError: It isn't written like that.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(KiB|MiB|GiB)\s*", str(memory), re.IGNORECASE)
    if not match or not float(match[1]):
        raise OptionError(f'memory={memory!r}: write it like "2GiB" or "500MiB"')
    return int(float(match[1]) * _UNITS[match[2].upper()])


def batch_plan(lengths: Seq[Seq[int]], heads: int, memory: str) -> list[list[int]]:
    """Group prompts of similar length so that the attention of one layer fits the budget.

    Args:
        lengths: For each prompt the length of its sequence in every condition.
        heads: Attention heads a layer.
        memory: The budget.

    Returns:
        Prompt indices for each batch; a prompt that exceeds the budget alone still gets a batch.
    """
    budget = memory_bytes(memory)
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (max(lengths[i]), i)):
        rows = (len(batches[-1]) + 1 if batches else 1) * len(lengths[index])
        needed = rows * heads * max(lengths[index]) ** 2 * 4 * _SQUARES
        if not batches or needed > budget or rows > _LARGEST_BATCH:
            batches.append([])
        batches[-1].append(index)
    return batches
