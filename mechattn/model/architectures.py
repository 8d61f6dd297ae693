"""What is particular to each architecture, and corrections of its known faults.

Everything else is read from the common configuration fields and from TransformerLens's names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechattn.functional.scores import alibi_slopes
from mechattn.model.hooked import config_of, original_of


def _press_slopes(config: Any, cfg: Any) -> Float[Tensor, " head"] | None:
    """The ALiBi slopes of Press et al.; None for a model in which TransformerLens sees no ALiBi."""
    if cfg.positional_embedding_type != "alibi":
        return None
    return alibi_slopes(cfg.n_heads)


@dataclass(frozen=True)
class Particulars:
    """What an architecture does that others don't. The defaults are those of most architectures."""

    # From the configuration, the layer and 1 / √d_head to the factor of q·k.
    score_scale: Callable[[Any, int, float], float] = lambda config, layer, default: default
    # From the configuration and TransformerLens's cfg to the ALiBi slopes; to None without ALiBi.
    slopes: Callable[[Any, Any], Float[Tensor, " head"] | None] = _press_slopes
    # Whether slopes, positions and their products are rounded to bfloat16, and scaled like q·k.
    alibi_in_bfloat16: bool = False
    # The configuration's field for the kind of each layer; None if all layers with attention are of
    # one kind.
    kinds_field: str | None = "layer_types"
    window_field: str = "sliding_window"  # the configuration's field for the width of a window
    # From the configuration to the factor of the logits after W_U.
    logit_factor: Callable[[Any], float] = lambda config: 1.0
    # Whether the model itself modifies the causal mask, which must then be a tensor.
    uses_mask: bool = False
    masks_edges: bool = True  # whether it accepts a mask of edges during generation
    # Corrects a known fault of a booted bridge in place. It returns a sentence for the report, or
    # None if this model does not have the fault.
    mend: Callable[[Any], str | None] = lambda model: None


def _gpt2_scale(config: Any, layer: int, default: float) -> float:
    """1 / √d_head or 1; divided by the layer's number, from 1, if the configuration says so."""
    scale = default if config.scale_attn_weights else 1.0
    if config.scale_attn_by_inverse_layer_idx:
        return scale / (layer + 1)
    return scale


def _do_not_divide_products(model: Any) -> str | None:
    """Do not divide q·k by √d_head in a model whose configuration says so.

    TransformerLens, up to 4.3, divides it in every GPT-2.
    """
    if config_of(model).scale_attn_weights:
        return None
    _wrap_attention(model, partial(_with_larger_queries, model.cfg.d_head))
    return (
        "q·k is not divided by √d_head, as scale_attn_weights=False says: TransformerLens divides"
        " it in every GPT-2"
    )


def _mpt_scale(config: Any, layer: int, default: float) -> float:
    """The configuration's factor if it names one, else 1 / √d_head."""
    return config.attn_config.softmax_scale or default


def _mpt_slopes(config: Any, cfg: Any) -> Float[Tensor, " head"] | None:
    """MPT's ALiBi slopes; None for a model without ALiBi."""
    if not config.attn_config.alibi:
        return None
    return alibi_slopes(cfg.n_heads, float(config.attn_config.alibi_bias_max))


def _rotate_in_dtype_of_weights(model: Any) -> str | None:
    """Cast rotated queries and keys to the weights' dtype, if that is bfloat16 or float16."""
    if next(model.parameters()).dtype not in (torch.bfloat16, torch.float16):
        return None

    def cast(module: Any, args: Any, rotated: Tensor) -> Tensor:
        # Read at each call, because the user may convert the model if it is not verified.
        return rotated.to(next(model.parameters()).dtype)

    for block in model.blocks:
        for name in ("hook_rot_q", "hook_rot_k"):
            hook_point = getattr(block.attn, name, None)
            if hook_point is not None:
                hook_point.register_forward_hook(cast)
    return (
        "rotated queries and keys have the dtype of the weights, as in the model itself:"
        " TransformerLens leaves them in float32, like OLMo's cosines"
    )


