"""The required parts of a stored result. They are checked once, since someone else's file may lack anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mechattn.axes import BASELINE, SEGMENTS
from mechattn.errors import OutputError

if TYPE_CHECKING:
    import xarray as xr

_TOKENS = ("tokens", "origin", "segment_index")
_PADDING = -2
_Count = Annotated[int, Field(ge=0)]
_Several = str | list[str]  # of a merged result


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


def check_provenance(about: Any, where: object) -> None:
    """Refuse a provenance that lacks a required entry."""
    try:
        _Provenance.model_validate(about)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "it"
        raise OutputError(
            f"the result at {where} lacks its provenance ({name}: {first['msg']}): it is damaged"
        ) from None


def check_datasets(datasets: Mapping[str, xr.Dataset], about: Mapping[str, Any], where: object) -> None:
    """Refuse datasets that don't belong together."""
    if problem := _problem(datasets, about):
        raise OutputError(f"the result at {where} is damaged: {problem}")


def _problem(datasets: Mapping[str, xr.Dataset], about: Mapping[str, Any]) -> str | None:
    if "sequences" not in datasets:
        return "its sequences are missing"
    sequences = datasets["sequences"]
    labels: dict[str, list[Any]] = {}
    for dim in ("prompt", "condition"):
        if dim not in sequences.coords or sequences[dim].dims != (dim,):
            return f"its sequences have no {dim}s"
        labels[dim] = [str(value) for value in sequences[dim].values]
        if not labels[dim] or len(set(labels[dim])) < len(labels[dim]):
            return f"two of its {dim}s have the same name, or there are none"
    if labels["condition"][0] != BASELINE:
        return "its first condition is not the baseline"
    return _sequences_problem(sequences) or _others_problem(datasets, labels, about["measured_layers"])


def _sequences_problem(sequences: xr.Dataset) -> str | None:
    for name in _TOKENS:
        found = sequences.get(name)
        if found is None or found.dims != ("prompt", "condition", "pos") or found.dtype.kind != "i":
            return f"its sequences have no {name}"
    if "first_prompt_text" not in sequences or sequences.first_prompt_text.dims != ("condition", "pos"):
        return "its sequences have no first_prompt_text"
    if "group" in sequences and sequences.group.dims != ("prompt",):
        return "its sequences have groups without the dimension prompt"
    if sequences.segment_index.variable._in_memory:  # arrays not in memory are checked when they are read
        return segments_problem(sequences.segment_index.values)
    return None


def segments_problem(found: np.ndarray) -> str | None:
    """What is wrong with the segment indices, if anything."""
    if found.size and not _PADDING <= found.min() <= found.max() < len(SEGMENTS):
        return f"its sequences have the segment {found.max()}, and there are {len(SEGMENTS)}"
    return None


def _others_problem(
    datasets: Mapping[str, xr.Dataset], labels: Mapping[str, list[str]], layers: list[int]
) -> str | None:
    """What is wrong with the analyses' dimensions, if anything: prompts, conditions, layers, segments must agree."""
    expected: dict[str, list[Any]] = {**labels, "layer": layers, "segment": list(SEGMENTS)}
    for name, dataset in datasets.items():
        for dim, wanted in expected.items():
            if dim not in dataset.dims:
                continue
            if dim not in dataset.coords or not _equal(dataset[dim].values, wanted):
                return f"{name} has other {dim}s"
    return None


def _equal(values: np.ndarray, wanted: list[Any]) -> bool:
    found = values.tolist() if values.dtype.kind in "iu" else [str(value) for value in values]
    return found == wanted
