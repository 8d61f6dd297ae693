"""Collects values per batch into labelled datasets, of each prompt and moments over prompts; and
what a result records of its run: the model, the conditions, and the tokens that were read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mechattn.analysis.analysis import Analysis, Quantity
from mechattn.axes import PADDING, SEGMENTS
from mechattn.engine.nulls import with_nulls
from mechattn.engine.pending_sums import LayerValues
from mechattn.engine.request_checks import sides_of
from mechattn.errors import plain
from mechattn.model.hooked import (
    HookedModel,
    ModelFacts,
    architecture_of,
    device_of,
    facts_of,
    innermost,
)
from mechattn.model.positions import boundary_of
from mechattn.model.weights import weights_hash
from mechattn.prompts.conditions import Baseline, Condition, Variant
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.token_sequences import Batch, TokenSequence, token_texts
from mechattn.results import provenance
from mechattn.stats.intervals import Moments

if TYPE_CHECKING:
    import xarray as xr

Keep = Literal["moments", "prompts"]
BY_ORIGIN = "_by_origin"
_OUTER = ("prompt", "condition", "layer")  # the dimensions of every quantity, before its own
Variables = dict[str, tuple[tuple[str, ...], np.ndarray, dict[str, str]]]
# Each variable: the attribute of a sequence, and its unit.
_OF_TOKENS = {
    "tokens": ("tokens", "token id"),
    "origin": ("origin", "position in the baseline"),
    "segment_index": ("segment", "index in segments"),
}


class Collector:
    """Collects the values of one analysis by batch and layer, and makes a dataset of them."""

    def __init__(
        self,
        analysis: Analysis,
        coords: dict[str, list],
        widths: Mapping[str, int],
        keep: Keep,
    ) -> None:
        """Start without values.

        Args:
            analysis: Whose values are collected.
            coords: The names of the prompts, conditions and layers, in the order of the arrays.
            widths: The most positions of a sequence ("key"), and of a baseline ("original_key").
            keep: Of quantities by position, moments over prompts alone, or each prompt's values.
        """
        self.analysis = analysis
        self.quantities = with_nulls(analysis)
        self.coords = coords
        self.widths = widths
        self.keep = keep

        # Of each prompt [prompt, condition, layer, …], NaN until its batch has come.
        self._values: dict[str, np.ndarray] = {}
        # By variable, condition and layer.
        self._moments: dict[tuple[str, int, int], Moments] = {}

    def add(self, batch: Batch, values: LayerValues) -> None:
        """Add the values of one batch.

        Args:
            batch: Its rows say which prompt and condition each value belongs to.
            values: By layer and quantity, each [row of the batch, …] and on the CPU.
        """
        condition_numbers = {name: number for number, name in enumerate(self.coords["condition"])}
        prompts = np.array([prompt for prompt, _ in batch.rows])
        conditions = np.array([condition_numbers[condition] for _, condition in batch.rows])

        for layer, layer_values in values.items():
            layer_number = self.coords["layer"].index(layer)
            cells = (prompts, conditions, layer_number)

            for name, value in layer_values.items():
                array = value.numpy()
                if "key" not in self.quantities[name].dims:
                    self._keep(name, array, cells)
                    continue

                for variable, by_position in self._by_position(name, array, batch).items():
                    if self.keep == "prompts":
                        self._keep(variable, by_position.astype(np.float32, copy=False), cells)
                    else:
                        self._merge(variable, by_position, conditions, layer_number)

    def _keep(self, variable: str, array: np.ndarray, cells: tuple[Any, ...]) -> None:
        """Store each prompt's values.

        Args:
            variable: The variable's name.
            array: Values [row of the batch, …].
            cells: The prompt and the condition of each row, and the layer.
        """
        if variable not in self._values:
            outer = [len(self.coords[dim]) for dim in _OUTER]
            shape = (*outer, *array.shape[1:])
            # Only a float can be NaN, where a prompt has no value.
            dtype = np.promote_types(array.dtype, np.float32)
            self._values[variable] = np.full(shape, np.nan, dtype=dtype)

        self._values[variable][cells] = array

    def _by_position(self, name: str, array: np.ndarray, batch: Batch) -> dict[str, np.ndarray]:
        """Values of each position, and in the order of the baseline's tokens; NaN where a sequence
        has none."""
        dtype = np.promote_types(array.dtype, np.float32)
        outer = array.shape[:-1]
        by_key = np.full((*outer, self.widths["key"]), np.nan, dtype)
        by_origin = np.full((*outer, self.widths["original_key"]), np.nan, dtype)

        for row, origin in enumerate(batch.origin.numpy()):
            # Padding is on the right.
            length = np.count_nonzero(origin > PADDING)
            by_key[row, ..., :length] = array[row, ..., :length]

            # The row first, and then its positions: in one step numpy would move that axis to the
            # front.
            original = np.flatnonzero(origin >= 0)
            by_origin[row][..., origin[original]] = array[row][..., original]

        return {name: by_key, name + BY_ORIGIN: by_origin}

    def _merge(self, variable: str, array: np.ndarray, conditions: np.ndarray, layer: int) -> None:
        """Reduce this batch's rows to moments, condition by condition."""
        for condition in np.unique(conditions).tolist():
            moments = Moments.of(array[conditions == condition])
            key = (variable, condition, layer)
            if key in self._moments:
                moments = self._moments[key].merge(moments)
            self._moments[key] = moments

    def dataset(self) -> xr.Dataset:
        """The collected values with names, units and descriptions.

        A quantity of which no value has come, as a null that no layer has, is left out.
        """
        # Here, because its import takes a while.
        import xarray as xr

        variables: Variables = {}
        collected = {*self._values, *(variable for variable, _, _ in self._moments)}
        for name, quantity in self.quantities.items():
            if name not in collected:
                continue
            if "key" in quantity.dims:
                variables |= self._position_variables(name, quantity, "key")
                variables |= self._position_variables(name + BY_ORIGIN, quantity, "original_key")
            else:
                dims = (*_OUTER, *quantity.dims)
                variables[name] = (dims, self._values[name], self._attributes(quantity))

        coords = {**self.coords, "segment": list(SEGMENTS)}
        dataset = xr.Dataset(variables, coords=coords)

        # Labels of the other dimensions that these variables may have.
        labels: dict[str, Any] = {
            "to_segment": list(SEGMENTS),
            "other_condition": self.coords["condition"],
            **getattr(self.analysis, "coords", {}),
        }
        for dim in ("head", "key", "original_key"):
            labels[dim] = np.arange(dataset.sizes.get(dim, 0))

        of_dims = {dim: label for dim, label in labels.items() if dim in dataset.dims}
        notes = getattr(self.analysis, "notes", {})
        attributes = {"analysis": self.analysis.name, **notes}
        return dataset.assign_coords(of_dims).assign_attrs(attributes)

    def _position_variables(self, name: str, quantity: Quantity, position: str) -> Variables:
        """Mean, variance and n over prompts by position; also each prompt's values if kept.

        Args:
            name: The variable's name.
            quantity: What it holds.
            position: The dimension of its positions: those of the sequence, or of the baseline.
        """
        dims = tuple(position if dim == "key" else dim for dim in quantity.dims)
        attributes = self._attributes(quantity)
        mean, variance, n = self._over_prompts(name)
        of_variance = {
            "description": f"variance over prompts of {name}",
            "units": f"{quantity.units} squared",
        }
        of_n = {"description": f"n over prompts of {name}", "units": "prompts"}

        variables: Variables = {}
        if self.keep == "prompts":
            per_prompt = self._values[name]
            variables[f"{name}_per_prompt"] = ((*_OUTER, *dims), per_prompt, attributes)

        outer = ("condition", "layer", *dims)
        attributes = attributes | {"over": "prompts"}
        variables[name] = (outer, mean, attributes)
        variables[f"{name}_variance"] = (outer, variance, attributes | of_variance)
        variables[f"{name}_n"] = (outer, n, attributes | of_n)
        return variables

    def _over_prompts(self, name: str) -> list[np.ndarray]:
        """Mean, variance and n over prompts of a variable, each [condition, layer, …]."""
        statistics = ("known_mean", "variance", "n")
        if self.keep == "prompts":
            moments = Moments.of(self._values[name])
            return [getattr(moments, statistic) for statistic in statistics]

        # Cell by cell: what lies in between is then small enough for a processor's cache.
        shape = (len(self.coords["condition"]), len(self.coords["layer"]))
        cells = [self._moments[name, condition, layer] for condition, layer in np.ndindex(shape)]
        stacked = []
        for statistic in statistics:
            arrays = [getattr(cell, statistic) for cell in cells]
            stacked.append(np.reshape(arrays, (*shape, *arrays[0].shape)))
        return stacked

    def _attributes(self, quantity: Quantity) -> dict[str, str]:
        """What a variable says of itself."""
        options = [f"{key}={value!r}" for key, value in self.analysis.options.items()]
        attributes = {
            "units": quantity.units,
            "description": quantity.description,
            "compared": quantity.compared,
            "no_null": quantity.no_null,
            "options": ", ".join(options),
        }
        if quantity.title:
            attributes["long_name"] = (
                quantity.title
            )  # which xarray's own figures take as title, too
        return attributes


