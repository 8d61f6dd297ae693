"""The data of a page as JSON: the map of heads, by condition and as a change, and each head's detail view."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr

from mechattn.axes import BASELINE, SEGMENTS
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.means import at_positions
from mechattn.contrast.null_by_position import shares_by_position
from mechattn.contrast.quantities import (
    has_dilution,
    head_quantities,
    kept,
    layer_blocks,
    variable_of,
)
from mechattn.contrast.table import LARGER_THAN, marked
from mechattn.contrast.table import table as of_contrast
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
_CHANGES = (
    "difference", "half", "null", "beyond", "beyond_half", "q_difference", "q_beyond", "marked",
)  # fmt: skip


def named_data(models: Seq[ShownModel]) -> list[dict[str, Any]]:
    """Return the data of each model of a page, with its name."""
    names = captions([shown.result for shown in models])
    return [{"name": name} | model_data(shown) for name, shown in zip(names, models, strict=True)]


def instrument(data: Seq[dict[str, Any]]) -> str:
    """Return the data of a page as compressed JSON."""
    return squeezed(json.dumps({"models": data}, separators=(",", ":"), allow_nan=False))


def model_data(shown: ShownModel) -> dict[str, Any]:
    """Return the data of one model for the page."""
    result, start = shown.result, shown.start
    maps = result if shown.maps is None else shown.maps
    names = head_quantities(result)
    layers = sorted(
        {
            int(layer)
            for data in result.datasets.values()
            if "layer" in data
            for layer in data.layer.values
        }
    )
    heads = int(result.provenance["model"]["heads"]) if names else 0
    model = {"conditions": result.conditions, "layers": layers, "heads": heads}
    by_position = {
        name: data for name, data in result.datasets.items() if name in ("sequences", NAME)
    }
    on_map = replace(
        result, datasets={name: _of_layers(data, layers) for name, data in by_position.items()}
    )
    found = _every_quantity(result, names, layers, heads)
    return model | {
        "start": start
        if start and start[0] in layers and start[1] < heads
        else None,  # else that which differs most
        "quantities": [quantity for quantity in found if quantity["values"]],
        "lacking": {q["name"]: next(iter(q["missing"].values())) for q in found if not q["values"]},
        "curves": head_curves(on_map),
        "texts": head_texts(on_map),
        "patterns": head_patterns(maps) | {"apart": maps is not result},
    }


def _every_quantity(
    result: Result, names: Seq[str], layers: list[int], heads: int
) -> list[dict[str, Any]]:
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
    return (
        data.reindex(layer=layers)
        if "layer" in data.dims and data.layer.values.tolist() != layers
        else data
    )


def check_memory(result: Result) -> None:
    """Check whether a page fits in memory before anything is read."""
    for name in head_quantities(result):
        layer_blocks(result, name, "question", RESAMPLES, RESAMPLES)


def head_values(result: Result, quantity: str, layers: list[int], heads: int) -> dict[str, Any]:
    """One quantity in the page's form: the numbers of ``result.heads`` and ``result.compare``, each [layer, head]."""
    variable = variable_of(result, quantity)
    of_segment = "segment" in variable.dims
    words = quantity_words(quantity, "question") if of_segment else quantity
    made: dict[str, Any] = {
        "name": quantity,
        "segment": "question" if of_segment else "",
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
                made["changes"][condition] = _changes(
                    of, reference, quantity, condition, layers, heads
                )
        except MemoryOptionError:
            raise
        except OptionError as error:
            made["missing"][condition] = str(error)
    return made


def _values(
    of: Result, quantity: str, condition: str, layers: list[int], heads: int
) -> dict[str, Any]:
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
    contrast = Contrast(of, condition, quantity=quantity, other=reference)
    table = of_contrast(contrast, bootstrap_ends=False)
    table = table.assign(
        half=table.difference_high - table.difference, beyond_half=table.beyond_high - table.beyond
    )
    table = table.assign(marked=marked(table).astype(float))
    found = {name: _square(table, name, layers, heads) for name in _CHANGES}
    about = {
        "scale": str(table.scale.iloc[0]),
        "against": table.attrs["null"],
        "null_name": NULL_NAMES[contrast.null_used],
        "margin": LARGER_THAN[str(table.scale.iloc[0])],
        "n": int(table.n.iloc[0]),
    }
    tested = f", tested by {table.attrs['resampled']}" if "resampled" in table.attrs else ""
    return (
        found
        | about
        | {"unit": table.attrs["unit"] + tested, "known": bool(table.null.notna().any())}
    )


def _square(table: Any, column: str, layers: list[int], heads: int) -> dict[str, Any] | None:
    """A column of a table as [layer, head], or [layer, 1] if all heads share one number; None if it is empty."""
    square = np.full((len(layers), heads), np.nan)
    rows = [layers.index(layer) for layer in table.layer]
    square[rows, table["head"].values] = table[column].values
    if np.isnan(square).all():
        return None
    alike = np.array_equal(square, np.broadcast_to(square[:, :1], square.shape), equal_nan=True)
    return packed(square[:, :1] if alike else square)


def head_curves(result: Result) -> dict[str, Any]:
    """Received attention of every head by original position in each condition, with its intervals and its null.

    ``shares`` has what dilution leaves of the baseline's line, by condition; where it has nothing, the null is uniform
    attention, in ``null``.
    """
    dataset = result.datasets.get(NAME)
    if dataset is None or "received_by_origin_variance" not in dataset:
        return {
            "missing": "The run did not measure received attention by position (ma.ReceivedAttention())."
        }
    dims = ("condition", "layer", "head")
    prompts = dataset.sizes["prompt"]
    at = (*dims, "original_key")
    mean, half = _means(dataset, "received_by_origin", at, prompts)
    keys = int(np.flatnonzero(np.isfinite(mean).any((0, 1, 2))).max(initial=0)) + 1
    n = np.nan_to_num(dataset["received_by_origin_n"].transpose(*at).values).max(2)
    null = (
        dataset["received_uniform_by_origin"]
        .transpose("condition", "layer", "original_key")
        .values[..., :keys]
    )
    shares = {}
    for name in result.conditions:
        if name != BASELINE and has_dilution((result, name), "received", "question"):
            by_key = shares_by_position(result, name)[..., :keys]
            shares[name] = packed(by_key, kind_for(by_key.size))
    kind = kind_for(mean[..., :keys].size)
    return {
        "shares": shares,
        "mean": packed(mean[..., :keys], kind),
        "half": packed(half[..., :keys], kind),
        "n": packed(n[..., :keys], "u2"),
        "null": packed(null),
        "segments": _segments(result, BASELINE, keys),
        "question": _question(result),
        "inserted": {
            name: _inserted(result, name, prompts) for name in result.conditions if name != BASELINE
        },
        "prompts": prompts,
        "bands": f"pointwise 95 % intervals over prompts{band_words(result)}",
    }


def _means(
    dataset: xr.Dataset, quantity: str, dims: tuple[str, ...], prompts: int
) -> tuple[np.ndarray, np.ndarray]:
    """Means, and the half-widths of their intervals relative to them; NaN where too few prompts have a position."""
    parts = {
        quantity + end: dataset[quantity + end].transpose(*dims) for end in ("", "_variance", "_n")
    }
    flat = {
        name: ("cell", np.asarray(part, dtype=np.float64).ravel()) for name, part in parts.items()
    }
    every = np.arange(prompts)
    found = at_positions(xr.Dataset(flat, {"prompt": every}), quantity, {}, every)
    made = np.full((2, *parts[quantity].shape), np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        half = np.where(found.mean > 0, (found.high - found.mean) / found.mean, 0.0)
    made.reshape(2, -1)[:, found.at] = found.mean, half
    return made[0], made[1]


def _inserted(result: Result, condition: str, prompts: int) -> dict[str, Any] | None:
    """The positions of inserted tokens and what they receive [layer, head, inserted]; None if prompts differ."""
    inserted = result["sequences"].origin.sel(condition=condition).values == -1
    if not inserted.any() or (inserted != inserted[0]).any():
        return None
    where = np.flatnonzero(inserted[0])
    if where[-1] - where[0] + 1 != len(where):
        return None
    dataset = result[NAME].isel(key=slice(int(where[0]), int(where[-1]) + 1))
    mean, half = _means(
        dataset.sel(condition=condition), "received", ("layer", "head", "key"), prompts
    )
    null = dataset["received_uniform"].sel(condition=condition).transpose("layer", "key").values
    kind = kind_for(mean.size)
    numbers = {"mean": packed(mean, kind), "half": packed(half, kind), "null": packed(null)}
    return {"start": int(where[0]), "count": len(where), **numbers}


def _question(result: Result) -> int | None:
    """The position in the baseline where the question starts; None if prompts differ."""
    codes = result["sequences"].segment_index.sel(condition=BASELINE).values
    of_question = codes == SEGMENTS.index("question")
    starts = set(of_question.argmax(1)[of_question.any(1)].tolist())
    return starts.pop() if len(starts) == 1 and of_question.any(1).all() else None


def _segments(result: Result, condition: str, keys: int) -> list[tuple[str, int, int]]:
    """Runs of positions that are in one segment in most prompts: its name, first and last position."""
    codes = result["sequences"].segment_index.sel(condition=condition).values[:, :keys]
    runs: list[tuple[str, int, int]] = []
    for at in range(codes.shape[1]):
        here = codes[:, at][codes[:, at] >= 0]
        if not len(here):
            break
        name = SEGMENTS[int(np.bincount(here).argmax())]
        if runs and runs[-1][0] == name:
            runs[-1] = (name, runs[-1][1], at)
        else:
            runs.append((name, at, at))
    return runs


def head_texts(result: Result) -> dict[str, Any]:
    """The first prompt in each condition: its tokens, their segments, and what each token receives from every head."""
    sequences = result["sequences"]
    tokens = {}
    for name in result.conditions:
        texts = prompt_tokens(result, name, 0)
        codes = sequences.segment_index.sel(condition=name).isel(prompt=0).values[: len(texts)]
        tokens[name] = [
            [visible(text), SEGMENTS[code]] for text, code in zip(texts, codes, strict=True)
        ]
    made: dict[str, Any] = {"tokens": tokens}
    dataset: Any = result.datasets.get(NAME, {})
    one = (
        "received" in dataset
        and dataset["received"].sizes.get("prompt", sequences.sizes["prompt"]) == 1
    )
    if "received_per_prompt" not in dataset and not one:
        why = 'The text is not coloured: the run has not kept single prompts\' positions (positions="prompts").'
        return made | {"missing": why}
    each = (
        dataset["received_per_prompt"].isel(prompt=0)
        if "received_per_prompt" in dataset
        else dataset["received"]
    )
    made["received"] = {}
    for name in result.conditions:
        values = (
            each.sel(condition=name)
            .transpose("layer", "head", "key")
            .values[..., : len(tokens[name])]
        )
        made["received"][name] = packed(values, kind_for(values.size * len(tokens)))
    return made


def head_patterns(result: Result) -> dict[str, Any]:
    """Attention maps of the first prompts, lower triangles [layer, head, query · key], or the reason for none."""
    if "attention_map" not in result.datasets:
        return {
            "missing": "There are no attention patterns: run with ma.analyses.AttentionMap() on a few short prompts."
        }
    maps = result["attention_map"].pattern
    shown: list[dict[str, Any]] = []
    left = PATTERNS
    for prompt in range(min(PROMPTS, maps.sizes["prompt"])):
        of_conditions = {}
        for name in result.conditions:
            tokens = prompt_tokens(result, name, prompt)
            low = np.tril_indices(len(tokens))
            square = (
                maps.isel(prompt=prompt)
                .sel(condition=name)
                .transpose("layer", "head", "query", "target")
            )
            left -= square.sizes["layer"] * square.sizes["head"] * len(low[0])
            if left < 0:
                break
            values = np.round(65535 * square.values[..., low[0], low[1]].astype(np.float64))
            inserted = int(
                (result["sequences"].origin.sel(condition=name).isel(prompt=prompt) == -1).sum()
            )
            shown_tokens = [visible(text) for text in tokens]
            of_conditions[name] = {
                "tokens": shown_tokens,
                "inserted": inserted,
                "rows": packed(values, "u2"),
            }
        if of_conditions:
            shown.append(of_conditions)
    layers = [int(layer) for layer in maps.layer.values]
    if not shown:
        return {
            "missing": "The attention patterns are too large for a page; ma.pattern(model, prompt, layer) shows one."
        }
    return {"layers": layers, "prompts": shown}
