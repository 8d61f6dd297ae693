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


def check_ours(place: str | Path, files: Collection[str], read: Callable[[str], bytes]) -> None:
    """Refuse to replace a Zarr folder that contains anything but a result of mechattn.

    Args:
        place: The place, for the message.
        files: The names of all its files, relative to the folder, and of empty folders, ending in "/".
        read: Returns the content of a file.

    Raises:
        OutputError: It is not a result, or contains something that mechattn did not write.
    """
    root = _attributes(files, read)
    if "mechattn_schema" not in root:
        raise OutputError(f"{place} exists and is not a stored result; choose another name, or move it away")
    written = _written(root)
    if strangers := sorted(name for name in files if not written.fullmatch(name)):
        raise OutputError(
            f"{place} is a stored result that holds {named(strangers)} too, which mechattn did not write, so it is not "
            "replaced; move that out of it, or choose another name"
        )


def files_in(folder: Path) -> list[str]:
    """The names of all files in a folder, as :func:`check_ours` takes them; a link is a file."""
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
            yield f"{within}{entry.name}"


def _attributes(files: Collection[str], read: Callable[[str], bytes]) -> dict[str, Any]:
    """The attributes at the root of a Zarr folder; only JSON is decoded."""
    if "zarr.json" not in files:
        return {}
    try:
        found = json.loads(read("zarr.json"))["attributes"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _written(root: dict[str, Any]) -> re.Pattern[str]:
    """The names of the files of a result; an earlier version recorded only its groups."""
    contents = root.get("contents")
    if root.get("begun"):  # the chunks of a run are being written
        return re.compile(r"zarr\.json|[^/]+/(zarr\.json)?|[^/]+/[^/]+/(zarr\.json|c(/\d+)*/?)?", re.DOTALL)
    if isinstance(contents, list):
        arrays = [str(name) for name in contents]
        groups = sorted({name.partition("/")[0] for name in arrays})
        array = _one_of(arrays)
    else:
        try:
            groups = ["sequences", *map(str, json.loads(root["provenance"])["analyses"])]
        except (ValueError, LookupError, TypeError, RecursionError):
            groups = ["sequences"]
        array = f"{_one_of(groups)}/[^/]+"
    return re.compile(rf"zarr\.json|{_one_of(groups)}/(zarr\.json)?|{array}/(zarr\.json|c(/\d+)*/?)?", re.DOTALL)


def _one_of(names: list[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, names))})"
