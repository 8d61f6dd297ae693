"""The objects of a stored result, in a folder or at an fsspec address such as "s3://bucket/result.zarr".

The root lists all others, which makes them a result. Only a result that contains nothing else is ever replaced, and
only plain files are read, since reading others may have effects.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mechattn.errors import OutputError
from mechattn.markup import plain
from mechattn.store.atomic_writes import flush, write_file

SCHEMA = 6
ROOT = "zarr.json"
OBJECTS = "objects"  # in the root attributes: the checksum of every other object
BEGUN = "begun"  # likewise, at an address: what is writing
COMPLETE = "complete"
MANIFEST = "manifest"  # of a folder that is read as the merge of the results it names
_HERE = ("file://", "local://")  # fsspec's names for this machine
_NAMED = 4  # files listed in a message
_OF_A_RUN = re.compile(
    r"zarr\.json|[^/]+/(zarr\.json)?|[^/]+/[^/]+/(zarr\.json|c(/\d+)*/?)?", re.DOTALL
)


def is_address(path: str | Path) -> bool:
    """Whether this is an fsspec address, such as "s3://bucket/result.zarr", rather than a local path."""
    return "://" in str(path) and not str(path).startswith(_HERE)


def as_place(path: str | Path) -> str | Path:
    """An address unchanged, anything else as an absolute path."""
    if not isinstance(path, (str, Path)):
        raise OutputError(f'{path!r} is not a path: give one such as "out/llama.zarr"')
    here = str(path).partition("://")[2] if str(path).startswith(_HERE) else path
    return str(path) if is_address(path) else Path(here).absolute()


def is_beside(name: str) -> bool:
    """Whether a name leads to nothing but what is next to a place, or in a folder next to it."""
    path = PurePosixPath(name)
    return (
        bool(name)
        and "://" not in name
        and "\\" not in name
        and not path.is_absolute()
        and ".." not in path.parts
    )


def beside(place: str | Path, name: str) -> str | Path:
    """The place with this name next to another one."""
    if is_address(place):
        return f"{str(place).rstrip('/').rpartition('/')[0]}/{name}"
    return Path(as_place(place)).parent / name


def filesystem(address: str) -> Any:
    """The file system of an address."""
    import fsspec

    return fsspec.url_to_fs(address)[0]


@dataclass(frozen=True)
class Store:
    """Objects in a folder, or at an address."""

    place: str | Path

    def put(self, name: str, content: bytes) -> None:
        """Write an object, completely or not at all; :meth:`flush` waits until it is on the disk."""
        if isinstance(self.place, Path):
            path = self.place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            return write_file(path, content, flushed=False)
        try:
            filesystem(self.place).pipe_file(f"{self.root}/{name}", content)
        except Exception as error:  # each kind of address has its own errors
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            raise OutputError(f"{name} could not be written to {self.place}: {reason}") from error

    def flush(self, names: Iterable[str]) -> None:
        """Wait until objects are on the disk."""
        if isinstance(self.place, Path):
            flush([self.place / name for name in names])

    def get(self, name: str) -> bytes | None:
        """The content of an object; None if there is none."""
        try:
            if isinstance(self.place, str):
                return bytes(filesystem(self.place).cat_file(f"{self.root}/{name}"))
            return (self.place / name).read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None

    def heads(self, names: Seq[str], count: int) -> list[bytes]:
        """The first bytes of some objects."""
        if isinstance(self.place, str):
            at, n = [f"{self.root}/{name}" for name in names], len(names)
            return list(
                filesystem(self.place).cat_ranges(at, [0] * n, [count] * n, on_error="raise")
            )
        made = []
        for name in names:
            with open(self.place / name, "rb") as stored:
                made.append(stored.read(count))
        return made

    def names(self) -> list[str]:
        """The names of all objects."""
        if isinstance(self.place, str):
            files, root = filesystem(self.place), f"{self.root}/"
            return [str(name).removeprefix(root) for name in files.find(self.root)]
        return (
            [name for name in files_in(self.place) if not name.endswith("/")]
            if self.place.is_dir()
            else []
        )

    def sizes(self) -> dict[str, int]:
        """The size of each object in bytes; refuses anything but plain files, and names with control characters."""
        made: dict[str, int] = {}
        if isinstance(self.place, str):
            files, root = filesystem(self.place), f"{self.root}/"
            for path, about in files.find(self.root, detail=True).items():
                if about.get("type") != "file" or about.get("islink"):
                    raise OutputError(
                        f"{path} at {self.place} is not a plain file, but a stored result contains only plain files"
                    )
                made[path.removeprefix(root)] = int(about.get("size") or 0)
        else:
            for name, entry in _walked(self.place):
                if entry is None:
                    continue
                if not entry.is_file(follow_symlinks=False):
                    what = f"{entry.path} is {_kind(Path(entry.path))}"
                    raise OutputError(f"{what}, but a stored result contains only plain files")
                made[name] = entry.stat(follow_symlinks=False).st_size
        for name in made:
            if plain(name) != name:  # libraries print names in their own warnings
                raise OutputError(
                    f'a file in this result is called "{name}", with control characters, so mechattn did not write it'
                )
        return made

    def begin(self) -> str:
        """Mark an address as being written by mechattn, delete everything else there, and return the mark."""
        who = os.urandom(8).hex()
        about = {"mechattn_schema": SCHEMA, BEGUN: who}
        self.put(
            ROOT, json.dumps({"zarr_format": 3, "node_type": "group", "attributes": about}).encode()
        )
        others = [name for name in self.names() if name != ROOT]
        try:
            if others:
                filesystem(str(self.place)).rm([f"{self.root}/{name}" for name in others])
        except FileNotFoundError:  # another run has begun at the same time
            for name in others:
                self.remove(name)
        return who

    def check_begun(self, who: str) -> None:
        """Refuse an address where another process has begun to write since, as locks do not work there."""
        if attributes_of(self.place).get(BEGUN) != who:
            raise OutputError(
                f"another run has begun to write to {self.place} after this one: wait for it, give this one another "
                "output, or start it again"
            )

    def remove(self, name: str) -> None:
        """Delete an object, if it is there."""
        with suppress(FileNotFoundError):
            if isinstance(self.place, str):
                filesystem(self.place).rm_file(f"{self.root}/{name}")
            else:
                (self.place / name).unlink()

    @property
    def root(self) -> str:
        """The path of an address in its file system."""
        return str(filesystem(str(self.place))._strip_protocol(self.place)).rstrip("/")


def attributes_of(place: str | Path) -> dict[str, Any]:
    """The root attributes of a store; empty if there is none."""
    content = Store(place).get(ROOT)
    return json.loads(content)["attributes"] if content else {}


def seal_of(attrs: Mapping[str, Any]) -> str:
    """A hash of the provenance and of the listing, and so of everything in a result."""
    parts = [attrs["provenance"], sorted(attrs[OBJECTS].items())]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def check_ours(store: Store) -> None:
    """Refuse to replace a Zarr folder that contains anything but a result of mechattn."""
    place = store.place
    files = files_in(place) if isinstance(place, Path) else store.names()
    root = _attributes(store, files)
    if "mechattn_schema" not in root:
        raise OutputError(
            f"{place} exists and is not a stored result; choose another name, or move it away"
        )
    listed = root.get(OBJECTS)
    ours = {ROOT, *(listed if isinstance(listed, dict) else ())}
    ours |= {name[: at + 1] for name in ours for at, letter in enumerate(name) if letter == "/"}
    written = _OF_A_RUN.fullmatch if root.get(BEGUN) else ours.__contains__
    if strangers := sorted(name for name in files if not written(name)):
        raise OutputError(
            f"{place} is a stored result that holds {named(strangers)} too, which mechattn did not write, so it is not "
            "replaced; move that out of it, or choose another name"
        )


def files_in(folder: Path) -> list[str]:
    """The names of all files in a folder, a link to a file too, and of empty folders, which end with "/"."""
    return [
        f"{name}{'' if entry is None or os.path.isfile(entry.path) else ' (not a plain file)'}"
        for name, entry in _walked(folder)
    ]


def named(files: Collection[str]) -> str:
    """Some names, and the number of the others."""
    first = ", ".join(list(files)[:_NAMED])
    return first if len(files) <= _NAMED else f"{first} and {len(files) - _NAMED} more"


def _walked(folder: Path) -> Iterator[tuple[str, os.DirEntry[str] | None]]:
    """Yield what is in a folder, at any depth, with its name; None for an empty folder."""
    waiting = [""]
    while waiting:
        within = waiting.pop()
        with os.scandir(folder / within) as entries:
            found = list(entries)
        if not found and within:
            yield within, None
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                waiting.append(f"{within}{entry.name}/")
            else:
                yield f"{within}{entry.name}", entry


def _attributes(store: Store, files: Collection[str]) -> dict[str, Any]:
    """The attributes at the root of a Zarr folder; only JSON is decoded."""
    if ROOT not in files:
        return {}
    try:
        content = store.get(ROOT)
        if not content and not any(store.get(name) for name in files if not name.endswith("/")):
            return {"mechattn_schema": 0, BEGUN: True}  # power was lost; there is nothing to lose
        found = json.loads(content or b"")["attributes"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _kind(path: Path) -> str:
    """The kind of a path that is not a plain file."""
    mode = path.lstat().st_mode
    kinds = {stat.S_ISLNK: "a link", stat.S_ISFIFO: "a named pipe", stat.S_ISSOCK: "a socket"}
    return next((word for is_kind, word in kinds.items() if is_kind(mode)), "a device")
