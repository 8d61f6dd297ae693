"""Keeps a quantity of a stored result in memory for several tables, so that it is read only once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from mechattn.errors import MemoryOptionError
from mechattn.results.layer_blocks import layer_blocks
from mechattn.results.lazy import is_lazy
from mechattn.results.quantities import NULLS, dataset_of
from mechattn.results.size import memory_bytes
from mechattn.stats.paired import RESAMPLES

if TYPE_CHECKING:
    from mechattn.results.result import Result

_SHARE = 8  # of the memory: the held values of one condition take at most this fraction


@dataclass(frozen=True)
class Held:
    """A result prepared for several tables.

    Args:
        result: The result, with the held values in memory.
        memory: The memory left for the tables, besides the held values of two conditions.
    """

    result: Result
    memory: str


def held(result: Result, quantity: str, condition: str, segment: str, memory: str) -> Held:
    """Load a quantity for one condition and segment into memory, and drop all other analyses.

    Returns the result itself if the values are already in memory, if they would take more than an eighth of ``memory``,
    or if the segment is missing, which raises an error when it is used.
    """
    at, name = dataset_of(result, quantity, "segment")
    dataset = result[at]
    names = [name, *(found for kind in NULLS if (found := f"{name}_{kind}") in dataset)]
    of_segment = "segment" in dataset[name].dims
    unchanged = Held(result, memory)
    if not is_lazy(result) or (of_segment and segment not in dataset.segment.values):
        return unchanged
    wanted = {"condition": condition} | ({"segment": segment} if of_segment else {})
    at_each = {dim: dataset[dim].values.tolist().index(label) for dim, label in wanted.items()}
    chosen = dataset[names].isel({dim: slice(at, at + 1) for dim, at in at_each.items()})
    size = 8 * sum(prod(variable.shape) for variable in chosen.data_vars.values())
    rest = f"{(memory_bytes(memory) - 2 * size) / 2**10:.3f}KiB"
    if size > memory_bytes(memory) // _SHARE:
        return unchanged
    try:
        layer_blocks(result, quantity, "segment", segment, rest, signs=RESAMPLES)
    except MemoryOptionError:
        return unchanged
    return Held(replace(result, datasets={"sequences": result["sequences"], at: chosen.astype(np.float64)}), rest)
