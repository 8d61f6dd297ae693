"""An interactive view of one prompt's attention: map and parts of the scores, by layer and head."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence as Seq
from importlib.resources import files
from typing import Any

import numpy as np

from mechattn.contrast.quantities import check_condition
from mechattn.errors import OptionError
from mechattn.render.received_figures import check_heads
from mechattn.render.theme import FONT, model_caption
from mechattn.render.view import View, in_script, prompt_tokens
from mechattn.results.result import Result

MOST = 64  # heads: at 170 tokens they take 2.5 MB
STEP = 0.003  # nats: probabilities are accurate to 0.15 %, down to 1e-43
_RANKS = 8
_KEY = (  # symbols of the marks on the map
    "Marks: the strongest targets of each query that hold half of its attention, by rank "
    "● 1 ■ 2 ◆ 3 ▲ 4 ★ 5 ✚ 6 ✖ 7 ⬟ 8; "
    '<b data-part="key-itself">the query itself</b>, <b data-part="key-first">the first token</b>, '
    '<b data-part="key-another">another</b>.'
)
_UNSEEN = -32768  # for a key outside the window, or masked


def attention_explorer(
    result: Result, condition: str = "baseline", prompt: int = 0, heads: Seq[int] | None = None, note: str = ""
) -> View:
    """Draw figures 1 to 3 of R. Claus, "Attention Focus Plots", for one prompt, with controls for layer, head and rank.

    Hover over the map for both tokens, the probability, the rank and the parts of the score. Marks show the strongest
    targets of each query that together hold half of its attention (at most eight): green for the query itself, purple
    for the first token, orange for another, with symbols by rank. If scores can be decomposed, a ternary plot shows
    content, bias and ALiBi of the target of a rank, and a line plot bias and ALiBi over positions.

    Args:
        result: A result with ``AttentionMap``, and ``ScoreDecomposition`` where the model allows it; its prompt's own
            positions (``positions="prompts"``) are needed for the latter.
        condition: The condition of the prompt.
        prompt: The prompt, from 0; tokens are shown as text for the first prompt and as ids for others.
        heads: The heads of each layer, from 0; all by default.
        note: A sentence for the caption.

    Raises:
        OptionError: There is no map, no such condition, prompt or head, or there are more than 64 heads.
    """
    maps = result["attention_map"].attention
    chosen = list(range(maps.sizes["head"]) if heads is None else heads)
    check_heads(chosen, maps.sizes["head"])
    maps = maps.isel(head=chosen)
    _check(result, condition, prompt, maps)
    here = maps.sel(condition=condition).isel(prompt=prompt)
    length = int((result["sequences"].origin.sel(condition=condition).isel(prompt=prompt) >= -1).sum())
    square = here.values[..., :length, :length].reshape(-1, length, length)
    low = np.tril_indices(length)
    with np.errstate(divide="ignore"):
        logs = np.clip(np.log(square[:, low[0], low[1]]) / STEP, -32767, 0)
    logs[square[:, low[0], low[1]] == 0] = _UNSEEN
    names = [(int(n), int(h)) for n in here.layer.values for h in here["head"].values]
    data = {
        "tokens": prompt_tokens(result, condition, prompt),
        "heads": [{"layer": n, "head": h, "name": f"layer {n}, head {h}"} for n, h in names],
        "step": STEP,
        "logs": _packed(np.rint(logs), "<i2"),
        "parts": _parts(result, condition, prompt, length, chosen),
        "font": FONT,
    }
    caption = f"{model_caption(result)}, condition “{condition}”, {length} tokens{'; ' * bool(note)}{note}"
    return View(_body(data, caption), 1850, "plotly")


def _check(result: Result, condition: str, prompt: int, maps: Any) -> None:
    check_condition(result, condition)
    if not 0 <= prompt < maps.sizes["prompt"]:
        raise OptionError(f"prompt={prompt}: the result has prompts 0 to {maps.sizes['prompt'] - 1}")
    check_count(maps.sizes["layer"], maps.sizes["head"])


def check_count(layers: int, heads: int) -> None:
    """Refuse more maps than a page can show."""
    if layers * heads > MOST:
        per = max(1, MOST // heads)
        raise OptionError(
            f"{layers} layers × {heads} heads are {layers * heads} maps, but a page shows at most {MOST}: choose "
            f"heads, or fewer layers, such as layers=range({per})"
        )


def _parts(result: Result, condition: str, prompt: int, length: int, heads: list[int]) -> dict[str, str] | None:
    """Bias and ALiBi of every key; the rest of the score is content."""
    if "score_decomposition" not in result.datasets:
        return None
    found = {}
    for name in ("bias", "alibi"):
        variable = result["score_decomposition"].get(f"{name}_of_key_per_prompt")
        if variable is None:
            raise OptionError('the score parts of single prompts were not kept: run with positions="prompts"')
        values = variable.sel(condition=condition).isel(prompt=prompt, head=heads).values[..., :length]
        found[name] = _packed(values, "<f4")
    return found


def _packed(values: np.ndarray, kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values.astype(kind)).tobytes()).decode()


def _body(data: dict[str, Any], caption: str) -> str:
    text = in_script(json.dumps(data, separators=(",", ":")))
    name = "explorer-" + hashlib.sha256(text.encode()).hexdigest()[:12]
    ranks = "".join(f'<option value="{i}">{i + 1}</option>' for i in range(_RANKS))
    hidden = "" if data["parts"] else ' style="display:none"'
    script = files("mechattn.render").joinpath("explorer.js").read_text(encoding="utf-8")
    return (
        f'<figure class="explorer" id="{name}"><figcaption>{html.escape(caption)}</figcaption><p class="controls">'
        '<label>layer <output data-part="layer-name"></output> <input type="range" data-part="layer" min="0" value="0">'
        '</label> <label><select data-part="head"></select></label> '
        f'<label{hidden}>target of rank <select data-part="rank">{ranks}</select></label></p>'
        '<div data-part="map"></div>'
        f"<p>{_KEY}</p>"
        f'<div data-part="parts"{hidden}></div><div data-part="course"{hidden}></div></figure>'
        f'<script>{script}\nmechattnExplorer(document.getElementById("{name}"), {text});</script>'
    )
