"""Reads results, which may be someone else's: checked first, and read only if mechattn could have written them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mechattn.errors import OutputError
from mechattn.results.memory import MEMORY, memory_bytes
from mechattn.results.result import Result
from mechattn.store.addresses import as_place, check_name
from mechattn.store.atomic_writes import recover
from mechattn.store.files import files_at, files_in
from mechattn.store.large_store import OBJECTS, SCHEMA, attributes_of, check_objects
from mechattn.store.manifest import MANIFEST, read_manifest
from mechattn.store.regions import Region
from mechattn.store.schema import COMPLETE, from_tree, read_errors
from mechattn.store.unpacked_size import Size
from mechattn.store.zarr_folder import FORMAT, check_folder

Checked = tuple[dict[str, Any], Mapping[str, int], Mapping[str, Region]]
_OPEN: dict[str, Any] = {"decode_times": False, "decode_timedelta": False}  # "seconds" is a unit here, not a time
_ZARR: dict[str, Any] = {"engine": "zarr", "zarr_format": FORMAT, "consolidated": False}


def load_result(path: str | Path, *, most: int | None = None, memory: str = MEMORY) -> Result:
    """Load a result written by ``Result.save``; no code in it is run.

    For a result of a job with ``large=True``, or a manifest of several, only metadata are read at first. The numbers
    are read on demand, one block of prompts at a time, and each piece is compared with its checksum.

    Args:
        path: A local path or an address.
        most: The memory that it may take, in bytes; by default 256 MiB or 1,000 times its stored size, whichever is
            more.
        memory: What each table or figure of it may take; of a larger one, some layers or prompts are read at a time.

    Raises:
        OutputError: There is no stored result here, one of an unknown schema, a damaged one, or one that unpacks to
            more than ``most``.
    """
    check_name(path)
    memory_bytes(memory)
    place = as_place(path)
    if isinstance(place, Path):
        recover(place)
    try:
        kind, files, regions = _checked(place, path, most)
        return replace(_read(place, path, kind, files, regions), memory=memory)
    except OutputError:
        raise
    except Exception as error:  # files, codecs and the network have their own errors
        raise read_errors(path, error) from (None if isinstance(place, str) else error)  # it may contain a password


def _checked(place: str | Path, path: str | Path, most: int | None) -> Checked:
    """How to open a stored result, after checking it; its files, and its arrays in regions."""
    if isinstance(place, str):
        files = files_at(place)
        _check_complete(attributes_of(place), place)
    elif (place / "zarr.json").is_file():
        files = files_in(place)
    else:
        raise _nothing(place, path)
    return _ZARR, files.sizes, check_folder(files, Size(path, sum(files.sizes.values()), most))


def _read(
    place: str | Path,
    path: str | Path,
    kind: dict[str, Any],
    sizes: Mapping[str, int],
    regions: Mapping[str, Region],
) -> Result:
    import xarray as xr

    with xr.open_datatree(place, **kind, **_OPEN) as tree:
        if MANIFEST in tree.attrs and tree.attrs.get("mechattn_schema") == SCHEMA:
            return read_manifest(tree.attrs[MANIFEST], place, load_result)
        if regions:
            check_objects(tree.attrs.get(OBJECTS, {}), sizes, regions, path)
        return from_tree(tree, path, place, regions)


def _nothing(place: Path, path: str | Path) -> OutputError:
    """The error if there is no result, with a hint at what is there instead."""
    within = sorted(p.name for p in place.glob("*.zarr"))[:4] if place.is_dir() else []
    hint = f"; there is {', '.join(within)} in it" if within else ""
    there = ": it is not a .zarr folder of mechattn" if place.exists() else ""
    return OutputError(f"there is no stored result at {path}{there}{hint}")


def _check_complete(root: Mapping[str, Any], place: str) -> None:
    """The mark that is written last at an address is there, if anything of ours is."""
    if root.get("mechattn_schema") is not None and not root.get(COMPLETE):
        raise OutputError(f"the result at {place} is incomplete; write it again")
