"""Attention by distance, and the number of keys with almost as much attention as the strongest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor


def band_edges(bands: int) -> tuple[int, ...]:
    """The first distance of each band, and the end of the last: 0, 1, 2, 4, 8, …."""
    return (0, *(2**n for n in range(bands)))


def band_mass(
    pattern: Float[Tensor, "*batch query key"], bands: int, first_query: int = 0, first_key: int = 0
) -> Float[Tensor, "*batch query {bands}"]:
    """Attention to the token itself, and to the keys t to 2t − 1 positions back, for t = 1, 2, 4, ….

    ``M[q, t] = Σ_{t ≤ q − k < 2t} A[q, k]``.
    """
    queries = first_query + torch.arange(pattern.shape[-2], device=pattern.device)
    edges = torch.tensor(band_edges(bands), device=pattern.device)
    up_to = torch.nn.functional.pad(pattern.cumsum(-1, dtype=_wide(pattern)), (1, 0))
    ends: Int[Tensor, "query edge"] = (queries[:, None] - edges + 1 - first_key).clamp(0, pattern.shape[-1])
    at = up_to.gather(-1, ends.expand(*pattern.shape[:-1], len(edges)))
    return (at[..., :-1] - at[..., 1:]).to(pattern.dtype)


def near_best(
    pattern: Float[Tensor, "*batch query key"], shares: Sequence[float]
) -> Float[Tensor, "*batch query share"]:
    """How many keys get at least this fraction of the best key's attention: ``N = #{k : A[q, k] ≥ share · max A[q]}``.

    In scores these are the keys at most ``g = −log share`` below the best, ``#{k : max s − s[k] ≤ g}``.
    """
    best = pattern.amax(-1, keepdim=True)
    return torch.stack([(pattern >= share * best).sum(-1) for share in shares], -1).to(_wide(pattern))


def _wide(pattern: Tensor) -> torch.dtype:
    """Convert to float32 at least, for sums of many small numbers."""
    return torch.promote_types(pattern.dtype, torch.float32)
