"""A result in one sharded Zarr store, local or at an address, whose numbers are read on demand."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.errors import OutputError
from mechattn.results.addresses import filesystem
from mechattn.results.digest import digest, layout
from mechattn.results.lazy import Key, LazyArray, lazy_variable
from mechattn.results.ours import files_in
from mechattn.results.region_reading import read_block
from mechattn.results.regions import Region, in_regions
from mechattn.results.required import segments_problem
from mechattn.results.result import Result

if TYPE_CHECKING:
    import xarray as xr

SCHEMA = 4
ROOT = "zarr.json"
OBJECTS = "objects"  # in the root attributes
BEGUN = "begun"  # likewise, at an address: the run that is writing
A_COPY = "copy"


@dataclass(frozen=True)
class Store:
    """Objects in a folder, or at an address.

    Args:
        place: The folder or address.
    """

    place: str | Path

    def put(self, name: str, content: bytes) -> None:
        """Write an object, completely or not at all.

        Raises:
            OutputError: There is no space, or it cannot be written.
        """
        try:
            if isinstance(self.place, str):
                filesystem(self.place).pipe_file(f"{self._root}/{name}", content)
                return
            path = self.place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f"{path.name}.new")
            try:
                new.write_bytes(content)
                os.replace(new, path)
            except OSError:
                new.unlink(missing_ok=True)
                raise
        except Exception as error:  # each kind of address has its own errors
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            raise OutputError(
                f"{name} could not be written to {self.place}: {reason}. Earlier chunks are kept; free some space and "
                "run the same command again"
            ) from error

    def get(self, name: str) -> bytes | None:
        """The content of an object; None if there is none."""
        try:
            if isinstance(self.place, str):
                content: bytes = filesystem(self.place).cat_file(f"{self._root}/{name}")
                return content
            return (self.place / name).read_bytes()
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        """The names of all objects."""
        if isinstance(self.place, str):
            files = filesystem(self.place)
            root = self._root + "/"
            return [str(name).removeprefix(root) for name in files.find(self._root)]
        return [name for name in files_in(self.place) if not name.endswith("/")] if self.place.is_dir() else []

    def begin(self, who: str) -> None:
        """Mark an address as being written by mechattn, and then delete everything else there.

        The mark comes first, so that after a kill at any moment our files can be distinguished from anyone else's.
        """
        about = {"mechattn_schema": SCHEMA, BEGUN: who}
        self.put(ROOT, json.dumps({"zarr_format": 3, "node_type": "group", "attributes": about}).encode())
        if others := [f"{self._root}/{name}" for name in self.names() if name != ROOT]:
            filesystem(str(self.place)).rm(others)

    def remove(self, name: str) -> None:
        """Delete an object."""
        if isinstance(self.place, str):
            filesystem(self.place).rm_file(f"{self._root}/{name}")
        else:
            (self.place / name).unlink(missing_ok=True)

    @property
    def _root(self) -> str:
        return str(filesystem(str(self.place))._strip_protocol(self.place)).rstrip("/")


def attributes_of(place: str | Path) -> dict[str, Any]:
    """The root attributes of a store; empty if there is none."""
    content = Store(place).get(ROOT)
    found: dict[str, Any] = json.loads(content)["attributes"] if content else {}
    return found


def check_begun(store: Store, who: str) -> None:
    """Refuse to write to an address where another run has begun since; locks do not work there.

    Raises:
        OutputError: Another run has begun to write there.
    """
    if attributes_of(store.place).get(BEGUN) not in (who, True):  # an earlier version did not record the run
        raise OutputError(
            f"another run has begun to write to {store.place} after this one: wait for it, give this one another "
            "output, or start it again (mechattn run --fresh, in Python fresh=True)"
        )


def opened(tree: xr.DataTree, datasets: Mapping[str, xr.Dataset], place: str | Path, where: object) -> Result:
    """Return a result whose regions are read on demand.

    Args:
        tree: The opened tree, for its attributes.
        datasets: Its datasets, not yet loaded.
        place: Its path or address.
        where: What the user calls it.

    Raises:
        OutputError: An object is missing or incomplete, or other files of the store were changed.
    """
    import zarr

    objects = tree.attrs.get(OBJECTS)
    if layout(datasets) != tree.attrs.get("layout") or not isinstance(objects, dict):
        raise OutputError(f"the result at {where} is damaged: its variables are not those that were written")
    root = zarr.open_group(place, mode="r", zarr_format=3)
    found, small = {}, {}
    for name, dataset in datasets.items():
        lazy = [str(label) for label, variable in dataset.variables.items() if in_regions(variable)]
        small[name] = dataset.drop_vars(lazy).load()
        found[name] = small[name].assign(
            {
                label: _lazy(root[f"{name}/{label}"], dataset[label].variable, f"{name}.{label}", where, place)
                for label in lazy
            }
        )
    if seal_of(tree.attrs, digest(small, tree.attrs["provenance"])) != tree.attrs.get("digest"):
        raise OutputError(f"the result at {where} is damaged: its numbers are not those that were written")
    return Result(found, json.loads(tree.attrs["provenance"]))


def check_objects(objects: Any, sizes: Mapping[str, int], regions: Mapping[str, Region], where: object) -> None:
    """Refuse a store that lacks an object or has one whose size does not match its array.

    Raises:
        OutputError: Names the first such object, its chunk and the prompts.
    """
    for name, region in regions.items():
        least = -(-region.shape[0] // region.chunk)
        firsts = [f"{name}/c/{i}{'/0' * (len(region.shape) - 1)}" for i in range(min(least, len(objects) + 1))]
        if lost := [at for at in firsts if at not in objects]:
            raise OutputError(f"the result at {where} is damaged: it has no {lost[0]}")
    for name in objects:
        array, _, at = str(name).partition("/c/")
        if array not in regions:
            raise OutputError(f"the result at {where} is damaged: {name} belongs to none of its arrays")
        region = regions[array]
        if sizes.get(name) != region.object_bytes:
            have = "is missing" if name not in sizes else f"has {sizes[name]:,} of {region.object_bytes:,} bytes"
            raise OutputError(damaged(where, array.replace("/", "."), int(at.partition("/")[0]), region, have))


def damaged(where: object, name: str, number: int, region: Region, why: str) -> str:
    """The message for a chunk that cannot be read."""
    first, last = number * region.chunk, min((number + 1) * region.chunk, region.shape[0]) - 1
    return (
        f"chunk {number} of {name} in the result at {where} is damaged ({why}): prompts {first} to {last}, "
        "counted from 0. Calling run_job with the same job computes only that chunk again"
    )


def region_in(array: Any) -> Region:
    """The region from which a Zarr array was created."""
    meta = array.metadata
    chunk, attrs = array.shards[0], dict(array.attrs)
    return Region.stored(meta.dimension_names, array.shape, array.dtype.name, chunk, attrs, array.chunks)


def seal_of(attrs: Mapping[Any, Any], small: str) -> str:
    """A hash of the small arrays, all object digests and the layout."""
    parts = [small, attrs["layout"], sorted(attrs[OBJECTS].items())]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _lazy(array: Any, variable: xr.Variable, name: str, where: object, place: str | Path) -> xr.Variable:
    region = region_in(array)

    def read(key: Key) -> np.ndarray:
        try:
            if isinstance(place, str):
                values = np.asarray(array[key])
            else:
                values = read_block(place.joinpath(*name.split(".")), region, key)
        except Exception as error:  # codecs, files and the network have their own errors
            raise OutputError(_which(array, key, name, where, error)) from error
        if name == "sequences.segment_index" and (problem := segments_problem(values)):
            raise OutputError(f"the result at {where} is damaged: {problem}")
        return values

    return lazy_variable(LazyArray(variable.shape, variable.dtype, read), variable.dims, variable.attrs)


def _which(array: Any, key: Key, name: str, where: object, error: Exception) -> str:
    """Name the first chunk that cannot be read."""
    region, (prompts, *rest) = region_in(array), key
    rows = range(*prompts.indices(array.shape[0])) if isinstance(prompts, slice) else [prompts]
    for number in sorted({row // region.chunk for row in rows}):
        try:
            array[(slice(number * region.chunk, (number + 1) * region.chunk), *rest)]
        except Exception as found:
            return damaged(where, name, number, region, _why(found))
    return f"{name} in the result at {where} cannot be read ({_why(error)})"


def _why(error: Exception) -> str:
    """What a codec, file or network error says, in short."""
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return "its checksum does not match" if "checksum" in first else first
