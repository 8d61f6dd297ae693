"""Regions of a sharded Zarr array, to which the chunks of a run are written: each object belongs to one chunk.

Along the prompts, an object is as long as a chunk of the run. Within it, each condition, layer and segment is a
separate piece with a checksum (CRC-32C), so one segment under one condition can be read without the rest; its layers
lie one after another, and are read at once. Dimensions that grow with the
prompts (``pos``, ``key``) are split every 256 positions, so no chunk needs to know the longest prompt of the others.
Nothing is compressed: every object has the size that its array declares.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import product
from math import ceil, prod
from typing import Any

import numpy as np
import xarray as xr

GROW = ("pos", "key", "original_key")  # dimensions as long as the longest prompt
FILL: Mapping[str, Any] = {"f": np.nan, "i": -2}
_WIDTH = 256  # positions per object, along a dimension that grows
ALONE = ("condition", "segment", "layer")
_ALONE_BEFORE = ("condition", "layer")  # in stores of earlier versions
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
        alone: The dimensions along which each piece has one label, the last one changing from piece to piece.
    """

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    chunk: int
    attrs: Mapping[str, Any]
    alone: tuple[str, ...] = ALONE

    @property
    def shard(self) -> tuple[int, ...]:
        """The shape of an object."""
        inner = [_WIDTH if dim in GROW else size for dim, size in zip(self.dims[1:], self.shape[1:])]
        return (self.chunk, *inner)

    @property
    def piece(self) -> tuple[int, ...]:
        """The shape of a piece, which is read as a whole."""
        return tuple(1 if dim in self.alone else size for dim, size in zip(self.dims, self.shard))

    @property
    def pieces(self) -> tuple[int, ...]:
        """The number of pieces of an object along each dimension."""
        return tuple(whole // part for whole, part in zip(self.shard, self.piece))

    @property
    def object_bytes(self) -> int:
        """The size of each object."""
        return prod(self.pieces) * (self.piece_bytes + INDEX) + CHECKSUM

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

    def objects(self) -> Iterator[tuple[int, str]]:
        """Yield the chunk index and the name of every object of this shape."""
        grid = [range(ceil(size / part)) for size, part in zip(self.shape, self.shard)]
        for at in product(*grid):
            yield at[0], "/".join(["c", *map(str, at)])

    def as_json(self) -> dict[str, Any]:
        """Return the region in the form stored in a header."""
        about = {"dims": list(self.dims), "shape": list(self.shape), "dtype": self.dtype, "chunk": self.chunk}
        return about | {"attrs": dict(self.attrs), "alone": list(self.alone)}

    @classmethod
    def from_json(cls, about: Mapping[str, Any]) -> Region:
        """Restore a region from a header."""
        alone = tuple(about.get("alone", _ALONE_BEFORE))
        return cls(tuple(about["dims"]), tuple(about["shape"]), about["dtype"], about["chunk"], about["attrs"], alone)

    @classmethod
    def stored(cls, dims: Any, shape: Any, dtype: str, chunk: int, attrs: Mapping[str, Any], piece: Any) -> Region:
        """Restore a region from what a Zarr array declares.

        Raises:
            ValueError: No version of mechattn divides an array into such pieces.
        """
        for alone in (ALONE, _ALONE_BEFORE):
            made = cls(tuple(dims), tuple(shape), dtype, chunk, attrs, alone)
            if made.piece == tuple(piece):
                return made
        raise ValueError("it is divided differently")


def in_regions(variable: xr.Variable) -> bool:
    """Whether a variable is stored in regions: it has more than one number per prompt."""
    return variable.dims[:1] == ("prompt",) and variable.ndim > 1 and variable.dtype.kind in "fi"


def region_of(variable: xr.Variable, chunk: int, half: bool) -> Region:
    """The region of a variable; ``half`` stores floating-point numbers in 16 bits."""
    dtype = "float16" if half and variable.dtype.kind == "f" else variable.dtype.name
    return Region(tuple(map(str, variable.dims)), variable.shape, dtype, chunk, variable.attrs)


def encoded(values: np.ndarray, region: Region, number: int) -> dict[str, bytes]:
    """Encode one chunk as objects: their names and contents.

    Args:
        values: The chunk's numbers; the last chunk may have fewer prompts than the others.
        region: The region of the whole array; the number of prompts in its shape is ignored.
        number: The index of the chunk.
    """
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
    """The content of an object, as Zarr's sharding codec defines it: its pieces in any order, and their index.

    Zarr writes pieces along a Morton curve, which scatters the layers of a condition, and takes three times as long.
    """
    alone = [region.dims.index(dim) for dim in region.alone if dim in region.dims]
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
    return b"".join([made.tobytes(), index.tobytes(), checksum(index.tobytes())])


def checksum(content: bytes) -> bytes:
    """The CRC-32C that follows a piece or an index."""
    import google_crc32c  # the library that Zarr uses

    return google_crc32c.value(content).to_bytes(CHECKSUM, "little")


def object_digest(content: bytes) -> str:
    """The digest that identifies an object's content."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def widest(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> dict[str, Any]:
    """Combine the regions of two chunks of a run: each dimension as long as the longer one.

    Raises:
        ValueError: They differ in anything else.
    """
    one, other = one or {}, other or {}
    if set(one) != set(other):
        raise ValueError(f"one has {sorted(one)}, the other {sorted(other)}")
    made = {}
    for name, ours in one.items():
        theirs = other[name]
        sizes = [max(a, b) if dim in (*GROW, "prompt") else a for dim, a, b in _paired(ours, theirs)]
        if {**ours, "shape": 0} != {**theirs, "shape": 0} or any(
            a != b for dim, a, b in _paired(ours, theirs) if dim not in (*GROW, "prompt")
        ):
            raise ValueError(f"{name} is {ours} in one and {theirs} in the other")
        made[name] = {**ours, "shape": sizes}
    return made


def _paired(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Seq[tuple[str, int, int]]:
    return list(zip(ours["dims"], ours["shape"], theirs["shape"]))
