"""A forward pass that reads the attention pattern of each layer at its hook, and a check that
refuses an impossible pattern."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechattn.errors import ModelError, RowError
from mechattn.functional.attention import (
    EdgeMask,
    Marked,
    Pattern,
    Scores,
    Tokens,
    visible_keys,
)
from mechattn.model.head_parts import mixed_values
from mechattn.model.hooked import HookedModel
from mechattn.model.hooks import Hooks, forward_to, pattern_hook, sinks_of

_NO_MASS = 1e-6  # smaller attention is rounding
_SUM_ROUNDING = 0.01  # how far half precision may move the sum of a row
# Called with a layer, its pattern, and the values that the pattern mixes.
SeePattern = Callable[[int, Pattern, Float[Tensor, "batch kv_head pos d_head"] | None], None]


def forward_with_patterns(
    model: HookedModel,
    tokens: Tokens,
    real: Marked,
    layers: list[int],
    see: SeePattern,
    edge_masks: Mapping[int, EdgeMask] | None = None,
    position_ids: Tokens | None = None,
    last_layer: int | None = None,
) -> None:
    """A forward pass that calls a function with the pattern of each layer.

    Args:
        model: A hooked model.
        tokens: The tokens, padded on the right.
        real: Which of them are not padding.
        layers: The layers to read.
        see: Called with each layer, its pattern, and the values that the pattern mixes. The values
            are None if the layer has no hook_v, or one of an unknown layout.
        edge_masks: By layer, the edges of attention to cut.
        position_ids: The position ids; by default the model's own.
        last_layer: The layer after which the pass stops; by default the last of ``layers``.
    """
    values_of_layer: dict[int, Tensor] = {}
    hook_dict = model.hook_dict
    fwd_hooks: Hooks = []

    for layer, edge_mask in (edge_masks or {}).items():
        unseen_in_all_heads = _unseen(edge_mask)[:, None]
        hide = partial(_hide, unseen_in_all_heads)
        fwd_hooks.append((f"blocks.{layer}.attn.hook_attn_scores", hide))

    def keep_values(v: Float[Tensor, ...], hook: Any, layer: int) -> None:
        values_of_layer[layer] = v.detach()

    def show_pattern(pattern: Pattern, hook: Any, layer: int) -> None:
        v = values_of_layer.pop(layer, None)
        if v is not None:
            v = mixed_values(model, layer, v, pattern)
        see(layer, pattern.detach(), v)

    for layer in layers:
        hook_v = f"blocks.{layer}.attn.hook_v"
        if hook_v in hook_dict:
            fwd_hooks.append((hook_v, partial(keep_values, layer=layer)))
        fwd_hooks.append((pattern_hook(layer), partial(show_pattern, layer=layer)))

    options = {}
    if not real.all():
        options["attention_mask"] = real.long()
    if last_layer is None:
        last_layer = max(layers)
    forward_to(model, tokens, last_layer, fwd_hooks, position_ids, **options)


def check_pattern(
    model: HookedModel,
    layer: int,
    pattern: Pattern,
    real: Marked,
    window: int | None,
    edge_mask: EdgeMask | None = None,
) -> None:
    """Refuse an impossible pattern.

    The rows of padding are not checked and may hold NaN.

    Raises:
        RowError: A query's attention does not sum to 1 or, with learned sinks, sums to more than 1.
        ModelError: A query gives attention to a key that it cannot see, or across a cut edge.
    """
    real = real.to(pattern.device)
    sums = pattern.float().sum(-1).masked_fill(~real[:, None], 1.0)
    # A learned sink may get all of a query's attention.
    smallest_sum = 1.0 if sinks_of(model, layer) is None else 0.0
    is_allowed = (sums < 1.0 + _SUM_ROUNDING) & (sums > smallest_sum - _SUM_ROUNDING)
    is_bad = ~is_allowed  # true for NaN, too
    if is_bad.any():
        row, head, query = is_bad.nonzero()[0].tolist()
        raise RowError(
            f"layer {layer}, head {head}: the attention of query {query} sums to"
            f" {float(sums[row, head, query]):.4f}, not to 1; the model gives NaN or infinity there"
            " (try another dtype), or its hook shows no probabilities",
            row,
        )

    # The largest over the heads. Padding becomes 0, since a NaN there would be the maximum below,
    # which no comparison finds too large.
    largest_attention = pattern.amax(1).masked_fill(~real[:, :, None], 0.0)
    if edge_mask is not None and (largest_attention * _unseen(edge_mask)).max() > _NO_MASS:
        raise ModelError(
            f"layer {layer}: a query sees a masked token, so masking at hook_attn_scores has no"
            ' effect here; use engine="streaming" if the model can be streamed'
        )

    length = pattern.shape[-1]
    visible = visible_keys(torch.arange(length, device=pattern.device), length, window)
    stray_mass = largest_attention.masked_fill(visible, 0.0).max()
    if stray_mass > _NO_MASS:
        kind = "full causal attention" if window is None else f"a window of {window}"
        raise ModelError(
            f"layer {layer}: a query gives attention of {float(stray_mass):.2g} to a key that it"
            f" should not see ({kind}); the mask is not the model's"
        )


def _unseen(edge_mask: EdgeMask) -> Bool[Tensor, "batch query key"]:
    """The pairs of query and key whose edge is cut."""
    positions = torch.arange(edge_mask.keys.shape[1], device=edge_mask.keys.device)
    return edge_mask.unseen(positions.expand(edge_mask.keys.shape), slice(None))


def _hide(unseen: Bool[Tensor, "batch 1 query key"], scores: Scores, hook: Any) -> Scores:
    """Scores of a layer without its cut edges, before the softmax."""
    return scores.masked_fill(unseen, torch.finfo(scores.dtype).min)
