"""Stores results on disk or at an address: xarray writes a Zarr folder, one chunk of prompts at a
time.

An object holds one chunk of prompts of one array. If that takes more than 1 MiB, it is cut along
its conditions, then segments, layers, heads and positions, until it is small enough. An array
without prompts is one object of any size. Nothing is compressed, so that an object has the size
that its array declares.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from math import ceil, prod
from pathlib import Path

import numpy as np
import xarray as xr

from mechattn.errors import OptionError, OutputError
from mechattn.results.arrays import lazy_sources, with_texts_as
from mechattn.results.consistency import problem_of
from mechattn.results.merge import is_part, merge_results
from mechattn.results.result import CHUNK, Result, plain_provenance
from mechattn.store.atomic_writes import check_writable, recover, write_whole
from mechattn.store.objects import (
    ROOT,
    SCHEMA,
    Listing,
    Location,
    digest_of,
    errors_of_files,
    location_of,
    root_content,
)
from mechattn.store.reading import open_checked_result, open_result

# Bytes. A figure of one layer of a large result then reads little else.
LARGEST_OBJECT = 2**20
# The dimensions that large objects are cut along, in this order.
CUT_DIMENSIONS = (
    "condition",
    "segment",
    "layer",
    "head",
    "original_key",
    "key",
    "pos",
    "query",
    "target",
)


def check_result_location(path: str | Path) -> Location:
    """Check in advance that a result can be stored at this path, and return its location.

    Raises:
        OutputError: The name does not end with ".zarr", something else is stored there, or nothing
            can be written there.
    """
    location = _checked_location(path)
    if location.folder:
        check_writable(location.folder)
        return location
    with _writing_to(location):
        # A file is made and deleted to find out whether this is allowed.
        probe_path = f"{location.path}.mechattn-{os.urandom(8).hex()}"
        location.file_system.pipe_file(probe_path, b"")
        location.file_system.rm_file(probe_path)
    return location


def check_result_or_location(path: str | Path) -> None:
    """Check in advance that a result is stored at this path, or that one can be stored there.

    Raises:
        OutputError: The name does not end with ".zarr", something else is stored there, or nothing
            is stored and nothing can be written there.
    """
    if not _checked_location(path).exists():
        check_result_location(path)


def save_result(result: Result, path: str | Path) -> None:
    """Store a result at a path, and replace one that is stored there.

    A folder is written under a temporary name, and replaces the old one when it is complete. At an
    address the old result is deleted first, and the root is written last: until then, the result
    there is incomplete and cannot be loaded.

    Raises:
        OutputError: The result lacks something that every stored result has, it cannot be stored
            here, or it is itself read from the address where it would be stored.
    """
    location = check_result_location(path)
    problem = problem_of(result.datasets, plain_provenance(result))
    if problem is not None:
        raise OutputError(
            f"this result cannot be stored: {problem}. Store it with all its conditions, layers and"
            " segments, and select from the result that you load"
        )

    if location.folder is None:
        _save_at_address(result, location)
        return

    def write(new_path: Path) -> None:
        write_root(result, write_objects(result, Location(str(new_path))))
        if location.exists():  # another process may have written something there meanwhile
            location.check_ours()

    write_whole(location.folder, write)


def merge_stored(target: str, paths: Sequence[str]) -> None:
    """Merge stored results, one chunk of prompts at a time, and store the merged result.

    Raises:
        OptionError: The results don't belong together, or the target is one of them or a stored
            result that they do not contain.
        OutputError: A result cannot be read, or nothing can be stored at the target.
    """
    location = check_result_location(target)
    results = [open_result(path) for path in paths]
    if any(location.is_same(location_of(path)) for path in paths):
        raise OptionError(
            f"{target} is both a result to merge and the target; name a new target first"
        )

    merged = merge_results(results)
    # Of an incomplete result at an address, whose root is marked as "writing", nothing can be lost.
    holds_result = location.exists() and "writing" not in location.attributes()
    if holds_result and not is_part(open_result(target), merged):
        raise OptionError(
            f"{target} exists and is not a merge of {', '.join(paths)}: its content would be lost."
            " The first name is the target (mechattn merge TARGET RESULT…): name a new target, or"
            " delete this one first"
        )

    save_result(merged, target)


def write_objects(result: Result, location: Location) -> Listing:
    """Write the objects of a result, and return their listing. Without a root they cannot be
    loaded."""
    listing = Listing(location, {}, read_only=False)
    chunk_size = result.provenance.get("chunk", CHUNK)
    for name, dataset in result.datasets.items():
        _write_dataset(name, dataset, chunk_size, listing)
    return listing


def write_root(result: Result, listing: Listing) -> None:
    """Write the root of a result, which lists its objects, and read the whole result back.

    Raises:
        OutputError: It cannot be read back, or is not what was written.
    """
    provenance = json.dumps(result.provenance)
    attributes = {
        "mechattn_schema": SCHEMA,
        "provenance": provenance,
        "objects": listing.checksums,
        "digest": digest_of(provenance, listing.checksums),
    }
    listing.location.write(ROOT, root_content(attributes))

    try:  # a file system may accept content that it later does not return
        open_checked_result(str(listing.location))
    except OutputError as error:
        raise OutputError(f"what was just written cannot be read back: {error}") from error


def _checked_location(path: str | Path) -> Location:
    """The location of a result, after checking that nothing else is stored there."""
    location = location_of(path)
    if Path(str(path)).suffix != ".zarr":
        raise OutputError(
            f'"{path}" is not a name such as "llama.zarr": a result is a Zarr folder, here or at '
            "an address. For NetCDF or CSV, see mechattn export"
        )

    with _writing_to(location):
        if location.folder:
            recover(location.folder)
        if location.exists():
            location.check_ours()
    return location


def _writing_to(location: Location) -> AbstractContextManager[None]:
    """Raise any error of files within a ``with`` block as one that names the location."""
    return errors_of_files(f"nothing can be written to {location}", "choose another place")


def _save_at_address(result: Result, location: Location) -> None:
    """Delete the result that is stored at an address, if any, and write this one there."""
    if any(location.is_same(location_of(source)) for source in lazy_sources(result)):
        raise OutputError(
            f"this result is still read from {location}, and saving there would delete the values "
            "that are not read yet: save it to another address, or load it with more memory=…, so "
            "that it is read at once"
        )

    with errors_of_files(
        f"{location} could not be written",
        "the result there is incomplete, and load_result will refuse it",
    ):
        mark = location.begin()
        listing = write_objects(result, location)
        location.check_begun(mark)
        write_root(result, listing)


def _write_dataset(name: str, dataset: xr.Dataset, chunk_size: int, listing: Listing) -> None:
    """Write a dataset as a group. One chunk of prompts is in memory at a time."""
    # Texts have variable length, as Zarr 3 specifies no type for texts of fixed length.
    dataset = with_texts_as(np.dtypes.StringDType(), dataset.drop_encoding())
    encoding = {}
    for label, variable in dataset.variables.items():
        encoding[label] = {
            "chunks": _object_shape(variable, chunk_size),
            "compressors": None,
            "_FillValue": None,
            "write_empty_chunks": True,
        }

    first_chunk = dataset.isel(prompt=slice(chunk_size), missing_dims="ignore")
    first_chunk.to_zarr(
        listing, group=name, mode="w-", zarr_format=3, consolidated=False, encoding=encoding
    )
    for start in range(chunk_size, dataset.sizes.get("prompt", 0), chunk_size):
        chunk = dataset.isel(prompt=slice(start, start + chunk_size))
        # "a-" appends to the arrays with prompts, and does not write the others again.
        chunk.to_zarr(listing, group=name, mode="a-", append_dim="prompt", consolidated=False)


def _object_shape(variable: xr.Variable, chunk_size: int) -> tuple[int, ...]:
    """The shape of an array's objects: a chunk of prompts, cut further until it is small enough."""
    lengths = {str(dim): max(1, length) for dim, length in variable.sizes.items()}
    if "prompt" in lengths:
        lengths["prompt"] = min(chunk_size, lengths["prompt"])
        for dim in CUT_DIMENSIONS:
            object_bytes = variable.dtype.itemsize * prod(lengths.values())
            if dim in lengths and object_bytes > LARGEST_OBJECT:
                # Zarr pads the last object, so all should be of about the same length.
                pieces = ceil(object_bytes / LARGEST_OBJECT)
                lengths[dim] = ceil(lengths[dim] / pieces)
    return tuple(lengths.values())
