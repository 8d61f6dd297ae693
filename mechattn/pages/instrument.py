"""All data for the map of heads and its detail views, as JSON with packed arrays."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mechattn.pages.head_curves import NAME, head_curves, head_patterns, head_texts
from mechattn.pages.head_values import head_quantities, head_values
from mechattn.pages.packed import squeezed
from mechattn.pages.verdicts import captions
from mechattn.results.held import holds
from mechattn.results.result import Result
from mechattn.results.size import MEMORY, memory_bytes

if TYPE_CHECKING:
    import xarray as xr


def instrument(
    results: Seq[Result],
    maps: Seq[Result | None] = (),
    start: Seq[tuple[int, int] | None] = (),
    memory: str = MEMORY,
) -> str:
    """Return the data of a page as compressed JSON.

    Args:
        results: One result per model.
        maps: For each result, one with attention maps of a few of its prompts; by default the result itself.
        start: For each result, the layer and head to show first; by default the first.
        memory: The memory that each table may take.
    """
    beside = [*maps, *[None] * (len(results) - len(maps))]
    first = [*start, *[None] * (len(results) - len(start))]
    models = [
        {"name": name} | model_data(result, beside[i] or result, first[i], memory)
        for i, (name, result) in enumerate(zip(captions(results), results, strict=True))
    ]
    return squeezed(json.dumps({"models": models}, separators=(",", ":"), allow_nan=False))


def model_data(
    result: Result, maps: Result, start: tuple[int, int] | None = None, memory: str = MEMORY
) -> dict[str, Any]:
    """Return the data of one model for the page.

    Args:
        result: The result of the model.
        maps: The result with its attention maps.
        start: The layer and head to show first.
        memory: The memory that each table may take.
    """
    names = head_quantities(result)
    layers, heads = _layers_and_heads(result, names)
    model = {"conditions": result.conditions, "layers": layers, "heads": heads}
    by_position = {name: data for name, data in result.datasets.items() if name in ("sequences", NAME)}
    on_map = replace(result, datasets={name: _of_layers(data, layers) for name, data in by_position.items()})
    found = _values(result, names, layers, heads, memory)
    return model | {
        "start": start if start and start[0] in layers and start[1] < heads else (layers[0] if layers else 0, 0),
        "quantities": [quantity for quantity in found if quantity["values"]],
        "lacking": {q["name"]: next(iter(q["missing"].values())) for q in found if not q["values"]},
        "curves": head_curves(on_map),
        "texts": head_texts(on_map),
        "patterns": head_patterns(maps) | {"apart": maps is not result},
    }


def _values(result: Result, names: Seq[str], layers: list[int], heads: int, memory: str) -> list[dict[str, Any]]:
    """Each quantity's values; of a stored result two at a time if half the memory each holds their conditions.

    One is read while the other is computed, and numpy lets both compute at once.
    """
    half = f"{memory_bytes(memory) // 2**11}KiB"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about heads that are left out: they are empty on the map
        if not all(holds(result, name, "question", half) for name in names):
            return [head_values(result, name, layers, heads, memory) for name in names]
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda name: head_values(result, name, layers, heads, half), names))


def _of_layers(data: xr.Dataset, layers: list[int]) -> xr.Dataset:
    """Extend a dataset to all layers of the map, with missing values for layers that were not measured."""
    return data.reindex(layer=layers) if "layer" in data.dims and data.layer.values.tolist() != layers else data


def _layers_and_heads(result: Result, names: Seq[str]) -> tuple[list[int], int]:
    """The layers of the map, and the number of heads per layer."""
    layers = sorted({int(layer) for data in result.datasets.values() if "layer" in data for layer in data.layer.values})
    return layers, int(result.provenance["model"]["heads"]) if names else 0
