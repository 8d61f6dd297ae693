"""The variables of a result that hold a quantity and its null, and their values in blocks that fit
in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from math import ceil
from typing import Any, Literal, TypeVar

import numpy as np
import xarray as xr

from mechattn.analysis import ANALYSES
from mechattn.axes import BASELINE, INSERTED
from mechattn.errors import MemoryOptionError, OptionError, memory_bytes
from mechattn.results.result import Result
from mechattn.stats.units import patterns_needed, resampled_count

Scale = Literal["log-ratio", "difference"]
Null = Literal["dilution", "uniform", "blind"]
Side = tuple[Result, str]  # a condition of a result
Values = TypeVar("Values", xr.DataArray, xr.Dataset)

NULLS = {
    "dilution": "dilution of the baseline's attention",
    "uniform": "uniform attention",
    "blind": "attention by position alone",
}
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

_HEAD_DIMS = {"prompt", "condition", "layer", "head"}

# Arrays [prompt, cell] of float64 in memory at the same time in a comparison: 4 to 6 were measured.
_ARRAYS_AT_ONCE = 8
_ARRAYS_KEPT = 6  # arrays [unit or bag, cell] of all layers that are kept for resampling


# The variable that holds a quantity.


def variable_of(result: Result, quantity: str) -> xr.DataArray:
    """The variable that holds a quantity for each prompt.

    Raises:
        OptionError: As for :func:`dataset_of`.
    """
    dataset, name = dataset_of(result, quantity)
    return dataset[name]


def dataset_of(result: Result, quantity: str) -> tuple[xr.Dataset, str]:
    """The dataset that holds a quantity for each prompt, and the name of its variable.

    Raises:
        OptionError: No analysis measured it for each prompt; the error names one that does.
    """
    if not isinstance(quantity, str):
        raise OptionError(f'quantity={quantity!r}: give one name, such as "received"')
    names = (f"{quantity}_by_segment", quantity)
    for dataset in result.datasets.values():
        for name in names:
            if name in dataset and "prompt" in dataset[name].dims:
                return dataset, name

    # Name the quantities that were measured, and the analysis that measures this one.
    measured_quantities = sorted(_quantities(result, lambda dims: {"prompt", "layer"} <= dims))
    remedy = f"there are {', '.join(measured_quantities)}: name one with quantity=…"
    for analysis in ANALYSES:
        if not analysis().quantities.keys().isdisjoint(names):
            remedy += f", or run it with ma.analyses.{analysis.__name__}()"
    raise OptionError(f"no analysis of this result has {quantity!r} for each prompt; {remedy}")


def head_quantities(result: Result) -> list[str]:
    """The quantities with one number for each head in each prompt, or in each segment of a prompt.

    They have the names of ``result.compare``, and "received" comes first.
    """
    allowed_dims = _HEAD_DIMS | {"segment"}
    names = []
    for name in _quantities(result, lambda dims: _HEAD_DIMS <= dims <= allowed_dims):
        if not name.endswith("_per_prompt"):
            names.append(name)
    return sorted(names, key=lambda name: name != "received")  # False sorts before True


# The values of a quantity and of its null, in a condition and a segment.


def values_of(
    result: Result, condition: str, quantity: str, segment: str | None, null_kind: Null = "uniform"
) -> tuple[xr.DataArray, xr.DataArray | None]:
    """The values of a quantity in a condition [prompt, layer, head, …], and those of its null.

    Args:
        result: A result with the quantity.
        condition: One of its conditions.
        quantity: The quantity, such as "received".
        segment: A segment; None for all segments, as a further dimension.
        null_kind: The kind of null.

    Returns:
        The values, and those of the null. The latter are None if the uniform null is asked for and
        the quantity has none.

    Raises:
        OptionError: There is no such condition, quantity or segment, or the quantity has no
            dilution or blind null.
    """
    check_condition(result, condition)
    dataset, name = dataset_of(result, quantity)
    values = values_in(dataset[name], condition, segment)

    null_name = f"{name}_{null_kind}"
    is_known = null_name in dataset
    if null_kind == "dilution":
        is_known = has_dilution((result, condition), quantity, segment)
    if is_known:
        return values, values_in(dataset[null_name], condition, segment)
    if null_kind == "uniform":
        return values, None
    raise OptionError(
        f"{quantity!r} has no null={null_kind!r} with {condition!r}: {_NULL_NEEDS[null_kind]}"
    )


def has_dilution(side: Side, quantity: str, segment: str | None) -> bool:
    """Whether every value of a quantity in a condition has a dilution null."""
    result, condition = side
    dataset, name = dataset_of(result, quantity)
    null_name = f"{name}_dilution"
    if null_name not in dataset:
        return False

    check_condition(result, condition)
    values = in_segment(dataset[name].sel(condition=condition), segment)
    null = in_segment(dataset[null_name].sel(condition=condition), segment)

    # Some prompts at a time, as a large result is not in memory.
    prompts = values.sizes["prompt"]
    bytes_of_a_prompt = 8 * _ARRAYS_AT_ONCE * values.size // max(1, prompts)
    for block in slices(prompts, bytes_of_a_prompt, result.memory, "a prompt"):
        has_value = values.isel(prompt=block).notnull()
        lacks_null = null.isel(prompt=block).isnull()
        if (lacks_null & has_value).any():
            return False
    return True


def values_beside_null(
    result: Result, quantity: str, segment: str, conditions: Sequence[str]
) -> tuple[xr.DataArray, xr.DataArray | None, Null]:
    """The values of a quantity with at most one number for each head, and those of its null
    [prompt, condition, layer, …].

    The arrays that come back are not read yet if the result is on disk. Only the check whether
    every value has a dilution null reads some.

    Args:
        result: A result with the quantity.
        quantity: The quantity, such as "received".
        segment: The segment. It is not used if the quantity has no segments.
        conditions: The conditions that are shown. The null is dilution if all of them but the
            baseline have it, and otherwise uniform attention.

    Returns:
        The values, those of the null (None if there is none), and the kind of null.

    Raises:
        OptionError: The quantity has more than one number for each head.
    """
    dataset, name = dataset_of(result, quantity)
    values = in_segment(dataset[name], segment)
    check_at_most_one_number(values, quantity)

    sides = [(result, condition) for condition in conditions if condition != BASELINE]
    have_dilution = [has_dilution(side, quantity, segment) for side in sides]
    null_kind: Null = "uniform"
    if have_dilution and all(have_dilution):
        null_kind = "dilution"

    null_name = f"{name}_{null_kind}"
    if null_name not in dataset:
        return values, None, null_kind
    return values, in_segment(dataset[null_name], segment), null_kind


def values_in(variable: xr.DataArray, condition: str, segment: str | None) -> xr.DataArray:
    """A variable's values in a condition and a segment, as float64 [prompt, layer, head, …]."""
    stored_values = in_segment(variable.sel(condition=condition), segment)
    first_dims = [dim for dim in ("prompt", "layer", "head") if dim in stored_values.dims]
    values = stored_values.astype(np.float64, copy=False).transpose(*first_dims, ...)
    return values.reset_coords(drop=True)  # these name the condition and the segment


