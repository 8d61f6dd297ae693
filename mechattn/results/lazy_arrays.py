"""Arrays read a block at a time on demand, for stored results that do not fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from xarray.backends import BackendArray
from xarray.core import indexing

Key = tuple[int | slice, ...]


class LazyArray(BackendArray):
    """An array of a known shape whose blocks are read by a function and not kept.

    Args:
        shape: Its shape.
        dtype: The type of its numbers.
        read: A function that returns a block, given a number or slice for each dimension; pickled with the array.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, read: Callable[[Key], np.ndarray]) -> None:
        self.shape, self.dtype, self.read = shape, np.dtype(dtype), read

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.BASIC, self.read)


def lazy_variable(array: LazyArray, dims: Seq[Any], attrs: Mapping[Any, Any]) -> xr.Variable:
    """Return an xarray variable that reads its values each time they are needed."""
    return xr.Variable(tuple(dims), indexing.LazilyIndexedArray(array), dict(attrs))


def is_lazy(result: Any) -> bool:
    """Whether a result has arrays that are not in memory."""
    return lazy_bytes(result) > 0


def lazy_bytes(result: Any) -> int:
    """The bytes of the arrays that are not in memory."""
    every = (variable for one in result.datasets.values() for variable in one.variables.values())
    return sum(variable.nbytes for variable in every if not variable._in_memory)


def stacked(arrays: Seq[xr.Variable], shape: tuple[int, ...], order: np.ndarray, fill: Any) -> LazyArray:
    """Stack arrays along their first dimension, reorder the rows, and pad each array to a shape."""
    dtype = np.result_type(*(array.dtype for array in arrays))
    return LazyArray(shape, dtype, partial(_read_stacked, arrays, shape, order, np.array(fill, dtype)))


def _read_stacked(
    arrays: Seq[xr.Variable], shape: tuple[int, ...], order: np.ndarray, fill: np.ndarray, key: Key
) -> np.ndarray:
    """Read a block of arrays that are stacked."""
    rows, end = np.atleast_1d(order[key[0]]), 0
    sizes = (_length(part, size) for part, size in zip(key[1:], shape[1:]))
    made = np.full((len(rows), *sizes), fill, fill.dtype)
    for array in arrays:
        start, end = end, end + len(array)
        at = np.flatnonzero((rows >= start) & (rows < end))
        if len(at):
            _put(made, at, array, rows[at] - start, key[1:])
    return made.squeeze(tuple(axis for axis, part in enumerate(key) if isinstance(part, (int, np.integer))))


def _put(made: np.ndarray, at: np.ndarray, array: xr.Variable, rows: np.ndarray, key: Key) -> None:
    """Copy rows of one array into the rows of the whole."""
    spans = [slice(part, part + 1) if isinstance(part, (int, np.integer)) else part for part in key]
    if any(start >= size for (start, *_), size in zip((s.indices(2**62) for s in spans), array.shape[1:])):
        return  # it ends before this block begins
    values = array[(slice(int(rows.min()), int(rows.max()) + 1), *spans)].values[rows - rows.min()]
    target: Any = (at, *(slice(0, size) for size in values.shape[1:]))
    made[target] = values


def _length(part: int | slice, size: int) -> int:
    return len(range(*part.indices(size))) if isinstance(part, slice) else 1
