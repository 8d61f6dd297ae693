"""Several stored results as one, without copying any: a folder that names them, which is read as their merge."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path, PurePosixPath
from typing import Any

from mechattn.errors import OptionError, OutputError
from mechattn.results.addresses import as_place, is_address
from mechattn.results.large_store import ROOT, SCHEMA, Store, attributes_of
from mechattn.results.merge import merge_results
from mechattn.results.result import Result

MANIFEST = "manifest"  # in the attributes of the root


def write_manifest(store: Store, out: str | Path, places: Seq[str | Path]) -> None:
    """Write which results are one.

    Args:
        store: The new folder, or the address.
        out: Where it will lie.
        places: The results, each with regions; of another manifest all that it names.

    Raises:
        OptionError: One of them doesn't lie beside ``out``, or in a folder beside it.
    """
    parts = [{"name": name, "digest": _digest(_beside(out, name))} for place in places for name in _names(out, place)]
    attributes = {"mechattn_schema": SCHEMA, "complete": True, "contents": [], MANIFEST: parts}
    content = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    store.put(ROOT, json.dumps(content, indent=1).encode())


def read_manifest(parts: Any, place: str | Path, load: Callable[[str | Path], Result]) -> Result:
    """The merge of what a manifest names.

    Args:
        parts: What it says.
        place: Where it lies.
        load: Reads one of the results.

    Raises:
        OutputError: It names something elsewhere, or a result that was changed or is gone.
    """
    found = []
    for name, known in _checked(parts, place):
        where = _beside(place, name)
        result = load(where)
        if attributes_of(as_place(where)).get(MANIFEST) is not None or _digest(where) != known:
            raise OutputError(f"{where} was changed since it was made a part of {place}: merge them again")
        found.append(result)
    try:
        return merge_results(found)
    except OptionError as error:
        raise OutputError(f"the results that {place} names are not of one run: {error}") from None


def is_manifest_of(out: str | Path, places: Seq[str | Path]) -> bool:
    """Whether a manifest of some of these results, and of no others, lies there, whatever has become of them since."""
    parts = attributes_of(as_place(out)).get(MANIFEST)
    if parts is None:
        return False
    try:
        return {name for name, _ in _checked(parts, out)} <= {name for place in places for name in _names(out, place)}
    except OptionError:  # one lies elsewhere
        return False


def _checked(parts: Any, place: str | Path) -> Iterator[tuple[str, str]]:
    """Names and digests; a name is of what lies beside the manifest, as somebody else's could fetch from anywhere."""
    if not isinstance(parts, list) or not parts:
        raise OutputError(f"the manifest at {place} is damaged: it names no results")
    for part in parts:
        name = part.get("name") if isinstance(part, dict) else None
        if not isinstance(name, str) or not _is_beside(name):
            raise OutputError(f"the manifest at {place} names {name!r}, which does not lie beside it")
        yield name, str(part.get("digest"))


def _is_beside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and "://" not in name and "\\" not in name and not path.is_absolute() and ".." not in path.parts


def _names(out: str | Path, place: str | Path) -> list[str]:
    """A result as seen from the folder of the manifest."""
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
        f"{place} does not lie beside {out}, nor in a folder beside it, so {out} cannot name it: move it there, or "
        "copy the numbers into one result (mechattn merge --copy, in Python copy=True)"
    )


def _beside(place: str | Path, name: str) -> str | Path:
    if is_address(place):
        return f"{str(place).rstrip('/').rpartition('/')[0]}/{name}"
    return Path(as_place(place)).parent / name


def _digest(place: str | Path) -> str:
    """Of a whole store: of its small arrays, its provenance, its layout and all its objects."""
    return str(attributes_of(as_place(place)).get("digest"))
