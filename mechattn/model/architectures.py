"""What is particular to each architecture, and the mending of its faults.

Everything without an entry here is read from the common configuration fields and from
TransformerLens's names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechattn.functional.scores import mpt_slopes
from mechattn.model.hooked import config_of, original_of


@dataclass(frozen=True)
class Particulars:
    """What an architecture does that others don't."""

    # The factor of q·k, given the configuration, the layer and 1 / √d_head; the last by default.
    score_scale: Callable[[Any, int, float], float] | None = None
    # The ALiBi slopes, given the configuration and the number of heads; by default those of Press
    # et al. if TransformerLens reports ALiBi.
    slopes: Callable[[Any, int], Float[Tensor, " head"] | None] | None = None
    # Are slopes, positions and products rounded to bfloat16, and scaled like q·k?
    alibi_in_bfloat16: bool = False
    # The fields with the kind of each layer ("" where all layers that attend are alike) and the
    # width of a window.
    layer_kinds: tuple[str, str] = ("layer_types", "sliding_window")
    # Of the logits after W_U, given the configuration.
    logit_factor: Callable[[Any], float] | None = None
    # Does the model itself modify the causal mask, which must then be a tensor?
    uses_mask: bool = False
    masks_edges: bool = True  # does it accept a mask of edges during generation?
    # Corrects a known fault of a booted bridge, in place; a sentence for the report, "" if the
    # model at hand does not have it.
    mend: Callable[[Any], str] | None = None


def _gpt2_scale(config: Any, layer: int, usual: float) -> float:
    """1 / √d_head or 1, divided by the number of the layer (from 1) if the configuration says
    so."""
    scale = usual if config.scale_attn_weights else 1.0
    if config.scale_attn_by_inverse_layer_idx:
        return scale / (layer + 1)
    return scale


def _mpt_scale(config: Any, layer: int, usual: float) -> float:
    """The configuration's own factor, if it names one."""
    return config.attn_config.softmax_scale or usual


def _mpt_slopes(config: Any, heads: int) -> Float[Tensor, " head"] | None:
    """MPT's slopes; None if this model has none."""
    if not config.attn_config.alibi:
        return None
    return mpt_slopes(heads, float(config.attn_config.alibi_bias_max))


def _rotate_in_dtype_of_weights(model: Any) -> str:
    """Cast rotated queries and keys to the weights' dtype."""

    def cast(module: Any, given: Any, rotated: Tensor) -> Tensor:
        return rotated.to(next(model.parameters()).dtype)  # which may change after loading

    if next(model.parameters()).dtype not in (torch.bfloat16, torch.float16):
        return ""
    for block in model.blocks:
        for name in ("hook_rot_q", "hook_rot_k"):
            point = getattr(block.attn, name, None)
            if point is not None:
                point.register_forward_hook(cast)
    return (
        "rotated queries and keys have the dtype of the weights, as in the model itself:"
        " TransformerLens leaves them in the float32 of OLMo's cosines, which its values are not in"
    )


def _count_alibi_once(model: Any) -> str:
    """Leave out the second ALiBi of each layer, in a model with ALiBi."""
    if not config_of(model).alibi:
        return ""
    for block in model.blocks:
        if not hasattr(block.attn, "_mechattn_alibi_once"):
            reconstruct = block.attn._reconstruct_attention
            block.attn._reconstruct_attention = _without_second_alibi(reconstruct)
            block.attn._mechattn_alibi_once = True
    return (
        "Falcon's ALiBi is counted once: eager attention, which hooks need, adds it twice in"
        " transformers 4.46 to 5.23, since the mask carries it already"
    )


def _without_second_alibi(reconstruct: Callable[..., Any]) -> Callable[..., Any]:
    """Leave out ``alibi`` if the mask already has it: a mask alone is never positive, ALiBi at
    later keys always is."""

    def once(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.is_floating_point() and bool((mask[..., -1, :] > 0).any()):
            kwargs["alibi"] = None
        return reconstruct(q, k, v, **kwargs)

    return once


def _call_no_rotary_embedding(model: Any) -> str:
    """Remove an empty rotary embedding."""
    rotary = getattr(model, "rotary_emb", None)
    if rotary is None or rotary.original_component is not None:
        return ""
    for module in original_of(model).modules():
        if module._modules.get("rotary_emb") is rotary:
            module._modules["rotary_emb"] = None  # so that the model does not try to use it

    model.cfg.positional_embedding_type = "none"
    for block in model.blocks:
        if hasattr(block, "attn"):
            block.attn.config.positional_embedding_type = "none"
    return (
        "no rotary embedding is called, as the model has none (NoPE): TransformerLens puts an empty"
        " one in its place where the configuration leaves position_embedding_type out"
    )


_DIVIDED_LOGITS = Particulars(logit_factor=lambda config: 1 / config.logits_scaling)

# By the model_type of the configuration.
PARTICULARS: Mapping[str, Particulars] = {
    "bloom": Particulars(masks_edges=False),
    **dict.fromkeys(
        ("cohere", "cohere2"), Particulars(logit_factor=lambda config: config.logit_scale)
    ),
    "falcon": Particulars(alibi_in_bfloat16=True, masks_edges=False, mend=_count_alibi_once),
    **dict.fromkeys(
        ("flex_olmo", "olmo", "olmo2", "olmo3"), Particulars(mend=_rotate_in_dtype_of_weights)
    ),
    "gpt2": Particulars(score_scale=_gpt2_scale),
    "gpt_neo": Particulars(
        score_scale=lambda *_: 1.0, layer_kinds=("attention_layers", "window_size")
    ),
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared"), _DIVIDED_LOGITS),
    "granitemoehybrid": replace(_DIVIDED_LOGITS, mend=_call_no_rotary_embedding),
    "mpt": Particulars(
        score_scale=_mpt_scale, slopes=_mpt_slopes, uses_mask=True, masks_edges=False
    ),
    "recurrent_gemma": Particulars(
        layer_kinds=("", "attention_window_size")
    ),  # all layers with attention are the same
}


def particulars_of(model: Any) -> Particulars:
    """The particulars of a hooked model; none for an architecture without an entry and for a
    ``HookedTransformer``."""
    return PARTICULARS.get(getattr(config_of(model), "model_type", ""), Particulars())


def score_scale(model: Any, layer: int, width: int) -> float:
    """The factor of q·k in a layer, for heads of this width."""
    usual = width**-0.5
    special = particulars_of(model).score_scale
    if special is None:
        return usual
    return special(config_of(model), layer, usual)


def mend(model: Any) -> tuple[str, ...]:
    """Correct known faults of a booted bridge, in place; a sentence for each."""
    correct = particulars_of(model).mend
    if correct is None:
        return ()
    sentence = correct(model)
    if not sentence:  # this model does not have the fault
        return ()
    return (sentence,)
