"""Replaces a hooked model's attention with attention in blocks of rows, inside a ``with`` block."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from mechattn.errors import ModelError
from mechattn.functional.attention import Attention, EdgeMask, Rows, attention_by_rows
from mechattn.functional.fused import Fused, fused_attention
from mechattn.model import hooks
from mechattn.model.architectures import particulars_of, score_scale
from mechattn.model.head_parts import clip_of, kv_heads_of
from mechattn.model.hooked import HookedModel, attribute_set, original_of

Queries = Float[Tensor, "batch head pos d_head"]
Keys = Float[Tensor, "batch kv_head pos d_head"]
Values = Float[Tensor, "batch kv_head pos d_value"]
Output = Float[Tensor, "batch head pos d_value"]
Projected = Float[Tensor, "batch pos ..."]
HookPoints = Sequence[Callable[[Tensor], Tensor]]
SeeRows = Callable[[int, Rows], None]
SeeWhole = Callable[[int, Fused], None]

# The names of our attention function in transformers.
_REGISTERED = "mechattn_rows"
_REGISTERED_WITH_MASK = "mechattn_rows_with_mask"

# Hooks of a layer, by the beginnings of their names, that in some models do not fire while it is
# streamed, or have another layout then.
HOOKS_WITHOUT_STREAMING = (
    "attn.hook_attn_scores",
    "attn.hook_pattern",
    "attn.hook_cos",
    "attn.hook_sin",
    "attn.hook_rot_",
    "attn.hook_q_gate",
    "attn.hook_q_normed",
    "attn.hook_k_normed",
    "attn.q_norm.",
    "attn.k_norm.",
    "attn.kv_b_proj.",
    "attn.hook_q_latent",
    "attn.hook_kv_latent",
)


@dataclass(frozen=True)
class _Layer:
    """The attention of a streamed layer."""

    number: int  # from 0
    window: int | None
    see_rows: SeeRows | None  # None if the layer is not measured
    see_whole: SeeWhole | None  # None if no fused kernel may compute it
    rows_per_block: int | None  # None chooses a number that suits the device
    edge_mask: EdgeMask | None

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
        """The output of each head.

        A measured layer is computed with a fused kernel if that is allowed and possible, and
        otherwise in blocks of rows. A layer that is not measured is computed with SDPA, or in
        blocks of rows if SDPA lacks one of its terms.
        """
        attention = Attention(
            q,
            k,
            v,
            scale,
            bias,
            window=self.window,
            softcap=softcap,
            edge_mask=self.edge_mask,
            sinks=sinks,
        )
        if self.see_rows is None:
            terms_beyond_sdpa = (bias, softcap, sinks, self.window, self.edge_mask)
            if any(term is not None for term in terms_beyond_sdpa):
                return attention_by_rows(attention, block=self.rows_per_block)
            is_grouped = q.shape[1] != k.shape[1]
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=is_grouped
            )

        if self.see_whole is not None and attention.fusable:
            fused = fused_attention(attention)
            self.see_whole(self.number, fused)
            return fused.out

        return attention_by_rows(
            attention, partial(self.see_rows, self.number), self.rows_per_block
        )


def why_not_streamed(model: HookedModel, attention_layers: list[int]) -> str | None:
    """Why this model cannot be streamed, by the classes of its attention; None if it might be.

    Args:
        model: A hooked model.
        attention_layers: Its layers with attention.
    """
    classes = {type(model.blocks[layer].attn).__name__ for layer in attention_layers}
    unknown_classes = classes - set(REPLACEMENTS)
    if not unknown_classes:
        return None
    return (
        f"its attention is a {min(unknown_classes)}, and mechattn does not know where it computes"
        " its scores"
    )


def fires_while_streamed(name: str) -> bool:
    """Whether a hook of a layer, such as "attn.hook_z", fires with the same values during
    streaming."""
    return not name.startswith(HOOKS_WITHOUT_STREAMING)


@contextmanager
def streaming(
    model: HookedModel,
    layers: Collection[int],
    see_rows: SeeRows,
    see_whole: SeeWhole | None = None,
    rows_per_block: int | None = None,
    edge_masks: Mapping[int, EdgeMask] | None = None,
) -> Iterator[None]:
    """Inside a ``with`` block, attention is computed in blocks of query rows.

    Args:
        model: A hooked model.
        layers: The layers to measure.
        see_rows: Called with each of these layers and each block of its rows.
        see_whole: If given, a fused kernel computes the measured layers that it can, and this is
            called in place of ``see_rows`` with the layer and the kernel's result.
        rows_per_block: The number of rows of a block; by default a number that suits the device.
        edge_masks: By layer, the edges of attention to cut.

    Raises:
        ModelError: It is not known where this model computes its attention.
    """
    attention_layers = hooks.attention_layers(model)  # called once: it takes a millisecond
    obstacle = why_not_streamed(model, attention_layers)
    if obstacle is not None:
        raise ModelError(f"{model.cfg.model_name} cannot be streamed: {obstacle}")

    mask_of_layer = edge_masks or {}
    with ExitStack() as stack:
        for number in attention_layers:
            layer = _Layer(
                number,
                hooks.attention_window(model, number),
                see_rows=see_rows if number in layers else None,
                see_whole=see_whole,
                rows_per_block=rows_per_block,
                edge_mask=mask_of_layer.get(number),
            )
            attention = model.blocks[number].attn
            replacement = REPLACEMENTS[type(attention).__name__]
            stack.enter_context(replacement(model, attention, layer))
        stack.enter_context(_called_by_transformers(model, attention_layers))
        yield


# From a model, the attention of one of its layers, and how it is streamed.
Replacement = Callable[[HookedModel, Any, _Layer], AbstractContextManager[None]]

# By the id of the transformers attention module: its layer, and the hook points for q, k and v.
_streamed_modules: dict[int, tuple[_Layer, HookPoints]] = {}


@contextmanager
def _called_by_transformers(model: HookedModel, attention_layers: list[int]) -> Iterator[None]:
    """Inside a ``with`` block, transformers calls our attention function.

    Modules that do not read their attention function from the configuration are not affected.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    original = original_of(model)
    if original is None:
        yield
        return

    for name in (_REGISTERED, _REGISTERED_WITH_MASK):
        AttentionInterface.register(name, _attention_function)

    # Our function computes the causal mask itself, so it is given a mask only for padding, or a
    # dummy for a model that modifies its mask.
    AttentionMaskInterface.register(_REGISTERED, flash_attention_mask)
    AttentionMaskInterface.register(
        _REGISTERED_WITH_MASK, lambda *_, **__: torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    )

    # The configurations that select the attention function, by their ids, because the layers
    # usually share one. That of a model with images has another for its text.
    modules = [model.blocks[layer].attn.original_component for layer in attention_layers]
    configs_by_id: dict[int, Any] = {}
    for owner in (original, *modules):
        config = getattr(owner, "config", None)
        for candidate in (config, getattr(config, "text_config", None)):
            if candidate is not None:
                configs_by_id[id(candidate)] = candidate

    registered_name = _REGISTERED_WITH_MASK if particulars_of(model).uses_mask else _REGISTERED
    with ExitStack() as stack:
        for config in configs_by_id.values():
            stack.enter_context(
                attribute_set(config, "_attn_implementation_internal", registered_name)
            )
        yield


