"""The result of a run: labelled numbers and their provenance, and the units of its prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
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

# Defaults.
MEMORY = "2GiB"  # what a table or figure may take: a small part of any computer's memory
CHUNK = 64  # prompts that are computed and stored together: an interruption loses at most these
_HEAD = re.compile(r"L(\d{1,6})H(\d{1,6})")


@dataclass(frozen=True, eq=False)
class Result(ForwardingMethods):
    """The result of a run: one xarray dataset per analysis, one of the sequences, and their
    provenance.

    ``result["received_attention"]`` is a dataset. Its dimensions have names, such as prompt,
    condition, layer, head, segment, key and original_key. Every variable has units and a
    description. ``memory`` is how much memory each table or figure may take. If that is too little
    for the whole result, some layers or prompts are read at a time.
    """

    datasets: Mapping[str, xr.Dataset]
    provenance: Provenance
    memory: str = MEMORY

    def __getitem__(self, name: str) -> xr.Dataset:
        if name not in self.datasets:
            raise OptionError(f"this result has no {name!r}; it has {_quoted(self.datasets)}")
        return self.datasets[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.datasets)

    def keys(self) -> list[str]:
        """The names of the datasets: "sequences", and those of the analyses."""
        return list(self.datasets)

    _ipython_key_completions_ = keys

    def sel(self, **labels: Any) -> Result:
        """Select some prompts, conditions, layers, heads …, by their labels, as
        ``xarray.Dataset.sel`` does.

        Args:
            labels: For each dimension a label, a list or a slice, such as ``layer=1``, ``head=[0,
                3]``, ``head="L1H3"`` (which selects the layer too) or
                ``prompt=result["sequences"].prompt[:8]``. A dimension with a single label is kept,
                so that the selection can be compared and drawn.

        Returns:
            A result with the same datasets. Datasets without a dimension are not changed by it.

        Raises:
            OptionError: There is no such dimension or label, nothing is selected, or the head is in
            another layer.
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

        arguments = ", ".join(f"{dim}={label!r}" for dim, label in labels.items())
        datasets = {}
        for name, dataset in self.datasets.items():
            own_indexers = {dim: label for dim, label in indexers.items() if dim in dataset.dims}
            try:
                datasets[name] = dataset.sel(own_indexers)
            except KeyError:
                raise OptionError(
                    f"sel({arguments}): not all of these labels are in {name}; "
                    f"result[{name!r}].coords shows its labels"
                ) from None
            if 0 in map(datasets[name].sizes.get, own_indexers):
                raise OptionError(f"sel({arguments}) selects nothing of {name}")

        return replace(self, datasets=datasets)

    @property
    def conditions(self) -> list[str]:
        """The names of the conditions, the baseline first."""
        return [str(name) for name in self["sequences"].condition.values]

    def shown_condition(self, name: str | None = None) -> str:
        """The condition to show in a figure: this one, or by default the first that isn't the
        baseline. A result of the baseline alone shows the baseline.

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
            OptionError: There is no such condition, it is the baseline, or there is no other.
        """
        if name == BASELINE:
            raise OptionError(
                "the baseline is what others are compared with; name another condition"
            )

        compared_names = [condition for condition in self.conditions if condition != BASELINE]
        if not compared_names:
            raise OptionError(
                "this result has only the baseline; run it with a condition such as "
                "MeaninglessTokens()"
            )

        if name is None:
            return compared_names[0]
        if name not in compared_names:
            raise OptionError(
                f"there is no condition {name!r}; the result has {_quoted(compared_names)}"
            )
        return name

    def digest(self) -> str:
        """A hash of the datasets, without the provenance: of every array with its name, dimensions,
        dtype and attributes.

        Equal runs, stored or not, have the same digest. On another CPU or with another number of
        threads, the last digits of the numbers differ, and so does the digest.
        """
        return datasets_digest(self.datasets)

    def to_dataframe(self, name: str | None = None, quantity: str | None = None) -> pd.DataFrame:
        """Return a tidy table with one row per prompt, condition, layer, head and so on. Rows
        without any value are left out.

        Args:
            name: The analysis; by default the first, or "sequences" if there is none.
            quantity: One of its quantities; by default those by segment or, without any, all.

        Raises:
            OptionError: There is no such analysis or quantity.
        """
        if name is None:
            name = next(iter(self._analyses()), "sequences")
        dataset = self[name]
        if quantity is not None and quantity not in dataset:
            raise OptionError(f"{name} has no quantity {quantity!r}; it has {_quoted(dataset)}")

        quantities = [label for label in dataset if "segment" in dataset[label].dims]
        if quantity is not None:
            quantities = [quantity]
        elif not quantities:
            quantities = list(dataset)
        table = dataset[quantities].to_dataframe()
        return table.dropna(how="all").reset_index()

    def _analyses(self) -> list[str]:
        """The names of the datasets of analyses."""
        return [name for name in self.datasets if name != "sequences"]

    def _repr_html_(self) -> str:
        provenance = self.provenance
        model = provenance["model"]
        size = f"{model['layers']} layers × {model['heads']} heads"
        rows = [
            ("model", f"{model['name']}, {size}, {model['dtype']}"),
            ("verified", model["verified"]),
            ("prompts", self["sequences"].sizes["prompt"]),
        ]
        for name, condition in provenance["conditions"].items():
            rows.append((f"condition {name}", condition["written"]))
        for name in self._analyses():
            rows.append((name, ", ".join(map(str, self.datasets[name]))))
        return markup.table(rows, "Result")

    def __repr__(self) -> str:
        model_name = self.provenance["model"]["name"]
        prompt_count = self["sequences"].sizes["prompt"]
        names = self.conditions
        sizes = f"{prompt_count} prompts × {len(names)} conditions ({', '.join(names)})"
        return shown(f"Result({model_name}: {sizes}; {', '.join(self._analyses())})")


