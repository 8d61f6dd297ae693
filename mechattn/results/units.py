"""The units of replication of a result: its prompts, or their groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mechattn.errors import OptionError
from mechattn.stats.units import Unit, Units, check_unit

if TYPE_CHECKING:
    import xarray as xr

    from mechattn.results.result import Result


def units_of(result: Result, prompts: int, unit: Unit = "auto") -> Units:
    """The units of all prompts of a result.

    Args:
        result: A result; older stored results have no groups.
        prompts: The number of its prompts.
        unit: "prompt" uses single prompts, even if they have groups.

    Raises:
        OptionError: There is no such unit.
    """
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
    """The units of two results of the same prompts.

    Raises:
        OptionError: The prompts have different groups in the two results.
    """
    groups = [result["sequences"].group.values.tolist() if "group" in result["sequences"] else None]
    groups += [other["sequences"].group.values.tolist() if "group" in other["sequences"] else None]
    if unit == "auto" and groups[0] != groups[1]:
        raise OptionError(
            "the prompts have different groups in the two results; run both with the same prompts, or give "
            'unit="prompt" to use single prompts'
        )
    return units_of(result, prompts, unit)
