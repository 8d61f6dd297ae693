"""Whether two conditions change activations in the same direction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr

from mechattn.axes import BASELINE
from mechattn.contrast.quantities import check_condition, in_parts
from mechattn.errors import OptionError
from mechattn.results.result import Result, units_of
from mechattn.stats.intervals import FEWEST, check_level, ratio, t_interval
from mechattn.stats.units import Unit


def agreement(
    result: Result,
    condition: str,
    other: str,
    over: str,
    controls: Sequence[str] | None,
    unit: Unit,
    level: float,
) -> pd.DataFrame:
    """See :meth:`mechattn.results.result.Result.agreement`, which explains the arguments.

    Raises:
        OptionError: No activations were measured, a condition is unknown or the one that changes
            are from, or there are too few units.
    """
    if "mlp_activations" not in result.datasets:
        raise OptionError(
            "this result has no mlp_activations; run it with"
            " analyses=[ma.analyses.MlpActivations()]"
        )
    if controls is None:
        named = (condition, other, over, BASELINE)
        controls = [name for name in result.conditions if name not in named]
    others = [other, *controls]
    for name in (condition, *others, over):
        check_condition(result, name)
    if over in (condition, other):
        raise OptionError(f"over={over!r} is one of the two conditions, so its change is zero")
    check_level(level)
    product = result["mlp_activations"].change_product
    product = product.transpose("prompt", "layer", "condition", "other_condition")
    units = units_of(result, product.sizes["prompt"], unit)
    units.refuse_below(FEWEST)

    # Some prompts at a time.
    blocks = []
    for block in in_parts(product, "prompt", result.memory):
        block = block.astype(np.float64)
        blocks.append([_cosine(block, condition, name, over) for name in others])
    cosines = np.concatenate(blocks, axis=1)  # [other, prompt, layer]

    tables = []
    for name, prompt_cosines in zip(others, cosines, strict=True):
        unit_cosines = units.means(prompt_cosines)
        differences = units.means(cosines[0] - prompt_cosines)
        mean, low, high = t_interval(unit_cosines, level)
        beyond, beyond_low, beyond_high = t_interval(differences, level)
        columns = {
            "condition": condition,
            "other": name,
            "layer": product.layer.values,
            "cosine": mean,
            "cosine_low": low,
            "cosine_high": high,
            "beyond": beyond,
            "beyond_low": beyond_low,
            "beyond_high": beyond_high,
            "n": np.isfinite(unit_cosines).sum(0),
        }
        tables.append(pd.DataFrame(columns))
    table = pd.concat(tables, ignore_index=True)
    table.attrs = {"over": over, "level": level, "unit": units.unit}
    return table


def _cosine(product: xr.DataArray, condition: str, other: str, over: str) -> np.ndarray:
    """The cosine [prompt, layer] of the changes from ``over``; NaN if a condition changes nothing.

    ``⟨a − o, b − o⟩ = ⟨a, b⟩ − ⟨a, o⟩ − ⟨o, b⟩ + ⟨o, o⟩``
    """

    def between(first: str, second: str) -> np.ndarray:
        """The stored product of two conditions' changes from the baseline."""
        return product.sel(condition=first, other_condition=second).values

    def changes_product(first: str, second: str) -> np.ndarray:
        """The product of their changes from ``over``."""
        shared = between(first, over) + between(over, second)
        return between(first, second) - shared + between(over, over)

    squared_norms = changes_product(condition, condition) * changes_product(other, other)
    norms = np.sqrt(squared_norms)
    cosine = ratio(changes_product(condition, other), norms)
    return cosine.clip(-1, 1)  # rounding may exceed 1
