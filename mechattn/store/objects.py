"""The objects of a stored result: files in a folder, or at an fsspec address such as
"s3://bucket/result.zarr".

A result consists of a root, ``zarr.json``, and the objects that the root lists with their checksums
(CRC-32C). Zarr writes and reads them through :class:`Listing`, which contains only listed objects
and compares each with its checksum when it is read.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
from collections import ChainMap
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import google_crc32c  # the library that Zarr uses
from fsspec.implementations.local import LocalFileSystem
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.storage import MemoryStore

from mechattn.errors import MechattnError, OutputError, reason

SCHEMA = 7
ROOT = "zarr.json"
READS_AT_ONCE = 16

# Files that file managers leave in a folder that somebody opens.
LEFT_BY_FILE_MANAGERS = {".DS_Store", "Thumbs.db", "desktop.ini"}

# The names that Zarr gives to the metadata of groups and arrays, and to their objects, such as
# "sequences/place/c/0".
_OBJECT_NAME = re.compile(r"(.+/)?(zarr\.json|c(/\d+)*)")


class DamagedResult(OutputError):
    """A stored result is not as it was written."""


@dataclass(frozen=True)
class Location:
    """Where a result is stored: a folder of this machine, or an address, where files cannot be
    renamed.

    Args:
        name: The absolute path of the folder, or the fsspec address.
    """

    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def folder(self) -> Path | None:
        """The folder; None for an address."""
        if "://" in self.name:
            return None
        return Path(self.name)

    @property
    def file_system(self) -> Any:
        """The fsspec file system that the location is in."""
        if self.folder:
            return LocalFileSystem(auto_mkdir=True)
        return fsspec.url_to_fs(self.name)[0]

    @property
    def path(self) -> str:
        """The path of the location in its file system."""
        # The method that url_to_fs calls. url_to_fs itself would read a "::" in the name of a
        # folder as a chain of file systems.
        return str(self.file_system._strip_protocol(self.name)).rstrip("/")

    def object_path(self, name: str) -> str:
        """The path of an object in the file system."""
        return f"{self.path}/{name}"

    def exists(self) -> bool:
        """Whether anything is there."""
        return bool(self.file_system.exists(self.path))

    def is_same(self, other: Location) -> bool:
        """Whether both are one location, even if it is written differently: "memory://r.zarr" is
        "memory:///r.zarr"."""
        return type(self.file_system) is type(other.file_system) and self.path == other.path

    def read(self, name: str) -> bytes | None:
        """The content of an object; None if there is no such object."""
        try:
            return bytes(self.file_system.cat_file(self.object_path(name)))
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write an object. It is not flushed: ``write_whole`` flushes a complete folder."""
        self.file_system.pipe_file(self.object_path(name), content)

    def sizes(self) -> dict[str, int]:
        """The size of each file in bytes, without those that file managers leave.

        Raises:
            OutputError: There is a link, a pipe or a device, which may not be read safely.
        """
        folder = self.object_path("")
        self.file_system.invalidate_cache()
        sizes = {}
        for path, details in self.file_system.find(folder, detail=True).items():
            if details["type"] != "file":
                raise OutputError(
                    f"{path} is not a plain file, but a stored result contains only plain files"
                )
            name = path.removeprefix(folder)
            if name.rpartition("/")[2] not in LEFT_BY_FILE_MANAGERS:
                sizes[name] = int(details["size"])

        return sizes

    def attributes(self) -> dict[str, Any]:
        """The attributes of the root; empty if there is no root, or its content has none."""
        try:
            # A missing root is read as b"", which is not JSON.
            return dict(json.loads(self.read(ROOT) or b"")["attributes"])
        except (ValueError, LookupError, TypeError, RecursionError):
            return {}

    def begin(self) -> str:
        """Mark an address as being written, delete the old objects there, and return the mark."""
        mark = os.urandom(8).hex()
        self.write(ROOT, root_content({"mechattn_schema": SCHEMA, "writing": mark}))
        for name in self.sizes().keys() - {ROOT}:
            with suppress(FileNotFoundError):  # another run may delete it at the same time
                self.file_system.rm_file(self.object_path(name))
        return mark

    def check_begun(self, mark: str) -> None:
        """Check that no other process has begun to write here since ``begin``: there are no locks
        at an address.

        Raises:
            OutputError: Another process has begun.
        """
        if self.attributes().get("writing") != mark:
            raise OutputError(
                f"another run has begun to write to {self} after this one: wait for it, give this "
                "one another output, or start it again"
            )

    def check_ours(self) -> None:
        """Check that a stored result is here and no other files, so that it can be replaced.

        Raises:
            OutputError: Something else is here, or the result contains other files.
        """
        attributes = self.attributes()
        listed_names = attributes.get("objects", {})  # an unfinished result has no listing yet
        if "mechattn_schema" not in attributes or not isinstance(listed_names, dict):
            raise OutputError(
                f"{self} exists and is not a stored result; choose another name, or move it away"
            )
        foreign_names = self.sizes().keys() - {ROOT, *listed_names}
        if "writing" in attributes:
            foreign_names = {name for name in foreign_names if not _OBJECT_NAME.fullmatch(name)}
        if foreign_names:
            raise OutputError(
                f"{self} is a stored result that holds {min(foreign_names)} too, which mechattn did"
                " not write, so it is not replaced; move that file elsewhere, or choose another"
                " name"
            )


