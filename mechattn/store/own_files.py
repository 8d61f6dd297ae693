"""Recognises what mechattn wrote: only a result that contains nothing else is ever replaced."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from mechattn.errors import OutputError

_NAMED = 4  # files listed in a message
_ROOT = "zarr.json"
_BEGUN = re.compile(r"zarr\.json|[^/]+/(zarr\.json)?|[^/]+/[^/]+/(zarr\.json|c(/\d+)*/?)?", re.DOTALL)


def check_ours(place: str | Path, files: Collection[str], read: Callable[[str], bytes]) -> None:
    """Refuse to replace a Zarr folder that contains anything but a result of mechattn."""
    root = _attributes(files, read)
    if "mechattn_schema" not in root:
        raise OutputError(f"{place} exists and is not a stored result; choose another name, or move it away")
    written = _written(root)
    if strangers := sorted(name for name in files if not written(name)):
        raise OutputError(
            f"{place} is a stored result that holds {named(strangers)} too, which mechattn did not write, so it is not "
            "replaced; move that out of it, or choose another name"
        )


def files_in(folder: Path) -> list[str]:
    """The names of all files in a folder, as :func:`check_ours` takes them; a link to a file is one."""
    return list(_files_in(folder, ""))


def named(files: Collection[str]) -> str:
    """Some names, and the number of the others."""
    first = ", ".join(list(files)[:_NAMED])
    return first if len(files) <= _NAMED else f"{first} and {len(files) - _NAMED} more"


def _files_in(folder: Path, within: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        found = list(entries)
    if not found and within:
        yield within
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            yield from _files_in(Path(entry.path), f"{within}{entry.name}/")
        else:
            yield f"{within}{entry.name}{'' if os.path.isfile(entry.path) else ' (not a plain file)'}"


def _attributes(files: Collection[str], read: Callable[[str], bytes]) -> dict[str, Any]:
    """The attributes at the root of a Zarr folder; only JSON is decoded."""
    if _ROOT not in files:
        return {}
    try:
        content = read(_ROOT)
        if not content and not any(read(name) for name in files if not name.endswith("/")):
            return {"mechattn_schema": 0, "begun": True}  # power was lost; there is nothing to lose
        found = json.loads(content)["attributes"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _written(root: dict[str, Any]) -> Callable[[str], object]:
    """Whether a file, or an empty folder, has a name that a result gives to one of its own."""
    if root.get("begun"):  # the chunks of a run are being written
        return _BEGUN.fullmatch
    listed = root.get("objects")
    ours = {_ROOT, *(listed if isinstance(listed, dict) else ())}
    folders = {name[: at + 1] for name in ours for at, letter in enumerate(name) if letter == "/"}
    return lambda name: name in ours or name in folders
