"""Blocks of layers, so that tables of results larger than memory can be computed within a given budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from mechattn.errors import MemoryOptionError
from mechattn.results.quantities import variable_of
from mechattn.results.size import memory_bytes
from mechattn.stats.bags import resampled

if TYPE_CHECKING:
    import xarray as xr

    from mechattn.results.result import Result

_COPIES = 8  # float64 arrays [prompt, cell] in memory at the same time in a comparison: measured 4 to 6
_KEPT = 6  # arrays kept for resampling [unit or bag, cell], for all layers


def layer_blocks(
    result: Result,
    quantity: str,
    by: str,
    segment: str | None,
    memory: str,
    bootstrap: int = 0,
    signs: int = 0,
    kept: bool = True,
) -> list[slice]:
    """Split the layers into blocks that fit in memory; one block if all fit or the quantity has no layers.

    Args:
        result: A result.
        quantity: The quantity to be compared.
        by: As for ``Result.compare``.
        segment: As for ``Result.compare``.
        memory: The memory budget.
        bootstrap: The number of bootstrap resamples, which all blocks share.
        signs: The number of sign patterns, which all blocks share.
        kept: Whether each cell's values for resampling are kept until all blocks are done.

    Raises:
        MemoryOptionError: A single layer does not fit.
    """
    variable = variable_of(result, quantity, by)
    sizes = {str(dim): size for dim, size in variable.sizes.items()}
    prompts = sizes.pop("prompt")
    layers = sizes.get("layer", 1)
    cells = prod(size for dim, size in sizes.items() if dim != "condition" and (segment is None or dim != "segment"))
    each = 8 * _COPIES * prompts * cells // layers
    each += 2 * variable.dtype.itemsize * prompts * prod(sizes.values()) // (layers * sizes.get("condition", 1))
    shared = 0
    if signs:
        shared = resampled(prompts) * (2 * bootstrap + max(signs, 20 * cells) // 8)
    if kept and signs:
        shared += 8 * _KEPT * resampled(prompts) * cells
    room = memory_bytes(memory) - shared
    at_a_time = max(room, 0) // each if each else layers
    if at_a_time >= layers:
        return [slice(None)]
    if at_a_time < 1:
        needed = shared + each
        raise MemoryOptionError(
            f"{quantity!r} of {prompts:,} prompts takes {-(-needed // 2**20):,} MiB, and memory={memory!r} "
            f'allows less; give more (memory="{-(-needed // 2**20)}MiB"), or fewer resamples'
        )
    return [slice(start, min(start + at_a_time, layers)) for start in range(0, layers, at_a_time)]


def layers_of(values: xr.DataArray, memory: str) -> Iterator[xr.DataArray]:
    """Yield per-prompt values a few layers at a time, as for :func:`layer_blocks`.

    Raises:
        MemoryOptionError: A single layer does not fit.
    """
    layers = values.sizes["layer"]
    each = 8 * _COPIES * values.size // max(1, layers)
    at_a_time = min(layers, memory_bytes(memory) // max(1, each))
    if layers and at_a_time < 1:
        raise MemoryOptionError(
            f"a layer of {str(values.name)!r} of {values.sizes['prompt']:,} prompts takes {-(-each // 2**20):,} MiB, "
            f'and memory={memory!r} allows less; give more (memory="{-(-each // 2**20)}MiB")'
        )
    if at_a_time == layers:
        yield values
        return
    for start in range(0, layers, at_a_time):
        yield values.isel(layer=slice(start, start + at_a_time))


def of_layers(result: Result, some: slice) -> Result:
    """Return the result for some layers only, without reading any values."""
    if some == slice(None):
        return result
    cut = {n: one.isel(layer=some) if "layer" in one.dims else one for n, one in result.datasets.items()}
    return replace(result, datasets=cut)
