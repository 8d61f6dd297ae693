"""Reads results, which may be someone else's: checked first, and read only if mechattn could have written them.

Only the objects that a result lists are read, each compared with the listing whenever it is read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from zarr.abc.store import ByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.storage import MemoryStore

from mechattn.errors import MechattnError, OptionError, OutputError
from mechattn.results.arrays import SOURCES, lazy_bytes, plain_attributes
from mechattn.results.merge import merge_results
from mechattn.results.result import MEMORY, Result, memory_bytes
from mechattn.store import zarr_checks
from mechattn.store.atomic_writes import check_name, recover
from mechattn.store.objects import (
    COMPLETE,
    MANIFEST,
    OBJECTS,
    ROOT,
    SCHEMA,
    Store,
    as_place,
    attributes_of,
    beside,
    is_beside,
    seal_of,
)
from mechattn.store.pieces import CHECKSUM, Region, in_regions, object_digest

_SEGMENTS = "sequences/segment_index"
_REDO = "run it again, or restore a copy"
SHARE = 8  # of the memory: per-prompt values that take at most this fraction are read at once
_OPEN: dict[str, Any] = {
    "engine": "zarr", "zarr_format": 3, "consolidated": False, "chunks": None, "cache": False,
    "decode_times": False, "decode_timedelta": False,  # "seconds" is a unit here, not a time
}  # fmt: skip


def load_result(path: str | Path, *, memory: str = MEMORY) -> Result:
    """Load a result written by ``Result.save``; no code in it is run.

    Per-prompt values are read at once if they take at most an eighth of ``memory``. Of a larger result, or a manifest
    of several, only the other arrays are: the values are read on demand, one block at a time, and each object is
    compared with its checksum.

    Args:
        path: A local path or an address.
        memory: What each table or figure of it may take; of a larger one, some layers or prompts are read at a time.

    Raises:
        OutputError: There is no stored result here, one of an unknown schema, or a damaged one.
    """
    return read_result(path, memory)


def read_result(path: str | Path, memory: str = MEMORY, lazy: bool | None = None) -> Result:
    """Like ``load_result``; ``lazy`` decides whether per-prompt values are read at once."""
    check_name(path)
    share = memory_bytes(memory) // SHARE
    place = as_place(path)
    if isinstance(place, Path):
        recover(place)
    try:
        result = _read(place, path)
        if not (lazy_bytes(result) > share if lazy is None else lazy):
            result = replace(
                result, datasets={name: one.load() for name, one in result.datasets.items()}
            )
        return replace(result, memory=memory)
    except OutputError:
        raise
    except Exception as error:  # files, codecs and the network have their own errors
        raise read_errors(path, error) from (
            None if isinstance(place, str) else error
        )  # it may contain a password


def _read(place: str | Path, path: str | Path) -> Result:
    """Read a result, without its per-prompt values."""
    if isinstance(place, Path) and not (place / ROOT).is_file():
        within = sorted(p.name for p in place.glob("*.zarr"))[:4] if place.is_dir() else []
        hint = f"; there is {', '.join(within)} in it" if within else ""
        there = ": it is not a .zarr folder of mechattn" if place.exists() else ""
        raise OutputError(f"there is no stored result at {path}{there}{hint}")
    store = Store(place)
    sizes = store.sizes()
    if ROOT not in sizes:
        raise OutputError(f"there is no stored result at {path}")
    attrs = zarr_checks.root_of(store, sizes, path)
    schema = attrs.get("mechattn_schema")
    if schema is None:
        raise OutputError(f"{path} is not a result of mechattn: it has no schema")
    if schema != SCHEMA:
        raise OutputError(
            f"the result at {path} has schema {schema}; this version of mechattn reads schema {SCHEMA}"
        )
    if not attrs.get(COMPLETE):  # written last at an address, where renaming is not possible
        raise OutputError(f"the result at {path} is incomplete; write it again")
    if MANIFEST in attrs:
        return _merged(attrs[MANIFEST], place)
    try:
        about = json.loads(attrs["provenance"])
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise OutputError(
            f"the result at {path} lacks its provenance ({error!r}): it is damaged"
        ) from None
    if not isinstance(attrs.get(OBJECTS), dict):
        raise OutputError(f"the result at {path} is damaged: it lists no objects; {_REDO}")
    regions = zarr_checks.check_folder(store, sizes, attrs[OBJECTS], path)
    if seal_of(attrs) != attrs.get("digest"):
        raise OutputError(
            f"the result at {path} is damaged: its provenance or its listing was changed; {_REDO}"
        )
    zarr_checks.check_provenance(about, path)
    listed = Listed(store, attrs[OBJECTS], regions, attrs["digest"], path)
    with xr.open_datatree(listed, **_OPEN) as tree:  # type: ignore[arg-type]
        datasets = {
            str(name): _dataset(node.to_dataset(), place) for name, node in tree.children.items()
        }
    zarr_checks.check_datasets(datasets, about, path)
    return Result(_in_order(datasets, about), about)


def _merged(parts: Any, place: str | Path) -> Result:
    """The results that a manifest names, merged without copying any."""
    found = []
    for name, known in manifest_parts(parts, place):
        where = beside(place, name)
        result, now = read_result(where, lazy=True), attributes_of(as_place(where))
        if now.get(MANIFEST) is not None or str(now.get("digest")) != known:
            raise OutputError(
                f"{where} was changed after it became part of {place}: merge the results again"
            )
        found.append(result)
    try:
        return merge_results(found)
    except OptionError as error:
        raise OutputError(
            f"the results named by {place} do not belong to one run: {error}"
        ) from None


def manifest_parts(parts: Any, place: str | Path) -> Iterator[tuple[str, str]]:
    """Yield names and digests; only names next to the manifest are allowed, so that it cannot fetch from elsewhere."""
    if not isinstance(parts, list) or not parts:
        raise OutputError(f"the manifest at {place} is damaged: it names no results")
    digests = [str(part.get("digest")) for part in parts if isinstance(part, dict)]
    if len(set(digests)) < len(digests):  # if they lie, the second one does not match
        raise OutputError(f"the manifest at {place} is damaged: it names a result twice")
    for part in parts:
        name = part.get("name") if isinstance(part, dict) else None
        if not isinstance(name, str) or not is_beside(name):
            raise OutputError(f"the manifest at {place} names {name!r}, which is not next to it")
        yield name, str(part.get("digest"))


def _dataset(stored: xr.Dataset, place: str | Path) -> xr.Dataset:
    """A dataset as a run makes it; only per-prompt values are not loaded."""
    dataset = stored.drop_encoding()
    dataset.attrs = plain_attributes(dataset.attrs)
    for variable in dataset.variables.values():
        variable.attrs = plain_attributes(variable.attrs)
        if in_regions(variable):
            variable.encoding[SOURCES] = {place}
        else:
            variable.load()
    return dataset


def _in_order(
    datasets: Mapping[str, xr.Dataset], about: Mapping[str, Any]
) -> dict[str, xr.Dataset]:
    """As the run had its analyses, quantities by their names: Zarr lists both in another order each time."""
    made = {}
    for name in dict.fromkeys(
        [*(name for name in about["analyses"] if name in datasets), *sorted(datasets)]
    ):
        of = datasets[name]  # with all its coordinates: those of no quantity too
        by_name = {label: of.variables[label] for label in sorted(of.data_vars, key=str)}
        made[name] = of.drop_vars(list(by_name)).assign(by_name)
    return made


def read_errors(where: object, error: Exception) -> MechattnError:
    """Turn errors of file readers into ours, with a sentence; our own errors pass unchanged."""
    if isinstance(error, MechattnError):
        return error
    reason = str(error).splitlines()[0] if str(error) else "no reason given"
    return OutputError(
        f"the result at {where} cannot be read ({type(error).__name__}: {reason}); {_REDO}"
    )


class Listed(MemoryStore):
    """The objects of a result as a store of Zarr's, which has their names and reads each when it is asked for.

    ``sealed`` is the digest of the result when it was opened.
    """

    def __init__(
        self,
        store: Store,
        objects: Mapping[str, str],
        regions: Mapping[str, Region],
        sealed: object,
        where: object,
    ) -> None:
        self.objects = {ROOT: "", **objects}
        super().__init__(self.objects, read_only=True)  # type: ignore[arg-type]
        self.store, self.regions, self.sealed, self.where = store, regions, sealed, where

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Listed) and (self.store, self.sealed) == (
            other.store,
            other.sealed,
        )

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:  # fmt: skip
        """Read an object, and compare it with the listing."""
        return await asyncio.to_thread(self.get_sync, key, prototype=prototype)

    def get_sync(
        self, key: str, *, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:  # fmt: skip
        """As :meth:`get`, which Zarr may call instead."""
        of = prototype or default_buffer_prototype()
        return of.buffer.from_bytes(self._read(key)) if key in self.objects else None

    def _read(self, key: str) -> bytes:
        try:
            content = self.store.get(key)
            if key == ROOT:
                return content or b""
            why: str | None = (
                "it is missing" if content is None else "it is not what was written here"
            )
            if content is not None and object_digest(key, content) == self.objects[key]:
                if not key.startswith(f"{_SEGMENTS}/c"):
                    return content
                dtype = np.dtype(self.regions[_SEGMENTS].dtype)
                if (
                    why := zarr_checks.segments_problem(np.frombuffer(content[:-CHECKSUM], dtype))
                ) is None:
                    return content
        except Exception as error:  # files and the network have their own errors
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
        if attributes_of(self.store.place).get("digest") != self.sealed:
            raise OutputError(
                f"the result at {self.where} was replaced or deleted after it was opened: load it again"
            )
        raise OutputError(zarr_checks.damaged(self.where, key, self.regions, str(why)))