def model_data(model: HookedModel, paths: bool) -> dict[str, Any]:
    """A model as data: its shapes, precision, weights and verification; with ``paths`` also where
    it is.

    Args:
        model: A hooked model; of one that mechattn did not load, less is known.
        paths: Whether the full path of a checkpoint is recorded too.

    Returns:
        Plain values, for JSON.
    """
    cfg = model.cfg
    facts = facts_of(model) or ModelFacts()
    native = model if facts.native is None else facts.native

    described: dict[str, Any] = {"name": provenance.name_of(str(cfg.model_name))}
    if paths:
        described["path"] = str(cfg.model_name)
    described |= {
        "architecture": architecture_of(model),
        "parameters": sum(parameter.numel() for parameter in innermost(native).parameters()),
        "heads": int(cfg.n_heads),
        "layers": int(cfg.n_layers),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "device": str(device_of(model)),
        "prepends_bos": bool(getattr(cfg, "default_prepend_bos", False)),
        "hooked_by": type(model).__name__,
        "revision": facts.revision,
        "weights": facts.weights,
        "random_weights": facts.random_weights,
        "weights_hash": weights_hash(model),
        "verified": facts.verified,
        "not_verified": [],
        "mended": list(facts.mended),
    }

    if facts.report is not None:
        described["not_verified"] = facts.report.not_checked
    if facts.gguf is not None:
        described["gguf"] = dict(facts.gguf)
    boundary = boundary_of(model)
    if boundary is not None:
        described["rope"] = f"{boundary}; of each prompt: sequences.rope_factors"
    return described


