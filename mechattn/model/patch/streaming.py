"""Attention in row blocks in place of a booted bridge's attention function, for the length of a ``with``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from mechattn.errors import ModelError
from mechattn.functional.rows import BLOCK, Attention, EdgeMask, Rows, attention_by_rows
from mechattn.model import hooks
from mechattn.model.architectures import particulars_of
from mechattn.model.attributes import attribute_set
from mechattn.model.hooked import HookedModel, config_of, original_of

_NAME = "mechattn_rows"
See = Callable[[int, Rows], None]


@dataclass(frozen=True)
class _Layer:
    """What the attention function needs to know about the layer that calls it; ``see`` is None where nobody looks."""

    number: int
    window: int | None
    see: See | None
    block: int
    edge_mask: EdgeMask | None

    def attend(
        self,
        q: Float[Tensor, "batch head pos d_head"],
        k: Float[Tensor, "batch kv_head pos d_head"],
        v: Float[Tensor, "batch kv_head pos d_value"],
        scale: float,
        bias: Float[Tensor, "#batch head pos"] | None,
        softcap: float | None,
    ) -> Float[Tensor, "batch head pos d_value"]:
        """Attention [batch head pos d_head], in row blocks if somebody looks or if SDPA has no mask for it."""
        if self.see is None and bias is None and softcap is None and self.window is None and self.edge_mask is None:
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        see, number = self.see, self.number
        told = None if see is None else lambda rows: see(number, rows)
        attention = Attention(q, k, v, scale, bias, self.window, softcap, self.edge_mask)
        return attention_by_rows(attention, told, self.block)


_active: dict[int, _Layer] = {}  # by the id of the attention module of transformers that asks


def why_not(model: HookedModel, attending: list[int] | None = None) -> str:
    """Why this model cannot be streamed, from the classes of the layers that attend; "" if it perhaps can."""
    if original_of(model) is None:
        return f"a {type(model).__name__} has no attention function to replace"
    if hooks.has_sinks(model):
        return "its attention has learned sinks"
    attending = hooks.attention_layers(model) if attending is None else attending
    kinds = {type(model.blocks[layer].attn).__name__ for layer in attending}
    other = kinds - _DELEGATED - _FUSED
    if other:
        return f"its attention is a {sorted(other)[0]}, which computes scores of its own"
    return ""


@contextmanager
def streaming(
    model: HookedModel,
    layers: Mapping[int, int | None],
    see: See,
    block: int = BLOCK,
    edge_masks: Mapping[int, EdgeMask] | None = None,
) -> Iterator[None]:
    """Compute attention in blocks of query rows; ``see(layer, rows)`` is called with each block of these layers.

    hook_q, hook_k, hook_v, hook_z, and the hooks of the residual stream and of MLPs fire as before; hook_attn_scores
    and hook_pattern don't. The model is put back as it was at the end, also after an exception and when nested.

    Args:
        model: A booted bridge.
        layers: For each layer to look at, its window.
        see: Takes a layer and a block of its rows.
        block: Rows in a block.
        edge_masks: For some layers, edges that are cut.

    Raises:
        ModelError: The model cannot be streamed.
    """
    attending = hooks.attention_layers(model)  # once, as it takes a millisecond
    if reason := why_not(model, attending):
        raise ModelError(f"{model.cfg.model_name} cannot be streamed: {reason}")
    _register()
    with ExitStack() as stack:
        for number in attending:
            window = layers[number] if number in layers else hooks.attention_window(model, number)
            layer = _Layer(number, window, see if number in layers else None, block, (edge_masks or {}).get(number))
            attention = model.blocks[number].attn
            if type(attention).__name__ in _FUSED:
                made = _fused(model, attention, layer)
                stack.enter_context(attribute_set(attention, "_reconstruct_attention", made))
            else:
                stack.enter_context(attribute_set(attention, "forward", MethodType(_delegating_forward(), attention)))
                stack.enter_context(_activate(attention.original_component, layer))
        for config in _configs(model, attending):
            stack.enter_context(attribute_set(config, "_attn_implementation_internal", _NAME))
        yield


@contextmanager
def _activate(module: Any, layer: _Layer) -> Iterator[None]:
    before = _active.get(id(module))
    _active[id(module)] = layer
    try:
        yield
    finally:
        _active.pop(id(module))
        if before is not None:
            _active[id(module)] = before


def _configs(model: HookedModel, attending: list[int]) -> list[Any]:
    """The configuration objects that say which attention function runs: shared by the layers, mostly one."""
    found = [original_of(model).config]
    for layer in attending:
        config = getattr(model.blocks[layer].attn.original_component, "config", None)
        if config is not None and all(config is not other for other in found):
            found.append(config)
    for config in list(found):
        text = getattr(config, "text_config", None)
        if text is not None and all(text is not other for other in found):
            found.append(text)
    return found


def _register() -> None:
    """Tell transformers of the attention function, and that its masks are needed for padding alone."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(_NAME, _attention_function)
    AttentionMaskInterface.register(_NAME, flash_attention_mask)


