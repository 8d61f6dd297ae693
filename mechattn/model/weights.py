"""The weights that analyses read: W_O, the biases of the scores, the unembedding behind the final norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from mechattn.errors import ModelError
from mechattn.model.hooked import HookedModel, config_of
from mechattn.model.values import norm_before_output
from mechattn.model.verify.facts import facts_of


def output_weights(model: HookedModel, layer: int) -> Float[Tensor, "head d_head d_model"]:
    """W_O of each head, in the model's dtype, so that no second copy of all layers is held; see :func:`wide`.

    Raises:
        ModelError: The model says of no W_O which turns z into the output of attention.
    """
    facts = facts_of(model)
    if facts is not None and facts.report is not None and "heads" in facts.report.limited:
        raise ModelError(
            f"{model.cfg.model_name}: {facts.report.limited['heads']}; so heads have no updates of their own"
        )
    if norm := norm_before_output(model, layer):
        raise ModelError(
            f"{model.cfg.model_name} norms all heads together before W_O ({norm}, layer {layer}), so that what one "
            "adds depends on all others: heads have no updates of their own"
        )
    try:
        w_o = model.blocks[layer].attn.W_O.detach()
    except Exception as error:  # an adapter that does not say what its output weights are
        raise ModelError(f"layer {layer} of {model.cfg.model_name} shows no W_O by head ({error})") from None
    if w_o.ndim != 3 or len(w_o) != model.cfg.n_heads:
        raise ModelError(
            f"layer {layer} of {model.cfg.model_name}: W_O {list(w_o.shape)} isn't [head, d_head, d_model], so heads "
            "have no updates of their own"
        )
    scaled = float(
        getattr(config_of(model), "residual_multiplier", None) or 1.0
    )  # Granite: what reaches the residual stream
    return w_o if scaled == 1 else w_o * scaled


def wide(tensor: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """In float32 at least."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def score_biases(
    model: HookedModel, layer: int
) -> tuple[Float[Tensor, "head d_head"], Float[Tensor, "kv_head d_head"]]:
    """b_Q and b_K of each head; zeros where the model has none."""
    attention = model.blocks[layer].attn
    heads, width = int(model.cfg.n_heads), int(model.cfg.d_head)
    kv_heads = int(getattr(model.cfg, "n_key_value_heads", None) or heads)
    made = []
    for name, count in (("b_Q", heads), ("b_K", kv_heads)):
        bias = getattr(attention, name, None)
        made.append(
            torch.zeros(count, width, device=next(model.parameters()).device)
            if bias is None
            else rearrange(bias.detach().flatten(), "(head d_head) -> head d_head", head=count).float()
        )
    return made[0], made[1]


@dataclass(frozen=True)
class Unembedding:
    """How the residual stream after the last layer becomes logits: ``logit = ⟨x − mean, γ · W_U⟩ / σ + …``.

    Args:
        w_u: W_U.
        mean: Its mean over the vocabulary, which no softmax sees.
        gamma: γ, the weight of the final norm.
        centres: Whether the norm takes off the mean (LayerNorm, not RMSNorm).
        eps: Added to the variance under the root.
    """

    w_u: Float[Tensor, "d_model d_vocab"]
    mean: Float[Tensor, " d_model"]
    gamma: Float[Tensor, " d_model"]
    centres: bool
    eps: float

    def direction(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """``γ · (W_U[:, token] − mean over the vocabulary)``, less its own mean where the norm centres."""
        away = (self.w_u.T[tokens].float() - self.mean) * self.gamma
        return away - away.mean(-1, keepdim=True) if self.centres else away

    def scale(self, stream: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos"]:
        """σ of the final norm."""
        stream = stream.float()
        if self.centres:
            stream = stream - stream.mean(-1, keepdim=True)
        return (stream.square().mean(-1) + self.eps).sqrt()


def unembedding(model: HookedModel) -> Unembedding:
    """W_U and the norm before it. γ is found by calling the norm: ``norm(x) − norm(0) = γ x / σ`` where x has mean 0.

    Raises:
        ModelError: The model has no such norm, or no W_U; or see :func:`check_direct`.
    """
    norm, w_u = getattr(model, "ln_final", None), getattr(model, "W_U", None)
    if norm is None or w_u is None:
        raise ModelError(f"{model.cfg.model_name} has no ln_final or no W_U, so what reaches its logits is not known")
    parameter = next(model.parameters())
    ones = torch.ones(int(model.cfg.d_model), device=parameter.device)
    signs = ones.clone()
    signs[1::2] = -1
    with torch.no_grad():
        shown = [norm(x.to(parameter.dtype)[None, None])[0, 0].float() for x in (signs, 0 * signs, ones)]
    gamma = (shown[0] - shown[1]) * signs
    centres = bool((shown[2] - shown[1]).abs().max() < 1e-2 * gamma.abs().max())
    made = Unembedding(
        w_u.detach(), w_u.detach().float().mean(1), gamma, centres, float(getattr(model.cfg, "eps", 1e-5))
    )
    check_direct(model, made)
    return made


def check_direct(model: HookedModel, reads: Unembedding) -> None:
    """Refuse a model in which a head's update does not reach the logits as it is, tried on a few tokens.

    Raises:
        ModelError: A norm lies between, the residual stream is scaled, or the logits are.
    """
    name, facts = str(model.cfg.model_name), facts_of(model)
    if hasattr(model.blocks[0], "ln1_post"):
        raise ModelError(
            f"{name} has a norm between the heads and the residual stream, so what a single head adds to a logit is "
            "not defined without fixing that norm's scale"
        )
    if facts is not None and facts.report is not None and "residual" in facts.report.limited:
        raise ModelError(f"{name}: {facts.report.limited['residual']}; so updates don't reach its logits as they are")
    seen: dict[str, Tensor] = {}
    last = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    tokens = torch.arange(5, 13, device=next(model.parameters()).device)[None]
    with torch.no_grad():
        hook = [(last, lambda stream, hook: seen.update(stream=stream))]
        logits = model.run_with_hooks(tokens, fwd_hooks=hook, return_type="logits")[0].float()
    stream = seen["stream"].float()
    got = (reads.direction(tokens).float()[0] @ stream[0].T / reads.scale(stream)[0]).T
    expected = (logits - logits.mean(-1, keepdim=True))[:, tokens[0]]
    off = (got - expected) - (got - expected).mean(0)  # what a bias adds is the same at every token
    rounding = 0.02 if next(model.parameters()).dtype in (torch.float32, torch.float64) else 0.15
    if float(off.norm()) > rounding * float((expected - expected.mean(0)).norm()):
        raise ModelError(
            f"the logits of {name} are not W_U · norm(residual stream): they are scaled or capped after it"
        )
