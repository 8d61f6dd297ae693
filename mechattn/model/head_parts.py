"""What heads are made of: values, W_O and biases by head, whatever layout a bridge uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from mechattn.errors import ModelError
from mechattn.model.hooked import (
    HookedModel,
    config_of,
    device_of,
    limit_of,
    original_of,
    unwrapped,
    weights_here,
)


def as_mixed(
    model: HookedModel, layer: int, v: Float[Tensor, "*batch kv_head d_head"]
) -> Float[Tensor, "*batch kv_head d_head"]:
    """The values that the pattern mixes, from hook_v, after which the model may clip or norm
    them."""
    limit = clip_of(model, layer)
    norm = norm_of_values(model, layer)
    if limit is not None:
        v = v.clamp(-limit, limit)
    if norm is not None:
        v = norm(v)
    return v


def clip_of(model: HookedModel, layer: int) -> float | None:
    """The bound at which a layer clips queries, keys and values after their hooks (some OLMo, MPT);
    usually None."""
    module = attention_module(model, layer)
    config = getattr(module, "config", None)
    limit = getattr(module, "clip_qkv", None) or getattr(config, "clip_qkv", None)
    return float(limit) if limit else None


def norm_before_output(model: HookedModel, layer: int) -> str | None:
    """The name of a norm over all heads between the mixed values and W_O (BitNet); None in most
    models."""
    names = [name for name, _ in norms_of_output(model, layer)]
    return names[0] if names else None


def norms_of_output(model: HookedModel, layer: int) -> Iterator[tuple[str, nn.Module]]:
    """The norms over all heads between the mixed values and W_O, by name."""
    module = attention_module(model, layer)
    if module is None:
        return
    width = int(model.cfg.n_heads) * int(model.cfg.d_head)
    for name, child in module.named_children():
        if name.startswith(("q", "k", "v")):  # norms of queries, keys and values
            continue
        norm = unwrapped(child)
        weight = getattr(norm, "weight", None)
        is_norm = "norm" in type(norm).__name__.lower()
        if is_norm and weight is not None and weight.numel() == width:
            yield name, norm


def norm_of_values(model: HookedModel, layer: int) -> nn.Module | None:
    """The norm of values after their hook, if a layer has one."""
    return unwrapped(getattr(attention_module(model, layer), "v_norm", None))


def attention_module(model: HookedModel, layer: int) -> Any:
    """The transformers attention module of a layer; None if there is none behind the hooks."""
    return getattr(getattr(model.blocks[layer], "attn", None), "original_component", None)


def kv_heads_of(model: HookedModel) -> int:
    """How many heads of a layer have keys and values of their own."""
    return int(getattr(model.cfg, "n_key_value_heads", None) or model.cfg.n_heads)


def positions_first(model: HookedModel, layer: int, v: Float[Tensor, ...]) -> Float[Tensor, ...]:
    """The tensor of hook_v as [batch pos kv_head d_head]; with latent attention, heads come before
    positions there."""
    if v.ndim == 4 and is_latent(model, layer):
        return rearrange(v, "batch head pos d_head -> batch pos head d_head")
    return v


def is_latent(model: HookedModel, layer: int) -> bool:
    """Whether the keys and values of a layer are made from a latent of lower rank (DeepSeek's
    MLA)."""
    return getattr(attention_module(model, layer), "kv_lora_rank", None) is not None


def output_projection(model: HookedModel, layer: int) -> Float[Tensor, "head d_head d_model"]:
    """W_O by head, in the stored dtype."""
    attention: Any = model.blocks[layer].attn
    if not is_latent(model, layer):
        with weights_here(attention):
            return attention.W_O.detach()
    linear = unwrapped(attention.o)
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"the output projection is a {type(linear).__name__}")
    with weights_here(linear):
        weight = linear.weight.detach()
    return rearrange(
        weight, "d_model (head d_head) -> head d_head d_model", head=int(model.cfg.n_heads)
    )


def output_weights(model: HookedModel, layer: int) -> Float[Tensor, "head d_head d_model"]:
    """W_O of each head, in the model's dtype to avoid a second copy of all layers; see
    :func:`in_working_dtype`."""
    name = model.cfg.model_name
    is_quantised = getattr(original_of(model), "is_quantized", False)
    quantised = "its weights are quantised: load it unquantised" if is_quantised else ""
    limit = limit_of(model, "heads")
    if limit:
        raise ModelError(f"{name}: {quantised or limit}; so heads have no separate updates")
    norm = norm_before_output(model, layer)
    if norm:
        raise ModelError(
            f"{name} norms all heads together before W_O ({norm}, layer {layer}), so each head's"
            " update depends on all others: heads have no separate updates"
        )

    try:
        w_o = output_projection(model, layer)
    except Exception as error:  # an adapter that does not declare its output weights
        raise ModelError(
            f"layer {layer} of {name} has no W_O by head ({quantised or error})"
        ) from None

    is_by_head = w_o.ndim == 3 and len(w_o) == model.cfg.n_heads
    if not is_by_head or not w_o.is_floating_point():
        raise ModelError(
            f"layer {layer} of {name} has no W_O by head: {w_o.dtype} {list(w_o.shape)} is not"
            " [head, d_head, d_model]"
        )

    # Granite: what reaches the residual stream.
    factor = float(getattr(config_of(model), "residual_multiplier", None) or 1.0)
    if factor == 1:
        return w_o
    return w_o * factor


def score_biases(
    model: HookedModel, layer: int
) -> tuple[Float[Tensor, "head d_head"], Float[Tensor, "kv_head d_head"]]:
    """b_Q and b_K of each head; zeros if the model has none."""
    b_q = _bias(model, layer, "b_Q", int(model.cfg.n_heads))
    b_k = _bias(model, layer, "b_K", kv_heads_of(model))
    return b_q, b_k


def _bias(model: HookedModel, layer: int, name: str, heads: int) -> Float[Tensor, "{heads} d_head"]:
    """A bias of queries or keys by head; zeros if there is none."""
    attention = model.blocks[layer].attn
    with weights_here(attention):
        bias = getattr(attention, name, None)
    if bias is None:
        return torch.zeros(heads, int(model.cfg.d_head), device=device_of(attention))
    by_head = "(head d_head) -> head d_head"
    return rearrange(bias.detach().flatten(), by_head, head=heads).float()
