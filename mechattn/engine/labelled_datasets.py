"""Collects the values of batches into a labelled dataset: each prompt's values, and moments."""

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
_OUTER = ("prompt", "condition", "layer")  # the first dimensions of each prompt's values
# The dimensions, the values and the attributes of each variable, by its name.
Variables = dict[str, tuple[tuple[str, ...], np.ndarray, dict[str, str]]]


class Collector:
    """Collects the values of one analysis, batch by batch, and makes a dataset of them."""

    def __init__(
        self,
        analysis: Analysis,
        coords: dict[str, list],
        widths: Mapping[str, int],
        keep: Keep,
    ) -> None:
        """Start without values.

        Args:
            analysis: The analysis.
            coords: The ids of the prompts, the names of the conditions, and the layers, in the
                order of the arrays.
            widths: The length of the longest sequence ("key") and of the longest baseline
                ("original_key").
            keep: What is kept of quantities by position: only moments over prompts, or each
                prompt's values too.
        """
        self.analysis = analysis
        self.quantities = with_nulls(analysis)
        self.coords = coords
        self.widths = widths
        self.keep = keep

        # Each prompt's values [prompt, condition, layer, …] by variable; NaN until its batch comes.
        self._values: dict[str, np.ndarray] = {}
        # Moments of quantities by position; keys are the variable and the indices of condition and
        # layer.
        self._moments: dict[tuple[str, int, int], Moments] = {}

    def add(self, batch: Batch, values: LayerValues) -> None:
        """Add the values of one batch.

        Args:
            batch: The batch, whose rows name the prompt and the condition of each value.
            values: By layer and quantity, each [row of the batch, …] and on the CPU.
        """
        condition_names = self.coords["condition"]
        prompt_indices = np.array([prompt for prompt, _ in batch.rows])
        condition_indices = np.array([condition_names.index(name) for _, name in batch.rows])

        for layer, layer_values in values.items():
            layer_index = self.coords["layer"].index(layer)
            value_indices = (prompt_indices, condition_indices, layer_index)

            for name, value in layer_values.items():
                if value.dtype == torch.bfloat16:  # which numpy lacks
                    value = value.float()
                array = value.numpy()
                if "key" not in self.quantities[name].dims:
                    self._store(name, array, value_indices)
                    continue

                for variable, by_position in self._by_position(name, array, batch).items():
                    self._merge(variable, by_position, condition_indices, layer_index)
                    if self.keep == "prompts":
                        float32_values = by_position.astype(np.float32, copy=False)
                        self._store(variable, float32_values, value_indices)

    def dataset(self) -> xr.Dataset:
        """The collected values with names, units and descriptions.

        A quantity without any value is left out, such as a null that the model does not have.
        """
        # Imported here, because it takes a while.
        import xarray as xr

        variables: Variables = {}
        position_quantities = {variable for variable, _, _ in self._moments}
        for name, quantity in self.quantities.items():
            if name in position_quantities:
                variables |= self._position_variables(name, quantity, "key")
                variables |= self._position_variables(name + BY_ORIGIN, quantity, "original_key")
            elif name in self._values:
                dims = (*_OUTER, *quantity.dims)
                variables[name] = (dims, self._values[name], self._attributes(quantity))

        dataset = xr.Dataset(variables, {**self.coords, "segment": list(SEGMENTS)})

        # Labels of the other dimensions that variables may have.
        labels_by_dim: dict[str, Any] = {
            "to_segment": list(SEGMENTS),
            "other_condition": self.coords["condition"],
            **getattr(self.analysis, "coords", {}),
        }
        for dim in ("head", "key", "original_key"):
            labels_by_dim[dim] = np.arange(dataset.sizes.get(dim, 0))

        coords = {dim: labels for dim, labels in labels_by_dim.items() if dim in dataset.dims}
        notes = getattr(self.analysis, "notes", {})
        attributes = {"analysis": self.analysis.name, **notes}
        return dataset.assign_coords(coords).assign_attrs(attributes)

    def _store(self, variable: str, values: np.ndarray, value_indices: tuple[Any, ...]) -> None:
        """Store each prompt's values.

        Args:
            variable: The variable's name.
            values: Values [row of the batch, …].
            value_indices: The indices of each row's prompt, of its condition, and of the layer.
        """
        if variable not in self._values:
            outer_sizes = [len(self.coords[dim]) for dim in _OUTER]
            shape = (*outer_sizes, *values.shape[1:])
            # Only a float can be NaN, which stands for a missing value.
            dtype = np.promote_types(values.dtype, np.float32)
            self._values[variable] = np.full(shape, np.nan, dtype=dtype)

        self._values[variable][value_indices] = values

    def _by_position(self, name: str, values: np.ndarray, batch: Batch) -> dict[str, np.ndarray]:
        """The values by position in the sequence, and by position in the baseline.

        They are NaN at positions that a sequence does not have.

        Args:
            name: The name of the quantity; the variable by position in the baseline adds a suffix.
            values: Values [row of the batch, …, pos].
            batch: The batch.
        """
        dtype = np.promote_types(values.dtype, np.float32)
        outer_shape = values.shape[:-1]
        by_key = np.full((*outer_shape, self.widths["key"]), np.nan, dtype)
        by_origin = np.full((*outer_shape, self.widths["original_key"]), np.nan, dtype)

        for row, origin in enumerate(batch.origin.numpy()):
            # Padding is on the right.
            length = np.count_nonzero(origin > PADDING)
            by_key[row, ..., :length] = values[row, ..., :length]

            # Two steps: indexed with an integer and an array at once, numpy would move the axis of
            # positions to the front.
            original_positions = np.flatnonzero(origin >= 0)
            by_origin[row][..., origin[original_positions]] = values[row][..., original_positions]

        return {name: by_key, name + BY_ORIGIN: by_origin}

    def _merge(
        self, variable: str, values: np.ndarray, condition_indices: np.ndarray, layer_index: int
    ) -> None:
        """Add the moments over this batch's rows to those of each condition.

        Args:
            variable: The variable's name.
            values: Values [row of the batch, …].
            condition_indices: The index of each row's condition.
            layer_index: The index of the layer.
        """
        for condition_index in np.unique(condition_indices).tolist():
            moments = Moments.of(values[condition_indices == condition_index])
            key = (variable, condition_index, layer_index)
            if key in self._moments:
                moments = self._moments[key].merge(moments)
            self._moments[key] = moments

    def _position_variables(self, name: str, quantity: Quantity, position_dim: str) -> Variables:
        """The mean, variance and n over prompts at each position, and each prompt's values if kept.

        Args:
            name: The name of the variable that holds the mean; the others add a suffix.
            quantity: The quantity.
            position_dim: The dimension of positions: "key" in the sequence, "original_key" in the
                baseline.
        """
        dims = tuple(position_dim if dim == "key" else dim for dim in quantity.dims)
        attributes = self._attributes(quantity)
        variables: Variables = {}
        if self.keep == "prompts":
            per_prompt = self._values[name]
            variables[f"{name}_per_prompt"] = ((*_OUTER, *dims), per_prompt, attributes)

        dims = ("condition", "layer", *dims)
        attributes = attributes | {"over": "prompts"}
        variables[name] = (dims, self._over_prompts(name, "known_mean"), attributes)
        for statistic, units in (("variance", f"{quantity.units} squared"), ("n", "prompts")):
            description = f"{statistic} over prompts of {name}"
            variables[f"{name}_{statistic}"] = (
                dims,
                self._over_prompts(name, statistic),
                attributes | {"units": units, "description": description},
            )
        return variables

    def _over_prompts(self, name: str, statistic: str) -> np.ndarray:
        """A statistic of a variable, named as in ``Moments``: [condition, layer, …]."""
        shape = (len(self.coords["condition"]), len(self.coords["layer"]))
        # One condition and layer at a time, so that intermediate arrays fit into a CPU's cache.
        arrays = [
            getattr(self._moments[name, condition, layer], statistic)
            for condition, layer in np.ndindex(shape)
        ]
        return np.reshape(arrays, (*shape, *arrays[0].shape))

    def _attributes(self, quantity: Quantity) -> dict[str, str]:
        """The attributes of a quantity's variables."""
        options = [f"{key}={value!r}" for key, value in self.analysis.options.items()]
        attributes = {
            "units": quantity.units,
            "description": quantity.description,
            "compared": quantity.compared,
            "no_null": quantity.no_null,
            "options": ", ".join(options),
        }
        if quantity.title:
            attributes["long_name"] = quantity.title  # the title of xarray's own figures
        return attributes
