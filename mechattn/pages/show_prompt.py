"""Runs one prompt and shows its attention map, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mechattn.analysis.received_attention import AttentionMap
from mechattn.engine.run import run
from mechattn.model.load import load_model
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt
from mechattn.render import html_views
from mechattn.render.figure_declaration import check_heads
from mechattn.render.html_views import View


def pattern(
    model: Any,
    prompt: Prompt | str,
    layer: int,
    heads: Sequence[int | str] | int | str | None = None,
    condition: Condition | None = None,
    *,
    difference: bool = False,
    max_tokens: int = 256,
    seed: int = 0,
) -> View:
    """Show the attention map of one prompt as an offline circuitsvis view.

    Args:
        model: A hooked model, or anything that ``load_model`` takes.
        prompt: A prompt or a text.
        layer: The layer, from 0.
        heads: The heads, from 0, or by name, such as "L1H2"; all by default.
        condition: The condition to apply to the prompt; the baseline by default.
        difference: Shows the attention between original tokens with the condition minus that in the
            baseline: orange is more, blue is less.
        max_tokens: The largest number of tokens. A longer prompt raises an error.
        seed: The seed of conditions that draw tokens at random.

    Raises:
        MechattnError: The prompt is too long, the layer or a head is out of range, or
            ``difference`` is given without a condition.
    """
    hooked_model = load_model(model)
    model_heads = range(hooked_model.cfg.n_heads)
    shown_heads = check_heads(model_heads if heads is None else heads, model_heads, layer)

    conditions = {}
    if condition is not None:
        conditions[type(condition).__name__] = condition
    analysis = AttentionMap(max_tokens)
    result = run(hooked_model, prompt, conditions, analysis, layers=layer, seed=seed)
    condition_name = result.shown_condition()
    return html_views.pattern(result, layer, shown_heads, condition_name, difference=difference)
