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

_SHARE = 4  # of the memory: the held values of one condition take at most this fraction


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
    """Load a quantity for one condition and segment into memory, in float64, and drop all other analyses.

    Returns the result itself if the values are already in memory, if they would take more than a quarter of ``memory``,
    or if the segment is missing, which raises an error when it is used.
    """
    rest = _rest(result, quantity, segment, memory)
    if rest is None:
        return Held(result, memory)
    at, names = _named(result, quantity)
    dataset = result[at]
    wanted = {"condition": condition} | ({"segment": segment} if "segment" in dataset[names[0]].dims else {})
    places = {dim: dataset[dim].values.tolist().index(label) for dim, label in wanted.items()}
    chosen = dataset[names].isel({dim: slice(place, place + 1) for dim, place in places.items()})
    return Held(replace(result, datasets={"sequences": result["sequences"], at: chosen.astype(np.float64)}), rest)


def holds(result: Result, quantity: str, segment: str, memory: str) -> bool:
    """Whether :func:`held` loads a condition of this quantity into memory."""
    return _rest(result, quantity, segment, memory) is not None


def _rest(result: Result, quantity: str, segment: str, memory: str) -> str | None:
    """The memory that is left beside two held conditions; None if nothing is to be held."""
    at, names = _named(result, quantity)
    dataset = result[at]
    if not is_lazy(result) or ("segment" in dataset[names[0]].dims and segment not in dataset.segment.values):
        return None
    each = [{dim: n for dim, n in dataset[name].sizes.items() if dim not in ("condition", "segment")} for name in names]
    size = 8 * sum(prod(sizes.values()) for sizes in each)
    if size > memory_bytes(memory) // _SHARE:
        return None
    rest = f"{(memory_bytes(memory) - 2 * size) / 2**10:.3f}KiB"
    try:
        layer_blocks(result, quantity, "segment", segment, rest, signs=RESAMPLES)
    except MemoryOptionError:
        return None
    return rest


def _named(result: Result, quantity: str) -> tuple[str, list[str]]:
    """The dataset that has a quantity, and the names of its variable and those of its nulls."""
    at, name = dataset_of(result, quantity, "segment")
    return at, [name, *(found for kind in NULLS if (found := f"{name}_{kind}") in result[at])]
