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

_BLOCK = 64 * 2**20  # bytes that are hashed at a time of what is not in memory
TEXT = "TUO"  # kinds of arrays that hold texts


def layout(datasets: Mapping[str, xr.Dataset]) -> str:
    """A hash of names, dimensions, shapes, kinds and attributes; nothing is read for it."""
    made = hashlib.blake2b(digest_size=16)
    for header, _ in _variables(datasets):
        made.update(header)
    return made.hexdigest()


def digest(datasets: Mapping[str, xr.Dataset], provenance: str = "") -> str:
    """A hash of every array, its name, dimensions and attributes, and of the provenance's text."""
    return _hashed(datasets, provenance, canonical)


def is_digest(stored: object, datasets: Mapping[str, xr.Dataset], provenance: str) -> bool:
    """Whether this is the digest of these; version 0.1 took it of NaNs with their signs, where they were kept."""
    return any(stored == _hashed(datasets, provenance, numbers) for numbers in (canonical, _little_endian))


def canonical(values: np.ndarray) -> np.ndarray:
    """Numbers as they are hashed, with one NaN for all: CPUs differ in its sign, and Zarr does not always store it."""
    if values.dtype.kind == "f" and (missing := np.isnan(values)).any():  # a signalling one too
        values = np.where(missing, values.dtype.type(np.nan), values)
    return _little_endian(values)


def _little_endian(values: np.ndarray) -> np.ndarray:
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
    """A hash of every array, its name, dimensions and attributes: equal for equal numbers, wherever they come from.

    The same for 0 and −0, and for every NaN, whose sign and payload are the CPU's.
    """
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
    """The numbers of a variable, some rows of its first dimension at a time where they are not in memory."""
    if variable._in_memory or not variable.ndim:
        yield variable.values
        return
    rows = max(1, _BLOCK // max(1, variable.dtype.itemsize * prod(variable.shape[1:])))
    for start in range(0, len(variable), rows):
        yield variable[start : start + rows].values


def plain_attributes(attributes: Mapping[Any, Any]) -> dict[str, Any]:
    """Attributes as numbers, texts and lists of them: NetCDF gives back numbers of numpy."""
    return {
        str(name): value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
        for name, value in attributes.items()
    }
