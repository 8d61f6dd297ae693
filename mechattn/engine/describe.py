"""A run's metadata: the tokens that the model read, and the provenance of the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from mechattn.analysis.analysis import Analysis
from mechattn.axes import SEGMENTS
from mechattn.engine.check import sides_of
from mechattn.model import hooks
from mechattn.model.fingerprint import revision, weights_hash
from mechattn.model.hooked import HookedModel
from mechattn.model.model_facts import ModelFacts, facts_of
from mechattn.model.positions import boundary_of
from mechattn.prompts.conditions import Baseline, Condition, Variant
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.sequences import Sequence
from mechattn.results import provenance
from mechattn.results.canonical import identity, kind_of
from mechattn.shown import plain

if TYPE_CHECKING:
    import xarray as xr

_UNITS = {"tokens": "token id", "origin": "position in the baseline", "segment_index": "index in segments"}


def sequences_dataset(
    model: HookedModel,
    prompts: Seq[Prompt],
    conditions: list[str],
    sequences: Seq[Mapping[str, Sequence]],
    places: Seq[int],
) -> xr.Dataset:
    """The tokens that the model read, their segments and origins, the prompts' groups, and the first prompt's texts."""
    import xarray as xr

    longest = max(len(s) for made in sequences for s in made.values())
    shape = (len(prompts), len(conditions), longest)
    arrays = {name: np.full(shape, -2, dtype=np.int32) for name in ("tokens", "origin", "segment_index")}
    for i, made in enumerate(sequences):
        for j, sequence in enumerate(made.values()):
            arrays["tokens"][i, j, : len(sequence)] = sequence.tokens
            arrays["origin"][i, j, : len(sequence)] = sequence.origin
            arrays["segment_index"][i, j, : len(sequence)] = sequence.segment
    texts = np.full(shape[1:], "", dtype=object)
    for j, sequence in enumerate(sequences[0].values()):
        texts[j, : len(sequence)] = _token_texts(model, sequence.tokens)
    dims = ("prompt", "condition", "pos")
    variables: dict[str, Any] = {name: (dims, array, {"units": _UNITS[name]}) for name, array in arrays.items()}
    variables["first_prompt_text"] = (dims[1:], texts.astype(np.dtypes.StringDType()), {"units": "text"})
    if sides := sides_of(model, sequences):
        factors = np.array(sides, dtype=object).astype(np.dtypes.StringDType())
        variables["rope_factors"] = (("prompt",), factors, {"units": "text"})
    if all(prompt.group is not None for prompt in prompts):
        groups = np.array([prompt.group for prompt in prompts], dtype=object).astype(np.dtypes.StringDType())
        variables["group"] = (("prompt",), groups, {"units": "text"})
    variables["place"] = (("prompt",), np.asarray(places, dtype=np.int64), {"units": "index in the whole run"})
    made_dataset = xr.Dataset(variables, coords={"prompt": [p.id for p in prompts], "condition": conditions})
    return made_dataset.assign_attrs({"segments": ", ".join(SEGMENTS), "padding": -2})


def condition_data(condition: Condition, made: Sequence | None = None) -> dict[str, Any]:
    """A condition as data: kind, options, marks and interventions (its own as ``made`` has them); and as text."""
    inner: Any = condition
    masked, unshifted = False, False
    acts: tuple[Any, ...] = ()
    while isinstance(inner, Variant):
        masked, unshifted = masked or inner.hides, unshifted or inner.keeps_positions
        inner, acts = inner.condition, (*inner.interventions, *acts)
    if isinstance(inner, Baseline):
        given = inner.intervention
        acts = (*(given if isinstance(given, (tuple, list)) else (given,)), *acts)
    elif made is not None and not acts:
        masked, unshifted, acts = made.edge_mask is not None, made.keeps_positions, made.interventions
    return {
        **_kind_and_options(inner),
        "masked": masked,
        "unshifted": unshifted,
        "interventions": [_kind_and_options(act) for act in acts],
        "written": identity(condition),
    }


def _kind_and_options(thing: Any) -> dict[str, Any]:
    """The kind of an object and its options: the fields of a dataclass, as text if they are not plain values."""
    names = [field.name for field in fields(thing) if field.repr] if is_dataclass(thing) else []
    options = {name: getattr(thing, name) for name in names if name != "intervention"}
    return {"kind": kind_of(thing), "options": {name: _stored(value) for name, value in options.items()}}


def _stored(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_stored(part) for part in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else identity(value)


def _token_texts(model: HookedModel, tokens: Int[Tensor, " pos"]) -> list[str]:
    """Each token as text, with control characters escaped (NetCDF takes no NUL); its id if there is no tokenizer."""
    if model.tokenizer is None:
        return [str(t) for t in tokens.tolist()]
    return [plain(model.tokenizer.decode([t])) for t in tokens.tolist()]


def described(
    model: HookedModel,
    prompts: Seq[Prompt],
    named: Mapping[str, Condition],
    made: Mapping[str, Sequence],
    analyses: Seq[Analysis],
    layers: list[int],
    paths: bool = False,
) -> dict[str, Any]:
    """The model, the prompts and the options, which determine the numbers; and when and where they were computed."""
    parameters = next(model.parameters())
    facts = facts_of(model) or ModelFacts()
    boundary = boundary_of(model)
    return {
        "model": {
            "name": provenance.name_of(str(model.cfg.model_name)),
            **({"path": str(model.cfg.model_name)} if paths else {}),
            "architecture": str(getattr(model.cfg, "architecture", None) or model.cfg.original_architecture),
            "parameters": hooks.count_parameters(model if facts.native is None else facts.native),
            "heads": int(model.cfg.n_heads),
            "layers": int(model.cfg.n_layers),
            "dtype": str(parameters.dtype).removeprefix("torch."),
            "device": str(parameters.device),
            "prepends_bos": bool(getattr(model.cfg, "default_prepend_bos", False)),
            "hooked_by": type(model).__name__,
            "revision": revision(model),
            "weights": facts.weights,
            "weights_hash": weights_hash(model),
            "verified": facts.verified,
            "not_verified": facts.report.not_checked if facts.report else [],
            "mended": list(facts.mended),
            **({} if boundary is None else {"rope": f"{boundary}; of each prompt: sequences.rope_factors"}),
        },
        "prompts": {"count": len(prompts), "hash": provenance.set_hash(prompts), "template": prompts[0].template},
        "conditions": {name: condition_data(condition, made[name]) for name, condition in named.items()},
        "analyses": {analysis.name: dict(analysis.options) for analysis in analyses},
        "measured_layers": layers,
        "threads": torch.get_num_threads(),
        "versions": provenance.versions(),
        "time": provenance.now(),
    }
