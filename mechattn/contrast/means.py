"""The means that figures show: over prompts with t intervals, by layer, over everything or at each
position, and the null at each position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import xarray as xr

from mechattn.axes import BASELINE, SEGMENTS
from mechattn.contrast.quantities import in_parts, values_of
from mechattn.contrast.question import Question
from mechattn.contrast.table import Ranking, largest
from mechattn.contrast.tested import what_is_tested
from mechattn.errors import OptionError
from mechattn.results.result import Result, part_of, units_in
from mechattn.stats.intervals import FEWEST, Interval, Moments, ratio

RECEIVED = "received_attention"


def over_units(result: Result, values: xr.DataArray) -> np.ndarray:
    """The values of prompts, or the means of their groups, from which an interval is computed
    [unit, …].
    """
    prompt_values = values.transpose("prompt", ...).values.astype(np.float64)
    return units_in(result, values).means(prompt_values)


def mean_over_prompts(result: Result, values: xr.DataArray, over: Sequence[str] = ()) -> Interval:
    """The mean over prompts of each prompt's mean over some dimensions, with its 95 % t interval.

    Args:
        result: The result that the values come from, which knows their groups.
        values: Numbers [prompt, …].
        over: The dimensions to average over within a prompt.

    Returns:
        The mean and the ends of its interval for each cell of the remaining dimensions; the ends
        are NaN with fewer than three prompts or groups.
    """
    # The means of each prompt are small, so some prompts are read at a time.
    if over:
        blocks = []
        for block in in_parts(values, "prompt", result.memory):
            blocks.append(block.mean(list(over)))
        prompt_means = xr.concat(blocks, "prompt", join="exact")
        return Moments.of(over_units(result, prompt_means)).interval()

    cell_dims = [str(dim) for dim in values.dims if dim != "prompt"]
    if not cell_dims:
        return Moments.of(over_units(result, values)).interval()

    # All prompts are needed at once, so some layers (or positions …) are read at a time.
    intervals = []
    for block in in_parts(values, cell_dims[0], result.memory):
        interval = Moments.of(over_units(result, block)).interval()
        intervals.append(np.stack(interval))
    mean, low, high = np.concatenate(intervals, axis=1)
    return Interval(mean, low, high)


def overall_mean(result: Result, values: xr.DataArray) -> Interval:
    """The mean over prompts of each prompt's mean over all other dimensions, with its 95 % t
    interval.
    """
    cell_dims = [str(dim) for dim in values.dims if dim != "prompt"]
    return mean_over_prompts(result, values, cell_dims)


def summed(result: Result, values: xr.DataArray) -> xr.DataArray:
    """The sum over prompts, which are read some at a time."""
    blocks = in_parts(values, "prompt", result.memory)
    total = next(blocks).sum("prompt")
    for block in blocks:
        total = total + block.sum("prompt")
    return total


class Positions(NamedTuple):
    """Means over prompts with 95 % t intervals, at the positions that enough prompts have
    [position].
    """

    positions: np.ndarray  # from 0
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n: np.ndarray  # the number of prompts that have the position


def at_positions(
    dataset: xr.Dataset, quantity: str, place: dict[str, object], prompts: np.ndarray
) -> Positions:
    """A quantity at each position that enough prompts have, as means over prompts.

    See :func:`at_shared_positions`.

    Args:
        dataset: An analysis's dataset with the quantity, its count and its variance.
        quantity: The quantity, such as "received".
        place: The condition, layer and head.
        prompts: The indices of the prompts that count. Unless these are all prompts, the values of
            each prompt must be stored.
    """
    head_dataset = dataset.sel(place)
    if len(prompts) < dataset.sizes["prompt"]:
        per_prompt = head_dataset[f"{quantity}_per_prompt"].isel(prompt=prompts)
        moments = Moments.of(per_prompt.values)
    else:
        moments = Moments.from_statistics(
            head_dataset[f"{quantity}_n"].values,
            head_dataset[quantity].values,
            head_dataset[f"{quantity}_variance"].values,
        )
    return at_shared_positions(moments, len(prompts))


def at_shared_positions(moments: Moments, prompt_count: int) -> Positions:
    """The means over prompts at each position that enough prompts have.

    Enough is at least half of the prompts and at least 10, or all of them if there are fewer than
    10.

    Args:
        moments: The moments over prompts of the values at each position [position].
        prompt_count: The number of prompts, including those that lack a position.
    """
    fewest = max(min(10, prompt_count), prompt_count / 2)
    positions = np.flatnonzero(moments.n >= fewest)
    mean, low, high = moments.interval()
    return Positions(
        positions=positions,
        mean=mean[positions],
        low=low[positions],
        high=high[positions],
        n=moments.n[positions],
    )


def choose_heads(
    result: Result,
    layer: int | None,
    count: int,
    condition: str,
    prompts: np.ndarray,
    by: Ranking = "difference",
) -> list[tuple[int, int]]:
    """The heads whose received attention of the question changes most on some prompts.

    In a condition, these are the heads with the largest mean difference from the baseline, or with
    ``by="beyond"`` from the null. If the prompts are the first half of the units,
    ``Result.compare(…, select="half", top=count, by=…)`` chooses the same heads. In the baseline,
    they are the heads furthest from uniform attention.

    Args:
        result: A result with received attention of each prompt.
        layer: One layer; None for all layers.
        count: The number of heads.
        condition: The condition.
        prompts: The indices of the prompts to choose by.
        by: The difference by which the heads of a condition are ranked.

    Returns:
        Pairs of a layer and a head, sorted by layer and head.

    Raises:
        OptionError: The positions of each prompt were not kept, or there are too few heads or
            prompts.
    """
    if "received_per_prompt" not in result[RECEIVED]:
        raise OptionError(
            "choosing heads on one half of the prompts needs the positions of each prompt:"
            ' run with keep="prompts", or name the heads'
        )
    if len(prompts) < FEWEST:
        raise OptionError(
            f"cannot choose heads on {len(prompts)} prompts (one half); name the heads, or run at"
            f" least {2 * FEWEST} prompts"
        )
    choosing_result = part_of(result, "prompt", prompts)
    if condition == BASELINE:
        distances = _from_uniform(choosing_result, layer)
    else:
        tested = what_is_tested(Question(choosing_result, condition), layer, by=by)
        heads = pd.MultiIndex.from_frame(tested.labels)
        distances = pd.Series(abs(tested.values.mean(0)), heads)

    if not 1 <= count <= len(distances):
        raise OptionError(f"cannot choose {count} of {len(distances)} heads")

    furthest_heads = distances[largest(distances.to_numpy(), count)]
    return sorted(furthest_heads.index.tolist())


# The null at each position.


def uniform_at_positions(
    dataset: xr.Dataset, quantity: str, place: dict[str, object], prompts: np.ndarray
) -> np.ndarray:
    """The mean over prompts of what each position would receive under uniform attention.

    Args:
        dataset: The dataset of received attention.
        quantity: The quantity to which the null belongs: "received" or "received_by_origin".
        place: The condition and layer; uniform attention is the same in all heads.
        prompts: The indices of the prompts that count.

    Returns:
        The attention that a query pays to each position, as a fraction [position].
    """
    variable_name = quantity.replace("received", "received_uniform", 1)
    return _mean_at_positions(dataset, variable_name, place, prompts)


def dilution_at_positions(
    result: Result,
    quantity: str,
    condition: str,
    layer: int,
    head: int,
    prompts: np.ndarray,
) -> np.ndarray:
    """What each position would receive if the original tokens kept their attention to each other.

    ``null[k] = baseline[k] · mean over prompts of dilution[s] / baseline[s]``, where s is the
    segment of token k in a prompt. The null is stored for whole segments only, and all tokens of a
    segment are taken to lose the same share. It is NaN for inserted tokens.

    Args:
        result: A result with received attention and its dilution null.
        quantity: "received_by_origin" for positions in the baseline, or "received" for positions in
            the condition.
        condition: The condition.
        layer: The layer.
        head: The head.
        prompts: The indices of the prompts that count, in both conditions.

    Returns:
        The attention that a query pays to each position, as a fraction [position]; NaN at positions
        that no prompt has.
    """
    dataset = result[RECEIVED]
    place = {"condition": BASELINE, "layer": layer, "head": head}
    baseline = _mean_at_positions(dataset, "received_by_origin", place, prompts)
    segment_shares = share_left(dataset, condition).sel(layer=layer, head=head)
    segment_shares = segment_shares.isel(prompt=prompts).transpose("prompt", "segment")

    # The baseline's position of the token at each position, and its segment [prompt, pos].
    sequences = result["sequences"].isel(prompt=prompts).transpose("prompt", "pos", ...)
    baseline_segments = sequences.segment_index.sel(condition=BASELINE).values
    origin_condition = condition
    if quantity == "received_by_origin":
        origin_condition = BASELINE
    origins = sequences.origin.sel(condition=origin_condition).values
    is_original = origins >= 0
    valid_origins = np.where(is_original, origins, 0)  # an index that exists; its value is not used
    segments = np.take_along_axis(baseline_segments, valid_origins, axis=1)

    shares = np.take_along_axis(segment_shares.values, segments, axis=1)
    values = np.where(is_original, baseline[valid_origins] * shares, np.nan)
    return Moments.of(values).known_mean


def share_left(dataset: xr.Dataset, condition: str) -> xr.DataArray:
    """What each segment's tokens receive under dilution, as a fraction of what they receive in the
    baseline [prompt, layer, head, segment].

    It is NaN if they receive nothing in the baseline.
    """
    null = dataset.received_by_segment_dilution.sel(condition=condition, drop=True)
    baseline = dataset.received_by_segment.sel(condition=BASELINE, drop=True)
    return null.astype(np.float64) / baseline.where(baseline > 0)


def shares_by_position(result: Result, condition: str) -> np.ndarray:
    """The mean over prompts of :func:`share_left` for each token of the baseline
    [layer, head, key].
    """
    shares = share_left(result[RECEIVED], condition)
    segment_index = result["sequences"].segment_index.sel(condition=BASELINE)
    segments = np.arange(len(SEGMENTS))[:, None, None]
    in_segment = segment_index.transpose("prompt", "pos").values == segments
    membership = in_segment.astype(np.float64)  # [segment, prompt, key]

    # Matrix products sum over prompts and segments: the share of each prompt, head and position
    # would take much memory.
    layer_means = []
    for layer_shares in shares.transpose("layer", "head", "segment", "prompt").values:
        is_known = np.isfinite(layer_shares)
        total = np.tensordot(np.where(is_known, layer_shares, 0), membership, axes=2)
        count = np.tensordot(is_known.astype(np.float64), membership, axes=2)
        layer_means.append(ratio(total, count))
    return np.stack(layer_means)


def _from_uniform(result: Result, layer: int | None) -> pd.Series:
    """The distance of each head's attention to the question from uniform attention, in the
    baseline, by layer and head.

    ``|mean over units of log(received / uniform)|``
    """
    values, uniform = values_of(result, BASELINE, "received", "question")
    assert uniform is not None  # received attention always has it
    ratios = (values / uniform).transpose("prompt", "layer", "head")
    if layer is not None:
        ratios = ratios.sel(layer=[layer])
    log_ratios = ratios.copy(data=np.log(ratios.values))

    mean = log_ratios[0].copy(data=over_units(result, log_ratios).mean(0))
    return abs(mean).to_series()


def _mean_at_positions(
    dataset: xr.Dataset, variable_name: str, place: dict[str, object], prompts: np.ndarray
) -> np.ndarray:
    """The mean of a variable over these prompts at each position."""
    if len(prompts) < dataset.sizes["prompt"]:
        per_prompt = dataset[f"{variable_name}_per_prompt"].isel(prompt=prompts)
        return per_prompt.sel(place).mean("prompt").values
    return dataset[variable_name].sel(place).values
