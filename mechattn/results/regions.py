"""The regions of a sharded Zarr array that chunks of a run are written to: one object per chunk, and no other chunk's.

Along the prompts an object is as long as a chunk of the run. Within it the cells lie one after the other: each
condition and layer is a piece of its own with a checksum (CRC-32C), so that one condition of some layers is read
without the rest. Dimensions that grow with the prompts (``pos``, ``key``) are cut every 256, so that no chunk needs to
know how long the longest prompt of the others is. Nothing is packed: every object has the size that its array declares.
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
_WIDTH = 256  # of an object, along a dimension that grows
ALONE = ("condition", "layer")
INDEX, CHECKSUM = 16, 4  # bytes that a piece takes in the index, and of a checksum


@dataclass(frozen=True)
class Region:
    """How an array is cut.

    Args:
        dims: Its dimensions; the first is "prompt".
        shape: Of all of it.
        dtype: Of its numbers, such as "float32".
        chunk: Prompts an object.
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
        """The shape of what is read at a time."""
        return tuple(1 if dim in ALONE else size for dim, size in zip(self.dims, self.shard))

    @property
    def object_bytes(self) -> int:
        """Of each object."""
        pieces = prod(whole // part for whole, part in zip(self.shard, self.piece))
        each = prod(self.piece) * np.dtype(self.dtype).itemsize + CHECKSUM
        return pieces * (each + INDEX) + CHECKSUM

    def create(self, store: Any, name: str) -> Any:
        """The array in a store of Zarr; nothing but its metadata is written."""
        import zarr
        from zarr.codecs import Crc32cCodec

        return zarr.create_array(
            store, name=name, shape=self.shape, shards=self.shard, chunks=self.piece, dtype=self.dtype,
            fill_value=FILL[np.dtype(self.dtype).kind], compressors=[Crc32cCodec()], filters=None, zarr_format=3,
            dimension_names=self.dims, attributes=dict(self.attrs), config={"write_empty_chunks": True},
        )  # fmt: skip

    def objects(self) -> Iterator[tuple[int, str]]:
        """The number of the chunk and the name of every object, of what the shape can hold."""
        grid = [range(ceil(size / part)) for size, part in zip(self.shape, self.shard)]
        for at in product(*grid):
            yield at[0], "/".join(["c", *map(str, at)])

    def as_json(self) -> dict[str, Any]:
        """For a header."""
        about = {"dims": list(self.dims), "shape": list(self.shape), "dtype": self.dtype, "chunk": self.chunk}
        return about | {"attrs": dict(self.attrs)}

    @classmethod
    def from_json(cls, about: Mapping[str, Any]) -> Region:
        """From a header."""
        return cls(tuple(about["dims"]), tuple(about["shape"]), about["dtype"], about["chunk"], about["attrs"])


def in_regions(variable: xr.Variable) -> bool:
    """Whether a variable lies in regions: numbers of each prompt, more than one."""
    return variable.dims[:1] == ("prompt",) and variable.ndim > 1 and variable.dtype.kind in "fi"


def region_of(variable: xr.Variable, chunk: int, half: bool) -> Region:
    """The region of a variable; ``half`` keeps numbers with a point in 16 bits."""
    dtype = "float16" if half and variable.dtype.kind == "f" else variable.dtype.name
    return Region(tuple(map(str, variable.dims)), variable.shape, dtype, chunk, variable.attrs)


def encoded(values: np.ndarray, region: Region, number: int) -> dict[str, bytes]:
    """The objects of one chunk: their names, and what is in them.

    Args:
        values: The chunk's numbers; the last one may have fewer prompts than the others.
        region: Of the whole array; its shape along the prompts doesn't count.
        number: Of the chunk.
    """
    from zarr.storage import MemoryStore

    made: dict[str, Any] = {}
    alone = Region(region.dims, values.shape, region.dtype, region.chunk, {})
    alone.create(MemoryStore(made), "x")[...] = values.astype(region.dtype)
    found = {}
    for name, content in made.items():
        if name.startswith("x/c/"):
            at = name.split("/")[3:]
            found["/".join(["c", str(number), *at])] = content.to_bytes()
    return found


def object_digest(content: bytes) -> str:
    """By which an object is known."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def widest(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> dict[str, Any]:
    """The regions of two chunks of a run as those of both: as wide as the wider one.

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
