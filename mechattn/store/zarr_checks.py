"""Checks what a Zarr folder declares before Zarr reads it, and that what was read has the parts of a result.

It may be someone else's, and lack anything. Our own format and codecs are required, and every object in its size:
without a ``zarr.json`` Zarr assumes its older format 2, which has a codec that runs code. Nothing is compressed, and
each object is there, so a result takes no more memory than it takes on the disk; texts take up to 16 times as much.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from math import prod
from typing import Annotated, Any

import numpy as np
import xarray as xr
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mechattn.axes import BASELINE, SEGMENTS
from mechattn.errors import OutputError
from mechattn.results.merge import GROW
from mechattn.store.objects import ROOT, Store
from mechattn.store.pieces import CHECKSUM, WIDTH, Region

FORMAT = 3
_LONGEST = 64 * 2**20  # bytes of a zarr.json
_ARRAYS = 5000  # every analysis together has some hundred
_KEYS = {"name": "default", "configuration": {"separator": "/"}}
_NUMBERS = (
    "bool", "int8", "uint8", "int16", "uint16", "float16", "int32", "uint32", "float32", "int64", "uint64", "float64",
    "complex64", "complex128",
)  # fmt: skip
_LENGTH = 4  # bytes of the number of texts, and of the length of each
_TOKENS = ("tokens", "origin", "segment_index")
_PADDING = -2
_Count = Annotated[int, Field(ge=0)]
_Several = str | list[str]  # of a merged result


def root_of(store: Store, sizes: Mapping[str, int], where: object) -> dict[str, Any]:
    """The attributes at the root."""
    return dict(_checked(store, sizes, ROOT, where, _attributes))


def check_folder(
    store: Store, sizes: Mapping[str, int], objects: Mapping[str, str], where: object
) -> dict[str, Region]:  # fmt: skip
    """Check every listed array without reading any; return how they are cut."""
    regions: dict[str, Region] = {}
    found: dict[str, list[str]] = defaultdict(list)
    metadata = [name for name in objects if name.rpartition("/")[2] == ROOT]
    if len(metadata) > _ARRAYS:
        raise OutputError(
            f"the result at {where} has {len(metadata):,} arrays; mechattn writes at most {_ARRAYS:,}"
        )
    for name in objects:
        if not name.endswith(f"/{ROOT}"):
            array, _, _ = name.rpartition("/c/")
            found[array or name.removesuffix("/c")].append(name)
    for name in metadata:
        if name not in sizes:
            raise OutputError(damaged(where, name, {}, "it is missing"))
        region = _checked(store, sizes, name, where, _region)
        if region is not None:
            regions[name.removesuffix(f"/{ROOT}")] = region
    for array in [*regions, *found]:
        _check_objects(store, sizes, array, found[array], regions, where)
    return regions


def damaged(where: object, name: str, regions: Mapping[str, Region], why: str) -> str:
    """The message for an object that cannot be read."""
    array, _, at = name.rpartition("/c/")
    region = regions.get(array)
    if region is None or region.dims[:1] != ("prompt",) or len(region.dims) < 2:
        return f"the result at {where} is damaged: {name}: {why}; run it again, or restore a copy"
    number = int(at.partition("/")[0])
    first, last = number * region.chunk, min((number + 1) * region.chunk, region.shape[0]) - 1
    return (
        f"chunk {number} of {array.replace('/', '.')} in the result at {where} is damaged ({why}): prompts {first} to "
        f"{last}, counted from 0. Calling run_job with the same job computes only that chunk again"
    )


def check_provenance(about: Any, where: object) -> None:
    """Refuse a provenance that lacks a required entry."""
    try:
        _Provenance.model_validate(about)
    except ValidationError as error:
        first = error.errors()[0]
        lacks = f"its provenance ({'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']})"
        raise OutputError(f"the result at {where} lacks {lacks}: it is damaged") from None


def check_datasets(
    datasets: Mapping[str, xr.Dataset], about: Mapping[str, Any], where: object
) -> None:
    """Refuse datasets that don't belong together."""
    if problem := _problem(datasets, about):
        raise OutputError(f"the result at {where} is damaged: {problem}")


def segments_problem(found: np.ndarray) -> str | None:
    """What is wrong with the segment indices, if anything."""
    if found.size and not _PADDING <= found.min() <= found.max() < len(SEGMENTS):
        return f"its sequences have the segment {found.max()}, and there are {len(SEGMENTS)}"
    return None


