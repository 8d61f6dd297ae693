"""Replaces the function that computes ``softmax(q·k) v`` in each attention class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any, Protocol, runtime_checkable

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from mechattn.errors import ModelError
from mechattn.model.architectures import particulars_of
from mechattn.model.attribute_setting import attribute_set
from mechattn.model.hooked import HookedModel, config_of, original_of
from mechattn.model.hooks import sinks_of
from mechattn.model.values import clip_of

_NAME, _NAME_WITH_MASK = "mechattn_rows", "mechattn_rows_with_mask"


@runtime_checkable  # needed by run-time type checks
class Attend(Protocol):
    """The function that replaces a layer's attention."""

    @property
    def number(self) -> int:
        """The layer."""
        ...

    @property
    def window(self) -> int | None:
        """The number of keys that a query sees."""
        ...

    def __call__(
        self,
        q: Float[Tensor, "batch head pos d_head"],
        k: Float[Tensor, "batch kv_head pos d_head"],
        v: Float[Tensor, "batch kv_head pos d_value"],
        scale: float,
        bias: Float[Tensor, "#batch head pos"] | None = None,
        softcap: float | None = None,
        sinks: Float[Tensor, " head"] | None = None,
    ) -> Float[Tensor, "batch head pos d_value"]:
        """Attention after RoPE, clips and norms of queries, keys and values."""
        ...


Call = Callable[[HookedModel, Any, Attend], AbstractContextManager[None]]
# By the id of the transformers attention module: the function to call, and what q, k, v pass through before.
_asking: dict[int, tuple[Attend, Sequence[Callable[[Tensor], Tensor]]]] = {}


def call_of(attention: Any) -> Call | None:
    """How to replace the function in this TransformerLens attention; None if unknown."""
    return _CALLS.get(type(attention).__name__)


@contextmanager
def called_by_transformers(model: HookedModel, attending: list[int]) -> Iterator[None]:
    """Make transformers call our function inside a ``with`` block, wherever the function can be configured."""
    if original_of(model) is not None:
        _register()
    name = _NAME_WITH_MASK if particulars_of(model).uses_mask else _NAME
    with ExitStack() as stack:
        for config in _configs(model, attending):
            stack.enter_context(attribute_set(config, "_attn_implementation_internal", name))
        yield


