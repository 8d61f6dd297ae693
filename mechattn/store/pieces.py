"""How an array is cut into pieces, one object each: a chunk of the run's prompts, all layers of one segment.

A piece has 256 KiB to 4 MiB where the array allows it: small arrays are not cut by segment and condition, large ones by
layer and head too. Dimensions that grow with the prompts (``pos``, ``key``) are cut every 256 positions, so no chunk
needs to know the longest prompt of the others. Nothing is compressed, so every object has the size that its array
declares, and ends with Zarr's checksum (CRC-32C), by which the listing in the root knows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.results.digest import TEXT
from mechattn.results.merge import GROW

if TYPE_CHECKING:
    import xarray as xr

FILL: Mapping[str, Any] = {"f": np.nan, "i": -2}
CHECKSUM = 4  # bytes at the end of an object
LEAST, MOST = 2**18, 2**22  # bytes of a piece, where possible
WIDTH = 256  # positions in a piece, along a dimension that grows


@dataclass(frozen=True)
class Region:
    """How an array is cut.

    Args:
        dims: Its dimensions; if the first is "prompt" and there are others, it is cut, else it is one piece.
        shape: Its shape.
        dtype: The type of its numbers, such as "float32"; "text".
        chunk: The number of prompts in a piece.
        attrs: Its attributes.
        width: The number of positions in a piece.
    """

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    chunk: int
    attrs: Mapping[str, Any]
    width: int = WIDTH

    @property
    def piece(self) -> tuple[int, ...]:
        """The shape of a piece."""
        if self.dims[:1] != ("prompt",) or len(self.dims) < 2:
            return tuple(max(1, size) for size in self.shape)
        sizes = {dim: self.width if dim in GROW else size for dim, size in zip(self.dims, self.shape)}
        sizes |= {"prompt": self.chunk}
        made, each = sizes | {dim: 1 for dim in ("segment", "condition") if dim in sizes}, np.dtype(self.dtype).itemsize
        for dim in ("segment", "condition"):
            if dim in sizes and each * prod(made.values()) < LEAST:
                made[dim] = sizes[dim]
        for dim in ("layer", "head"):
            if dim in sizes and (parts := -(-each * prod(made.values()) // MOST)) > 1:
                made[dim] = -(-sizes[dim] // parts)
        return tuple(max(1, made[dim]) for dim in self.dims)

    def create(self, store: Any, name: str) -> Any:
        """Create the array in a Zarr store; only its metadata is written."""
        import zarr
        from zarr.codecs import Crc32cCodec

        texts = self.dtype == "text"
        return zarr.create_array(
            store, name=name, shape=self.shape, chunks=self.piece, dtype="string" if texts else self.dtype,
            fill_value="" if texts else FILL.get(np.dtype(self.dtype).kind, 0), compressors=[Crc32cCodec()],
            zarr_format=3, dimension_names=self.dims, attributes=dict(self.attrs),
            config={"write_empty_chunks": True},
        )  # fmt: skip

    def names(self) -> Iterator[str]:
        """The names of all objects within the array."""
        for at in product(*(range(-(-size // part)) for size, part in zip(self.shape, self.piece))):
            yield "/".join(["c", *map(str, at)])

    def as_json(self) -> dict[str, Any]:
        """Return the region in the form stored in a header."""
        about = {"dims": list(self.dims), "shape": list(self.shape), "dtype": self.dtype, "chunk": self.chunk}
        return about | {"attrs": dict(self.attrs), "width": self.width}

    @classmethod
    def from_json(cls, about: Mapping[str, Any]) -> Region:
        """Restore a region from a header."""
        return cls(**{**about, "dims": tuple(about["dims"]), "shape": tuple(about["shape"])})


def in_regions(variable: xr.Variable) -> bool:
    """Whether a variable is cut by prompts: it has more than one number per prompt."""
    return variable.dims[:1] == ("prompt",) and variable.ndim > 1 and variable.dtype.kind in "fi"


def region_of(variable: xr.Variable, chunk: int, half: bool = False, width: int = WIDTH) -> Region:
    """The region of a variable; ``half`` stores floating-point numbers in 16 bits."""
    dtype = "text" if variable.dtype.kind in TEXT else variable.dtype.newbyteorder("=").name
    dtype = "float16" if half and variable.dtype.kind == "f" else dtype
    return Region(tuple(map(str, variable.dims)), variable.shape, dtype, chunk, variable.attrs, width)


def encoded(values: np.ndarray, region: Region, number: int = 0) -> Iterator[tuple[str, bytes]]:
    """Yield the objects of one chunk of an array, as Zarr writes them: their names and contents."""
    from dataclasses import replace

    from zarr.storage import MemoryStore

    made: dict[str, Any] = {}
    array = replace(region, shape=values.shape).create(MemoryStore(made), "x")
    array[...] = values.astype(np.dtypes.StringDType()) if region.dtype == "text" else values
    for name in [name for name in made if name.startswith("x/c")]:
        _, _, *rest = name.split("/")
        yield "/".join(["c", *([str(number + int(rest[0])), *rest[1:]] if rest else [])]), made.pop(name).to_bytes()


def checksum(content: bytes) -> bytes:
    """The CRC-32C of some bytes."""
    import google_crc32c  # the library that Zarr uses

    return google_crc32c.value(content).to_bytes(CHECKSUM, "little")


def object_digest(name: str, content: bytes | memoryview) -> str | None:
    """The checksum that identifies an object; None if it does not match its content."""
    if name.endswith(".json"):
        return checksum(bytes(content)).hex()
    found = bytes(content[-CHECKSUM:])
    return found.hex() if checksum(content[:-CHECKSUM]) == found else None  # type: ignore[arg-type]
