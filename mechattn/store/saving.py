"""Stores results on disk or at an address, as a Zarr folder, which xarray opens too; merges the results of shards."""

from __future__ import annotations

import os
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from mechattn.errors import OptionError, OutputError
from mechattn.results.arrays import digest, lazy_bytes, lazy_sources
from mechattn.results.merge import is_part, merge_results
from mechattn.results.result import MEMORY, Result, memory_bytes
from mechattn.store import reading
from mechattn.store.atomic_writes import check_name, check_writable, recover, write_whole
from mechattn.store.objects import (
    BEGUN,
    COMPLETE,
    MANIFEST,
    OBJECTS,
    ROOT,
    SCHEMA,
    Store,
    as_place,
    attributes_of,
    beside,
    check_ours,
    filesystem,
    is_address,
    is_beside,
    named,
)  # fmt: skip
from mechattn.store.pieces import copied, write_root
from mechattn.store.reading import load_result, manifest_parts, read_result

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
        try:
            if not there.is_dir():
                raise OutputError(
                    f"{there} exists and is not a stored result; choose another name, or move it away"
                )
            check_ours(Store(there))
        except OSError as error:
            raise OutputError(
                f"{there} exists and cannot be inspected: {error.strerror or error}"
            ) from None
        if used:
            return
    check_writable(place)


def save_result(result: Result, path: str | Path) -> None:
    """Save completely or not at all: under a temporary name first; at an address, the root is written last."""
    check_result_place(path)
    place = as_place(path)
    if isinstance(place, Path):

        def write(new: Path) -> None:
            copied(result, Store(new))
            _check_read_back(result, new)  # because a file system may accept what it cannot return

        write_whole(place, write)
        return
    if _real(place) in map(_real, lazy_sources(result)):
        raise OutputError(
            f"this result is still read from {place}, and saving there would delete what it has not read yet: save it "
            "to another address, or load it with more memory=…, so that it is read at once"
        )
    try:
        store = Store(place)
        who = store.begin()
        copied(result, store, lambda: store.check_begun(who))
    except Exception as error:  # each kind of address has its own errors
        raise OutputError(
            f"{place} could not be written ({type(error).__name__}: {error}); what is there is "
            "incomplete, and load_result will refuse it"
        ) from error
    _check_read_back(result, place)


def save_manifest(path: str | Path, places: Seq[str | Path]) -> None:
    """Write a manifest, which names stored results and is read as their merge, in place of a copy of them."""
    place, parts = as_place(path), []
    for name in [name for one in places for name in _names(path, one)]:
        parts.append(
            {"name": name, "digest": str(attributes_of(as_place(beside(path, name))).get("digest"))}
        )
    about = {"mechattn_schema": SCHEMA, COMPLETE: True, OBJECTS: {}, MANIFEST: parts}
    if isinstance(place, str):
        store = Store(place)
        store.begin()
        write_root(store, about)
    else:
        write_whole(place, lambda new: write_root(Store(new), about))


def merge_stored(out: str, places: Seq[str], copy: bool = False) -> Result:
    """Merge stored results and store the merged result.

    Per-prompt values of more than 256 MiB are not copied; instead a manifest that refers to the results is stored.
    """
    check_result_place(out)
    _check_target(out, places)
    merged = merge_results([read_result(place, lazy=True) for place in places])
    _check_target(out, lazy_sources(merged))  # what a manifest names, too
    there = filesystem(out).exists(out) if is_address(out) else os.path.lexists(as_place(out))
    if (
        there
        and not _holds_nothing_else(out, places)
        and not is_part(read_result(out, lazy=True), merged)
    ):
        raise OptionError(
            f"{out} exists and is not a merge of {named(places)}: its content would be lost. The first "
            "name is the target (mechattn merge TARGET RESULT…); name a new one, or delete this one first"
        )
    if not copy and lazy_bytes(merged) > memory_bytes(MEMORY) // reading.SHARE:
        save_manifest(out, places)
    else:
        save_result(merged, out)
    return load_result(out)


def upload(store: Store, address: str) -> None:
    """Copy a complete result from a folder to an address, its root last."""
    to, names = Store(address), attributes_of(store.place)[OBJECTS]
    who = to.begin()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(lambda name: to.put(name, store.get(name) or b""), names))
    to.check_begun(who)
    to.put(ROOT, store.get(ROOT) or b"")


def _check_read_back(result: Result, place: str | Path) -> None:
    try:
        same = digest(read_result(place, lazy=True).datasets) == digest(result.datasets)
    except OutputError as error:
        also = (
            ""
            if isinstance(place, Path)
            else " (perhaps another process was writing there at the same time)"
        )
        raise OutputError(f"what was just written cannot be read back{also}: {error}") from error
    if not same:
        raise OutputError(f"what was just written to {place} reads back with other numbers")


def _check_address(address: str, used: bool) -> None:
    """Check that nothing else is at an address and, unless a result there can be used, that a file can be created."""
    try:
        files, probe = filesystem(address), f"{address}.mechattn-{os.urandom(8).hex()}"
        if files.exists(address):
            check_ours(Store(address))
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
        raise OutputError(
            f"nothing can be written to {address} ({reason}); choose another place"
        ) from None


def _holds_nothing_else(out: str, places: Seq[str]) -> bool:
    """Whether it names some of these results alone, or is what a merge has left that was killed at this address."""
    there = attributes_of(as_place(out))
    if is_address(out) and BEGUN in there:
        return True
    if there.get(MANIFEST) is None:
        return False
    try:  # even if they have changed since
        known = {name for place in places for name in _names(out, place)}
        return {name for name, _ in manifest_parts(there[MANIFEST], out)} <= known
    except OptionError:  # one is elsewhere
        return False


def _names(out: str | Path, place: str | Path) -> list[str]:
    """The names of a result, or of those in a manifest, relative to the folder of the new manifest."""
    if (parts := attributes_of(as_place(place)).get(MANIFEST)) is not None:
        return [
            name
            for of, _ in manifest_parts(parts, place)
            for name in _names(out, beside(place, of))
        ]
    if is_address(out):
        folder = str(out).rstrip("/").rpartition("/")[0]
        name = str(place).rstrip("/").removeprefix(f"{folder}/")
    else:
        folder = os.path.realpath(Path(as_place(out)).parent)
        name = Path(os.path.relpath(os.path.realpath(as_place(place)), folder)).as_posix()
    if is_address(place) != is_address(out) or not is_beside(name):
        raise OptionError(
            f"{place} is neither next to {out} nor in a folder next to it, so {out} cannot name it: move it there, or "
            "copy the numbers into one result (mechattn merge --copy, in Python copy=True)"
        )
    return [name]


def _check_target(out: str, read: Iterable[str | Path]) -> None:
    if _real(out) in map(_real, read):
        raise OptionError(
            f"{out} is both a result to merge and the target; name a new target first"
        )


def _real(place: str | Path) -> str:
    """The same text for every name of a place."""
    if not is_address(place):
        return os.path.realpath(as_place(place))
    with suppress(Exception):  # an address of no kind is refused when it is read
        return f"{type(filesystem(str(place))).__name__} {Store(str(place)).root}"
    return str(place)
