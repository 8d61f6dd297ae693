"""Merges results of parts of the prompts into one result, independent of the order of merging."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from xarray.core import indexing

from mechattn.axes import PADDING
from mechattn.errors import OptionError
from mechattn.results.arrays import (
    SOURCES,
    TEXT_KINDS,
    StackedArray,
    is_in_memory,
    names_of_means,
)
from mechattn.results.provenance import added_hash
from mechattn.results.result import Result, plain_provenance
from mechattn.stats.intervals import Moments

POSITION_DIMS = ("pos", "key", "original_key")  # as long as the longest prompt
FIRST_PROMPT_TEXT = "first_prompt_text"  # the text of the whole run's first prompt
# What pads an array, by numpy's kind of its dtype.
PADDING_BY_KIND: Mapping[str, Any] = {"f": np.nan, "i": PADDING, **dict.fromkeys(TEXT_KINDS, "")}
# Entries of the provenance that may differ, besides those of COMBINED. All others change the
# numbers or their meaning.
MAY_DIFFER = (
    "model.path",
    "model.device",
    "threads",
    "versions.python",
    "command",
    "engine_reason",
    "job",
    "job_decides",
)


def merge_results(results: Sequence[Result]) -> Result:
    """Merge results of different prompts into one result of all prompts.

    Results may be merged in any order. The values are those of one pass over all prompts: values of
    single prompts exactly, moments over prompts to 1e-10 (Chan, Golub and LeVeque 1979). Prompts
    are ordered by their places in the whole run.

    Raises:
        OptionError: The results don't belong together (other models, conditions, options …), or two
            of them have the same prompt.
    """
    if not results:
        raise OptionError("there are no results to merge; give at least one")
    for result in results:
        if not isinstance(result, Result):
            raise OptionError(
                f"{result!r} is not a result; load it first: ma.load_result({str(result)!r})"
            )

    if len(results) == 1:
        return results[0]

    results = sorted(results, key=_places_and_ids)  # so that their order does not matter
    provenance = plain_provenance(results[0])
    layout = _layout(results[0])
    places_and_ids = _places_and_ids(results[0])
    for result in results[1:]:
        provenance = _merged_entries(provenance, plain_provenance(result))
        _merged_entries(layout, _layout(result))  # raises an error if datasets differ
        places_and_ids += _places_and_ids(result)

    ids = pd.Index([prompt_id for _, prompt_id in places_and_ids])
    if ids.has_duplicates:
        repeated_ids = ids[ids.duplicated()].unique()
        raise OptionError(
            f"prompt {repeated_ids[0]} is in two of the results ({len(repeated_ids)} such prompts"
            " in all); give each result other prompts, with other ids"
        )

    # For each prompt of the whole run, its index if the results are put one after the other.
    order = np.array(sorted(range(len(ids)), key=places_and_ids.__getitem__))
    datasets = {}
    for name in results[0]:
        datasets[name] = _merged([result[name] for result in results], order)
    return Result(datasets, provenance)


def check_same_run(result: Result, other: Result) -> None:
    """Check that two results belong to the same run; their prompts may differ.

    Raises:
        OptionError: They don't; the message says what differs.
    """
    _merged_entries(plain_provenance(result), plain_provenance(other))
    _merged_entries(_layout(result), _layout(other))


def is_part(part: Result, whole: Result) -> bool:
    """Whether a result belongs to the same run as the whole, which contains all of its prompts."""
    try:
        check_same_run(part, whole)
        return set(_places_and_ids(part)) <= set(_places_and_ids(whole))
    except OptionError:
        return False


def _places_and_ids(result: Result) -> list[tuple[int, str]]:
    """The place and the id of each prompt.

    Raises:
        OptionError: The result has no places.
    """
    sequences = result["sequences"]
    if "place" not in sequences:
        raise OptionError(
            "a result cannot be merged without sequences.place, the places of its prompts in the "
            "whole run"
        )
    places = sequences.place.values.tolist()
    ids = [str(prompt_id) for prompt_id in sequences.prompt.values]
    return list(zip(places, ids, strict=True))


def _layout(result: Result) -> dict[str, Any]:
    """What the datasets of all parts of a run have in common: their variables and attributes, and
    their coordinates except prompts and positions."""
    layout: dict[str, Any] = {}
    for name, dataset in result.datasets.items():
        entries: dict[str, Any] = {"attributes": dataset.attrs}
        for label, values in dataset.data_vars.items():
            entry: dict[str, Any] = {"dims": values.dims, "attributes": values.attrs}
            if values.dtype.kind == "f":  # the widths of texts and whole numbers may differ
                entry["type"] = str(values.dtype)
            entries[str(label)] = entry
        for dim in dataset.dims:
            if dim != "prompt" and dim not in POSITION_DIMS:
                entries[str(dim)] = dataset[dim].values.tolist()
        layout[f"dataset {name}"] = entries
    return layout


def _merged(datasets: Sequence[xr.Dataset], order: np.ndarray) -> xr.Dataset:
    """Merge the datasets of one analysis; ``order`` is that of :class:`StackedArray`."""
    first_dataset = datasets[0]
    sizes = {}
    for dim in first_dataset.dims:
        sizes[dim] = max(dataset.sizes[dim] for dataset in datasets)

    moments: dict[str, np.ndarray] = {}
    for name in names_of_means(first_dataset):
        moments |= _merged_moments(datasets, name)

    merged_arrays = {}
    for label, first_array in first_dataset.data_vars.items():
        name = str(label)
        variables = [dataset[name].variable for dataset in datasets]
        if "prompt" in first_array.dims:
            values = _in_prompt_order(variables, sizes, order)
        elif name == FIRST_PROMPT_TEXT:
            padding_length = sizes["pos"] - first_array.sizes["pos"]
            values = np.pad(first_array.values, [(0, 0), (0, padding_length)], constant_values="")
        elif name in moments:
            values = moments[name]
        else:
            raise OptionError(f"{name} has no dimension prompt, so it cannot be merged")
        sources = [variable.encoding.get(SOURCES, set()) for variable in variables]
        encoding = {SOURCES: set().union(*sources)}
        merged_arrays[name] = (first_array.dims, values, first_array.attrs, encoding)

    ids: list[str] = []
    for dataset in datasets:
        ids += map(str, dataset.prompt.values)
    coords: dict[Any, Any] = {"prompt": [ids[index] for index in order]}
    for dim in first_dataset.coords:
        if dim in POSITION_DIMS:
            coords[dim] = np.arange(sizes[dim])
        elif dim != "prompt":
            coords[dim] = first_dataset[dim].values

    return xr.Dataset(merged_arrays, coords, first_dataset.attrs)


def _merged_moments(datasets: Sequence[xr.Dataset], name: str) -> dict[str, np.ndarray]:
    """A mean over all prompts, its variance and its count, by the names of their arrays.

    The statistics of one dataset at a time are read. Those whose last axis is shorter are padded.
    """
    n_name = f"{name}_n"
    variance_name = f"{name}_variance"

    def moments_of(dataset: xr.Dataset) -> Moments:
        n = dataset[n_name].values
        variance = dataset[variance_name].values
        return Moments.from_statistics(n, dataset[name].values, variance)

    moments = reduce(Moments.merge, map(moments_of, datasets))
    return {name: moments.known_mean, variance_name: moments.variance, n_name: moments.n}


def _in_prompt_order(
    variables: Sequence[xr.Variable], sizes: Mapping[Any, int], order: np.ndarray
) -> Any:
    """The values of all prompts in order, padded to the longest. They are read on demand if any of
    the variables is."""
    dims = variables[0].dims  # the prompts come first
    shape = (len(order), *(sizes[dim] for dim in dims[1:]))
    dtype = variables[0].dtype
    if dtype.kind not in PADDING_BY_KIND:
        raise OptionError(
            f"values of type {dtype} cannot be merged, as no number pads them: give them as"
            " integers or floats"
        )
    stack_dtype = np.result_type(*(variable.dtype for variable in variables))
    fill = np.array(PADDING_BY_KIND[dtype.kind], stack_dtype)
    stack = StackedArray(variables, shape, order, fill)
    if all(is_in_memory(variable) for variable in variables):
        return stack.read((slice(None),) * len(dims))
    return indexing.LazilyIndexedArray(stack)


def _merged_entries(
    ours: dict[str, Any], theirs: dict[str, Any], where: str = ""
) -> dict[str, Any]:
    """Merge the entries of two tables; ``where`` is their path, such as "model.".

    Equal entries stay. Those of MAY_DIFFER become a list of the distinct values, and those of
    COMBINED are combined, counts for example by their sum.

    Raises:
        OptionError: Any other entry differs.
    """
    merged_entries: dict[str, Any] = {}
    for name in dict.fromkeys([*ours, *theirs]):
        path = f"{where}{name}"
        our_value = ours.get(name)
        their_value = theirs.get(name)
        if path in COMBINED:
            merged_entries[name] = COMBINED[path](our_value, their_value)
        elif path in MAY_DIFFER:
            merged_entries[name] = _collected(our_value, their_value)
        elif isinstance(our_value, dict) and isinstance(their_value, dict):
            merged_entries[name] = _merged_entries(our_value, their_value, f"{path}.")
        else:
            if our_value != their_value:
                raise OptionError(
                    f"these results don't belong together: {path} is {our_value!r} in one and"
                    f" {their_value!r} in another"
                )
            merged_entries[name] = our_value

    return merged_entries


def _collected(ours: Any, theirs: Any) -> Any:
    """All distinct values but None as a list. A single one stays as it is in a result that was
    never merged, and without any the entry is None."""
    distinct_values = _distinct(ours, theirs)
    if not distinct_values:
        return None
    if len(distinct_values) == 1:
        return distinct_values[0]
    return distinct_values


def _distinct(ours: Any, theirs: Any) -> list[Any]:
    """All distinct values of both entries, in an order that does not depend on which is ours."""
    values_by_json = {json.dumps(value): value for value in _all_values(ours, theirs)}
    return [values_by_json[text] for text in sorted(values_by_json)]


def _span(ours: Any, theirs: Any) -> list[str]:
    """The first and the last of all times."""
    times = _all_values(ours, theirs)
    return [min(times), max(times)]


def _all_values(ours: Any, theirs: Any) -> list[Any]:
    """The values of two entries. An entry is a list, a single value, or None without any value."""
    values = []
    for entry in (ours, theirs):
        if isinstance(entry, list):
            values += entry
        elif entry is not None:
            values.append(entry)
    return values


COMBINED: Mapping[str, Callable[[Any, Any], Any]] = {
    "prompts.count": lambda ours, theirs: ours + theirs,
    "prompts.hash": added_hash,
    "prompts.alike": _distinct,
    # Rounded to milliseconds, so that the sum does not depend on the order.
    "seconds": lambda ours, theirs: round((ours or 0) + (theirs or 0), 3),
    "time": _span,
    "halved": lambda ours, theirs: sorted(_all_values(ours, theirs), key=json.dumps),
    "model.verified": lambda ours, theirs: bool(ours and theirs),
    "model.not_verified": _distinct,
}
