"""From the residual stream to the logits: a norm with its scale held fixed, W_U, a factor, a cap."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechattn.errors import ModelError
from mechattn.model.architectures import particulars_of
from mechattn.model.head_parts import wide
from mechattn.model.hooked import HookedModel, config_of, limit_of, unwrapped
from mechattn.model.hooks import logits_and_values
from mechattn.model.several_devices import device_of, weights_here

_TRIED = 4  # vectors
_FINE, _COARSE = 1e-3, 3e-2  # the largest error from rounding, in float32 and in half precision


@dataclass(frozen=True)
class FrozenNorm:
    """``norm(x) = γ · (x − mean) / σ(x) + b``: with σ held fixed, a part Δ of x becomes ``γ · (Δ − mean) / σ(x)``."""

    gamma: Float[Tensor, " d_model"]
    centres: bool  # whether it subtracts the mean (LayerNorm, not RMSNorm)
    eps: float  # added to the variance under the root
    scales: bool = True  # in a model without norms it is the identity, with σ = 1

    def of_part(self, part: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """``γ · (Δ − mean)`` of a part Δ of the norm's input; divided by σ it is that part of the output."""
        if self.centres:
            part = part - part.mean(-1, keepdim=True)
        return self.gamma * part

    def toward(self, direction: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The direction before the norm: ``⟨norm's share of Δ, direction⟩ = ⟨Δ, toward(direction)⟩ / σ``."""
        made = direction * self.gamma
        return made - made.mean(-1, keepdim=True) if self.centres else made

    def scale(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch"]:
        """σ of the norm's input, ``√(variance + ε)``; in an RMSNorm the variance is the mean square."""
        x = wide(x)
        if not self.scales:
            return torch.ones_like(x[..., 0])
        if self.centres:
            x = x - x.mean(-1, keepdim=True)
        return (x.square().mean(-1) + self.eps).sqrt()


@torch.no_grad()
def frozen_norm(model: HookedModel, norm: Any, name: str) -> FrozenNorm:
    """Read γ and ε off a norm of a model: ``norm(x) − norm(0) = γ x / σ`` where x has mean 0, and so for x = ±1."""
    device, dtype = device_of(norm), next(model.parameters()).dtype

    def called(x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        return wide(norm(x.to(dtype)[None])[0])

    ones = torch.ones(int(model.cfg.d_model), device=device)
    generator = torch.Generator().manual_seed(0)
    drawn = (
        torch.randn(_TRIED, len(ones), generator=generator) * torch.logspace(-1, 2, _TRIED)[:, None]
    )
    x = wide(drawn.to(device, dtype))
    if torch.equal(called(x), x):
        return FrozenNorm(wide(ones), centres=False, eps=0.0, scales=False)
    signs = ones.clone()
    signs[1::2] = -1
    shown = called(torch.stack([signs, 0 * signs, ones]))
    named = [getattr(unwrapped(norm), each, None) for each in ("eps", "variance_epsilon")]
    eps = next(
        (float(each) for each in named if each is not None), float(getattr(model.cfg, "eps", 1e-5))
    )
    gamma = (shown[0] - shown[1]) * signs * (1 + eps) ** 0.5
    centres = bool((shown[2] - shown[1]).abs().max() < 1e-2 * gamma.abs().max())
    made = FrozenNorm(gamma, centres, eps)
    less = x - x.mean(-1, keepdim=True) if centres else x
    off = called(x) - shown[1] - gamma * less / made.scale(x)[:, None]
    rounding = _FINE if dtype in (torch.float32, torch.float64) else _COARSE
    if not float(off.norm()) < rounding * float(called(x).norm()):
        raise ModelError(
            f"{model.cfg.model_name}: {name} is not a norm of the form γ · x / σ, so the contribution of a part of "
            f"its input is undefined"
        )
    return made


@dataclass(frozen=True)
class Unembedding:
    """``logit = f ⟨norm(x), W_U⟩ + b_U``, then ``cap · tanh(logit / cap)`` in a model that caps its logits."""

    w_u: Float[Tensor, "d_model d_vocab"]
    mean: Float[Tensor, " d_model"]  # of W_U over the vocabulary, which the softmax ignores
    norm: FrozenNorm  # the final one
    factor: float = 1.0
    cap: float | None = None

    def direction(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """``f γ · (W_U[:, token] − mean over the vocabulary)``, minus its own mean if the norm centres."""
        there = tokens.to(self.w_u.device)  # where W_U lies, with the final norm
        return self.norm.toward(self.factor * (wide(self.w_u.T[there]) - self.mean)).to(
            tokens.device
        )

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
    with weights_here(getattr(model, "unembed", None)):
        try:
            norm, w_u = getattr(model, "ln_final", None), getattr(model, "W_U", None)
        except Exception as error:  # TransformerLens refuses a quantised W_U
            raise ModelError(f"{model.cfg.model_name}: W_U cannot be read ({error})") from None
    if norm is None or w_u is None:
        raise ModelError(
            f"{model.cfg.model_name} has no ln_final or no W_U, so contributions to its logits are unknown"
        )
    found = frozen_norm(model, norm, "its final norm")
    factor, w_u = particulars_of(model).logit_factor, w_u.detach()
    config = config_of(model)  # of a bridge; a HookedTransformer has its cap in cfg
    source, name = (
        (model.cfg, "output_logits_soft_cap")
        if config is None
        else (config, "final_logit_softcapping")
    )
    cap = getattr(source, name, None) or 0.0
    norm, scale = (
        replace(found, gamma=found.gamma.to(w_u.device)),
        1.0 if factor is None else float(factor(config)),
    )
    made = Unembedding(w_u, wide(w_u).mean(1), norm, scale, float(cap) if cap > 0 else None)
    _check_direct(model, made)
    return made


def _check_direct(model: HookedModel, reads: Unembedding) -> None:
    """Refuse a model whose logits, before any cap, do not follow from the final residual stream (a few tokens)."""
    name = str(model.cfg.model_name)
    if why := limit_of(model, "residual"):
        raise ModelError(f"{name}: {why}; so updates do not reach its logits unchanged")
    last = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    tokens = torch.arange(5, 13, device=device_of(model))[None]
    shown, seen = logits_and_values(model, tokens, [last])
    logits, stream = (wide(each).to(tokens.device) for each in (shown[0], seen[last]))
    logits = reads.uncapped(logits)
    got = (reads.direction(tokens)[0] @ stream[0].T / reads.scale(stream)[0]).T
    expected = (logits - logits.mean(-1, keepdim=True))[:, tokens[0]]
    off = (got - expected) - (got - expected).mean(0)  # a bias adds the same at every token
    rounding = 0.02 if next(model.parameters()).dtype in (torch.float32, torch.float64) else 0.15
    if not float(off.norm()) <= rounding * float((expected - expected.mean(0)).norm()):
        raise ModelError(
            f"the logits of {name} are not W_U · norm(residual stream), even with a factor or cap from its "
            f"configuration, so a head's contribution to them is unknown"
        )
