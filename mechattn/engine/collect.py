"""Collects values per batch into labelled datasets, with the tokens that the model read and the provenance."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from mechattn.analysis.analysis import Analysis, Quantity
from mechattn.axes import SEGMENTS
from mechattn.engine.check import sides_of
from mechattn.engine.null import with_nulls
from mechattn.errors import OptionError
from mechattn.markup import plain
from mechattn.model import hooks
from mechattn.model.hooked import HookedModel, ModelFacts, facts_of
from mechattn.model.positions import boundary_of
from mechattn.model.weights import revision, weights_hash
from mechattn.prompts.conditions import Baseline, Condition, Variant
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.sequences import Batch, Sequence
from mechattn.results import provenance
from mechattn.results.provenance import identity, kind_of
from mechattn.stats.moments import Moments

if TYPE_CHECKING:
    import xarray as xr

Positions = Literal["moments", "prompts"]
BY_ORIGIN = "_by_origin"
MOMENTS = ("", "_variance", "_n")
_OUTER = ("prompt", "condition", "layer")  # the dimensions of every quantity, before its own


class Collector:
    """Collects the values of one analysis by batch and layer, and makes a dataset of them."""

    def __init__(
        self, analysis: Analysis, prompts: list[str], conditions: list[str], layers: list[int], positions: Positions
    ) -> None:
        self.analysis, self.quantities = analysis, with_nulls(analysis)
        self.coords: dict[str, list] = {"prompt": prompts, "condition": conditions, "layer": layers}
        self.positions = positions
        self._scalars: dict[str, np.ndarray] = {}
        self._rows: dict[tuple[str, int, int], list[tuple[int, np.ndarray]]] = {}
        self._moments: dict[tuple[str, int, int], Moments] = {}

    def add(self, batch: Batch, values: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Add the values of one batch, by layer; they are on the CPU."""
        for layer, of_layer in values.items():
            at_layer = self.coords["layer"].index(layer)
            for name, value in of_layer.items():
                array = value.numpy()
                per_key = "key" in self.quantities[name].dims
                if not per_key and name not in self._scalars:
                    shape = (*(len(self.coords[dim]) for dim in _OUTER), *array.shape[1:])
                    self._scalars[name] = np.full(shape, np.nan, dtype=np.promote_types(array.dtype, np.float32))
                for row, (prompt, condition) in enumerate(batch.rows):
                    at_condition = self.coords["condition"].index(condition)
                    if per_key:
                        self._add_positions(name, prompt, at_condition, at_layer, array[row], batch.origin[row].numpy())
                    else:
                        self._scalars[name][prompt, at_condition, at_layer] = array[row]
            self._merge_rows()

    def dataset(self) -> xr.Dataset:
        """The collected values with names, units and descriptions."""
        import xarray as xr

        variables: dict[str, Any] = {}
        for name, array in self._scalars.items():
            dims = (*_OUTER, *self.quantities[name].dims)
            variables[name] = (dims, array, self._attributes(self.quantities[name]))
        measured = {name for name, *_ in (*self._rows, *self._moments)}
        for name, quantity in self.quantities.items():
            if name in measured:
                variables |= self._position_variables(name, quantity)
                variables |= self._position_variables(name + BY_ORIGIN, quantity)
        made = xr.Dataset(variables, coords={**self.coords, "segment": list(SEGMENTS)})
        labels: dict[str, Any] = {"to_segment": list(SEGMENTS), "other_condition": self.coords["condition"]}
        labels |= getattr(self.analysis, "coords", {})
        made = made.assign_coords({dim: label for dim, label in labels.items() if dim in made.dims})
        for dim in ("head", "key", "original_key"):
            if dim in made.dims:
                made = made.assign_coords({dim: np.arange(made.sizes[dim])})
        return made.assign_attrs({"analysis": self.analysis.name})

    def _add_positions(
        self, name: str, prompt: int, condition: int, layer: int, row: np.ndarray, origin: np.ndarray
    ) -> None:
        real, original = origin >= -1, origin >= 0
        by_origin = np.empty((*row.shape[:-1], int(original.sum())), dtype=row.dtype)
        by_origin[..., origin[original]] = row[..., original]
        self._rows.setdefault((name, condition, layer), []).append((prompt, row[..., real]))
        self._rows.setdefault((name + BY_ORIGIN, condition, layer), []).append((prompt, by_origin))

    def _merge_rows(self) -> None:
        """Reduce this batch's rows to moments, unless the values of each prompt are kept."""
        if self.positions == "prompts":
            return
        for key, rows in self._rows.items():
            longest = max(row.shape[-1] for _, row in rows)
            new = Moments.of(np.stack([_widened(row, longest, np.nan) for _, row in rows]))
            self._moments[key] = self._moments[key].merge(new) if key in self._moments else new
        self._rows = {}

    def _position_variables(self, name: str, quantity: Quantity) -> dict:
        dim = "original_key" if name.endswith(BY_ORIGIN) else "key"
        dims = tuple(dim if d == "key" else d for d in quantity.dims)
        if self.positions == "prompts":
            every = self._every_prompt(name)
            made = {f"{name}_per_prompt": ((*_OUTER, *dims), every, self._attributes(quantity))}
            moments = Moments.of(every)
        else:
            made, moments = {}, self._all_moments(name)
        over = {"over": "prompts"}
        for suffix, array in zip(MOMENTS, (moments.known_mean, moments.variance, moments.n), strict=True):
            attributes = self._attributes(quantity) | over
            if suffix:
                attributes |= {"description": f"{suffix[1:]} over prompts of {name}"}
                attributes |= {"units": "prompts" if suffix == "_n" else f"{quantity.units} squared"}
            made[name + suffix] = (("condition", "layer", *dims), array.astype(np.float64), attributes)
        return made

    def _all_moments(self, name: str) -> Moments:
        layers, conditions = (range(len(self.coords[dim])) for dim in ("layer", "condition"))
        cells = [[self._moments[name, condition, layer] for layer in layers] for condition in conditions]
        longest = max(cell.n.shape[-1] for row in cells for cell in row)
        parts = []
        for part in ("n", "mean", "m2"):
            arrays = [[_widened(getattr(cell, part), longest, 0.0) for cell in row] for row in cells]
            parts.append(np.stack([np.stack(row) for row in arrays]))
        return Moments(*parts)

    def _every_prompt(self, name: str) -> np.ndarray:
        rows = {key: dict(value) for key, value in self._rows.items() if key[0] == name}
        longest = max(row.shape[-1] for cell in rows.values() for row in cell.values())
        some = next(iter(next(iter(rows.values())).values()))
        outer = tuple(len(self.coords[dim]) for dim in _OUTER)
        every = np.full((*outer, *some.shape[:-1], longest), np.nan, dtype=np.float32)
        for (_, condition, layer), cell in rows.items():
            for prompt, row in cell.items():
                every[prompt, condition, layer, ..., : row.shape[-1]] = row
        return every

    def _attributes(self, quantity: Quantity) -> dict[str, str]:
        options = ", ".join(f"{key}={value!r}" for key, value in self.analysis.options.items())
        return {
            "units": quantity.units,
            "description": quantity.description,
            "compared": quantity.compared,
            "no_null": quantity.no_null,
            "options": options,
        }


