"""Collects values per batch into a labelled dataset: of each prompt, and moments over prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from mechattn.analysis.analysis import Analysis, Quantity
from mechattn.axes import PADDING, SEGMENTS
from mechattn.engine.nulls import with_nulls
from mechattn.engine.pending_sums import LayerValues
from mechattn.prompts.token_sequences import Batch
from mechattn.stats.intervals import Moments

if TYPE_CHECKING:
    import xarray as xr

Keep = Literal["moments", "prompts"]
BY_ORIGIN = "_by_origin"
_OUTER = ("prompt", "condition", "layer")  # the dimensions of every quantity, before its own
# By name: dimensions, values and attributes.
Variables = dict[str, tuple[tuple[str, ...], np.ndarray, dict[str, str]]]


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
            keep: Of quantities by position, moments over prompts alone, or each prompt's values too.
        """
        self.analysis = analysis
        self.quantities = with_nulls(analysis)
        self.coords = coords
        self.widths = widths
        self.keep = keep

        # Of each prompt [prompt, condition, layer, …], NaN until its batch has come.
        self._values: dict[str, np.ndarray] = {}
        # Of quantities by position, by variable, condition and layer.
        self._moments: dict[tuple[str, int, int], Moments] = {}

    def add(self, batch: Batch, values: LayerValues) -> None:
        """Add the values of one batch.

        Args:
            batch: Its rows say which prompt and condition each value belongs to.
            values: By layer and quantity, each [row of the batch, …] and on the CPU.
        """
        names = self.coords["condition"]
        prompts = np.array([prompt for prompt, _ in batch.rows])
        conditions = np.array([names.index(condition) for _, condition in batch.rows])

        for layer, layer_values in values.items():
            layer_number = self.coords["layer"].index(layer)
            cells = (prompts, conditions, layer_number)

            for name, value in layer_values.items():
                if value.dtype == torch.bfloat16:  # which numpy lacks
                    value = value.float()
                array = value.numpy()
                if "key" not in self.quantities[name].dims:
                    self._keep(name, array, cells)
                    continue

                for variable, by_position in self._by_position(name, array, batch).items():
                    self._merge(variable, by_position, conditions, layer_number)
                    if self.keep == "prompts":
                        self._keep(variable, by_position.astype(np.float32, copy=False), cells)

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
        by_position = {variable for variable, _, _ in self._moments}
        for name, quantity in self.quantities.items():
            if name in by_position:
                variables |= self._position_variables(name, quantity, "key")
                variables |= self._position_variables(name + BY_ORIGIN, quantity, "original_key")
            elif name in self._values:
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
        variables: Variables = {}
        if self.keep == "prompts":
            per_prompt = self._values[name]
            variables[f"{name}_per_prompt"] = ((*_OUTER, *dims), per_prompt, attributes)

        units = {
            "known_mean": quantity.units,
            "variance": f"{quantity.units} squared",
            "n": "prompts",
        }
        for statistic, unit in units.items():
            of_statistic = attributes | {"over": "prompts", "units": unit}
            label = name
            if statistic != "known_mean":
                label = f"{name}_{statistic}"
                of_statistic["description"] = f"{statistic} over prompts of {name}"
            values = self._over_prompts(name, statistic)
            variables[label] = (("condition", "layer", *dims), values, of_statistic)
        return variables

    def _over_prompts(self, name: str, statistic: str) -> np.ndarray:
        """One of the statistics of ``Moments`` of a variable, [condition, layer, …]."""
        shape = (len(self.coords["condition"]), len(self.coords["layer"]))
        # Cell by cell: what lies in between is then small enough for a processor's cache.
        arrays = [
            getattr(self._moments[name, condition, layer], statistic)
            for condition, layer in np.ndindex(shape)
        ]
        return np.reshape(arrays, (*shape, *arrays[0].shape))

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
            attributes["long_name"] = quantity.title  # which is the title in xarray's own figures
        return attributes
