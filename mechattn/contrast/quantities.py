"""Where the numbers of a quantity are in a result, and those of its null; read in blocks that fit
in its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from numbers import Integral
from typing import Any, Literal, NamedTuple

import numpy as np
import xarray as xr

from mechattn.axes import BASELINE
from mechattn.errors import MemoryOptionError, OptionError
from mechattn.results.arrays import is_lazy
from mechattn.results.result import Result, memory_bytes
from mechattn.stats.resolution import RESAMPLES
from mechattn.stats.units import resampled

Scale = Literal["log-ratio", "difference"]
Null = Literal["dilution", "uniform", "blind"]
Side = tuple[Result, str]  # a condition of a result
NULLS = {
    "dilution": "dilution of the baseline's attention",
    "uniform": "uniform attention",
    "blind": "attention by position alone",
}
# Dimensions that a quantity may have beside prompt, layer and head.
FURTHER = ("segment", "to_segment", "band")
_NULL_NEEDS = {
    "dilution": (
        'it exists for "received" and "mass" in segments of the baseline, in conditions that change'
        ' no token, unless queries="all"; otherwise use null="uniform"'
    ),
    "blind": (
        "it exists only in models that add something to their scores (ALiBi, learned sinks), for"
        ' quantities made of attention; otherwise use null="uniform"'
    ),
}
_A_HEAD = {"prompt", "condition", "layer", "head"}
# Arrays [prompt, cell] of float64 in memory at the same time in a comparison: measured 4 to 6.
_COPIES = 8
_KEPT = 6  # arrays kept for resampling [unit or bag, cell], for all layers
_SHARE = 4  # of the memory: a quantity that is kept takes at most this fraction


def variable_of(result: Result, quantity: str) -> xr.DataArray:
    """The variable that holds a quantity."""
    dataset_name, name = dataset_of(result, quantity)
    return result[dataset_name][name]


def segment_of(variable: xr.DataArray, segment: str | None) -> str:
    """The segment that the numbers of a quantity are of, as a column of a table says; empty for one
    without.
    """
    return (segment or "all") if "segment" in variable.dims else ""


def dataset_of(result: Result, quantity: str) -> tuple[str, str]:
    """The name of the dataset that has a quantity for each prompt, and the variable's name."""
    if not isinstance(quantity, str):
        raise OptionError(f'quantity={quantity!r}: give one name, such as "received"')
    names = (f"{quantity}_by_segment", quantity)
    for dataset_name, dataset in result.datasets.items():
        for name in names:
            if name in dataset and "prompt" in dataset[name].dims:
                return dataset_name, name

    from mechattn.analysis import ANALYSES

    measured = sorted(_quantities(result, lambda dims: {"prompt", "layer"} <= dims))
    hint = f"there are {', '.join(measured)}: name one with quantity=…"
    for kind in ANALYSES:
        if not kind().quantities.keys().isdisjoint(names):
            hint += f", or run it with ma.analyses.{kind.__name__}()"
    raise OptionError(f"no analysis of this result has {quantity!r} for each prompt; {hint}")


def head_quantities(result: Result) -> list[str]:
    """The quantities with one number per head and prompt, named as in ``result.compare``;
    "received" comes first.
    """
    names = _quantities(result, lambda dims: _A_HEAD <= dims <= _A_HEAD | {"segment"})
    names = [name for name in names if not name.endswith("_per_prompt")]
    return sorted(names, key=lambda name: name != "received")


def _quantities(result: Result, has: Callable[[set[Any]], bool]) -> list[str]:
    """The names of what was measured with such dimensions, without nulls."""
    nulls = tuple(f"_{kind}" for kind in NULLS)
    names = []
    for dataset_name, dataset in result.datasets.items():
        if dataset_name == "sequences":
            continue
        for name, variable in dataset.data_vars.items():
            if has(set(variable.dims)) and not str(name).endswith(nulls):
                names.append(str(name).removesuffix("_by_segment"))
    return list(dict.fromkeys(names))


def has_dilution(side: Side, quantity: str, segment: str | None) -> bool:
    """Whether each number of a quantity in a condition has its dilution null."""
    result, condition = side
    dataset_name, name = dataset_of(result, quantity)
    dataset = result[dataset_name]
    null_name = f"{name}_dilution"
    if null_name not in dataset:
        return False
    check_condition(result, condition)
    values = in_segment(dataset[name].sel(condition=condition), segment)
    nulls = in_segment(dataset[null_name].sel(condition=condition), segment)
    prompts = values.sizes["prompt"]
    bytes_of_a_prompt = 8 * _COPIES * values.size // max(1, prompts)
    for prompt in slices(prompts, bytes_of_a_prompt, result.memory, "a prompt"):
        lacks = nulls.isel(prompt=prompt).isnull() & values.isel(prompt=prompt).notnull()
        if lacks.any():
            return False
    return True


