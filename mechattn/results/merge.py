"""Merges results of parts of the prompts into one result, independent of the order of merging."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import reduce
from typing import Any

import numpy as np
import xarray as xr
from xarray.core import indexing

from mechattn.errors import OptionError
from mechattn.results.arrays import SOURCES, stacked
from mechattn.results.provenance import added_hash
from mechattn.results.result import Result
from mechattn.stats.intervals import Moments

GROW = ("pos", "key", "original_key")  # dimensions as long as the longest prompt
_FIRST = "first_prompt_text"
_FILL: Mapping[str, Any] = {"f": np.nan, "i": -2, "T": "", "O": "", "U": ""}
# Everything else in the provenance must agree, since it changes the numbers or their meaning.
_NAMED_BY_PART = (
    "model.path",
    "model.device",
    "threads",
    "versions.python",
    "command",
    "engine_reason",
    "job",
)


def merge_results(results: Seq[Result]) -> Result:
    """Merge results of different prompts into one result of all prompts.

    Any order of merging gives the values of one pass over all prompts: each prompt's own exactly, moments over prompts
    to 1e-10 (Chan, Golub and LeVeque 1979). Prompts are ordered by their places in the whole run.

    Raises:
        OptionError: They don't belong together (other models, conditions, options …), or two have the same prompt.
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
    results = sorted(results, key=lambda result: _keys(result)[0])
    keys = [key for result in results for key in _keys(result)]
    provenance = reduce(_merged_provenance, (_plain(result) for result in results))
    for other in results[1:]:
        _check_datasets(results[0], other)
    if twice := [
        prompt for prompt, count in Counter(prompt for _, prompt in keys).items() if count > 1
    ]:
        raise OptionError(
            f"prompt {twice[0]} is in two of the results ({len(twice)} such prompts in all); give each result "
            "different prompts, with different ids"
        )
    order = np.array(
        sorted(range(len(keys)), key=keys.__getitem__)
    )  # of each prompt of the whole, its index here
    datasets = {
        name: _merged([result[name] for result in results], order) for name in results[0].datasets
    }
    return Result(datasets, provenance)


def is_part(part: Result, whole: Result) -> bool:
    """Whether a result belongs to the same run as another one, which contains all its prompts."""
    try:
        reduce(_merged_provenance, (_plain(part), _plain(whole)))
        _check_datasets(part, whole)
        return set(_keys(part)) <= set(_keys(whole))
    except OptionError:
        return False


def _keys(result: Result) -> list[tuple[int, str]]:
    """The place and the id of each prompt."""
    sequences = result["sequences"]
    if "place" not in sequences:
        raise OptionError(
            "a result that doesn't say which of all prompts it holds (sequences.place) cannot be merged"
        )
    return list(
        zip(sequences.place.values.tolist(), map(str, sequences.prompt.values), strict=True)
    )


def _check_datasets(one: Result, other: Result) -> None:
    """Check that variables, their meaning and, apart from prompts, their coordinates are the same."""
    _agree("the analyses", sorted(one.datasets), sorted(other.datasets))
    for name, ours in one.datasets.items():
        theirs = other[name]
        _agree(f"the variables of {name}", sorted(map(str, ours)), sorted(map(str, theirs)))
        _agree(f"the attributes of {name}", ours.attrs, theirs.attrs)
        for variable in ours:
            where = f"{name}.{variable}"
            _agree(f"the dimensions of {where}", ours[variable].dims, theirs[variable].dims)
            _agree(f"the attributes of {where}", ours[variable].attrs, theirs[variable].attrs)
            if (
                "prompt" in ours[variable].dims and ours[variable].dtype.kind == "f"
            ):  # values="float16" of one alone
                _agree(
                    f"the type of {where}", str(ours[variable].dtype), str(theirs[variable].dtype)
                )
        for dim in ours.dims:
            if dim != "prompt" and dim not in GROW:
                labels = [
                    one[dim].values.tolist() if dim in one.coords else one.sizes[dim]
                    for one in (ours, theirs)
                ]
                _agree(f"{dim} of {name}", *labels)


def _agree(what: str, one: Any, other: Any) -> None:
    if one != other:
        raise OptionError(
            f"these results don't belong together: {what} is {one!r} in one and {other!r} in another"
        )


def _merged(parts: Seq[xr.Dataset], order: np.ndarray) -> xr.Dataset:
    first = parts[0]
    sizes = {dim: max(part.sizes[dim] for part in parts) for dim in first.dims}
    made: dict[Any, Any] = {}
    for name in (
        str(name) for name in first if f"{name}_n" in first and f"{name}_variance" in first
    ):
        of = (name, f"{name}_variance", f"{name}_n")  # only the last axis differs in length
        each = (
            Moments.from_statistics(*(part[one].values for one in (of[2], of[0], of[1])))
            for part in parts
        )
        merged = reduce(Moments.merge, each)
        made |= dict(zip(of, (merged.known_mean, merged.variance, merged.n), strict=True))
    for name in (str(name) for name in first if name not in made):
        arrays = [part[name] for part in parts]
        many = "prompt" in first[name].dims
        made[name] = _stacked(arrays, sizes, order) if many else _of_first(arrays, sizes, name)
    ids = [str(prompt) for part in parts for prompt in part.prompt.values]
    coords = {dim: first[dim].values for dim in first.coords if dim not in (*GROW, "prompt")}
    coords |= {dim: np.arange(sizes[dim]) for dim in GROW if dim in first.coords}
    sources = {
        name: {place for part in parts for place in part[name].encoding.get(SOURCES, ())}
        for name in first
    }
    variables = {
        name: (first[name].dims, made[name], first[name].attrs, {SOURCES: sources[name]})
        for name in first
    }
    return xr.Dataset(variables, {"prompt": [ids[at] for at in order], **coords}, first.attrs)


