"""Where the numbers of a quantity are in a result, and those of its null."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Literal

import numpy as np

from mechattn.errors import OptionError

if TYPE_CHECKING:
    import xarray as xr

    from mechattn.results.result import Result

There = Mapping[str, np.ndarray]  # which labels of a dimension have values
Null = Literal["uniform", "blind"]
_FURTHER = ("segment", "to_segment", "band")
NULLS = {"uniform": "uniform attention", "blind": "attention by position alone"}


def variable_of(result: Result, quantity: str, by: str) -> xr.DataArray:
    """The variable that holds a quantity."""
    at, name = dataset_of(result, quantity, by)
    return result[at][name]


def dataset_of(result: Result, quantity: str, by: str) -> tuple[str, str]:
    """The name of the dataset that has a quantity for each prompt, and the variable's name."""
    if not isinstance(quantity, str):
        raise OptionError(f'quantity={quantity!r}: give one name, such as "received"')
    names = (f"{quantity}_by_{by}", quantity)
    found = [(at, name) for at in result.datasets for name in names if name in result[at]]
    found = [(at, name) for at, name in found if "prompt" in result[at][name].dims]
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
    result: Result,
    condition: str,
    quantity: str,
    by: str,
    segment: str | None,
    kind: Null,
    part: There | None = None,
) -> tuple[xr.DataArray, xr.DataArray | None]:
    """Each prompt's values [prompt, layer, head, …] in a condition, and those of the null; errors if absent.

    With ``part``, the result has only some of the layers, and possibly none with the quantity; ``part`` says what all
    layers together have of the other dimensions.
    """
    check_condition(result, condition)
    at, name = dataset_of(result, quantity, by)
    dataset = result[at]
    values = _chosen(dataset[name], condition, segment)
    of_null = f"{name}_{kind}"
    null = _chosen(dataset[of_null], condition, segment) if of_null in dataset else None
    if null is None and kind == "blind":
        raise OptionError(
            f'{quantity!r} has no null="blind": it exists only in models that add something to their scores (ALiBi, '
            'learned sinks), for quantities made of attention; otherwise use null="uniform"'
        )
    for dim in _FURTHER:
        if dim in values.dims:
            values = values.isel({dim: (_there(values, dim) if part is None else part[dim])})
    if np.isnan(values.values.min(initial=np.inf)):
        missing = values.isnull()
        # A layer where no prompt has it is left out.
        missing &= ~missing.all("prompt") | (missing.all() & (part is None))
        if missing.any():
            bad = missing.any([dim for dim in values.dims if dim != "prompt"])
            raise absent(int(bad.sum()), values.sizes["prompt"], quantity, segment, condition)
    if null is not None:
        null = selected(null, values).broadcast_like(values).transpose(*values.dims)
    return values, null


def selected(values: xr.DataArray, like: xr.DataArray) -> xr.DataArray:
    """Values at the labels of another array, along the dimensions they share; not copied if they are the same."""
    shared = [dim for dim in values.dims if dim in like.dims]
    return values.sel({dim: like[dim] for dim in shared if not np.array_equal(like[dim].values, values[dim].values)})


def check_condition(result: Result, condition: str) -> None:
    """Refuse a condition that the result doesn't have.

    Raises:
        OptionError: It has others.
    """
    if condition not in result.conditions:
        raise OptionError(
            f"there is no condition {condition!r}; the result has {', '.join(map(repr, result.conditions))}"
        )


def absent(some: int, prompts: int, quantity: str, segment: str | None, condition: str) -> OptionError:
    """What is said where some prompts lack a quantity."""
    return OptionError(
        f"{some} of {prompts} prompts have no {quantity!r} in the segment {segment!r} "
        f"with {condition!r}; compare a segment that all prompts have, in both conditions"
    )


def there(
    blocks: Iterable[Result], condition: str, quantity: str, by: str, segment: str | None
) -> dict[str, np.ndarray]:
    """What there is of the dimensions beside prompts, layers and heads, in any of some blocks of layers."""
    found: dict[str, np.ndarray] = {}
    for block in blocks:
        variable = variable_of(block, quantity, by)
        dims = [dim for dim in _FURTHER if dim in variable.dims and (dim != "segment" or segment is None)]
        if not dims:
            break  # and nothing is read
        check_condition(block, condition)
        values = _chosen(variable, condition, segment)
        for dim in dims:
            here = _there(values, dim)
            found[dim] = here | found.get(dim, np.zeros_like(here))
            if dim != "band":
                values = values.isel({dim: here})
    return found


def _there(values: xr.DataArray, dim: str) -> np.ndarray:
    """Which labels of a dimension have values: of a band every prompt's, as short prompts don't reach as far back."""
    others = [other for other in values.dims if other != dim]
    if dim != "band":
        return values.notnull().any(others).values
    return values.notnull().all("prompt").any([other for other in others if other != "prompt"]).values


def _chosen(variable: xr.DataArray, condition: str, segment: str | None) -> xr.DataArray:
    chosen = variable.sel(condition=condition)
    if "segment" in chosen.dims and segment is not None:
        if segment not in chosen.segment.values:
            raise OptionError(
                f"segment={segment!r}: choose one of {', '.join(map(repr, chosen.segment.values.tolist()))}"
            )
        chosen = chosen.sel(segment=segment)
    chosen = chosen.astype(np.float64, copy=False)
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
