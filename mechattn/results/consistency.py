"""Checks what every result must have: complete provenance, complete sequences, and datasets that
belong together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
import xarray as xr
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mechattn.axes import BASELINE, PADDING, SEGMENTS
from mechattn.results.result import CHUNK

TOKEN_ARRAYS = ("tokens", "origin", "segment_index")

Count = Annotated[int, Field(ge=0)]
OneOrMore = str | list[str]  # a merged result may have several


class Entry(BaseModel):
    """A table of a file whose declared entries have the declared types. Others are ignored, unless
    a subclass says more."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class _Model(Entry):
    name: str
    architecture: str
    parameters: Count
    heads: Count
    layers: Count
    dtype: str
    device: OneOrMore
    verified: bool


class _Prompts(Entry):
    count: Count
    hash: str


class _KindAndOptions(Entry):
    kind: str
    options: dict[str, Any]


class _Condition(_KindAndOptions):
    model_config = ConfigDict(extra="forbid")
    masked: bool
    unshifted: bool
    interventions: list[_KindAndOptions]
    written: str


class _Versions(Entry):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, OneOrMore]
    mechattn: str
    transformer_lens: str = Field(alias="transformer-lens")
    torch: str


class _Provenance(Entry):
    model: _Model
    prompts: _Prompts
    conditions: dict[str, _Condition]
    analyses: dict[str, dict[str, Any]]
    measured_layers: list[Count] = Field(min_length=1)
    versions: _Versions
    time: OneOrMore = Field(min_length=1)
    seed: int | float | str | None
    engine: str
    chunk: Annotated[int, Field(ge=1)] = CHUNK


def problem_of(datasets: Mapping[str, xr.Dataset], provenance: Any) -> str | None:
    """The first reason why a result cannot be used, in words; None if there is none."""
    try:
        _Provenance.model_validate(provenance)
    except ValidationError as error:
        details = error.errors()[0]
        entry_path = ".".join(map(str, details["loc"])) or "all of it"
        return f"its provenance is not as mechattn writes it ({entry_path}: {details['msg']})"

    if "sequences" not in datasets:
        return "its sequences are missing"
    sequences = datasets["sequences"]
    problem = _sequences_problem(sequences)
    if problem is not None:
        return problem
    labels_by_dim = {
        "layer": provenance["measured_layers"],
        "segment": list(SEGMENTS),
        "prompt": _labels(sequences, "prompt"),
        "condition": _labels(sequences, "condition"),
    }
    for name, dataset in datasets.items():
        for dim, labels in labels_by_dim.items():
            if dim in dataset.dims and _labels(dataset, dim) != labels:
                return f"{name} has other {dim}s than the rest of the result"

    return None


def _sequences_problem(sequences: xr.Dataset) -> str | None:
    """The first reason why the sequences cannot be used, in words; None if there is none."""
    for dim in ("prompt", "condition"):
        labels = _labels(sequences, dim)
        if not labels:
            return f"its sequences have no {dim}s"
        if len(set(labels)) < len(labels):
            return f"its sequences have two {dim}s with the same name"

    if _labels(sequences, "condition")[0] != BASELINE:
        return "its first condition is not the baseline"
    token_dims = ("prompt", "condition", "pos")
    dims_by_name: dict[str, tuple[str, ...]] = dict.fromkeys(TOKEN_ARRAYS, token_dims)
    dims_by_name["first_prompt_text"] = ("condition", "pos")
    if "group" in sequences:
        dims_by_name["group"] = ("prompt",)
    for name, dims in dims_by_name.items():
        if name not in sequences or sequences[name].dims != dims:
            return f"its sequences have no array {name} with the dimensions {', '.join(dims)}"
        if name in TOKEN_ARRAYS and sequences[name].dtype.kind != "i":
            return f"the array {name} of its sequences does not hold whole numbers"

    segment_indices = sequences.segment_index.values
    known_indices = [PADDING, *range(len(SEGMENTS))]
    unknown_indices = segment_indices[~np.isin(segment_indices, known_indices)]
    if unknown_indices.size:
        return (
            f"its sequences have the segment {unknown_indices[0]}, but there are only"
            f" {len(SEGMENTS)}"
        )
    return None


def _labels(dataset: xr.Dataset, dim: str) -> list[Any]:
    """The labels of a dimension as whole numbers or texts; [] if it has no labels."""
    if dim not in dataset.coords or dataset[dim].dims != (dim,):
        return []
    values: np.ndarray = dataset[dim].values
    if values.dtype.kind in "iu":
        return values.tolist()
    return [str(value) for value in values]
