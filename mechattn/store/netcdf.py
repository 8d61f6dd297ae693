"""Checks what a NetCDF file declares before reading it: no references to other files, nothing compressed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mechattn.errors import OutputError
from mechattn.shown import plain
from mechattn.store.unpacked_size import BYTES, TEXT, TIMES, Size

_TEXTS = TIMES  # most texts in an attribute: each may be as long as the file
_DESCRIPTOR = np.dtype(
    [("length", "<u4"), ("address", "<u8"), ("index", "<u4")]
)  # bytes of a text's reference in an HDF5 file


def check_file(path: Path, size: Size) -> None:
    """Check every variable of a file, without reading any."""
    import h5py

    with h5py.File(path, "r") as stored:
        try:
            _check_group(stored, size, path, 0)
        except (KeyError, TypeError, ValueError) as error:
            raise OutputError(
                f"the result at {size.where} is not in the format that mechattn writes: {error}"
            ) from None
    size.check()


def _check_group(group: Any, size: Size, path: Path, depth: int) -> None:
    """Check a group and its subgroups; ours are in the root."""
    import h5py

    _check_attributes(group)
    for name in group:
        if plain(name) != name:
            raise ValueError(f"{name} is not a valid name")
        link, kind = group.get(name, getlink=True), group.get(name, getclass=True)
        if not isinstance(link, h5py.HardLink):
            raise ValueError(f"{name} is a link to another place")
        if kind is h5py.Group and depth == 0:
            _check_group(group[name], size, path, depth + 1)
        elif kind is h5py.Dataset:
            _check_variable(group[name], size, path)
        else:
            raise ValueError(f"{name} is not a variable")


def _check_variable(variable: Any, size: Size, path: Path) -> None:
    """Check that a variable is stored plainly in the file; for texts, add up the lengths."""
    import h5py

    _check_attributes(variable)
    if variable.external is not None or variable.is_virtual or variable.chunks is not None:
        raise ValueError(f"{variable.name} is in another file, or is compressed")
    text = h5py.check_string_dtype(variable.dtype) is not None
    if not text and variable.dtype.newbyteorder("=").name not in BYTES:
        raise ValueError(f"{variable.name} contains neither numbers nor texts")
    each = _DESCRIPTOR.itemsize if text else variable.dtype.itemsize
    at, held = variable.id.get_offset(), variable.id.get_storage_size()
    if at is not None and (held != each * variable.size or at + held > size.stored):
        raise ValueError(f"{variable.name} is larger than what is stored")
    if at is None and text and variable.size:
        raise ValueError(f"{variable.name} has a text as its fill value")
    in_memory = TEXT * variable.size + _letters(path, at, variable.size) if text else each * variable.size
    size.variables[variable.name] = in_memory


def _letters(path: Path, at: int | None, count: int) -> int:
    """The number of bytes of some texts, several of which may share one text in the file."""
    if at is None:
        return 0
    return int(np.fromfile(path, _DESCRIPTOR, count, offset=at)["length"].sum(dtype=np.uint64))


def _check_attributes(of: Any) -> None:
    """Check attributes, which are read with the file; several of their texts can share one long text."""
    import h5py

    for name in of.attrs:
        about = of.attrs.get_id(name)
        many = int(np.prod(about.shape or ())) > _TEXTS
        if many and (h5py.check_string_dtype(about.dtype) or h5py.check_vlen_dtype(about.dtype)):
            raise ValueError(f"{of.name} has {np.prod(about.shape):,} texts as its {name}")
