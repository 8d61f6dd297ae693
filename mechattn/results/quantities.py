"""Where the numbers of a quantity are in a result, and those of its null."""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING, Literal

import numpy as np

from mechattn.errors import OptionError

if TYPE_CHECKING:
    import xarray as xr

    from mechattn.results.result import Result

Null = Literal["uniform", "blind"]
NULLS = {"uniform": "uniform attention", "blind": "attention by position alone"}


def variable_of(result: Result, quantity: str, by: str) -> xr.DataArray:
    """The variable that holds a quantity."""
    dataset, name = _found(result, quantity, by)
    return dataset[name]


def _found(result: Result, quantity: str, by: str) -> tuple[xr.Dataset, str]:
    """The dataset that has a quantity for each prompt, and the variable's name."""
    if not isinstance(quantity, str):
        raise OptionError(f'quantity={quantity!r}: give one name, such as "received"')
    names = (f"{quantity}_by_{by}", quantity)
    found = [(result[at], name) for at in result.datasets for name in names if name in result[at]]
    found = [(dataset, name) for dataset, name in found if "prompt" in dataset[name].dims]
    if not found:
        have = sorted(
            str(name).removesuffix(f"_by_{by}")
            for at in result.datasets
            for name, variable in result[at].data_vars.items()
            if at != "sequences" and {"prompt", "layer"} <= set(variable.dims) and not _is_null(str(name))
        )
        raise OptionError(
            f"no analysis of this result has {quantity!r} for each prompt; there are {', '.join(have)}: name one with "
            "quantity=…"
        )
    return found[0]


def _is_null(name: str) -> bool:
    return name.endswith(tuple(f"_{kind}" for kind in NULLS))


def values_of(
    result: Result, condition: str, quantity: str, by: str, segment: str | None, kind: Null, part: bool = False
) -> tuple[xr.DataArray, xr.DataArray | None]:
    """Each prompt's values [prompt, layer, head, …] in a condition, and those of the null; errors if absent.

    With ``part``, the result has only some of the layers, and possibly none with the quantity.
    """
    if condition not in result.conditions:
        raise OptionError(
            f"there is no condition {condition!r}; the result has {', '.join(map(repr, result.conditions))}"
        )
    dataset, name = _found(result, quantity, by)
    values = _chosen(dataset[name], condition, segment)
    of_null = f"{name}_{kind}"
    null = _chosen(dataset[of_null], condition, segment) if of_null in dataset else None
    if null is None and kind == "blind":
        raise OptionError(
            f'{quantity!r} has no null="blind": it exists only in models that add something to their scores (ALiBi, '
            'learned sinks), for quantities made of attention; otherwise use null="uniform"'
        )
    for dim in ("segment", "to_segment"):
        values = values.dropna(dim, how="all") if dim in values.dims else values
    if "band" in values.dims:  # short prompts don't reach as far back
        others = [dim for dim in values.dims if dim not in ("prompt", "band")]
        values = values.isel(band=values.notnull().all("prompt").any(others).values)
    missing = values.isnull()
    missing &= ~missing.all("prompt") | (missing.all() & (not part))  # a layer where no prompt has it is left out
    if missing.any():
        bad = missing.any([dim for dim in values.dims if dim != "prompt"])
        raise OptionError(
            f"{int(bad.sum())} of {values.sizes['prompt']} prompts have no {quantity!r} in the segment {segment!r} "
            f"with {condition!r}; compare a segment that all prompts have, in both conditions"
        )
    if null is not None:
        shared = {dim: values[dim] for dim in null.dims}
        null = null.sel(shared).broadcast_like(values).transpose(*values.dims)
    return values, null


def _chosen(variable: xr.DataArray, condition: str, segment: str | None) -> xr.DataArray:
    chosen = variable.sel(condition=condition)
    if "segment" in chosen.dims and segment is not None:
        if segment not in chosen.segment.values:
            raise OptionError(
                f"segment={segment!r}: choose one of {', '.join(map(repr, chosen.segment.values.tolist()))}"
            )
        chosen = chosen.sel(segment=segment)
    chosen = chosen.astype(np.float64)
    first = [dim for dim in ("prompt", "layer", "head") if dim in chosen.dims]
    return chosen.transpose(*first, ...).reset_coords(drop=True)


def check_layer(layer: object, dataset: xr.Dataset | xr.DataArray) -> None:
    """Refuse a layer that does not exist or was not measured.

    Raises:
        OptionError: It is not a whole number, or the dataset has other layers.
    """
    have = dataset.layer.values.tolist()
    if isinstance(layer, bool) or not isinstance(layer, Integral):
        raise OptionError(f"layer={layer!r}: give one whole number, from 0")
    if layer not in have:
        raise OptionError(f"layer {layer} was not measured; the result has {have}")
