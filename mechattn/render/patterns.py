"""Attention maps drawn by circuitsvis, offline: one shared script a page, tokens escaped, numbers rounded."""

from __future__ import annotations

import hashlib
import html
import json
from collections.abc import Sequence as Seq

import numpy as np

from mechattn.errors import OptionError
from mechattn.render.theme import model_caption
from mechattn.render.view import View
from mechattn.results.result import Result

DIGITS = 3


def attention_pattern(
    result: Result, layer: int, heads: Seq[int], condition: str = "baseline", prompt: int = 0
) -> View:
    """The attention map of one prompt, heads side by side; click one to enlarge it, hover for the numbers.

    Args:
        result: A result with an attention map.
        layer: The layer, from 0.
        heads: The heads, from 0.
        condition: Which condition of the prompt.
        prompt: Which prompt, from 0; tokens are shown as text for the first, as ids for the others.

    Raises:
        OptionError: No such layer, head, condition or prompt.
    """
    dataset, sequences = result["attention_map"], result["sequences"]
    for name, value, known in (
        ("layer", layer, dataset.layer.values.tolist()),
        ("condition", condition, result.conditions),
        ("prompt", prompt, list(range(dataset.sizes["prompt"]))),
        *(("head", head, list(range(dataset.sizes["head"]))) for head in heads),
    ):
        if value not in known:
            raise OptionError(f"{name} {value!r} is not in this result; it has {known}")
    maps = dataset.attention.sel(layer=layer, condition=condition).isel(prompt=prompt, head=list(heads)).values
    length = int((sequences.origin.sel(condition=condition).isel(prompt=prompt) >= -1).sum())
    ids = sequences.tokens.sel(condition=condition).isel(prompt=prompt).values[:length]
    texts = sequences.first_prompt_text.sel(condition=condition).values[:length]
    tokens = [str(t) for t in (texts if prompt == 0 else ids)]
    caption = f"{model_caption(result)}, layer {layer}, condition “{condition}”"
    return View(_body(maps[:, :length, :length], tokens, [f"L{layer}H{head}" for head in heads], caption))


def _body(maps: np.ndarray, tokens: list[str], names: list[str], caption: str) -> str:
    properties = {
        "attention": [[[round(float(a), DIGITS) for a in row] for row in head] for head in maps],
        "attentionHeadNames": names,
        "tokens": tokens,
        "maskUpperTri": True,
    }
    data = json.dumps(properties, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    name = "view-" + hashlib.sha256(data.encode()).hexdigest()[:12]
    return (
        f'<figure class="view"><figcaption>{html.escape(caption)}</figcaption><div id="{name}"></div></figure>'
        f'<script>CircuitsVis.render("{name}", CircuitsVis.AttentionHeads, {data})</script>'
    )
