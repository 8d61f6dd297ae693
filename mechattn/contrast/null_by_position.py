"""What the null of a comparison gives at each position, beside the means that figures by position
show.
"""

from __future__ import annotations

import warnings

import numpy as np
import xarray as xr

from mechattn.axes import BASELINE, SEGMENTS
from mechattn.results.result import Result

NAME = "received_attention"


def uniform_at_positions(
    dataset: xr.Dataset, quantity: str, place: dict[str, object], prompts: np.ndarray
) -> np.ndarray:
    """What uniform attention would give at each position, as the mean over prompts."""
    name = quantity.replace("received", "received_uniform", 1)
    if len(prompts) < dataset.sizes["prompt"]:
        per_prompt = dataset[f"{name}_per_prompt"].isel(prompt=prompts)
        return per_prompt.mean("prompt").sel(place).values
    return dataset[name].sel(place).values


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
    """
    dataset = result[NAME]
    baseline = _baseline_line(dataset, layer, head, prompts)
    left = share_left(dataset, condition).sel(layer=layer, head=head).isel(prompt=prompts)
    share_by_segment = left.transpose("prompt", "segment").values
    rows = np.arange(len(prompts))[:, None]

    sequences = result["sequences"]
    segments = sequences.segment_index.sel(condition=BASELINE).transpose("prompt", "pos")
    segments = segments.isel(prompt=prompts).values
    shown_condition = BASELINE if quantity == "received_by_origin" else condition
    origins = sequences.origin.sel(condition=shown_condition).transpose("prompt", "pos")
    origins = origins.isel(prompt=prompts).values
    is_original = origins >= 0
    origins = np.where(is_original, origins, 0)

    values = baseline[origins] * share_by_segment[rows, segments[rows, origins]]
    values = np.where(is_original, values, np.nan)
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
    left = share_left(result[NAME], condition).transpose("layer", "head", "prompt", "segment")
    segments = result["sequences"].segment_index.sel(condition=BASELINE)
    segments = segments.transpose("prompt", "pos").values
    is_segment = [(segments == index).astype(np.float64) for index in range(len(SEGMENTS))]

    # Sums over segments, since the fractions of each prompt, head and position would be large.
    of_layers = []
    for layer in range(left.sizes["layer"]):
        shares = left.isel(layer=layer).values
        is_known = np.isfinite(shares)
        shares = np.where(is_known, shares, 0)
        total = sum(shares[..., index] @ members for index, members in enumerate(is_segment))
        count = sum(is_known[..., index] @ members for index, members in enumerate(is_segment))
        unknown = np.full_like(total, np.nan)
        of_layers.append(np.divide(total, count, out=unknown, where=count > 0))
    return np.stack(of_layers)


def _baseline_line(dataset: xr.Dataset, layer: int, head: int, prompts: np.ndarray) -> np.ndarray:
    """The mean over prompts of what each token of the baseline receives."""
    place = {"condition": BASELINE, "layer": layer, "head": head}
    if len(prompts) < dataset.sizes["prompt"]:
        per_prompt = dataset["received_by_origin_per_prompt"].sel(place).isel(prompt=prompts)
        return per_prompt.mean("prompt").values.astype(np.float64)
    return dataset["received_by_origin"].sel(place).values.astype(np.float64)
