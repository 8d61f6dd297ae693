"""The data of a page as JSON: the map of heads, by condition and as a change, and the detail views."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.axes import BASELINE
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.quantities import NULLS, kept, layer_blocks, variable_of
from mechattn.errors import MemoryOptionError, OptionError
from mechattn.pages.embedded import packed, squeezed
from mechattn.pages.first_screen import ShownModel, captions
from mechattn.pages.head_curves import NAME, head_curves, head_patterns, head_texts
from mechattn.render.words import quantity_words
from mechattn.results.result import Result, memory_bytes
from mechattn.stats.resolution import RESAMPLES

if TYPE_CHECKING:
    import xarray as xr

_A_HEAD = {"prompt", "condition", "layer", "head"}
_NOT_SHOWN = (*(f"_{kind}" for kind in NULLS), "_per_prompt")
# A t interval is symmetric, so half of it is enough.
_CHANGES = ("difference", "half", "null", "beyond", "beyond_half", "q")


def instrument(models: Seq[ShownModel]) -> str:
    """Return the data of a page as compressed JSON."""
    names = captions([shown.result for shown in models])
    data = [{"name": name} | model_data(shown) for name, shown in zip(names, models, strict=True)]
    return squeezed(json.dumps({"models": data}, separators=(",", ":"), allow_nan=False))


def model_data(shown: ShownModel) -> dict[str, Any]:
    """Return the data of one model for the page."""
    result, start = shown.result, shown.start
    maps = result if shown.maps is None else shown.maps
    names = head_quantities(result)
    layers = sorted({int(layer) for data in result.datasets.values() if "layer" in data for layer in data.layer.values})
    heads = int(result.provenance["model"]["heads"]) if names else 0
    model = {"conditions": result.conditions, "layers": layers, "heads": heads}
    by_position = {name: data for name, data in result.datasets.items() if name in ("sequences", NAME)}
    on_map = replace(result, datasets={name: _of_layers(data, layers) for name, data in by_position.items()})
    found = _every_quantity(result, names, layers, heads)
    return model | {
        "start": start if start and start[0] in layers and start[1] < heads else (layers[0] if layers else 0, 0),
        "quantities": [quantity for quantity in found if quantity["values"]],
        "lacking": {q["name"]: next(iter(q["missing"].values())) for q in found if not q["values"]},
        "curves": head_curves(on_map),
        "texts": head_texts(on_map),
        "patterns": head_patterns(maps) | {"apart": maps is not result},
    }


def _every_quantity(result: Result, names: Seq[str], layers: list[int], heads: int) -> list[dict[str, Any]]:
    """Each quantity's values; two at a time, each within half of the memory, as numpy lets both compute at once."""
    half = replace(result, memory=f"{memory_bytes(result.memory) // 2**11}KiB")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about heads that are left out: they are empty on the map
        try:
            check_memory(half)
        except MemoryOptionError:
            return [head_values(result, name, layers, heads) for name in names]
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda name: head_values(half, name, layers, heads), names))


def _of_layers(data: xr.Dataset, layers: list[int]) -> xr.Dataset:
    """Extend a dataset to all layers of the map, with missing values for layers that were not measured."""
    return data.reindex(layer=layers) if "layer" in data.dims and data.layer.values.tolist() != layers else data


def head_quantities(result: Result) -> list[str]:
    """The quantities with one number per head and prompt, named as in ``result.compare``."""
    found = {
        str(name).removesuffix("_by_segment"): None
        for at, dataset in result.datasets.items()
        for name, variable in dataset.data_vars.items()
        if at != "sequences"
        and _A_HEAD <= set(variable.dims) <= _A_HEAD | {"segment"}
        and not str(name).endswith(_NOT_SHOWN)
    }
    return sorted(found, key=lambda name: name != "received")


def check_memory(result: Result) -> None:
    """Check whether a page fits in memory before anything is read."""
    for name in head_quantities(result):
        layer_blocks(result, name, "segment", "question", RESAMPLES, RESAMPLES)


def head_values(result: Result, quantity: str, layers: list[int], heads: int) -> dict[str, Any]:
    """One quantity in the page's form: the numbers of ``result.heads`` and ``result.compare``, each [layer, head]."""
    variable = variable_of(result, quantity, "segment")
    of_segment = "segment" in variable.dims
    words = quantity_words(quantity, "question") if of_segment else quantity
    made: dict[str, Any] = {
        "name": quantity,
        "words": words.replace("_", " "),
        "units": str(variable.attrs.get("units", "")),
        "about": str(variable.attrs.get("description", "")),
        "values": {},
        "changes": {},
        "missing": {},
    }
    reference = kept(result, quantity, BASELINE, "question")
    for condition in result.conditions:
        of = reference if condition == BASELINE else kept(result, quantity, condition, "question")
        try:
            made["values"][condition] = _values(of, quantity, condition, layers, heads)
            if condition != BASELINE:
                made["changes"][condition] = _changes(of, reference, quantity, condition, layers, heads)
        except MemoryOptionError:
            raise
        except OptionError as error:
            made["missing"][condition] = str(error)
    return made


def _values(of: Result, quantity: str, condition: str, layers: list[int], heads: int) -> dict[str, Any]:
    """Means over prompts with their intervals, and those under uniform attention."""
    table = of.heads(quantity, None, condition=condition)
    table = table.assign(half=table.high - table[quantity])
    columns = {"mean": quantity, "half": "half", "null": "uniform"}
    found = {name: _square(table, of, layers, heads) for name, of in columns.items()}
    return found | {"n": int(table.n.iloc[0]), "unit": table.attrs["unit"]}


def _changes(
    of: Result, reference: Result, quantity: str, condition: str, layers: list[int], heads: int
) -> dict[str, Any]:
    """Changes from the baseline with their intervals, the null's change, and the change beyond it."""
    table = Contrast(of, condition, quantity=quantity, other=reference).table()
    table = table.assign(half=table.high - table.difference, beyond_half=table.beyond_high - table.beyond)
    found = {name: _square(table, name, layers, heads) for name in _CHANGES}
    about = {"scale": str(table.scale.iloc[0]), "against": table.attrs["null"], "n": int(table.n.iloc[0])}
    tested = f", tested by {table.attrs['resampled']}" if "resampled" in table.attrs else ""
    return found | about | {"unit": table.attrs["unit"] + tested, "known": bool(table.null.notna().any())}


def _square(table: Any, column: str, layers: list[int], heads: int) -> dict[str, Any] | None:
    """A column of a table as [layer, head], or [layer, 1] if all heads share one number; None if it is empty."""
    square = np.full((len(layers), heads), np.nan)
    rows = [layers.index(layer) for layer in table.layer]
    square[rows, table["head"].values] = table[column].values
    if np.isnan(square).all():
        return None
    alike = np.array_equal(square, np.broadcast_to(square[:, :1], square.shape), equal_nan=True)
    return packed(square[:, :1] if alike else square)