def condition_data(condition: Condition, sequence: TokenSequence | None = None) -> dict[str, Any]:
    """A condition as data: kind, options, marks and interventions; and as text.

    Of a condition that a user wrote, the marks and interventions are those of a ``sequence`` that
    it made.

    Args:
        condition: A condition, perhaps inside variants such as ``unshifted()``.
        sequence: A sequence that it made.

    Returns:
        Plain values, for JSON.
    """
    # Variants from the outermost to the innermost; an inner one's interventions act first.
    inner: Any = condition
    masked = False
    unshifted = False
    interventions: tuple[Any, ...] = ()
    while isinstance(inner, Variant):
        masked = masked or inner.hides
        unshifted = unshifted or inner.keeps_positions
        interventions = (*inner.interventions, *interventions)
        inner = inner.condition

    if isinstance(inner, Baseline):
        own = inner.intervention
        if not isinstance(own, (tuple, list)):
            own = (own,)
        interventions = (*own, *interventions)
    elif sequence is not None and not interventions:
        masked = sequence.cut_edges is not None
        unshifted = sequence.keeps_positions
        interventions = sequence.interventions

    return {
        **_kind_and_options(inner),
        "masked": masked,
        "unshifted": unshifted,
        "interventions": [_kind_and_options(intervention) for intervention in interventions],
        "written": provenance.identity(condition),
    }


