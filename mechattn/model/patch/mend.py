"""Corrects known faults of hooked models in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mechattn.model.architectures import particulars_of
from mechattn.model.hooked import config_of, original_of

_MENDED = "_mechattn_alibi_once"
FALCON = (
    "Falcon's ALiBi is counted once: eager attention, which hooks need, adds it twice in transformers 4.46 to 5.23, "
    "since the mask carries it already"
)
NO_ROTARY = (
    "no rotary embedding is called, as the model has none (NoPE): TransformerLens puts an empty one in its place where "
    "the configuration leaves position_embedding_type out"
)
ROTATED = (
    "rotated queries and keys have the dtype of the weights, as in the model itself: TransformerLens leaves them in "
    "the float32 of OLMo's cosines, which its values are not in"
)


def mend(model: Any) -> tuple[str, ...]:
    """Correct known faults of a booted bridge, in place."""
    fault = particulars_of(model).fault
    if fault == "rotated in float32" and next(model.parameters()).dtype in (torch.bfloat16, torch.float16):
        for block in model.blocks:
            _rotated_in(block.attn, next(model.parameters()).dtype)
        return (ROTATED,)
    if fault == "alibi counted twice" and config_of(model).alibi:
        for block in model.blocks:
            _count_alibi_once(block.attn)
        return (FALCON,)
    if fault == "an empty rotary embedding" and getattr(model, "rotary_emb", None) is not None:
        return _without_empty_rotary(model, original_of(model))
    return ()


def _rotated_in(attention: Any, dtype: torch.dtype) -> None:
    for name in ("hook_rot_q", "hook_rot_k"):
        if (point := getattr(attention, name, None)) is not None:
            point.register_forward_hook(lambda module, given, rotated: rotated.to(dtype))


def _without_empty_rotary(model: Any, original: Any) -> tuple[str, ...]:
    """Remove an empty rotary embedding, so that the model does not try to use it."""
    if model.rotary_emb.original_component is not None:
        return ()
    for module in original.modules():
        if module._modules.get("rotary_emb") is model.rotary_emb:
            module._modules["rotary_emb"] = None
    for cfg in (model.cfg, *(block.attn.config for block in model.blocks if hasattr(block, "attn"))):
        cfg.positional_embedding_type = "none"
    return (NO_ROTARY,)


def _count_alibi_once(attention: Any) -> None:
    if not hasattr(attention, _MENDED):
        attention._reconstruct_attention = _without_second_alibi(attention._reconstruct_attention)
        setattr(attention, _MENDED, True)


def _without_second_alibi(reconstruct: Callable[..., Any]) -> Callable[..., Any]:
    """Leave out ``alibi`` if the mask already has it: a mask alone is never positive, ALiBi at later keys always is."""

    def once(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.is_floating_point() and bool((mask[..., -1, :] > 0).any()):
            kwargs["alibi"] = None
        return reconstruct(q, k, v, **kwargs)

    return once
