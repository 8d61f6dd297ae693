"""Whether two conditions change activations in the same direction."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np

from mechattn.axes import BASELINE
from mechattn.contrast.blocks import in_parts
from mechattn.contrast.quantities import check_condition
from mechattn.errors import OptionError
from mechattn.results.result import units_of
from mechattn.stats.intervals import FEWEST, t_interval
from mechattn.stats.units import Unit, Units

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    from mechattn.results.result import Result

QUANTITIES = {"activations": ("mlp_activations", "change_product", "MlpActivations()")}


def agreement(
    result: Result,
    one: str,
    other: str,
    over: str,
    quantity: str,
    controls: Seq[str] | None,
    unit: Unit,
    level: float,
) -> pd.DataFrame:
    """See :meth:`mechattn.results.result.Result.agreement`, which explains the arguments."""
    import pandas as pd

    product = _product(result, quantity)
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
    cosines = _cosines(product, one, [other, *controls], over, result.memory)
    tables = [
        _rows(one, name, product, cosine, cosines[0], units, level) for name, cosine in zip([other, *controls], cosines)
    ]
    made = pd.concat(tables, ignore_index=True)
    made.attrs = {"over": over, "quantity": quantity, "level": level, "unit": units.unit}
    return made


def _product(result: Result, quantity: str) -> xr.DataArray:
    if quantity not in QUANTITIES:
        raise OptionError(f"quantity={quantity!r}: choose one of {', '.join(map(repr, QUANTITIES))}")
    dataset, variable, analysis = QUANTITIES[quantity]
    if dataset not in result.datasets:
        raise OptionError(f"this result has no {dataset}; run it with analyses=[ma.analyses.{analysis}]")
    return result[dataset][variable].transpose("prompt", "layer", "condition", "other_condition")


def _cosines(product: xr.DataArray, one: str, others: Seq[str], over: str, memory: str) -> list[np.ndarray]:
    """The cosine of each pair [prompt, layer], computed some prompts at a time."""
    found = []
    for some in in_parts(product, "prompt", memory):
        here = some.astype(np.float64)
        found.append([_cosine(here, one, name, over) for name in others])
    return [np.concatenate(each) for each in zip(*found, strict=True)]


def _cosine(product: xr.DataArray, one: str, other: str, over: str) -> np.ndarray:
    """The cosine [prompt, layer]; NaN if one condition changes nothing."""

    def between(a: str, b: str) -> np.ndarray:
        return product.sel(condition=a, other_condition=b).values

    def apart(a: str, b: str) -> np.ndarray:
        return between(a, b) - between(a, over) - between(over, b) + between(over, over)

    norms = np.sqrt(apart(one, one) * apart(other, other))
    return np.divide(apart(one, other), norms, out=np.full_like(norms, np.nan), where=norms > 0).clip(-1, 1)


def _rows(
    one: str,
    other: str,
    product: xr.DataArray,
    cosine: np.ndarray,
    reference: np.ndarray,
    units: Units,
    level: float,
) -> pd.DataFrame:
    """One row per layer: the cosine, and how much lower it is than that of the two main conditions."""
    import pandas as pd

    apart = t_interval(units.means(reference - cosine), level)
    cosine = units.means(cosine)
    mean = t_interval(cosine, level)
    return pd.DataFrame(
        {
            "condition": one,
            "other": other,
            "layer": product.layer.values,
            "cosine": mean.estimate,
            "low": mean.low,
            "high": mean.high,
            "beyond": apart.estimate,
            "beyond_low": apart.low,
            "beyond_high": apart.high,
            "n": (~np.isnan(cosine)).sum(0),
        }
    )