def _delegating_forward() -> Callable[..., Any]:
    """The forward of the plain attention bridge: hook_in, the module of transformers, hook_out."""
    from transformer_lens.model_bridge.generalized_components import AttentionBridge

    return AttentionBridge.forward


def _attention_function(
    module: Any,
    query: Float[Tensor, "batch head pos d_head"],
    key: Float[Tensor, "batch kv_head pos d_head"],
    value: Float[Tensor, "batch kv_head pos d_value"],
    mask: Any,
    **options: Any,
) -> Any:
    """What transformers calls in place of SDPA: [batch head pos d_head] in, [batch pos head d_head] out."""
    scale = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    layer = _active[id(module)]
    if options.get("sliding_window") not in (None, layer.window):
        raise ModelError(
            f"layer {layer.number} attends in a window of {options['sliding_window']}, and mechattn took it for "
            f'{layer.window or "full attention"}; use engine="hooks", and report it'
        )
    out = layer.attend(query, key, value, scale, None, options.get("softcap"))
    return rearrange(out, "batch head pos d_head -> batch pos head d_head").contiguous(), None


# Classes of TransformerLens: those that call the attention function of transformers, and those that split a fused
# projection and compute attention themselves.
_DELEGATED = {"PositionEmbeddingsAttentionBridge", "AttentionBridge"}
_FUSED = {"JointQKVAttentionBridge", "BloomAttentionBridge", "ALiBiJointQKVAttentionBridge"}


def _fused(model: HookedModel, attention: Any, layer: _Layer) -> Callable[..., Any]:
    """The attention of a bridge that splits a fused projection: from projected q, k, v to the block's output."""
    particulars = particulars_of(model)

    def reconstruct(
        q: Float[Tensor, "batch pos ..."],
        k: Float[Tensor, "batch pos ..."],
        v: Float[Tensor, "batch pos ..."],
        **kwargs: Any,
    ) -> Any:
        heads = attention.config.n_heads
        kv_heads = getattr(attention.config, "n_key_value_heads", None) or heads
        q, k, v, batch, length, width = attention._reshape_qkv_to_heads(q, k, v, heads, kv_heads)
        scale, bias = width**-0.5, kwargs.get("alibi")  # once: no mask that holds it is made here
        if particulars.score_scale is not None:
            scale = particulars.score_scale(config_of(model), layer.number, scale)
        if bias is not None:
            bias = rearrange(bias, "(batch head) 1 key -> batch head key", head=heads)[..., :length]
            bias = bias * scale if particulars.alibi_in_bfloat16 else bias
        out = layer.attend(q, k, v, scale, bias, None)
        out = attention._reshape_attn_output(out, batch, length, heads, width)
        return attention._apply_output_projection(out), None

    return reconstruct
