"""What heads write where they look at the first token: each query's update, by its attention to
that token.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import xarray as xr

from mechattn.axes import SEGMENTS
from mechattn.contrast.means import mean_over_prompts
from mechattn.contrast.quantities import check_condition
from mechattn.errors import OptionError
from mechattn.results.result import Result
from mechattn.stats.intervals import Interval

# Bins of a query's attention to the first token; the last holds 1 too.
BIN_EDGES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99, 1.0)
EARLY_LAYERS = 4  # where few heads look at the first token; a group of their own
MOST = 0.5  # above this share the first token is the strongest target, whatever the rest is
NEARLY_ALL = 0.99
_FOCUS = ("attention_focus", "first_mass_at_per_prompt")
_UPDATES = ("head_updates", "magnitude_at_per_prompt")


class _Queries(NamedTuple):
    """The queries of one group of layers in one prompt, with all their heads in a row."""

    first_mass: np.ndarray  # attention to the first token
    impact: np.ndarray  # size of the update over the mean of its layer


def focus_and_impact(
    result: Result, condition: str = "baseline", segment: str = "question"
) -> pd.DataFrame:
    """Bin queries by their attention to the first token, and give the size of their heads' updates
    in each bin.

    ``impact = magnitude / mean magnitude of the layer``, the mean over all heads and over the
    queries of the segment in the same prompt. Layers are in up to three groups: the first four, and
    two halves of the rest.

    Returns:
        A row for each group and bin: ``layers``, ``above`` and ``up_to`` (the bin), ``queries`` (of
        all heads and prompts) and their ``share`` in the group, ``median``, ``quartile_low`` and
        ``quartile_high`` of the impact over queries, its ``mean`` with a 95 % interval over prompts
        (``low``, ``high``).

    Raises:
        OptionError: Focus and updates were not measured for each query and kept for each prompt.
    """
    masses, magnitudes, members = _of_queries(result, condition, segment)
    rows = []
    for words, layers in layer_groups(masses.layer.values.tolist()):
        prompts = list(_by_prompt(masses, magnitudes, members, layers))
        total = sum(len(queries.impact) for queries in prompts)
        for above, up_to in pairwise(BIN_EDGES):
            chosen = [queries.impact[_within(queries, above, up_to)] for queries in prompts]
            pooled = np.concatenate(chosen)
            quartiles = [np.nan] * 3
            if len(pooled):
                quartiles = np.quantile(pooled, (0.25, 0.5, 0.75)).tolist()
            interval = _over_prompts(result, chosen)
            rows.append(
                {
                    "layers": words,
                    "above": above,
                    "up_to": up_to,
                    "queries": len(pooled),
                    "share": len(pooled) / max(1, total),
                    "quartile_low": quartiles[0],
                    "median": quartiles[1],
                    "quartile_high": quartiles[2],
                    "mean": float(interval.estimate),
                    "low": float(interval.low),
                    "high": float(interval.high),
                }
            )
    return pd.DataFrame(rows)


def impact_within(
    result: Result,
    above: float,
    up_to: float,
    condition: str = "baseline",
    segment: str = "question",
) -> tuple[Interval, float]:
    """Mean impact of the queries that give the first token so much, in all but the early layers,
    and their share.

    The interval is over prompts. A model without later layers is taken whole.
    """
    masses, magnitudes, members = _of_queries(result, condition, segment)
    layers = masses.layer.values.tolist()
    later = [layer for layer in layers if layer >= EARLY_LAYERS] or layers
    prompts = list(_by_prompt(masses, magnitudes, members, later))
    chosen = [queries.impact[_within(queries, above, up_to)] for queries in prompts]
    total = sum(len(queries.impact) for queries in prompts)
    share = sum(map(len, chosen)) / max(1, total)
    return _over_prompts(result, chosen), share


def layer_groups(layers: list[int]) -> list[tuple[str, list[int]]]:
    """The early layers and two halves of the rest, with their names; empty groups are left out."""
    early = [layer for layer in layers if layer < EARLY_LAYERS]
    rest = [layer for layer in layers if layer >= EARLY_LAYERS]
    middle = (len(rest) + 1) // 2
    groups = [group for group in (early, rest[:middle], rest[middle:]) if group]
    return [(_layer_words(group), group) for group in groups]


def _layer_words(layers: list[int]) -> str:
    if len(layers) == 1:
        return f"layer {layers[0]}"
    return f"layers {layers[0]} to {layers[-1]}"


def _of_queries(
    result: Result, condition: str, segment: str
) -> tuple[xr.DataArray, xr.DataArray, np.ndarray]:
    """Attention to the first token and size of the update of each query, and which queries are of
    the segment.
    """
    check_condition(result, condition)
    if segment not in SEGMENTS:
        segment_names = ", ".join(map(repr, SEGMENTS))
        raise OptionError(f"segment={segment!r}: choose one of {segment_names}")
    missing = [
        name
        for name, quantity in (_FOCUS, _UPDATES)
        if name not in result.datasets or quantity not in result[name]
    ]
    if missing:
        raise OptionError(
            f"this result has no {' and no '.join(missing)} of each query in each prompt; run it"
            " with analyses=[AttentionFocus(per_query=True), HeadUpdates(per_query=True)],"
            ' keep="prompts"'
        )
    dims = ("prompt", "layer", "head", "key")
    masses, magnitudes = (
        result[name][quantity].sel(condition=condition).transpose(*dims)
        for name, quantity in (_FOCUS, _UPDATES)
    )
    codes = result["sequences"].segment_index.sel(condition=condition)
    members = codes.transpose("prompt", "pos").values == SEGMENTS.index(segment)
    if not members.any():
        raise OptionError(f"with {condition!r} no prompt has tokens of the segment {segment!r}")
    return masses, magnitudes, members


def _by_prompt(
    masses: xr.DataArray, magnitudes: xr.DataArray, members: np.ndarray, layers: list[int]
) -> Iterator[_Queries]:
    """The queries of some layers, one prompt at a time, which bounds the memory."""
    for prompt, member in enumerate(members):
        selection: dict[str, Any] = {"prompt": prompt, "key": np.flatnonzero(member)}
        first_mass = masses.isel(selection).sel(layer=layers).values
        magnitude = magnitudes.isel(selection).sel(layer=layers).values.astype(np.float64)
        # The first query sees one key: it has no choice, and no value.
        measured = np.isfinite(first_mass) & np.isfinite(magnitude)
        magnitude = np.where(measured, magnitude, np.nan)
        counts = measured.sum((1, 2), keepdims=True)
        of_layer = np.nansum(magnitude, (1, 2), keepdims=True) / np.maximum(counts, 1)
        measured &= of_layer > 0  # a layer that writes nothing has no share of it
        impact = magnitude / np.where(of_layer > 0, of_layer, 1)
        yield _Queries(first_mass[measured], impact[measured])


def _within(queries: _Queries, above: float, up_to: float) -> np.ndarray:
    """Which queries are in a bin; the first one holds 0 too."""
    at_least = queries.first_mass >= 0 if above == 0 else queries.first_mass > above
    at_most = queries.first_mass <= up_to if up_to < 1 else True  # rounding may exceed 1
    return at_least & at_most


def _over_prompts(result: Result, chosen: list[np.ndarray]) -> Interval:
    """The mean over prompts of each prompt's mean; prompts without such queries are left out."""
    means = [values.mean() if len(values) else np.nan for values in chosen]
    if np.isnan(means).all():
        return Interval(np.array(np.nan), np.array(np.nan), np.array(np.nan))
    return mean_over_prompts(result, xr.DataArray(np.array(means), dims="prompt"))