def in_segment(variable: Values, segment: str | None) -> Values:
    """The values of a variable or a dataset in a segment.

    They are returned whole if they have no segments or ``segment`` is None.

    Raises:
        OptionError: They have segments, but not this one.
    """
    if "segment" not in variable.dims or segment is None:
        return variable
    if not isinstance(segment, str) or segment not in variable.segment.values:
        segments = ", ".join(map(repr, variable.segment.values.tolist()))
        raise OptionError(f"segment={segment!r}: choose one of {segments}")
    return variable.sel(segment=segment)


def segment_of(variable: xr.DataArray, segment: str | None) -> str:
    """The segment as tables state it: "all" for None, and empty if the quantity has no segments."""
    if "segment" not in variable.dims:
        return ""
    if segment is None:
        return "all"
    return segment


def labels_where(mask: xr.DataArray, dim: str) -> set[object]:
    """The labels of a dimension for which any value of a mask is true."""
    other_dims = [name for name in mask.dims if name != dim]
    has_any = mask.any(other_dims).values
    return set(mask[dim].values[has_any].tolist())


def inserted_counts(result: Result, condition: str) -> np.ndarray:
    """The number of tokens that a condition inserts into each prompt [prompt]."""
    origin = result["sequences"].origin.sel(condition=condition)
    return (origin == INSERTED).sum("pos").values


