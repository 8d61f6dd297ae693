"""Splits z, values and W_O by head, whatever layout a bridge uses."""

from __future__ import annotations

from typing import Any

from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from mechattn.model.hooked import HookedModel
from mechattn.model.values import attention_module


def split_heads(shown: Float[Tensor, "batch pos *rest"], heads: int) -> Float[Tensor, "batch pos {heads} d_head"]:
    """Queries, keys, values or z of each head, however a bridge splits the last dimensions."""
    if shown.ndim == 4 and shown.shape[2] == heads:
        return shown
    return rearrange(shown.flatten(2), "batch pos (head d_head) -> batch pos head d_head", head=heads)


def kv_heads_of(model: HookedModel) -> int:
    """How many heads of a layer have keys and values of their own."""
    return int(getattr(model.cfg, "n_key_value_heads", None) or model.cfg.n_heads)


def positions_first(model: HookedModel, layer: int, v: Float[Tensor, ...]) -> Float[Tensor, ...]:
    """The tensor of hook_v as [batch pos kv_head d_head]; with latent attention, heads come before positions there."""
    if v.ndim == 4 and is_latent(model, layer):
        return rearrange(v, "batch head pos d_head -> batch pos head d_head")
    return v


def is_latent(model: HookedModel, layer: int) -> bool:
    """Whether the keys and values of a layer are made from a latent of lower rank (DeepSeek's MLA)."""
    return getattr(attention_module(model, layer), "kv_lora_rank", None) is not None


def output_projection(model: HookedModel, layer: int) -> Float[Tensor, "head d_head d_model"]:
    """W_O by head, in the stored dtype."""
    attention: Any = model.blocks[layer].attn
    if not is_latent(model, layer):
        return attention.W_O.detach()
    linear = getattr(attention.o, "original_component", attention.o)
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"the output projection is a {type(linear).__name__}")
    return rearrange(
        linear.weight.detach(), "d_model (head d_head) -> head d_head d_model", head=int(model.cfg.n_heads)
    )