def _stacked(arrays: Seq[xr.DataArray], sizes: Mapping[Any, int], order: np.ndarray) -> Any:
    """Each prompt's own values, padded to the longest, in the order of the whole; lazy if one of the arrays is."""
    variables = [array.variable for array in arrays]
    if not all(variable._in_memory for variable in variables) and variables[0].dims[0] == "prompt":
        shape = (len(order), *(sizes[dim] for dim in variables[0].dims[1:]))
        return indexing.LazilyIndexedArray(
            stacked(variables, shape, order, _FILL[variables[0].dtype.kind])
        )
    axis = arrays[0].get_axis_num("prompt")
    wide = [
        _padded(array.values, [sizes[dim] if dim != "prompt" else None for dim in array.dims])
        for array in arrays
    ]
    return np.take(np.concatenate(wide, axis=axis), order, axis=axis)


def _padded(values: np.ndarray, wanted: Seq[int | None]) -> np.ndarray:
    missing = [
        (0, 0 if size is None else size - have)
        for size, have in zip(wanted, values.shape, strict=True)
    ]
    if not any(after for _, after in missing):
        return values
    if values.dtype.kind in "TOU":
        values = values.astype(np.dtypes.StringDType())
    return np.pad(values, missing, constant_values=_FILL[values.dtype.kind])


def _of_first(arrays: Seq[xr.DataArray], sizes: Mapping[Any, int], name: str) -> np.ndarray:
    """The texts of the first prompt's tokens; any other variable without a prompt dimension must be equal."""
    made = [_padded(array.values, [sizes[dim] for dim in array.dims]) for array in arrays]
    if name != _FIRST and not all(
        np.array_equal(made[0], other, equal_nan=True) for other in made[1:]
    ):
        raise OptionError(
            f"{name} has no dimension prompt, and differs between the results, so its value for all prompts is unknown"
        )
    return made[0]


def _plain(result: Result) -> dict[str, Any]:
    """The provenance in its stored form, where every key is a text."""
    return dict(json.loads(json.dumps(result.provenance)))


def _merged_provenance(
    one: dict[str, Any], other: dict[str, Any], where: str = ""
) -> dict[str, Any]:
    """The merged provenance: common entries, entries that may differ as lists, counts as sums."""
    made: dict[str, Any] = {}
    for name in [*one, *(name for name in other if name not in one)]:
        path = f"{where}{name}"
        ours, theirs = one.get(name), other.get(name)
        if path in _ADDED:
            made[name] = _ADDED[path](ours, theirs)
        elif path in _NAMED_BY_PART:
            made[name] = _collected(ours, theirs)
        elif isinstance(ours, dict) and isinstance(theirs, dict):
            made[name] = _merged_provenance(ours, theirs, f"{path}.")
        else:
            _agree(path, ours, theirs)
            made[name] = ours
    return made


def _collected(one: Any, other: Any) -> Any:
    """All distinct values as a list; a single value as itself."""
    values = [
        value for some in (one, other) for value in (some if isinstance(some, list) else [some])
    ]
    unique = {json.dumps(value): value for value in values if value is not None}
    found = [unique[key] for key in sorted(unique)]
    return found[0] if len(found) == 1 else found


def _span(one: Any, other: Any) -> list[str]:
    times = [time for some in (one, other) for time in (some if isinstance(some, list) else [some])]
    return [min(times), max(times)]


def _widest(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> dict[str, Any]:
    """Combine the regions of two chunks of a run: each dimension as long as the longer one."""
    one, other = one or {}, other or {}
    if set(one) != set(other):
        raise ValueError(f"one has {sorted(one)}, the other {sorted(other)}")
    made = {}
    for name, ours in one.items():
        theirs = other[name]
        grows = [dim in (*GROW, "prompt") for dim in ours["dims"]]
        sizes = [
            max(a, b) if grow else a for grow, a, b in zip(grows, ours["shape"], theirs["shape"])
        ]
        alike = all(grow or a == b for grow, a, b in zip(grows, ours["shape"], theirs["shape"]))
        if not alike or {**ours, "shape": 0} != {**theirs, "shape": 0}:
            raise ValueError(f"{name} is {ours} in one and {theirs} in the other")
        made[name] = {**ours, "shape": sizes}
    return made


_ADDED: Mapping[str, Callable[[Any, Any], Any]] = {
    "prompts.count": lambda one, other: one + other,
    "prompts.hash": added_hash,
    "prompts.alike": lambda one, other: {
        **(one or {}),
        **(other or {}),
    },  # the same in parts of a run
    "objects": lambda one, other: {
        **(one or {}),
        **(other or {}),
    },  # describes chunks in a store, as do regions
    "regions": _widest,
    "seconds": lambda one, other: round((one or 0) + (other or 0), 3),
    "time": _span,
    "halved": lambda one, other: sorted([*(one or []), *(other or [])], key=json.dumps),
    "model.verified": lambda one, other: bool(one and other),
    "model.not_verified": lambda one, other: sorted({*(one or []), *(other or [])}),
}
