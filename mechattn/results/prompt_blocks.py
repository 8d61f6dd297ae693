"""Per-prompt means over layers and heads, computed some prompts at a time, since each needs all cells of its prompt."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from math import prod
from typing import TYPE_CHECKING

from mechattn.errors import MemoryOptionError
from mechattn.results.size import memory_bytes

if TYPE_CHECKING:
    import xarray as xr

_COPIES = 6  # float64 arrays [prompt, cell] in memory at the same time while a mean is computed


def prompt_blocks(sizes: Seq[int], memory: str) -> list[slice]:
    """Split the prompts into blocks that fit in memory; a stored chunk in two blocks is read twice.

    Args:
        sizes: The number of prompts, followed by the numbers per prompt of each array that is read at the same time.
        memory: The memory budget.

    Raises:
        MemoryOptionError: A single prompt does not fit.
    """
    prompts, each = sizes[0], 8 * _COPIES * prod(sizes[1:])
    rows = memory_bytes(memory) // each
    if rows < 1:
        raise MemoryOptionError(
            f"a prompt takes {-(-each // 2**10):,} KiB, and memory={memory!r} allows less; give more "
            f'(memory="{-(-each // 2**10)}KiB")'
        )
    if rows >= prompts:
        return [slice(None)]
    return [slice(start, min(start + rows, prompts)) for start in range(0, prompts, rows)]


def prompt_means(values: xr.DataArray, over: Seq[str], memory: str) -> xr.DataArray:
    """Compute each prompt's mean over some dimensions, as ``values.mean(over)`` does.

    Args:
        values: The values; one of the dimensions is "prompt".
        over: The dimensions to average over.
        memory: The memory budget.
    """
    import xarray as xr

    parts = [part.mean(list(over)) for part in of_prompts(values, memory)]
    return parts[0] if len(parts) == 1 else xr.concat(parts, "prompt", join="exact")


def of_prompts(values: xr.DataArray, memory: str) -> Iterator[xr.DataArray]:
    """Yield the values some prompts at a time."""
    sizes = [values.sizes["prompt"], *(size for dim, size in values.sizes.items() if dim != "prompt")]
    for some in prompt_blocks(sizes, memory):
        yield values if some == slice(None) else values.isel(prompt=some)
