"""The data of a page as JSON: the map of heads, by condition and as a change, and each head's
view."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import xarray as xr

from mechattn.axes import BASELINE, SEGMENTS
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.equivalence import LARGER_THAN, marked
from mechattn.contrast.means import at_positions
from mechattn.contrast.null_by_position import shares_by_position
from mechattn.contrast.quantities import (
    has_dilution,
    head_quantities,
    kept,
    layer_blocks,
    variable_of,
)
from mechattn.contrast.table import table as contrast_table
from mechattn.errors import MemoryOptionError, OptionError
from mechattn.markup import visible
from mechattn.pages.embedded import kind_for, packed, squeezed
from mechattn.pages.first_screen import ShownModel, captions
from mechattn.render.html_views import prompt_tokens
from mechattn.render.words import NULL_NAMES, band_words, quantity_words
from mechattn.results.result import Result, memory_bytes
from mechattn.stats.resolution import RESAMPLES

NAME = "received_attention"
PATTERNS = 3_000_000  # numbers in all patterns together: 8 MB of the page
PROMPTS = 3
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


def named_data(models: Sequence[ShownModel]) -> list[dict[str, Any]]:
    """Return the data of each model of a page, with its name."""
    names = captions([model.result for model in models])
    return [{"name": name} | model_data(model) for name, model in zip(names, models, strict=True)]


def instrument(data: Sequence[dict[str, Any]]) -> str:
    """Return the data of a page as compressed JSON."""
    return squeezed(json.dumps({"models": data}, separators=(",", ":"), allow_nan=False))


def model_data(model: ShownModel) -> dict[str, Any]:
    """Return the data of one model for the page."""
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
    for quantity in _quantities(result, names, layers, heads):
        if quantity["values"]:
            quantities.append(quantity)
        else:
            lacking[quantity["name"]] = next(iter(quantity["missing"].values()))

    datasets = {}
    for name in ("sequences", NAME):
        if name in result.datasets:
            datasets[name] = _with_all_layers(result[name], layers)
    on_map = replace(result, datasets=datasets)

    maps = result if model.maps is None else model.maps
    patterns = head_patterns(maps)
    patterns["apart"] = maps is not result
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


def _quantities(
    result: Result, names: Sequence[str], layers: list[int], heads: int
) -> list[dict[str, Any]]:
    """Each quantity's values; two at a time if both fit in memory, as numpy lets both compute."""
    half = replace(result, memory=f"{memory_bytes(result.memory) // 2**11}KiB")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about heads that are left out: they are empty on the map
        try:
            check_memory(half)
        except MemoryOptionError:
            return [head_values(result, name, layers, heads) for name in names]
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda name: head_values(half, name, layers, heads), names))


def _with_all_layers(dataset: xr.Dataset, layers: list[int]) -> xr.Dataset:
    """Extend a dataset to all layers of the map; NaN in layers that were not measured."""
    if "layer" not in dataset.dims or dataset.layer.values.tolist() == layers:
        return dataset
    return dataset.reindex(layer=layers)


def check_memory(result: Result) -> None:
    """Check whether a page fits in memory before anything is read."""
    for name in head_quantities(result):
        layer_blocks(result, name, "question", RESAMPLES)


def head_values(result: Result, quantity: str, layers: list[int], heads: int) -> dict[str, Any]:
    """One quantity's numbers of ``result.heads`` and ``result.compare``, each [layer, head]."""
    variable = variable_of(result, quantity)
    segment = ""
    words = quantity
    if "segment" in variable.dims:
        segment = "question"
        words = quantity_words(quantity, segment)

    values: dict[str, Any] = {}
    changes: dict[str, Any] = {}
    missing: dict[str, str] = {}
    baseline = kept(result, quantity, BASELINE, "question")
    for condition in result.conditions:
        is_baseline = condition == BASELINE
        in_memory = baseline if is_baseline else kept(result, quantity, condition, "question")
        try:
            values[condition] = _values(in_memory, quantity, condition, layers, heads)
            if not is_baseline:
                contrast = Contrast(in_memory, condition, quantity=quantity, other=baseline)
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
    table = table.assign(half=table.high - table[quantity])
    return {
        "mean": _square(table, quantity, layers, heads),
        "half": _square(table, "half", layers, heads),
        "null": _square(table, "uniform", layers, heads),
        "n": int(table.n.iloc[0]),
        "unit": table.attrs["unit"],
    }