def values_of(
    result: Result, condition: str, quantity: str, segment: str | None, kind: Null = "uniform"
) -> tuple[xr.DataArray, xr.DataArray | None]:
    """Each prompt's values [prompt, layer, head, …] in a condition, and those of the null; errors
    if absent.
    """
    check_condition(result, condition)
    dataset_name, name = dataset_of(result, quantity)
    dataset = result[dataset_name]
    values = chosen(dataset[name], condition, segment)
    null_name = f"{name}_{kind}"
    if null_name not in dataset and kind == "uniform":
        return values, None  # the table says that no null is known
    if null_name not in dataset:
        raise OptionError(f"{quantity!r} has no null={kind!r}: {_NULL_NEEDS[kind]}")
    if kind == "dilution" and not has_dilution((result, condition), quantity, segment):
        in_words = f" with {condition!r} in the segment {segment or 'inserted'!r}"
        raise OptionError(f"{quantity!r} has no null={kind!r}{in_words}: {_NULL_NEEDS[kind]}")
    return values, chosen(dataset[null_name], condition, segment)


def check_present(
    values: xr.DataArray, quantity: str, segment: str | None, side: Side, sides: Sequence[Side]
) -> None:
    """Refuse values of one of the sides that some prompts lack, in a cell that others have."""
    if not np.isnan(values.values.min(initial=np.inf)):
        return
    missing = values.isnull()
    missing &= ~missing.all("prompt")
    if missing.any():
        bad = missing.any([dim for dim in values.dims if dim != "prompt"])
        raise absent(int(bad.sum()), quantity, segment, side, sides)


def which_have(side: Side, quantity: str, segment: str | None) -> np.ndarray:
    """Which prompts have a quantity in any cell [prompt]."""
    result, condition = side
    values = in_segment(variable_of(result, quantity).sel(condition=condition), segment)
    over = [dim for dim in values.dims if dim != "prompt"]
    blocks = in_parts(values, "prompt", result.memory)
    return np.concatenate([block.notnull().any(over).values for block in blocks])


def absent(
    count: int, quantity: str, segment: str | None, side: Side, sides: Sequence[Side]
) -> OptionError:
    """The error where some prompts lack a quantity in one of the sides; it says where all have it,
    in all sides.
    """
    result, condition = side
    origin = result["sequences"].origin
    inserting = [name for name in result.conditions if (origin.sel(condition=name) == -1).any()]
    if segment == "inserted" and inserting and condition not in inserting:
        inserting_here = [name for _, name in sides if name in inserting]
        name = (inserting_here or inserting)[0]
        hint = "result.compare takes two conditions that insert"
        if quantity in head_quantities(result):
            call = f"result.heads({quantity!r}, condition={name!r}, segment='inserted')"
            hint = f"{call} shows what {name!r} has, and {hint}"
        return OptionError(
            f"{condition!r} inserts no tokens, so it has no {quantity!r} in the segment 'inserted';"
            f" {hint}"
        )

    variable = variable_of(result, quantity)
    place = ""
    hint = "leave these out with result.sel(prompt=…)"
    if "segment" in variable.dims:
        place = " in some segment" if segment is None else f" in the segment {segment!r}"
        complete = []
        for name in variable.segment.values.tolist():
            if all(which_have(other_side, quantity, name).all() for other_side in sides):
                complete.append(repr(name))
        hint = f"all have it in: {', '.join(complete)}" if complete else "no segment has it in all"
        if len(sides) > 1:
            hint = f"in both conditions {hint}"
    prompts = variable.sizes["prompt"]
    return OptionError(
        f"{count} of {prompts} prompts have no {quantity!r}{place} with {condition!r}; {hint}"
    )


def check_condition(result: Result, condition: str) -> None:
    """Refuse a condition that the result doesn't have."""
    if condition not in result.conditions:
        raise OptionError(
            f"there is no condition {condition!r}; the result has"
            f" {', '.join(map(repr, result.conditions))}"
        )


def in_segment(variable: xr.DataArray, segment: str | None) -> xr.DataArray:
    """A variable's values in a segment, if it has segments."""
    if "segment" not in variable.dims or segment is None:
        return variable
    if segment not in variable.segment.values:
        segments = ", ".join(map(repr, variable.segment.values.tolist()))
        raise OptionError(f"segment={segment!r}: choose one of {segments}")
    return variable.sel(segment=segment)


class LayerValues(NamedTuple):
    """The values [prompt, condition, layer, …] of a quantity, unread, and those of its null, if
    there is one.
    """

    values: xr.DataArray
    null: xr.DataArray | None
    null_kind: Null


def by_layer(result: Result, quantity: str, segment: str, conditions: Sequence[str]) -> LayerValues:
    """The values of a quantity with at most one number per head: beside dilution, else uniform
    attention.
    """
    dataset_name, name = dataset_of(result, quantity)
    dataset = result[dataset_name]
    values = in_segment(dataset[name], segment)
    further = set(values.dims) ^ {"prompt", "condition", "layer"}
    if further - {"head", "block"}:
        words = ", ".join(map(str, further))
        raise OptionError(f"{quantity!r} has more than one number for each head ({words})")

    changed = [condition for condition in conditions if condition != BASELINE]
    has = [has_dilution((result, condition), quantity, segment) for condition in changed]
    null_kind: Null = "dilution" if has and all(has) else "uniform"
    null_name = f"{name}_{null_kind}"
    if null_name not in dataset:
        return LayerValues(values, None, null_kind)
    return LayerValues(values, in_segment(dataset[null_name], segment), null_kind)


