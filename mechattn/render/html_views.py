"""Views as HTML for a notebook or an offline page: attention maps, and text coloured by received
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
from mechattn.store.atomic_writes import check_writable, write_text

DIGITS = 3  # decimal places of an attention map; more would only make the page larger
# The start of a tag in the head of each page of mechattn, before any style or script. A page may
# add its version to it.
GENERATOR = '<meta name="generator" content="mechattn'
_HEAD_BYTES = 2**16  # the bytes at the start of a file in which this tag is searched for
Script = Literal["circuitsvis", "plotly"]
# A document that replaces itself with the compressed page in it, without a request.
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


def pattern(
    result: Result,
    layer: int,
    heads: Sequence[int | str] | int | str,
    condition: str | None = None,
    prompt: int = 0,
    *,
    difference: bool = False,
) -> View:
    """Show the attention map of one prompt, heads side by side.

    Click a head to enlarge it. Hover for numbers.

    Args:
        result: A result with an attention map.
        layer: The layer, from 0.
        heads: The heads, from 0, or by name, such as "L1H2".
        condition: The condition. By default it is the baseline, or with ``difference`` the first
            condition that isn't the baseline.
        prompt: The prompt, from 0. Tokens are shown as text for the first prompt, and as ids for
            the others.
        difference: Shows the attention between original tokens in the condition minus that in the
            baseline: orange is more, blue is less. Rows need not sum to 0, as attention to the
            inserted tokens is left out.

    Raises:
        OptionError: The result has no attention map, or no such layer, head, condition or prompt.
    """
    if difference:
        condition = result.condition(condition)
    elif condition is None:
        condition = BASELINE
    dataset = result["attention_map"]
    check_layer(layer, dataset)
    check_condition(result, condition)
    _check_prompt(prompt, dataset)
    head_numbers = check_heads(heads, dataset["head"].values.tolist(), layer)

    head_names = [head_name(layer, number) for number in head_numbers]
    maps, tokens = _maps_and_tokens(result, layer, head_numbers, condition, prompt)
    model_and_layer = f"{model_caption(result)}, layer {layer}"
    if not difference:
        caption = f"{model_and_layer}, condition “{condition}”"
        return _heads_view(maps, tokens, head_names, caption)

    baseline_maps, baseline_tokens = _maps_and_tokens(result, layer, head_numbers, BASELINE, prompt)
    origin = result["sequences"].origin.sel(condition=condition).isel(prompt=prompt).values
    original_positions = np.flatnonzero(origin >= 0)
    original_queries = maps[:, original_positions]
    change = original_queries[:, :, original_positions] - baseline_maps
    largest = float(np.nanmax(abs(change))) or 1.0  # a map without changes needs a scale too
    caption = (
        f"{model_and_layer}: attention between original tokens, “{condition}”"
        f" minus the baseline; orange: more, blue: less, at most {largest:.2f}"
    )
    return _heads_view(
        change,
        baseline_tokens,
        head_names,
        caption,
        minValue=-largest,
        maxValue=largest,
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
    """Show the text of one prompt, coloured by received attention, without and with the inserted
    tokens.

    Both texts share one scale. It ends at the second largest value, because the first token often
    receives far more than any other. Hover for numbers.

    Args:
        result: A result with the received attention of each prompt (``keep="prompts"``), or of a
            single prompt.
        layer: The layer, from 0.
        heads: The heads whose mean is shown; all by default.
        condition: The condition. By default it is the first that isn't the baseline, or the
            baseline if there is no other.
        prompt: The prompt, from 0. Tokens are shown as text for the first prompt, and as ids for
            the others.

    Raises:
        OptionError: There is no such layer, head, condition or prompt, or the result has only means
            over prompts.
    """
    condition = result.shown_condition(condition)
    dataset = result["received_attention"]
    received_of_prompts = received_by_prompt(dataset)
    if received_of_prompts is None:
        raise OptionError(
            'the result has only means over prompts; run with keep="prompts" to see one prompt'
        )

    check_layer(layer, dataset)
    _check_prompt(prompt, dataset)
    measured_heads = dataset["head"].values.tolist()
    head_words = "all heads"
    shown_heads = measured_heads
    if heads is not None:
        shown_heads = check_heads(heads, measured_heads, layer)
        head_words = f"heads {', '.join(map(str, shown_heads))}"
    received = received_of_prompts.isel(prompt=prompt).sel(layer=layer, head=shown_heads)

    conditions = list(dict.fromkeys([BASELINE, condition]))
    values = received.mean("head").sel(condition=conditions).values
    # Keys that no counted query sees, and positions beyond the end of a prompt, are NaN.
    sorted_values = np.sort(values[np.isfinite(values)])
    # A prompt of one token has no value, and all tokens of a prompt may receive nothing.
    scale_end = float(sorted_values[-2:].min(initial=1.0)) or 1.0

    heads_of_layer = f"{model_caption(result)}, layer {layer}, mean of {head_words}"
    body = ""
    line_count = 0
    for name, token_values in zip(conditions, values, strict=True):
        tokens = prompt_tokens(result, name, prompt)
        caption = f"{heads_of_layer}: attention received, “{name}”"
        body += _coloured_tokens(caption, tokens, token_values[: len(tokens)], scale_end)
        line_count += len(tokens) // 12 + 1  # about twelve tokens fit into a line of a notebook

    return View(body, height=130 + 24 * line_count)


@dataclass(frozen=True)
class View:
    """A view as HTML, which can be shown in a notebook or saved as an offline page.

    A notebook shows it in a frame of its own, without network requests. ``body`` can be inserted
    into a page that already contains the script of :func:`view_script`.

    Args:
        body: The HTML.
        height: The height of the frame in a notebook, in pixels.
        script: The library whose script the view needs; None if it needs no library.
    """

    body: str
    height: int = 620
    script: Script | None = None

    def page(self) -> str:
        """Return a complete HTML document that opens offline."""
        script = ""
        if self.script is not None:
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
            OutputError: The file exists, mechattn did not write it and ``force`` is not set; or the
                path cannot be written to.
        """
        save_page(path, self.page(), force)

    def __repr__(self) -> str:
        """One line: the HTML itself is for a notebook or a file."""
        return (
            f"View({len(self.body):,} characters of HTML; .save(path) writes a page that opens"
            " offline)"
        )

    def _repr_html_(self) -> str:
        # Compressed, so that a notebook with ten views has 5 MB instead of 15.
        source = html.escape(_UNPACKS.replace("PACKED", squeezed(self.page())), quote=True)
        style = f"width:100%;height:{self.height}px;border:0"
        return f'<iframe srcdoc="{source}" style="{style}"></iframe>'


