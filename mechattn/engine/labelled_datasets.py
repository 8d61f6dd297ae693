"""Collects values per batch into labelled datasets, with the tokens that the model read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from mechattn.analysis.analysis import Analysis, Quantity
from mechattn.axes import SEGMENTS
from mechattn.engine.nulls import with_nulls
from mechattn.engine.request_checks import sides_of
from mechattn.errors import OptionError
from mechattn.markup import plain
from mechattn.model.hooked import HookedModel
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.token_sequences import PADDING, Batch, TokenSequence, token_texts
from mechattn.stats.intervals import Moments

if TYPE_CHECKING:
    import xarray as xr

Keep = Literal["moments", "prompts"]
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
        keep: Keep,
    ) -> None:
        self.analysis = analysis
        self.quantities = with_nulls(analysis)
        self.coords = coords  # the prompts, conditions and layers
        # The most positions of a sequence ("key"), and of a baseline ("original_key").
        self.widths = widths
        self.keep = keep
        self._values: dict[str, np.ndarray] = {}  # of each prompt
        self._moments: dict[tuple[str, int, int], Moments] = {}  # by variable, condition and layer

    def add(self, batch: Batch, values: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Add the values of one batch, by layer; they are on the CPU."""
        prompts = np.array([prompt for prompt, _ in batch.rows])
        names = [self.coords["condition"].index(condition) for _, condition in batch.rows]
        conditions = np.array(names)
        for layer, of_layer in values.items():
            cells = (prompts, conditions, self.coords["layer"].index(layer))
            for name, value in of_layer.items():
                array = value.numpy()
                if "key" not in self.quantities[name].dims:
                    dtype = np.promote_types(array.dtype, np.float32)
                    self._keep(name, array, cells, dtype)
                    continue
                for variable, by_position in self._by_position(name, array, batch).items():
                    if self.keep == "prompts":
                        self._keep(variable, by_position, cells, np.float32)
                    else:
                        self._merge(variable, by_position, conditions, cells[-1])

    def _keep(
        self, variable: str, array: np.ndarray, cells: tuple[Any, ...], dtype: np.dtype | type
    ) -> None:
        """Store each prompt's values."""
        if variable not in self._values:
            outer = [len(self.coords[dim]) for dim in _OUTER]
            self._values[variable] = np.full((*outer, *array.shape[1:]), np.nan, dtype=dtype)
        self._values[variable][cells] = array

    def _by_position(self, name: str, array: np.ndarray, batch: Batch) -> dict[str, np.ndarray]:
        """Values of each position, and in the order of the baseline's tokens; NaN where a sequence
        has none."""
        dtype = np.promote_types(array.dtype, np.float32)
        by_key, by_origin = (
            np.full((*array.shape[:-1], width), np.nan, dtype) for width in self.widths.values()
        )
        for row, origin in enumerate(batch.origin.numpy()):
            length = np.count_nonzero(origin > PADDING)
            original = np.flatnonzero(origin >= 0)
            by_key[row, ..., :length] = array[row, ..., :length]
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
        """The collected values with names, units and descriptions."""
        import xarray as xr

        variables: dict[str, Any] = {}
        for name, array in self._values.items():
            quantity = self.quantities.get(name)
            if quantity is not None and "key" not in quantity.dims:
                dims = (*_OUTER, *quantity.dims)
                variables[name] = (dims, array, self._attributes(quantity))
        measured = {*self._values, *(name for name, *_ in self._moments)}
        for name, quantity in self.quantities.items():
            if name in measured and "key" in quantity.dims:
                variables |= self._position_variables(name, quantity)
                variables |= self._position_variables(name + BY_ORIGIN, quantity)
        dataset = xr.Dataset(variables, coords={**self.coords, "segment": list(SEGMENTS)})

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

    def _position_variables(self, name: str, quantity: Quantity) -> dict:
        dims = _dims_of(name, quantity)
        attributes = self._attributes(quantity)
        variables: dict[str, Any] = {}
        if self.keep == "prompts":
            per_prompt = self._values[name]
            variables[f"{name}_per_prompt"] = ((*_OUTER, *dims), per_prompt, attributes)
            moments = Moments.of(per_prompt)
            mean, variance, n = moments.known_mean, moments.variance, moments.n
        else:
            mean, variance, n = self._statistics(name)
        outer = ("condition", "layer", *dims)
        over = {**attributes, "over": "prompts"}
        of_variance = {
            **over,
            "description": f"variance over prompts of {name}",
            "units": f"{quantity.units} squared",
        }
        of_n = {**over, "description": f"n over prompts of {name}", "units": "prompts"}
        variables[name] = (outer, mean, over)
        variables[f"{name}_variance"] = (outer, variance, of_variance)
        variables[f"{name}_n"] = (outer, n, of_n)
        return variables

    def _statistics(self, name: str) -> list[np.ndarray]:
        """Mean, variance and n over prompts [condition, layer, …]."""
        conditions = range(len(self.coords["condition"]))
        layers = range(len(self.coords["layer"]))
        # Computed cell by cell: what lies in between is then small enough for a processor's cache.
        return [
            np.array(
                [
                    [getattr(self._moments[name, condition, layer], statistic) for layer in layers]
                    for condition in conditions
                ]
            )
            for statistic in ("known_mean", "variance", "n")
        ]

    def _attributes(self, quantity: Quantity) -> dict[str, str]:
        options = [f"{key}={value!r}" for key, value in self.analysis.options.items()]
        return {
            "units": quantity.units,
            "description": quantity.description,
            "compared": quantity.compared,
            "no_null": quantity.no_null,
            "options": ", ".join(options),
        }