def _attention_function(
    module: Any, query: Queries, key: Keys, value: Values, mask: Any, **options: Any
) -> Any:
    """The attention function that transformers calls in place of SDPA.

    It takes [batch head pos d_head] and returns [batch pos head d_head], and None in place of the
    pattern.
    """
    scale = options.get("scaling")
    if scale is None:
        scale = query.shape[-1] ** -0.5

    layer, (hook_q, hook_k, hook_v) = _streamed_modules[id(module)]
    window = options.get("sliding_window")
    if window not in (None, layer.window):
        assumed = "full attention" if layer.window is None else layer.window
        raise ModelError(
            f"layer {layer.number} attends in a window of {window}, but mechattn assumed "
            f'{assumed}; use engine="hooks", and report it'
        )

    by_head = layer(
        hook_q(query),
        hook_k(key),
        hook_v(value),
        scale,
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )
    out = rearrange(by_head, "batch head pos d_head -> batch pos head d_head")
    return out.contiguous(), None


def _unchanged(x: Tensor, *args: Any) -> Tensor:
    """The first argument, unchanged. It replaces a hook or step that is left out."""
    return x


@contextmanager
def _delegated(
    model: HookedModel,
    attention: Any,
    layer: _Layer,
    hook_points: HookPoints = (_unchanged, _unchanged, _unchanged),
) -> Iterator[None]:
    """Replaces the attention of a bridge that leaves the computation to the transformers module.

    The module calls the configured attention function, which passes q, k and v through the hook
    points.
    """
    from transformer_lens.model_bridge.generalized_components import AttentionBridge

    module = attention.original_component
    outer_entry = _streamed_modules.get(id(module))  # of a ``with`` block around this one
    with attribute_set(attention, "forward", MethodType(AttentionBridge.forward, attention)):
        _streamed_modules[id(module)] = (layer, hook_points)
        try:
            yield
        finally:
            _streamed_modules.pop(id(module))
            if outer_entry is not None:
                _streamed_modules[id(module)] = outer_entry


