"""The result of a run: labelled numbers and their provenance, and the units that its prompts are.
It draws nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mechattn import markup
from mechattn.axes import BASELINE
from mechattn.errors import OptionError, check_choice, shown
from mechattn.results.arrays import datasets_digest
from mechattn.results.forwarding_methods import ForwardingMethods
from mechattn.results.provenance import Provenance
from mechattn.stats.units import Unit, Units

MEMORY = "2GiB"  # by default
CHUNK = 64  # prompts that are computed and stored together, by default
_HEAD = re.compile(r"L(\d{1,6})H(\d{1,6})")


@dataclass(frozen=True, eq=False)
class Result(ForwardingMethods):
    """The result of a run: one xarray dataset per analysis, and their provenance.

    ``result["received_attention"]`` is a dataset. Its dimensions are named: prompt, condition,
    layer, head, segment, key, original_key. Every variable has units and a description. ``memory``
    is what each table or figure of it may take: of a result that is larger, some layers or prompts
    are read at a time.
    """

    datasets: Mapping[str, xr.Dataset]
    provenance: Provenance
    memory: str = MEMORY

    def __getitem__(self, name: str) -> xr.Dataset:
        if name not in self.datasets:
            raise OptionError(
                f"this result has no {name!r}; it has {', '.join(map(repr, self.datasets))}"
            )
        return self.datasets[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.datasets)

    def keys(self) -> list[str]:
        """The names of the analyses, as ``result[name]`` takes them."""
        return list(self.datasets)

    _ipython_key_completions_ = keys

    def sel(self, **labels: Any) -> Result:
        """The result of some prompts, conditions, layers, heads …, by their labels; as
        ``xarray.Dataset.sel`` does.

        Args:
            labels: A label, a list or a slice for each dimension, such as ``head=[0, 3]``,
                ``layer=1`` or ``prompt=result["sequences"].prompt[:8]``; "L1H3" for one head. A
                dimension is kept with one label, so that what is selected can be compared and
                drawn.

        Raises:
            OptionError: There is no such dimension or label, or a head is named with another layer.
        """
        layer_and_head = head_named(labels.get("head"))
        if layer_and_head:
            layer, head = layer_and_head
            if labels.get("layer", layer) != layer:
                raise OptionError(
                    f"layer={labels['layer']!r}, head={labels['head']!r}: that head is in layer"
                    f" {layer}; leave layer out, or give the head by its number"
                )
            labels = {**labels, "layer": layer, "head": head}

        dims = {str(dim) for dataset in self.datasets.values() for dim in dataset.dims}
        indexers = {}
        for dim, label in labels.items():
            if dim not in dims:
                raise OptionError(
                    f"this result has no dimension {dim!r}; it has {', '.join(sorted(dims))}"
                )
            if not isinstance(label, slice) and np.ndim(label) == 0:
                label = [label]  # so that the dimension is kept
            indexers[dim] = label

        datasets = {}
        for name, dataset in self.datasets.items():
            own = {dim: label for dim, label in indexers.items() if dim in dataset.dims}
            try:
                datasets[name] = dataset.sel(own)
            except KeyError:
                arguments = ", ".join(f"{dim}={label!r}" for dim, label in labels.items())
                raise OptionError(
                    f"sel({arguments}): not all of these labels are in {name}; "
                    f"result[{name!r}].coords shows which are"
                ) from None

        return replace(self, datasets=datasets)

    @property
    def conditions(self) -> list[str]:
        """The names of the conditions, the baseline first."""
        return [str(name) for name in self["sequences"].condition.values]

    def shown_condition(self, name: str | None = None) -> str:
        """The condition to show in a figure: by default the first that isn't the baseline, or else
        the baseline.

        Raises:
            OptionError: There is no such condition.
        """
        if name == BASELINE:
            return BASELINE
        if name is None and self.conditions == [BASELINE]:
            return BASELINE  # nothing else to show
        return self.condition(name)

    def condition(self, name: str | None = None) -> str:
        """The condition to compare with the baseline; by default the first that isn't the baseline.

        Raises:
            OptionError: There is no such condition, or only the baseline.
        """
        if name == BASELINE:
            raise OptionError(
                "the baseline is what others are compared with; name another condition"
            )

        compared = [condition for condition in self.conditions if condition != BASELINE]
        if not compared:
            raise OptionError(
                "this result has only the baseline; run it with a condition such as "
                "MeaninglessTokens()"
            )

        if name is None:
            return compared[0]
        if name not in compared:
            raise OptionError(
                f"there is no condition {name!r}; the result has {', '.join(map(repr, compared))}"
            )
        return name

    def digest(self) -> str:
        """A hash of the numbers: every array with its name, dimensions and attributes, without the
        provenance.

        Equal runs, stored or not, have the same digest. With another CPU or number of threads, the
        last digits differ.
        """
        return datasets_digest(self.datasets)

    def to_dataframe(self, name: str | None = None, quantity: str | None = None) -> pd.DataFrame:
        """Return a tidy table with one row per prompt, condition, layer, head and so on.

        Args:
            name: The analysis; by default the first.
            quantity: One of its quantities; by default those by segment, or all if there are none.

        Raises:
            OptionError: There is no such analysis or quantity.
        """
        if name is None:
            name = next(iter(self._analyses()), "sequences")
        dataset = self[name]
        if quantity is not None and quantity not in dataset:
            raise OptionError(
                f"{name} has no quantity {quantity!r}; it has {', '.join(map(repr, dataset))}"
            )

        quantities = [label for label in dataset if "segment" in dataset[label].dims]
        if quantity is not None:
            quantities = [quantity]
        table = dataset[quantities or list(dataset)].to_dataframe()
        return table.dropna(how="all").reset_index()

    def _analyses(self) -> list[str]:
        """The names of the datasets that analyses made."""
        return [name for name in self.datasets if name != "sequences"]

    def _repr_html_(self) -> str:
        about = self.provenance
        model = about["model"]
        size = f"{model['layers']} layers × {model['heads']} heads"
        rows = [
            ("model", f"{model['name']}, {size}, {model['dtype']}"),
            ("verified", model["verified"]),
            ("prompts", self["sequences"].sizes["prompt"]),
        ]
        for name, condition in about["conditions"].items():
            rows.append((f"condition {name}", condition["written"]))
        for name in self._analyses():
            rows.append((name, ", ".join(map(str, self.datasets[name]))))
        return markup.table(rows, "Result")

    def __repr__(self) -> str:
        model = self.provenance["model"]["name"]
        prompts = self["sequences"].sizes["prompt"]
        conditions = self.conditions
        sizes = f"{prompts} prompts × {len(conditions)} conditions ({', '.join(conditions)})"
        return shown(f"Result({model}: {sizes}; {', '.join(self._analyses())})")


def part_of(result: Result, dim: str, indices: slice | np.ndarray) -> Result:
    """The result for some layers or prompts only, without reading any values."""
    if isinstance(indices, slice) and indices == slice(None):
        return result
    datasets = {
        name: dataset.isel({dim: indices}, missing_dims="ignore")
        for name, dataset in result.datasets.items()
    }
    return replace(result, datasets=datasets)


def with_provenance(result: Result, **entries: Any) -> Result:
    """The result with these entries in its provenance."""
    return replace(result, provenance={**result.provenance, **entries})


def plain_provenance(result: Result) -> dict[str, Any]:
    """The provenance as it is stored, where every key is a text."""
    return dict(json.loads(json.dumps(result.provenance)))


def in_half_the_space(result: Result) -> Result:
    """The result with the numbers of single prompts as float16; moments over prompts stay as they
    are.

    Raises:
        OptionError: A number is larger than float16 can hold.
    """
    datasets = {}
    for name, dataset in result.datasets.items():
        halves = {}
        for label, values in dataset.data_vars.items():
            if values.dims[:1] != ("prompt",) or values.ndim < 2 or values.dtype.kind != "f":
                continue
            if (abs(values) > np.finfo(np.float16).max).any():
                raise OptionError(
                    f'{label} is too large for values="float16"; omit it to keep float32'
                )
            halves[label] = values.astype(np.float16)
        datasets[name] = dataset.assign(halves)

    return replace(result, datasets=datasets)


def units_of(result: Result, unit: Unit = "auto") -> Units:
    """The units of all prompts of a result: its prompts, or their groups.

    Args:
        result: The result.
        unit: "auto" for groups, where prompts have them; "prompt" for prompts all the same.
    """
    check_choice(Unit, unit=unit)
    groups = _groups_of(result)
    if unit == "prompt" or groups is None:
        return Units(result["sequences"].sizes["prompt"])
    return Units.grouped(groups)


def units_in(result: Result, values: xr.DataArray) -> Units:
    """The units of some prompts of a result, by their ids."""
    if "group" not in result["sequences"]:
        return Units(values.sizes["prompt"])
    ids = values["prompt"].values.tolist()
    groups = result["sequences"].group.sel(prompt=ids)
    return Units.grouped([str(group) for group in groups.values])


def shared_units(result: Result, other: Result, unit: Unit) -> Units:
    """The units of two results of the same prompts, which must have the same groups.

    Raises:
        OptionError: They have other groups.
    """
    if unit == "auto" and _groups_of(result) != _groups_of(other):
        raise OptionError(
            "the prompts have different groups in the two results; run both with the same prompts, "
            'or give unit="prompt" to use single prompts'
        )
    return units_of(result, unit)


def _groups_of(result: Result) -> list[str] | None:
    """The group of each prompt, where prompts have groups."""
    sequences = result["sequences"]
    if "group" not in sequences:
        return None
    return [str(group) for group in sequences.group.values]


def alike_words(result: Result) -> str:
    """How much the prompts repeat each other, as a sentence; empty if they do not, or if groups
    take account of it.
    """
    likenesses = result.provenance["prompts"].get("alike", [])
    if not likenesses:
        return ""
    prompts = result["sequences"].sizes["prompt"]
    counts = [likeness["prompts"] for likeness in likenesses]
    scope = ""
    if max(counts) > prompts:
        scope = "In the whole run, "
    elif min(counts) < prompts:
        scope = "In parts of it, "
    words = "; ".join(likeness["words"] for likeness in likenesses)
    return f"{scope}{words}."


def head_name(layer: int, head: int) -> str:
    """A head as it is written, such as "L1H2"."""
    return f"L{int(layer)}H{int(head)}"


def head_named(name: object) -> tuple[int, int] | None:
    """The layer and head of a name such as "L1H2"; None if it is not one."""
    if not isinstance(name, str):
        return None
    match = _HEAD.fullmatch(name)
    if match is None:
        return None
    return int(match[1]), int(match[2])


def by_head(table: pd.DataFrame) -> pd.DataFrame:
    """Name the rows of a table by their heads, so that ``table.loc["L1H2"]`` finds one."""
    if {"layer", "head"} <= set(table.columns):
        table.index = [
            head_name(layer, head)
            for layer, head in zip(table["layer"], table["head"], strict=True)
        ]
    return table
