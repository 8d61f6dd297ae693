"""The data of a page as JSON: the map of heads, by condition and as a change.

The scripts of the page (``templates/data.js``) read what is returned here. Arrays are packed by
``embedded.packed``; a number for each head is [layer, head].
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mechattn.axes import BASELINE
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.quantities import head_quantities, layer_blocks, variable_of
from mechattn.contrast.table import LARGER_THAN, marked
from mechattn.contrast.table import table as contrast_table
from mechattn.errors import MemoryOptionError, OptionError
from mechattn.pages.embedded import packed, squeezed
from mechattn.pages.first_screen import ShownModel, captions
from mechattn.pages.head_views import NAME, head_curves, head_patterns, head_texts
from mechattn.render.words import NULL_NAMES, quantity_words
from mechattn.results.result import Result
from mechattn.stats.resolution import RESAMPLES

# A t interval is symmetric, so half of it is enough.
CHANGE_COLUMNS = (
    "difference",
    "half",
    "null",
    "beyond",
    "beyond_half",
    "q_difference",
    "q_beyond",
    "marked",
)


def page_json(models: Sequence[ShownModel]) -> str:
    """Return the data of all models of a page, each with its name, as compressed JSON."""
    names = captions([model.result for model in models])
    data = [{"name": name} | model_data(model) for name, model in zip(names, models, strict=True)]
    return squeezed(json.dumps({"models": data}, separators=(",", ":"), allow_nan=False))


def check_memory(result: Result) -> None:
    """Check whether a page fits in memory before anything is read.

    Raises:
        MemoryOptionError: A layer of a quantity does not.
    """
    for name in head_quantities(result):
        layer_blocks(result, name, "question", RESAMPLES)


def model_data(model: ShownModel) -> dict[str, Any]:
    """Return the data of one model for the page.

    Returns:
        ``conditions``, ``layers`` and ``heads`` of the map, and its ``start``: the layer and head
        that are selected when the page opens; ``quantities``, as :func:`head_values` returns them,
        and ``lacking``, why a quantity has no values; ``curves``, ``texts`` and ``patterns`` of the
        heads, from ``head_views.py``.
    """
    result = model.result
    layers = _measured_layers(result)
    names = head_quantities(result)
    heads = int(result.provenance["model"]["heads"]) if names else 0

    start = model.start
    if start is not None:
        start_layer, start_head = start
        if start_layer not in layers or start_head >= heads:
            start = None  # then the head that differs most

    quantities = []
    lacking = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about heads that are left out: they are empty on the map
        for name in names:
            quantity = head_values(result, name, layers, heads)
            if quantity["values"]:
                quantities.append(quantity)
            else:
                lacking[name] = next(iter(quantity["missing"].values()))

    datasets = {}
    for name in ("sequences", NAME):
        if name in result.datasets:
            datasets[name] = _with_all_layers(result[name], layers)

    on_map = replace(result, datasets=datasets)

    patterns = head_patterns(result if model.maps is None else model.maps)
    patterns["apart"] = model.maps is not None
    return {
        "conditions": result.conditions,
        "layers": layers,
        "heads": heads,
        "start": start,
        "quantities": quantities,
        "lacking": lacking,
        "curves": head_curves(on_map),
        "texts": head_texts(on_map),
        "patterns": patterns,
    }


def _measured_layers(result: Result) -> list[int]:
    """The layers that any analysis has measured."""
    layers: set[int] = set()
    for dataset in result.datasets.values():
        if "layer" in dataset:
            layers.update(dataset.layer.values.tolist())
    return sorted(layers)


def _with_all_layers(dataset: xr.Dataset, layers: list[int]) -> xr.Dataset:
    """Extend a dataset to all layers of the map; NaN in layers that were not measured."""
    if "layer" not in dataset.dims or dataset.layer.values.tolist() == layers:
        return dataset
    return dataset.reindex(layer=layers)


def head_values(result: Result, quantity: str, layers: list[int], heads: int) -> dict[str, Any]:
    """One quantity's numbers of ``result.heads`` and ``result.compare``, each [layer, head].

    Args:
        result: The result.
        quantity: The quantity; of its segments, the question is shown.
        layers: The layers of the map, which any analysis has measured.
        heads: The number of heads in each layer.

    Returns:
        ``name``, ``segment``, ``words``, ``units`` and ``about`` of the quantity; by condition, its
        ``values`` and its ``changes`` from the baseline, or in ``missing`` why there are none.
    """
    variable = variable_of(result, quantity)
    segment = ""
    words = quantity
    if "segment" in variable.dims:
        segment = "question"
        words = quantity_words(quantity, segment)

    values: dict[str, Any] = {}
    changes: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for condition in result.conditions:
        try:
            values[condition] = _values(result, quantity, condition, layers, heads)
            if condition != BASELINE:
                contrast = Contrast(result, condition, quantity=quantity)
                changes[condition] = _changes(contrast, layers, heads)
        except MemoryOptionError:
            raise
        except OptionError as error:
            missing[condition] = str(error)

    return {
        "name": quantity,
        "segment": segment,
        "words": words.replace("_", " "),
        "units": str(variable.attrs.get("units", "")),
        "about": str(variable.attrs.get("description", "")),
        "values": values,
        "changes": changes,
        "missing": missing,
    }


def _values(
    result: Result, quantity: str, condition: str, layers: list[int], heads: int
) -> dict[str, Any]:
    """Means over prompts with their intervals, and those under uniform attention."""
    table = result.heads(quantity, None, condition=condition)
    table["half"] = table.high - table[quantity]
    return {
        "mean": _by_layer_and_head(table, quantity, layers, heads),
        "half": _by_layer_and_head(table, "half", layers, heads),
        "null": _by_layer_and_head(table, "uniform", layers, heads),
        "n": int(table.n.iloc[0]),
        "unit": table.attrs["unit"],
    }


def _changes(contrast: Contrast, layers: list[int], heads: int) -> dict[str, Any]:
    """Changes from the baseline with their intervals, the null's change, and that beyond it."""
    table = contrast_table(contrast, bootstrap_ends=False)
    table["half"] = table.difference_high - table.difference
    table["beyond_half"] = table.beyond_high - table.beyond
    table["marked"] = marked(table)

    scale = str(table.scale.iloc[0])
    unit = table.attrs["unit"]
    if "resampled" in table.attrs:
        unit += f", tested by {table.attrs['resampled']}"
    columns = {name: _by_layer_and_head(table, name, layers, heads) for name in CHANGE_COLUMNS}
    return {
        **columns,
        "scale": scale,
        "against": table.attrs["null"],
        "predictsNoChange": table.attrs["predicts_no_change"],
        "null_name": NULL_NAMES[contrast.null_used],
        "margin": LARGER_THAN[scale],
        "n": int(table.n.iloc[0]),
        "unit": unit,
        "known": bool(table.null.notna().any()),
    }


def _by_layer_and_head(
    table: pd.DataFrame, column: str, layers: list[int], heads: int
) -> dict[str, Any] | None:
    """A column as [layer, head]; None if it is empty."""
    square = table.pivot(index="layer", columns="head", values=column)
    values = square.reindex(index=layers, columns=range(heads)).to_numpy(dtype=np.float64)
    if np.isnan(values).all():
        return None
    return packed(values)
