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
from mechattn.engine.attention_rows import with_nulls
from mechattn.engine.request_checks import sides_of
from mechattn.errors import OptionError
from mechattn.markup import plain
from mechattn.model import hooks
from mechattn.model.hooked import ModelFacts, facts_of
from mechattn.model.positions import boundary_of
from mechattn.model.several_devices import device_of
from mechattn.model.weights import revision, weights_hash
from mechattn.prompts.conditions import Baseline, Condition, Variant
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.token_sequences import PADDING, Batch, Sequence, token_texts
from mechattn.results import provenance
from mechattn.stats.intervals import Moments

if TYPE_CHECKING:
    import xarray as xr

    from mechattn.engine.run import Plan

Positions = Literal["moments", "prompts"]
BY_ORIGIN = "_by_origin"
MOMENTS = ("", "_variance", "_n")
_OUTER = ("prompt", "condition", "layer")  # the dimensions of every quantity, before its own


class Collector:
    """Collects the values of one analysis by batch and layer, and makes a dataset of them."""

    def __init__(
        self,
        analysis: Analysis,
        coords: dict[str, list],
        widths: Mapping[str, int],
        positions: Positions,
    ) -> None:
        self.analysis, self.quantities = analysis, with_nulls(analysis)
        self.coords = coords  # the prompts, conditions and layers
        self.widths = (
            widths  # the most positions of a sequence ("key"), and of a baseline ("original_key")
        )
        self.positions = positions
        self._values: dict[str, np.ndarray] = {}  # of each prompt
        self._moments: dict[tuple[str, int, int], Moments] = {}  # by variable, condition and layer

    def add(self, batch: Batch, values: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Add the values of one batch, by layer; they are on the CPU."""
        prompts = np.array([prompt for prompt, _ in batch.rows])
        conditions = np.array(
            [self.coords["condition"].index(condition) for _, condition in batch.rows]
        )
        for layer, of_layer in values.items():
            at_layer = self.coords["layer"].index(layer)
            for name, value in of_layer.items():
                per_key = "key" in self.quantities[name].dims
                made = (
                    self._by_position(name, value.numpy(), batch)
                    if per_key
                    else {name: value.numpy()}
                )
                for variable, array in made.items():
                    if per_key and self.positions != "prompts":
                        self._merge(variable, array, conditions, at_layer)
                        continue
                    if variable not in self._values:
                        shape = (*(len(self.coords[dim]) for dim in _OUTER), *array.shape[1:])
                        dtype = np.float32 if per_key else np.promote_types(array.dtype, np.float32)
                        self._values[variable] = np.full(shape, np.nan, dtype=dtype)
                    self._values[variable][prompts, conditions, at_layer] = array

    def _by_position(self, name: str, array: np.ndarray, batch: Batch) -> dict[str, np.ndarray]:
        """Values of each position, and in the order of the baseline's tokens; NaN where a sequence has none."""
        dtype = np.promote_types(array.dtype, np.float32)
        here, by_origin = (
            np.full((*array.shape[:-1], width), np.nan, dtype) for width in self.widths.values()
        )
        for row, origin in enumerate(batch.origin.numpy()):
            length = np.count_nonzero(origin > PADDING)
            original = np.flatnonzero(origin >= 0)
            here[row, ..., :length] = array[row, ..., :length]
            by_origin[row][..., origin[original]] = array[row][..., original]
        return {name: here, name + BY_ORIGIN: by_origin}

    def _merge(self, variable: str, array: np.ndarray, conditions: np.ndarray, layer: int) -> None:
        """Reduce this batch's rows to moments, condition by condition."""
        for condition in np.unique(conditions).tolist():
            new, key = Moments.of(array[conditions == condition]), (variable, condition, layer)
            self._moments[key] = self._moments[key].merge(new) if key in self._moments else new

    def dataset(self) -> xr.Dataset:
        """The collected values with names, units and descriptions."""
        import xarray as xr

        variables: dict[str, Any] = {}
        measured = {*self._values, *(name for name, *_ in self._moments)}
        for name, array in self._values.items():
            if name in self.quantities and "key" not in (dims := self.quantities[name].dims):
                variables[name] = ((*_OUTER, *dims), array, self._attributes(self.quantities[name]))
        for name, quantity in self.quantities.items():
            if name in measured and "key" in quantity.dims:
                variables |= self._position_variables(name, quantity)
                variables |= self._position_variables(name + BY_ORIGIN, quantity)
        made = xr.Dataset(variables, coords={**self.coords, "segment": list(SEGMENTS)})
        labels: dict[str, Any] = {
            "to_segment": list(SEGMENTS),
            "other_condition": self.coords["condition"],
        }
        labels |= getattr(self.analysis, "coords", {})
        labels |= {
            dim: np.arange(made.sizes.get(dim, 0)) for dim in ("head", "key", "original_key")
        }
        made = made.assign_coords({dim: label for dim, label in labels.items() if dim in made.dims})
        notes = getattr(self.analysis, "notes", {})
        return made.assign_attrs({"analysis": self.analysis.name, **notes})

    def _position_variables(self, name: str, quantity: Quantity) -> dict:
        dim = "original_key" if name.endswith(BY_ORIGIN) else "key"
        dims = tuple(dim if d == "key" else d for d in quantity.dims)
        if self.positions == "prompts":
            made = {
                f"{name}_per_prompt": (
                    (*_OUTER, *dims),
                    self._values[name],
                    self._attributes(quantity),
                )
            }
            moments = Moments.of(self._values[name])
        else:
            layers, conditions = (range(len(self.coords[dim])) for dim in ("layer", "condition"))
            cells = [
                [self._moments[name, condition, layer] for layer in layers]
                for condition in conditions
            ]
            parts = (
                [[getattr(cell, part) for cell in row] for row in cells]
                for part in ("n", "mean", "m2")
            )
            made, moments = {}, Moments(*map(np.array, parts))
        over = {"over": "prompts"}
        for suffix, array in zip(
            MOMENTS, (moments.known_mean, moments.variance, moments.n), strict=True
        ):
            attributes = self._attributes(quantity) | over
            if suffix:
                attributes |= {"description": f"{suffix[1:]} over prompts of {name}"}
                attributes |= {
                    "units": "prompts" if suffix == "_n" else f"{quantity.units} squared"
                }
            made[name + suffix] = (
                ("condition", "layer", *dims),
                array.astype(np.float64),
                attributes,
            )
        return made

    def _attributes(self, quantity: Quantity) -> dict[str, str]:
        about = {
            name: getattr(quantity, name)
            for name in ("units", "description", "compared", "no_null")
        }
        return about | {
            "options": ", ".join(f"{key}={value!r}" for key, value in self.analysis.options.items())
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
    numbers = {
        name: dataset[name].dims
        for name in dims
        if name in dataset and dataset[name].dtype.kind in "fi"
    }
    return [name for name, wanted in dims.items() if numbers.get(name) != wanted]


def check_values(
    analysis: Analysis, values: Mapping[str, Tensor], batch: Batch, heads: int
) -> None:
    """Refuse values that lack a quantity, add one, or do not have the shape that their dims declare."""
    promised = analysis.quantities
    if not isinstance(values, Mapping):
        raise OptionError(
            f"{analysis.name}: values() gives a {type(values).__name__}; give a dictionary with {', '.join(promised)}"
        )
    if lacking := [name for name in promised if name not in values]:
        raise OptionError(
            f"{analysis.name}: values() lacks {lacking[0]!r}, which its quantities declare"
        )
    if more := [name for name in values if name not in promised]:
        have = ", ".join(map(repr, promised))
        raise OptionError(
            f"{analysis.name}: values() gives {more[0]!r}, which is not one of its quantities ({have})"
        )
    sizes = {
        "head": heads,
        "key": batch.tokens.shape[1],
        "segment": len(SEGMENTS),
        "to_segment": len(SEGMENTS),
    }
    sizes |= {dim: len(label) for dim, label in getattr(analysis, "coords", {}).items()}
    for name, quantity in promised.items():
        value = values[name]
        if not isinstance(value, Tensor):
            raise OptionError(
                f"{analysis.name}: {name!r} is a {type(value).__name__}; values() must return tensors"
            )
        wanted = [len(batch.rows), *(sizes.get(dim) for dim in quantity.dims)]
        if value.ndim != len(wanted) or any(
            w not in (None, n) for w, n in zip(wanted, value.shape)
        ):
            dims = ", ".join(
                f"{dim} {sizes[dim]}" if dim in sizes else dim for dim in quantity.dims
            )
            raise OptionError(
                f"{analysis.name}: {name!r} has the shape {list(value.shape)}; its dims {quantity.dims} promise "
                f"[batch {len(batch.rows)}{', ' * bool(dims)}{dims}]"
            )


# Each variable: the part of a sequence, and its unit.
_OF_TOKENS = {
    "tokens": ("tokens", "token id"),
    "origin": ("origin", "position in the baseline"),
    "segment_index": ("segment", "index in segments"),
}


def sequences_dataset(
    plan: Plan, prompts: Seq[Prompt], sequences: Seq[Mapping[str, Sequence]], places: Seq[int]
) -> xr.Dataset:
    """The tokens that the model read, their segments and origins, the prompts' groups, and the first prompt's texts."""
    import xarray as xr

    def texts(values: Any) -> np.ndarray:
        return np.array(values, dtype=object).astype(np.dtypes.StringDType())

    model, conditions = plan.model, list(plan.conditions)
    dims, longest = (
        ("prompt", "condition", "pos"),
        max(len(s) for made in sequences for s in made.values()),
    )
    variables: dict[str, Any] = {}
    for name, (part, unit) in _OF_TOKENS.items():
        array = np.full((len(prompts), len(conditions), longest), -2, dtype=np.int32)
        for i, made in enumerate(sequences):
            for j, sequence in enumerate(made.values()):
                array[i, j, : len(sequence)] = getattr(sequence, part)
        variables[name] = (dims, array, {"units": unit})
    shown = []
    for sequence in sequences[0].values():
        ids = sequence.tokens.tolist()  # control characters are escaped, as NetCDF takes no NUL
        read = list(map(str, ids))
        if model.tokenizer is not None:
            read = [plain(text) for text in token_texts(model.tokenizer.decode, ids)]
        shown.append(read + [""] * (longest - len(ids)))
    variables["first_prompt_text"] = (dims[1:], texts(shown), {"units": "text"})
    if sides := sides_of(model, sequences):
        variables["rope_factors"] = (("prompt",), texts(sides), {"units": "text"})
    if all(prompt.group is not None for prompt in prompts):
        variables["group"] = (
            ("prompt",),
            texts([prompt.group for prompt in prompts]),
            {"units": "text"},
        )
    variables["place"] = (
        ("prompt",),
        np.asarray(places, dtype=np.int64),
        {"units": "index in the whole run"},
    )
    made_dataset = xr.Dataset(
        variables, coords={"prompt": [p.id for p in prompts], "condition": conditions}
    )
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
        masked, unshifted, acts = (
            made.edge_mask is not None,
            made.keeps_positions,
            made.interventions,
        )
    marks = {
        "masked": masked,
        "unshifted": unshifted,
        "interventions": [_kind_and_options(act) for act in acts],
    }
    return _kind_and_options(inner) | marks | {"written": provenance.identity(condition)}


def _kind_and_options(thing: Any) -> dict[str, Any]:
    """The kind of an object and its options: the fields of a dataclass, as text if they are not plain values."""
    names = [field.name for field in fields(thing) if field.repr] if is_dataclass(thing) else []
    options = {name: getattr(thing, name) for name in names if name != "intervention"}
    return {
        "kind": provenance.kind_of(thing),
        "options": {name: _stored(value) for name, value in options.items()},
    }


def _stored(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_stored(part) for part in value]
    return (
        value
        if value is None or isinstance(value, (bool, int, float, str))
        else provenance.identity(value)
    )


def described(plan: Plan, prompts: Seq[Prompt], made: Mapping[str, Sequence]) -> dict[str, Any]:
    """The model, the prompts and the options, which determine the numbers; and when and where they were computed."""
    model = plan.model
    parameters = next(model.parameters())
    facts = facts_of(model) or ModelFacts()
    boundary = boundary_of(model)
    return {
        "model": {
            "name": provenance.name_of(str(model.cfg.model_name)),
            **({"path": str(model.cfg.model_name)} if plan.paths else {}),
            "architecture": str(
                getattr(model.cfg, "architecture", None) or model.cfg.original_architecture
            ),
            "parameters": hooks.count_parameters(model if facts.native is None else facts.native),
            "heads": int(model.cfg.n_heads),
            "layers": int(model.cfg.n_layers),
            "dtype": str(parameters.dtype).removeprefix("torch."),
            "device": str(device_of(model)),
            "prepends_bos": bool(getattr(model.cfg, "default_prepend_bos", False)),
            "hooked_by": type(model).__name__,
            "revision": revision(model),
            "weights": facts.weights,
            **({} if facts.gguf is None else {"gguf": dict(facts.gguf)}),
            "weights_hash": weights_hash(model),
            "verified": facts.verified,
            "not_verified": facts.report.not_checked if facts.report else [],
            "mended": list(facts.mended),
            **(
                {}
                if boundary is None
                else {"rope": f"{boundary}; of each prompt: sequences.rope_factors"}
            ),
        },
        "prompts": {
            "count": len(prompts),
            "hash": provenance.set_hash(prompts),
            "template": prompts[0].template,
        },
        "conditions": {
            name: condition_data(condition, made[name])
            for name, condition in plan.conditions.items()
        },
        "analyses": {analysis.name: dict(analysis.options) for analysis in plan.analyses},
        "measured_layers": plan.layers,
        "threads": torch.get_num_threads(),
        "versions": provenance.versions(),
        "time": provenance.now(),
    }
