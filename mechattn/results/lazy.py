"""Arrays that are read a block at a time, when they are asked for: of stored results that no memory holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import xarray as xr
from xarray.backends.common import BackendArray
from xarray.core import indexing

Key = tuple[int | slice, ...]


class LazyArray(BackendArray):
    """An array of a known shape whose blocks a function reads; nothing of it is kept.

    Args:
        shape: Its shape.
        dtype: Its kind of numbers.
        read: Gives a block, from a number or a slice for each dimension.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, read: Callable[[Key], np.ndarray]) -> None:
        self.shape, self.dtype, self.read = shape, np.dtype(dtype), read

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.BASIC, self.read)


def lazy_variable(array: LazyArray, dims: Seq[Any], attrs: Mapping[Any, Any]) -> xr.Variable:
    """A variable of xarray that reads its numbers each time that it is asked for them."""
    return xr.Variable(tuple(dims), indexing.LazilyIndexedArray(array), dict(attrs))


def is_lazy(result: Any) -> bool:
    """Whether a result has arrays that are not in memory."""
    return any(not variable._in_memory for one in result.datasets.values() for variable in one.variables.values())


def stacked(arrays: Seq[xr.Variable], shape: tuple[int, ...], order: np.ndarray, fill: Any) -> LazyArray:
    """Arrays one after the other along their first dimension, in another order, each padded to a shape.

    Args:
        arrays: What is stacked.
        shape: Of the whole.
        order: Where each row of the whole stands among all rows, one array after the other.
        fill: What the others are padded with.
    """
    ends = np.cumsum([len(array) for array in arrays])
    dtype = np.result_type(*(array.dtype for array in arrays))

    def read(key: Key) -> np.ndarray:
        rows = np.atleast_1d(order[key[0]])
        made = np.full((len(rows), *(_length(part, size) for part, size in zip(key[1:], shape[1:]))), fill, dtype)
        for array, end in zip(arrays, ends, strict=True):
            at = np.flatnonzero((rows >= end - len(array)) & (rows < end))
            if len(at):
                _put(made, at, array, rows[at] - (end - len(array)), key[1:])
        dropped = tuple(axis for axis, part in enumerate(key) if isinstance(part, (int, np.integer)))
        return made.squeeze(dropped)

    return LazyArray(shape, dtype, read)


def _put(made: np.ndarray, at: np.ndarray, array: xr.Variable, rows: np.ndarray, key: Key) -> None:
    """Rows of one array into the rows of the whole."""
    spans = [slice(part, part + 1) if isinstance(part, (int, np.integer)) else part for part in key]
    if any(start >= size for (start, *_), size in zip((s.indices(2**62) for s in spans), array.shape[1:])):
        return  # it is shorter than where this block begins
    values = array[(slice(int(rows.min()), int(rows.max()) + 1), *spans)].values[rows - rows.min()]
    target: Any = (at, *(slice(0, size) for size in values.shape[1:]))
    made[target] = values


def _length(part: int | slice, size: int) -> int:
    return len(range(*part.indices(size))) if isinstance(part, slice) else 1
