"""Merges results of parts of the prompts into one result, independent of the order of merging."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
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
    results = sorted(results, key=lambda result: _places_and_ids(result)[0])
    places_and_ids = [pair for result in results for pair in _places_and_ids(result)]
    provenance = reduce(_merged_provenance, map(_plain_provenance, results))
    for result in results[1:]:
        _check_datasets(results[0], result)
    id_counts = Counter(prompt_id for _, prompt_id in places_and_ids)
    repeated = [prompt_id for prompt_id, count in id_counts.items() if count > 1]
    if repeated:
        raise OptionError(
            f"prompt {repeated[0]} is in two of the results ({len(repeated)} such prompts in all); "
            "give each result different prompts, with different ids"
        )
    # Of each prompt of the whole run, its index when the results are put one after the other.
    order = np.array(sorted(range(len(places_and_ids)), key=places_and_ids.__getitem__))
    datasets = {
        name: _merged([result[name] for result in results], order) for name in results[0].datasets
    }
    return Result(datasets, provenance)


def check_same_run(result: Result, other: Result) -> None:
    """Refuse two results that are not of the same run, whatever their prompts.

    Raises:
        OptionError: They don't belong together; the message says what differs.
    """
    _merged_provenance(_plain_provenance(result), _plain_provenance(other))
    _check_datasets(result, other)


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


def _check_datasets(result: Result, other: Result) -> None:
    """Check that variables, their meaning and, apart from prompts, their coordinates are the
    same."""
    _agree("the analyses", sorted(result.datasets), sorted(other.datasets))
    for name, ours in result.datasets.items():
        theirs = other[name]
        _agree(f"the variables of {name}", sorted(map(str, ours)), sorted(map(str, theirs)))
        _agree(f"the attributes of {name}", ours.attrs, theirs.attrs)
        for variable in ours:
            where = f"{name}.{variable}"
            _agree(f"the dimensions of {where}", ours[variable].dims, theirs[variable].dims)
            _agree(f"the attributes of {where}", ours[variable].attrs, theirs[variable].attrs)
            if "prompt" in ours[variable].dims and ours[variable].dtype.kind == "f":
                dtypes = [str(dataset[variable].dtype) for dataset in (ours, theirs)]
                _agree(f"the type of {where}", *dtypes)
        for dim in ours.dims:
            if dim != "prompt" and dim not in GROW:
                _agree(f"{dim} of {name}", _labels(ours, dim), _labels(theirs, dim))


def _labels(dataset: xr.Dataset, dim: Any) -> Any:
    """The labels of a dimension, or its length if it has none."""
    return dataset[dim].values.tolist() if dim in dataset.coords else dataset.sizes[dim]


def _agree(what: str, ours: Any, theirs: Any) -> None:
    if ours != theirs:
        raise OptionError(
            f"these results don't belong together: {what} is {ours!r} in one and {theirs!r} in "
            "another"
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
        if name not in arrays:
            variables = [dataset[name].variable for dataset in datasets]
            if "prompt" in first[name].dims:
                arrays[name] = _in_prompt_order(variables, sizes, order)
            elif name == FIRST_PROMPT_TEXT:
                arrays[name] = _padded(variables[0], sizes)
            else:
                arrays[name] = _equal_in_all(name, variables, sizes)
    ids = [str(prompt_id) for dataset in datasets for prompt_id in dataset.prompt.values]
    coords: dict[Any, Any] = {"prompt": [ids[index] for index in order]}
    for dim in first.coords:
        if dim in GROW:
            coords[dim] = np.arange(sizes[dim])
        elif dim != "prompt":
            coords[dim] = first[dim].values
    merged = {}
    for name, array in arrays.items():
        sources = [dataset[name].encoding.get(SOURCES, set()) for dataset in datasets]
        encoding = {SOURCES: set().union(*sources)}
        merged[name] = (first[name].dims, array, first[name].attrs, encoding)
    return xr.Dataset({name: merged[name] for name in first}, coords, first.attrs)


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
    dims = variables[0].dims
    is_in_memory = all(variable._in_memory for variable in variables)
    if not is_in_memory and dims[0] == "prompt":
        shape = (len(order), *(sizes[dim] for dim in dims[1:]))
        fill = PADDING_BY_KIND[variables[0].dtype.kind]
        return indexing.LazilyIndexedArray(stacked(variables, shape, order, fill))
    other_sizes = {dim: size for dim, size in sizes.items() if dim != "prompt"}
    padded = [_padded(variable, other_sizes) for variable in variables]
    axis = dims.index("prompt")
    return np.take(np.concatenate(padded, axis=axis), order, axis=axis)


def _equal_in_all(
    name: str, variables: Sequence[xr.Variable], sizes: Mapping[Any, int]
) -> np.ndarray:
    """An array without prompts, which must be the same in all results."""
    first = _padded(variables[0], sizes)
    for variable in variables[1:]:
        if not np.array_equal(first, _padded(variable, sizes), equal_nan=True):
            raise OptionError(
                f"{name} has no dimension prompt, and differs between the results, so its value"
                " for all prompts is unknown"
            )
    return first


def _padded(variable: xr.Variable, sizes: Mapping[Any, int]) -> np.ndarray:
    """The values of an array, as long as the longest."""
    values = variable.values
    missing = [(0, sizes.get(dim, size) - size) for dim, size in variable.sizes.items()]
    if not any(after for _, after in missing):
        return values
    if values.dtype.kind in TEXT:
        values = values.astype(np.dtypes.StringDType())
    return np.pad(values, missing, constant_values=PADDING_BY_KIND[values.dtype.kind])


def _plain_provenance(result: Result) -> dict[str, Any]:
    """The provenance in its stored form, where every key is a text."""
    return dict(json.loads(json.dumps(result.provenance)))


def _merged_provenance(
    ours: dict[str, Any], theirs: dict[str, Any], where: str = ""
) -> dict[str, Any]:
    """The merged provenance: common entries, entries that may differ as lists, counts as sums."""
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
            merged[name] = _merged_provenance(our_value, their_value, f"{path}.")
        else:
            _agree(path, our_value, their_value)
            merged[name] = our_value
    return merged


def _collected(ours: Any, theirs: Any) -> Any:
    """All distinct values as a list; a single value as itself."""
    values = {json.dumps(value): value for value in [*_as_list(ours), *_as_list(theirs)]}
    values.pop("null", None)
    distinct = [values[text] for text in sorted(values)]
    return distinct[0] if len(distinct) == 1 else distinct


def _span(ours: Any, theirs: Any) -> list[str]:
    """The first and the last time."""
    times = [*_as_list(ours), *_as_list(theirs)]
    return [min(times), max(times)]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


COMBINED: Mapping[str, Callable[[Any, Any], Any]] = {
    "prompts.count": lambda ours, theirs: ours + theirs,
    "prompts.hash": added_hash,
    "prompts.alike": lambda ours, theirs: {**(ours or {}), **(theirs or {})},
    "seconds": lambda ours, theirs: round((ours or 0) + (theirs or 0), 3),
    "time": _span,
    "halved": lambda ours, theirs: sorted([*(ours or []), *(theirs or [])], key=json.dumps),
    "model.verified": lambda ours, theirs: bool(ours and theirs),
    "model.not_verified": lambda ours, theirs: sorted({*(ours or []), *(theirs or [])}),
}
