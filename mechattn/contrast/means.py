"""Means over prompts with their t intervals, as figures show them: by layer, of everything, or at
each position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xarray as xr

from mechattn.axes import BASELINE
from mechattn.contrast.quantities import has_dilution, in_parts
from mechattn.contrast.table import Ranking
from mechattn.errors import OptionError
from mechattn.results.result import Result, units_in
from mechattn.stats.intervals import FEWEST, Interval, Moments, t_interval


def over_units(result: Result, values: xr.DataArray) -> np.ndarray:
    """The values [unit, …] that an interval is computed from: those of prompts, or the means of
    groups.
    """
    return units_in(result, values).means(values.transpose("prompt", ...).values.astype(np.float64))


def mean_over_prompts(result: Result, values: xr.DataArray, over: Sequence[str] = ()) -> Interval:
    """The mean of each prompt's mean over some dimensions, with its interval, which fewer than
    three prompts lack.
    """
    rest = [str(dim) for dim in values.dims if dim not in ("prompt", *over)]
    blocks = [values]
    if over:
        means = [part.mean(list(over)) for part in in_parts(values, "prompt", result.memory)]
        blocks = [xr.concat(means, "prompt", join="exact")]
    elif rest:
        blocks = list(in_parts(values, rest[0], result.memory))
    intervals = [_interval(over_units(result, block)) for block in blocks]
    if len(intervals) == 1:
        return intervals[0]
    return Interval(*(np.concatenate(ends) for ends in zip(*intervals, strict=True)))


def overall_mean(result: Result, values: xr.DataArray) -> Interval:
    """The mean over prompts of each prompt's mean over everything else."""
    return mean_over_prompts(result, values, [str(dim) for dim in values.dims if dim != "prompt"])


def _interval(values: np.ndarray) -> Interval:
    if len(values) >= FEWEST:
        return t_interval(values)
    mean = np.nanmean(values, axis=0)
    return Interval(mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan))


def summed(result: Result, values: xr.DataArray) -> xr.DataArray:
    """The sum over prompts, a block of them at a time."""
    sums = [part.sum("prompt") for part in in_parts(values, "prompt", result.memory)]
    return sum(sums[1:], sums[0])


class Positions(NamedTuple):
    """Means over prompts at the positions that enough prompts have, their intervals, and the number
    of prompts.
    """

    at: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n: np.ndarray


def at_positions(
    dataset: xr.Dataset, quantity: str, at: dict[str, object], prompts: np.ndarray
) -> Positions:
    """A quantity at each position of one head, without those that fewer than half of the prompts,
    or than 10, have.
    """
    if len(prompts) < dataset.sizes["prompt"]:
        moments = Moments.of(dataset[f"{quantity}_per_prompt"].sel(at).isel(prompt=prompts).values)
    else:
        n = dataset[f"{quantity}_n"].sel(at).values
        variance = dataset[f"{quantity}_variance"].sel(at).values
        moments = Moments.from_statistics(n, dataset[quantity].sel(at).values, variance)
    fewest = max(min(10, len(prompts)), len(prompts) / 2)
    positions = np.flatnonzero(moments.n >= fewest)
    mean, low, high = (ends[positions] for ends in moments.interval())
    return Positions(positions, mean, low, high, moments.n[positions])


def choose_heads(
    result: Result,
    layer: int | None,
    count: int,
    condition: str,
    prompts: np.ndarray,
    by: Ranking = "difference",
) -> list[tuple[int, int]]:
    """The ``count`` heads, of a layer or of all, whose attention to the question changes most, by
    layer.

    With ``by="beyond"``, those furthest from the null; in the baseline, from uniform attention. On
    these prompts; the choice of ``Result.compare(…, select="half", top=count, by=…)`` if they are
    one half.
    """
    dataset = result["received_attention"]
    if "received_per_prompt" not in dataset:
        raise OptionError(
            "choosing heads on one half of the prompts needs the positions of each prompt: "
            'run with keep="prompts", or name the heads'
        )
    half = dataset.isel(prompt=prompts).sel(segment="question")
    half = half if layer is None else half.sel(layer=[layer])
    heads = half.sizes["layer"] * half.sizes["head"]
    if not 1 <= count <= heads or len(prompts) < 3:
        raise OptionError(
            f"cannot choose {count} of {heads} heads on {len(prompts)} prompts (one half); "
            "name the heads, or run at least 6 prompts"
        )
    changes = np.log(half.received_by_segment)
    if condition == BASELINE:
        changes = changes - np.log(half.received_by_segment_uniform)
    elif by == "beyond":
        has = has_dilution((result, condition), "received", "question")
        null = half["received_by_segment_dilution" if has else "received_by_segment_uniform"]
        changes = changes - np.log(null)
    change = changes.sel(condition=condition)
    if condition != BASELINE:
        change = change - changes.sel(condition=BASELINE)
    size = abs(over_units(result, change.transpose("prompt", "layer", "head")).mean(0))
    largest = np.argsort(-size, axis=None, kind="stable")[:count]
    layer_indices, head_indices = np.unravel_index(largest, size.shape)
    pairs = zip(half.layer.values[layer_indices].tolist(), head_indices.tolist(), strict=True)
    return sorted(pairs)