def inserted_words(result: Result, condition: str) -> str:
    """The number of tokens that a condition inserts, in words; a range if prompts differ."""
    counts = inserted_counts(result, condition)
    fewest = counts.min()
    most = counts.max()
    if fewest != most:
        return f"{fewest} to {most} tokens inserted"
    if most == 0:
        return "no tokens inserted"
    if most == 1:
        return "1 token inserted"
    return f"{most} tokens inserted"


# Checks.


def check_condition(result: Result, condition: str) -> None:
    """Refuse a condition that the result doesn't have."""
    if condition not in result.conditions:
        conditions = ", ".join(map(repr, result.conditions))
        raise OptionError(f"there is no condition {condition!r}; the result has {conditions}")


def check_names(argument: str, names: Any, fewest: int) -> None:
    """Refuse what is not a list of different names, such as a single text, or too short a list.

    Args:
        argument: The name of the argument.
        names: Its value.
        fewest: The number of names that it needs.
    """
    is_collection = isinstance(names, Collection) and not isinstance(names, str)
    are_names = is_collection and all(isinstance(name, str) for name in names)
    if not are_names or len(set(names)) < max(len(names), fewest):
        raise OptionError(
            f"{argument}={names!r}: give a list of {fewest} or more different conditions"
        )


def check_one_number(values: xr.DataArray, quantity: str) -> None:
    """Refuse values that are not one number for each layer and head of a prompt."""
    dims = [str(dim) for dim in values.dims if dim not in ("prompt", "condition")]
    if sorted(dims) != ["head", "layer"]:
        raise OptionError(
            f"{quantity!r} does not have one number per head, but one for each {', '.join(dims)}"
        )


def check_at_most_one_number(values: xr.DataArray, quantity: str) -> None:
    """Refuse values with several numbers for each head; one for each layer or block is accepted."""
    further_dims = [str(dim) for dim in values.dims if dim not in {*_HEAD_DIMS, "block"}]
    if further_dims:
        words = ", ".join(further_dims)
        raise OptionError(f"{quantity!r} has more than one number for each head ({words})")


def check_layer(layer: object, dataset: xr.Dataset | xr.DataArray) -> None:
    """Refuse a layer that was not measured."""
    measured_layers = dataset.layer.values.tolist()
    if isinstance(layer, bool) or layer not in measured_layers:
        raise OptionError(f"layer {layer!r} was not measured; the result has {measured_layers}")


def check_present(values: xr.DataArray, quantity: str, segment: str | None, side: Side) -> None:
    """Refuse values in which some prompts lack a cell that others have.

    A cell that all prompts lack is accepted, and left out later.
    """
    # The minimum is NaN if any value is. This is fast, and nearly always there is no NaN.
    if not np.isnan(values.values.min(initial=np.inf)):
        return

    is_missing = values.isnull()
    is_missing &= ~is_missing.all("prompt")
    if is_missing.any():
        cell_dims = [dim for dim in values.dims if dim != "prompt"]
        prompt_count = int(is_missing.any(cell_dims).sum())
        raise absent_error(prompt_count, quantity, segment, side)


def check_measured(side: Side, quantity: str, segment: str | None) -> None:
    """Refuse a condition in which some prompts have no value of a quantity in any cell."""
    result, condition = side
    variable = variable_of(result, quantity)
    values = in_segment(variable.sel(condition=condition), segment)
    cell_dims = [dim for dim in values.dims if dim != "prompt"]

    prompt_count = 0
    for block in in_parts(values, "prompt", result.memory):
        has_no_value = block.isnull().all(cell_dims)
        prompt_count += int(has_no_value.sum())
    if prompt_count:
        raise absent_error(prompt_count, quantity, segment, side)


def absent_error(prompt_count: int, quantity: str, segment: str | None, side: Side) -> OptionError:
    """The error for a condition in which ``prompt_count`` prompts lack a quantity."""
    result, condition = side
    if segment == "inserted" and not inserted_counts(result, condition).any():
        return OptionError(
            f"{condition!r} inserts no tokens, so it has no {quantity!r} in the segment 'inserted';"
            " result.compare takes two conditions that insert, and"
            " result.heads(…, condition=…, segment='inserted') shows what one of them has"
        )

    variable = variable_of(result, quantity)
    segment_words = ""
    remedy = "leave these out with result.sel(prompt=…)"
    if "segment" in variable.dims:
        segment_words = " in some segment"
        if segment is not None:
            segment_words = f" in the segment {segment!r}"
        remedy = f"name a segment that all have, or {remedy}"
    return OptionError(
        f"{prompt_count} of {variable.sizes['prompt']} prompts have no {quantity!r}{segment_words}"
        f" with {condition!r}; {remedy}"
    )


