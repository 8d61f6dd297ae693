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

from mechattn.errors import OptionError
from mechattn.results.arrays import SOURCES, TEXT, stacked
from mechattn.results.provenance import added_hash
from mechattn.results.result import Result
from mechattn.stats.intervals import Moments

GROW = ("pos", "key", "original_key")  # dimensions as long as the longest prompt
FIRST_PROMPT_TEXT = "first_prompt_text"  # the text of the whole run's first prompt
# What pads an array, by numpy's kind of its dtype; −2 as in a batch.
PADDING_BY_KIND: Mapping[str, Any] = {"f": np.nan, "i": -2, **dict.fromkeys(TEXT, "")}
# Everything else in the provenance must agree, since it changes the numbers or their meaning.
MAY_DIFFER = (
    "model.path",
    "model.device",
    "threads",
    "versions.python",
    "command",
    "engine_reason",
    "job",
)


def merge_results(results: Sequence[Result]) -> Result:
    """Merge results of different prompts into one result of all prompts.

    Any order of merging gives the values of one pass over all prompts: each prompt's own exactly,
    moments over prompts to 1e-10 (Chan, Golub and LeVeque 1979). Prompts are ordered by their
    places in the whole run.

    Raises:
        OptionError: They don't belong together (other models, conditions, options …), or two have
            the same prompt.
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

    results = sorted(results, key=lambda result: _places_and_ids(result)[0])  # by first prompt
    provenance = reduce(_merged_entries, map(_plain_provenance, results))
    reduce(_merged_entries, map(_described, results))  # refuses datasets that differ

    places_and_ids = []
    for result in results:
        places_and_ids.extend(_places_and_ids(result))

    ids = pd.Index([prompt_id for _, prompt_id in places_and_ids])
    if ids.has_duplicates:
        repeated = ids[ids.duplicated()].unique()
        raise OptionError(
            f"prompt {repeated[0]} is in two of the results ({len(repeated)} such prompts in all); "
            "give each result different prompts, with different ids"
        )

    # Of each prompt of the whole run, its index when the results are put one after the other.
    indices = range(len(places_and_ids))
    order = np.array(sorted(indices, key=lambda index: places_and_ids[index]))
    datasets = {}
    for name in results[0]:
        datasets[name] = _merged([result[name] for result in results], order)
    return Result(datasets, provenance)


def check_same_run(result: Result, other: Result) -> None:
    """Refuse two results that are not of the same run, whatever their prompts.

    Raises:
        OptionError: They don't belong together; the message says what differs.
    """
    _merged_entries(_plain_provenance(result), _plain_provenance(other))
    _merged_entries(_described(result), _described(other))


def is_part(part: Result, whole: Result) -> bool:
    """Whether a result belongs to the same run as another one, which contains all its prompts."""
    try:
        check_same_run(part, whole)
        return set(_places_and_ids(part)) <= set(_places_and_ids(whole))
    except OptionError:
        return False


def _places_and_ids(result: Result) -> list[tuple[int, str]]:
    """The place and the id of each prompt."""
    sequences = result["sequences"]
    if "place" not in sequences:
        raise OptionError(
            "a result that doesn't say which of all prompts it holds (sequences.place) cannot be "
            "merged"
        )
    places = sequences.place.values.tolist()
    ids = [str(prompt_id) for prompt_id in sequences.prompt.values]
    return list(zip(places, ids, strict=True))


def _described(result: Result) -> dict[str, Any]:
    """What the datasets of two parts of a run have in common: variables, their meaning and, apart
    from prompts and the length of the longest, their coordinates."""
    described: dict[str, Any] = {}
    for name, dataset in result.datasets.items():
        entries: dict[str, Any] = {"attributes": dataset.attrs}
        for label, values in dataset.data_vars.items():
            # Texts and whole numbers may be of other widths.
            dtype = str(values.dtype) if values.dtype.kind == "f" else ""
            entries[str(label)] = {"dims": values.dims, "type": dtype, "attributes": values.attrs}
        for dim in dataset.dims:
            if dim != "prompt" and dim not in GROW:
                entries[str(dim)] = dataset[dim].values.tolist()
        described[f"dataset {name}"] = entries
    return described


def _unlike(path: str, ours: object, theirs: object) -> OptionError:
    """The error for results that differ in an entry."""
    return OptionError(
        f"these results don't belong together: {path} is {ours!r} in one and {theirs!r} in another"
    )


def _merged(datasets: Sequence[xr.Dataset], order: np.ndarray) -> xr.Dataset:
    """The datasets of one analysis as one, its prompts in order."""
    first = datasets[0]
    sizes = {dim: max(dataset.sizes[dim] for dataset in datasets) for dim in first.dims}
    arrays: dict[Any, Any] = {}
    for name in map(str, first):
        if f"{name}_n" in first and f"{name}_variance" in first:
            moments = _merged_moments(datasets, name)
            arrays[name] = moments.known_mean
            arrays[f"{name}_variance"] = moments.variance
            arrays[f"{name}_n"] = moments.n

    for name in map(str, first):
        variables = [dataset[name].variable for dataset in datasets]
        if "prompt" in first[name].dims:
            arrays[name] = _in_prompt_order(variables, sizes, order)
        elif name == FIRST_PROMPT_TEXT:
            missing = sizes["pos"] - variables[0].sizes["pos"]
            arrays[name] = np.pad(variables[0].values, [(0, 0), (0, missing)], constant_values="")
        elif name not in arrays:
            raise OptionError(f"{name} has no dimension prompt, so it cannot be merged")

    ids = [str(prompt_id) for dataset in datasets for prompt_id in dataset.prompt.values]
    coords: dict[Any, Any] = {"prompt": [ids[index] for index in order]}
    for dim in first.coords:
        if dim in GROW:
            coords[dim] = np.arange(sizes[dim])
        elif dim != "prompt":
            coords[dim] = first[dim].values

    merged = {}
    for label, values in first.data_vars.items():
        sources = [dataset[label].encoding.get(SOURCES, set()) for dataset in datasets]
        encoding = {SOURCES: set().union(*sources)}
        merged[label] = (values.dims, arrays[label], values.attrs, encoding)

    return xr.Dataset(merged, coords, first.attrs)


def _merged_moments(datasets: Sequence[xr.Dataset], name: str) -> Moments:
    """The moments over all prompts; those of one part at a time are in memory. Only the last axis
    differs in length."""
    moments = (
        Moments.from_statistics(
            dataset[f"{name}_n"].values, dataset[name].values, dataset[f"{name}_variance"].values
        )
        for dataset in datasets
    )
    return reduce(Moments.merge, moments)


def _in_prompt_order(
    variables: Sequence[xr.Variable], sizes: Mapping[Any, int], order: np.ndarray
) -> Any:
    """Each prompt's own values, padded to the longest; read on demand if one of the arrays is."""
    dims = variables[0].dims  # the prompts come first
    shape = (len(order), *(sizes[dim] for dim in dims[1:]))
    dtype = variables[0].dtype
    if dtype.kind not in PADDING_BY_KIND:
        raise OptionError(
            f"values of type {dtype} cannot be merged, as no number pads them: give them as"
            " integers or floats"
        )
    fill = PADDING_BY_KIND[dtype.kind]
    stack = stacked(variables, shape, order, fill)
    if all(variable._in_memory for variable in variables):
        return stack.read((slice(None),) * len(dims))
    return indexing.LazilyIndexedArray(stack)


