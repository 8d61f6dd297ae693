"""Blocks of layers or prompts, so that results larger than memory are read within the budget that each carries."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from mechattn.contrast.quantities import NULLS, dataset_of, variable_of
from mechattn.errors import MemoryOptionError
from mechattn.results.arrays import is_lazy
from mechattn.results.result import memory_bytes
from mechattn.stats.bags import resampled
from mechattn.stats.paired import RESAMPLES

if TYPE_CHECKING:
    import xarray as xr

    from mechattn.results.result import Result

_COPIES = 8  # float64 arrays [prompt, cell] in memory at the same time in a comparison: measured 4 to 6
_KEPT = 6  # arrays kept for resampling [unit or bag, cell], for all layers
_SHARE = 4  # of the memory: a quantity that is kept takes at most this fraction


def slices(count: int, each: int, memory: str, what: str, shared: int = 0) -> list[slice]:
    """Split a number of layers or prompts, which take ``each`` bytes beside ``shared`` ones, into blocks that fit."""
    at_a_time = max(memory_bytes(memory) - shared, 0) // max(1, each)
    if at_a_time >= count:
        return [slice(None)]
    if at_a_time < 1:
        needed = -(-(shared + each) // 2**20)
        raise MemoryOptionError(
            f"{what} takes {needed:,} MiB, and memory={memory!r} allows less; give more "
            f'(ma.load_result(…, memory="{needed}MiB"), or --memory {needed}MiB), or fewer resamples'
        )
    return [slice(start, min(start + at_a_time, count)) for start in range(0, count, at_a_time)]


def layer_blocks(
    result: Result, quantity: str, by: str, segment: str | None, bootstrap: int = 0, signs: int = 0
) -> list[slice]:
    """The layers of a quantity in blocks for a comparison with these numbers of resamples and sign patterns."""
    variable = variable_of(result, quantity, by)
    sizes = {str(dim): size for dim, size in variable.sizes.items()}
    prompts, layers = sizes.pop("prompt"), sizes.get("layer", 1)
    cells = prod(size for dim, size in sizes.items() if dim != "condition" and (segment is None or dim != "segment"))
    each = 8 * _COPIES * prompts * cells // layers
    each += 2 * variable.dtype.itemsize * prompts * prod(sizes.values()) // (layers * sizes.get("condition", 1))
    shared = 0
    if signs:
        shared = resampled(prompts) * (2 * bootstrap + max(signs, 20 * cells) // 8 + 8 * _KEPT * cells)
    return slices(layers, each, result.memory, f"{quantity!r} of {prompts:,} prompts", shared)


def in_parts(values: xr.DataArray, dim: str, memory: str) -> Iterator[xr.DataArray]:
    """Yield values some layers or prompts at a time."""
    count = values.sizes[dim]
    for some in slices(count, 8 * _COPIES * values.size // max(1, count), memory, f"one {dim} of {values.name!r}"):
        yield values if some == slice(None) else values.isel({dim: some})


def prompt_means(values: xr.DataArray, over: Seq[str], memory: str) -> xr.DataArray:
    """Each prompt's mean over some dimensions, as ``values.mean(over)``."""
    import xarray as xr

    made = [part.mean(list(over)) for part in in_parts(values, "prompt", memory)]
    return made[0] if len(made) == 1 else xr.concat(made, "prompt", join="exact")


def of(result: Result, dim: str, some: slice) -> Result:
    """The result for some layers or prompts only, without reading any values."""
    if some == slice(None):
        return result
    cut = {n: one.isel({dim: some}) if dim in one.dims else one for n, one in result.datasets.items()}
    return replace(result, datasets=cut)


def kept(result: Result, quantity: str, condition: str, segment: str) -> Result:
    """A stored result with a quantity of one condition read into memory, if it takes at most a quarter of it."""
    at, name = dataset_of(result, quantity)
    dataset = result[at]
    names = [name, *(found for kind in NULLS if (found := f"{name}_{kind}") in dataset)]
    by_segment = "segment" in dataset[name].dims
    if not is_lazy(result) or (by_segment and segment not in dataset.segment.values):
        return result
    wanted = {"condition": [condition]} | ({"segment": [segment]} if by_segment else {})
    some = dataset[names].sel(wanted)
    size = 8 * sum(prod(variable.shape) for variable in some.data_vars.values())
    if size > memory_bytes(result.memory) // _SHARE:
        return result
    rest = f"{(memory_bytes(result.memory) - 2 * size) / 2**10:.3f}KiB"
    made = replace(result, datasets={"sequences": result["sequences"], at: some}, memory=rest)
    try:
        layer_blocks(made, quantity, "segment", segment, RESAMPLES, RESAMPLES)
    except MemoryOptionError:
        return result
    return replace(made, datasets={**made.datasets, at: some.astype(np.float64)})