# Blocks that fit in memory.


def slices(
    count: int, bytes_of_one: int, memory: str, item_words: str, bytes_of_resamples: int = 0
) -> list[slice]:
    """Split layers or prompts into blocks that fit in memory.

    Args:
        count: The number of layers or prompts.
        bytes_of_one: The memory that each needs.
        memory: The memory that may be used, such as "8GiB".
        item_words: The words for one of them in the error.
        bytes_of_resamples: The memory for resampling, which all of them need together.

    Returns:
        One ``slice(None)`` if everything fits, and otherwise slices that are as long as fits.

    Raises:
        MemoryOptionError: Not even one fits.
    """
    free_bytes = max(memory_bytes(memory) - bytes_of_resamples, 0)
    block_size = free_bytes // max(1, bytes_of_one)
    if block_size >= count:
        return [slice(None)]
    if block_size < 1:
        needed_mib = ceil((bytes_of_resamples + bytes_of_one) / 2**20)
        remedy = (
            f'give more (ma.load_result(…, memory="{needed_mib}MiB"), or --memory {needed_mib}MiB)'
        )
        if bytes_of_resamples:
            remedy += ", or fewer resamples"
        raise MemoryOptionError(
            f"{item_words} takes {needed_mib:,} MiB, and memory={memory!r} allows less; {remedy}"
        )
    starts = range(0, count, block_size)
    return [slice(start, min(start + block_size, count)) for start in starts]


def in_parts(values: xr.DataArray, dim: str, memory: str) -> Iterator[xr.DataArray]:
    """Yield the values in blocks of layers or prompts that fit in memory."""
    count = values.sizes[dim]
    bytes_of_one = 8 * _ARRAYS_AT_ONCE * values.size // max(1, count)
    for block in slices(count, bytes_of_one, memory, f"one {dim} of {values.name!r}"):
        yield values.isel({dim: block})


def layer_blocks(
    result: Result, quantity: str, segment: str | None, resamples: int = 0
) -> list[slice]:
    """Split the layers of a quantity into blocks for a comparison.

    Args:
        result: A result with the quantity.
        quantity: The quantity, such as "received".
        segment: A segment; None for all segments.
        resamples: The number of resamples; 0 if nothing is resampled.

    Raises:
        MemoryOptionError: Not even one layer fits.
    """
    variable = variable_of(result, quantity)
    sizes = variable.sizes
    prompts = sizes["prompt"]
    layers = sizes.get("layer", 1)
    conditions = sizes.get("condition", 1)
    stored_cells = variable.size // (prompts * conditions)
    cells = stored_cells
    if segment is not None:
        cells //= sizes.get("segment", 1)

    # All stored segments of both conditions are read, and one or all segments are computed with.
    bytes_read = 2 * variable.dtype.itemsize * prompts * stored_cells
    bytes_computed = 8 * _ARRAYS_AT_ONCE * prompts * cells
    bytes_of_a_layer = (bytes_read + bytes_computed) // layers

    # Of all layers, counts of both kinds of resamples, signs as bits, and values are kept.
    bytes_of_resamples = 0
    if resamples:
        bytes_of_patterns = patterns_needed(resamples, cells) // 8
        bytes_of_a_unit = 2 * resamples + bytes_of_patterns + 8 * _ARRAYS_KEPT * cells
        bytes_of_resamples = resampled_count(prompts) * bytes_of_a_unit
    variable_words = f"{quantity!r} of {prompts:,} prompts"
    return slices(
        layers,
        bytes_of_a_layer,
        result.memory,
        variable_words,
        bytes_of_resamples=bytes_of_resamples,
    )


def _quantities(result: Result, has_dims: Callable[[set[Any]], bool]) -> list[str]:
    """The names of the quantities whose dimensions satisfy ``has_dims``, without nulls."""
    null_endings = tuple(f"_{kind}" for kind in NULLS)
    names = []
    for dataset_name, dataset in result.datasets.items():
        if dataset_name == "sequences":
            continue
        for variable_name, variable in dataset.data_vars.items():
            name = str(variable_name).removesuffix("_by_segment")
            if has_dims(set(variable.dims)) and not name.endswith(null_endings):
                names.append(name)
    return list(dict.fromkeys(names))  # each once, in this order
