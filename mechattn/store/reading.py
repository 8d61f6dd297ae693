"""Reads results, which may come from someone else: the metadata is checked first, and only numbers
and texts are read.

Nothing may be compressed and no object may be missing, so a result takes no more memory than its
files (texts up to 16 times as much). Of Zarr's codecs, only "bytes" and "vlen-utf8" are allowed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import xarray as xr
from pydantic import Field, TypeAdapter

from mechattn.errors import OutputError, memory_bytes, plain
from mechattn.results.arrays import SOURCES, lazy_bytes, lazy_variables
from mechattn.results.consistency import Count, Entry, problem_of
from mechattn.results.result import MEMORY, Result
from mechattn.store.atomic_writes import recover
from mechattn.store.objects import (
    ROOT,
    SCHEMA,
    DamagedResult,
    Listing,
    Location,
    damage,
    digest_of,
    errors_of_files,
    location_of,
)

# A result is read at once if it takes at most an eighth of the memory, which leaves the rest to the
# tables and figures that are made of it.
SHARE_READ_AT_ONCE = 0.125
# Bytes. An array up to this size is read when a result is opened, because a later access to a disk
# or a bucket would cost more than its content.
SMALL_ARRAY = 65_536
TEXT_LENGTH = 4  # bytes that "vlen-utf8" takes for the number of texts, and for each length
Number = Annotated[str, Field(pattern=r"^(bool|u?int(8|16|32|64)|float(16|32|64))$")]


class _Metadata(Entry):
    """The metadata of a group or an array in Zarr 3, without storage transformers."""

    zarr_format: Literal[3]
    storage_transformers: tuple[()] = ()


class _Group(_Metadata):
    node_type: Literal["group"]


class _Grid(Entry):
    name: Literal["regular"]
    configuration: dict[Literal["chunk_shape"], list[Annotated[int, Field(ge=1)]]]


class _Keys(Entry):
    name: Literal["default"]
    configuration: dict[Literal["separator"], Literal["/"]]


class _BytesCodec(Entry):
    name: Literal["bytes"]
    configuration: dict[Literal["endian"], Literal["little"]] = Field(default_factory=dict)


class _TextCodec(Entry):
    name: Literal["vlen-utf8"]


class _Array(_Metadata):
    node_type: Literal["array"]
    shape: list[Count]
    chunk_grid: _Grid
    chunk_key_encoding: _Keys


class _Numbers(_Array):
    data_type: Number
    codecs: tuple[_BytesCodec]


class _Texts(_Array):
    data_type: Literal["string"]
    codecs: tuple[_TextCodec]


METADATA: TypeAdapter[_Group | _Numbers | _Texts] = TypeAdapter(_Group | _Numbers | _Texts)


def load_result(path: str | Path, *, memory: str = MEMORY) -> Result:
    """Load a result written by ``Result.save``; no code in it is run.

    A result that takes at most an eighth of ``memory`` is read at once. From a larger one, the
    values of single prompts are read on demand, one block at a time. Each object is compared with
    its checksum when it is read.

    Args:
        path: A local path or an address.
        memory: How much memory each table or figure of the result may take, such as "2GiB". If that
            is too little for the whole, some layers or prompts are read at a time.

    Raises:
        OptionError: ``memory`` is not an amount of memory.
        OutputError: There is no stored result here, or it has an unknown schema, is damaged, or
            contains files that mechattn did not write.
    """
    most_bytes = memory_bytes(memory) * SHARE_READ_AT_ONCE
    result = open_result(path)
    is_small = lazy_bytes(result) <= most_bytes
    with _reading(path):
        for variable in lazy_variables(result):
            if is_small or "prompt" not in variable.dims:
                variable.load()

    return replace(result, memory=memory)


def open_checked_result(path: str | Path) -> Result:
    """Read every object once and compare it with its checksum, then open the result as
    :func:`open_result` does."""
    with _reading(path):
        listing, provenance = _checked_listing(path)
        listing.check()
        return _result_of(listing, provenance)


def open_result(path: str | Path) -> Result:
    """Open a result. Arrays that are small or have one dimension are read now, others on demand."""
    with _reading(path):
        listing, provenance = _checked_listing(path)
        return _result_of(listing, provenance)


def _reading(path: str | Path) -> AbstractContextManager[None]:
    """Raise any error of files within a ``with`` block as one that names the result."""
    return errors_of_files(
        f"the result at {path} cannot be read", "run it again, or restore a copy"
    )


def _checked_listing(path: str | Path) -> tuple[Listing, dict[str, Any]]:
    """The listing of a result, and its provenance, after checking that the folder or address has
    exactly the listed objects, in the sizes that the arrays declare.

    If a process was killed while it replaced the folder, the folder is restored first.

    Raises:
        OutputError: There is no stored result here, or it has an unknown schema, is incomplete or
            damaged, or contains other files.
    """
    location = location_of(path)
    if location.folder:
        recover(location.folder)
        _check_has_root(location.folder)

    sizes = location.sizes()
    if ROOT not in sizes:
        raise OutputError(f"there is no stored result at {location}")

    attributes = location.attributes()
    schema = attributes.get("mechattn_schema")
    if schema != SCHEMA:
        raise OutputError(
            f"the result at {location} has schema {schema}; this version of mechattn reads schema "
            f"{SCHEMA}"
        )

    if "writing" in attributes:  # at an address, where the root is written last
        raise OutputError(f"the result at {location} is incomplete; write it again")

    provenance = attributes["provenance"]
    checksums = attributes["objects"]
    if digest_of(provenance, checksums) != attributes["digest"]:
        raise damage(location, ROOT, "its provenance or its listing was changed")

    foreign_names = sizes.keys() - {ROOT, *checksums}
    if foreign_names:
        raise OutputError(
            f"the result at {location} holds {min(foreign_names)} too, which mechattn did not "
            "write; move that file elsewhere"
        )

    listing = Listing(location, checksums, read_only=True)
    _check_objects(listing, sizes)
    return listing, json.loads(provenance)


def _result_of(listing: Listing, provenance: dict[str, Any]) -> Result:
    """The result whose objects a listing has.

    Raises:
        DamagedResult: The result lacks something that every result needs.
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

    # Analyses were written one after the other, so their names are in the order of the run.
    group_names = dict.fromkeys(name.partition("/")[0] for name in listing.checksums)
    datasets = {name: _dataset(tree[name].to_dataset(), listing.location) for name in group_names}
    problem = problem_of(datasets, provenance)
    if problem is not None:
        raise DamagedResult(f"the result at {listing.location} is damaged: {problem}")
    return Result(datasets, provenance)


