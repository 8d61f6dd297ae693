"""Checks of patching's input before the first forward pass."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from numbers import Integral
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mechattn.engine.check import check_side, check_variants
from mechattn.errors import ModelError, OptionError, PromptError, PromptTooLong, warn
from mechattn.model.hooked import HookedModel, original_of
from mechattn.model.hooks import attention_layers, keeping_nothing
from mechattn.patching.runs import Where, changing
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.sequences import Sequence

Direction = Literal["denoising", "noising"]
HeadPart = Literal["z", "value", "pattern"]


def chosen_heads(model: HookedModel, heads: Seq[Where] | None, count: int | None = None) -> list[Where]:
    """The named heads, each once; by default all heads, ``count`` per layer if given."""
    layers, count = attention_layers(model), count or int(model.cfg.n_heads)
    if heads is None:
        return [(layer, head) for layer in layers for head in range(count)]
    given: list[Any] = list(heads) if isinstance(heads, (tuple, list)) else [heads]
    if not given or not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in given):
        raise OptionError(f"heads={heads!r}: give (layer, head) pairs such as [(1, 4)], or None for all")
    for layer, head in given:
        if not all(isinstance(number, Integral) and not isinstance(number, bool) for number in (layer, head)):
            raise OptionError(f"heads={heads!r}: ({layer!r}, {head!r}) is not two whole numbers; give such as [(1, 4)]")
        if layer not in layers or not 0 <= head < count:
            raise OptionError(
                f"there is no head {head} in layer {layer}: {model.cfg.model_name} has heads 0 to {count - 1} in "
                f"layers {', '.join(map(str, layers))}"
            )
    return list(dict.fromkeys((int(layer), int(head)) for layer, head in given))


def check_part(model: HookedModel, part: str, attributed: bool) -> None:
    """Refuse a part that doesn't exist, cannot be attributed, or cannot be changed through the model's hooks."""
    if part not in get_args(HeadPart):
        raise OptionError(f"part={part!r}: choose one of {', '.join(map(repr, get_args(HeadPart)))}")
    if part != "z" and attributed:
        raise OptionError(f"part={part!r} can be patched but not attributed: name heads, such as heads=[(1, 4)]")
    if part == "pattern" and not _patterns_act(model):
        raise ModelError(
            f"the attention of {model.cfg.model_name} is computed outside its hooks, so changing the pattern "
            'has no effect; patch "z" or "value"'
        )


def _patterns_act(model: HookedModel) -> bool:
    """Whether changing the pattern at its hook changes the head's output, tried on a few tokens."""
    tokens = torch.arange(3, 9, device=next(model.parameters()).device)[None]
    layer = attention_layers(model)[0]
    seen: list[Tensor] = []

    def keep(z: Tensor) -> Tensor:
        seen.append(z.detach().clone())
        return z

    def to_oneself(pattern: Tensor) -> Tensor:
        return torch.eye(pattern.shape[1], device=pattern.device, dtype=pattern.dtype)[None, :, None].expand_as(pattern)

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TransformerLens warns of the same
        for change in (lambda pattern: pattern, to_oneself):
            with changing(model, "pattern", {layer: change}), changing(model, "z", {layer: keep}):
                model(tokens, return_type=None, **keeping_nothing(model))
    return not torch.equal(*seen)


def check_options(model: HookedModel, attributed: bool, direction: str, check: Any, rows: Any) -> None:
    """Refuse options that are not allowed, and gradients of quantised weights."""
    if direction not in get_args(Direction):
        raise OptionError(f"direction={direction!r}: choose one of {', '.join(map(repr, get_args(Direction)))}")
    for name, value, least in (("check", check, 0), ("rows", rows, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise OptionError(f"{name}={value!r}: give a whole number, at least {least}")
    if attributed and getattr(original_of(model), "is_quantized", False):
        raise ModelError(
            f"the weights of {model.cfg.model_name} are quantised and have no gradients: name heads, which are "
            f"patched without gradients"
        )


def check_sequences(model: HookedModel, prompts: Seq[Prompt], sequences: Seq[Mapping[str, Sequence]]) -> None:
    """Refuse prompts without an answer, conditions that do more than insert, and sequences too long for the model."""
    if len(prompts) < 2:
        raise OptionError("one prompt: give at least two, as the control uses another prompt's output")
    for prompt, made in zip(prompts, sequences, strict=True):
        changed = made["condition"]
        if not changed.inserted.any():
            raise OptionError(f"the condition inserts nothing into prompt {prompt.id}, so both runs are the same")
        if not changed.of_segment("answer").any():
            raise PromptError(
                f'prompt {prompt.id} ("{prompt.excerpt}") has no reference answer for the model to read: '
                "use load_prompts(…, with_answer=True), or Prompt(…, answer=…)"
            )
        if changed.edge_mask is not None or changed.interventions:
            raise OptionError(
                "the condition hides tokens or acts inside the model; patching compares two runs that differ only in "
                "their tokens"
            )
        if len(changed) > int(model.cfg.n_ctx):
            raise PromptTooLong(
                f'prompt {prompt.id} ("{prompt.excerpt}") has {len(changed):,} tokens with the condition; '
                f"{model.cfg.model_name} takes {int(model.cfg.n_ctx):,}"
            )
        check_side(prompt, dict(made), model)
    check_variants(model, [dict(made) for made in sequences])
    conditions = [made["condition"] for made in sequences]
    before = [bool(each.inserted[int(each.of_segment("answer").nonzero()[0]) - 1]) for each in conditions]
    if any(before):
        warn(
            f"in {sum(before)} of {len(prompts)} prompts the token right before the answer is an inserted one: it "
            "predicts the answer's first token and has no counterpart in the baseline, so nothing is patched there and "
            "not even the last layer's stream restores that token. Insert elsewhere, or begin the answer with a token "
            "that the model is sure of",
        )


def check_metric(made: Any, rows: int, gradients: bool) -> None:
    """Refuse the values of a custom metric if they are not one number per row, or lack a gradient that is needed."""
    if not isinstance(made, Tensor) or tuple(made.shape) != (rows,):
        shape = list(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise OptionError(
            f"the metric gives {shape} for {rows} rows; give one number per row: a function of logits [row answer "
            "d_vocab] and answer [answer] that returns a tensor [row]"
        )
    if not bool(made.isfinite().all()):
        raise OptionError("the metric gives NaN or infinity, so no effect can be computed")
    if gradients and not made.requires_grad:
        raise OptionError(
            "the metric has no gradient with respect to the logits (like an argmax), so heads cannot be attributed: "
            "name heads, which are patched without gradients"
        )