def _changes(contrast: Contrast, layers: list[int], heads: int) -> dict[str, Any]:
    """Changes from the baseline with their intervals, the null's change, and that beyond it."""
    table = contrast_table(contrast, bootstrap_ends=False)
    table = table.assign(
        half=table.difference_high - table.difference,
        beyond_half=table.beyond_high - table.beyond,
        marked=marked(table).astype(float),
    )
    changes: dict[str, Any] = {
        column: _square(table, column, layers, heads) for column in CHANGE_COLUMNS
    }

    scale = str(table.scale.iloc[0])
    unit = table.attrs["unit"]
    if "resampled" in table.attrs:
        unit += f", tested by {table.attrs['resampled']}"
    changes |= {
        "scale": scale,
        "against": table.attrs["null"],
        "null_name": NULL_NAMES[contrast.null_used],
        "margin": LARGER_THAN[scale],
        "n": int(table.n.iloc[0]),
        "unit": unit,
        "known": bool(table.null.notna().any()),
    }
    return changes


def _square(table: Any, column: str, layers: list[int], heads: int) -> dict[str, Any] | None:
    """A column as [layer, head], or [layer, 1] if all heads share one number; None if it is
    empty."""
    square = np.full((len(layers), heads), np.nan)
    rows = [layers.index(layer) for layer in table.layer]
    square[rows, table["head"].values] = table[column].values
    if np.isnan(square).all():
        return None

    of_first_head = square[:, :1]
    if np.array_equal(square, np.broadcast_to(of_first_head, square.shape), equal_nan=True):
        return packed(of_first_head)
    return packed(square)


def head_curves(result: Result) -> dict[str, Any]:
    """Received attention by original position, of every head in each condition, and its null.

    ``shares`` has what dilution leaves of the baseline's line, by condition; where it has nothing,
    the null is uniform attention, in ``null``.
    """
    dataset = result.datasets.get(NAME)
    if dataset is None or "received_by_origin_variance" not in dataset:
        return {
            "missing": (
                "The run did not measure received attention by position (ma.ReceivedAttention())."
            )
        }

    prompts = dataset.sizes["prompt"]
    dims = ("condition", "layer", "head", "original_key")
    mean, half = _means(dataset, "received_by_origin", dims, prompts)
    counts = dataset["received_by_origin_n"].transpose(*dims).values
    null = dataset["received_uniform_by_origin"].transpose("condition", "layer", "original_key")

    has_mean = np.isfinite(mean).any(axis=(0, 1, 2))
    keys = int(np.flatnonzero(has_mean).max(initial=0)) + 1
    mean = mean[..., :keys]
    half = half[..., :keys]
    kind = kind_for(mean.size)
    shares = {}
    for condition in result.conditions:
        if condition != BASELINE and has_dilution((result, condition), "received", "question"):
            by_key = shares_by_position(result, condition)[..., :keys]
            shares[condition] = packed(by_key, kind_for(by_key.size))
    inserted = {
        condition: _inserted(result, condition, prompts)
        for condition in result.conditions
        if condition != BASELINE
    }
    return {
        "shares": shares,
        "mean": packed(mean, kind),
        "half": packed(half, kind),
        "n": packed(np.nan_to_num(counts).max(axis=2)[..., :keys], "u2"),
        "null": packed(null.values[..., :keys]),
        "segments": _segments(result, BASELINE, keys),
        "question": _question_start(result),
        "inserted": inserted,
        "prompts": prompts,
        "bands": f"pointwise 95 % intervals over prompts{band_words(result)}",
    }


def _means(
    dataset: xr.Dataset, quantity: str, dims: tuple[str, ...], prompts: int
) -> tuple[np.ndarray, np.ndarray]:
    """Means, and half of their intervals relative to them; NaN where too few prompts have one."""
    shape = tuple(dataset[quantity].sizes[dim] for dim in dims)
    cells = {}
    for name in (quantity, f"{quantity}_variance", f"{quantity}_n"):
        values = dataset[name].transpose(*dims).values
        cells[name] = ("cell", values.astype(np.float64).ravel())
    prompt_numbers = np.arange(prompts)
    moments = xr.Dataset(cells, {"prompt": prompt_numbers})
    statistics = at_positions(moments, quantity, {}, prompt_numbers)

    mean = np.full(prod(shape), np.nan)
    half = np.full(prod(shape), np.nan)
    mean[statistics.at] = statistics.mean
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = (statistics.high - statistics.mean) / statistics.mean
        half[statistics.at] = np.where(statistics.mean > 0, relative, 0.0)
    return mean.reshape(shape), half.reshape(shape)


def _inserted(result: Result, condition: str, prompts: int) -> dict[str, Any] | None:
    """Where inserted tokens are, and what they receive [layer, head, key]; None if prompts
    differ."""
    is_inserted = result["sequences"].origin.sel(condition=condition).values == -1
    if not is_inserted.any() or (is_inserted != is_inserted[0]).any():
        return None
    positions = np.flatnonzero(is_inserted[0])
    start = int(positions[0])
    end = int(positions[-1]) + 1
    if end - start != len(positions):
        return None

    dataset = result[NAME].isel(key=slice(start, end)).sel(condition=condition)
    mean, half = _means(dataset, "received", ("layer", "head", "key"), prompts)
    null = dataset["received_uniform"].transpose("layer", "key").values
    kind = kind_for(mean.size)
    return {
        "start": start,
        "count": len(positions),
        "mean": packed(mean, kind),
        "half": packed(half, kind),
        "null": packed(null),
    }


