"""Offline circuitsvis views: attention maps, their difference, and text coloured by received attention."""

from __future__ import annotations

import hashlib
import html
import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from mechattn.axes import BASELINE
from mechattn.errors import OptionError
from mechattn.markup import visible
from mechattn.render.received_figures import NAME, check_heads
from mechattn.render.theme import WITH, WITHOUT, model_caption
from mechattn.render.view import View, in_script, prompt_tokens
from mechattn.results.result import Result

DIGITS = 3


def attention_pattern(
    result: Result, layer: int, heads: Seq[int], condition: str = "baseline", prompt: int = 0
) -> View:
    """Show the attention map of one prompt, heads side by side; click a head to enlarge it, hover for numbers.

    Args:
        result: A result with an attention map.
        layer: The layer, from 0.
        heads: The heads, from 0.
        condition: The condition of the prompt.
        prompt: The prompt, from 0; tokens are shown as text for the first, as ids for the others.

    Raises:
        OptionError: There is no such layer, head, condition or prompt.
    """
    maps, tokens = _map(result, layer, heads, condition, prompt)
    caption = f"{model_caption(result)}, layer {layer}, condition “{condition}”"
    properties = {"attention": _rounded(maps), "attentionHeadNames": _names(layer, heads), "tokens": tokens}
    return View(_drawn("AttentionHeads", properties | {"maskUpperTri": True}, caption))


def pattern_difference(
    result: Result, layer: int, heads: Seq[int], condition: str | None = None, prompt: int = 0
) -> View:
    """Show attention between original tokens under a condition minus the baseline; orange is more, blue less.

    Rows need not sum to 0, as attention to the inserted tokens is left out.

    Args:
        result: A result with an attention map.
        layer: The layer, from 0.
        heads: The heads, from 0.
        condition: The condition; the first that isn't the baseline by default.
        prompt: The prompt, from 0.

    Raises:
        OptionError: There is no such layer, head, condition or prompt.
    """
    condition = result.condition(condition)
    without, tokens = _map(result, layer, heads, BASELINE, prompt)
    with_them, _ = _map(result, layer, heads, condition, prompt)
    origin = result["sequences"].origin.sel(condition=condition).isel(prompt=prompt).values
    kept = np.flatnonzero(origin >= 0)
    difference = with_them[:, kept][:, :, kept] - without
    reach = float(np.nanmax(abs(difference))) or 1.0
    caption = (
        f"{model_caption(result)}, layer {layer}: attention between original tokens, “{condition}” minus the "
        f"baseline; orange: more, blue: less, at most {reach:.2f}"
    )
    colours = {"minValue": -reach, "maxValue": reach, "negativeColor": WITHOUT, "positiveColor": WITH}
    properties = {"attention": _rounded(difference), "attentionHeadNames": _names(layer, heads), "tokens": tokens}
    return View(_drawn("AttentionHeads", properties | colours | {"maskUpperTri": True}, caption))