def location_of(path: str | Path) -> Location:
    """The folder or address of a result; links are followed.

    Raises:
        OutputError: The path is neither, or an address was made into a ``Path``.
    """
    if not isinstance(path, (str, Path)):
        raise OutputError(f'{path!r} is not a path: give one such as "out/llama.zarr"')
    text = re.sub(r"\A(file|local)://", "", str(path))  # both are this machine
    protocol, _, path_at_address = text.rpartition("://")
    if not text or (protocol and not path_at_address.strip("/")):
        raise OutputError(
            f'"{path}" names no folder and no address: give one such as "out/llama.zarr" or'
            ' "s3://bucket/llama.zarr"'
        )
    # Path("s3://bucket") is "s3:/bucket", which would be a folder of this machine.
    if isinstance(path, Path) and not path.drive and re.match(r"[^/]+:(/|\Z)", text):
        raise OutputError(
            f"{path!r} is a folder named {path.parts[0]!r}: give an address as a text, such as"
            ' "s3://bucket/llama.zarr"'
        )
    if protocol:
        return Location(text.rstrip("/"))
    try:
        return Location(os.path.realpath(text))
    except ValueError as error:
        raise OutputError(f"{text!r} cannot be the name of a file: {error}") from None


class Listing(MemoryStore):
    """The listed objects of a result, as a Zarr store.

    A MemoryStore has a dictionary of contents, whose keys tell Zarr which objects exist. Here it
    has the checksums in place of the contents, and the root, which is not in the listing. Zarr
    writes a group before its arrays, so what it would add ``if_not_exists`` is listed already.

    Args:
        location: Where the objects are.
        checksums: The checksums of existing objects; each object that is written adds its own.
        read_only: Refuse to write.
    """

    def __init__(
        self, location: Location, checksums: Mapping[str, str], *, read_only: bool
    ) -> None:
        self.location = location
        self.checksums = dict(checksums)
        names = ChainMap(self.checksums, {ROOT: ""})
        super().__init__(names, read_only=read_only)  # type: ignore[arg-type]

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: Any = None
    ) -> Buffer | None:
        """Read an object for Zarr."""
        return await asyncio.to_thread(
            self.get_sync, key, prototype=prototype, byte_range=byte_range
        )

    def get_sync(
        self, key: str, *, prototype: BufferPrototype | None = None, byte_range: Any = None
    ) -> Buffer | None:
        """As :meth:`get`, which newer versions of Zarr may call instead."""
        if byte_range is not None:  # Zarr reads ranges only of sharded arrays, which we never write
            raise NotImplementedError("an object of a result is read whole")
        if key == ROOT:  # Zarr asks for it before it is written, and needs none of its attributes
            content = root_content({})
        elif key in self.checksums:
            content = self.read(key)
        else:
            return None
        return (prototype or default_buffer_prototype()).buffer.from_bytes(content)

    async def set(self, key: str, value: Buffer, byte_range: Any = None) -> None:
        """Write an object for Zarr, which never writes part of one."""
        await asyncio.to_thread(self.set_sync, key, value)

    def set_sync(self, key: str, value: Buffer) -> None:
        """Write an object and list it. The root is left to ``write_root``."""
        self._check_writable()
        if key == ROOT:
            return
        content = value.to_bytes()
        self.location.write(key, content)
        self.checksums[key] = checksum(content)

    def read(self, name: str) -> bytes:
        """Read a listed object, and compare it with its checksum.

        Raises:
            OutputError: The object cannot be read.
            DamagedResult: The object is missing, or has another checksum.
        """
        with errors_of_files(f"{name} of {self.location} cannot be read", "try it again"):
            content = self.location.read(name)

        if content is None:
            raise damage(self.location, name, "it is missing")
        if checksum(content) != self.checksums[name]:
            raise damage(self.location, name, "it is not what was written here")
        return content

    def check(self) -> None:
        """Read every object once, and compare it with its checksum."""
        with ThreadPoolExecutor(READS_AT_ONCE) as pool:
            # Each content becomes a bool, so that the list does not keep it in memory.
            list(pool.map(lambda name: bool(self.read(name)), self.checksums))


@contextmanager
def errors_of_files(failure: str, advice: str) -> Iterator[None]:
    """Raise any error of files, codecs or the network within a ``with`` block as an OutputError.

    Every kind of address has its own classes of errors, so all are caught; ours are left as they
    are.

    Args:
        failure: What the error prevents, as a clause.
        advice: What the user can do, as a clause.

    Raises:
        OutputError: There was an error.
    """
    try:
        yield
    except MechattnError:
        raise
    except Exception as error:
        # Without its cause, as an address in it may contain a password.
        raise OutputError(f"{failure} ({reason(error)}); {advice}") from None


def checksum(content: bytes) -> str:
    """The CRC-32C of some bytes."""
    return f"{google_crc32c.value(content):08x}"


def damage(location: Location, name: str, fault: str) -> DamagedResult:
    """The error for an object or an array that is not as it was written."""
    return DamagedResult(
        f"the result at {location} is damaged: {name}: {fault}. Load it again if it was replaced "
        "meanwhile; otherwise run it again, or restore a copy"
    )


def digest_of(provenance: str, checksums: Mapping[str, str]) -> str:
    """A hash of the provenance and the checksums, and so of everything in a stored result."""
    content = json.dumps([provenance, sorted(checksums.items())])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def root_content(attributes: dict[str, Any]) -> bytes:
    """The root of a result: a group with attributes, as Zarr writes it."""
    group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    return json.dumps(group, indent=1).encode()
