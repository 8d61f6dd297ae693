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
from mechattn.stats.intervals import FEWEST, t_interval
from mechattn.stats.units import Unit

QUANTITIES = {"activations": ("mlp_activations", "change_product", "MlpActivations()")}


def agreement(
    result: Result,
    one: str,
    other: str,
    over: str,
    quantity: str,
    controls: Sequence[str] | None,
    unit: Unit,
    level: float,
) -> pd.DataFrame:
    """See :meth:`mechattn.results.result.Result.agreement`, which explains the arguments."""
    if quantity not in QUANTITIES:
        raise OptionError(
            f"quantity={quantity!r}: choose one of {', '.join(map(repr, QUANTITIES))}"
        )
    dataset, variable, analysis = QUANTITIES[quantity]
    if dataset not in result.datasets:
        raise OptionError(
            f"this result has no {dataset}; run it with analyses=[ma.analyses.{analysis}]"
        )
    product = result[dataset][variable].transpose("prompt", "layer", "condition", "other_condition")
    for name in (one, other, over, *(controls or [])):
        check_condition(result, name)
    if over in (one, other):
        raise OptionError(f"over={over!r} is one of the two conditions, so its change is zero")
    if not 0.5 <= level < 1:
        raise OptionError(f"level={level}: give a probability such as 0.95")
    units = units_of(result, product.sizes["prompt"], unit)
    units.refuse_below(FEWEST)
    if controls is None:
        controls = [name for name in result.conditions if name not in (one, other, over, BASELINE)]
    cosines: dict[str, list[np.ndarray]] = {name: [] for name in (other, *controls)}
    for block in in_parts(product, "prompt", result.memory):
        block = block.astype(np.float64)
        for name, of_blocks in cosines.items():
            of_blocks.append(_cosine(block, one, name, over))
    main_cosine = np.concatenate(cosines[other])

    tables = []
    for name, of_blocks in cosines.items():
        cosine = np.concatenate(of_blocks)
        labels = {"condition": one, "other": name, "layer": product.layer.values}
        columns = _columns(units.means(cosine), units.means(main_cosine - cosine), level)
        tables.append(pd.DataFrame(labels | columns))
    table = pd.concat(tables, ignore_index=True)
    table.attrs = {"over": over, "quantity": quantity, "level": level, "unit": units.unit}
    return table


def _cosine(product: xr.DataArray, one: str, other: str, over: str) -> np.ndarray:
    """The cosine [prompt, layer]; NaN if one condition changes nothing."""

    def between(a: str, b: str) -> np.ndarray:
        return product.sel(condition=a, other_condition=b).values

    def apart(a: str, b: str) -> np.ndarray:
        return between(a, b) - between(a, over) - between(over, b) + between(over, over)

    norms = np.sqrt(apart(one, one) * apart(other, other))
    unknown = np.full_like(norms, np.nan)
    cosine = np.divide(apart(one, other), norms, out=unknown, where=norms > 0)
    return cosine.clip(-1, 1)


def _columns(cosine: np.ndarray, apart: np.ndarray, level: float) -> dict[str, np.ndarray]:
    """The cosine of each layer, and how much lower it is than that of the two main conditions."""
    mean, low, high = t_interval(cosine, level)
    beyond, beyond_low, beyond_high = t_interval(apart, level)
    return {
        "cosine": mean,
        "cosine_low": low,
        "cosine_high": high,
        "beyond": beyond,
        "beyond_low": beyond_low,
        "beyond_high": beyond_high,
        "n": (~np.isnan(cosine)).sum(0),
    }