def _question_start(result: Result) -> int | None:
    """The position in the baseline where the question starts; None if prompts differ."""
    segment_indices = result["sequences"].segment_index.sel(condition=BASELINE).values
    in_question = segment_indices == SEGMENTS.index("question")
    starts = set(in_question.argmax(axis=1).tolist())
    if len(starts) != 1 or not in_question.any(axis=1).all():
        return None
    return int(starts.pop())


def _segments(result: Result, condition: str, keys: int) -> list[tuple[str, int, int]]:
    """Runs of positions in one segment in most prompts: its name, first and last position."""
    sequences = result["sequences"].sel(condition=condition)
    segment_indices = sequences.segment_index.values[:, :keys]
    runs: list[tuple[str, int, int]] = []
    for position, indices in enumerate(segment_indices.T):
        indices = indices[indices >= 0]  # below, beyond the end of a prompt
        if not len(indices):
            break
        name = SEGMENTS[int(np.bincount(indices).argmax())]
        first = position
        if runs and runs[-1][0] == name:
            _, first, _ = runs.pop()
        runs.append((name, first, position))
    return runs


def head_texts(result: Result) -> dict[str, Any]:
    """The first prompt in each condition: its tokens, their segments, what every head gives
    them."""
    sequences = result["sequences"].isel(prompt=0)
    tokens = {}
    for condition in result.conditions:
        texts = prompt_tokens(result, condition, 0)
        indices = sequences.segment_index.sel(condition=condition).values[: len(texts)]
        tokens[condition] = [
            [visible(text), SEGMENTS[index]] for text, index in zip(texts, indices, strict=True)
        ]

    values = _received_in_first_prompt(result)
    if values is None:
        return {
            "tokens": tokens,
            "missing": (
                "The text is not coloured: the run has not kept single prompts' positions "
                '(keep="prompts").'
            ),
        }

    values = values.transpose("condition", "layer", "head", "key")
    received = {}
    for condition, token_list in tokens.items():
        of_condition = values.sel(condition=condition).values[..., : len(token_list)]
        kind = kind_for(of_condition.size * len(tokens))
        received[condition] = packed(of_condition, kind)
    return {"tokens": tokens, "received": received}


def _received_in_first_prompt(result: Result) -> xr.DataArray | None:
    """What each position of the first prompt receives; None if only means over prompts were
    kept."""
    dataset = result.datasets.get(NAME)
    if dataset is None:
        return None
    if "received_per_prompt" in dataset:
        return dataset["received_per_prompt"].isel(prompt=0)
    if "received" in dataset and result["sequences"].sizes["prompt"] == 1:
        return dataset["received"]
    return None


def head_patterns(result: Result) -> dict[str, Any]:
    """Attention maps of a few prompts, lower triangles [layer, head, query · key], or why none."""
    if "attention_map" not in result.datasets:
        return {
            "missing": (
                "There are no attention patterns: run with ma.analyses.AttentionMap() on a "
                "few short prompts."
            )
        }
    maps = result["attention_map"].pattern
    maps = maps.transpose("prompt", "condition", "layer", "head", "query", "target")
    origin = result["sequences"].origin.isel(prompt=slice(PROMPTS))
    inserted = (origin == -1).sum("pos")

    prompts: list[dict[str, Any]] = []
    numbers_left = PATTERNS
    for prompt in range(min(PROMPTS, maps.sizes["prompt"])):
        patterns = {}
        for condition in result.conditions:
            tokens = prompt_tokens(result, condition, prompt)
            queries, keys = np.tril_indices(len(tokens))
            numbers_left -= maps.sizes["layer"] * maps.sizes["head"] * len(queries)
            if numbers_left < 0:
                break
            pattern = maps.isel(prompt=prompt).sel(condition=condition).values
            in_triangle = pattern[..., queries, keys].astype(np.float64)
            patterns[condition] = {
                "tokens": [visible(text) for text in tokens],
                "inserted": int(inserted.isel(prompt=prompt).sel(condition=condition)),
                "rows": packed(np.round(65535 * in_triangle), "u2"),
            }
        if patterns:
            prompts.append(patterns)

    if not prompts:
        return {
            "missing": (
                "The attention patterns are too large for a page; "
                "ma.pattern(model, prompt, layer) shows one."
            )
        }
    return {"layers": maps.layer.values.tolist(), "prompts": prompts}
