"""Replaces a hooked model's attention with attention in blocks of rows, inside a ``with`` block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from mechattn.errors import ModelError
from mechattn.functional.attention import (
    BLOCK,
    Attention,
    EdgeMask,
    Fused,
    Rows,
    attention_by_rows,
    fused_attention,
)
from mechattn.model import hooks
from mechattn.model.architectures import particulars_of, score_scale
from mechattn.model.head_parts import clip_of
from mechattn.model.hooked import HookedModel, attribute_set, original_of

Queries = Float[Tensor, "batch head pos d_head"]
Keys = Float[Tensor, "batch kv_head pos d_head"]
Values = Float[Tensor, "batch kv_head pos d_value"]
Output = Float[Tensor, "batch head pos d_value"]
Projected = Float[Tensor, "batch pos ..."]
See = Callable[[int, Rows | Fused], None]
_NAME, _NAME_WITH_MASK = "mechattn_rows", "mechattn_rows_with_mask"  # to transformers
# Hooks of a layer that, in some models, don't fire while it is streamed, or have another layout.
_HOOKS_ALONE = (
    *(f"attn.hook_{part}" for part in ("attn_scores", "pattern", "cos", "sin", "rot_", "q_gate")),
    *(
        f"attn.{part}"
        for part in ("hook_q_normed", "hook_k_normed", "q_norm.", "k_norm.", "kv_b_proj.")
    ),
)


@dataclass(frozen=True)
class _Layer:
    """What the attention function must know about the calling layer; ``see`` is None if the layer is not measured."""

    number: int
    window: int | None
    see: See | None
    block: int
    edge_mask: EdgeMask | None
    fused: bool = False

    def __call__(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        scale: float,
        bias: Float[Tensor, "#batch head pos"] | None = None,
        softcap: float | None = None,
        sinks: Float[Tensor, " head"] | None = None,
    ) -> Output:
        """Attention [batch head pos d_head]; in blocks of rows if it is measured or if SDPA has no mask for it."""
        see = None if self.see is None else partial(self.see, self.number)
        special = (bias, softcap, sinks, self.window, self.edge_mask)
        if see is None and all(part is None for part in special):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        attention = Attention(q, k, v, scale, bias, self.window, softcap, self.edge_mask, sinks)
        if see is not None and self.fused and attention.fusable:
            see(made := fused_attention(attention))
            return made.out
        return attention_by_rows(attention, see, self.block)


def why_not(model: HookedModel, attending: list[int] | None = None) -> str:
    """Why this model cannot be streamed, judged by the classes of its attention layers; "" if it might."""
    attending = hooks.attention_layers(model) if attending is None else attending
    other = {type(model.blocks[layer].attn).__name__ for layer in attending} - set(_CALLS)
    return (
        f"its attention is a {min(other)}, and mechattn does not know where it computes its scores"
        if other
        else ""
    )


def fires_while_streamed(name: str) -> bool:
    """Whether a hook of a layer, such as "attn.hook_z", has the same values while the model is streamed."""
    return not name.startswith(_HOOKS_ALONE)


@contextmanager
def streaming(
    model: HookedModel,
    layers: Mapping[int, int | None],
    see: See,
    block: int = BLOCK,
    edge_masks: Mapping[int, EdgeMask] | None = None,
    fused: bool = False,
) -> Iterator[None]:
    """Compute attention in blocks of query rows; ``see(layer, rows)`` is called with each block of these layers."""
    attending = hooks.attention_layers(model)  # once, as it takes a millisecond
    if reason := why_not(model, attending):
        raise ModelError(f"{model.cfg.model_name} cannot be streamed: {reason}")
    with ExitStack() as stack:
        for number in attending:
            window = layers[number] if number in layers else hooks.attention_window(model, number)
            looking = see if number in layers else None
            layer = _Layer(number, window, looking, block, (edge_masks or {}).get(number), fused)
            attention = model.blocks[number].attn
            stack.enter_context(_CALLS[type(attention).__name__](model, attention, layer))
        stack.enter_context(_called_by_transformers(model, attending))
        yield


Call = Callable[[HookedModel, Any, _Layer], AbstractContextManager[None]]
# By the id of the transformers attention module: the function to call, and what q, k, v pass through before.
_asking: dict[int, tuple[_Layer, Sequence[Callable[[Tensor], Tensor]]]] = {}


@contextmanager
def _called_by_transformers(model: HookedModel, attending: list[int]) -> Iterator[None]:
    """Make transformers call our function inside a ``with`` block, wherever the function can be configured."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    if (original := original_of(model)) is None:
        yield
        return
    for name in (_NAME, _NAME_WITH_MASK):
        AttentionInterface.register(name, _attention_function)
    AttentionMaskInterface.register(_NAME, flash_attention_mask)  # it needs masks only for padding
    AttentionMaskInterface.register(
        _NAME_WITH_MASK, lambda *_, **__: torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    )
    # The configurations that select the attention function: usually one, shared by the layers.
    modules = [model.blocks[layer].attn.original_component for layer in attending]
    configs = [original.config, *(getattr(module, "config", None) for module in modules)]
    configs += [getattr(config, "text_config", None) for config in configs]
    name = _NAME_WITH_MASK if particulars_of(model).uses_mask else _NAME
    with ExitStack() as stack:
        for config in {id(config): config for config in configs if config is not None}.values():
            stack.enter_context(attribute_set(config, "_attn_implementation_internal", name))
        yield


