"""Checks what a Zarr folder declares before Zarr reads it: our own format and codecs, and every object in its size.

Without a ``zarr.json`` Zarr assumes its older format 2, which has a codec that runs code. Nothing is compressed, and
each object is there, so a result takes no more memory than it takes on the disk; texts take up to 16 times as much.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from mechattn.errors import OutputError
from mechattn.results.merge import GROW
from mechattn.store.files import Files
from mechattn.store.listed import damaged
from mechattn.store.objects import ROOT
from mechattn.store.pieces import CHECKSUM, WIDTH, Region

FORMAT = 3
_LONGEST = 64 * 2**20  # bytes of a zarr.json
_ARRAYS = 5000  # every analysis together has some hundred
_KEYS = {"name": "default", "configuration": {"separator": "/"}}
_NUMBERS = (
    "bool", "int8", "uint8", "int16", "uint16", "float16", "int32", "uint32", "float32", "int64", "uint64", "float64",
    "complex64", "complex128",
)  # fmt: skip
_LENGTH = 4  # bytes of the number of texts, and of the length of each


def root_of(files: Files, where: object) -> dict[str, Any]:
    """The attributes at the root."""
    found = _checked(files, ROOT, where, lambda about: _attributes(about))
    assert isinstance(found, dict)
    return found


def check_folder(files: Files, objects: Mapping[str, str], where: object) -> dict[str, Region]:
    """Check every listed array without reading any; return how they are cut."""
    regions: dict[str, Region] = {}
    found: dict[str, list[str]] = defaultdict(list)
    metadata = [name for name in objects if name.rpartition("/")[2] == ROOT]
    if len(metadata) > _ARRAYS:
        raise OutputError(f"the result at {where} has {len(metadata):,} arrays; mechattn writes at most {_ARRAYS:,}")
    for name in objects:
        if not name.endswith(f"/{ROOT}"):
            found[_array_of(name)].append(name)
    for name in metadata:
        if name not in files.sizes:
            raise OutputError(damaged(where, name, {}, "it is missing"))
        region = _checked(files, name, where, _region)
        if region is not None:
            regions[name.removesuffix(f"/{ROOT}")] = region
    for array in [*regions, *found]:
        _check_objects(files, array, found[array], regions, where)
    return regions


def _array_of(name: str) -> str:
    array, _, _ = name.rpartition("/c/")
    return array or name.removesuffix("/c")


def _check_objects(files: Files, array: str, names: list[str], regions: Mapping[str, Region], where: object) -> None:
    """Refuse an array that lacks an object, has another one, or one of another size."""
    region = regions.get(array)
    few = region is None or prod(-(-size // part) for size, part in zip(region.shape, region.piece)) > len(names)
    wanted = set() if region is None or few else {f"{array}/{at}" for at in region.names()}
    if region is not None and few:
        raise OutputError(f"the result at {where} is damaged: it has {len(names)} objects of {array}, which needs more")
    if strangers := [name for name in names if name not in wanted]:
        raise OutputError(f"the result at {where} is damaged: {strangers[0]} belongs to none of its arrays")
    assert region is not None
    texts, count = region.dtype == "text", prod(region.piece)
    size = CHECKSUM + (_LENGTH * (1 + count) if texts else count * np.dtype(region.dtype).itemsize)
    for name in names:
        have = files.sizes.get(name)
        if have is None or have < size or (have > size and not texts):
            why = "it is missing" if have is None else f"{have:,} of {size:,} bytes"
            raise OutputError(damaged(where, name, regions, why))
    if texts and any(int.from_bytes(head, "little") != count for head in files.heads(names, _LENGTH)):
        raise OutputError(f"the result at {where} is damaged: {array} has another number of texts than it declares")


def _checked(files: Files, name: str, where: object, check: Any) -> Any:
    try:
        if files.sizes[name] > _LONGEST:
            raise ValueError(f"it has {files.sizes[name]:,} bytes")
        about = json.loads(files.read(name))
        if not isinstance(about, dict) or about["zarr_format"] != FORMAT:
            raise ValueError(f"it does not have Zarr's format {FORMAT}")
        return check(about)
    except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise OutputError(
            f"{name} in the result at {where} is not in the format that mechattn writes: {reason}"
        ) from None


def _attributes(about: Mapping[str, Any]) -> dict[str, Any]:
    if about["node_type"] != "group" or not isinstance(about["attributes"], dict):
        raise ValueError("it is no group")
    found: dict[str, Any] = about["attributes"]
    return found


def _region(about: Mapping[str, Any]) -> Region | None:
    """How an array is cut, which must be as mechattn does, with its codecs, none of which compress; None of a group."""
    if about["node_type"] == "group":
        _attributes(about)
        return None
    if about["node_type"] != "array" or about.get("storage_transformers"):
        raise ValueError(f"node_type is {about['node_type']!r}, or it has storage transformers")
    grid, kind = about["chunk_grid"], about["data_type"]
    shape, piece = _sizes(about["shape"]), _sizes(grid["configuration"]["chunk_shape"])
    if kind != "string" and kind not in _NUMBERS:
        raise ValueError(f"it has the type {kind!r}")
    codecs = [codec["name"] for codec in about["codecs"]]
    if codecs != ["vlen-utf8" if kind == "string" else "bytes", "crc32c"]:
        raise ValueError(f"it is stored with the codecs {codecs}")
    if kind != "string" and about["codecs"][0].get("configuration", {}).get("endian", "little") != "little":
        raise ValueError("its numbers are stored in another order")
    if grid["name"] != "regular" or about["chunk_key_encoding"] != _KEYS:
        raise ValueError("it is divided differently")
    dims = tuple(map(str, about["dimension_names"] or ()))
    widths = [part for dim, part in zip(dims, piece) if dim in GROW]
    width, dtype = min([*widths, WIDTH]) or 1, "text" if kind == "string" else str(kind)
    made = Region(dims, tuple(shape), dtype, max([1, *piece[:1]]), about["attributes"], width)
    if len(dims) != len(shape) or made.piece != tuple(piece):
        raise ValueError(f"its objects have the shape {piece}, but it has the shape {shape}")
    return made


def _sizes(values: Any) -> list[int]:
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise ValueError(f"{values!r} is not a shape")
    return values