def lacking(dataset: xr.Dataset, analysis: Analysis) -> list[str]:
    """The variables that :class:`Collector` makes for an analysis and that its dataset lacks."""
    dims: dict[str, tuple[str, ...]] = {}
    for name, quantity in analysis.quantities.items():
        if "key" not in quantity.dims:
            dims[name] = (*_OUTER, *quantity.dims)
            continue
        for of, key in ((name, "key"), (name + BY_ORIGIN, "original_key")):
            own = tuple(key if dim == "key" else dim for dim in quantity.dims)
            dims |= {of + suffix: ("condition", "layer", *own) for suffix in MOMENTS}
    return [
        name
        for name, wanted in dims.items()
        if name not in dataset or dataset[name].dims != wanted or dataset[name].dtype.kind not in "fi"
    ]


def _widened(array: np.ndarray, width: int, fill: float) -> np.ndarray:
    missing = [(0, 0)] * (array.ndim - 1) + [(0, width - array.shape[-1])]
    return np.pad(array, missing, constant_values=fill)


def check_values(analysis: Analysis, values: Mapping[str, Tensor], batch: Batch, heads: int) -> None:
    """Refuse values that lack a quantity, add one, or do not have the shape that their dims declare."""
    promised = analysis.quantities
    if not isinstance(values, Mapping):
        raise OptionError(
            f"{analysis.name}: values() gives a {type(values).__name__}; give a dictionary with {', '.join(promised)}"
        )
    if lacking := [name for name in promised if name not in values]:
        raise OptionError(f"{analysis.name}: values() lacks {lacking[0]!r}, which its quantities declare")
    if more := [name for name in values if name not in promised]:
        have = ", ".join(map(repr, promised))
        raise OptionError(f"{analysis.name}: values() gives {more[0]!r}, which is not one of its quantities ({have})")
    sizes = {"head": heads, "key": batch.tokens.shape[1], "segment": len(SEGMENTS), "to_segment": len(SEGMENTS)}
    sizes |= {dim: len(label) for dim, label in getattr(analysis, "coords", {}).items()}
    for name, quantity in promised.items():
        value = values[name]
        if not isinstance(value, Tensor):
            raise OptionError(f"{analysis.name}: {name!r} is a {type(value).__name__}; values() must return tensors")
        wanted = [len(batch.rows), *(sizes.get(dim) for dim in quantity.dims)]
        if value.ndim != len(wanted) or any(w not in (None, n) for w, n in zip(wanted, value.shape)):
            dims = ", ".join(f"{dim} {sizes[dim]}" if dim in sizes else dim for dim in quantity.dims)
            raise OptionError(
                f"{analysis.name}: {name!r} has the shape {list(value.shape)}; its dims {quantity.dims} promise "
                f"[batch {len(batch.rows)}{', ' * bool(dims)}{dims}]"
            )


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
        ids = sequence.tokens.tolist()  # control characters are escaped, as NetCDF takes no NUL
        texts[j, : len(ids)] = [str(t) if model.tokenizer is None else plain(model.tokenizer.decode([t])) for t in ids]
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
