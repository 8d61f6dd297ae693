"""The data of a head's detail view: received attention by position, the first prompt's text, and some patterns."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from mechattn.axes import BASELINE, SEGMENTS
from mechattn.contrast.means import at_positions
from mechattn.markup import visible
from mechattn.pages.embedded import kind_for, packed
from mechattn.render.view import prompt_tokens
from mechattn.render.words import band_words
from mechattn.results.result import Result

NAME = "received_attention"
PATTERNS = 3_000_000  # numbers in all patterns together: 8 MB of the page
PROMPTS = 3


def head_curves(result: Result) -> dict[str, Any]:
    """Received attention of every head by original position in each condition, with its intervals and its null."""
    dataset = result.datasets.get(NAME)
    if dataset is None or "received_by_origin_variance" not in dataset:
        return {"missing": "The run did not measure received attention by position (ma.ReceivedAttention())."}
    dims = ("condition", "layer", "head")
    prompts = dataset.sizes["prompt"]
    at = (*dims, "original_key")
    mean, half = _means(dataset, "received_by_origin", at, prompts)
    keys = int(np.flatnonzero(np.isfinite(mean).any((0, 1, 2))).max(initial=0)) + 1
    n = np.nan_to_num(dataset["received_by_origin_n"].transpose(*at).values).max(2)
    null = dataset["received_uniform_by_origin"].transpose("condition", "layer", "original_key").values[..., :keys]
    kind = kind_for(mean[..., :keys].size)
    return {
        "mean": packed(mean[..., :keys], kind),
        "half": packed(half[..., :keys], kind),
        "n": packed(n[..., :keys], "u2"),
        "null": packed(null),
        "segments": _segments(result, BASELINE, keys),
        "question": _question(result),
        "inserted": {name: _inserted(result, name, prompts) for name in result.conditions if name != BASELINE},
        "prompts": prompts,
        "bands": f"pointwise 95 % intervals over prompts{band_words(result)}",
    }


def _means(dataset: xr.Dataset, quantity: str, dims: tuple[str, ...], prompts: int) -> tuple[np.ndarray, np.ndarray]:
    """Means, and the half-widths of their intervals relative to them; NaN where too few prompts have a position."""
    parts = {quantity + end: dataset[quantity + end].transpose(*dims) for end in ("", "_variance", "_n")}
    flat = {name: ("cell", np.asarray(part, dtype=np.float64).ravel()) for name, part in parts.items()}
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
    mean, half = _means(dataset.sel(condition=condition), "received", ("layer", "head", "key"), prompts)
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
        tokens[name] = [[visible(text), SEGMENTS[code]] for text, code in zip(texts, codes, strict=True)]
    made: dict[str, Any] = {"tokens": tokens}
    dataset: Any = result.datasets.get(NAME, {})
    one = "received" in dataset and dataset["received"].sizes.get("prompt", sequences.sizes["prompt"]) == 1
    if "received_per_prompt" not in dataset and not one:
        why = 'The text is not coloured: the run has not kept single prompts\' positions (positions="prompts").'
        return made | {"missing": why}
    each = dataset["received_per_prompt"].isel(prompt=0) if "received_per_prompt" in dataset else dataset["received"]
    made["received"] = {}
    for name in result.conditions:
        values = each.sel(condition=name).transpose("layer", "head", "key").values[..., : len(tokens[name])]
        made["received"][name] = packed(values, kind_for(values.size * len(tokens)))
    return made


def head_patterns(result: Result) -> dict[str, Any]:
    """Attention maps of the first prompts, lower triangles [layer, head, query · key], or the reason for none."""
    if "attention_map" not in result.datasets:
        return {
            "missing": "There are no attention patterns: run with ma.analyses.AttentionMap() on a few short prompts."
        }
    maps = result["attention_map"].attention
    shown: list[dict[str, Any]] = []
    left = PATTERNS
    for prompt in range(min(PROMPTS, maps.sizes["prompt"])):
        of_conditions = {}
        for name in result.conditions:
            tokens = prompt_tokens(result, name, prompt)
            low = np.tril_indices(len(tokens))
            square = maps.isel(prompt=prompt).sel(condition=name).transpose("layer", "head", "query", "target")
            left -= square.sizes["layer"] * square.sizes["head"] * len(low[0])
            if left < 0:
                break
            values = np.round(65535 * square.values[..., low[0], low[1]].astype(np.float64))
            inserted = int((result["sequences"].origin.sel(condition=name).isel(prompt=prompt) == -1).sum())
            shown_tokens = [visible(text) for text in tokens]
            of_conditions[name] = {"tokens": shown_tokens, "inserted": inserted, "rows": packed(values, "u2")}
        if of_conditions:
            shown.append(of_conditions)
    layers = [int(layer) for layer in maps.layer.values]
    if not shown:
        return {
            "missing": "The attention patterns are too large for a page; ma.pattern(model, prompt, layer) shows one."
        }
    return {"layers": layers, "prompts": shown}
