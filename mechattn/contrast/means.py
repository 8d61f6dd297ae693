"""Means over prompts with their t intervals, as figures show them: by layer, of everything, or at each position."""

from __future__ import annotations

from collections.abc import Sequence as Seq
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
    """The values [unit, …] that an interval is computed from: those of prompts, or the means of groups."""
    return units_in(result, values).means(values.transpose("prompt", ...).values.astype(np.float64))


def mean_over_prompts(result: Result, values: xr.DataArray, over: Seq[str] = ()) -> Interval:
    """The mean of each prompt's mean over some dimensions, with its interval, which fewer than three prompts lack."""
    rest = [str(dim) for dim in values.dims if dim not in ("prompt", *over)]
    if over:
        means = [part.mean(list(over)) for part in in_parts(values, "prompt", result.memory)]
        blocks = [xr.concat(means, "prompt", join="exact")]
    else:
        blocks = list(in_parts(values, rest[0], result.memory)) if rest else [values]
    made = [_interval(over_units(result, part)) for part in blocks]
    return (
        made[0]
        if len(made) == 1
        else Interval(*(np.concatenate(ends) for ends in zip(*made, strict=True)))
    )


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
    parts = [part.sum("prompt") for part in in_parts(values, "prompt", result.memory)]
    return sum(parts[1:], parts[0])


class Positions(NamedTuple):
    """Means over prompts at the positions that enough prompts have, their intervals, and the number of prompts."""

    at: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n: np.ndarray


def at_positions(
    dataset: xr.Dataset, quantity: str, at: dict[str, object], prompts: np.ndarray
) -> Positions:
    """A quantity at each position of one head, without those that fewer than half of the prompts, or than 10, have."""
    if len(prompts) < dataset.sizes["prompt"]:
        moments = Moments.of(dataset[f"{quantity}_per_prompt"].sel(at).isel(prompt=prompts).values)
    else:
        n, variance = (dataset[f"{quantity}_{name}"].sel(at).values for name in ("n", "variance"))
        moments = Moments.from_statistics(n, dataset[quantity].sel(at).values, variance)
    position = np.flatnonzero(moments.n >= max(min(10, len(prompts)), len(prompts) / 2))
    mean, low, high = (ends[position] for ends in moments.interval())
    return Positions(position, mean, low, high, moments.n[position])


def choose_heads(
    result: Result,
    layer: int | None,
    count: int,
    condition: str,
    prompts: np.ndarray,
    by: Ranking = "difference",
) -> list[tuple[int, int]]:
    """The ``count`` heads, of a layer or of all, whose attention to the question changes most, by layer.

    With ``by="beyond"``, those furthest from the null; in the baseline, from uniform attention. On these
    prompts; the choice of ``Result.compare(…, select="half", top=count, by=…)`` if they are one half.
    """
    dataset = result["received_attention"]
    if "received_per_prompt" not in dataset:
        raise OptionError(
            "choosing heads on one half of the prompts needs the positions of each prompt: "
            'run with positions="prompts", or name the heads'
        )
    half = dataset.isel(prompt=prompts).sel(segment="question")
    half = half if layer is None else half.sel(layer=[layer])
    heads = half.sizes["layer"] * half.sizes["head"]
    if not 1 <= count <= heads or len(prompts) < 3:
        raise OptionError(
            f"cannot choose {count} of {heads} heads on {len(prompts)} prompts (one half); "
            "name the heads, or run at least 6 prompts"
        )
    if condition == BASELINE:
        logs = np.log(half.received_by_segment / half.received_by_segment_uniform)
    elif by == "difference":
        logs = np.log(half.received_by_segment)
    else:
        known = has_dilution((result, condition), "received", "question")
        null = "dilution" if known else "uniform"
        logs = np.log(half.received_by_segment / half[f"received_by_segment_{null}"])
    far = logs.sel(condition=condition)
    if condition != BASELINE:
        far = far - logs.sel(condition=BASELINE)
    score = abs(over_units(result, far.transpose("prompt", "layer", "head")).mean(0))
    chosen = np.argsort(-score, axis=None, kind="stable")[:count]
    return sorted(
        (int(half.layer[at // score.shape[1]]), int(at % score.shape[1])) for at in chosen
    )