def part_of(result: Result, dim: str, indices: slice | np.ndarray) -> Result:
    """The part of a result with these indices along a dimension, such as some layers or prompts. No
    values are read."""
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
    """The provenance as JSON stores it: tuples become lists, and every key a text."""
    return dict(json.loads(json.dumps(result.provenance)))


def in_half_the_space(result: Result) -> Result:
    """The result with the numbers of single prompts as float16. Moments over prompts, and arrays
    with one number per prompt, stay as they are.

    A number below 6e-5 loses digits, and one below 3e-8 becomes 0.

    Raises:
        OptionError: A number is too large for float16.
    """
    datasets = {}
    for name, dataset in result.datasets.items():
        float16_values = {}
        for label, values in dataset.data_vars.items():
            if values.dims[:1] != ("prompt",) or values.ndim < 2 or values.dtype.kind != "f":
                continue
            if (abs(values) > np.finfo(np.float16).max).any():
                raise OptionError(
                    f'{label} is too large for values="float16"; omit it to keep float32'
                )
            float16_values[label] = values.astype(np.float16)
        datasets[name] = dataset.assign(float16_values)

    return replace(result, datasets=datasets)


def units_of(result: Result, unit: Unit = "auto") -> Units:
    """The units of all prompts of a result: its prompts, or their groups.

    Args:
        result: The result.
        unit: "auto" uses groups if the prompts have them; "prompt" always uses prompts.
    """
    check_choice(Unit, unit=unit)
    groups = _groups_of(result)
    if unit == "prompt" or groups is None:
        return Units(result["sequences"].sizes["prompt"])
    return Units.grouped(groups)


def units_in(result: Result, values: xr.DataArray) -> Units:
    """The units of those prompts of a result that an array of values has: their groups, or the
    prompts if they have no groups."""
    if "group" not in result["sequences"]:
        return Units(values.sizes["prompt"])
    ids = values["prompt"].values.tolist()
    groups = result["sequences"].group.sel(prompt=ids)
    return Units.grouped([str(group) for group in groups.values])


def shared_units(result: Result, other: Result, unit: Unit) -> Units:
    """The units of two results of the same prompts.

    Raises:
        OptionError: ``unit`` is "auto", and the prompts have different groups in the two results.
    """
    if unit == "auto" and _groups_of(result) != _groups_of(other):
        raise OptionError(
            "the prompts have different groups in the two results; run both with the same prompts, "
            'or give unit="prompt" to use single prompts'
        )
    return units_of(result, unit)


def alike_words(result: Result) -> str:
    """A sentence on how much the prompts repeat each other, if the run recorded that they do;
    otherwise an empty text."""
    likenesses = result.provenance["prompts"].get("alike", [])
    if not likenesses:
        return ""
    prompt_count = result["sequences"].sizes["prompt"]
    counted_prompts = [likeness["prompts"] for likeness in likenesses]
    scope = ""
    if max(counted_prompts) > prompt_count:  # the result is a selection of the run
        scope = "In the whole run, "
    elif min(counted_prompts) < prompt_count:  # the result is merged
        scope = "In parts of it, "
    words = "; ".join(likeness["words"] for likeness in likenesses)
    return f"{scope}{words}."


def head_name(layer: int, head: int) -> str:
    """The name of a head, such as "L1H2"."""
    return f"L{int(layer)}H{int(head)}"


def head_named(name: object) -> tuple[int, int] | None:
    """The layer and head of a name such as "L1H2"; None if it is not such a name."""
    if not isinstance(name, str):
        return None
    match = _HEAD.fullmatch(name)
    if match is None:
        return None
    return int(match[1]), int(match[2])


def by_head(table: pd.DataFrame) -> pd.DataFrame:
    """Name the rows of a table by their heads, for ``table.loc["L1H2"]``. The table itself is
    changed, and returned. A table without layers and heads keeps its index."""
    if {"layer", "head"} <= set(table.columns):
        table.index = [
            head_name(layer, head)
            for layer, head in zip(table["layer"], table["head"], strict=True)
        ]
    return table


def _quoted(names: Iterable[object]) -> str:
    """Names as an error lists them."""
    return ", ".join(map(repr, names))


def _groups_of(result: Result) -> list[str] | None:
    """The group of each prompt; None if the prompts have no groups."""
    sequences = result["sequences"]
    if "group" not in sequences:
        return None
    return [str(group) for group in sequences.group.values]
