"""Blocks of layers, so that what a table is made of fits a stated memory: a result may be larger than any machine's."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from mechattn.errors import OptionError
from mechattn.results.quantities import variable_of
from mechattn.results.size import memory_bytes

if TYPE_CHECKING:
    from mechattn.results.result import Result

_COPIES = 12  # arrays of float64 [prompt, cell] that live at the same time in a comparison
_A_HEAD = {"prompt", "condition", "layer", "head", "segment"}


def layer_blocks(
    result: Result, quantity: str, by: str, segment: str | None, memory: str, bootstrap: int = 0, signs: int = 0
) -> list[slice]:
    """Which layers are taken at a time; all of them at once where they fit, or cannot be taken apart.

    Args:
        result: A result.
        quantity: What a table is of.
        by: As for ``Result.compare``.
        segment: As for ``Result.compare``; all segments at once cannot be taken apart.
        memory: The budget.
        bootstrap: Resamples that all blocks share.
        signs: Patterns of signs that they share, as the statistics take them.

    Raises:
        OptionError: A single layer doesn't fit, or all of them where they cannot be taken apart.
    """
    variable = variable_of(result, quantity, by)
    sizes = {str(dim): size for dim, size in variable.sizes.items()}
    apart = "layer" in sizes and set(sizes) <= _A_HEAD and (segment is not None or "segment" not in sizes)
    chosen = {dim: size for dim, size in sizes.items() if dim != "condition" and (segment is None or dim != "segment")}
    layers = sizes.get("layer", 1)
    patterns = max(signs, 20 * prod(chosen.values()) // sizes["prompt"]) if signs else 0
    draws = sizes["prompt"] * (2 * bootstrap + patterns // 8)
    each = 8 * _COPIES * prod(chosen.values()) // layers
    each += 2 * variable.dtype.itemsize * prod(sizes.values()) // (layers * sizes.get("condition", 1))
    room = memory_bytes(memory) - draws
    at_a_time = room // each if each else layers
    if at_a_time >= layers:
        return [slice(None)]
    if not apart or at_a_time < 1:
        needed = draws + each * (1 if apart else layers)
        hint = "" if apart or segment is not None else ', or name a segment, such as segment="question"'
        raise OptionError(
            f"{quantity!r} of {sizes['prompt']:,} prompts takes {-(-needed // 2**20):,} MiB, and memory={memory!r} "
            f'allows less; give more (memory="{-(-needed // 2**20)}MiB"), or fewer resamples{hint}'
        )
    return [slice(start, min(start + at_a_time, layers)) for start in range(0, layers, at_a_time)]


def of_layers(result: Result, some: slice) -> Result:
    """A result of some layers; nothing is read for it."""
    if some == slice(None):
        return result
    cut = {n: one.isel(layer=some) if "layer" in one.dims else one for n, one in result.datasets.items()}
    return replace(result, datasets=cut)