def _check_objects(
    store: Store,
    sizes: Mapping[str, int],
    array: str,
    names: list[str],
    regions: Mapping[str, Region],
    where: object,
) -> None:
    """Refuse an array that lacks an object, has another one, or one of another size."""
    region = regions.get(array)
    if region and prod(-(-size // part) for size, part in zip(region.shape, region.piece)) > len(
        names
    ):
        raise OutputError(
            f"the result at {where} is damaged: it has {len(names)} objects of {array}, which needs more"
        )
    wanted = {f"{array}/{at}" for at in region.names()} if region else set()
    if region is None or not wanted.issuperset(names):
        stranger = next(name for name in names if name not in wanted)
        raise OutputError(
            f"the result at {where} is damaged: {stranger} belongs to none of its arrays"
        )
    texts, count = region.dtype == "text", prod(region.piece)
    size = CHECKSUM + (_LENGTH * (1 + count) if texts else count * np.dtype(region.dtype).itemsize)
    for name in names:
        have = sizes.get(name)
        if have is None or have < size or (have > size and not texts):
            why = "it is missing" if have is None else f"{have:,} of {size:,} bytes"
            raise OutputError(damaged(where, name, regions, why))
    if texts and any(
        int.from_bytes(head, "little") != count for head in store.heads(names, _LENGTH)
    ):
        raise OutputError(
            f"the result at {where} is damaged: {array} has another number of texts than it declares"
        )


def _checked(store: Store, sizes: Mapping[str, int], name: str, where: object, check: Any) -> Any:
    try:
        if sizes[name] > _LONGEST:
            raise ValueError(f"it has {sizes[name]:,} bytes")
        about = json.loads(store.get(name) or b"")
        if not isinstance(about, dict) or about["zarr_format"] != FORMAT:
            raise ValueError(f"it does not have Zarr's format {FORMAT}")
        return check(about)
    except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        reason = (
            f"that mechattn writes: {f'it lacks {error}' if isinstance(error, KeyError) else error}"
        )
        raise OutputError(
            f"{name} in the result at {where} is not in the format {reason}"
        ) from None


def _attributes(about: Mapping[str, Any]) -> dict[str, Any]:
    if about["node_type"] != "group" or not isinstance(about["attributes"], dict):
        raise ValueError("it is no group")
    return dict(about["attributes"])


def _region(about: Mapping[str, Any]) -> Region | None:
    """How an array is cut, which must be as mechattn does, with its codecs, none of which compress; None of a group."""
    if about["node_type"] == "group":
        _attributes(about)
        return None
    if about["node_type"] != "array" or about.get("storage_transformers"):
        raise ValueError(f"node_type is {about['node_type']!r}, or it has storage transformers")
    grid, kind = about["chunk_grid"], about["data_type"]
    shape, piece = _sizes(about["shape"]), _sizes(grid["configuration"]["chunk_shape"])
    if kind != "string" and kind not in _NUMBERS:
        raise ValueError(f"it has the type {kind!r}")
    codecs = [codec["name"] for codec in about["codecs"]]
    if codecs != ["vlen-utf8" if kind == "string" else "bytes", "crc32c"]:
        raise ValueError(f"it is stored with the codecs {codecs}")
    if (
        kind != "string"
        and about["codecs"][0].get("configuration", {}).get("endian", "little") != "little"
    ):
        raise ValueError("its numbers are stored in another order")
    if grid["name"] != "regular" or about["chunk_key_encoding"] != _KEYS:
        raise ValueError("it is divided differently")
    dims = tuple(map(str, about["dimension_names"] or ()))
    width = min([WIDTH, *(part for dim, part in zip(dims, piece) if dim in GROW)]) or 1
    dtype = "text" if kind == "string" else str(kind)
    made = Region(dims, tuple(shape), dtype, max([1, *piece[:1]]), about["attributes"], width)
    if len(dims) != len(shape) or made.piece != tuple(piece):
        raise ValueError(f"its objects have the shape {piece}, but it has the shape {shape}")
    return made


def _sizes(values: Any) -> list[int]:
    if not isinstance(values, list) or not all(
        type(value) is int and 0 <= value < 2**63 for value in values
    ):
        raise ValueError(f"{values!r} is not a shape")
    return values


class _Part(BaseModel):
    """A part of the provenance; other keys are not required."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class _Model(_Part):
    name: str
    architecture: str
    parameters: _Count
    heads: _Count
    layers: _Count
    dtype: str
    device: _Several
    verified: bool


class _Prompts(_Part):
    count: _Count
    hash: str


class _Kind(_Part):
    kind: str
    options: dict[str, Any]


class _Condition(_Kind):
    model_config = ConfigDict(extra="forbid")
    masked: bool
    unshifted: bool
    interventions: list[_Kind]
    written: str


class _Versions(_Part):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, _Several]
    mechattn: str
    transformer_lens: str = Field(alias="transformer-lens")
    torch: str


class _Provenance(_Part):
    model: _Model
    prompts: _Prompts
    conditions: dict[str, _Condition]
    analyses: dict[str, dict[str, Any]]
    measured_layers: list[_Count] = Field(min_length=1)
    versions: _Versions
    time: _Several = Field(min_length=1)
    seed: int | float | str | None
    engine: str


def _problem(datasets: Mapping[str, xr.Dataset], about: Mapping[str, Any]) -> str | None:
    """What is wrong, if anything: whole sequences; the same prompts, conditions, layers, segments in all."""
    if "sequences" not in datasets:
        return "its sequences are missing"
    sequences = datasets["sequences"]
    labels: dict[str, list[Any]] = {"layer": about["measured_layers"], "segment": list(SEGMENTS)}
    for dim in ("prompt", "condition"):
        if dim not in sequences.coords or sequences[dim].dims != (dim,):
            return f"its sequences have no {dim}s"
        labels[dim] = [str(value) for value in sequences[dim].values]
        if not labels[dim] or len(set(labels[dim])) < len(labels[dim]):
            return f"two of its {dim}s have the same name, or there are none"
    if labels["condition"][0] != BASELINE:
        return "its first condition is not the baseline"
    for name in _TOKENS:
        found = sequences.get(name)
        if found is None or found.dims != ("prompt", "condition", "pos") or found.dtype.kind != "i":
            return f"its sequences have no {name}"
    if "first_prompt_text" not in sequences or sequences.first_prompt_text.dims != (
        "condition",
        "pos",
    ):
        return "its sequences have no first_prompt_text"
    if "group" in sequences and sequences.group.dims != ("prompt",):
        return "its sequences have groups without the dimension prompt"
    for name, dataset in datasets.items():
        for dim in set(labels) & set(dataset.dims):
            have = dataset[dim].values if dim in dataset.coords else np.empty(0)
            if (
                have.tolist() if have.dtype.kind in "iu" else [str(value) for value in have]
            ) != labels[str(dim)]:
                return f"{name} has other {dim}s"
    indices = sequences.segment_index
    return (
        segments_problem(indices.values) if indices.variable._in_memory else None
    )  # or when they are read
