"""Regions of a sharded Zarr array, to which the chunks of a run are written: each object belongs to one chunk.

Along the prompts, an object is as long as a chunk of the run. Within it, each condition, layer and segment is a
separate piece with a checksum (CRC-32C), so one segment under one condition can be read without the rest; its layers
lie one after another, and are read at once. Dimensions that grow with the prompts (``pos``, ``key``) are split every
256 positions, so no chunk needs to know the longest prompt of the others. Nothing is compressed: every object has the
size that its array declares. Between the pieces and Zarr's index, the checksums of all pieces are stored once more,
which Zarr skips. The digest of an object is a hash of these and the index: it can be checked whichever piece is read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import ceil, prod
from typing import Any

import numpy as np
import xarray as xr

from mechattn.results.merge import GROW

FILL: Mapping[str, Any] = {"f": np.nan, "i": -2}
_WIDTH = 256  # positions per object, along a dimension that grows
ALONE = ("condition", "segment", "layer")  # each piece has one label of these; the last changes from piece to piece
INDEX, CHECKSUM = 16, 4  # bytes per piece in the index, and per checksum


@dataclass(frozen=True)
class Region:
    """How an array is split.

    Args:
        dims: Its dimensions; the first is "prompt".
        shape: The shape of the whole array.
        dtype: The type of its numbers, such as "float32".
        chunk: The number of prompts per object.
        attrs: Its attributes.
    """

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    chunk: int
    attrs: Mapping[str, Any]

    @property
    def shard(self) -> tuple[int, ...]:
        """The shape of an object."""
        inner = [_WIDTH if dim in GROW else size for dim, size in zip(self.dims[1:], self.shape[1:])]
        return (self.chunk, *inner)

    @property
    def piece(self) -> tuple[int, ...]:
        """The shape of a piece, which is read as a whole."""
        return tuple(1 if dim in ALONE else size for dim, size in zip(self.dims, self.shard))

    @property
    def pieces(self) -> tuple[int, ...]:
        """The number of pieces of an object along each dimension."""
        return tuple(whole // part for whole, part in zip(self.shard, self.piece))

    @property
    def object_bytes(self) -> int:
        """The size of each object."""
        return prod(self.pieces) * self.piece_bytes + self.tail_bytes

    @property
    def tail_bytes(self) -> int:
        """The size of what follows the pieces: their checksums, the index and its checksum."""
        return prod(self.pieces) * (CHECKSUM + INDEX) + CHECKSUM

    @property
    def piece_bytes(self) -> int:
        """The size of each piece, with its checksum."""
        return prod(self.piece) * np.dtype(self.dtype).itemsize + CHECKSUM

    def create(self, store: Any, name: str) -> Any:
        """Create the array in a Zarr store; only its metadata is written."""
        import zarr
        from zarr.codecs import Crc32cCodec

        return zarr.create_array(
            store, name=name, shape=self.shape, shards=self.shard, chunks=self.piece, dtype=self.dtype,
            fill_value=FILL[np.dtype(self.dtype).kind], compressors=[Crc32cCodec()], filters=None, zarr_format=3,
            dimension_names=self.dims, attributes=dict(self.attrs), config={"write_empty_chunks": True},
        )  # fmt: skip

    def chunk_of(self, name: object) -> int | None:
        """The chunk of an object, given its name within the array; None if the array has no such object."""
        places = str(name).split("/")[1:]
        if not re.fullmatch(r"c(/(0|[1-9]\d{0,17}))+", str(name), re.ASCII) or len(places) != len(self.shape):
            return None
        inside = all(int(at) * part < size for at, part, size in zip(places, self.shard, self.shape))
        return int(places[0]) if inside else None

    def as_json(self) -> dict[str, Any]:
        """Return the region in the form stored in a header."""
        about = {"dims": list(self.dims), "shape": list(self.shape), "dtype": self.dtype, "chunk": self.chunk}
        return about | {"attrs": dict(self.attrs)}

    @classmethod
    def from_json(cls, about: Mapping[str, Any]) -> Region:
        """Restore a region from a header."""
        return cls(tuple(about["dims"]), tuple(about["shape"]), about["dtype"], about["chunk"], about["attrs"])


def in_regions(variable: xr.Variable) -> bool:
    """Whether a variable is stored in regions: it has more than one number per prompt."""
    return variable.dims[:1] == ("prompt",) and variable.ndim > 1 and variable.dtype.kind in "fi"


def region_of(variable: xr.Variable, chunk: int, half: bool) -> Region:
    """The region of a variable; ``half`` stores floating-point numbers in 16 bits."""
    dtype = "float16" if half and variable.dtype.kind == "f" else variable.dtype.name
    return Region(tuple(map(str, variable.dims)), variable.shape, dtype, chunk, variable.attrs)


def encoded(values: np.ndarray, region: Region, number: int) -> dict[str, bytes]:
    """Encode one chunk as objects: their names and contents."""
    shard, dtype = region.shard, np.dtype(region.dtype).newbyteorder("<")
    made = {}
    for at in product(*(range(ceil(size / part)) for size, part in zip(values.shape[1:], shard[1:]))):
        some = tuple(slice(i * part, (i + 1) * part) for i, part in zip(at, shard[1:]))
        whole = np.full(shard, FILL[dtype.kind], dtype)
        part = values[(slice(None), *some)]
        whole[tuple(slice(size) for size in part.shape)] = part
        made["/".join(["c", str(number), *map(str, at)])] = _object(whole, region)
    return made


def _object(values: np.ndarray, region: Region) -> bytes:
    """The content of an object, which Zarr can read: its pieces in any order, their checksums, and the index."""
    alone = [region.dims.index(dim) for dim in ALONE if dim in region.dims]
    rows = np.moveaxis(values, alone, range(len(alone))).reshape(prod(region.pieces), -1)
    rows = np.ascontiguousarray(rows).view(np.uint8)
    made = np.empty((len(rows), rows.shape[1] + CHECKSUM), np.uint8)
    made[:, :-CHECKSUM] = rows
    for row in made:
        row[-CHECKSUM:] = np.frombuffer(checksum(row[:-CHECKSUM].tobytes()), np.uint8)
    index = np.empty((len(rows), 2), "<u8")
    order = np.arange(len(rows)).reshape([region.pieces[axis] for axis in alone])
    index[:, 0] = order.transpose(np.argsort(alone)).ravel() * made.shape[1]
    index[:, 1] = made.shape[1]
    return b"".join([made.tobytes(), made[:, -CHECKSUM:].tobytes(), index.tobytes(), checksum(index.tobytes())])


def checksum(content: bytes) -> bytes:
    """The CRC-32C that follows a piece or an index."""
    import google_crc32c  # the library that Zarr uses

    return google_crc32c.value(content).to_bytes(CHECKSUM, "little")


def tail_digest(tail: bytes) -> str:
    """The digest that identifies an object: of all that follows its pieces."""
    return hashlib.blake2b(tail, digest_size=8).hexdigest()


def object_digest(content: bytes) -> str | None:
    """The digest of an object; None if a piece does not match its checksum, or this is no object."""
    size = int.from_bytes(content[-INDEX // 2 - CHECKSUM : -CHECKSUM], "little")  # of a piece, in the index
    count, rest = divmod(len(content) - CHECKSUM, size + CHECKSUM + INDEX)
    if rest or count < 1 or size <= CHECKSUM:
        return None
    tail = content[count * size :]
    ends = range(size, count * size + 1, size)
    whole = all(
        checksum(content[end - size : end - CHECKSUM]) == content[end - CHECKSUM : end] == tail[at : at + CHECKSUM]
        for at, end in zip(range(0, count * CHECKSUM, CHECKSUM), ends)
    )
    return tail_digest(tail) if whole else None