def squeezed(text: str) -> str:
    """Compress text with gzip and encode it with base64, which a browser can read offline.

    Equal texts give equal output.
    """
    compressed = gzip.compress(text.encode("utf-8"), 6, mtime=0)  # gzip would store the time
    return base64.b64encode(compressed).decode()


@cache
def view_script(script: Script = "circuitsvis") -> str:
    """The script of the installed circuitsvis (1.3 MB) or plotly (4.5 MB). A page needs it once.

    "</script" in it is escaped, as it would end the element that contains the script.
    """
    if script == "plotly":
        import plotly.offline

        text = plotly.offline.get_plotlyjs()
    else:
        import circuitsvis

        script_file = files(circuitsvis) / "dist" / "cdn" / "iife.js"
        text = script_file.read_text(encoding="utf-8")
    return text.replace("</script", "<\\/script")


def in_script(json_text: str) -> str:
    """Escape JSON so that no token in it can end the script element that contains it."""
    # U+2028 and U+2029 end a line in scripts, but not in JSON.
    for character in "<\u2028\u2029":
        json_text = json_text.replace(character, f"\\u{ord(character):04x}")
    return json_text


def prompt_tokens(result: Result, condition: str, prompt: int) -> list[str]:
    """The tokens of a prompt in a condition, as text for the first prompt and as ids for others."""
    sequences = result["sequences"].sel(condition=condition)
    length = int((sequences.origin.isel(prompt=prompt) > PADDING).sum())
    ids_or_texts = sequences.tokens.isel(prompt=prompt)
    if prompt == 0:
        ids_or_texts = sequences.first_prompt_text
    return [str(token) for token in ids_or_texts.values[:length]]


def received_by_prompt(dataset: xr.Dataset) -> xr.DataArray | None:
    """The received attention of each prompt by position.

    None if the dataset has no received attention, or only means over several prompts.
    """
    if "received_per_prompt" in dataset:
        return dataset.received_per_prompt
    if "received" in dataset and dataset.sizes["prompt"] == 1:
        return dataset.received.expand_dims("prompt")
    return None


def tokens_in_segments(result: Result, condition: str) -> list[tuple[str, str]]:
    """The tokens of the first prompt as text, each with its segment."""
    tokens = prompt_tokens(result, condition, 0)
    segment_index = result["sequences"].segment_index.sel(condition=condition).isel(prompt=0)
    indices = segment_index.values[: len(tokens)]
    return [(visible(token), SEGMENTS[index]) for token, index in zip(tokens, indices, strict=True)]