def _configs(model: HookedModel, attending: list[int]) -> list[Any]:
    """The configuration objects that select the attention function: usually one, shared by the layers."""
    if original_of(model) is None:
        return []
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
    """Register the attention function with transformers, and that it needs masks only for padding."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    for name in (_NAME, _NAME_WITH_MASK):
        AttentionInterface.register(name, _attention_function)
    AttentionMaskInterface.register(_NAME, flash_attention_mask)
    AttentionMaskInterface.register(_NAME_WITH_MASK, lambda *_, **__: torch.zeros(1, 1, 1, 1, dtype=torch.bool))


def _attention_function(
    module: Any,
    query: Float[Tensor, "batch head pos d_head"],
    key: Float[Tensor, "batch kv_head pos d_head"],
    value: Float[Tensor, "batch kv_head pos d_value"],
    mask: Any,
    **options: Any,
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
    model: HookedModel, attention: Any, attend: Attend, hooks: Sequence[Callable[[Tensor], Tensor]] = (_same,) * 3
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
def _plain(model: HookedModel, attention: Any, attend: Attend) -> Iterator[None]:
    """Like ``_delegated``, for modules with a method ``_attn`` instead (GPT-Neo, GPT-J)."""
    own = hasattr(attention.original_component, "_attn")

    def attn(query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *rest: Any) -> Any:
        return attend(query, key, value, _scale(model, attend.number, query.shape[-1])).to(value.dtype), None

    replaced = attribute_set(attention.original_component, "_attn", attn) if own else nullcontext()
    with replaced, _delegated(model, attention, attend):
        yield


@contextmanager
def _latent(model: HookedModel, attention: Any, attend: Attend) -> Iterator[None]:
    """Like ``_delegated``, with the hooks that the bridge fires in its own forward pass."""
    latents = {"q_a_layernorm": "hook_q_latent", "kv_a_layernorm": "hook_kv_latent"}
    with ExitStack() as stack:
        for part, hook in latents.items():
            if (module := getattr(attention.original_component, part, None)) is not None:
                fire = partial(_fire, getattr(attention, hook))
                stack.callback(module.register_forward_hook(fire).remove)
        parts = (attention.hook_q, attention.hook_k, attention.hook_v)
        stack.enter_context(_delegated(model, attention, attend, parts))
        yield


def _fire(hook: Any, module: Any, given: Any, out: Tensor) -> Tensor:
    return hook(out)


def _fused(model: HookedModel, attention: Any, attend: Attend) -> AbstractContextManager[None]:
    """For a bridge that splits a fused projection and computes attention itself: from projected q, k, v to output."""

    def reconstruct(
        q: Float[Tensor, "batch pos ..."],
        k: Float[Tensor, "batch pos ..."],
        v: Float[Tensor, "batch pos ..."],
        **kwargs: Any,
    ) -> Any:
        heads = attention.config.n_heads
        kv_heads = getattr(attention.config, "n_key_value_heads", None) or heads
        if limit := clip_of(model, attend.number):
            q, k, v = (part.clamp(-limit, limit) for part in (q, k, v))
        q, k, v, batch, length, width = attention._reshape_qkv_to_heads(q, k, v, heads, kv_heads)
        rotation = kwargs.get("position_embeddings")
        if isinstance(rotation, tuple) and hasattr(attention, "_apply_rotary_pos_emb"):
            q, k = attention._apply_rotary_pos_emb(q, k, *attention._apply_position_embedding_hooks(rotation))
        out = attend(q, k, v, _scale(model, attend.number, width), _alibi(model, kwargs, heads, length, width))
        out = attention._reshape_attn_output(out, batch, length, heads, width)
        return attention._apply_output_projection(out), None

    return attribute_set(attention, "_reconstruct_attention", reconstruct)


def _alibi(
    model: HookedModel, kwargs: Mapping[str, Any], heads: int, length: int, width: int
) -> Float[Tensor, "#batch head key"] | None:
    """The ALiBi bias of each key, under either argument name; counted once, as no mask contains it here."""
    if (bias := kwargs.get("position_bias")) is not None:  # MPT: made for the longest sequence; take its last keys
        return rearrange(bias[..., -length:], "head 1 key -> 1 head key")
    if (bias := kwargs.get("alibi")) is None:
        return None
    bias = rearrange(bias, "(batch head) 1 key -> batch head key", head=heads)[..., :length]
    return bias * width**-0.5 if particulars_of(model).alibi_in_bfloat16 else bias


def _scale(model: HookedModel, layer: int, width: int) -> float:
    special = particulars_of(model).score_scale
    return width**-0.5 if special is None else special(config_of(model), layer, width**-0.5)


@contextmanager
def _in_parts(model: HookedModel, attention: Any, attend: Attend) -> Iterator[None]:
    """For a ``HookedTransformer``, where scores, mask, softmax and mix are methods; only the mix gets all it needs."""
    asked: list[Tensor] = []
    by_head = "batch pos head d_head -> batch head pos d_head"

    def scores(q: Tensor, k: Tensor) -> Tensor:
        asked[:] = q, k
        return q.new_zeros(len(q), q.shape[2], 1, 1)  # a placeholder for the matrix, which is not read

    def z(v: Tensor, pattern: Tensor) -> Tensor:
        q, k, v = (rearrange(part, by_head) for part in (*asked, v))
        asked.clear()
        cfg = attention.cfg
        bias = None
        if cfg.positional_embedding_type == "alibi":
            slopes = type(attention).create_alibi_multipliers(cfg.n_heads, q.device)
            bias = slopes.reshape(1, -1, 1) * torch.arange(q.shape[2], device=q.device)
        cap = getattr(cfg, "attn_scores_soft_cap", 0)
        out = attend(q, k, v, 1 / attention.attn_scale, bias, cap if cap > 0 else None, sinks_of(model, attend.number))
        return attention.hook_z(rearrange(out, "batch head pos d_head -> batch pos head d_head"))

    replaced = {
        "calculate_attention_scores": scores,
        "calculate_z_scores": z,
        **dict.fromkeys(("apply_causal_mask", "hook_attn_scores", "hook_pattern"), _same),
    }
    with ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(attribute_set(attention, name, function))
        yield


# By TransformerLens class. A subclass is not treated like its base class: it may select the keys that a query sees, and
# the check on a short probe would not notice.
_CALLS: Mapping[str, Call] = {
    **dict.fromkeys(
        (
            "PositionEmbeddingsAttentionBridge",
            "_BitNetAttentionBridge",
            "_Cohere2AttentionBridge",
            "_Exaone4AttentionBridge",
            "_SmolLM3AttentionBridge",
        ),
        _delegated,
    ),
    "AttentionBridge": _plain,
    "MLAAttentionBridge": _latent,
    **dict.fromkeys(
        (
            "ALiBiJointQKVAttentionBridge",
            "BloomAttentionBridge",
            "JointQKVAttentionBridge",
            "JointQKVPositionEmbeddingsAttentionBridge",
            "MPTALiBiAttentionBridge",
        ),
        _fused,
    ),
    **dict.fromkeys(("Attention", "GroupedQueryAttention"), _in_parts),
}
