"""The arrays of a result. Those that do not fit in memory are read on demand and hashed, one block
at a time."""

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

TEXT_KINDS = "TUO"  # numpy's kinds of the dtypes that texts have
# The key, in the encoding of an array that is read on demand, of the locations it is read from.
SOURCES = "sources"
# Bytes that are hashed at a time, of an array that is not in memory: large enough to read quickly,
# and small beside the memory of any machine.
HASHED_AT_ONCE = 64 * 2**20


@dataclass(eq=False)
class StackedArray(BackendArray):
    """Arrays stacked along their first dimension, then reordered and padded. Blocks are read on
    demand and not kept.

    Args:
        arrays: The arrays, which may differ in every length.
        shape: The shape of the stack.
        order: For each row of the stack, its index if the arrays are put one after the other.
        fill: The value that pads arrays shorter than the stack; its dtype is that of the stack.
    """

    arrays: Sequence[xr.Variable]
    shape: tuple[int, ...]
    order: np.ndarray
    fill: np.ndarray

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the stack."""
        return self.fill.dtype

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.BASIC, self.read
        )

    def read(self, key: tuple[int | slice, ...]) -> np.ndarray:
        """Read the part of the stack that a key selects. From each array, all rows between the
        first and the last that are needed are read."""
        row_indices = np.atleast_1d(self.order[key[0]])
        integer_axes = tuple(axis for axis, index in enumerate(key) if not isinstance(index, slice))
        spans = []
        for index in key[1:]:
            if isinstance(index, slice):
                spans.append(index)
            else:
                spans.append(slice(index, index + 1))  # its axis is removed at the end
        sizes = [
            len(range(*span.indices(size)))
            for span, size in zip(spans, self.shape[1:], strict=True)
        ]
        block = np.full((len(row_indices), *sizes), self.fill, self.dtype)

        start = 0
        for array in self.arrays:
            stop = start + len(array)
            block_indices = np.flatnonzero((row_indices >= start) & (row_indices < stop))
            if len(block_indices):
                array_indices = row_indices[block_indices] - start
                first = int(array_indices.min())
                last = int(array_indices.max())
                # An array that is smaller than the stack has fewer values here, or none.
                values = array[(slice(first, last + 1), *spans)].values[array_indices - first]
                selection: list[Any] = [block_indices]
                for size in values.shape[1:]:
                    selection.append(slice(size))
                block[tuple(selection)] = values
            start = stop

        return block.squeeze(integer_axes)


def is_in_memory(variable: xr.Variable) -> bool:
    """Whether an array is in memory. xarray has no public property for this: ``variable.data``
    returns the array itself, and reads it from disk if it has to."""
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
    """The locations of a result's arrays that are not in memory."""
    sources: set[str] = set()
    for variable in lazy_variables(result):
        sources |= variable.encoding.get(SOURCES, set())
    return sources


def datasets_digest(datasets: Mapping[str, xr.Dataset]) -> str:
    """A hash of all datasets: their attributes, and the values, name, dimensions, shape, dtype and
    attributes of every array."""
    hasher = hashlib.blake2b(digest_size=16)
    for name, dataset in sorted(datasets.items()):
        for label in sorted(dataset.variables, key=str):
            variable = dataset.variables[label]
            is_text = variable.dtype.kind in TEXT_KINDS
            dtype = "text"
            if not is_text:
                dtype = variable.dtype.newbyteorder("<").str
            array_facts = [name, str(label), variable.dims, variable.shape, dtype, variable.attrs]
            hasher.update(_json(array_facts))
            if is_text:
                hasher.update(_json([str(text) for text in variable.values.flat]))
                continue
            for block in row_blocks(variable):
                hasher.update(canonical(block).data)
        hasher.update(_json([name, dataset.attrs]))

    return hasher.hexdigest()


def canonical(values: np.ndarray) -> np.ndarray:
    """Numbers in the form that is hashed: little-endian, with a single NaN and a single 0, since
    CPUs differ in the signs of both and Zarr may not store that of NaN."""
    if values.dtype.kind == "f":
        with np.errstate(invalid="ignore"):  # a signalling NaN warns
            values = values + values.dtype.type(0)  # −0 becomes 0
        values = np.where(np.isnan(values), values.dtype.type(np.nan), values)
    return np.ascontiguousarray(values, values.dtype.newbyteorder("<"))


def row_blocks(variable: xr.Variable) -> Iterator[np.ndarray]:
    """The numbers of a variable; if it is not in memory, some rows of it at a time."""
    if is_in_memory(variable) or not variable.ndim:
        yield variable.values
        return
    bytes_of_row = variable.dtype.itemsize * prod(variable.shape[1:])
    row_count = max(1, HASHED_AT_ONCE // max(1, bytes_of_row))
    for start in range(0, len(variable), row_count):
        yield variable[start : start + row_count].values


def with_texts_as(dtype: Any, dataset: xr.Dataset) -> xr.Dataset:
    """The dataset with its texts in another dtype. Indexes of texts are dropped, because xarray
    does not convert them."""
    texts = {}
    for label, variable in dataset.variables.items():
        if variable.dtype.kind in TEXT_KINDS:
            texts[label] = variable.astype(dtype)
    return dataset.drop_indexes(texts.keys() & dataset.indexes.keys()).assign(texts)


def names_of_means(dataset: xr.Dataset) -> list[str]:
    """The names of the means over prompts, which are stored with their variances and counts."""
    names = map(str, dataset)
    return [name for name in names if f"{name}_n" in dataset and f"{name}_variance" in dataset]


def _json(value: Any) -> bytes:
    """A value as JSON; numpy's numbers and arrays become plain numbers and lists."""
    return json.dumps(value, sort_keys=True, default=lambda numbers: numbers.tolist()).encode()
