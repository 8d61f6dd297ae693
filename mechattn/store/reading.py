"""Reads results, which may be someone else's: checked first, and read only if mechattn could have written them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mechattn.errors import MechattnError, OutputError
from mechattn.results.digest import plain_attributes
from mechattn.results.lazy_arrays import lazy_bytes
from mechattn.results.memory import MEMORY, memory_bytes
from mechattn.results.result import Result
from mechattn.store.addresses import as_place, check_name
from mechattn.store.atomic_writes import recover
from mechattn.store.declared import check_folder, root_of
from mechattn.store.files import files_at, files_in
from mechattn.store.manifest import MANIFEST, read_manifest
from mechattn.store.objects import COMPLETE, OBJECTS, ROOT, SCHEMA, Store, seal_of
from mechattn.store.pieces import in_regions
from mechattn.store.required_parts import check_datasets, check_provenance

if TYPE_CHECKING:
    import xarray as xr

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
            result = replace(result, datasets={name: one.load() for name, one in result.datasets.items()})
        return replace(result, memory=memory)
    except OutputError:
        raise
    except Exception as error:  # files, codecs and the network have their own errors
        raise read_errors(path, error) from (None if isinstance(place, str) else error)  # it may contain a password


def _read(place: str | Path, path: str | Path) -> Result:
    """Read a result, without its per-prompt values."""
    import xarray as xr

    from mechattn.store.listed import Listed

    if isinstance(place, Path) and not (place / ROOT).is_file():
        raise _nothing(place, path)
    files = files_at(place) if isinstance(place, str) else files_in(place)
    if ROOT not in files.sizes:
        raise OutputError(f"there is no stored result at {path}")
    attrs = root_of(files, path)
    _check_root(attrs, path)
    if MANIFEST in attrs:
        return read_manifest(attrs[MANIFEST], place, partial(read_result, lazy=True))
    about = _provenance(attrs, path)
    if not isinstance(attrs.get(OBJECTS), dict):
        raise OutputError(f"the result at {path} is damaged: it lists no objects; {_REDO}")
    regions = check_folder(files, attrs[OBJECTS], path)
    if seal_of(attrs) != attrs.get("digest"):
        raise OutputError(f"the result at {path} is damaged: its provenance or its listing was changed; {_REDO}")
    check_provenance(about, path)
    listed = Listed(Store(place), attrs[OBJECTS], regions, attrs["digest"], path)
    with xr.open_datatree(listed, **_OPEN) as tree:  # type: ignore[arg-type]
        datasets = {str(name): _dataset(node.to_dataset()) for name, node in tree.children.items()}
    check_datasets(datasets, about, path)
    return Result(_in_order(datasets, about), about)


def _check_root(attrs: Mapping[str, Any], where: object) -> None:
    found = attrs.get("mechattn_schema")
    if found is None:
        raise OutputError(f"{where} is not a result of mechattn: it has no schema")
    if found != SCHEMA:
        raise OutputError(f"the result at {where} has schema {found}; this version of mechattn reads schema {SCHEMA}")
    if not attrs.get(COMPLETE):  # written last at an address, where renaming is not possible
        raise OutputError(f"the result at {where} is incomplete; write it again")


def _provenance(attrs: Mapping[str, Any], where: object) -> Any:
    try:
        return json.loads(attrs["provenance"])
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise OutputError(f"the result at {where} lacks its provenance ({error!r}): it is damaged") from None


def _dataset(stored: xr.Dataset) -> xr.Dataset:
    """A dataset as a run makes it; only per-prompt values are not loaded."""
    dataset = stored.drop_encoding()
    dataset.attrs = plain_attributes(dataset.attrs)
    for variable in dataset.variables.values():
        variable.attrs = plain_attributes(variable.attrs)
        if not in_regions(variable):
            variable.load()
    return dataset


def _in_order(datasets: Mapping[str, xr.Dataset], about: Mapping[str, Any]) -> dict[str, xr.Dataset]:
    """As the run had its analyses, quantities by their names: Zarr lists both in another order each time."""
    names = [name for name in about["analyses"] if name in datasets]
    names += sorted(set(datasets) - set(names))
    made = {}
    for name in names:
        of = datasets[name]  # with all its coordinates: those of no quantity too
        by_name = {label: of.variables[label] for label in sorted(of.data_vars, key=str)}
        made[name] = of.drop_vars(list(by_name)).assign(by_name)
    return made


_REDO = "run it again, or restore a copy"


def read_errors(where: object, error: Exception) -> MechattnError:
    """Turn errors of file readers into ours, with a sentence; our own errors pass unchanged."""
    if isinstance(error, MechattnError):
        return error
    reason = str(error).splitlines()[0] if str(error) else "no reason given"
    return OutputError(f"the result at {where} cannot be read ({type(error).__name__}: {reason}); {_REDO}")


def _nothing(place: Path, path: str | Path) -> OutputError:
    """The error if there is no result, with a hint at what is there instead."""
    within = sorted(p.name for p in place.glob("*.zarr"))[:4] if place.is_dir() else []
    hint = f"; there is {', '.join(within)} in it" if within else ""
    there = ": it is not a .zarr folder of mechattn" if place.exists() else ""
    return OutputError(f"there is no stored result at {path}{there}{hint}")
