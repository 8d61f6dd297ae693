"""The path from the residual stream after the last layer to the logits: final norm, W_U, a factor, a cap."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechattn.errors import ModelError
from mechattn.model.architectures import particulars_of
from mechattn.model.frozen_norm import FrozenNorm, frozen_norm
from mechattn.model.hooked import HookedModel, config_of
from mechattn.model.model_facts import facts_of
from mechattn.model.weights import wide


@dataclass(frozen=True)
class Unembedding:
    """``logit = f ⟨norm(x), W_U⟩ + b_U``, then ``cap · tanh(logit / cap)`` in a model that caps its logits.

    Args:
        w_u: W_U.
        mean: Its mean over the vocabulary, which the softmax ignores.
        norm: The final norm.
        factor: f, 1 in most models.
        cap: The bound of the logits; None in most models.
    """

    w_u: Float[Tensor, "d_model d_vocab"]
    mean: Float[Tensor, " d_model"]
    norm: FrozenNorm
    factor: float = 1.0
    cap: float | None = None

    def direction(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """``f γ · (W_U[:, token] − mean over the vocabulary)``, minus its own mean if the norm centres."""
        return self.norm.toward(self.factor * (wide(self.w_u.T[tokens]) - self.mean))

    def scale(self, stream: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos"]:
        """σ of the final norm."""
        return self.norm.scale(stream)

    def uncapped(self, logits: Float[Tensor, "*batch d_vocab"]) -> Float[Tensor, "*batch d_vocab"]:
        """The logits before the cap: ``cap · artanh(logit / cap)``, if there is a cap."""
        if self.cap is None:
            return logits
        within = 1 - torch.finfo(logits.dtype).eps  # a logit at the cap itself would be infinite
        return self.cap * (logits / self.cap).clamp(-within, within).atanh()


def unembedding(model: HookedModel) -> Unembedding:
    """W_U, the norm before it, and the factor and cap from the configuration."""
    norm, w_u = getattr(model, "ln_final", None), getattr(model, "W_U", None)
    if norm is None or w_u is None:
        raise ModelError(
            f"{model.cfg.model_name} has no ln_final or no W_U, so contributions to its logits are unknown"
        )
    found = frozen_norm(model, norm, "its final norm")
    factor = particulars_of(model).logit_factor
    w_u = w_u.detach()
    made = Unembedding(
        w_u, wide(w_u).mean(1), found, 1.0 if factor is None else float(factor(config_of(model))), _cap(model)
    )
    check_direct(model, made)
    return made


def _cap(model: HookedModel) -> float | None:
    """The cap of the logits: in a bridge from the transformers configuration, otherwise from TransformerLens's."""
    config = config_of(model)
    cap = (
        getattr(model.cfg, "output_logits_soft_cap", None)
        if config is None
        else getattr(config, "final_logit_softcapping", None)
    )
    return float(cap) if cap and cap > 0 else None


def check_direct(model: HookedModel, reads: Unembedding) -> None:
    """Refuse a model whose logits, before any cap, do not follow from the final residual stream (a few tokens)."""
    name, facts = str(model.cfg.model_name), facts_of(model)
    if facts is not None and facts.report is not None and "residual" in facts.report.limited:
        raise ModelError(f"{name}: {facts.report.limited['residual']}; so updates do not reach its logits unchanged")
    seen: dict[str, Tensor] = {}
    last = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    tokens = torch.arange(5, 13, device=next(model.parameters()).device)[None]
    with torch.no_grad():
        hook = [(last, lambda stream, hook: seen.update(stream=stream))]
        logits = reads.uncapped(wide(model.run_with_hooks(tokens, fwd_hooks=hook, return_type="logits")[0]))
    stream = wide(seen["stream"])
    got = (reads.direction(tokens)[0] @ stream[0].T / reads.scale(stream)[0]).T
    expected = (logits - logits.mean(-1, keepdim=True))[:, tokens[0]]
    off = (got - expected) - (got - expected).mean(0)  # a bias adds the same at every token
    rounding = 0.02 if next(model.parameters()).dtype in (torch.float32, torch.float64) else 0.15
    if not float(off.norm()) <= rounding * float((expected - expected.mean(0)).norm()):
        raise ModelError(
            f"the logits of {name} are not W_U · norm(residual stream), even with a factor or cap from its "
            f"configuration, so a head's contribution to them is unknown"
        )