def _kind_and_options(instance: Any) -> dict[str, Any]:
    """The kind of a condition or an intervention and its options: the fields of a dataclass, as
    text if they are not plain values."""
    options = {}
    if is_dataclass(instance):
        for field in fields(instance):
            if field.name != "intervention":  # which is recorded by itself
                options[field.name] = _stored(getattr(instance, field.name))
    return {"kind": provenance.kind_of(instance), "options": options}


def _stored(value: Any) -> Any:
    """A value that JSON can hold; the identity of any other object."""
    if isinstance(value, (tuple, list)):
        return [_stored(part) for part in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return provenance.identity(value)


def sequences_dataset(
    model: HookedModel,
    prompts: Sequence[Prompt],
    sequences: Sequence[Mapping[str, TokenSequence]],
    places: Sequence[int],
) -> xr.Dataset:
    """The tokens that the model read, their segments and origins, the prompts' groups, and the
    first prompt's texts.

    Args:
        model: The model, whose tokenizer gives the texts.
        prompts: The prompts, in the order of the dataset.
        sequences: The sequence of each prompt under each condition.
        places: The index of each prompt in the whole run.

    Returns:
        Variables [prompt condition pos], padded on the right, and some of each prompt alone.
    """
    # Here, because its import takes a while.
    import xarray as xr

    conditions = list(sequences[0])
    longest = max(len(sequence) for own in sequences for sequence in own.values())
    shape = (len(prompts), len(conditions), longest)

    variables: dict[str, Any] = {}
    for name, (attribute, unit) in _OF_TOKENS.items():
        array = np.full(shape, PADDING, dtype=np.int32)
        for row, own in enumerate(sequences):
            for column, sequence in enumerate(own.values()):
                array[row, column, : len(sequence)] = getattr(sequence, attribute)
        variables[name] = (("prompt", "condition", "pos"), array, {"units": unit})

    # Of one prompt only, for a glance at what the conditions do: texts take much room.
    first_texts = []
    for sequence in sequences[0].values():
        texts = list(map(str, sequence.tokens.tolist()))
        if model.tokenizer is not None:
            decoded = token_texts(model.tokenizer.decode, sequence.tokens.tolist())
            texts = [plain(text) for text in decoded]  # without NUL, which NetCDF does not take
        padding = [""] * (longest - len(texts))
        first_texts.append(texts + padding)
    variables["first_prompt_text"] = _text_variable(("condition", "pos"), first_texts)

    # Only of a model whose RoPE depends on the length.
    sides = sides_of(model, sequences)
    if sides:
        variables["rope_factors"] = _text_variable(("prompt",), sides)

    # Groups are for clusters in the statistics, which need one of every prompt.
    groups = [prompt.group for prompt in prompts]
    if None not in groups:
        variables["group"] = _text_variable(("prompt",), groups)

    indices = np.asarray(places, dtype=np.int64)
    variables["place"] = (("prompt",), indices, {"units": "index in the whole run"})

    coords = {"prompt": [prompt.id for prompt in prompts], "condition": conditions}
    attributes = {"segments": ", ".join(SEGMENTS), "padding": PADDING}
    return xr.Dataset(variables, coords=coords, attrs=attributes)


def _text_variable(dims: tuple[str, ...], texts: Any) -> tuple[Any, ...]:
    """Texts of any length, as Zarr stores them."""
    array = np.array(texts, dtype=object).astype(np.dtypes.StringDType())
    return dims, array, {"units": "text"}