def _attention_function(
    module: Any, query: Queries, key: Keys, value: Values, mask: Any, **options: Any
) -> Any:
    """Called by transformers in place of SDPA: takes [batch head pos d_head], returns [batch pos head d_head]."""
    scale = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    attend, hooks = _asking[id(module)]
    if options.get("sliding_window") not in (None, attend.window):
        raise ModelError(
            f"layer {attend.number} attends in a window of {options['sliding_window']}, but mechattn assumed "
            f'{attend.window or "full attention"}; use engine="hooks", and report it'
        )
    query, key, value = (hook(part) for hook, part in zip(hooks, (query, key, value), strict=True))
    out = attend(query, key, value, scale, None, options.get("softcap"), options.get("s_aux"))
    return rearrange(out, "batch head pos d_head -> batch pos head d_head").contiguous(), None


def _same(given: Tensor, *rest: Any) -> Tensor:
    return given


@contextmanager
def _delegated(
    model: HookedModel,
    attention: Any,
    attend: _Layer,
    hooks: Sequence[Callable[[Tensor], Tensor]] = (_same,) * 3,
) -> Iterator[None]:
    """The transformers module does the computation, and calls the configured attention function."""
    from transformer_lens.model_bridge.generalized_components import AttentionBridge

    module = attention.original_component
    before = _asking.get(id(module))
    with attribute_set(attention, "forward", MethodType(AttentionBridge.forward, attention)):
        _asking[id(module)] = attend, hooks
        try:
            yield
        finally:
            _asking.pop(id(module))
            if before is not None:
                _asking[id(module)] = before


@contextmanager
def _plain(model: HookedModel, attention: Any, attend: _Layer) -> Iterator[None]:
    """Like ``_delegated``, for modules with a method ``_attn`` instead (GPT-Neo, GPT-J)."""
    own = hasattr(attention.original_component, "_attn")

    def attn(query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *rest: Any) -> Any:
        return attend(query, key, value, score_scale(model, attend.number, query.shape[-1])).to(
            value.dtype
        ), None

    replaced = attribute_set(attention.original_component, "_attn", attn) if own else nullcontext()
    with replaced, _delegated(model, attention, attend):
        yield


@contextmanager
def _latent(model: HookedModel, attention: Any, attend: _Layer) -> Iterator[None]:
    """Like ``_delegated``, with the hooks that the bridge fires in its own forward pass."""
    latents = {"q_a_layernorm": "hook_q_latent", "kv_a_layernorm": "hook_kv_latent"}
    with ExitStack() as stack:
        for part, hook in latents.items():
            if (module := getattr(attention.original_component, part, None)) is not None:
                fire = partial(
                    lambda point, module, given, out: point(out), getattr(attention, hook)
                )
                stack.callback(module.register_forward_hook(fire).remove)
        parts = (attention.hook_q, attention.hook_k, attention.hook_v)
        stack.enter_context(_delegated(model, attention, attend, parts))
        yield


