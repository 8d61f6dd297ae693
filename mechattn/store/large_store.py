"""A result in one sharded Zarr store, local or at an address, whose numbers are read on demand."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.errors import OutputError
from mechattn.results.digest import digest, layout
from mechattn.results.lazy_arrays import Key, LazyArray, lazy_variable
from mechattn.results.result import Result
from mechattn.store.addresses import filesystem
from mechattn.store.atomic_writes import flush, write_file
from mechattn.store.own_files import files_in
from mechattn.store.region_reading import ObjectError, read_block
from mechattn.store.regions import Region
from mechattn.store.required_parts import segments_problem

if TYPE_CHECKING:
    import xarray as xr

SCHEMA = 5
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
        """Write an object, completely or not at all; :meth:`flush` waits until it is on the disk."""
        try:
            if isinstance(self.place, str):
                filesystem(self.place).pipe_file(f"{self._root}/{name}", content)
                return
            path = self.place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, content, flushed=False)
        except Exception as error:  # each kind of address has its own errors
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            raise OutputError(
                f"{name} could not be written to {self.place}: {reason}. Earlier chunks are kept; free some space and "
                "run the same command again"
            ) from error

    def flush(self, names: Iterable[str]) -> None:
        """Wait until objects are on the disk."""
        if isinstance(self.place, Path):
            flush([self.place / name for name in names])

    def get(self, name: str) -> bytes | None:
        """The content of an object; None if there is none."""
        try:
            if isinstance(self.place, str):
                content: bytes = filesystem(self.place).cat_file(f"{self._root}/{name}")
                return content
            return (self.place / name).read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None

    def ranges(self, name: str, spans: Seq[tuple[int, int]]) -> Iterator[bytes]:
        """Yield parts of an object, each from one byte to another."""
        if isinstance(self.place, str):
            starts, ends = map(list, zip(*spans))
            names = [f"{self._root}/{name}"] * len(spans)
            yield from filesystem(self.place).cat_ranges(names, starts, ends, on_error="raise")
            return
        with open(self.place / name, "rb", buffering=0) as stored:
            for start, end in spans:
                stored.seek(start)
                yield stored.read(end - start)

    def names(self) -> list[str]:
        """The names of all objects."""
        if isinstance(self.place, str):
            files = filesystem(self.place)
            root = self._root + "/"
            return [str(name).removeprefix(root) for name in files.find(self._root)]
        return [name for name in files_in(self.place) if not name.endswith("/")] if self.place.is_dir() else []

    def begin(self, who: str) -> None:
        """Mark an address as being written by mechattn, and then delete everything else there."""
        self.mark(who)
        others = [name for name in self.names() if name != ROOT]
        try:
            if others:
                filesystem(str(self.place)).rm([f"{self._root}/{name}" for name in others])
        except FileNotFoundError:  # another run has begun at the same time
            for name in others:
                self.remove(name)

    def mark(self, who: str) -> None:
        """Mark an address as being written by a run."""
        about = {"mechattn_schema": SCHEMA, BEGUN: who}
        self.put(ROOT, json.dumps({"zarr_format": 3, "node_type": "group", "attributes": about}).encode())

    def remove(self, name: str) -> None:
        """Delete an object, if it is there."""
        with suppress(FileNotFoundError):
            if isinstance(self.place, str):
                filesystem(self.place).rm_file(f"{self._root}/{name}")
            else:
                (self.place / name).unlink()

    @property
    def _root(self) -> str:
        return str(filesystem(str(self.place))._strip_protocol(self.place)).rstrip("/")


def attributes_of(place: str | Path) -> dict[str, Any]:
    """The root attributes of a store; empty if there is none."""
    content = Store(place).get(ROOT)
    found: dict[str, Any] = json.loads(content)["attributes"] if content else {}
    return found


def opened(
    tree: xr.DataTree, datasets: Mapping[str, xr.Dataset], regions: Mapping[str, Region], store: Store, where: object
) -> Result:  # fmt: skip
    """Return a result whose regions are read on demand."""
    objects, sealed = tree.attrs.get(OBJECTS), tree.attrs.get("digest")
    if layout(datasets) != tree.attrs.get("layout") or not isinstance(objects, dict):
        raise OutputError(f"the result at {where} is damaged: its variables are not those that were written")
    found, small = {}, {}
    for name, dataset in datasets.items():
        lazy = {str(label): f"{name}/{label}" for label in dataset.variables if f"{name}/{label}" in regions}
        small[name] = dataset.drop_vars(lazy).load()
        arrays = {label: _Array(store, at, regions[at], objects, sealed, where) for label, at in lazy.items()}
        found[name] = small[name].assign({label: array.variable() for label, array in arrays.items()})
    if seal_of(tree.attrs, digest(small, tree.attrs["provenance"])) != sealed:
        raise OutputError(f"the result at {where} is damaged: its numbers are not those that were written")
    return Result(found, json.loads(tree.attrs["provenance"]))


def check_objects(objects: Any, sizes: Mapping[str, int], regions: Mapping[str, Region], where: object) -> None:
    """Refuse a store that lacks an object or has one whose size does not match its array."""
    for name, region in regions.items():
        least = -(-region.shape[0] // region.chunk)
        firsts = [f"{name}/c/{i}{'/0' * (len(region.shape) - 1)}" for i in range(min(least, len(objects) + 1))]
        if lost := [at for at in firsts if at not in objects]:
            raise OutputError(f"the result at {where} is damaged: it has no {lost[0]}")
    for name in objects:
        array, _, at = str(name).rpartition("/c/")
        chunk = regions[array].chunk_of(f"c/{at}") if array in regions else None
        if chunk is None:
            raise OutputError(f"the result at {where} is damaged: {name} belongs to none of its arrays")
        region = regions[array]
        if sizes.get(name) != region.object_bytes:
            have = "it is missing" if name not in sizes else f"{sizes[name]:,} of {region.object_bytes:,} bytes"
            raise OutputError(damaged(where, array, chunk, region, have))


def damaged(where: object, array: str, number: int, region: Region, why: str) -> str:
    """The message for a chunk that cannot be read."""
    first, last = number * region.chunk, min((number + 1) * region.chunk, region.shape[0]) - 1
    return (
        f"chunk {number} of {array.replace('/', '.')} in the result at {where} is damaged ({why}): prompts {first} to "
        f"{last}, counted from 0. Calling run_job with the same job computes only that chunk again"
    )


def seal_of(attrs: Mapping[Any, Any], small: str) -> str:
    """A hash of the small arrays, all object digests and the layout."""
    parts = [small, attrs["layout"], sorted(attrs[OBJECTS].items())]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class _Array:
    """An array of an opened store, and the digests that the store had then: of each object, and of all."""

    store: Store
    name: str
    region: Region
    objects: Mapping[str, str]
    sealed: Any
    where: object

    def variable(self) -> xr.Variable:
        """The array as a variable that is read on demand."""
        region = self.region
        return lazy_variable(LazyArray(region.shape, np.dtype(region.dtype), self), region.dims, region.attrs)

    def __call__(self, key: Key) -> np.ndarray:
        """Read a block."""
        try:
            values = read_block(self.store, self.name, self.region, key, self.objects)
        except ObjectError as error:
            if attributes_of(self.store.place).get("digest") != self.sealed:
                raise OutputError(
                    f"the result at {self.where} was replaced or deleted after it was opened: load it again"
                ) from error
            raise OutputError(damaged(self.where, self.name, error.chunk, self.region, str(error))) from error
        if self.name == "sequences/segment_index" and (problem := segments_problem(values)):
            raise OutputError(f"the result at {self.where} is damaged: {problem}")
        return values
