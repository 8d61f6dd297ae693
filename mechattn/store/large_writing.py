"""Writes a result into one sharded Zarr store, a chunk at a time, from any number of processes.

Each chunk's own values go directly into its region (``regions.py``). The small arrays come back as a result, a receipt,
which records the written objects and their digests. Finishing merges the receipts and writes metadata; no per-prompt
number is read or moved again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.errors import OptionError, OutputError
from mechattn.results.digest import layout
from mechattn.results.lazy_arrays import Key, LazyArray, lazy_variable
from mechattn.results.result import Result
from mechattn.store.large_store import OBJECTS, ROOT, SCHEMA, Store, seal_of
from mechattn.store.regions import Region, encoded, in_regions, object_digest, region_of, tail_digest
from mechattn.store.schema import COMPLETE, as_tree

if TYPE_CHECKING:
    import xarray as xr

REGIONS = "regions"  # next to the objects in the provenance of a receipt; a final result has none


def write_chunk(
    store: Store, number: int, result: Result, chunk: int, half: bool, known: Mapping[str, str] | None = None
) -> Result:
    """Write the per-prompt values of a chunk into its regions; return the rest with a record of what was written."""
    objects, regions, rest = {}, {}, {}
    for name, dataset in result.datasets.items():
        written = [str(label) for label, variable in dataset.variables.items() if in_regions(variable)]
        for label in written:
            variable = dataset[label].variable
            region = region_of(variable, chunk, half)
            values = variable.values
            if half and (abs(values) > np.finfo(np.float16).max).any() and variable.dtype.kind == "f":
                raise OptionError(f'{label} is too large for values="float16"; omit it to keep float32')
            for at, content in encoded(values, region, number).items():
                path = f"{name}/{label}/{at}"
                objects[path] = tail_digest(content[-region.tail_bytes :])
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
    return [name for name, known in objects.items() if object_digest(store.get(name) or b"") != known]


def finish(store: Store, receipt: Result, about: Mapping[str, Any]) -> None:
    """Write the metadata that turn the objects of all chunks into a complete result."""
    import zarr
    from zarr.storage import MemoryStore

    objects: dict[str, str] = dict(receipt.provenance[OBJECTS])
    regions = _regions(receipt)
    small = Result(receipt.datasets, _without(receipt.provenance) | dict(about))
    for name in store.names():
        if name not in objects and name != ROOT:  # the root marks an address as ours, and is written last
            store.remove(name)
    tree = as_tree(small, np.dtypes.StringDType())
    whole = {name: dataset.assign(_declared(name, regions)) for name, dataset in small.datasets.items()}
    attrs: dict[str, Any] = {
        **{str(name): value for name, value in tree.attrs.items()},
        "mechattn_schema": SCHEMA,
        "layout": layout(whole),
        OBJECTS: objects,
        COMPLETE: True,
        "contents": sorted([*tree.attrs["contents"], *regions]),
    }
    tree.attrs = attrs | {"digest": seal_of(attrs, tree.attrs["digest"])}
    made: dict[str, Any] = {}
    memory = MemoryStore(made)
    tree.to_zarr(memory, consolidated=False)
    root = zarr.open_group(memory, mode="r+", zarr_format=3)
    for name, region in regions.items():
        group, _, label = name.partition("/")
        region.create(root[group].store_path, label)
    for name in sorted(made, key=lambda name: name == ROOT):  # the root last: it makes the store a result
        store.put(name, made[name].to_bytes())


def pieces(result: Result, chunk: int) -> Iterator[Result]:
    """Yield a result in chunks of prompts, one after another."""
    count = result["sequences"].sizes["prompt"]
    for start in range(0, count, chunk):
        some = slice(start, start + chunk)
        cut = {n: one.isel(prompt=some) if "prompt" in one.dims else one for n, one in result.datasets.items()}
        yield replace(result, datasets=cut)


def copied(result: Result, store: Store) -> None:
    """Write a result into a store a chunk at a time, so that it never has to fit in memory."""
    chunk, half = chunk_of(result), False
    objects: dict[str, str] = {}
    regions: dict[str, Any] = {}
    for number, part in enumerate(pieces(result, chunk)):
        made = write_chunk(store, number, part, chunk, half).provenance
        objects |= made[OBJECTS]
        regions = made[REGIONS]
    count = result["sequences"].sizes["prompt"]
    regions = {name: one | {"shape": [count, *one["shape"][1:]]} for name, one in regions.items()}
    rest = {
        n: one.drop_vars([v for v in one.variables if in_regions(one[v].variable)])
        for n, one in result.datasets.items()
    }
    about = {**result.provenance, OBJECTS: objects, REGIONS: regions}
    finish(store, Result(rest, about), {})


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


def _declared(group: str, regions: Mapping[str, Region]) -> dict[str, xr.Variable]:
    """The regions of a group as variables without values, for the layout hash."""

    def none(key: Key) -> np.ndarray:
        raise AssertionError("declared alone")

    return {
        name.partition("/")[2]: lazy_variable(LazyArray(of.shape, np.dtype(of.dtype), none), of.dims, of.attrs)
        for name, of in regions.items()
        if name.startswith(f"{group}/")
    }
