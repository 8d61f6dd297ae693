"""Clips and norms of values after their hook, and of mixed values before W_O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from mechattn.model.hooked import HookedModel

_EARLIER = ("q", "k", "v")  # prefixes of the names of norms of queries, keys and values


def as_mixed(
    model: HookedModel, layer: int, v: Float[Tensor, "*batch kv_head d_head"]
) -> Float[Tensor, "*batch kv_head d_head"]:
    """The values that the pattern mixes, from hook_v, after which the model may clip or norm them."""
    limit, norm = clip_of(model, layer), norm_of_values(model, layer)
    if limit is not None:
        v = v.clamp(-limit, limit)
    return v if norm is None else norm(v)


def clip_of(model: HookedModel, layer: int) -> float | None:
    """The bound at which a layer clips queries, keys and values after their hooks (some OLMo, MPT); usually None."""
    module = attention_module(model, layer)
    limit = getattr(module, "clip_qkv", None) or getattr(getattr(module, "config", None), "clip_qkv", None)
    return float(limit) if limit else None


def norm_before_output(model: HookedModel, layer: int) -> str | None:
    """The name of a norm over all heads between the mixed values and W_O (BitNet); None in most models."""
    return next((name for name, _ in norms_of_output(model, layer)), None)


def norms_of_output(model: HookedModel, layer: int) -> Iterator[tuple[str, nn.Module]]:
    """The norms over all heads between the mixed values and W_O, by name."""
    module = attention_module(model, layer)
    width = int(model.cfg.n_heads) * int(model.cfg.d_head)
    for name, part in [] if module is None else module.named_children():
        norm = getattr(part, "original_component", part)
        weight = getattr(norm, "weight", None)
        normed = "norm" in type(norm).__name__.lower() and weight is not None and weight.numel() == width
        if normed and not name.startswith(_EARLIER):
            yield name, norm


def norm_of_values(model: HookedModel, layer: int) -> nn.Module | None:
    """The norm of values after their hook, if a layer has one."""
    norm = getattr(attention_module(model, layer), "v_norm", None)
    return getattr(norm, "original_component", norm)


def attention_module(model: HookedModel, layer: int) -> Any:
    """The transformers attention module of a layer; None if there is none behind the hooks."""
    return getattr(getattr(model.blocks[layer], "attn", None), "original_component", None)
