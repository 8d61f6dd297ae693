"""The objects of a stored result, in a folder or at an address; the root, which lists them, makes them a result."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mechattn.errors import OutputError
from mechattn.store.addresses import filesystem
from mechattn.store.atomic_writes import flush, write_file
from mechattn.store.own_files import files_in

SCHEMA = 6
ROOT = "zarr.json"
OBJECTS = "objects"  # in the root attributes: the checksum of every other object
BEGUN = "begun"  # likewise, at an address: what is writing
COMPLETE = "complete"


@dataclass(frozen=True)
class Store:
    """Objects in a folder, or at an address.

    Args:
        place: The folder or address.
    """

    place: str | Path

    def put(self, name: str, content: bytes) -> None:
        """Write an object, completely or not at all; :meth:`flush` waits until it is on the disk."""
        if isinstance(self.place, Path):
            path = self.place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            return write_file(path, content, flushed=False)
        try:
            filesystem(self.place).pipe_file(f"{self._root}/{name}", content)
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
                content: bytes = filesystem(self.place).cat_file(f"{self._root}/{name}")
                return content
            return (self.place / name).read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None

    def names(self) -> list[str]:
        """The names of all objects."""
        if isinstance(self.place, str):
            files = filesystem(self.place)
            root = self._root + "/"
            return [str(name).removeprefix(root) for name in files.find(self._root)]
        return [name for name in files_in(self.place) if not name.endswith("/")] if self.place.is_dir() else []

    def begin(self) -> str:
        """Mark an address as being written by mechattn, delete everything else there, and return the mark."""
        who = os.urandom(8).hex()
        about = {"mechattn_schema": SCHEMA, BEGUN: who}
        self.put(ROOT, json.dumps({"zarr_format": 3, "node_type": "group", "attributes": about}).encode())
        others = [name for name in self.names() if name != ROOT]
        try:
            if others:
                filesystem(str(self.place)).rm([f"{self._root}/{name}" for name in others])
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
                filesystem(self.place).rm_file(f"{self._root}/{name}")
            else:
                (self.place / name).unlink()

    @property
    def _root(self) -> str:
        return str(filesystem(str(self.place))._strip_protocol(self.place)).rstrip("/")


def attributes_of(place: str | Path) -> dict[str, Any]:
    """The root attributes of a store; empty if there is none."""
    content = Store(place).get(ROOT)
    found: dict[str, Any] = json.loads(content)["attributes"] if content else {}
    return found


def seal_of(attrs: Mapping[str, Any]) -> str:
    """A hash of the provenance and of the listing, and so of everything in a result."""
    parts = [attrs["provenance"], sorted(attrs[OBJECTS].items())]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
