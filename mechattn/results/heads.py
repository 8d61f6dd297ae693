"""The heads with the largest values of a quantity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from mechattn.errors import OptionError
from mechattn.results.layer_blocks import layer_blocks, of_layers
from mechattn.results.quantities import NULLS, absent, values_of, variable_of
from mechattn.results.units import units_of
from mechattn.stats.bags import ALONE
from mechattn.stats.intervals import FEWEST, t_interval
from mechattn.stats.units import Unit

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    from mechattn.results.result import Result


def ranked_heads(
    result: Result,
    quantity: str,
    top: int | None,
    condition: str,
    segment: str,
    select: Literal["half"] | None,
    unit: Unit,
    level: float,
    memory: str = "2GiB",
) -> pd.DataFrame:
    """See :meth:`mechattn.results.result.Result.heads`, which explains the arguments."""
    import pandas as pd

    if top is not None and (isinstance(top, bool) or not isinstance(top, int) or top < 1):
        raise OptionError(f"top={top!r}: give a number of heads, at least 1, or None for all")
    if select not in (None, "half") or not 0.5 <= level < 1:
        raise OptionError(f'select={select!r}, level={level}: give "half" or None, and a probability such as 0.95')
    layers = layer_blocks(result, quantity, "segment", segment, memory)
    made = [
        _of_layers(result, some, len(layers) > 1, quantity, condition, segment, select, unit, level) for some in layers
    ]
    size = sum(len(one) for one in made)
    table = pd.concat(made, ignore_index=True) if len(made) > 1 else made[0]
    if not table.there.any():  # for one block, reading the values raises this
        prompts = variable_of(result, quantity, "segment").sizes["prompt"]
        raise absent(prompts, prompts, quantity, segment, condition)
    order = np.argsort(-np.nan_to_num(table.finding.to_numpy(), nan=-np.inf), kind="stable")
    order = order[table.there.to_numpy()[order]][:top]
    null, unit_words = bool(made[0].attrs["null"]), made[0].attrs["unit"]
    table = table.drop(columns=["finding", "there"]).iloc[order].reset_index(drop=True)
    known = f", beside {NULLS['uniform']}" if null else ""
    chosen = "on one half of the prompts, shown on the other" if select else "on the prompts that are shown"
    table.attrs = {"condition": condition, "segment": segment, "of": size, "ranked": chosen + known, "unit": unit_words}
    return table


def _of_layers(
    result: Result,
    some: slice,
    part: bool,
    quantity: str,
    condition: str,
    segment: str,
    select: Literal["half"] | None,
    unit: Unit,
    level: float,
) -> pd.DataFrame:
    """The heads of some layers in order, with the value that ranks them ("finding") and whether they are present."""
    import pandas as pd

    values, null = values_of(
        of_layers(result, some), condition, quantity, "segment", segment, "uniform", {} if part else None
    )
    _check_one_number(values, quantity)
    units = units_of(result, values.sizes["prompt"], unit)
    units.refuse_below(FEWEST if select is None else 2 * FEWEST)
    finding, shown = (slice(None), slice(None)) if select is None else (slice(0, None, 2), slice(1, None, 2))
    each = units.means(values.values.reshape(units.prompts, -1))
    every = np.arange(each.shape[1])
    alone = len(each) <= ALONE  # numpy sums a copy in another order, which changes the last digit
    mean = t_interval(each[shown][:, every] if alone else each[shown], level)
    uniform = np.full(each.shape[1], np.nan)
    if null is not None:
        uniform = units.means(null.values.reshape(units.prompts, -1))[shown].mean(0)
    at = np.unravel_index(every, values.shape[1:])
    made = pd.DataFrame(
        {
            "layer": values.layer.values[at[0]],
            "head": values["head"].values[at[1]],
            quantity: mean.estimate,
            "low": mean.low,
            "high": mean.high,
            "uniform": uniform,
            "n": len(each[shown]),
            "finding": each[finding].mean(0) if alone or select else mean.estimate,
            "there": ~np.isnan(each[0]),
        }
    )
    made.attrs = {"null": null is not None, "unit": units.unit}
    return made


def _check_one_number(values: xr.DataArray, quantity: str) -> None:
    if set(values.dims) != {"prompt", "layer", "head"}:
        more = ", ".join(sorted(map(str, set(values.dims) ^ {"prompt", "layer", "head"})))
        raise OptionError(f"{quantity!r} does not have one number per head ({more}), so it cannot rank heads")
