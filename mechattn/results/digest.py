"""Hashes of datasets: of all that is stored, of the numbers alone, and of their layout."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import xarray as xr

_BLOCK = 64 * 2**20  # bytes hashed at a time, of arrays that are not in memory
TEXT = "TUO"  # dtype kinds of text


def layout(datasets: Mapping[str, xr.Dataset]) -> str:
    """A hash of names, dimensions, shapes, dtypes and attributes; reads no values."""
    made = hashlib.blake2b(digest_size=16)
    for header, _ in _variables(datasets):
        made.update(header)
    return made.hexdigest()


def digest(datasets: Mapping[str, xr.Dataset], provenance: str = "") -> str:
    """A hash of every array, its name, dimensions and attributes, and of the provenance's text."""
    return _hashed(datasets, provenance, canonical)


def canonical(values: np.ndarray) -> np.ndarray:
    """Numbers in the form that is hashed, with a single NaN: CPUs differ in its sign, and Zarr may not store it."""
    if values.dtype.kind == "f" and (missing := np.isnan(values)).any():  # signalling NaNs too
        values = np.where(missing, values.dtype.type(np.nan), values)
    values = np.ascontiguousarray(values)
    return values.astype(values.dtype.newbyteorder("<"), copy=False)


def _hashed(datasets: Mapping[str, xr.Dataset], provenance: str, numbers: Callable[[np.ndarray], np.ndarray]) -> str:
    made = hashlib.blake2b(provenance.encode("utf-8", "backslashreplace"), digest_size=16)
    for header, variable in _variables(datasets):
        made.update(header)
        if variable.dtype.kind in TEXT:
            made.update(json.dumps([str(text) for text in variable.values.flat]).encode())
        else:
            for block in blocks_of(variable):
                made.update(numbers(block).data)
    return made.hexdigest()


def numbers_digest(datasets: Mapping[str, xr.Dataset]) -> str:
    """A hash of every array with its name, dimensions and attributes; equal numbers have equal hashes."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return _hashed(datasets, "", lambda values: canonical(values + values.dtype.type(0)))


def _variables(datasets: Mapping[str, xr.Dataset]) -> Iterator[tuple[bytes, xr.Variable]]:
    for name in sorted(datasets):
        for label, variable in sorted(datasets[name].variables.items(), key=lambda item: str(item[0])):
            kind = "text" if variable.dtype.kind in TEXT else variable.dtype.newbyteorder("<").str
            parts = [name, str(label), variable.dims, variable.shape, kind, plain_attributes(variable.attrs)]
            yield json.dumps(parts, sort_keys=True).encode(), variable
        yield json.dumps([name, plain_attributes(datasets[name].attrs)], sort_keys=True).encode(), _nothing()


def _nothing() -> xr.Variable:
    import xarray as xr

    return xr.Variable((), np.int8(0))


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
