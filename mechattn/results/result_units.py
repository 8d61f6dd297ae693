"""The units of replication of a result: its prompts, or their groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mechattn.errors import OptionError
from mechattn.stats.units import Unit, Units, check_unit

if TYPE_CHECKING:
    import xarray as xr

    from mechattn.results.result import Result


def units_of(result: Result, prompts: int, unit: Unit = "auto") -> Units:
    """The units of all prompts of a result: its prompts, or their groups."""
    check_unit(unit)
    sequences = result["sequences"]
    if unit == "prompt" or "group" not in sequences:
        return Units(prompts)
    return Units.grouped([str(group) for group in sequences.group.values])


def units_in(result: Result, values: xr.DataArray) -> Units:
    """The units of some prompts of a result, by their ids."""
    ids = values["prompt"].values.tolist() if "prompt" in values.coords else None
    if ids is None or "group" not in result["sequences"]:
        return Units(values.sizes["prompt"])
    found = result["sequences"].group.sel(prompt=ids)
    return Units.grouped([str(group) for group in found.values])


def shared_units(result: Result, other: Result, prompts: int, unit: Unit) -> Units:
    """The units of two results of the same prompts, which must have the same groups."""
    groups = [r["sequences"].group.values.tolist() if "group" in r["sequences"] else None for r in (result, other)]
    if unit == "auto" and groups[0] != groups[1]:
        raise OptionError(
            "the prompts have different groups in the two results; run both with the same prompts, or give "
            'unit="prompt" to use single prompts'
        )
    return units_of(result, prompts, unit)
