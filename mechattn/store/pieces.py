"""Writes a result as pieces of its arrays, one object each, a chunk of prompts at a time, from any number of processes.

A piece holds a chunk of the run's prompts and all layers of one segment, in 256 KiB to 4 MiB where the array allows it:
small arrays are not cut by segment and condition, large ones by layer and head too. Dimensions that grow with the
prompts (``pos``, ``key``) are cut every 256 positions, so no chunk needs to know the longest prompt of the others.
Nothing is compressed, so every object has the size that its array declares, and ends with Zarr's checksum (CRC-32C), by
which the listing in the root knows it.

The small arrays of a chunk come back as a result, a receipt, which records the written objects and their checksums.
Finishing writes these arrays, merged, the metadata, and at last the root; no per-prompt number is read or moved again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import prod
from typing import Any

import numpy as np
import xarray as xr
import zarr
from zarr.codecs import Crc32cCodec
from zarr.storage import MemoryStore

from mechattn.errors import OptionError, OutputError
from mechattn.results.arrays import TEXT
from mechattn.results.merge import GROW
from mechattn.results.result import Result, part_of
from mechattn.store.objects import COMPLETE, OBJECTS, ROOT, SCHEMA, Store, seal_of

FILL: Mapping[str, Any] = {"f": np.nan, "i": -2}
CHECKSUM = 4  # bytes at the end of an object
LEAST, MOST = 2**18, 2**22  # bytes of a piece, where possible
WIDTH = 256  # positions in a piece, along a dimension that grows
REGIONS = "regions"  # next to the objects in the provenance of a receipt; a final result has none


@dataclass(frozen=True)
class Region:
    """How an array is cut."""

    dims: tuple[
        str, ...
    ]  # if the first is "prompt" and there are others, it is cut, else it is one piece
    shape: tuple[int, ...]
    dtype: str  # such as "float32"; or "text"
    chunk: int  # prompts in a piece
    attrs: Mapping[str, Any]
    width: int = WIDTH  # positions in a piece

    @property
    def piece(self) -> tuple[int, ...]:
        """The shape of a piece."""
        if self.dims[:1] != ("prompt",) or len(self.dims) < 2:
            return tuple(max(1, size) for size in self.shape)
        sizes = {
            dim: self.width if dim in GROW else size for dim, size in zip(self.dims, self.shape)
        }
        sizes |= {"prompt": self.chunk}
        made, each = (
            sizes | {dim: 1 for dim in ("segment", "condition") if dim in sizes},
            np.dtype(self.dtype).itemsize,
        )
        for dim in ("segment", "condition"):
            if dim in sizes and each * prod(made.values()) < LEAST:
                made[dim] = sizes[dim]
        for dim in ("layer", "head"):
            if dim in sizes and (parts := -(-each * prod(made.values()) // MOST)) > 1:
                made[dim] = -(-sizes[dim] // parts)
        return tuple(max(1, made[dim]) for dim in self.dims)

    def create(self, store: Any, name: str) -> Any:
        """Create the array in a Zarr store; only its metadata is written."""
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


def in_regions(variable: xr.Variable) -> bool:
    """Whether a variable is cut by prompts: it has more than one number per prompt."""
    return variable.dims[:1] == ("prompt",) and variable.ndim > 1 and variable.dtype.kind in "fi"


def written_of(dataset: xr.Dataset) -> list[str]:
    """The names of the variables that are cut by prompts."""
    return [str(label) for label, variable in dataset.variables.items() if in_regions(variable)]


def region_of(variable: xr.Variable, chunk: int, half: bool = False, width: int = WIDTH) -> Region:
    """The region of a variable; ``half`` stores floating-point numbers in 16 bits."""
    dtype = "text" if variable.dtype.kind in TEXT else variable.dtype.newbyteorder("=").name
    dtype = "float16" if half and variable.dtype.kind == "f" else dtype
    return Region(
        tuple(map(str, variable.dims)), variable.shape, dtype, chunk, variable.attrs, width
    )


def encoded(values: np.ndarray, region: Region, number: int = 0) -> Iterator[tuple[str, bytes]]:
    """Yield the objects of one chunk of an array, as Zarr writes them: their names and contents."""
    made: dict[str, Any] = {}
    array = replace(region, shape=values.shape).create(MemoryStore(made), "x")
    array[...] = values.astype(np.dtypes.StringDType()) if region.dtype == "text" else values
    for name in [name for name in made if name.startswith("x/c")]:
        _, _, *rest = name.split("/")
        yield (
            "/".join(["c", *([str(number + int(rest[0])), *rest[1:]] if rest else [])]),
            made.pop(name).to_bytes(),
        )


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


def write_chunk(
    store: Store, number: int, result: Result, chunk: int, half: bool, known: Mapping[str, str] | None = None,
    width: int = WIDTH,
) -> Result:  # fmt: skip
    """Write the per-prompt values of a chunk into its regions; return the rest with a record of what was written."""
    objects, regions, rest = {}, {}, {}
    for name, dataset in result.datasets.items():
        for label in written_of(dataset):
            variable = dataset[label].variable
            region = region_of(variable, chunk, half, width)
            values = variable.values
            if (
                half
                and (abs(values) > np.finfo(np.float16).max).any()
                and variable.dtype.kind == "f"
            ):
                raise OptionError(
                    f'{label} is too large for values="float16"; omit it to keep float32'
                )
            for at, content in encoded(values, region, number):
                path = f"{name}/{label}/{at}"
                objects[path] = content[-CHECKSUM:].hex()
                if known is not None and known.get(path) != objects[path]:
                    raise OutputError(
                        f"{path} differs from the original in {store.place}, perhaps made by another version, on "
                        "another machine or with another number of threads: repair it there, or compute everything "
                        "again (fresh=True)"
                    )
                store.put(path, content)
            regions[f"{name}/{label}"] = asdict(region)
        rest[name] = dataset.drop_vars(written_of(dataset))
    store.flush(objects)
    return Result(rest, {**result.provenance, OBJECTS: objects, REGIONS: regions})


def unlike(store: Store, objects: Mapping[str, str]) -> list[str]:
    """The names of objects that are missing or differ from what was written."""
    return [
        name
        for name, known in objects.items()
        if object_digest(name, store.get(name) or b"") != known
    ]


def finish(
    store: Store, receipt: Result, about: Mapping[str, Any], check: Callable[[], object] = lambda: None
) -> None:  # fmt: skip
    """Write what turns the objects of all chunks into a complete result: other arrays, metadata, and last the root."""
    objects: dict[str, str] = dict(receipt.provenance[OBJECTS])
    count = receipt["sequences"].sizes["prompt"]
    regions = {}
    for name, known in receipt.provenance[REGIONS].items():
        regions[name] = Region(
            **{**known, "dims": tuple(known["dims"]), "shape": (count, *known["shape"][1:])}
        )
    made: dict[str, Any] = {}
    root = zarr.create_group(MemoryStore(made), zarr_format=3)

    def put(name: str, content: bytes) -> None:
        objects[name] = str(object_digest(name, content))
        store.put(name, content)

    for group, dataset in receipt.datasets.items():
        beside = sorted(set(map(str, dataset.coords)) - set(map(str, dataset.dims)))
        attributes = {str(name): value for name, value in dataset.attrs.items()}
        attributes |= {"coordinates": " ".join(beside)} if beside else {}
        stored = root.create_group(group, attributes=attributes)
        for label, variable in dataset.variables.items():
            region = region_of(variable, 1)
            region.create(stored.store_path, str(label))
            for at, content in encoded(variable.values, region):
                put(f"{group}/{label}/{at}", content)
    for name, region in regions.items():
        group, _, label = name.partition("/")
        region.create(root[group].store_path, label)
        _fill(name, region, objects, put)
    for name in made:
        if name != ROOT:
            put(name, made[name].to_bytes())
    for name in store.names():
        if (
            name not in objects and name != ROOT
        ):  # the root marks an address as ours, and is written last
            store.remove(name)
    check()
    provenance = {
        name: value for name, value in receipt.provenance.items() if name not in (OBJECTS, REGIONS)
    }
    text = json.dumps(provenance | dict(about))
    attrs = {
        "mechattn_schema": SCHEMA,
        "provenance": text,
        "by_prompt": sorted(regions),
        OBJECTS: objects,
    }
    write_root(store, {**attrs, "digest": seal_of(attrs), COMPLETE: True})


def write_root(store: Store, attributes: Mapping[str, Any]) -> None:
    """Write the root of a result; what is there is one from then on."""
    content = {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}
    store.put(ROOT, json.dumps(content, indent=1).encode())


def copied(result: Result, store: Store, check: Callable[[], object] = lambda: None) -> None:
    """Write a result into a store a chunk at a time, so that it never has to fit in memory; ``check`` comes last."""
    count = result["sequences"].sizes["prompt"]
    chunk = min(chunk_of(result), count)
    longest = max(
        [size for one in result.datasets.values() for dim, size in one.sizes.items() if dim in GROW]
        + [1]
    )
    objects: dict[str, str] = {}
    regions: dict[str, Any] = {}
    for start in range(0, count, chunk):
        part = part_of(result, "prompt", slice(start, start + chunk))
        made = write_chunk(
            store, start // chunk, part, chunk, False, width=min(WIDTH, longest)
        ).provenance
        objects |= made[OBJECTS]
        regions = made[REGIONS]
    rest = {n: one.drop_vars(written_of(one)) for n, one in result.datasets.items()}
    about = {**result.provenance, OBJECTS: objects, REGIONS: regions}
    finish(store, Result(rest, about), {}, check)


def chunk_of(result: Result) -> int:
    """The number of prompts per chunk of the job that made a result; 64 if there was none."""
    found = result.provenance.get("chunk")
    return found if isinstance(found, int) and found > 0 else 64


def _fill(
    name: str, region: Region, objects: Mapping[str, str], put: Callable[[str, bytes], None]
) -> None:
    """Write the positions beyond the longest prompt of a chunk: an object that is not there is one that was lost."""
    lost = [f"{name}/{at}" for at in region.names() if f"{name}/{at}" not in objects]
    if lost:
        values = np.full(region.piece, FILL[np.dtype(region.dtype).kind], region.dtype)
        ((_, content),) = encoded(values, region)
        for at in lost:
            put(at, content)
