"""Means of each prompt over layers and heads, some prompts at a time: each needs all cells, of itself alone."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from math import prod
from typing import TYPE_CHECKING

from mechattn.errors import MemoryOptionError
from mechattn.results.size import memory_bytes

if TYPE_CHECKING:
    import xarray as xr

_COPIES = 6  # arrays of float64 [prompt, cell] that live at the same time where a mean is taken


def prompt_blocks(sizes: Seq[int], memory: str) -> list[slice]:
    """Which prompts are taken at a time; a stored chunk that lies in two blocks is read for both.

    Args:
        sizes: Of the arrays that are read together; the first is that of the prompts, the others of what is read.
        memory: The budget.

    Raises:
        MemoryOptionError: A single prompt doesn't fit.
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
    """The mean of each prompt over some dimensions, as ``values.mean(over)`` has it.

    Args:
        values: One of its dimensions is "prompt".
        over: What the mean is taken over.
        memory: The budget.
    """
    import xarray as xr

    parts = [part.mean(list(over)) for part in of_prompts(values, memory)]
    return parts[0] if len(parts) == 1 else xr.concat(parts, "prompt", join="exact")


def of_prompts(values: xr.DataArray, memory: str) -> Iterator[xr.DataArray]:
    """The values, some prompts at a time."""
    sizes = [values.sizes["prompt"], *(size for dim, size in values.sizes.items() if dim != "prompt")]
    for some in prompt_blocks(sizes, memory):
        yield values if some == slice(None) else values.isel(prompt=some)