@contextmanager
def _attn_replaced(model: HookedModel, attention: Any, layer: _Layer) -> Iterator[None]:
    """Like ``_delegated``, and replaces the method ``_attn`` of a module that has it (GPT-Neo,
    GPT-J)."""
    module = attention.original_component

    def attn(query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *args: Any) -> Any:
        scale = score_scale(model, layer.number, query.shape[-1])
        return layer(query, key, value, scale).to(value.dtype), None

    with ExitStack() as stack:
        if hasattr(module, "_attn"):
            stack.enter_context(attribute_set(module, "_attn", attn))
        stack.enter_context(_delegated(model, attention, layer))
        yield


def _latent_attention(
    model: HookedModel, attention: Any, layer: _Layer
) -> AbstractContextManager[None]:
    """Like ``_delegated``, with the hooks that the bridge's own forward pass would fire."""
    hook_points = (attention.hook_q, attention.hook_k, attention.hook_v)
    return _delegated(model, attention, layer, hook_points)


def _joint_qkv(model: HookedModel, attention: Any, layer: _Layer) -> AbstractContextManager[None]:
    """Replaces the attention of a bridge that splits a fused projection and computes it itself.

    The method from projected q, k and v to the attention output is replaced.
    """

    def reconstruct(q: Projected, k: Projected, v: Projected, **kwargs: Any) -> Any:
        heads = model.cfg.n_heads
        kv_heads = kv_heads_of(model)
        clip = clip_of(model, layer.number)
        if clip is not None:
            q = q.clamp(-clip, clip)
            k = k.clamp(-clip, clip)
            v = v.clamp(-clip, clip)

        q, k, v, batch, length, d_head = attention._reshape_qkv_to_heads(q, k, v, heads, kv_heads)

        rotation = kwargs.get("position_embeddings")
        if isinstance(rotation, tuple) and hasattr(attention, "_apply_rotary_pos_emb"):
            cos, sin = attention._apply_position_embedding_hooks(rotation)
            q, k = attention._apply_rotary_pos_emb(q, k, cos, sin)

        scale = score_scale(model, layer.number, d_head)
        bias = _alibi(model, kwargs, heads, length, d_head)
        by_head = layer(q, k, v, scale, bias)
        z = attention._reshape_attn_output(by_head, batch, length, heads, d_head)
        return attention._apply_output_projection(z), None

    return attribute_set(attention, "_reconstruct_attention", reconstruct)


