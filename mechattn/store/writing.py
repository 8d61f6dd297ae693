"""Writes a result into a Zarr store, a chunk at a time, from any number of processes.

Each chunk's own values become objects of its own (``pieces.py``). The small arrays come back as a result, a receipt,
which records the written objects and their checksums. Finishing writes these arrays, merged, the metadata, and at last
the root, which lists every object; no per-prompt number is read or moved again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.errors import OptionError, OutputError
from mechattn.results.merge import GROW
from mechattn.results.result import Result
from mechattn.store.objects import COMPLETE, OBJECTS, ROOT, SCHEMA, Store, seal_of
from mechattn.store.pieces import CHECKSUM, FILL, WIDTH, Region, encoded, in_regions, object_digest, region_of

if TYPE_CHECKING:
    import xarray as xr

REGIONS = "regions"  # next to the objects in the provenance of a receipt; a final result has none


def write_chunk(
    store: Store, number: int, result: Result, chunk: int, half: bool, known: Mapping[str, str] | None = None,
    width: int = WIDTH,
) -> Result:  # fmt: skip
    """Write the per-prompt values of a chunk into its regions; return the rest with a record of what was written."""
    objects, regions, rest = {}, {}, {}
    for name, dataset in result.datasets.items():
        written = [str(label) for label, variable in dataset.variables.items() if in_regions(variable)]
        for label in written:
            variable = dataset[label].variable
            region = region_of(variable, chunk, half, width)
            values = variable.values
            if half and (abs(values) > np.finfo(np.float16).max).any() and variable.dtype.kind == "f":
                raise OptionError(f'{label} is too large for values="float16"; omit it to keep float32')
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
            regions[f"{name}/{label}"] = region.as_json()
        rest[name] = dataset.drop_vars(written)
    store.flush(objects)
    return Result(rest, {**result.provenance, OBJECTS: objects, REGIONS: regions})


def unlike(store: Store, objects: Mapping[str, str]) -> list[str]:
    """The names of objects that are missing or differ from what was written."""
    return [name for name, known in objects.items() if object_digest(name, store.get(name) or b"") != known]


def finish(
    store: Store, receipt: Result, about: Mapping[str, Any], check: Callable[[], object] = lambda: None
) -> None:  # fmt: skip
    """Write what turns the objects of all chunks into a complete result: other arrays, metadata, and last the root."""
    import zarr
    from zarr.storage import MemoryStore

    objects: dict[str, str] = dict(receipt.provenance[OBJECTS])
    regions = _regions(receipt)
    made: dict[str, Any] = {}
    root = zarr.create_group(MemoryStore(made), zarr_format=3)

    def put(name: str, content: bytes) -> None:
        objects[name] = str(object_digest(name, content))
        store.put(name, content)

    for group, dataset in receipt.datasets.items():
        beside = sorted(set(map(str, dataset.coords)) - set(map(str, dataset.dims)))
        stored = root.create_group(group, attributes=_attributes(dataset, beside))
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
        if name not in objects and name != ROOT:  # the root marks an address as ours, and is written last
            store.remove(name)
    check()
    text = json.dumps(_without(receipt.provenance) | dict(about))
    attrs = {"mechattn_schema": SCHEMA, "provenance": text, "by_prompt": sorted(regions), OBJECTS: objects}
    write_root(store, {**attrs, "digest": seal_of(attrs), COMPLETE: True})


def write_root(store: Store, attributes: Mapping[str, Any]) -> None:
    """Write the root of a result; what is there is one from then on."""
    content = {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}
    store.put(ROOT, json.dumps(content, indent=1).encode())


def _attributes(dataset: xr.Dataset, beside: list[str]) -> dict[str, Any]:
    return {str(name): value for name, value in dataset.attrs.items()} | (
        {"coordinates": " ".join(beside)} if beside else {}
    )


def _fill(name: str, region: Region, objects: Mapping[str, str], put: Callable[[str, bytes], None]) -> None:
    """Write the positions beyond the longest prompt of a chunk: an object that is not there is one that was lost."""
    lost = [f"{name}/{at}" for at in region.names() if f"{name}/{at}" not in objects]
    if lost:
        values = np.full(region.piece, FILL[np.dtype(region.dtype).kind], region.dtype)
        ((_, content),) = encoded(values, region)
        for at in lost:
            put(at, content)


def pieces(result: Result, chunk: int) -> Iterator[Result]:
    """Yield a result in chunks of prompts, one after another."""
    count = result["sequences"].sizes["prompt"]
    for start in range(0, count, chunk):
        some = slice(start, start + chunk)
        cut = {n: one.isel(prompt=some) if "prompt" in one.dims else one for n, one in result.datasets.items()}
        yield replace(result, datasets=cut)


def copied(result: Result, store: Store, check: Callable[[], object] = lambda: None) -> None:
    """Write a result into a store a chunk at a time, so that it never has to fit in memory; ``check`` comes last."""
    count = result["sequences"].sizes["prompt"]
    chunk = min(chunk_of(result), count)
    longest = max([size for one in result.datasets.values() for dim, size in one.sizes.items() if dim in GROW] + [1])
    objects: dict[str, str] = {}
    regions: dict[str, Any] = {}
    for number, part in enumerate(pieces(result, chunk)):
        made = write_chunk(store, number, part, chunk, False, width=min(WIDTH, longest)).provenance
        objects |= made[OBJECTS]
        regions = made[REGIONS]
    regions = {name: one | {"shape": [count, *one["shape"][1:]]} for name, one in regions.items()}
    rest = {
        n: one.drop_vars([v for v in one.variables if in_regions(one[v].variable)])
        for n, one in result.datasets.items()
    }
    about = {**result.provenance, OBJECTS: objects, REGIONS: regions}
    finish(store, Result(rest, about), {}, check)


def chunk_of(result: Result) -> int:
    """The number of prompts per chunk of the job that made a result; 64 if there was none."""
    found = result.provenance.get("chunk")
    return found if isinstance(found, int) and found > 0 else 64


def _regions(receipt: Result) -> dict[str, Region]:
    """The regions for all prompts, not just one chunk."""
    count = receipt["sequences"].sizes["prompt"]
    made = {name: Region.from_json(about) for name, about in receipt.provenance[REGIONS].items()}
    return {name: replace(region, shape=(count, *region.shape[1:])) for name, region in made.items()}


def _without(about: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in about.items() if name not in (OBJECTS, REGIONS)}
