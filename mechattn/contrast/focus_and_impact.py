"""How much heads write when they look at the first token: the size of each query's update, by its
attention to that token.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mechattn.axes import BASELINE, SEGMENTS
from mechattn.contrast.means import mean_over_prompts
from mechattn.contrast.quantities import check_condition
from mechattn.errors import OptionError, check_choice
from mechattn.results.result import Result
from mechattn.stats.intervals import Interval, ratio

# The edges of bins of a query's attention to the first token. A bin includes its upper edge, and
# the lowest bin its lower edge too.
BIN_EDGES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99, 1.0)
EARLY_LAYERS = 4  # few heads look at the first token in these, so they are a group of their own
STRONGEST_ABOVE = 0.5  # above this, the first token gets more attention than any other
NEARLY_ALL = 0.99  # the lower edge of the last bin


def focus_and_impact(
    result: Result, condition: str = BASELINE, segment: str = "question"
) -> pd.DataFrame:
    """The size of heads' updates, for queries binned by their attention to the first token.

    ``impact = magnitude / mean magnitude of the layer``; that mean is over all heads and the
    queries of the segment in the same prompt. Layers are in up to three groups: the first four, and
    the two halves of the rest.

    Args:
        result: A run with ``AttentionFocus(per_query=True)`` and ``HeadUpdates(per_query=True)``
            that kept its prompts.
        condition: The condition.
        segment: The segment whose queries are binned.

    Returns:
        A row for each group of layers and bin, with the columns ``layers``; ``above`` and
        ``up_to``, the edges of the bin; ``queries``, the number of queries of all heads and
        prompts, and ``share``, their share of the group; ``quartile_low``, ``median`` and
        ``quartile_high`` of the impact over queries; and its ``mean`` over prompts with a 95 %
        interval (``low``, ``high``).

    Raises:
        OptionError: There is no such condition or segment, no prompt has tokens of the segment, or
            focus and updates were not measured for each query and kept for each prompt.
    """
    queries = _queries(result, condition, segment)
    bin_numbers = pd.cut(queries.first_mass, BIN_EDGES, labels=False, include_lowest=True)

    rows: list[dict[str, Any]] = []
    for group_words, layers in layer_groups(result["head_updates"].layer.values.tolist()):
        in_group = queries.layer.isin(layers)
        for bin_number, (above, up_to) in enumerate(pairwise(BIN_EDGES)):
            bin_queries = queries[in_group & (bin_numbers == bin_number)]
            quartile_low, median, quartile_high = bin_queries.impact.quantile([0.25, 0.5, 0.75])
            mean, low, high = _over_prompts(result, bin_queries)
            row = {
                "layers": group_words,
                "above": above,
                "up_to": up_to,
                "queries": len(bin_queries),
                "share": len(bin_queries) / max(1, in_group.sum()),
                "quartile_low": quartile_low,
                "median": median,
                "quartile_high": quartile_high,
                "mean": float(mean),
                "low": float(low),
                "high": float(high),
            }
            rows.append(row)
    return pd.DataFrame(rows)


def impact_within(
    result: Result,
    above: float,
    up_to: float,
    condition: str = BASELINE,
    segment: str = "question",
) -> tuple[Interval, float]:
    """The mean impact of queries whose attention to the first token is within bounds, in all but
    the early layers.

    In a model that has no other layers, the early ones count.

    Args:
        result: As for :func:`focus_and_impact`.
        above: The lower bound. It is not within the bounds, unless it is 0.
        up_to: The upper bound, which is within the bounds.
        condition: The condition.
        segment: The segment of the queries.

    Returns:
        The mean impact with its 95 % interval over prompts, and the share of these queries among
        all queries of the layers.

    Raises:
        OptionError: As for :func:`focus_and_impact`.
    """
    queries = _queries(result, condition, segment)
    is_later = queries.layer >= EARLY_LAYERS
    if is_later.any():
        queries = queries[is_later]

    is_within = (queries.first_mass > above) & (queries.first_mass <= up_to)
    if above == 0:
        is_within |= queries.first_mass == 0  # the lowest bin includes its lower edge too
    share = is_within.sum() / max(1, len(queries))
    return _over_prompts(result, queries[is_within]), float(share)


def layer_groups(layers: list[int]) -> list[tuple[str, list[int]]]:
    """The early layers and the two halves of the rest, each with its name.

    Empty groups are left out.
    """
    early_layers = [layer for layer in layers if layer < EARLY_LAYERS]
    later_layers = [layer for layer in layers if layer >= EARLY_LAYERS]
    middle = (len(later_layers) + 1) // 2

    groups = []
    for group in (early_layers, later_layers[:middle], later_layers[middle:]):
        if len(group) == 1:
            groups.append((f"layer {group[0]}", group))
        elif group:
            groups.append((f"layers {group[0]} to {group[-1]}", group))
    return groups


def _queries(result: Result, condition: str, segment: str) -> pd.DataFrame:
    """A row for each query of the segment in each head, with the columns layer, first_mass (its
    attention to the first token), impact and prompt (its index).
    """
    check_condition(result, condition)
    check_choice(SEGMENTS, segment=segment)

    masses = _of_each_query(result, "attention_focus", "first_mass", condition)
    magnitudes = _of_each_query(result, "head_updates", "magnitude", condition)
    segments = result["sequences"].segment_index.sel(condition=condition)
    segments = segments.transpose("prompt", "pos").values
    in_segment = segments == SEGMENTS.index(segment)  # [prompt, pos]
    if not in_segment.any():
        raise OptionError(f"with {condition!r} no prompt has tokens of the segment {segment!r}")

    # One prompt at a time, as the values of all prompts and keys would take much more memory.
    rows_of_prompts = []
    for prompt_index, is_query in enumerate(in_segment):
        first_mass = masses.isel(prompt=prompt_index).values[..., is_query]
        magnitude = magnitudes.isel(prompt=prompt_index).values[..., is_query]
        rows = _of_prompt(first_mass, magnitude, masses.layer.values)
        rows_of_prompts.append(rows.assign(prompt=prompt_index))
    return pd.concat(rows_of_prompts, ignore_index=True)


def _of_each_query(result: Result, analysis: str, quantity: str, condition: str) -> xr.DataArray:
    """A quantity that an analysis measured for each query [prompt, layer, head, key].

    Positions are in the dimension "key", although they are those of queries.
    """
    name = f"{quantity}_at_per_prompt"
    if name not in result.datasets.get(analysis, {}):
        raise OptionError(
            f"this result has no {analysis} for each query of each prompt; run it with"
            " analyses=[AttentionFocus(per_query=True), HeadUpdates(per_query=True)],"
            ' keep="prompts"'
        )
    values = result[analysis][name].sel(condition=condition)
    return values.transpose("prompt", "layer", "head", "key")


def _of_prompt(first_mass: np.ndarray, magnitude: np.ndarray, layers: np.ndarray) -> pd.DataFrame:
    """A row for each query of a prompt, with its layer, attention to the first token and impact.

    Args:
        first_mass: Attention to the first token [layer, head, query].
        magnitude: The size of the update [layer, head, query].
        layers: The numbers of the layers.
    """
    # The first query sees only one key, so that it has no choice and no value.
    is_measured = np.isfinite(first_mass) & np.isfinite(magnitude)
    size = np.where(is_measured, magnitude, 0).astype(np.float64)

    # impact = magnitude / mean, and the mean of a layer is its sum divided by its count.
    layer_count = is_measured.sum((1, 2), keepdims=True)
    layer_sum = size.sum((1, 2), keepdims=True)
    impact = ratio(size * layer_count, layer_sum)

    has_impact = is_measured & (layer_sum > 0)  # there is none in a layer that writes nothing
    layer = np.broadcast_to(layers[:, None, None], impact.shape)
    columns = {
        "layer": layer[has_impact],
        "first_mass": first_mass[has_impact].clip(0, 1),  # rounding may exceed 1
        "impact": impact[has_impact],
    }
    return pd.DataFrame(columns)


def _over_prompts(result: Result, queries: pd.DataFrame) -> Interval:
    """The mean over prompts of the mean impact of each prompt's queries, with a 95 % interval.

    Prompts without queries are left out. The mean and the ends are NaN if there are no queries.
    """
    prompt_ids = result["sequences"].prompt.values
    means = queries.groupby("prompt").impact.mean().reindex(range(len(prompt_ids)))
    by_prompt = xr.DataArray(means.to_numpy(), coords={"prompt": prompt_ids}, dims="prompt")
    return mean_over_prompts(result, by_prompt)
