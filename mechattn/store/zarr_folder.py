"""Checks what a Zarr folder declares before Zarr reads it: our own format and codecs, and the unpacked size.

Without a ``zarr.json`` Zarr assumes its older format 2, which has a codec that runs code.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from mechattn.errors import OutputError
from mechattn.store.files import Files
from mechattn.store.regions import Region
from mechattn.store.unpacked_size import BYTES, TEXT, Size

FORMAT = 3
_METADATA = "zarr.json"
_LONGEST = 64 * 2**20  # bytes of a zarr.json
_FEW = 10_000  # chunks
_SMALL = 4096  # bytes of a chunk: Zarr's own start at 128 KiB
_LARGEST = 2**30  # bytes of a piece of a region
_KEYS = {"name": "default", "configuration": {"separator": "/"}}
_ENDIAN: dict[bool, dict[str, Any]] = {True: {"configuration": {"endian": "little"}}, False: {}}
_CHUNK = re.compile(r"(.*/)?c(/\d+)*", re.DOTALL)  # and its array
_ARRAYS = 5000  # every analysis together has some hundred
_HEADER = 18  # bytes of the longest header of a zstd frame
_MAGIC = b"\x28\xb5\x2f\xfd"


def check_folder(files: Files, size: Size) -> dict[str, Region]:
    """Check every array of a folder without unpacking any; return those in regions, which are read lazily."""
    if _METADATA not in files.sizes:
        raise OutputError(f"there is no stored result at {size.where}")
    regions: dict[str, Region] = {}
    paths = sorted(path for path in files.sizes if path.rpartition("/")[2] == _METADATA)
    if len(paths) > _ARRAYS:
        raise OutputError(f"the result at {size.where} has {len(paths):,} arrays; mechattn writes at most {_ARRAYS:,}")
    chunks: dict[str, list[str]] = {}
    for name in files.sizes:
        if found := _CHUNK.fullmatch(name):
            chunks.setdefault(found[1] or "", []).append(name)
    for path in paths:
        folder = path.removesuffix(_METADATA)
        try:
            about = _metadata(files, path)
            if about["node_type"] == "array" and about["codecs"][0]["name"] == "sharding_indexed":
                regions[folder.rstrip("/")] = _region(about)
            elif about["node_type"] == "array":
                _check_array(files, folder, about, chunks.get(folder, []), size)
            elif about["node_type"] != "group":
                raise ValueError(f"node_type is {about['node_type']!r}")
        except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise OutputError(
                f"{path} in the result at {size.where} is not in the format that mechattn writes: {reason}"
            ) from None
    size.check()
    return regions


def frame_size(header: bytes) -> int | None:
    """The number of bytes that a zstd frame unpacks to, from its first 18; None if not stated or not a frame.

    Source:
        RFC 8878, section 3.1.1.1.
    """
    if len(header) < 6 or header[:4] != _MAGIC:
        return None
    flags = header[4]
    single = bool(flags & 0b00100000)
    width = (int(single), 2, 4, 8)[flags >> 6]
    start = 5 + (not single) + (0, 1, 2, 4)[flags & 0b11]
    if not width or len(header) < start + width:
        return None
    return int.from_bytes(header[start : start + width], "little") + (256 if width == 2 else 0)


def _metadata(files: Files, path: str) -> dict[str, Any]:
    if files.sizes[path] > _LONGEST:
        raise ValueError(f"it has {files.sizes[path]:,} bytes")
    about = json.loads(files.read(path))
    if not isinstance(about, dict) or about["zarr_format"] != FORMAT:
        raise ValueError(f"it does not have Zarr's format {FORMAT}")
    return about


def _check_array(files: Files, folder: str, about: dict[str, Any], names: list[str], size: Size) -> None:
    """Check one array: what it declares, and the sizes that its chunks say they unpack to."""
    shape, chunk = _sizes(about["shape"]), _sizes(about["chunk_grid"]["configuration"]["chunk_shape"])
    _check_codecs(about)
    if about["chunk_grid"]["name"] != "regular" or len(shape) != len(chunk) or 0 in chunk:
        raise ValueError(f"its chunks have the shape {chunk}, but it has the shape {shape}")
    kind = about["data_type"]
    each = TEXT if kind == "string" else BYTES[kind]
    declared, in_chunk = each * math.prod(shape), each * math.prod(chunk)
    chunks = math.prod(-(-length // part) for length, part in zip(shape, chunk, strict=True))
    if chunks > _FEW + declared // _SMALL:
        raise ValueError(f"it declares {chunks:,} chunks")
    unpacked = 0
    for name, header in zip(names, files.heads(names, _HEADER), strict=True):
        made = frame_size(header)
        if made is None or (kind != "string" and made != in_chunk):
            raise ValueError(f"{name} does not have the size that it declares")
        unpacked += made + (in_chunk if kind == "string" else 0)
    size.variables[folder.rstrip("/")] = max(declared, unpacked)


def _region(about: dict[str, Any]) -> Region:
    """Check an array in regions: it must be divided as mechattn does, with its codecs, none of which compress."""
    grid, (codec,) = about["chunk_grid"], about["codecs"]
    shape, shard = _sizes(about["shape"]), _sizes(grid["configuration"]["chunk_shape"])
    made = Region(tuple(about["dimension_names"]), tuple(shape), about["data_type"], shard[0], about["attributes"])
    plain = [{"name": "bytes", **_ENDIAN[BYTES[made.dtype] > 1]}, {"name": "crc32c"}]
    index = [{"name": "bytes", **_ENDIAN[True]}, {"name": "crc32c"}]
    wanted = {"chunk_shape": list(made.piece), "codecs": plain, "index_codecs": index, "index_location": "end"}
    if codec["configuration"] != wanted or grid["name"] != "regular" or about["chunk_key_encoding"] != _KEYS:
        raise ValueError("it is divided differently")
    if tuple(shard) != made.shard or made.dims[0] != "prompt" or 0 in shard or about.get("storage_transformers"):
        raise ValueError(f"its objects have the shape {shard}, but it has the shape {shape}")
    if prod_bytes(made) > _LARGEST:
        raise ValueError(f"each of its pieces has {prod_bytes(made):,} bytes")
    return made


def prod_bytes(region: Region) -> int:
    """The number of bytes that are read at a time."""
    return BYTES[region.dtype] * math.prod(region.piece)


def _check_codecs(about: dict[str, Any]) -> None:
    """Allow only what mechattn writes: numbers as bytes, texts with their lengths, both packed by zstd."""
    names = [codec["name"] for codec in about["codecs"]]
    if names != ["vlen-utf8" if about["data_type"] == "string" else "bytes", "zstd"]:
        raise ValueError(f"it is stored with the codecs {names}")
    if about["chunk_key_encoding"] != _KEYS:
        raise ValueError(f"its chunk names follow {about['chunk_key_encoding']}")
    if about.get("storage_transformers"):
        raise ValueError("it has storage transformers")
    if about["data_type"] == "string" and about["fill_value"] != "":
        raise ValueError("its texts have a fill value")


def _sizes(values: Any) -> list[int]:
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise ValueError(f"{values!r} is not a shape")
    return values