def _count_alibi_once(model: Any) -> str | None:
    """Add ALiBi only once in each layer of a model with ALiBi."""
    if not config_of(model).alibi:
        return None
    _wrap_attention(model, _without_second_alibi)
    return (
        "Falcon's ALiBi is counted once: eager attention, which hooks need, adds it twice in"
        " transformers 4.46 to 5.23, since the mask carries it already"
    )


def _call_no_rotary_embedding(model: Any) -> str | None:
    """Remove TransformerLens's empty rotary embedding from a model without one."""
    rotary = getattr(model, "rotary_emb", None)
    if rotary is None or rotary.original_component is not None:
        return None
    for module in original_of(model).modules():
        if module._modules.get("rotary_emb") is rotary:
            module._modules["rotary_emb"] = None  # the model then calls none

    model.cfg.positional_embedding_type = "none"
    for block in model.blocks:
        if hasattr(block, "attn"):
            block.attn.config.positional_embedding_type = "none"
    return (
        "no rotary embedding is called, as the model has none (NoPE): TransformerLens adds an empty"
        " one if the configuration leaves position_embedding_type out"
    )


_COHERE = Particulars(logit_factor=lambda config: config.logit_scale)
_GRANITE = Particulars(logit_factor=lambda config: 1 / config.logits_scaling)
_OLMO = Particulars(mend=_rotate_in_dtype_of_weights)

# By the configuration's model_type.
PARTICULARS: Mapping[str, Particulars] = {
    "bloom": Particulars(masks_edges=False),
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "falcon": Particulars(alibi_in_bfloat16=True, masks_edges=False, mend=_count_alibi_once),
    "flex_olmo": _OLMO,
    "gpt2": Particulars(score_scale=_gpt2_scale, mend=_do_not_divide_products),
    "gpt_neo": Particulars(
        score_scale=lambda *_: 1.0, kinds_field="attention_layers", window_field="window_size"
    ),
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "granitemoehybrid": replace(_GRANITE, mend=_call_no_rotary_embedding),
    "granitemoeshared": _GRANITE,
    "mpt": Particulars(
        score_scale=_mpt_scale, slopes=_mpt_slopes, uses_mask=True, masks_edges=False
    ),
    "olmo": _OLMO,
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "recurrent_gemma": Particulars(kinds_field=None, window_field="attention_window_size"),
}

_HOOKED_TRANSFORMER = Particulars(kinds_field="attn_types", window_field="window_size")


def particulars_of(model: Any) -> Particulars:
    """The particulars of a hooked model; the defaults if its architecture has no entry."""
    config = config_of(model)
    if config is None:
        return _HOOKED_TRANSFORMER
    return PARTICULARS.get(config.model_type, Particulars())


def score_scale(model: Any, layer: int, d_head: int) -> float:
    """The factor of q·k in a layer whose heads have this ``d_head``."""
    return particulars_of(model).score_scale(config_of(model), layer, d_head**-0.5)


def _wrap_attention(model: Any, wrapper: Callable[..., Any]) -> None:
    """Let a function, which gets the original method first, compute the attention of each layer."""
    for block in model.blocks:
        reconstruct = block.attn._reconstruct_attention
        block.attn._reconstruct_attention = partial(wrapper, reconstruct)


def _with_larger_queries(
    d_head: int, reconstruct: Callable[..., Any], q: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Attention from queries times √d_head, which cancels the division of q·k by √d_head."""
    return reconstruct(q * d_head**0.5, *args, **kwargs)


def _without_second_alibi(reconstruct: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Attention without the argument ``alibi`` if the mask already contains it.

    Without ALiBi no entry of a mask is positive. With it, those of later keys are, and the last
    query sees them.
    """
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.is_floating_point():
        last_query = mask[..., -1, :]
        if (last_query > 0).any():
            kwargs["alibi"] = None
    return reconstruct(*args, **kwargs)