def chosen(variable: xr.DataArray, condition: str, segment: str | None) -> xr.DataArray:
    """A variable's float64 values in a condition and a segment."""
    values = in_segment(variable.sel(condition=condition), segment)
    values = values.astype(np.float64, copy=False)
    first_dims = [dim for dim in ("prompt", "layer", "head") if dim in values.dims]
    return values.transpose(*first_dims, ...).reset_coords(drop=True)


def check_layer(layer: object, dataset: xr.Dataset | xr.DataArray) -> None:
    """Refuse a layer that does not exist or was not measured."""
    measured = dataset.layer.values.tolist()
    if isinstance(layer, bool) or not isinstance(layer, Integral):
        raise OptionError(f"layer={layer!r}: give one whole number, from 0")
    if layer not in measured:
        raise OptionError(f"layer {layer} was not measured; the result has {measured}")


def slices(count: int, bytes_of_one: int, memory: str, what: str, shared: int = 0) -> list[slice]:
    """Split a number of layers or prompts, which take some bytes each beside ``shared`` ones, into
    blocks that fit.
    """
    free = max(memory_bytes(memory) - shared, 0)
    at_a_time = free // max(1, bytes_of_one)
    if at_a_time >= count:
        return [slice(None)]
    if at_a_time < 1:
        needed = -(-(shared + bytes_of_one) // 2**20)
        raise MemoryOptionError(
            f"{what} takes {needed:,} MiB, and memory={memory!r} allows less; give more "
            f'(ma.load_result(…, memory="{needed}MiB"), or --memory {needed}MiB), or fewer'
            " resamples"
        )
    return [slice(start, min(start + at_a_time, count)) for start in range(0, count, at_a_time)]


def layer_blocks(
    result: Result, quantity: str, segment: str | None, bootstrap: int = 0, signs: int = 0
) -> list[slice]:
    """The layers of a quantity in blocks for a comparison with these numbers of resamples and sign
    patterns.
    """
    variable = variable_of(result, quantity)
    sizes = {str(dim): size for dim, size in variable.sizes.items()}
    prompts = sizes.pop("prompt")
    layers = sizes.get("layer", 1)
    sizes.pop("condition", None)
    stored = prod(sizes.values())  # numbers of a prompt and condition
    cells = stored
    if segment is not None:
        cells //= sizes.get("segment", 1)

    bytes_of_a_layer = 8 * _COPIES * prompts * cells // layers
    bytes_of_a_layer += 2 * variable.dtype.itemsize * prompts * stored // layers
    shared = 0
    if signs:
        of_patterns = max(signs, 20 * cells) // 8
        shared = resampled(prompts) * (2 * bootstrap + of_patterns + 8 * _KEPT * cells)
    words = f"{quantity!r} of {prompts:,} prompts"
    return slices(layers, bytes_of_a_layer, result.memory, words, shared)


def in_parts(values: xr.DataArray, dim: str, memory: str) -> Iterator[xr.DataArray]:
    """Yield values some layers or prompts at a time."""
    count = values.sizes[dim]
    bytes_of_one = 8 * _COPIES * values.size // max(1, count)
    for block in slices(count, bytes_of_one, memory, f"one {dim} of {values.name!r}"):
        yield values if block == slice(None) else values.isel({dim: block})


def kept(result: Result, quantity: str, condition: str, segment: str) -> Result:
    """A stored result with a quantity of one condition read into memory, if it takes at most a
    quarter of it.
    """
    dataset_name, name = dataset_of(result, quantity)
    dataset = result[dataset_name]
    by_segment = "segment" in dataset[name].dims
    if not is_lazy(result) or (by_segment and segment not in dataset.segment.values):
        return result

    nulls = [f"{name}_{kind}" for kind in NULLS]
    names = [name, *(null for null in nulls if null in dataset)]
    wanted = {"condition": [condition]}
    if by_segment:
        wanted["segment"] = [segment]
    selected = dataset[names].sel(wanted)
    size = 8 * sum(prod(variable.shape) for variable in selected.data_vars.values())
    memory = memory_bytes(result.memory)
    if size > memory // _SHARE:
        return result

    datasets = {"sequences": result["sequences"], dataset_name: selected}
    left = f"{(memory - 2 * size) / 2**10:.3f}KiB"
    read_result = replace(result, datasets=datasets, memory=left)
    try:
        layer_blocks(read_result, quantity, segment, RESAMPLES, RESAMPLES)
    except MemoryOptionError:
        return result
    return replace(read_result, datasets={**datasets, dataset_name: selected.astype(np.float64)})
