"""How the attention that a segment receives changes from the baseline, compared with its uniform null."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from mechattn.axes import BASELINE
from mechattn.errors import OptionError
from mechattn.results.layer_blocks import layer_blocks
from mechattn.results.prompt_blocks import prompt_blocks
from mechattn.results.units import units_of
from mechattn.stats.comparison import Block, Verdict, against_null_in_blocks
from mechattn.stats.intervals import FEWEST
from mechattn.stats.paired import RESAMPLES
from mechattn.stats.units import Unit

if TYPE_CHECKING:
    import xarray as xr

    from mechattn.results.result import Result


def verdict(result: Result, condition: str | None, segment: str, unit: Unit, memory: str = "2GiB") -> Verdict:
    """See :meth:`mechattn.results.result.Result.verdict`, which explains the arguments."""
    condition = result.condition(condition)
    dataset = result["received_attention"]
    if not {"received_by_segment", "received_by_segment_uniform"} <= set(dataset):
        raise OptionError("this result lacks the attention by segment, or its null: it was changed after it was made")
    if segment not in dataset.segment.values:
        raise _missing(segment)
    units = units_of(result, dataset.sizes["prompt"], unit)
    units.refuse_below(FEWEST)
    layers = layer_blocks(result, "received", "segment", segment, memory, signs=RESAMPLES)
    shape = [dataset.sizes[dim] for dim in ("prompt", "layer", "head")]
    if len(layers) == 1:
        made = _block(dataset, condition, segment)
        return against_null_in_blocks([made], _means([made]), units)
    means = _means(_block(dataset, condition, segment, prompt=some) for some in prompt_blocks([*shape, 2], memory))
    return against_null_in_blocks((_block(dataset, condition, segment, layer=some) for some in layers), means, units)


def _means(blocks: Iterable[Block]) -> list[np.ndarray]:
    """Each prompt's mean over layers and heads of each of the four arrays, from blocks of prompts."""
    means = [[np.asarray(part.sum(axis=(1, 2)) / part[0].size) for part in block] for block in blocks]
    return [np.concatenate(parts) for parts in zip(*means, strict=True)]


def _block(dataset: xr.Dataset, condition: str, segment: str, **at: slice) -> Block:
    """The four arrays to compare, for some layers or prompts."""
    dataset = dataset.isel(at).sel(segment=segment).transpose("prompt", "condition", "layer", ...)

    def values(quantity: str, of: str) -> np.ndarray:
        found = dataset[quantity].sel(condition=of).values.astype(np.float64)
        if quantity == "received_by_segment" and np.isnan(found).any():
            raise _missing(segment)
        return found

    return (
        values("received_by_segment", condition),
        values("received_by_segment", BASELINE),
        values("received_by_segment_uniform", condition)[..., None],
        values("received_by_segment_uniform", BASELINE)[..., None],
    )


def _missing(segment: str) -> OptionError:
    return OptionError(f"not every prompt has received attention in the segment {segment!r}")