def _dims_of(variable: str, quantity: Quantity) -> tuple[str, ...]:
    """The dimensions of a quantity by position; by the baseline's positions if the variable's name
    says so."""
    key = "original_key" if variable.endswith(BY_ORIGIN) else "key"
    return tuple(key if dim == "key" else dim for dim in quantity.dims)


def lacking(dataset: xr.Dataset, analysis: Analysis) -> list[str]:
    """The variables that :class:`Collector` makes for an analysis and that its dataset lacks."""
    expected: dict[str, tuple[str, ...]] = {}
    for name, quantity in analysis.quantities.items():
        if "key" not in quantity.dims:
            expected[name] = (*_OUTER, *quantity.dims)
            continue
        for variable in (name, name + BY_ORIGIN):
            dims = ("condition", "layer", *_dims_of(variable, quantity))
            expected |= {variable + suffix: dims for suffix in MOMENTS}
    missing = []
    for name, dims in expected.items():
        array = dataset.get(name)
        if array is None or array.dtype.kind not in "fi" or array.dims != dims:
            missing.append(name)
    return missing


def check_values(
    analysis: Analysis, values: Mapping[str, Tensor], batch: Batch, heads: int
) -> None:
    """Refuse values that lack a quantity, add one, or do not have the shape that their dims
    declare."""
    quantities = analysis.quantities
    if not isinstance(values, Mapping):
        raise OptionError(
            f"{analysis.name}: values() gives a {type(values).__name__}; give a dictionary with"
            f" {', '.join(quantities)}"
        )
    for name in quantities:
        if name not in values:
            raise OptionError(
                f"{analysis.name}: values() lacks {name!r}, which its quantities declare"
            )
    for name in values:
        if name not in quantities:
            declared = ", ".join(map(repr, quantities))
            raise OptionError(
                f"{analysis.name}: values() gives {name!r}, which is not one of its quantities"
                f" ({declared})"
            )
    sizes = {
        "head": heads,
        "key": batch.tokens.shape[1],
        "segment": len(SEGMENTS),
        "to_segment": len(SEGMENTS),
    }
    sizes |= {dim: len(label) for dim, label in getattr(analysis, "coords", {}).items()}
    for name, quantity in quantities.items():
        value = values[name]
        if not isinstance(value, Tensor):
            raise OptionError(
                f"{analysis.name}: {name!r} is a {type(value).__name__}; values() must return"
                " tensors"
            )
        expected = [len(batch.rows), *(sizes.get(dim) for dim in quantity.dims)]
        fits = [size in (None, actual) for size, actual in zip(expected, value.shape, strict=False)]
        if value.ndim != len(expected) or not all(fits):
            dims = [f"batch {len(batch.rows)}"]
            dims += [f"{dim} {sizes[dim]}" if dim in sizes else dim for dim in quantity.dims]
            raise OptionError(
                f"{analysis.name}: {name!r} has the shape {list(value.shape)}; its dims"
                f" {quantity.dims} promise [{', '.join(dims)}]"
            )


# Each variable: the attribute of a sequence, and its unit.
_OF_TOKENS = {
    "tokens": ("tokens", "token id"),
    "origin": ("origin", "position in the baseline"),
    "segment_index": ("segment", "index in segments"),
}


def sequences_dataset(
    model: HookedModel,
    prompts: Sequence[Prompt],
    sequences: Sequence[Mapping[str, TokenSequence]],
    places: Sequence[int],
) -> xr.Dataset:
    """The tokens that the model read, their segments and origins, the prompts' groups, and the
    first prompt's texts."""
    import xarray as xr

    conditions = list(sequences[0])
    longest = max(len(sequence) for own in sequences for sequence in own.values())
    variables: dict[str, Any] = {}
    for name, (attribute, unit) in _OF_TOKENS.items():
        array = np.full((len(prompts), len(conditions), longest), PADDING, dtype=np.int32)
        for row, own in enumerate(sequences):
            for column, sequence in enumerate(own.values()):
                array[row, column, : len(sequence)] = getattr(sequence, attribute)
        variables[name] = (("prompt", "condition", "pos"), array, {"units": unit})

    first_texts = []
    for sequence in sequences[0].values():
        texts = _token_texts(model, sequence)
        first_texts.append(texts + [""] * (longest - len(texts)))
    is_text = {"units": "text"}
    variables["first_prompt_text"] = (("condition", "pos"), _strings(first_texts), is_text)
    sides = sides_of(model, sequences)
    if sides:
        variables["rope_factors"] = (("prompt",), _strings(sides), is_text)
    groups = [prompt.group for prompt in prompts]
    if None not in groups:
        variables["group"] = (("prompt",), _strings(groups), is_text)
    indices = np.asarray(places, dtype=np.int64)
    variables["place"] = (("prompt",), indices, {"units": "index in the whole run"})

    coords = {"prompt": [prompt.id for prompt in prompts], "condition": conditions}
    attributes = {"segments": ", ".join(SEGMENTS), "padding": PADDING}
    return xr.Dataset(variables, coords=coords, attrs=attributes)


def _strings(values: Any) -> np.ndarray:
    return np.array(values, dtype=object).astype(np.dtypes.StringDType())


def _token_texts(model: HookedModel, sequence: TokenSequence) -> list[str]:
    """Control characters are escaped, as NetCDF takes no NUL; the ids of a model without a
    tokenizer."""
    ids = sequence.tokens.tolist()
    if model.tokenizer is None:
        return list(map(str, ids))
    return [plain(text) for text in token_texts(model.tokenizer.decode, ids)]
