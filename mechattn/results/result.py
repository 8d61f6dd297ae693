"""The result of a run: labelled numbers and their provenance, and the units that its prompts are. It draws nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mechattn.axes import BASELINE, head_named
from mechattn.errors import OptionError
from mechattn.markup import shown, table
from mechattn.results.forwarding_methods import Questions
from mechattn.results.provenance import Provenance
from mechattn.stats.units import Unit, Units, check_unit

MEMORY = "2GiB"  # by default
_BUDGETS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Result(Questions):
    """The result of a run: one xarray dataset per analysis, and their provenance.

    ``result["received_attention"]`` is a dataset. Its dimensions are named: prompt, condition, layer, head, segment,
    key, original_key. Every variable has units and a description. ``memory`` is what each table or figure of it may
    take: of a result that is larger, some layers or prompts are read at a time.
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
        """The result of some prompts, conditions, layers, heads …, by their labels; as ``xarray.Dataset.sel`` does.

        Args:
            labels: A label, a list or a slice for each dimension, such as ``head=[0, 3]``, ``layer=1`` or
                ``prompt=result["sequences"].prompt[:8]``; "L1H3" for one head. A dimension is kept with one label, so
                that what is selected can be compared and drawn.

        Raises:
            OptionError: There is no such dimension or label.
        """
        if pair := head_named(labels.get("head")):
            labels = {**labels, "layer": pair[0], "head": pair[1]}
        known = {str(dim) for data in self.datasets.values() for dim in data.dims}
        if strange := sorted(set(labels) - known):
            raise OptionError(
                f"this result has no dimension {strange[0]!r}; it has {', '.join(sorted(known))}"
            )
        wanted = {
            dim: of if isinstance(of, slice) or np.ndim(of) else [of] for dim, of in labels.items()
        }
        made = {}
        for name, data in self.datasets.items():
            try:
                made[name] = data.sel({dim: of for dim, of in wanted.items() if dim in data.dims})
            except KeyError:
                asked = ", ".join(f"{dim}={of!r}" for dim, of in labels.items())
                raise OptionError(
                    f"sel({asked}): not all of these labels are in {name}; result[{name!r}].coords shows which are"
                ) from None
        return replace(self, datasets=made)

    @property
    def conditions(self) -> list[str]:
        """The names of the conditions, the baseline first."""
        return [str(c) for c in self["sequences"].condition.values]

    def shown_condition(self, name: str | None = None) -> str:
        """The condition to show in a figure: by default the first that isn't the baseline, or else the baseline.

        Raises:
            OptionError: There is no such condition.
        """
        return (
            BASELINE
            if name == BASELINE or [name, *self.conditions] == [None, BASELINE]
            else self.condition(name)
        )

    def condition(self, name: str | None = None) -> str:
        """The condition to compare with the baseline; by default the first that isn't the baseline.

        Raises:
            OptionError: There is no such condition, or only the baseline.
        """
        if name == BASELINE:
            raise OptionError(
                "the baseline is what others are compared with; name another condition"
            )
        others = [condition for condition in self.conditions if condition != BASELINE]
        if not others:
            raise OptionError(
                "this result has only the baseline; run it with a condition such as MeaninglessTokens()"
            )
        if name not in (None, *others):
            raise OptionError(
                f"there is no condition {name!r}; the result has {', '.join(map(repr, others))}"
            )
        return name or others[0]

    def digest(self) -> str:
        """A hash of the numbers: every array with its name, dimensions and attributes, without the provenance.

        Equal runs, stored or not, have the same digest. With another CPU or number of threads, the last digits differ.
        """
        from mechattn.results.arrays import numbers_digest

        return numbers_digest(self.datasets)

    def to_dataframe(self, name: str | None = None, quantity: str | None = None) -> pd.DataFrame:
        """Return a tidy table with one row per prompt, condition, layer, head and so on.

        Args:
            name: The analysis; by default the first.
            quantity: One of its quantities; by default all per segment.
        """
        name = name or next((each for each in self.datasets if each != "sequences"), "sequences")
        dataset = self[name]
        if quantity is not None and quantity not in dataset:
            raise OptionError(
                f"{name} has no quantity {quantity!r}; it has {', '.join(map(repr, dataset))}"
            )
        by_segment = [v for v in dataset if "segment" in dataset[v].dims] or list(dataset)
        return dataset[quantity or by_segment].to_dataframe().dropna(how="all").reset_index()

    def _repr_html_(self) -> str:
        about, model, sizes = self.provenance, self.provenance["model"], self["sequences"].sizes
        units = units_of(self, sizes["prompt"])
        rows = [
            (
                "model",
                f"{model['name']}, {model['layers']} layers × {model['heads']} heads, {model['dtype']}",
            ),
            ("verified", model["verified"]),
            ("prompts", sizes["prompt"]),
            *([] if units.of is None else [("groups", units.n)]),
            *(
                (f"condition {name}", about["conditions"].get(name, {}).get("written", ""))
                for name in self.conditions
            ),
            *(
                (name, ", ".join(map(str, d)))
                for name, d in self.datasets.items()
                if name != "sequences"
            ),
            ("seed", about.get("seed", "")),
        ]
        return table(rows, "Result")

    def __repr__(self) -> str:
        model, prompts, names = (
            self.provenance["model"]["name"],
            self["sequences"].sizes["prompt"],
            self.conditions,
        )
        of = f"{prompts} prompts × {len(names)} conditions ({', '.join(names)})"
        return shown(
            f"Result({model}: {of}; {', '.join(name for name in self.datasets if name != 'sequences')})"
        )


