"""Stores results on disk or at an address, as a Zarr folder that xarray writes, a chunk of prompts
at a time.

An object holds a chunk of prompts of one array. Where that takes more than 1 MiB, it is cut into
conditions, then segments, layers, heads and positions, as far as is needed. Nothing is compressed,
so that an object has the size that its array declares.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from math import ceil, prod
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from mechattn.errors import OptionError, OutputError
from mechattn.results.arrays import lazy_sources, with_texts_as
from mechattn.results.consistency import problem_of
from mechattn.results.merge import is_part, merge_results
from mechattn.results.result import CHUNK, Result
from mechattn.store.atomic_writes import check_writable, recover, write_whole
from mechattn.store.objects import (
    ROOT,
    SCHEMA,
    Listing,
    Place,
    digest_of,
    errors_of_files,
    place_of,
    root_content,
)
from mechattn.store.reading import load_result, open_checked_result, open_result

LARGEST_OBJECT = 2**20  # bytes
CUT_DIMENSIONS = ("condition", "segment", "layer", "head", "original_key", "key", "pos")


def check_result_place(path: str | Path) -> None:
    """Check in advance that a result can be stored here.

    Raises:
        OutputError: The name does not end with ".zarr", there is something else, or nothing can be
            written there.
    """
    place = _checked_place(path)
    with errors_of_files(f"nothing can be written to {place}", "choose another place"):
        if place.folder:
            check_writable(place.folder)
        else:
            probe = f"{place.root}.mechattn-{os.urandom(8).hex()}"
            place.files.pipe_file(probe, b"")
            place.files.rm_file(probe)


def check_result_or_place(path: str | Path) -> None:
    """Check in advance that a result of ours is here, or that one can be stored here.

    Raises:
        OutputError: Neither is so.
    """
    if not _checked_place(path).exists():
        check_result_place(path)


def _checked_place(path: str | Path) -> Place:
    """The place of a result, where there is nothing or a result of ours."""
    place = place_of(path)
    if Path(str(path)).suffix != ".zarr":
        raise OutputError(
            f'"{path}" should end with ".zarr": a result is a Zarr folder, here or at an address. '
            "For NetCDF or CSV, see mechattn export"
        )

    if place.folder:
        recover(place.folder)
    with errors_of_files(f"nothing can be written to {place}", "choose another place"):
        if place.exists():
            place.check_ours()
    return place


def save_result(result: Result, path: str | Path) -> None:
    """Save completely or not at all: under a temporary name first; at an address, the root is
    written last.

    Raises:
        OutputError: It lacks what every stored result has, cannot be stored here, or what is stored
            here is still needed.
    """
    check_result_place(path)
    problem = problem_of(result.datasets, json.loads(json.dumps(dict(result.provenance))))
    if problem is not None:
        raise OutputError(
            f"this result cannot be stored: {problem}. Store one with all its conditions, layers and"
            " segments, and select from what you load"
        )

    place = place_of(path)
    if place.folder is None:
        _save_at_address(result, place)
        return

    def write(new: Path) -> None:
        write_result(result, Place(str(new)))
        if place.exists():  # somebody may have put a file there meanwhile
            place.check_ours()

    write_whole(place.folder, write)


def _save_at_address(result: Result, place: Place) -> None:
    """Replace what is at an address, which is incomplete until the root is written."""
    if any(place.is_same(place_of(source)) for source in lazy_sources(result)):
        raise OutputError(
            f"this result is still read from {place}, and saving there would delete what it has "
            "not read yet: save it to another address, or load it with more memory=…, so that it "
            "is read at once"
        )

    try:
        mark = place.begin()
        write_result(result, place, mark)
    except Exception as error:  # each kind of address has its own errors
        raise OutputError(
            f"{place} could not be written ({type(error).__name__}: {error}); what is there is "
            "incomplete, and load_result will refuse it"
        ) from error


def merge_stored(target: str, paths: Sequence[str]) -> Result:
    """Merge stored results, a chunk of prompts at a time, and store the merged result.

    Raises:
        OptionError: The results don't belong together, or the target has something that would be
            lost.
        OutputError: One of them cannot be read, or nothing can be stored at the target.
    """
    check_result_place(target)
    results = [open_result(path) for path in paths]
    target_place = place_of(target)
    if any(target_place.is_same(place_of(path)) for path in paths):
        raise OptionError(
            f"{target} is both a result to merge and the target; name a new target first"
        )

    merged = merge_results(results)
    attributes = target_place.attributes()
    is_finished = attributes and "writing" not in attributes
    if is_finished and not is_part(open_result(target), merged):
        raise OptionError(
            f"{target} exists and is not a merge of {', '.join(paths)}: its content would be lost."
            " The first name is the target (mechattn merge TARGET RESULT…); name a new one, or"
            " delete this one first"
        )

    save_result(merged, target)
    return load_result(target)


def write_result(result: Result, place: Place, mark: str | None = None) -> None:
    """Write all objects, then the root, and read everything back; ``mark`` is that of an address
    that is being written."""
    listing = Listing(place, {}, read_only=False)
    for name, dataset in result.datasets.items():
        _write_dataset(name, dataset, result.provenance.get("chunk", CHUNK), listing)
    if mark is not None:
        place.check_begun(mark)

    provenance = json.dumps(dict(result.provenance))
    attributes = {
        "mechattn_schema": SCHEMA,
        "provenance": provenance,
        "objects": listing.checksums,
        "digest": digest_of(provenance, listing.checksums),
    }
    place.write(ROOT, root_content(attributes))

    try:  # a file system may accept what it cannot return
        open_checked_result(str(place))
    except OutputError as error:
        raise OutputError(f"what was just written cannot be read back: {error}") from error


def _write_dataset(name: str, dataset: xr.Dataset, chunk: int, listing: Listing) -> None:
    """Write a group; of a result that is larger than memory, a chunk of prompts is read at a
    time."""
    # Texts of variable length, as Zarr has no specified type for others.
    dataset = with_texts_as(np.dtypes.StringDType(), dataset.drop_encoding())
    options: dict[str, Any] = {"group": name, "consolidated": False}
    encoding = {}
    without_prompts = []
    for label, variable in dataset.variables.items():
        encoding[label] = {
            "chunks": _object_shape(variable, chunk),
            "compressors": None,
            "_FillValue": None,
            "write_empty_chunks": True,
        }
        if "prompt" not in variable.dims:
            without_prompts.append(label)

    first = dataset.isel(prompt=slice(chunk), missing_dims="ignore")
    first.to_zarr(listing, mode="w-", zarr_format=3, encoding=encoding, **options)

    for start in range(chunk, dataset.sizes.get("prompt", 0), chunk):
        block = dataset.isel(prompt=slice(start, start + chunk)).drop_vars(without_prompts)
        block.to_zarr(listing, append_dim="prompt", **options)


def _object_shape(variable: xr.Variable, chunk: int) -> tuple[int, ...]:
    """The shape of an object: a chunk of prompts, cut further until it is small enough."""
    shape = {str(dim): max(1, size) for dim, size in variable.sizes.items()}
    if "prompt" not in shape:
        return tuple(shape.values())
    shape["prompt"] = min(chunk, shape["prompt"])
    for dim in CUT_DIMENSIONS:
        size = variable.dtype.itemsize * prod(shape.values())
        if dim in shape and size > LARGEST_OBJECT:
            pieces = ceil(size / LARGEST_OBJECT)  # of equal length, as the last is padded
            shape[dim] = ceil(shape[dim] / pieces)
    return tuple(shape.values())
