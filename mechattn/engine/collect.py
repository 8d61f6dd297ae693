"""Collects values per batch into labelled datasets: scalars per prompt, and moments over prompts per position."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from mechattn.analysis.analysis import Analysis, Quantity
from mechattn.axes import SEGMENTS
from mechattn.engine.null import with_nulls
from mechattn.errors import OptionError
from mechattn.prompts.sequences import Batch
from mechattn.stats.moments import Moments

if TYPE_CHECKING:
    import xarray as xr

Positions = Literal["moments", "prompts"]
BY_ORIGIN = "_by_origin"
MOMENTS = ("", "_variance", "_n")


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
            self._add_layer(layer, batch, of_layer)

    def _add_layer(self, layer: int, batch: Batch, values: Mapping[str, Tensor]) -> None:
        at_layer = self.coords["layer"].index(layer)
        for name, value in values.items():
            array = value.numpy()
            per_key = "key" in self.quantities[name].dims
            for row, (prompt, condition) in enumerate(batch.rows):
                at_condition = self.coords["condition"].index(condition)
                if per_key:
                    self._add_positions(name, prompt, at_condition, at_layer, array[row], batch.origin[row].numpy())
                else:
                    self._scalar_array(name, np.asarray(array[row]))[prompt, at_condition, at_layer] = array[row]
        self._merge_rows()

    def dataset(self) -> xr.Dataset:
        """The collected values with names, units and descriptions."""
        import xarray as xr

        variables = {name: self._variable(name, array) for name, array in self._scalars.items()}
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

    def _scalar_array(self, name: str, like: np.ndarray) -> np.ndarray:
        if name not in self._scalars:
            outer = tuple(len(self.coords[dim]) for dim in ("prompt", "condition", "layer"))
            self._scalars[name] = np.full(outer + like.shape, np.nan, dtype=np.promote_types(like.dtype, np.float32))
        return self._scalars[name]

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
            new = Moments.of(_stacked([row for _, row in rows]))
            self._moments[key] = self._moments[key].merge(new) if key in self._moments else new
        self._rows = {}

    def _position_variables(self, name: str, quantity: Quantity) -> dict:
        dim = "original_key" if name.endswith(BY_ORIGIN) else "key"
        dims = tuple(dim if d == "key" else d for d in quantity.dims)
        if self.positions == "prompts":
            every = self._every_prompt(name)
            made = {f"{name}_per_prompt": (("prompt", "condition", "layer", *dims), every, self._attributes(quantity))}
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
        cells = [
            [self._moments[name, c, at] for at in range(self._count("layer"))] for c in range(self._count("condition"))
        ]
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
        outer = tuple(self._count(dim) for dim in ("prompt", "condition", "layer"))
        every = np.full((*outer, *some.shape[:-1], longest), np.nan, dtype=np.float32)
        for (_, condition, layer), cell in rows.items():
            for prompt, row in cell.items():
                every[prompt, condition, layer, ..., : row.shape[-1]] = row
        return every

    def _variable(self, name: str, array: np.ndarray) -> tuple:
        quantity = self.quantities[name]
        return (("prompt", "condition", "layer", *quantity.dims), array, self._attributes(quantity))

    def _attributes(self, quantity: Quantity) -> dict[str, str]:
        options = ", ".join(f"{key}={value!r}" for key, value in self.analysis.options.items())
        return {
            "units": quantity.units,
            "description": quantity.description,
            "compared": quantity.compared,
            "no_null": quantity.no_null,
            "options": options,
        }

    def _count(self, dim: str) -> int:
        return len(self.coords[dim])


def lacking(dataset: xr.Dataset, analysis: Analysis) -> list[str]:
    """The variables that :class:`Collector` makes for an analysis and that its dataset lacks."""
    dims: dict[str, tuple[str, ...]] = {}
    for name, quantity in analysis.quantities.items():
        if "key" not in quantity.dims:
            dims[name] = ("prompt", "condition", "layer", *quantity.dims)
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


def _stacked(rows: list[np.ndarray]) -> np.ndarray:
    longest = max(row.shape[-1] for row in rows)
    return np.stack([_widened(row, longest, np.nan) for row in rows])


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
    sizes = _sizes(analysis, batch, heads)
    for name, quantity in promised.items():
        value = values[name]
        if not isinstance(value, Tensor):
            raise OptionError(f"{analysis.name}: {name!r} is a {type(value).__name__}; values() must return tensors")
        wanted = [len(batch.rows), *(sizes.get(dim) for dim in quantity.dims)]
        if value.ndim != len(wanted) or any(w not in (None, n) for w, n in zip(wanted, value.shape)):
            dims = ", ".join(_dim(dim, sizes.get(dim)) for dim in quantity.dims)
            raise OptionError(
                f"{analysis.name}: {name!r} has the shape {list(value.shape)}; its dims {quantity.dims} promise "
                f"[batch {len(batch.rows)}{', ' * bool(dims)}{dims}]"
            )


def _sizes(analysis: Analysis, batch: Batch, heads: int) -> dict[str, int]:
    """The sizes of dimensions, where they are known beforehand."""
    labels: Mapping[str, Seq] = getattr(analysis, "coords", {})
    known = {"head": heads, "key": batch.tokens.shape[1], "segment": len(SEGMENTS), "to_segment": len(SEGMENTS)}
    return known | {dim: len(label) for dim, label in labels.items()}


def _dim(name: str, size: int | None) -> str:
    return name if size is None else f"{name} {size}"