def _plain_provenance(result: Result) -> dict[str, Any]:
    """The provenance in its stored form, where every key is a text."""
    return dict(json.loads(json.dumps(result.provenance)))


def _merged_entries(
    ours: dict[str, Any], theirs: dict[str, Any], where: str = ""
) -> dict[str, Any]:
    """The merged entries: common ones, those that may differ as lists, counts as sums."""
    merged: dict[str, Any] = {}
    for name in dict.fromkeys([*ours, *theirs]):
        path = f"{where}{name}"
        our_value = ours.get(name)
        their_value = theirs.get(name)
        if path in COMBINED:
            merged[name] = COMBINED[path](our_value, their_value)
        elif path in MAY_DIFFER:
            merged[name] = _collected(our_value, their_value)
        elif isinstance(our_value, dict) and isinstance(their_value, dict):
            merged[name] = _merged_entries(our_value, their_value, f"{path}.")
        else:
            if our_value != their_value:
                raise _unlike(path, our_value, their_value)
            merged[name] = our_value

    return merged


def _collected(ours: Any, theirs: Any) -> Any:
    """All distinct values as a list; a single value as itself."""
    distinct = _distinct(_as_list(ours), _as_list(theirs))
    if not distinct:
        return None
    if len(distinct) == 1:
        return distinct[0]  # as a result that was never merged stores it
    return distinct


def _distinct(ours: list[Any] | None, theirs: list[Any] | None) -> list[Any]:
    """All distinct values of both lists but None, in an order that does not depend on theirs."""
    values = {json.dumps(value): value for value in [*(ours or []), *(theirs or [])]}
    values.pop("null", None)
    return [values[text] for text in sorted(values)]


def _span(ours: Any, theirs: Any) -> list[str]:
    """The first and the last time."""
    times = [*_as_list(ours), *_as_list(theirs)]
    return [min(times), max(times)]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


COMBINED: Mapping[str, Callable[[Any, Any], Any]] = {
    "prompts.count": lambda ours, theirs: ours + theirs,
    "prompts.hash": added_hash,
    "prompts.alike": _distinct,
    # Each is in whole milliseconds, so the sum is the same in every order.
    "seconds": lambda ours, theirs: round((ours or 0) + (theirs or 0), 3),
    "time": _span,
    "halved": lambda ours, theirs: sorted([*(ours or []), *(theirs or [])], key=json.dumps),
    "model.verified": lambda ours, theirs: bool(ours and theirs),
    "model.not_verified": lambda ours, theirs: sorted({*(ours or []), *(theirs or [])}),
}