def received_text(
    result: Result, layer: int, heads: Seq[int] | None = None, condition: str | None = None, prompt: int = 0
) -> View:
    """Show one prompt's text coloured by received attention, without and with the inserted tokens.

    Both share one scale, which ends at the second largest value, because the first token often receives far more than
    any other. Hover for the number.

    Args:
        result: A result with received attention of each prompt (``positions="prompts"``), or of one prompt.
        layer: The layer, from 0.
        heads: The heads whose mean is shown; all by default.
        condition: The condition; by default the first that isn't the baseline, if there is one.
        prompt: The prompt, from 0; tokens are shown as text for the first, as ids for the others.

    Raises:
        OptionError: There is no such layer, head, condition or prompt, or only means over prompts were kept.
    """
    condition, dataset = result.shown_condition(condition), result[NAME]
    name = "received_per_prompt"
    if name not in dataset and dataset.sizes["prompt"] > 1:
        raise OptionError('the result has only means over prompts; run with positions="prompts" to see one prompt')
    _check({"layer": (layer, dataset.layer.values), "prompt": (prompt, range(dataset.sizes["prompt"]))})
    heads = list(range(dataset.sizes["head"]) if heads is None else heads)
    check_heads(heads, dataset.sizes["head"])
    received = dataset[name].isel(prompt=prompt) if name in dataset else dataset["received"]
    received = received.sel(layer=layer).isel(head=heads).mean("head")
    lines = []
    for of in dict.fromkeys((BASELINE, condition)):
        tokens = prompt_tokens(result, of, prompt)
        lines.append((of, tokens, received.sel(condition=of).values[: len(tokens)]))
    every = np.concatenate([values for _, _, values in lines])
    top = float(np.sort(every[np.isfinite(every)])[-2:].min())
    which = f"heads {', '.join(map(str, heads))}" if len(heads) < dataset.sizes["head"] else "all heads"
    of_what = f"{model_caption(result)}, layer {layer}, mean of {which}"
    body = "".join(_text(f"{of_what}: attention received, “{of}”", tokens, values, top) for of, tokens, values in lines)
    return View(body, 130 + 24 * sum(len(tokens) // 12 + 1 for _, tokens, _ in lines), None)


def _text(caption: str, tokens: Seq[str], values: np.ndarray, top: float) -> str:
    """Tokens with a background as strong as their value; our own HTML, as circuitsvis does not escape tokens."""
    red, green, blue = (int(WITH[at : at + 2], 16) for at in (1, 3, 5))
    spans = []
    for token, value in zip(tokens, values, strict=True):
        strength = 0.0 if np.isnan(value) else min(1.0, float(value) / top)
        number = "no counted query comes after it" if np.isnan(value) else f"{value:.4f}"
        ink = "#fff" if strength > 0.6 else "inherit"
        spans.append(
            f'<span title="{number}" style="background:rgba({red},{green},{blue},{strength:.2f});color:{ink};'
            f'padding:2px 1px;white-space:pre-wrap;unicode-bidi:isolate">{html.escape(visible(token))}</span>'
        )
    text = f'<p style="line-height:1.9;overflow-wrap:anywhere">{"".join(spans)}</p>'
    return f'<figure class="view"><figcaption>{html.escape(caption)}</figcaption>{text}</figure>'


def _map(result: Result, layer: int, heads: Seq[int], condition: str, prompt: int) -> tuple[np.ndarray, list[str]]:
    """The map [head, query, key] of one prompt, and its tokens."""
    dataset = result["attention_map"]
    _check(
        {
            "layer": (layer, dataset.layer.values),
            "condition": (condition, result.conditions),
            "prompt": (prompt, range(dataset.sizes["prompt"])),
        }
    )
    check_heads(heads, dataset.sizes["head"])
    maps = dataset.attention.sel(layer=layer, condition=condition).isel(prompt=prompt, head=list(heads)).values
    tokens = prompt_tokens(result, condition, prompt)
    return maps[:, : len(tokens), : len(tokens)], tokens


def _check(asked: Mapping[str, tuple[Any, Any]]) -> None:
    for name, (value, known) in asked.items():
        if value not in list(known):
            raise OptionError(f"{name} {value!r} is not in this result; it has {', '.join(map(str, known))}")


def _names(layer: int, heads: Seq[int]) -> list[str]:
    return [f"L{layer}H{head}" for head in heads]


def _rounded(maps: np.ndarray) -> list:
    return [[[round(float(a), DIGITS) for a in row] for row in head] for head in maps]


def _drawn(component: str, properties: Mapping[str, Any], caption: str) -> str:
    """A circuitsvis component, and the line of script that draws it."""
    data = in_script(json.dumps(properties, separators=(",", ":")))
    name = "view-" + hashlib.sha256(f"{component} {caption} {data}".encode()).hexdigest()[:12]
    return (
        f'<figure class="view"><figcaption>{html.escape(caption)}</figcaption><div id="{name}"></div></figure>'
        f'<script>CircuitsVis.render("{name}", CircuitsVis.{component}, {data})</script>'
    )
