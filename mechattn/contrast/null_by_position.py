"""What the null of a comparison gives at each position, beside the means that figures by position
show.
"""

from __future__ import annotations

import warnings

import numpy as np
import xarray as xr

from mechattn.axes import BASELINE, SEGMENTS
from mechattn.results.result import Result
from mechattn.stats.intervals import ratio

NAME = "received_attention"


def uniform_at_positions(
    dataset: xr.Dataset, quantity: str, place: dict[str, object], prompts: np.ndarray
) -> np.ndarray:
    """What uniform attention would give at each position, as the mean over prompts.

    Args:
        dataset: The dataset of received attention.
        quantity: The quantity whose null it is, such as "received" or "received_by_origin".
        place: The condition, layer and head.
        prompts: The prompts that count.
    """
    name = quantity.replace("received", "received_uniform", 1)
    return _mean_line(dataset, name, place, prompts)


def dilution_at_positions(
    result: Result,
    quantity: str,
    condition: str,
    layer: int,
    head: int,
    prompts: np.ndarray,
) -> np.ndarray:
    """What original tokens would receive if they kept their attention to each other, by position.

    ``null[k] = baseline[k] · mean over prompts of dilution[s] / baseline[s]``, where s is the
    segment of token k in a prompt: a pass knows the dilution of a segment, and here all its tokens
    lose the same share. NaN for inserted tokens.

    Args:
        result: A result with received attention and its dilution null.
        quantity: "received_by_origin", by the position in the baseline, or "received", by that in
            the condition.
        condition: The condition.
        layer: The layer.
        head: The head.
        prompts: The prompts that count; the means of others are not in the baseline's line either.

    Returns:
        Attention that a query pays to each position, as a fraction [position].
    """
    dataset = result[NAME]
    place = {"condition": BASELINE, "layer": layer, "head": head}
    baseline = _mean_line(dataset, "received_by_origin", place, prompts)
    left = share_left(dataset, condition).sel(layer=layer, head=head)
    left = left.isel(prompt=prompts)
    share_by_segment = left.transpose("prompt", "segment").values

    # The token of the baseline at each position [prompt, pos], and its segment.
    sequences = result["sequences"].isel(prompt=prompts)
    segments = sequences.segment_index.sel(condition=BASELINE)
    segments = segments.transpose("prompt", "pos").values
    shown_condition = condition
    if quantity == "received_by_origin":
        shown_condition = BASELINE
    origins = sequences.origin.sel(condition=shown_condition)
    origins = origins.transpose("prompt", "pos").values
    is_original = origins >= 0
    origins = np.where(is_original, origins, 0)  # any index that exists; its value is not used
    segment_of_origin = np.take_along_axis(segments, origins, axis=1)

    shares = np.take_along_axis(share_by_segment, segment_of_origin, axis=1)
    values = np.where(is_original, baseline[origins] * shares, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # positions that no prompt has
        return np.nanmean(values, axis=0)


def share_left(dataset: xr.Dataset, condition: str) -> xr.DataArray:
    """What dilution leaves to the tokens of each segment of what they receive in the baseline, as a
    fraction.
    """
    null = dataset.received_by_segment_dilution.sel(condition=condition, drop=True)
    baseline = dataset.received_by_segment.sel(condition=BASELINE, drop=True)
    return null.astype(np.float64) / baseline.where(baseline > 0)


def shares_by_position(result: Result, condition: str) -> np.ndarray:
    """:func:`share_left` of each token of the baseline [layer, head, key], mean over prompts."""
    left = share_left(result[NAME], condition)
    left = left.transpose("layer", "head", "prompt", "segment")

    segments = result["sequences"].segment_index.sel(condition=BASELINE)
    segments = segments.transpose("prompt", "pos").values
    numbers = np.arange(len(SEGMENTS))[:, None, None]
    is_segment = (segments == numbers).astype(np.float64)  # [segment, prompt, key]

    # Sums over prompts and segments, as the shares of each prompt, head and position would be many.
    of_layers = []
    over_prompts_and_segments = ([1, 2], [1, 0])
    for shares in left:
        is_known = np.isfinite(shares.values)
        known_shares = np.where(is_known, shares.values, 0)
        known = is_known.astype(np.float64)
        total = np.tensordot(known_shares, is_segment, over_prompts_and_segments)
        count = np.tensordot(known, is_segment, over_prompts_and_segments)
        of_layers.append(ratio(total, count))
    return np.stack(of_layers)


def _mean_line(
    dataset: xr.Dataset, name: str, place: dict[str, object], prompts: np.ndarray
) -> np.ndarray:
    """The mean of a quantity at each position, over some prompts or all."""
    if len(prompts) < dataset.sizes["prompt"]:
        per_prompt = dataset[f"{name}_per_prompt"].isel(prompt=prompts)
        return per_prompt.mean("prompt").sel(place).values
    return dataset[name].sel(place).values
