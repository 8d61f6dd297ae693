"""Regions of a sharded Zarr array, to which the chunks of a run are written: each object belongs to one chunk.

Along the prompts, an object is as long as a chunk of the run. Within it, each condition and layer is a separate piece
with a checksum (CRC-32C), so one condition of some layers can be read without the rest. Dimensions that grow with the
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
ALONE = ("condition", "layer")
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
        each = prod(self.piece) * np.dtype(self.dtype).itemsize + CHECKSUM
        return prod(self.pieces) * (each + INDEX) + CHECKSUM

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
    """Encode one chunk as objects: their names and contents.

    Args:
        values: The chunk's numbers; the last chunk may have fewer prompts than the others.
        region: The region of the whole array; the number of prompts in its shape is ignored.
        number: The index of the chunk.
    """
    from zarr.storage import MemoryStore

    made: dict[str, Any] = {}
    alone = Region(region.dims, values.shape, region.dtype, region.chunk, {})
    alone.create(MemoryStore(made), "x")[...] = values.astype(region.dtype)
    found = {}
    for name, content in made.items():
        if name.startswith("x/c/"):
            at = name.split("/")[3:]
            found["/".join(["c", str(number), *at])] = _in_order(content.to_bytes(), prod(region.pieces))
    return found


def _in_order(content: bytes, pieces: int) -> bytes:
    """An object with its pieces in the order of its index, so that all layers of a condition are read at once.

    Zarr writes pieces along a Morton curve, which scatters them; readers go by the index.
    """
    import google_crc32c  # the library that Zarr uses

    length = INDEX * pieces
    index = np.frombuffer(content[-length - CHECKSUM : -CHECKSUM], "<u8").reshape(pieces, 2)
    sizes = index[:, 1]
    made = np.stack([np.cumsum(sizes) - sizes, sizes], axis=1).astype("<u8").tobytes()
    parts = [content[start : start + size] for start, size in index.tolist()]
    return b"".join([*parts, made, google_crc32c.value(made).to_bytes(CHECKSUM, "little")])


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
