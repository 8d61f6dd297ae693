"""Look at the attention of one prompt: run and draw in one call."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from mechattn.analysis.attention_map import AttentionMap
from mechattn.engine.run import run
from mechattn.errors import OptionError
from mechattn.model.load import as_hooked
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt
from mechattn.render.patterns import View, attention_pattern


def pattern(
    model: Any,
    prompt: Prompt | str,
    layer: int,
    heads: Seq[int] | int | None = None,
    condition: Condition | None = None,
    *,
    max_tokens: int = 256,
    seed: int = 0,
) -> View:
    """The attention map of one prompt as an offline circuitsvis view.

    Args:
        model: A hooked model, or anything that ``load_model`` takes.
        prompt: A prompt or a text.
        layer: The layer, from 0.
        heads: The heads, from 0; all by default.
        condition: What is done to the prompt first; nothing by default.
        max_tokens: Longer prompts are refused.
        seed: For conditions that draw at random.

    Raises:
        MechattnError: The prompt is too long, or a layer or head is out of range.
    """
    model = as_hooked(model)
    heads = [heads] if isinstance(heads, int) else list(range(model.cfg.n_heads) if heads is None else heads)
    for head in heads:
        if not 0 <= head < model.cfg.n_heads:
            raise OptionError(f"head {head} is out of range: heads are 0 to {model.cfg.n_heads - 1}")
    name = "baseline" if condition is None else type(condition).__name__
    conditions = {} if condition is None else {name: condition}
    result = run(model, prompt, conditions, [AttentionMap(max_tokens)], layers=layer, seed=seed, progress=False)
    return attention_pattern(result, layer, heads, name)
