"""A norm with its scale held fixed at each token, which makes it linear, so that contributions add up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechattn.errors import ModelError
from mechattn.model.hooked import HookedModel
from mechattn.model.weights import wide

_TRIED = 4  # vectors
_FINE, _COARSE = 1e-3, 3e-2  # the largest error from rounding, in float32 and in half precision


@dataclass(frozen=True)
class FrozenNorm:
    """``norm(x) = γ · (x − mean) / σ(x) + b``: with σ held fixed, a part Δ of x becomes ``γ · (Δ − mean) / σ(x)``.

    Args:
        gamma: γ, its weight.
        centres: Whether it subtracts the mean (LayerNorm, not RMSNorm).
        eps: The number added to the variance under the root.
        scales: Whether it scales: in a model without norms it is the identity, with σ = 1.
    """

    gamma: Float[Tensor, " d_model"]
    centres: bool
    eps: float
    scales: bool = True

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
    parameter = next(model.parameters())

    def called(x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        return wide(norm(x.to(parameter.dtype)[None])[0])

    ones = torch.ones(int(model.cfg.d_model), device=parameter.device)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(_TRIED, len(ones), generator=generator) * torch.logspace(-1, 2, _TRIED)[:, None]
    x = wide(drawn.to(parameter.device, parameter.dtype))
    if torch.equal(called(x), x):
        return FrozenNorm(wide(ones), centres=False, eps=0.0, scales=False)
    signs = ones.clone()
    signs[1::2] = -1
    shown = called(torch.stack([signs, 0 * signs, ones]))
    eps = _eps(norm, float(getattr(model.cfg, "eps", 1e-5)))
    gamma = (shown[0] - shown[1]) * signs * (1 + eps) ** 0.5
    centres = bool((shown[2] - shown[1]).abs().max() < 1e-2 * gamma.abs().max())
    made = FrozenNorm(gamma, centres, eps)
    less = x - x.mean(-1, keepdim=True) if centres else x
    off = called(x) - shown[1] - gamma * less / made.scale(x)[:, None]
    rounding = _FINE if parameter.dtype in (torch.float32, torch.float64) else _COARSE
    if not float(off.norm()) < rounding * float(called(x).norm()):
        raise ModelError(
            f"{model.cfg.model_name}: {name} is not a norm of the form γ · x / σ, so the contribution of a part of "
            f"its input is undefined"
        )
    return made


def _eps(norm: Any, otherwise: float) -> float:
    """The module's own ε, whatever its name."""
    module = getattr(norm, "original_component", None) or norm
    found = [getattr(module, name, None) for name in ("eps", "variance_epsilon")]
    return next((float(eps) for eps in found if eps is not None), otherwise)
