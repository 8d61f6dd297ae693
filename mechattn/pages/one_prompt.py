"""Runs one prompt and draws its attention, in one call."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

from mechattn.analysis.received_attention import AttentionMap
from mechattn.analysis.score_decomposition import ScoreDecomposition
from mechattn.axes import BASELINE
from mechattn.engine.run import run
from mechattn.errors import ModelError, OptionError
from mechattn.model.hooked import alone
from mechattn.model.hooks import chosen_layers
from mechattn.model.load import as_hooked, load_model
from mechattn.model.scores_and_positions import scores_of
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt
from mechattn.render.declared import check_heads
from mechattn.render.prompt_views import attention_explorer, attention_pattern, check_count
from mechattn.render.prompt_views import pattern_difference as render_difference
from mechattn.render.view import View
from mechattn.results.result import Result


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
    """Show the attention map of one prompt as an offline circuitsvis view.

    Args:
        model: A hooked model, or anything that ``load_model`` takes.
        prompt: A prompt or a text.
        layer: The layer, from 0.
        heads: The heads, from 0; all by default.
        condition: The condition to apply to the prompt; the baseline by default.
        max_tokens: The largest number of tokens; longer prompts are refused.
        seed: The seed of conditions that draw at random.

    Raises:
        MechattnError: The prompt is too long, or a layer or head is out of range.
    """
    result, chosen, name = _mapped(model, prompt, layer, heads, condition, max_tokens, seed)
    return attention_pattern(result, layer, chosen, name)


def pattern_difference(
    model: Any,
    prompt: Prompt | str,
    layer: int,
    heads: Seq[int] | int | None,
    condition: Condition,
    *,
    max_tokens: int = 256,
    seed: int = 0,
) -> View:
    """Show how a condition changes attention between one prompt's original tokens; orange is more, blue is less.

    Args:
        model: A hooked model, or anything that ``load_model`` takes.
        prompt: A prompt or a text.
        layer: The layer, from 0.
        heads: The heads, from 0; all with None.
        condition: The condition to compare with the baseline.
        max_tokens: The largest number of tokens; longer prompts are refused.
        seed: The seed of conditions that draw at random.

    Raises:
        MechattnError: The prompt is too long, or a layer or head is out of range.
    """
    result, chosen, name = _mapped(model, prompt, layer, heads, condition, max_tokens, seed)
    return render_difference(result, layer, chosen, name)


def _mapped(
    model: Any,
    prompt: Prompt | str,
    layer: int,
    heads: Seq[int] | int | None,
    condition: Condition | None,
    max_tokens: int,
    seed: int,
) -> tuple[Result, list[int], str]:
    """The attention map of one prompt, the heads as a list, and the condition's name."""
    model = as_hooked(model)
    chosen = [heads] if isinstance(heads, int) else list(range(model.cfg.n_heads) if heads is None else heads)
    check_heads(chosen, model.cfg.n_heads)
    name = BASELINE if condition is None else type(condition).__name__
    conditions = {} if condition is None else {name: condition}
    result = run(model, prompt, conditions, [AttentionMap(max_tokens)], layers=layer, seed=seed)
    return result, chosen, name


@alone
def explore(
    model: Any,
    prompt: Prompt | str,
    layers: Iterable[int] | int | None = None,
    heads: Seq[int] | int | None = None,
    condition: Condition | None = None,
    *,
    max_tokens: int = 256,
    seed: int = 0,
) -> View:
    """Explore the attention of one prompt by layer, head and rank of the target, offline.

    Shows the attention map with the strongest targets marked. If the model's scores can be decomposed (ALiBi, or no
    position in the scores), it also shows their content, bias and ALiBi parts. See ``render.attention_explorer``.

    Args:
        model: A hooked model, or anything that ``load_model`` takes.
        prompt: A prompt or a text.
        layers: The layers, from 0; all by default. At most 64 heads in total.
        heads: The heads of each layer, from 0; all by default.
        condition: The condition to apply to the prompt; the baseline by default.
        max_tokens: The largest number of tokens; longer prompts are refused.
        seed: The seed of conditions that draw at random.

    Raises:
        MechattnError: The prompt is too long, a layer or head is out of range, or there are too many heads.
    """
    model = as_hooked(model)
    chosen = chosen_layers(model, layers)
    if isinstance(heads, str) or not all(
        isinstance(h, int) for h in ([] if heads is None or isinstance(heads, int) else heads)
    ):
        raise OptionError(f"heads={heads!r}: give numbers, or omit it for all heads")
    heads = [heads] if isinstance(heads, int) else list(range(model.cfg.n_heads) if heads is None else heads)
    check_heads(heads, model.cfg.n_heads)
    check_count(len(chosen), len(heads))
    name = "baseline" if condition is None else type(condition).__name__
    conditions = {} if condition is None else {name: condition}
    analyses: list[Any] = [AttentionMap(max_tokens)]
    note = ""
    try:
        scores_of(load_model(model), chosen)
        analyses.append(ScoreDecomposition())
    except ModelError as error:
        note = f"scores cannot be decomposed: {error}"
    result = run(model, prompt, conditions, analyses, layers=chosen, positions="prompts", seed=seed)
    return attention_explorer(result, name, heads=heads, note=note)
