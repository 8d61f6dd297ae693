"""The arrays of a result: read a block at a time on demand, if they do not fit in memory, and
hashed block by block."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import xarray as xr
from xarray.backends import BackendArray
from xarray.core import indexing

TEXT_KINDS = "TUO"  # dtype kinds of text
SOURCES = "sources"  # in the encoding of an array that is read on demand: where it is read from
HASHED_AT_ONCE = 64 * 2**20  # bytes of arrays that are not in memory


@dataclass(eq=False)
class StackedArray(BackendArray):
    """Arrays stacked along their first dimension, reordered and padded, of which blocks are read on
    demand and not kept.

    Args:
        arrays: Arrays that may differ in every length.
        shape: The shape of the stack.
        order: The row of the stacked arrays that each row is.
        fill: The value that pads, of the type of the stack.
    """

    arrays: Sequence[xr.Variable]
    shape: tuple[int, ...]
    order: np.ndarray
    fill: np.ndarray

    @property
    def dtype(self) -> np.dtype:
        """The type of the stack."""
        return self.fill.dtype

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.BASIC, self.read
        )

    def read(self, key: tuple[int | slice, ...]) -> np.ndarray:
        """The part of the stack that a key selects; of each array, the rows from its first to its
        last are read."""
        rows = np.atleast_1d(self.order[key[0]])
        integer_axes = tuple(axis for axis, index in enumerate(key) if not isinstance(index, slice))
        spans = []
        for index in key[1:]:
            if not isinstance(index, slice):
                index = slice(index, index + 1)  # its axis stays until the end
            spans.append(index)
        sizes = [
            len(range(*span.indices(size)))
            for span, size in zip(spans, self.shape[1:], strict=True)
        ]
        block = np.full((len(rows), *sizes), self.fill, self.dtype)

        start = 0
        for array in self.arrays:
            stop = start + len(array)
            in_block = np.flatnonzero((rows >= start) & (rows < stop))
            if len(in_block):
                rows_of_array = rows[in_block] - start
                first = int(rows_of_array.min())
                last = int(rows_of_array.max())
                # An array that is smaller than the stack gives fewer values, or none.
                values = array[(slice(first, last + 1), *spans)].values[rows_of_array - first]
                selection: list[Any] = [in_block]
                for size in values.shape[1:]:
                    selection.append(slice(size))
                block[tuple(selection)] = values
            start = stop

        return block.squeeze(integer_axes)


def is_in_memory(variable: xr.Variable) -> bool:
    """Whether an array is in memory; xarray has no public way to ask that does not load it."""
    return variable._in_memory


def lazy_variables(result: Any) -> Iterator[xr.Variable]:
    """A result's arrays that are not in memory."""
    for dataset in result.datasets.values():
        for variable in dataset.variables.values():
            if not is_in_memory(variable):
                yield variable


def lazy_bytes(result: Any) -> int:
    """The bytes of a result's arrays that are not in memory."""
    return sum(variable.nbytes for variable in lazy_variables(result))


def lazy_sources(result: Any) -> set[str]:
    """Where a result's arrays are read from that are not in memory."""
    sources: set[str] = set()
    for variable in lazy_variables(result):
        sources |= variable.encoding.get(SOURCES, set())
    return sources


def datasets_digest(datasets: Mapping[str, xr.Dataset]) -> str:
    """A hash of every array with its name, dimensions and attributes; equal numbers have equal
    hashes."""
    hasher = hashlib.blake2b(digest_size=16)
    for name, dataset in sorted(datasets.items()):
        for label in sorted(dataset.variables, key=str):
            variable = dataset.variables[label]
            is_text = variable.dtype.kind in TEXT_KINDS
            dtype = "text"
            if not is_text:
                dtype = variable.dtype.newbyteorder("<").str
            description = [name, str(label), variable.dims, variable.shape, dtype, variable.attrs]
            hasher.update(_json(description))
            if is_text:
                hasher.update(_json([str(text) for text in variable.values.flat]))
                continue
            for block in blocks_of(variable):
                hasher.update(canonical(block).data)
        hasher.update(_json([name, dataset.attrs]))

    return hasher.hexdigest()


def canonical(values: np.ndarray) -> np.ndarray:
    """Numbers in the form that is hashed, with a single NaN and a single 0: CPUs differ in their
    signs, and Zarr may not store that of NaN."""
    if values.dtype.kind == "f":
        with np.errstate(invalid="ignore"):  # a signalling NaN
            values = values + values.dtype.type(0)
        values = np.where(np.isnan(values), values.dtype.type(np.nan), values)
    return np.ascontiguousarray(values, values.dtype.newbyteorder("<"))


def blocks_of(variable: xr.Variable) -> Iterator[np.ndarray]:
    """The numbers of a variable; if not in memory, some rows of its first dimension at a time."""
    if is_in_memory(variable) or not variable.ndim:
        yield variable.values
        return
    bytes_of_row = variable.dtype.itemsize * prod(variable.shape[1:])
    rows = max(1, HASHED_AT_ONCE // max(1, bytes_of_row))
    for start in range(0, len(variable), rows):
        yield variable[start : start + rows].values


def with_texts_as(dtype: Any, dataset: xr.Dataset) -> xr.Dataset:
    """The dataset with its texts in another type, and without their indexes, which xarray does not
    convert."""
    texts = {}
    for label, variable in dataset.variables.items():
        if variable.dtype.kind in TEXT_KINDS:
            texts[label] = variable.astype(dtype)
    return dataset.drop_indexes(texts.keys() & dataset.indexes.keys()).assign(texts)


def names_of_means(dataset: xr.Dataset) -> list[str]:
    """The means over prompts, which are stored with their variances and counts."""
    names = map(str, dataset)
    return [name for name in names if f"{name}_n" in dataset and f"{name}_variance" in dataset]


def _json(value: Any) -> bytes:
    """As JSON, with the numbers of numpy, and its arrays, as plain ones."""
    return json.dumps(value, sort_keys=True, default=lambda numbers: numbers.tolist()).encode()
