"""The files of a stored Zarr folder, local or at an address; only plain files, as reading others may have effects."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mechattn.errors import OutputError
from mechattn.shown import plain


@dataclass(frozen=True)
class Files:
    """The content of a folder.

    Args:
        sizes: The size of each file in bytes, by its path in the folder, with "/".
        read: Reads a whole file.
        heads: Reads the first bytes of some files.
    """

    sizes: Mapping[str, int]
    read: Callable[[str], bytes]
    heads: Callable[[Seq[str], int], list[bytes]]


def files_in(folder: Path) -> Files:
    """The files in a folder of this machine."""
    sizes, waiting = {}, [folder]
    while waiting:
        with os.scandir(waiting.pop()) as found:
            for entry in found:
                path = Path(entry.path)
                _check_name(entry.name)
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(path)
                    continue
                if not entry.is_file(follow_symlinks=False):
                    raise OutputError(f"{path} is {_kind(path)}, but a stored result contains only plain files")
                sizes[path.relative_to(folder).as_posix()] = entry.stat(follow_symlinks=False).st_size

    def heads(names: Seq[str], count: int) -> list[bytes]:
        return [_head(folder / name, count) for name in names]

    return Files(sizes, lambda name: (folder / name).read_bytes(), heads)


def files_at(address: str) -> Files:
    """The files at an address."""
    import fsspec

    system, root = fsspec.url_to_fs(address)
    root, sizes = root.rstrip("/") + "/", {}
    for path, about in system.find(root, detail=True).items():
        if about.get("type") != "file" or about.get("islink"):
            raise OutputError(f"{path} at {address} is not a plain file, but a stored result contains only plain files")
        _check_name(path.removeprefix(root))
        sizes[path.removeprefix(root)] = int(about.get("size") or 0)

    def heads(names: Seq[str], count: int) -> list[bytes]:
        at: Any = [root + name for name in names]
        return system.cat_ranges(at, [0] * len(at), [min(count, sizes[name]) for name in names], on_error="raise")

    return Files(sizes, lambda name: system.cat_file(root + name), heads)


def _check_name(name: str) -> None:
    """Refuse control characters in names, which libraries print in their own warnings."""
    if plain(name) != name:
        raise OutputError(
            f'a file in this result is called "{name}", with control characters, so mechattn did not write it'
        )


def _head(path: Path, count: int) -> bytes:
    with open(path, "rb") as stored:
        return stored.read(count)


def _kind(path: Path) -> str:
    """The kind of a path that is not a plain file."""
    mode = path.lstat().st_mode
    kinds = {stat.S_ISLNK: "a link", stat.S_ISFIFO: "a named pipe", stat.S_ISSOCK: "a socket"}
    return next((word for is_kind, word in kinds.items() if is_kind(mode)), "a device")
