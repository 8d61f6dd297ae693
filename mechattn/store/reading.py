"""Reads results, which may be someone else's: what is declared is checked first, and only numbers
and texts are read.

Nothing is compressed and every object is there, so a result takes no more memory than its files
(texts up to 16 times as much), and needs none of Zarr's codecs but the two that copy bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from mechattn.errors import OutputError, memory_bytes, plain
from mechattn.results.arrays import SOURCES, lazy_bytes, lazy_variables, plain_attributes
from mechattn.results.consistency import problem_of
from mechattn.results.result import MEMORY, Result
from mechattn.store.atomic_writes import recover
from mechattn.store.objects import (
    ROOT,
    SCHEMA,
    DamagedResult,
    Listing,
    Place,
    damage,
    digest_of,
    errors_of_files,
    place_of,
)

PARTS_OF_MEMORY = 8  # a result that takes at most one of them is read at once
SMALL_ARRAY = 2**16  # bytes of an array that is read when a result is opened
TEXT_TYPE = "string"
TEXT_LENGTH = 4  # bytes of the number of texts, and of the length of each
NUMBERS = (
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
)
CODECS = {TEXT_TYPE: "vlen-utf8", **dict.fromkeys(NUMBERS, "bytes")}


def load_result(path: str | Path, *, memory: str = MEMORY) -> Result:
    """Load a result written by ``Result.save``; no code in it is run.

    A result that takes at most an eighth of ``memory`` is read at once. Of a larger one, values of
    single prompts are read on demand, one block at a time. Each object is compared with its
    checksum when it is read.

    Args:
        path: A local path or an address.
        memory: What each table or figure of it may take; of a larger one, some layers or prompts
            are read at a time.

    Raises:
        OutputError: There is no stored result here, one of an unknown schema, or a damaged one.
    """
    part_of_memory = memory_bytes(memory) // PARTS_OF_MEMORY
    result = open_result(path)
    is_small = lazy_bytes(result) <= part_of_memory
    with _reading(path):
        for variable in lazy_variables(result):
            if is_small or "prompt" not in variable.dims:
                variable.load()

    return replace(result, memory=memory)


def open_checked_result(path: str | Path) -> Result:
    """Open a result as :func:`open_result` does, after every object has been read once and compared
    with its checksum."""
    with _reading(path):
        listing, provenance = open_listing(place_of(path))
        listing.check()
        return _result_of(listing, provenance)


def open_result(path: str | Path) -> Result:
    """Open a result, of which all but small arrays are read on demand."""
    with _reading(path):
        listing, provenance = open_listing(place_of(path))
        return _result_of(listing, provenance)


def _reading(path: str | Path) -> AbstractContextManager[None]:
    return errors_of_files(
        f"the result at {path} cannot be read", "run it again, or restore a copy"
    )


def _result_of(listing: Listing, provenance: dict[str, Any]) -> Result:
    """The result that Zarr reads from a listing.

    Raises:
        DamagedResult: Something is missing without which a result cannot be used.
    """
    tree = xr.open_datatree(
        listing,  # type: ignore[arg-type]
        engine="zarr",
        zarr_format=3,
        consolidated=False,
        chunks=None,
        cache=False,
        mask_and_scale=False,
        decode_times=False,  # "seconds" is a unit here, not a time
        decode_timedelta=False,
    )

    # Groups were written in the order of the run, each group's arrays at the same time.
    group_names = dict.fromkeys(name.partition("/")[0] for name in listing.checksums)
    datasets = {name: _dataset(tree[name].to_dataset(), listing.place) for name in group_names}
    problem = problem_of(datasets, provenance)
    if problem is not None:
        raise DamagedResult(f"the result at {listing.place} is damaged: {problem}")
    return Result(datasets, provenance)


def open_listing(place: Place) -> tuple[Listing, dict[str, Any]]:
    """The objects of a result, all of which are there in their sizes, and its provenance.

    A folder is put back first, if a process was killed while it replaced it.

    Raises:
        OutputError: There is no stored result here, or it is of an unknown schema, incomplete,
            damaged, or not ours alone.
    """
    if place.folder:
        recover(place.folder)
        _check_has_root(place.folder)

    sizes = place.sizes()
    if ROOT not in sizes:
        raise OutputError(f"there is no stored result at {place}")

    attributes = place.attributes()
    schema = attributes.get("mechattn_schema")
    if schema != SCHEMA:
        raise OutputError(
            f"the result at {place} has schema {schema}; this version of mechattn reads schema "
            f"{SCHEMA}"
        )

    if "writing" in attributes:  # at an address, where the root is written last
        raise OutputError(f"the result at {place} is incomplete; write it again")

    provenance = attributes["provenance"]
    checksums = attributes["objects"]
    if digest_of(provenance, checksums) != attributes["digest"]:
        raise damage(place, ROOT, "its provenance or its listing was changed")

    strangers = set(sizes) - {ROOT, *checksums}
    if strangers:
        raise OutputError(
            f"the result at {place} holds {min(strangers)} too, which mechattn did not write; "
            "move that out of it"
        )

    listing = Listing(place, checksums, read_only=True)
    _check_objects(listing, sizes)
    return listing, json.loads(provenance)


def _check_has_root(folder: Path) -> None:
    """Refuse a folder that is no result; those in it may be what is meant."""
    if (folder / ROOT).is_file():
        return
    hint = ""
    results = sorted(path.name for path in folder.glob("*.zarr"))
    if results:
        hint = f"; there is {', '.join(results[:4])} in it"
    raise OutputError(f"there is no stored result at {folder}{hint}")


def _check_objects(listing: Listing, sizes: Mapping[str, int]) -> None:
    """Refuse arrays of a kind that mechattn does not write, and objects missing, too many or of
    another size."""
    unclaimed = set(listing.checksums)
    for name in listing.checksums:
        if plain(name) != name:  # libraries print names in their own warnings
            raise damage(listing.place, name, "its name has control characters")
        if name.endswith(f"/{ROOT}"):
            unclaimed -= {name, *_objects_of(listing, name, sizes)}

    if unclaimed:
        raise damage(listing.place, min(unclaimed), "it belongs to none of the arrays")


def _objects_of(listing: Listing, metadata_name: str, sizes: Mapping[str, int]) -> list[str]:
    """The objects of an array, by its metadata, each with as many numbers or texts as they declare;
    none of a group."""
    content = listing.read(metadata_name)
    try:
        metadata = json.loads(content)
        if metadata["node_type"] == "group" and _is_plain(metadata):
            return []
        shape, object_shape, data_type = _declared(metadata)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        raise DamagedResult(
            f"{metadata_name} in the result at {listing.place} is not in the format that mechattn "
            "writes"
        ) from None

    array_name = metadata_name.removesuffix(f"/{ROOT}")
    # Rounded up, exactly even for the largest number that somebody declares.
    grid = [-(-size // step) for size, step in zip(shape, object_shape, strict=True)]
    if prod(grid) > len(sizes):  # as many as somebody declares may not be named in any time
        raise damage(listing.place, array_name, f"not all of {prod(grid):,} objects are there")
    names = ["/".join([array_name, "c", *map(str, index)]) for index in np.ndindex(*grid)]

    count = prod(object_shape)
    for name in names:
        if name not in listing.checksums or name not in sizes:
            raise damage(listing.place, name, "it is missing")
        size = sizes[name]
        if data_type == TEXT_TYPE:
            declared = int.from_bytes(listing.read(name)[:TEXT_LENGTH], "little")
            fits = declared == count and size >= TEXT_LENGTH * (1 + count)
        else:
            fits = size == count * np.dtype(data_type).itemsize
        if not fits:
            raise damage(listing.place, name, f"{size:,} bytes are not those of {count:,} values")

    return names


def _is_plain(metadata: Any) -> bool:
    """Whether this is Zarr 3 without anything between the objects and the store."""
    return metadata["zarr_format"] == 3 and not metadata.get("storage_transformers")


def _declared(metadata: Any) -> tuple[list[int], list[int], str]:
    """The shape of an array, that of its objects, and its type.

    Raises:
        ValueError: It is not what mechattn writes; where an entry is missing or of another type,
            the error that Python raises.
    """
    grid = metadata["chunk_grid"]
    keys = metadata["chunk_key_encoding"]
    shape = metadata["shape"]
    object_shape = grid["configuration"]["chunk_shape"]
    data_type = metadata["data_type"]
    (codec,) = metadata["codecs"]
    options = codec.get("configuration") or {}
    accepted = (
        _is_plain(metadata)
        and metadata["node_type"] == "array"
        and len(shape) == len(object_shape) == len(metadata["dimension_names"])
        and all(type(size) is int and size >= 0 for size in shape)
        and all(type(size) is int and size >= 1 for size in object_shape)
        and grid["name"] == "regular"
        and keys == {"name": "default", "configuration": {"separator": "/"}}
        and codec["name"] == CODECS[data_type]
        and options.get("endian", "little") == "little"
    )

    if not accepted:
        raise ValueError
    return shape, object_shape, data_type


def _dataset(stored: xr.Dataset, place: Place) -> xr.Dataset:
    """A dataset as a run makes it, its quantities in the order of their names; small arrays are
    read."""
    dataset = stored.drop_encoding()
    dataset.attrs = plain_attributes(dataset.attrs)
    for variable in dataset.variables.values():
        variable.attrs = plain_attributes(variable.attrs)
        if variable.nbytes <= SMALL_ARRAY or variable.ndim < 2:
            variable.load()
        else:
            variable.encoding[SOURCES] = {str(place)}

    quantities = {name: dataset.variables[name] for name in sorted(dataset.data_vars, key=str)}
    return dataset.drop_vars(quantities).assign(quantities)
