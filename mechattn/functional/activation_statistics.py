"""Statistics of MLP activations over the channels of each token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor


def near_zero_share(x: Float[Tensor, "*token channel"], threshold: float) -> Float[Tensor, "*token"]:
    """The share of channels with ``|x| ≤ threshold``."""
    return (x.abs() <= threshold).float().mean(-1)


def saturated_share(
    x: Float[Tensor, "*token channel"], pre: Float[Tensor, "*token channel"], threshold: float, minimum: float
) -> Float[Tensor, "*token"]:
    """The share of channels with ``|x| ≤ threshold`` and an input left of the nonlinearity's minimum.

    SiLU and GELU are near zero around ``pre = 0`` and far below it, where a channel is switched off. These two
    populations lie on different sides of the minimum.
    """
    return ((x.abs() <= threshold) & (pre < minimum)).float().mean(-1)


def minimum_of(nonlinearity: Callable[[Tensor], Tensor]) -> float:
    """The largest input in [−20, 0] at a nonlinearity's minimum: −1.28 for SiLU, −0.75 for GELU, 0 for ReLU.

    Below −15 for a monotonic nonlinearity, for which nothing counts as saturated.
    """
    grid = torch.linspace(-20, 0, 200_001, dtype=torch.float64)
    values = nonlinearity(grid)
    return float(grid[values == values.min()].max())


def l1_norm(x: Float[Tensor, "*token channel"]) -> Float[Tensor, "*token"]:
    """``Σ |x|``."""
    return x.abs().sum(-1)


def l2_norm(x: Float[Tensor, "*token channel"]) -> Float[Tensor, "*token"]:
    """``√ Σ x²``."""
    return x.norm(dim=-1)


def gini(x: Float[Tensor, "*token channel"]) -> Float[Tensor, "*token"]:
    """The Gini coefficient of ``|x|``: 0 if all channels are equally active, ``1 − 1/n`` if only one is.

    ``G = 2 Σ i·|x|₍ᵢ₎ / (n Σ |x|) − (n + 1) / n`` with ``|x|₍₁₎ ≤ |x|₍₂₎ ≤ …``; NaN where all are 0.
    """
    size = x.abs().sort(-1).values
    n = size.shape[-1]
    rank = torch.arange(1, n + 1, device=x.device, dtype=size.dtype)
    return 2 * (size @ rank) / (n * size.sum(-1)) - (n + 1) / n


def variance(x: Float[Tensor, "*token channel"]) -> Float[Tensor, "*token"]:
    """``mean of (x − mean)²`` over the channels."""
    return x.var(-1, correction=0)


def kurtosis(x: Float[Tensor, "*token channel"]) -> Float[Tensor, "*token"]:
    """``mean of (x − mean)⁴ / variance²``: 3 for a normal distribution, more for heavy tails; NaN for a constant."""
    centred = x - x.mean(-1, keepdim=True)
    return (centred / centred.square().mean(-1, keepdim=True).sqrt()).pow(4).mean(-1)


def counts_between(x: Float[Tensor, "*any"], edges: Float[Tensor, " edge"]) -> Int[Tensor, " bin"]:
    """Counts of entries below the first edge, in each ``[edge, next edge)``, and at or above the last edge."""
    return torch.bincount(torch.bucketize(x.flatten(), edges, right=True), minlength=len(edges) + 1)