def _check_has_root(folder: Path) -> None:
    """Check that a folder is a stored result; if not, the error names up to four in it."""
    if (folder / ROOT).is_file():
        return
    results = ", ".join(sorted(path.name for path in folder.glob("*.zarr"))[:4])
    problem = f"there is no stored result at {folder}"
    if results:
        problem += f"; this folder contains {results}"
    raise OutputError(problem)


def _check_objects(listing: Listing, sizes: Mapping[str, int]) -> None:
    """Check that the listed arrays are of a kind that mechattn writes, and that their objects, and
    no others, exist in their sizes."""
    names_without_array = set(listing.checksums)
    for name in listing.checksums:
        if plain(name) != name:  # libraries print names in their warnings
            raise damage(listing.location, name, "its name contains control characters")
        if name.endswith(f"/{ROOT}"):
            names_without_array -= {name, *_objects_of(listing, name, sizes)}

    if names_without_array:
        raise damage(listing.location, min(names_without_array), "it belongs to none of the arrays")


def _objects_of(listing: Listing, metadata_name: str, sizes: Mapping[str, int]) -> list[str]:
    """The names of the objects of an array, after checking that each has as many numbers or texts
    as the array's metadata declare. A group has no objects of its own."""
    try:
        metadata = METADATA.validate_json(listing.read(metadata_name))
        if isinstance(metadata, _Group):
            return []
        object_shape = metadata.chunk_grid.configuration["chunk_shape"]
        # Rounded up in integers, which are exact for any number that the metadata declare.
        lengths_and_steps = zip(metadata.shape, object_shape, strict=True)
        grid = [-(-length // step) for length, step in lengths_and_steps]
    except ValueError:  # such as pydantic's ValidationError
        raise DamagedResult(
            f"{metadata_name} in the result at {listing.location} is not in the format that "
            "mechattn writes"
        ) from None

    array_name = metadata_name.removesuffix(f"/{ROOT}")
    if prod(grid) > len(sizes):  # hostile metadata may declare more objects than can be listed
        raise damage(listing.location, array_name, f"not all of its {prod(grid):,} objects exist")
    names = ["/".join([array_name, "c", *map(str, index)]) for index in np.ndindex(*grid)]

    value_count = prod(object_shape)  # Zarr pads the last object to this shape
    for name in names:
        if name not in listing.checksums or name not in sizes:
            raise damage(listing.location, name, "it is missing")
        size = sizes[name]
        if isinstance(metadata, _Texts):
            text_count = int.from_bytes(listing.read(name)[:TEXT_LENGTH], "little")
            has_values = text_count == value_count and size >= TEXT_LENGTH * (1 + value_count)
        else:
            has_values = size == value_count * np.dtype(metadata.data_type).itemsize
        if not has_values:
            fault = f"its {size:,} bytes do not hold {value_count:,} values"
            raise damage(listing.location, name, fault)

    return names


def _dataset(stored: xr.Dataset, location: Location) -> xr.Dataset:
    """A dataset as a run makes it, with its quantities sorted by name. Arrays that are small or
    have one dimension are read."""
    dataset = stored.drop_encoding()
    for variable in dataset.variables.values():
        if variable.nbytes <= SMALL_ARRAY or variable.ndim < 2:
            variable.load()
        else:
            variable.encoding[SOURCES] = {str(location)}

    quantities = {name: dataset.variables[name] for name in sorted(dataset.data_vars, key=str)}
    return dataset.drop_vars(quantities).assign(quantities)
