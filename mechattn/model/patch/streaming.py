"""Replaces a hooked model's attention with attention in blocks of rows, inside a ``with`` block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mechattn.errors import ModelError
from mechattn.functional.fused import Fused, fused_attention, why_not_fused
from mechattn.functional.rows import BLOCK, Attention, EdgeMask, Rows, attention_by_rows
from mechattn.model import hooks
from mechattn.model.hooked import HookedModel
from mechattn.model.patch.attention_calls import call_of, called_by_transformers

See = Callable[[int, Rows | Fused], None]
# Hooks of a layer that, in some models, don't fire while it is streamed, or have another layout.
_HOOKS_ALONE = (
    *(
        f"attn.hook_{part}"
        for part in ("attn_scores", "pattern", "cos", "sin", "rot_", "q_normed", "k_normed", "q_gate")
    ),
    *(f"attn.{part}." for part in ("q_norm", "k_norm", "kv_b_proj")),
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
        q: Float[Tensor, "batch head pos d_head"],
        k: Float[Tensor, "batch kv_head pos d_head"],
        v: Float[Tensor, "batch kv_head pos d_value"],
        scale: float,
        bias: Float[Tensor, "#batch head pos"] | None = None,
        softcap: float | None = None,
        sinks: Float[Tensor, " head"] | None = None,
    ) -> Float[Tensor, "batch head pos d_value"]:
        """Attention [batch head pos d_head]; in blocks of rows if it is measured or if SDPA has no mask for it."""
        special = (bias, softcap, sinks, self.window, self.edge_mask)
        if self.see is None and all(part is None for part in special):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        see, number = self.see, self.number
        attention = Attention(q, k, v, scale, bias, self.window, softcap, self.edge_mask, sinks)
        if see is None:
            return attention_by_rows(attention, None, self.block)
        if self.fused and not why_not_fused(attention):
            see(number, made := fused_attention(attention))
            return made.out
        return attention_by_rows(attention, lambda rows: see(number, rows), self.block)


def why_not(model: HookedModel, attending: list[int] | None = None) -> str:
    """Why this model cannot be streamed, judged by the classes of its attention layers; "" if it might."""
    attending = hooks.attention_layers(model) if attending is None else attending
    attentions = [model.blocks[layer].attn for layer in attending]
    other = {type(attention).__name__ for attention in attentions if call_of(attention) is None}
    return f"its attention is a {min(other)}, and mechattn does not know where it computes its scores" if other else ""


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
            if (call := call_of(attention)) is not None:
                stack.enter_context(call(model, attention, layer))
        stack.enter_context(called_by_transformers(model, attending))
        yield