def _fused(model: HookedModel, attention: Any, attend: _Layer) -> AbstractContextManager[None]:
    """For a bridge that splits a fused projection and computes attention itself: from projected q, k, v to output."""

    def reconstruct(q: Projected, k: Projected, v: Projected, **kwargs: Any) -> Any:
        heads = attention.config.n_heads
        kv_heads = getattr(attention.config, "n_key_value_heads", None) or heads
        if limit := clip_of(model, attend.number):
            q, k, v = (part.clamp(-limit, limit) for part in (q, k, v))
        q, k, v, batch, length, width = attention._reshape_qkv_to_heads(q, k, v, heads, kv_heads)
        rotation = kwargs.get("position_embeddings")
        if isinstance(rotation, tuple) and hasattr(attention, "_apply_rotary_pos_emb"):
            q, k = attention._apply_rotary_pos_emb(
                q, k, *attention._apply_position_embedding_hooks(rotation)
            )
        out = attend(
            q,
            k,
            v,
            score_scale(model, attend.number, width),
            _alibi(model, kwargs, heads, length, width),
        )
        out = attention._reshape_attn_output(out, batch, length, heads, width)
        return attention._apply_output_projection(out), None

    return attribute_set(attention, "_reconstruct_attention", reconstruct)


def _alibi(
    model: HookedModel, kwargs: Mapping[str, Any], heads: int, length: int, width: int
) -> Float[Tensor, "#batch head key"] | None:
    """The ALiBi bias of each key, under either argument name; counted once, as no mask contains it here."""
    if (
        bias := kwargs.get("position_bias")
    ) is not None:  # MPT: made for the longest sequence; take its last keys
        return rearrange(bias[..., -length:], "head 1 key -> 1 head key")
    if (bias := kwargs.get("alibi")) is None:
        return None
    bias = rearrange(bias, "(batch head) 1 key -> batch head key", head=heads)[..., :length]
    return bias * width**-0.5 if particulars_of(model).alibi_in_bfloat16 else bias


@contextmanager
def _in_parts(model: HookedModel, attention: Any, attend: _Layer) -> Iterator[None]:
    """For a ``HookedTransformer``, where scores, mask, softmax and mix are methods; only the mix gets all it needs."""
    asked: list[Tensor] = []
    by_head = "batch pos head d_head -> batch head pos d_head"

    def scores(q: Tensor, k: Tensor) -> Tensor:
        asked[:] = q, k
        return q.new_zeros(
            len(q), q.shape[2], 1, 1
        )  # a placeholder for the matrix, which is not read

    def z(v: Tensor, pattern: Tensor) -> Tensor:
        q, k, v = (rearrange(part, by_head) for part in (*asked, v))
        asked.clear()
        cfg, bias = attention.cfg, None
        if cfg.positional_embedding_type == "alibi":
            slopes = type(attention).create_alibi_multipliers(cfg.n_heads, q.device)
            bias = slopes.reshape(1, -1, 1) * torch.arange(q.shape[2], device=q.device)
        cap, sinks = getattr(cfg, "attn_scores_soft_cap", 0), hooks.sinks_of(model, attend.number)
        out = attend(q, k, v, 1 / attention.attn_scale, bias, cap if cap > 0 else None, sinks)
        return attention.hook_z(rearrange(out, "batch head pos d_head -> batch pos head d_head"))

    replaced: dict[str, Any] = dict.fromkeys(
        ("apply_causal_mask", "hook_attn_scores", "hook_pattern"), _same
    )
    replaced |= {"calculate_attention_scores": scores, "calculate_z_scores": z}
    with ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(attribute_set(attention, name, function))
        yield


# By TransformerLens class. A subclass is not treated like its base class: it may select the keys that a query sees, and
# the check on a short probe would not notice.
_CLASSES: Mapping[Call, str] = {
    _delegated: """
        PositionEmbeddingsAttentionBridge _BitNetAttentionBridge _Cohere2AttentionBridge _Exaone4AttentionBridge
        _SmolLM3AttentionBridge""",
    _plain: "AttentionBridge",
    _latent: "MLAAttentionBridge",
    _fused: """
        ALiBiJointQKVAttentionBridge BloomAttentionBridge JointQKVAttentionBridge
        JointQKVPositionEmbeddingsAttentionBridge MPTALiBiAttentionBridge""",
    _in_parts: "Attention GroupedQueryAttention",
}
_CALLS: Mapping[str, Call] = {
    name: call for call, names in _CLASSES.items() for name in names.split()
}
