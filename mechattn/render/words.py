"""The sentence under a figure that states its main number and interval."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.axes import BASELINE
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.means import overall_mean
from mechattn.errors import MemoryOptionError, OptionError
from mechattn.render.plain_names import with_plain_names
from mechattn.results.result import Result
from mechattn.results.result_units import units_of
from mechattn.stats.intervals import Interval

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import xarray as xr


def says(figure: go.Figure, *sentences: str) -> go.Figure:
    """The figure with its sentence, which plotly keeps as ``layout.meta`` (see :func:`said`); names are escaped."""
    return with_plain_names(figure).update_layout(meta={"says": " ".join(filter(None, sentences))})


def said(figure: go.Figure) -> str:
    """The sentence of a figure; empty if it was not drawn by this library."""
    meta: Any = figure.layout.meta
    return str(meta.get("says", "")) if isinstance(meta, dict) else ""


def percent(change: float | np.ndarray) -> str:
    """A relative change in percent, with its sign."""
    rounded = round(100 * float(change), 1) + 0.0  # no minus zero
    return f"{rounded:+.1f}\u00a0%".replace("-", "−")


def percent_words(interval: Interval) -> str:
    """A relative change with its interval."""
    return f"{percent(interval.estimate)} [{percent(interval.low)}, {percent(interval.high)}]"


def number_words(interval: Interval, units: str = "") -> str:
    """A number with its interval, to three digits."""
    shown = [f"{float(value):.3g}".replace("-", "−") for value in interval]
    words = f"{shown[0]} [{shown[1]}, {shown[2]}]" if np.isfinite(interval.low) else shown[0]
    return f"{words} {units}".rstrip()


def count_words(result: Result) -> str:
    """The number of prompts of a result, in words such as "64 prompts" or "24 groups of 96 prompts"."""
    return units_of(result, result["sequences"].sizes["prompt"]).words


def mean_words(result: Result, values: xr.DataArray, units: str = "") -> str:
    """The mean over prompts of each prompt's mean over everything else, with its 95 % t interval."""
    return number_words(overall_mean(result, values), units)


def change_words(
    result: Result,
    condition: str,
    quantity: str = "received",
    segment: str = "question",
    layer: int | None = None,
    heads: Seq[int] | None = None,
    prompts: np.ndarray | None = None,
) -> str:
    """The relative change of a quantity from the baseline with its interval, and that of its null; "" without one."""
    if condition == BASELINE:
        return ""
    try:
        some = _part(result, heads, prompts)
        change, null = Contrast(some, condition, quantity=quantity, segment=segment).overall(layer)
    except MemoryOptionError:
        raise
    except OptionError:  # too few prompts for an interval, or not every prompt has the segment
        return ""
    beside = "" if null is None else f" (uniform attention: {percent(null.estimate)})"
    return percent_words(change) + beside


def choice_words(result: Result, condition: str, layer: int, choose: int) -> str:
    """How much the data-driven choice of a layer's heads depends on the prompts; "" if unknown."""
    try:
        table = result.stability(condition, choose=choose, layer=layer)
    except MemoryOptionError:
        raise
    except OptionError:  # too few prompts, or every head is chosen
        return ""
    shared, chance = float(table.jaccard[0]), float(table.by_chance[0])
    return (
        f"Chosen on random halves of the prompts, {choose} heads of this layer have {100 * shared:.0f}\u00a0% of both "
        f"choices in common ({100 * chance:.0f}\u00a0% by chance)."
    )


def _part(result: Result, heads: Seq[int] | None, prompts: np.ndarray | None) -> Result:
    """The result restricted to some heads and prompts."""
    wanted = {"head": None if heads is None else list(heads), "prompt": prompts}
    chosen = {dim: at for dim, at in wanted.items() if at is not None}
    made = {
        name: data.isel({dim: at for dim, at in chosen.items() if dim in data.dims})
        for name, data in result.datasets.items()
    }
    return replace(result, datasets=made)