def check_page_place(path: str | Path, force: bool = False) -> None:
    """Check, before a run, that a page can be written to a path.

    Raises:
        OutputError: The path cannot be written to, or it is a folder or a file that mechattn did
            not write. With ``force`` such a file is allowed.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise OutputError(f'{path!r} is not a path: give one such as "out/page.html"')
    path = Path(path)
    check_writable(path)
    may_replace = path.is_file() and (force or _is_ours(path))
    if path.exists() and not may_replace:
        raise OutputError(
            f"{path} exists and was not written by mechattn, so it is not replaced; choose another"
            " name, or give --force (in Python force=True)"
        )


def save_page(path: str | Path, text: str, force: bool = False) -> Path:
    """Write a page completely or not at all, and return its path. Until it is written, an existing
    page is kept.

    Raises:
        OutputError: As for :func:`check_page_place`.
    """
    check_page_place(path, force)
    path = Path(path)
    write_text(path, text)
    return path


def _check_prompt(prompt: int, dataset: xr.Dataset) -> None:
    """Raise an OptionError for a prompt that the result does not have."""
    count = dataset.sizes["prompt"]
    is_whole = isinstance(prompt, (int, np.integer)) and not isinstance(prompt, bool)
    if not is_whole or prompt not in range(count):
        raise OptionError(f"prompt={prompt!r}: the result has prompts 0 to {count - 1}")


def _maps_and_tokens(
    result: Result, layer: int, heads: Sequence[int], condition: str, prompt: int
) -> tuple[np.ndarray, list[str]]:
    """The attention maps of one prompt [head, query, key], without padding, and its tokens."""
    maps = result["attention_map"].pattern.isel(prompt=prompt)
    maps = maps.sel(layer=layer, condition=condition, head=heads)
    tokens = prompt_tokens(result, condition, prompt)
    length = len(tokens)
    return maps.values[:, :length, :length], tokens


def _heads_view(
    maps: np.ndarray,
    tokens: list[str],
    head_names: list[str],
    caption: str,
    **colours: Any,
) -> View:
    """The view in which circuitsvis draws the maps of some heads.

    Args:
        maps: The attention, or its change [head, query, key].
        tokens: The tokens of the prompt.
        head_names: The names of the heads.
        caption: The caption above the maps.
        colours: Options of circuitsvis on the range and the colours.
    """
    properties = {
        "attention": np.round(maps.astype(np.float64), DIGITS).tolist(),
        "attentionHeadNames": head_names,
        "tokens": tokens,
        **colours,
        "maskUpperTri": True,
    }

    data = in_script(json.dumps(properties, separators=(",", ":")))
    # Equal views have equal ids, so that a notebook does not change when it is run again.
    digest = hashlib.sha256(f"AttentionHeads {caption} {data}".encode()).hexdigest()
    view_id = f"view-{digest[:12]}"
    script = f'CircuitsVis.render("{view_id}", CircuitsVis.AttentionHeads, {data})'
    body = _figure(caption, f'<div id="{view_id}"></div>') + f"<script>{script}</script>"
    return View(body, script="circuitsvis")


def _figure(caption: str, content: str) -> str:
    """HTML with a caption above it."""
    return f'<figure class="view"><figcaption>{html.escape(caption)}</figcaption>{content}</figure>'


def _coloured_tokens(
    caption: str, tokens: Sequence[str], values: np.ndarray, scale_end: float
) -> str:
    """Tokens as HTML, with a background whose opacity is their value as a fraction of
    ``scale_end``, at most 1.

    The coloured text of circuitsvis is not used, as it does not escape tokens.
    """
    spans = []
    for token, value in zip(tokens, values, strict=True):
        opacity = 0.0
        hover = "no counted query comes after it"
        if not np.isnan(value):
            opacity = min(1.0, float(value) / scale_end)
            hover = f"{value:.4f}"
        background = faint(WITH, round(opacity, 2))
        # On a strong background, the dark letters of a light page would be hard to read.
        letter_colour = "#fff" if opacity > 0.6 else "inherit"
        style = f"background:{background};color:{letter_colour};padding:2px 1px;{AS_WRITTEN}"
        spans.append(f'<span title="{hover}" style="{style}">{html.escape(visible(token))}</span>')

    text = f'<p style="line-height:1.9;overflow-wrap:anywhere">{"".join(spans)}</p>'
    return _figure(caption, text)


def _is_ours(path: Path) -> bool:
    """Whether mechattn wrote a page; true for an empty file too, which a crash may leave."""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES).decode("utf-8", "replace")
    except OSError:
        return False
    return not head or GENERATOR in head.partition("<style")[0].partition("<script")[0]
