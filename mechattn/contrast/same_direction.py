"""Whether two conditions change activations in the same direction."""

from __future__ import annotations

from collections.abc import Sequence as Seq

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
    controls: Seq[str] | None,
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
    others = [other, *controls]
    parts = (part.astype(np.float64) for part in in_parts(product, "prompt", result.memory))
    found = [[_cosine(part, one, name, over) for name in others] for part in parts]
    cosines = [np.concatenate(each) for each in zip(*found, strict=True)]
    tables = []
    for name, cosine in zip(others, cosines, strict=True):
        about = {"condition": one, "other": name, "layer": product.layer.values}
        tables.append(
            pd.DataFrame(
                about | _columns(units.means(cosine), units.means(cosines[0] - cosine), level)
            )
        )
    made = pd.concat(tables, ignore_index=True)
    made.attrs = {"over": over, "quantity": quantity, "level": level, "unit": units.unit}
    return made


def _cosine(product: xr.DataArray, one: str, other: str, over: str) -> np.ndarray:
    """The cosine [prompt, layer]; NaN if one condition changes nothing."""

    def between(a: str, b: str) -> np.ndarray:
        return product.sel(condition=a, other_condition=b).values

    def apart(a: str, b: str) -> np.ndarray:
        return between(a, b) - between(a, over) - between(over, b) + between(over, over)

    norms = np.sqrt(apart(one, one) * apart(other, other))
    return np.divide(
        apart(one, other), norms, out=np.full_like(norms, np.nan), where=norms > 0
    ).clip(-1, 1)


def _columns(cosine: np.ndarray, apart: np.ndarray, level: float) -> dict[str, np.ndarray]:
    """The cosine of each layer, and how much lower it is than that of the two main conditions."""
    made = dict(
        zip(("cosine", "cosine_low", "cosine_high"), t_interval(cosine, level), strict=True)
    )
    made |= dict(
        zip(("beyond", "beyond_low", "beyond_high"), t_interval(apart, level), strict=True)
    )
    return made | {"n": (~np.isnan(cosine)).sum(0)}
