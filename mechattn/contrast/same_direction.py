"""Whether two conditions change activations in the same direction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr

from mechattn.axes import BASELINE
from mechattn.contrast.quantities import check_condition, check_names, in_parts
from mechattn.errors import OptionError
from mechattn.results.result import Result, units_of
from mechattn.stats.intervals import FEWEST, ratio, t_interval
from mechattn.stats.units import Unit


def agreement(
    result: Result,
    condition: str,
    other_condition: str,
    *,
    to: str,
    controls: Sequence[str] | None,
    unit: Unit,
    level: float,
) -> pd.DataFrame:
    """See :meth:`mechattn.results.result.Result.agreement`, which explains the arguments.

    Raises:
        OptionError: No activations were measured, a condition is unknown, ``to`` is one of the
            two, or there are too few units.
    """
    if "mlp_activations" not in result.datasets:
        raise OptionError(
            "this result has no mlp_activations; run it with"
            " analyses=[ma.analyses.MlpActivations()]"
        )
    if controls is None:
        named_conditions = (condition, other_condition, to, BASELINE)
        controls = [name for name in result.conditions if name not in named_conditions]
    check_names("controls", controls, 0)
    other_conditions = [other_condition, *controls]
    for name in (condition, *other_conditions, to):
        check_condition(result, name)
    if to in (condition, other_condition):
        raise OptionError(f"to={to!r} is one of the two conditions, so its change is zero")
    units = units_of(result, unit)
    units.refuse_below(FEWEST)

    # Some prompts are read at a time.
    product = result["mlp_activations"].change_product
    blocks = []
    for block in in_parts(product, "prompt", result.memory):
        blocks.append(_cosines(block.astype(np.float64), condition, other_conditions, to))
    cosines = np.concatenate(blocks)  # [prompt, other, layer]

    # The cosine with each condition, and that with ``other_condition``, the first, minus each.
    unit_cosines = units.means(cosines)
    cosines_with_first = cosines[:, :1]
    unit_differences = units.means(cosines_with_first - cosines)
    mean, low, high = t_interval(unit_cosines, level)
    beyond, beyond_low, beyond_high = t_interval(unit_differences, level)
    layers = product.layer.values
    columns = {
        "condition": condition,
        "other": np.repeat(other_conditions, len(layers)),
        "layer": np.tile(layers, len(other_conditions)),
        "cosine": mean.ravel(),
        "cosine_low": low.ravel(),
        "cosine_high": high.ravel(),
        "beyond": beyond.ravel(),
        "beyond_low": beyond_low.ravel(),
        "beyond_high": beyond_high.ravel(),
        "n": np.isfinite(unit_cosines).sum(0).ravel(),
    }
    table = pd.DataFrame(columns)
    table.attrs = {"to": to, "level": level, "unit": units.unit}
    return table


def _cosines(
    product: xr.DataArray, condition: str, other_conditions: list[str], to: str
) -> np.ndarray:
    """The cosines of a condition's change from ``to`` with those of other conditions [prompt,
    other, layer]; NaN if one of the two changes nothing.

    ``⟨a − t, b − t⟩ / (‖a − t‖ ‖b − t‖)`` with
    ``⟨a − t, b − t⟩ = ⟨a, b⟩ − (⟨a, t⟩ + ⟨t, b⟩) + ⟨t, t⟩``, where a, b and t are the changes from
    the baseline in the condition, in another one and in ``to``.

    Args:
        product: ``⟨a, b⟩`` [prompt, layer, condition, other_condition].
        condition: The condition.
        other_conditions: The conditions that it is compared with.
        to: The condition from which changes are measured.
    """
    products_a_t = product.sel(other_condition=to, drop=True)
    products_t_b = product.sel(condition=to, drop=True)
    products_t_t = products_a_t.sel(condition=to, drop=True)
    products_from_t = product - (products_a_t + products_t_b) + products_t_t

    other_labels = xr.DataArray(other_conditions, dims="other")
    products_of_condition = products_from_t.sel(condition=condition, drop=True)
    products = products_of_condition.sel(other_condition=other_labels)
    squared_norm = products_of_condition.sel(other_condition=condition, drop=True)
    squared_norms = products_from_t.sel(condition=other_labels, other_condition=other_labels)

    dims = ("prompt", "other", "layer")
    products = products.transpose(*dims)
    squared_products = (squared_norm * squared_norms).transpose(*dims)
    cosines = ratio(products.values, np.sqrt(squared_products.values))
    return cosines.clip(-1, 1)  # rounding may exceed 1
