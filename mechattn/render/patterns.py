"""Attention maps drawn by circuitsvis, offline: one shared script a page, tokens escaped, numbers rounded."""

from __future__ import annotations

import hashlib
import html
import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from mechattn.errors import OptionError
from mechattn.render.theme import model_caption
from mechattn.results.result import Result

DIGITS = 3


@dataclass(frozen=True)
class View:
    """A piece of HTML that needs the circuitsvis script once on its page.

    In a notebook it shows itself, in a frame of its own and without asking the network. ``body`` goes into a page that
    already has :func:`view_script`.
    """

    body: str
    height: int = 620

    def page(self) -> str:
        """A whole HTML document that opens offline."""
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Attention</title></head>'
            f"<body><script>{view_script()}</script>{self.body}</body></html>"
        )

    def save(self, path: str | Path) -> None:
        """Write the document to a file."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(self.page(), encoding="utf-8")

    def _repr_html_(self) -> str:
        source = html.escape(self.page(), quote=True)
        return f'<iframe srcdoc="{source}" style="width:100%;height:{self.height}px;border:0"></iframe>'


@cache
def view_script() -> str:
    """The script of circuitsvis, as installed; 1.3 MB, once a page."""
    import circuitsvis

    script = Path(circuitsvis.__file__).parent / "dist" / "cdn" / "iife.js"
    return script.read_text(encoding="utf-8").replace("</script", "<\\/script")


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
