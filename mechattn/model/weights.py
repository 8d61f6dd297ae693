"""The weights that analyses use: W_O, and the biases of queries and keys."""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from mechattn.errors import ModelError
from mechattn.model.hooked import HookedModel, config_of
from mechattn.model.model_facts import facts_of
from mechattn.model.split_heads import kv_heads_of, output_projection
from mechattn.model.values import norm_before_output


def output_weights(model: HookedModel, layer: int) -> Float[Tensor, "head d_head d_model"]:
    """W_O of each head, in the model's dtype to avoid a second copy of all layers; see :func:`wide`."""
    facts = facts_of(model)
    if facts is not None and facts.report is not None and "heads" in facts.report.limited:
        raise ModelError(f"{model.cfg.model_name}: {facts.report.limited['heads']}; so heads have no separate updates")
    if norm := norm_before_output(model, layer):
        raise ModelError(
            f"{model.cfg.model_name} norms all heads together before W_O ({norm}, layer {layer}), so each head's "
            f"update depends on all others: heads have no separate updates"
        )
    try:
        w_o = output_projection(model, layer)
    except Exception as error:  # an adapter that does not declare its output weights
        raise ModelError(f"layer {layer} of {model.cfg.model_name} has no W_O by head ({error})") from None
    if w_o.ndim != 3 or len(w_o) != model.cfg.n_heads:
        raise ModelError(
            f"layer {layer} of {model.cfg.model_name}: W_O {list(w_o.shape)} is not [head, d_head, d_model], so heads "
            f"have no separate updates"
        )
    scaled = float(
        getattr(config_of(model), "residual_multiplier", None) or 1.0
    )  # Granite: what reaches the residual stream
    return w_o if scaled == 1 else w_o * scaled


def wide(tensor: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Convert to float32 at least."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def score_biases(
    model: HookedModel, layer: int
) -> tuple[Float[Tensor, "head d_head"], Float[Tensor, "kv_head d_head"]]:
    """b_Q and b_K of each head; zeros if the model has none."""
    attention = model.blocks[layer].attn
    heads, width = int(model.cfg.n_heads), int(model.cfg.d_head)
    made = []
    for name, count in (("b_Q", heads), ("b_K", kv_heads_of(model))):
        bias = getattr(attention, name, None)
        made.append(
            torch.zeros(count, width, device=next(model.parameters()).device)
            if bias is None
            else rearrange(bias.detach().flatten(), "(head d_head) -> head d_head", head=count).float()
        )
    return made[0], made[1]
