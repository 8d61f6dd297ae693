"""All data for the map of heads and its detail views, as JSON with packed arrays."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mechattn.errors import MemoryOptionError
from mechattn.pages.head_curves import NAME, head_curves, head_patterns, head_texts
from mechattn.pages.head_values import check_memory, head_quantities, head_values
from mechattn.pages.packed_arrays import squeezed
from mechattn.pages.verdict_words import captions
from mechattn.results.memory import memory_bytes
from mechattn.results.result import Result

if TYPE_CHECKING:
    import xarray as xr


def instrument(
    results: Seq[Result],
    maps: Seq[Result | None] = (),
    start: Seq[tuple[int, int] | None] = (),
) -> str:
    """Return the data of a page as compressed JSON."""
    beside = [*maps, *[None] * (len(results) - len(maps))]
    first = [*start, *[None] * (len(results) - len(start))]
    models = [
        {"name": name} | model_data(result, beside[i] or result, first[i])
        for i, (name, result) in enumerate(zip(captions(results), results, strict=True))
    ]
    return squeezed(json.dumps({"models": models}, separators=(",", ":"), allow_nan=False))


def model_data(result: Result, maps: Result, start: tuple[int, int] | None = None) -> dict[str, Any]:
    """Return the data of one model for the page."""
    names = head_quantities(result)
    layers, heads = _layers_and_heads(result, names)
    model = {"conditions": result.conditions, "layers": layers, "heads": heads}
    by_position = {name: data for name, data in result.datasets.items() if name in ("sequences", NAME)}
    on_map = replace(result, datasets={name: _of_layers(data, layers) for name, data in by_position.items()})
    found = _values(result, names, layers, heads)
    return model | {
        "start": start if start and start[0] in layers and start[1] < heads else (layers[0] if layers else 0, 0),
        "quantities": [quantity for quantity in found if quantity["values"]],
        "lacking": {q["name"]: next(iter(q["missing"].values())) for q in found if not q["values"]},
        "curves": head_curves(on_map),
        "texts": head_texts(on_map),
        "patterns": head_patterns(maps) | {"apart": maps is not result},
    }


def _values(result: Result, names: Seq[str], layers: list[int], heads: int) -> list[dict[str, Any]]:
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


def _layers_and_heads(result: Result, names: Seq[str]) -> tuple[list[int], int]:
    """The layers of the map, and the number of heads per layer."""
    layers = sorted({int(layer) for data in result.datasets.values() if "layer" in data for layer in data.layer.values})
    return layers, int(result.provenance["model"]["heads"]) if names else 0
