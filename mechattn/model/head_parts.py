"""Values, W_O and biases of each head, whatever layout a bridge uses."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from mechattn.errors import ModelError
from mechattn.functional.attention import Pattern
from mechattn.model.hooked import (
    HookedModel,
    config_of,
    device_of,
    limit_of,
    original_of,
    unwrapped,
    weights_here,
)


def mixed_values(
    model: HookedModel, layer: int, v: Float[Tensor, ...], pattern: Pattern
) -> Float[Tensor, "batch kv_head key d_head"] | None:
    """The values that the pattern mixes, from the values v at hook_v.

    None if the layout of v is unknown.
    """
    if v.ndim == 4 and is_latent(model, layer):  # its hook_v has heads before positions
        v = rearrange(v, "batch head pos d_head -> batch pos head d_head")
    _, head_count, _, key_count = pattern.shape
    if v.ndim != 4 or v.shape[1] != key_count or head_count % v.shape[2]:
        return None
    v = _clipped_and_normed(model, layer, v)
    return rearrange(v, "batch key kv_head d_head -> batch kv_head key d_head")


def clip_of(model: HookedModel, layer: int) -> float | None:
    """The bound at which a layer clips queries, keys and values after their hooks.

    None for most models; some OLMo and MPT models clip.
    """
    module = attention_module(model, layer)
    config = getattr(module, "config", None)
    bound = getattr(module, "clip_qkv", None) or getattr(config, "clip_qkv", None)
    return float(bound) if bound else None


def norms_of_output(model: HookedModel, layer: int) -> dict[str, nn.Module]:
    """The norms over all heads between the mixed values and W_O, by name.

    Most models have none; BitNet has one.
    """
    module = attention_module(model, layer)
    if module is None:
        return {}
    width = model.cfg.n_heads * model.cfg.d_head
    norms = {}
    for name, child in module.named_children():
        # As in q_norm or k_layernorm: a norm of queries, keys or values.
        if name.startswith(("q", "k", "v")):
            continue
        norm = unwrapped(child)
        weight = getattr(norm, "weight", None)
        is_norm = "norm" in type(norm).__name__.lower()
        if is_norm and weight is not None and weight.numel() == width:
            norms[name] = norm
    return norms


def attention_module(model: HookedModel, layer: int) -> Any:
    """The transformers attention module of a layer; None if the layer does not wrap one."""
    return getattr(getattr(model.blocks[layer], "attn", None), "original_component", None)


def kv_heads_of(model: HookedModel) -> int:
    """The number of key-value heads in a layer."""
    return getattr(model.cfg, "n_key_value_heads", None) or model.cfg.n_heads


def is_latent(model: HookedModel, layer: int) -> bool:
    """Whether a layer computes its keys and values from a latent of lower rank (DeepSeek's MLA)."""
    return getattr(attention_module(model, layer), "kv_lora_rank", None) is not None


def output_projection(model: HookedModel, layer: int) -> Float[Tensor, "head d_head d_model"]:
    """W_O by head, in the stored dtype.

    Raises:
        TypeError: A layer with latents has an output projection that is not linear.
    """
    attention: Any = model.blocks[layer].attn
    if not is_latent(model, layer):
        with weights_here(attention):
            return attention.W_O.detach()
    linear = unwrapped(attention.o)
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"the output projection is a {type(linear).__name__}")
    with weights_here(linear):
        weight = linear.weight.detach()
    return rearrange(weight, "d_model (head d_head) -> head d_head d_model", head=model.cfg.n_heads)


def output_weights(model: HookedModel, layer: int) -> Float[Tensor, "head d_head d_model"]:
    """The weights that turn a head's z into its update of the residual stream.

    They are W_O, times Granite's factor for the residual stream. They have the model's dtype, to
    avoid a second copy of all layers; see :func:`in_working_dtype`.

    Raises:
        ModelError: The heads of this model have no separate updates, or no W_O by head.
    """
    name = model.cfg.model_name
    quantisation_fault = None
    if getattr(original_of(model), "is_quantized", False):
        quantisation_fault = "its weights are quantised: load it unquantised"

    limit = limit_of(model, "heads")
    if limit is not None:
        raise ModelError(
            f"{name}: {quantisation_fault or limit}; so heads have no separate updates"
        )
    norm_names = list(norms_of_output(model, layer))
    if norm_names:
        raise ModelError(
            f"{name} norms all heads together before W_O ({norm_names[0]}, layer {layer}), so each"
            " head's update depends on all others: heads have no separate updates"
        )

    try:
        w_o = output_projection(model, layer)
    # TransformerLens raises NotImplementedError for quantised weights, and other classes if the
    # layer has no W_O or its shape does not fit the heads.
    except Exception as error:
        raise ModelError(
            f"layer {layer} of {name} has no W_O by head ({quantisation_fault or error})"
        ) from error

    is_by_head = w_o.ndim == 3 and len(w_o) == model.cfg.n_heads
    if not is_by_head or not w_o.is_floating_point():
        raise ModelError(
            f"layer {layer} of {name} has no W_O by head: {w_o.dtype} {list(w_o.shape)} is not"
            " [head, d_head, d_model]"
        )

    # Granite multiplies each update of the residual stream.
    factor = float(getattr(config_of(model), "residual_multiplier", None) or 1.0)
    if factor == 1:
        return w_o
    return w_o * factor


def score_biases(
    model: HookedModel, layer: int
) -> tuple[Float[Tensor, "head d_head"], Float[Tensor, "kv_head d_head"]]:
    """b_Q and b_K of each head; zeros if the model has none."""
    b_q = _bias(model, layer, "b_Q", model.cfg.n_heads)
    b_k = _bias(model, layer, "b_K", kv_heads_of(model))
    return b_q, b_k


def _clipped_and_normed(
    model: HookedModel, layer: int, v: Float[Tensor, "batch key kv_head d_head"]
) -> Float[Tensor, "batch key kv_head d_head"]:
    """The values after the clip and norm that some models apply to them after hook_v."""
    bound = clip_of(model, layer)
    if bound is not None:
        v = v.clamp(-bound, bound)
    norm = unwrapped(getattr(attention_module(model, layer), "v_norm", None))
    if norm is not None:
        v = norm(v)
    return v


def _bias(
    model: HookedModel, layer: int, name: str, head_count: int
) -> Float[Tensor, "{head_count} d_head"]:
    """A bias of queries or keys by head; zeros if there is none."""
    attention = model.blocks[layer].attn
    with weights_here(attention):
        bias = getattr(attention, name, None)
    if bias is None:
        return torch.zeros(head_count, model.cfg.d_head, device=device_of(attention))
    flat_bias = bias.detach().flatten()
    return rearrange(flat_bias, "(head d_head) -> head d_head", head=head_count).float()
