"""Stores results on disk or at an address: as a Zarr folder, which xarray opens too."""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mechattn.errors import OutputError
from mechattn.results.digest import digest
from mechattn.results.result import Result
from mechattn.store.addresses import as_place, check_name, filesystem
from mechattn.store.atomic_writes import check_writable, recover, write_whole
from mechattn.store.manifest import write_manifest
from mechattn.store.objects import OBJECTS, ROOT, Store, attributes_of
from mechattn.store.own_files import check_ours, files_in
from mechattn.store.reading import read_result
from mechattn.store.writing import copied

_AT_ONCE = 16  # objects that are sent at the same time


def check_result_place(path: str | Path, *, used: bool = False) -> None:
    """Check in advance that a result can be stored under this name."""
    check_name(path)
    place = as_place(path)
    suffix = Path(str(place)).suffix
    if suffix != ".zarr":
        raise OutputError(
            f'"{path}" should end with ".zarr": a result is a Zarr folder, here or at an address. For NetCDF or CSV, '
            "see mechattn export"
        )
    if isinstance(place, str):
        _check_address(place, used)
        return
    recover(place)
    if (there := Path(os.path.realpath(place))).exists():
        _check_ours(there)
    if not (used and there.exists()):
        check_writable(place)


def save_result(result: Result, path: str | Path) -> None:
    """Save completely or not at all: under a temporary name first; at an address, the root is written last."""
    check_result_place(path)
    place = as_place(path)
    if isinstance(place, str):
        _save_at_address(result, place)
    else:
        write_whole(place, lambda new: _write(result, new))


def save_manifest(path: str | Path, places: Seq[str | Path]) -> None:
    """Write a manifest of stored results, in place of their merge."""
    check_result_place(path)
    place = as_place(path)
    if isinstance(place, str):
        store = Store(place)
        store.begin()
        write_manifest(store, path, places)
    else:
        write_whole(place, lambda new: write_manifest(Store(new), path, places))


def upload(store: Store, address: str) -> None:
    """Copy a complete result from a folder to an address, its root last."""
    to, names = Store(address), attributes_of(store.place)[OBJECTS]
    who = to.begin()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(lambda name: to.put(name, store.get(name) or b""), names))
    to.check_begun(who)
    to.put(ROOT, store.get(ROOT) or b"")


def _write(result: Result, new: Path) -> None:
    """Write a result and read it back, because a file system may accept what it cannot return."""
    copied(result, Store(new))
    _check_read_back(result, new)


def _check_read_back(result: Result, place: str | Path) -> None:
    try:
        same = digest(read_result(place, lazy=True).datasets) == digest(result.datasets)
    except OutputError as error:
        raise OutputError(f"what was just written cannot be read back: {error}") from error
    if not same:
        raise OutputError(f"what was just written to {place} reads back with other numbers")


def _save_at_address(result: Result, address: str) -> None:
    try:
        store = Store(address)
        who = store.begin()
        copied(result, store, lambda: store.check_begun(who))
    except Exception as error:  # each kind of address has its own errors
        raise OutputError(
            f"{address} could not be written ({type(error).__name__}: {error}); what is there is "
            "incomplete, and load_result will refuse it"
        ) from error
    _check_read_back(result, address)


def _check_address(address: str, used: bool) -> None:
    """Check that nothing else is at an address and, unless a result there can be used, that a file can be created."""
    try:
        files, probe = filesystem(address), f"{address}.mechattn-{os.urandom(8).hex()}"
        if files.exists(address):
            root = str(files._strip_protocol(address)).rstrip("/")
            found = [str(name).removeprefix(root).removeprefix("/") for name in files.find(address)]
            check_ours(address, found, lambda name: files.cat_file(f"{root}/{name}"))
            if used:
                return
        files.pipe_file(probe, b"")
        files.rm_file(probe)
    except OutputError:
        raise
    except ImportError as error:
        raise OutputError(f"{address}: {error}") from None  # fsspec says which package to install
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise OutputError(f"nothing can be written to {address} ({reason}); choose another place") from None


def _check_ours(place: Path) -> None:
    """Refuse to replace what is at a local path, unless it is a result and nothing else."""
    try:
        if place.is_dir():
            check_ours(place, files_in(place), lambda name: (place / name).read_bytes())
            return
    except OSError as error:
        raise OutputError(f"{place} exists and cannot be inspected: {error.strerror or error}") from None
    raise OutputError(f"{place} exists and is not a stored result; choose another name, or move it away")