def memory_bytes(memory: str) -> int:
    """The number of bytes of a budget such as "2GiB"."""
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d+)?)\s*(KiB|MiB|GiB)\s*", str(memory), re.IGNORECASE)
    if not match or not float(match[1]):
        raise OptionError(f'memory={memory!r}: write it like "2GiB" or "500MiB"')
    return int(float(match[1]) * _BUDGETS[match[2].upper()])


def part_of(result: Result, dim: str, some: slice | np.ndarray) -> Result:
    """The result for some layers or prompts only, without reading any values."""
    if isinstance(some, slice) and some == slice(None):
        return result
    cut = {
        name: one.isel({dim: some}) if dim in one.dims else one
        for name, one in result.datasets.items()
    }
    return replace(result, datasets=cut)


def units_of(result: Result, prompts: int, unit: Unit = "auto") -> Units:
    """The units of all prompts of a result: its prompts, or their groups."""
    check_unit(unit)
    sequences = result["sequences"]
    if unit == "prompt" or "group" not in sequences:
        return Units(prompts)
    return Units.grouped([str(group) for group in sequences.group.values])


def alike_words(result: Result) -> str:
    """How much the prompts repeat each other, as a sentence; empty if they do not, or if groups take account of it."""
    said, n = result.provenance["prompts"].get("alike", {}), result["sequences"].sizes["prompt"]
    of = (
        ""
        if set(said.values()) <= {n}
        else "In the whole run, "
        if max(said.values()) > n
        else "In parts of it, "
    )
    return f"{of}{'; '.join(said)}." if said else ""


def units_in(result: Result, values: xr.DataArray) -> Units:
    """The units of some prompts of a result, by their ids."""
    ids = values["prompt"].values.tolist() if "prompt" in values.coords else None
    if ids is None or "group" not in result["sequences"]:
        return Units(values.sizes["prompt"])
    found = result["sequences"].group.sel(prompt=ids)
    return Units.grouped([str(group) for group in found.values])


def shared_units(result: Result, other: Result, prompts: int, unit: Unit) -> Units:
    """The units of two results of the same prompts, which must have the same groups."""
    groups = [
        r["sequences"].group.values.tolist() if "group" in r["sequences"] else None
        for r in (result, other)
    ]
    if unit == "auto" and groups[0] != groups[1]:
        raise OptionError(
            "the prompts have different groups in the two results; run both with the same prompts, or give "
            'unit="prompt" to use single prompts'
        )
    return units_of(result, prompts, unit)
