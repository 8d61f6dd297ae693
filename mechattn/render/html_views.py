"""Views as HTML for a notebook or an offline page: attention maps, text coloured by received
attention.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xarray as xr

from mechattn.axes import BASELINE, PADDING, SEGMENTS
from mechattn.contrast.quantities import check_condition, check_layer
from mechattn.errors import OptionError, OutputError, visible
from mechattn.markup import AS_WRITTEN
from mechattn.render.draw import FONT, WITH, WITHOUT, faint
from mechattn.render.figure_declaration import check_heads
from mechattn.render.words import model_caption
from mechattn.results.result import Result, head_name
from mechattn.store.atomic_writes import check_writable, write_whole

DIGITS = 3  # of an attention map; further ones would only make the page larger
# In the head of each of our pages, before any style or script; a page may add a version.
GENERATOR = '<meta name="generator" content="mechattn'
_HEAD_BYTES = 2**16  # at the start of a file, in which it is looked for
Script = Literal["circuitsvis", "plotly"]


def pattern(
    result: Result,
    layer: int,
    heads: Sequence[int | str] | int | str,
    condition: str | None = None,
    prompt: int = 0,
    *,
    difference: bool = False,
) -> View:
    """Show the attention map of one prompt, heads side by side; click a head to enlarge it, hover
    for numbers.

    Args:
        result: A result with an attention map.
        layer: The layer, from 0.
        heads: The heads, from 0, or by name, such as "L1H2".
        condition: The condition of the prompt; the baseline by default, of a difference the first
            that isn't.
        prompt: The prompt, from 0; tokens are shown as text for the first, as ids for the others.
        difference: Whether to show attention between original tokens under the condition minus the
            baseline: orange is more, blue less. Rows need not sum to 0, as attention to the
            inserted tokens is left out.

    Raises:
        OptionError: There is no such layer, head, condition or prompt.
    """
    if difference:
        condition = result.condition(condition)
    elif condition is None:
        condition = BASELINE
    dataset = result["attention_map"]
    check_layer(layer, dataset)
    check_condition(result, condition)
    _check_prompt(prompt, dataset)
    heads = check_heads(heads, dataset["head"].values.tolist(), layer)

    names = [head_name(layer, head) for head in heads]
    maps, tokens = _map(result, layer, heads, condition, prompt)
    start = f"{model_caption(result)}, layer {layer}"
    if not difference:
        return _heads_view(maps, tokens, names, f"{start}, condition “{condition}”")

    baseline_maps, baseline_tokens = _map(result, layer, heads, BASELINE, prompt)
    origin = result["sequences"].origin.sel(condition=condition).isel(prompt=prompt).values
    original = np.flatnonzero(origin >= 0)
    change = maps[:, original][:, :, original] - baseline_maps
    reach = float(np.nanmax(abs(change))) or 1.0  # where nothing changes there is a scale too
    caption = (
        f"{start}: attention between original tokens, “{condition}”"
        f" minus the baseline; orange: more, blue: less, at most {reach:.2f}"
    )
    return _heads_view(
        change,
        baseline_tokens,
        names,
        caption,
        minValue=-reach,
        maxValue=reach,
        negativeColor=WITHOUT,
        positiveColor=WITH,
    )


def received_text(
    result: Result,
    layer: int,
    heads: Sequence[int | str] | int | str | None = None,
    condition: str | None = None,
    prompt: int = 0,
) -> View:
    """Show one prompt's text coloured by received attention, without and with the inserted tokens.

    Both share one scale, which ends at the second largest value, because the first token often
    receives far more than any other. Hover for the number.

    Args:
        result: A result with received attention of each prompt (``keep="prompts"``), or of one
            prompt.
        layer: The layer, from 0.
        heads: The heads whose mean is shown; all by default.
        condition: The condition; by default the first that isn't the baseline, if there is one.
        prompt: The prompt, from 0; tokens are shown as text for the first, as ids for the others.

    Raises:
        OptionError: There is no such layer, head, condition or prompt, or only means over prompts
            were kept.
    """
    condition = result.shown_condition(condition)
    dataset = result["received_attention"]
    received = received_by_prompt(dataset)
    if received is None:
        raise OptionError(
            'the result has only means over prompts; run with keep="prompts" to see one prompt'
        )

    check_layer(layer, dataset)
    _check_prompt(prompt, dataset)
    measured = dataset["head"].values.tolist()
    head_words = "all heads"
    shown_heads = measured
    if heads is not None:
        shown_heads = check_heads(heads, measured, layer)
        head_words = f"heads {', '.join(map(str, shown_heads))}"
    received = received.isel(prompt=prompt).sel(layer=layer, head=shown_heads).mean("head")

    names = list(dict.fromkeys([BASELINE, condition]))
    values = received.sel(condition=names).values
    finite = np.sort(values[np.isfinite(values)])  # beyond the end of a prompt there is none
    # A prompt of one token has no value, and others may receive nothing.
    top = float(finite[-2:].min(initial=1.0)) or 1.0

    start = f"{model_caption(result)}, layer {layer}, mean of {head_words}"
    body = ""
    lines = 0
    for name, token_values in zip(names, values, strict=True):
        tokens = prompt_tokens(result, name, prompt)
        caption = f"{start}: attention received, “{name}”"
        body += _coloured_tokens(caption, tokens, token_values[: len(tokens)], top)
        lines += len(tokens) // 12 + 1  # about twelve tokens fit into a line of a notebook

    return View(body, 130 + 24 * lines, script=None)


def _coloured_tokens(caption: str, tokens: Sequence[str], values: np.ndarray, top: float) -> str:
    """Tokens with a background as strong as their value; our own HTML, as circuitsvis does not
    escape tokens.
    """
    spans = []
    for token, value in zip(tokens, values, strict=True):
        strength = 0.0
        hover = "no counted query comes after it"
        if not np.isnan(value):
            strength = min(1.0, float(value) / top)
            hover = f"{value:.4f}"
        background = faint(WITH, round(strength, 2))
        ink = "#fff" if strength > 0.6 else "inherit"
        style = f"background:{background};color:{ink};padding:2px 1px;{AS_WRITTEN}"
        spans.append(f'<span title="{hover}" style="{style}">{html.escape(visible(token))}</span>')

    text = f'<p style="line-height:1.9;overflow-wrap:anywhere">{"".join(spans)}</p>'
    return _figure(caption, text)


def _figure(caption: str, content: str) -> str:
    """A view under its caption."""
    return f'<figure class="view"><figcaption>{html.escape(caption)}</figcaption>{content}</figure>'


def _map(
    result: Result, layer: int, heads: Sequence[int], condition: str, prompt: int
) -> tuple[np.ndarray, list[str]]:
    """The map [head, query, key] of one prompt, and its tokens."""
    maps = result["attention_map"].pattern.isel(prompt=prompt)
    maps = maps.sel(layer=layer, condition=condition, head=heads)
    tokens = prompt_tokens(result, condition, prompt)
    length = len(tokens)
    return maps.values[:, :length, :length], tokens


def _check_prompt(prompt: int, dataset: xr.Dataset) -> None:
    """Refuse a prompt that the result does not have."""
    count = dataset.sizes["prompt"]
    if prompt not in range(count):
        raise OptionError(f"prompt={prompt!r}: the result has prompts 0 to {count - 1}")


def _heads_view(
    maps: np.ndarray,
    tokens: list[str],
    names: list[str],
    caption: str,
    **colours: Any,
) -> View:
    """Maps [head, query, key], and the line of script with which circuitsvis draws them."""
    properties = {
        "attention": np.round(maps.astype(np.float64), DIGITS).tolist(),
        "attentionHeadNames": names,
        "tokens": tokens,
        **colours,
        "maskUpperTri": True,
    }

    data = in_script(json.dumps(properties, separators=(",", ":")))
    # Equal views have equal names, so that a notebook that runs again stays as it was.
    digest = hashlib.sha256(f"AttentionHeads {caption} {data}".encode()).hexdigest()
    name = f"view-{digest[:12]}"
    script = f'CircuitsVis.render("{name}", CircuitsVis.AttentionHeads, {data})'
    return View(_figure(caption, f'<div id="{name}"></div>') + f"<script>{script}</script>")


@dataclass(frozen=True)
class View:
    """A view as HTML, which can be shown in a notebook or saved as an offline page.

    In a notebook it displays in its own frame, without network requests. ``body`` can be put into a
    page that already contains :func:`view_script`.

    Args:
        body: The HTML.
        height: The height of the frame, in pixels.
        script: The library whose script it needs; None needs none.
    """

    body: str
    height: int = 620
    script: Script | None = "circuitsvis"

    def page(self) -> str:
        """Return a complete HTML document that opens offline."""
        script = ""
        if self.script:
            script = f"<script>{view_script(self.script)}</script>"
        style = f":root {{ color-scheme: light dark }} body {{ font-family: {FONT} }}"
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8">{GENERATOR}">'
            f"<title>Attention</title><style>{style}</style></head>"
            f"<body>{script}{self.body}</body></html>"
        )

    def save(self, path: str | Path, force: bool = False) -> None:
        """Save the document to a file, completely or not at all.

        Args:
            path: The HTML file.
            force: Replace a file that mechattn did not write.

        Raises:
            OutputError: The path holds such a file, or cannot be written to.
        """
        save_page(path, self.page(), force)

    def __repr__(self) -> str:
        """One line: the HTML itself is for a notebook or a file."""
        return (
            f"View({len(self.body):,} characters of HTML; .save(path) writes a page that opens"
            " offline)"
        )

    def _repr_html_(self) -> str:
        # Squeezed, so that a notebook with ten views takes 5 MB and not 15; the browser unpacks it,
        # without a request.
        source = html.escape(_UNPACKS.replace("PACKED", squeezed(self.page())), quote=True)
        style = f"width:100%;height:{self.height}px;border:0"
        return f'<iframe srcdoc="{source}" style="{style}"></iframe>'


_UNPACKS = """<!doctype html><meta charset="utf-8"><script>
(async () => {
  const bytes = Uint8Array.from(atob("PACKED"), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const page = await new Response(stream).text();
  document.open();
  document.write(page);
  document.close();
})();
</script>"""


def squeezed(text: str) -> str:
    """Compress text with gzip and base64, which a browser reads offline; equal texts stay equal."""
    content = gzip.compress(text.encode("utf-8"), 6, mtime=0)
    return base64.b64encode(content).decode()


@cache
def view_script(script: Script = "circuitsvis") -> str:
    """The script of circuitsvis (1.3 MB) or of plotly (4.5 MB), as installed; needed once per
    page."""
    if script == "plotly":
        import plotly.offline

        text = plotly.offline.get_plotlyjs()
    else:
        import circuitsvis

        built = files(circuitsvis) / "dist" / "cdn" / "iife.js"
        text = built.read_text(encoding="utf-8")
    return text.replace("</script", "<\\/script")


def in_script(json_text: str) -> str:
    """JSON that is safe in a script element, whatever tokens it contains."""
    # U+2028 and U+2029 end a line in scripts, but not in JSON.
    for character in "<\u2028\u2029":
        json_text = json_text.replace(character, f"\\u{ord(character):04x}")
    return json_text


def prompt_tokens(result: Result, condition: str, prompt: int) -> list[str]:
    """The tokens of a prompt: as text for the first prompt, as ids for the others."""
    sequences = result["sequences"].sel(condition=condition)
    length = int((sequences.origin.isel(prompt=prompt) > PADDING).sum())
    tokens = sequences.tokens.isel(prompt=prompt)
    if prompt == 0:
        tokens = sequences.first_prompt_text
    return [str(token) for token in tokens.values[:length]]


def received_by_prompt(dataset: xr.Dataset) -> xr.DataArray | None:
    """What each position of every prompt receives; None if only means over prompts were kept."""
    if "received_per_prompt" in dataset:
        return dataset.received_per_prompt
    if "received" in dataset and dataset.sizes["prompt"] == 1:
        return dataset.received.expand_dims("prompt")
    return None


def tokens_in_segments(result: Result, condition: str) -> list[tuple[str, str]]:
    """The tokens of the first prompt as text, each with its segment."""
    texts = prompt_tokens(result, condition, 0)
    segment_index = result["sequences"].segment_index.sel(condition=condition).isel(prompt=0)
    indices = segment_index.values[: len(texts)]
    return [(visible(text), SEGMENTS[index]) for text, index in zip(texts, indices, strict=True)]


def check_page_place(path: str | Path, force: bool = False) -> None:
    """Check that a page can be written here, before the run.

    Raises:
        OutputError: It cannot, or there is a file that mechattn did not write and ``force`` is not
            set.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise OutputError(f'{path!r} is not a path: give one such as "out/page.html"')
    path = Path(path)
    check_writable(path)
    if path.exists() and not (path.is_file() and (force or _is_ours(path))):
        raise OutputError(
            f"{path} exists and was not written by mechattn, so it is not replaced; choose another"
            " name, or give --force (in Python force=True)"
        )


def save_page(path: str | Path, text: str, force: bool = False) -> Path:
    """Write a page completely or not at all; an existing page is kept until then."""
    check_page_place(path, force)
    path = Path(path)
    write_whole(path, lambda new: new.write_text(text, encoding="utf-8"))
    return path


def _is_ours(path: Path) -> bool:
    """Whether mechattn wrote a page, or the file is empty."""
    try:
        with open(path, "rb") as stored:
            head = stored.read(_HEAD_BYTES).decode("utf-8", "replace")
    except OSError:
        return False
    return not head or GENERATOR in head.partition("<style")[0].partition("<script")[0]
