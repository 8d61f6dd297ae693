"""The arrays of a result: read a block at a time on demand, if they do not fit in memory, and hashed block by block."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from xarray.backends import BackendArray
from xarray.core import indexing

TEXT = "TUO"  # dtype kinds of text
SOURCES = (
    "sources"  # in the encoding of an array that is read on demand: the places that it is read from
)
_BLOCK = 64 * 2**20  # bytes hashed at a time, of arrays that are not in memory
Key = tuple[int | slice, ...]


class LazyArray(BackendArray):
    """An array of a known shape whose blocks are read by a function, pickled with it, and not kept."""

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype, read: Callable[[Key], np.ndarray]
    ) -> None:
        self.shape, self.dtype, self.read = shape, np.dtype(dtype), read

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.BASIC, self.read
        )


def lazy_variable(array: LazyArray, dims: Seq[Any], attrs: Mapping[Any, Any]) -> xr.Variable:
    """Return an xarray variable that reads its values each time they are needed."""
    return xr.Variable(tuple(dims), indexing.LazilyIndexedArray(array), dict(attrs))


def is_lazy(result: Any) -> bool:
    """Whether a result has arrays that are not in memory."""
    return lazy_bytes(result) > 0


def lazy_bytes(result: Any) -> int:
    """The bytes of the arrays that are not in memory."""
    return sum(variable.nbytes for variable in _lazy(result))


def lazy_sources(result: Any) -> set[str | Path]:
    """The places that the arrays that are not in memory are read from."""
    return {place for variable in _lazy(result) for place in variable.encoding.get(SOURCES, ())}


def _lazy(result: Any) -> Iterator[xr.Variable]:
    every = (variable for one in result.datasets.values() for variable in one.variables.values())
    return (variable for variable in every if not variable._in_memory)


def stacked(
    arrays: Seq[xr.Variable], shape: tuple[int, ...], order: np.ndarray, fill: Any
) -> LazyArray:
    """Stack arrays along their first dimension, reorder the rows, and pad each array to a shape."""
    dtype = np.result_type(*(array.dtype for array in arrays))
    return LazyArray(
        shape, dtype, partial(_read_stacked, arrays, shape, order, np.array(fill, dtype))
    )


def _read_stacked(
    arrays: Seq[xr.Variable], shape: tuple[int, ...], order: np.ndarray, fill: np.ndarray, key: Key
) -> np.ndarray:
    rows, end = np.atleast_1d(order[key[0]]), 0
    spans = [
        slice(part, part + 1) if isinstance(part, (int, np.integer)) else part for part in key[1:]
    ]
    sizes = [len(range(*span.indices(size))) for span, size in zip(spans, shape[1:])]
    made = np.full((len(rows), *sizes), fill, fill.dtype)
    for array in arrays:
        start, end = end, end + len(array)
        at = np.flatnonzero((rows >= start) & (rows < end))
        begins = [span.indices(2**62)[0] for span in spans]
        if not len(at) or any(begin >= size for begin, size in zip(begins, array.shape[1:])):
            continue  # it ends before this block begins
        some = rows[at] - start
        values = array[(slice(int(some.min()), int(some.max()) + 1), *spans)].values[
            some - some.min()
        ]
        target: Any = (at, *(slice(0, size) for size in values.shape[1:]))
        made[target] = values
    return made.squeeze(
        tuple(axis for axis, part in enumerate(key) if isinstance(part, (int, np.integer)))
    )


def digest(datasets: Mapping[str, xr.Dataset]) -> str:
    """A hash of every array, its name, dimensions and attributes."""
    return _hashed(datasets, canonical)


def numbers_digest(datasets: Mapping[str, xr.Dataset]) -> str:
    """A hash of every array with its name, dimensions and attributes; equal numbers have equal hashes."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return _hashed(datasets, lambda values: canonical(values + values.dtype.type(0)))


def canonical(values: np.ndarray) -> np.ndarray:
    """Numbers in the form that is hashed, with a single NaN: CPUs differ in its sign, and Zarr may not store it."""
    if values.dtype.kind == "f" and (missing := np.isnan(values)).any():  # signalling NaNs too
        values = np.where(missing, values.dtype.type(np.nan), values)
    values = np.ascontiguousarray(values)
    return values.astype(values.dtype.newbyteorder("<"), copy=False)


def blocks_of(variable: xr.Variable) -> Iterator[np.ndarray]:
    """The numbers of a variable; if not in memory, some rows of its first dimension at a time."""
    if variable._in_memory or not variable.ndim:
        yield variable.values
        return
    rows = max(1, _BLOCK // max(1, variable.dtype.itemsize * prod(variable.shape[1:])))
    for start in range(0, len(variable), rows):
        yield variable[start : start + rows].values


def plain_attributes(attributes: Mapping[Any, Any]) -> dict[str, Any]:
    """Attributes as plain numbers, texts and lists."""
    return {
        str(name): value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
        for name, value in attributes.items()
    }


def _hashed(datasets: Mapping[str, xr.Dataset], numbers: Callable[[np.ndarray], np.ndarray]) -> str:
    made = hashlib.blake2b(digest_size=16)
    for name in sorted(datasets):
        for label, variable in sorted(
            datasets[name].variables.items(), key=lambda item: str(item[0])
        ):
            text = variable.dtype.kind in TEXT
            kind = "text" if text else variable.dtype.newbyteorder("<").str
            parts = [
                name,
                str(label),
                variable.dims,
                variable.shape,
                kind,
                plain_attributes(variable.attrs),
            ]
            made.update(json.dumps(parts, sort_keys=True).encode())
            if text:
                made.update(json.dumps([str(one) for one in variable.values.flat]).encode())
            else:
                for block in blocks_of(variable):
                    made.update(numbers(block).data)
        made.update(
            json.dumps([name, plain_attributes(datasets[name].attrs)], sort_keys=True).encode()
        )
        made.update(numbers(np.zeros(1, np.int8)).data)
    return made.hexdigest()
