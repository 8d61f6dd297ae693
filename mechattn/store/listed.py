"""Reads the objects that a result lists, and no others: each is compared with the listing whenever it is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping

import numpy as np
from zarr.abc.store import ByteRequest
from zarr.abc.store import Store as ZarrStore
from zarr.core.buffer import Buffer, BufferPrototype

from mechattn.errors import OutputError
from mechattn.store.objects import ROOT, Store, attributes_of
from mechattn.store.pieces import CHECKSUM, Region, object_digest
from mechattn.store.required_parts import segments_problem

_SEGMENTS = "sequences/segment_index"


class Listed(ZarrStore):
    """The objects of a result as a store of Zarr's.

    Args:
        store: Where they are.
        objects: The checksum of each.
        regions: How the arrays are cut.
        sealed: The digest of the result when it was opened.
        where: Its name in messages.
    """

    supports_writes = supports_deletes = False
    supports_listing = True

    def __init__(
        self, store: Store, objects: Mapping[str, str], regions: Mapping[str, Region], sealed: object, where: object
    ) -> None:
        super().__init__(read_only=True)
        self.store, self.objects, self.regions, self.sealed, self.where = store, objects, regions, sealed, where

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Listed) and (self.store, self.sealed) == (other.store, other.sealed)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:  # fmt: skip
        """Read an object, and compare it with the listing."""
        if key not in self.objects and key != ROOT:
            return None
        return prototype.buffer.from_bytes(await asyncio.to_thread(self._read, key))

    def _read(self, key: str) -> bytes:
        try:
            content = self.store.get(key)
            if key == ROOT:
                return content or b""
            why = self._problem(key, content)
            if content is not None and not why:
                return content
        except Exception as error:  # files and the network have their own errors
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
        if attributes_of(self.store.place).get("digest") != self.sealed:
            raise OutputError(f"the result at {self.where} was replaced or deleted after it was opened: load it again")
        raise OutputError(damaged(self.where, key, self.regions, str(why)))

    def _problem(self, key: str, content: bytes | None) -> str | None:
        if content is None or object_digest(key, content) != self.objects[key]:
            return "it is missing" if content is None else "it is not what was written here"
        if not key.startswith(f"{_SEGMENTS}/c"):
            return None
        return segments_problem(np.frombuffer(content[:-CHECKSUM], np.dtype(self.regions[_SEGMENTS].dtype)))

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:  # fmt: skip
        """Objects are read as wholes."""
        return [await self.get(key, prototype) for key, _ in key_ranges]

    async def exists(self, key: str) -> bool:
        """Whether an object is listed."""
        return key in self.objects or key == ROOT

    async def set(self, key: str, value: Buffer) -> None:
        """Nothing is written."""
        self._check_writable()

    async def delete(self, key: str) -> None:
        """Nothing is deleted."""
        self._check_writable()

    async def list(self) -> AsyncIterator[str]:
        """Yield the names of all objects."""
        for name in (ROOT, *self.objects):
            yield name

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names that begin so."""
        for name in (ROOT, *self.objects):
            if name.startswith(prefix):
                yield name

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield what is in a folder."""
        start = f"{prefix.rstrip('/')}/" if prefix else ""
        for name in {name[len(start) :].partition("/")[0] for name in (ROOT, *self.objects) if name.startswith(start)}:
            yield name


def damaged(where: object, name: str, regions: Mapping[str, Region], why: str) -> str:
    """The message for an object that cannot be read."""
    array, _, at = name.rpartition("/c/")
    region = regions.get(array)
    if region is None or region.dims[:1] != ("prompt",) or len(region.dims) < 2:
        return f"the result at {where} is damaged: {name}: {why}; run it again, or restore a copy"
    number = int(at.partition("/")[0])
    first, last = number * region.chunk, min((number + 1) * region.chunk, region.shape[0]) - 1
    return (
        f"chunk {number} of {array.replace('/', '.')} in the result at {where} is damaged ({why}): prompts {first} to "
        f"{last}, counted from 0. Calling run_job with the same job computes only that chunk again"
    )