def _alibi(
    model: HookedModel, kwargs: Mapping[str, Any], heads: int, length: int, d_head: int
) -> Float[Tensor, "#batch head key"] | None:
    """The ALiBi bias of each key, from the argument ``position_bias`` or ``alibi``; None without
    ALiBi.

    It is counted once, because no mask is used here that could contain it.
    """
    position_bias = kwargs.get("position_bias")
    if position_bias is not None:
        # MPT makes it for the longest sequence, so the last keys are taken.
        return rearrange(position_bias[..., -length:], "head 1 key -> 1 head key")

    alibi = kwargs.get("alibi")
    if alibi is None:
        return None
    bias = rearrange(alibi, "(batch head) 1 key -> batch head key", head=heads)[..., :length]
    if particulars_of(model).alibi_in_bfloat16:  # such models scale the bias with the scores
        return bias * d_head**-0.5
    return bias


@contextmanager
def _steps_replaced(model: HookedModel, attention: Any, layer: _Layer) -> Iterator[None]:
    """Replaces the attention of a ``HookedTransformer``, whose scores, mask, softmax and mix are
    methods.

    The step that mixes values computes everything; the others are left out.
    """
    by_head = "batch pos head d_head -> batch head pos d_head"
    queries_and_keys: list[Tensor] = []  # from the step of the scores to the one that mixes values

    def scores(q: Tensor, k: Tensor) -> Tensor:
        queries_and_keys[:] = [rearrange(q, by_head), rearrange(k, by_head)]
        return q.new_zeros(len(q), q.shape[2], 1, 1)  # a dummy, because the scores are not read

    def mixed_values(v: Tensor, pattern: Tensor) -> Tensor:
        q, k = queries_and_keys
        queries_and_keys.clear()

        cfg = attention.cfg
        bias = None
        if cfg.positional_embedding_type == "alibi":
            slopes = type(attention).create_alibi_multipliers(cfg.n_heads, q.device)
            bias = slopes.reshape(1, -1, 1) * torch.arange(q.shape[2], device=q.device)

        softcap = getattr(cfg, "attn_scores_soft_cap", 0)
        if softcap <= 0:  # -1 and 0 mean none
            softcap = None
        sinks = hooks.sinks_of(model, layer.number)
        z = layer(
            q,
            k,
            rearrange(v, by_head),
            1 / attention.attn_scale,
            bias,
            softcap=softcap,
            sinks=sinks,
        )
        return attention.hook_z(rearrange(z, "batch head pos d_head -> batch pos head d_head"))

    replacements: dict[str, Any] = {
        "calculate_attention_scores": scores,
        "apply_causal_mask": _unchanged,
        "hook_attn_scores": _unchanged,
        "hook_pattern": _unchanged,
        "calculate_z_scores": mixed_values,
    }
    with ExitStack() as stack:
        for name, function in replacements.items():
            stack.enter_context(attribute_set(attention, name, function))
        yield


# By the name of TransformerLens's class. A subclass is not treated like its base class: it may
# select the keys that a query sees, which the check on a short probe would not notice.
REPLACEMENTS: Mapping[str, Replacement] = {
    "PositionEmbeddingsAttentionBridge": _delegated,
    "_BitNetAttentionBridge": _delegated,
    "_Cohere2AttentionBridge": _delegated,
    "_Exaone4AttentionBridge": _delegated,
    "_SmolLM3AttentionBridge": _delegated,
    "AttentionBridge": _attn_replaced,
    "MLAAttentionBridge": _latent_attention,
    "ALiBiJointQKVAttentionBridge": _joint_qkv,
    "BloomAttentionBridge": _joint_qkv,
    "JointQKVAttentionBridge": _joint_qkv,
    "JointQKVPositionEmbeddingsAttentionBridge": _joint_qkv,
    "MPTALiBiAttentionBridge": _joint_qkv,
    "Attention": _steps_replaced,
    "GroupedQueryAttention": _steps_replaced,
}
