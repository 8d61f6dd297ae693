"""A quantity of a stored result that is kept in memory for the tables that need it, so that it is read once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from mechattn.errors import MemoryOptionError
from mechattn.results.layer_blocks import layer_blocks
from mechattn.results.lazy import is_lazy
from mechattn.results.quantities import NULLS, dataset_of
from mechattn.results.size import memory_bytes
from mechattn.stats.paired import RESAMPLES

if TYPE_CHECKING:
    from mechattn.results.result import Result

_SHARE = 8  # of the memory: what is held of one condition takes no more than this part of it


@dataclass(frozen=True)
class Held:
    """A result for some tables.

    Args:
        result: With what is held in memory.
        memory: What is left for the tables, beside what is held of two conditions.
    """

    result: Result
    memory: str


def held(result: Result, quantity: str, condition: str, segment: str, memory: str) -> Held:
    """The result with the numbers of a quantity in one condition and segment in memory, and no other analysis.

    The result itself, if these are in memory already, if they would take more than an eighth of ``memory``, or if it
    doesn't have the segment: whoever asks for it then is told so.
    """
    at, name = dataset_of(result, quantity, "segment")
    dataset = result[at]
    names = [name, *(found for kind in NULLS if (found := f"{name}_{kind}") in dataset)]
    of_segment = "segment" in dataset[name].dims
    unchanged = Held(result, memory)
    if not is_lazy(result) or (of_segment and segment not in dataset.segment.values):
        return unchanged
    chosen = dataset[names].sel({"condition": [condition]} | ({"segment": [segment]} if of_segment else {}))
    size = sum(variable.dtype.itemsize * prod(variable.shape) for variable in chosen.data_vars.values())
    rest = f"{(memory_bytes(memory) - 2 * size) / 2**10:.3f}KiB"
    if size > memory_bytes(memory) // _SHARE:
        return unchanged
    try:
        layer_blocks(result, quantity, "segment", segment, rest, signs=RESAMPLES)
    except MemoryOptionError:
        return unchanged
    return Held(replace(result, datasets={"sequences": result["sequences"], at: chosen.load()}), rest)
