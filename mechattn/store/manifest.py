"""A manifest: a folder that names several stored results and is read as their merge, without copying any."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path, PurePosixPath
from typing import Any

from mechattn.errors import OptionError, OutputError
from mechattn.results.merge import merge_results
from mechattn.results.result import Result
from mechattn.store.objects import COMPLETE, OBJECTS, SCHEMA, Store, as_place, attributes_of, is_address
from mechattn.store.pieces import write_root

MANIFEST = "manifest"  # in the root attributes


def write_manifest(store: Store, out: str | Path, places: Seq[str | Path]) -> None:
    """Write a manifest of several results."""
    parts = [{"name": name, "digest": _digest(_beside(out, name))} for place in places for name in _names(out, place)]
    write_root(store, {"mechattn_schema": SCHEMA, COMPLETE: True, OBJECTS: {}, MANIFEST: parts})


def read_manifest(parts: Any, place: str | Path, load: Callable[[str | Path], Result]) -> Result:
    """Merge the results that a manifest names."""
    found = []
    for name, known in _checked(parts, place):
        where = _beside(place, name)
        result = load(where)
        if attributes_of(as_place(where)).get(MANIFEST) is not None or _digest(where) != known:
            raise OutputError(f"{where} was changed after it became part of {place}: merge the results again")
        found.append(result)
    try:
        return merge_results(found)
    except OptionError as error:
        raise OutputError(f"the results named by {place} do not belong to one run: {error}") from None


def is_manifest_of(out: str | Path, places: Seq[str | Path]) -> bool:
    """Whether a path holds a manifest of some of these results and no others, even if they have changed since."""
    parts = attributes_of(as_place(out)).get(MANIFEST)
    if parts is None:
        return False
    try:
        return {name for name, _ in _checked(parts, out)} <= {name for place in places for name in _names(out, place)}
    except OptionError:  # one is elsewhere
        return False


def _checked(parts: Any, place: str | Path) -> Iterator[tuple[str, str]]:
    """Yield names and digests; only names next to the manifest are allowed, so that it cannot fetch from elsewhere."""
    if not isinstance(parts, list) or not parts:
        raise OutputError(f"the manifest at {place} is damaged: it names no results")
    digests = [str(part.get("digest")) for part in parts if isinstance(part, dict)]
    if len(set(digests)) < len(digests):  # if they lie, the second one does not match
        raise OutputError(f"the manifest at {place} is damaged: it names a result twice")
    for part in parts:
        name = part.get("name") if isinstance(part, dict) else None
        if not isinstance(name, str) or not _is_beside(name):
            raise OutputError(f"the manifest at {place} names {name!r}, which is not next to it")
        yield name, str(part.get("digest"))


def _is_beside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and "://" not in name and "\\" not in name and not path.is_absolute() and ".." not in path.parts


def _names(out: str | Path, place: str | Path) -> list[str]:
    """The names of a result, or of those in a manifest, relative to the folder of the new manifest."""
    if (parts := attributes_of(as_place(place)).get(MANIFEST)) is not None:
        return [name for of, _ in _checked(parts, place) for name in _names(out, _beside(place, of))]
    if is_address(place) != is_address(out):
        raise _elsewhere(place, out)
    if is_address(out):
        folder = str(out).rstrip("/").rpartition("/")[0]
        name = str(place).rstrip("/").removeprefix(f"{folder}/")
    else:
        folder = os.path.realpath(Path(as_place(out)).parent)
        name = Path(os.path.relpath(os.path.realpath(as_place(place)), folder)).as_posix()
    if not _is_beside(name):
        raise _elsewhere(place, out)
    return [name]


def _elsewhere(place: str | Path, out: str | Path) -> OptionError:
    return OptionError(
        f"{place} is neither next to {out} nor in a folder next to it, so {out} cannot name it: move it there, or "
        "copy the numbers into one result (mechattn merge --copy, in Python copy=True)"
    )


def _beside(place: str | Path, name: str) -> str | Path:
    if is_address(place):
        return f"{str(place).rstrip('/').rpartition('/')[0]}/{name}"
    return Path(as_place(place)).parent / name


def _digest(place: str | Path) -> str:
    """The digest of a whole store: its small arrays, provenance, layout and all objects."""
    return str(attributes_of(as_place(place)).get("digest"))
