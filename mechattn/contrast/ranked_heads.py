"""The heads with the largest values of a quantity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from mechattn.contrast.blocks import layer_blocks, of
from mechattn.contrast.quantities import NULLS, absent, check_present, values_of
from mechattn.contrast.table import check_select
from mechattn.errors import OptionError
from mechattn.results.result import units_of
from mechattn.stats.intervals import FEWEST, shrunken, t_interval
from mechattn.stats.units import Unit, Units

if TYPE_CHECKING:
    import pandas as pd

    from mechattn.results.result import Result


def ranked_heads(
    result: Result,
    quantity: str,
    top: int | None,
    *,
    condition: str,
    segment: str,
    select: Literal["half"] | None,
    unit: Unit,
    level: float,
) -> pd.DataFrame:
    """See :meth:`mechattn.results.result.Result.heads`, which explains the arguments."""
    import pandas as pd

    if top is not None and (isinstance(top, bool) or not isinstance(top, int) or top < 1):
        raise OptionError(f"top={top!r}: give a number of heads, at least 1, or None for all")
    check_select(select)
    prompts = result["sequences"].sizes["prompt"]
    units = units_of(result, prompts, unit)
    units.refuse_below(FEWEST if select is None else 2 * FEWEST)
    halves = (slice(None), slice(None)) if select is None else (slice(0, None, 2), slice(1, None, 2))
    parts = [
        _of_layers(of(result, "layer", some), (quantity, condition, segment), units, halves, level)
        for some in layer_blocks(result, quantity, "segment", segment)
    ]
    table = pd.concat(parts, ignore_index=True)
    if not table.there.any():
        raise absent(prompts, prompts, quantity, segment, condition)
    size, null = len(table), parts[0].attrs["null"]
    error = table.pop("error").to_numpy()
    if select is None:  # the other half needs no shrinking
        table.insert(3, "shrunken", shrunken(table[quantity].to_numpy(), error))
    order = np.argsort(-np.nan_to_num(table.finding.to_numpy(), nan=-np.inf), kind="stable")
    order = order[table.there.to_numpy()[order]][:top]
    table = table.drop(columns=["finding", "there"]).iloc[order].reset_index(drop=True)
    known = f", beside {NULLS['uniform']}" if null else ""
    how = "on one half of the prompts, shown on the other" if select else "on the prompts that are shown"
    table.attrs = {"condition": condition, "segment": segment, "of": size, "ranked": how + known, "unit": units.unit}
    return table


def _of_layers(
    result: Result, asked: tuple[str, str, str], units: Units, halves: tuple[slice, slice], level: float
) -> pd.DataFrame:
    """The heads of some layers in order, with the value that ranks them ("finding") and whether they are present."""
    import pandas as pd

    quantity, condition, segment = asked
    values, null = values_of(result, condition, quantity, "segment", segment)
    if set(values.dims) != {"prompt", "layer", "head"}:
        more = ", ".join(sorted(map(str, set(values.dims) ^ {"prompt", "layer", "head"})))
        raise OptionError(f"{quantity!r} does not have one number per head ({more}), so it cannot rank heads")
    check_present(values, quantity, segment, condition)
    finding, shown = halves
    each = units.means(values.values.reshape(units.prompts, -1))
    mean = t_interval(each[shown], level)
    uniform: np.ndarray | float = np.nan
    if null is not None:
        uniform = units.means(null.broadcast_like(values).transpose(*values.dims).values)[shown].mean(0).reshape(-1)
    at = np.unravel_index(np.arange(each.shape[1]), values.shape[1:])
    made = pd.DataFrame(
        {
            "layer": values.layer.values[at[0]],
            "head": values["head"].values[at[1]],
            quantity: mean.estimate,
            "low": mean.low,
            "high": mean.high,
            "uniform": uniform,
            "error": each[shown].std(0, ddof=1) / np.sqrt(len(each[shown])),
            "n": len(each[shown]),
            "finding": each[finding].mean(0),
            "there": ~np.isnan(each[0]),
        }
    )
    made.attrs = {"null": null is not None}
    return made
