"""How attention is spread over the keys, query by query; for a block of rows as well as for a whole pattern."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def top_two(
    pattern: Float[Tensor, "*batch query key"],
) -> tuple[Float[Tensor, "*batch query"], Float[Tensor, "*batch query"], Int[Tensor, "*batch query"]]:
    """The largest and the second largest probability of each query, and the index of the largest.

    ``p(1), p(2), argmax``; ties by index. With a single key the second is −1, and means nothing. The pattern is changed
    for a moment and put back: two passes of a maximum cost half of a sort.
    """
    first, at = pattern.max(-1)
    where = at.unsqueeze(-1)
    pattern.scatter_(-1, where, -1.0)
    second = pattern.amax(-1)
    pattern.scatter_(-1, where, first.unsqueeze(-1))
    return first, second, at


def entropy(pattern: Float[Tensor, "*batch query key"]) -> Float[Tensor, "*batch query"]:
    """``−Σ_k A[q, k] log A[q, k]``, in nats; a key with no attention adds nothing."""
    return torch.special.entr(pattern).sum(-1)


def mean_distance(
    pattern: Float[Tensor, "*batch query key"], queries: Int[Tensor, " query"], first_key: int = 0
) -> Float[Tensor, "*batch query"]:
    """``Σ_k A[q, k] (q − k)``, in positions: how far back a query looks on average.

    Args:
        pattern: Probabilities; the first key is at position ``first_key``.
        queries: The positions of the rows.
        first_key: The position of the first key.
    """
    keys = first_key + torch.arange(pattern.shape[-1], device=pattern.device)
    return queries * pattern.sum(-1) - pattern @ keys.to(pattern.dtype)


def shift(
    pattern: Float[Tensor, "batch head query key"],
    v: Float[Tensor, "batch kv_head key d_head"],
    member: Bool[Tensor, "batch key"],
) -> Float[Tensor, "batch head query d_head"]:
    """The part of each head's output that comes from the keys of a segment: Σσ in arXiv:2510.01032 for inserted ones.

    ``shift[q] = Σ_{k in segment} A[q, k] v[k]``, before the output projection.

    Args:
        pattern: Probabilities.
        v: Values; head h reads key-value head ``h // (head / kv_head)``.
        member: Which keys belong to the segment.
    """
    batch, heads, queries, keys = pattern.shape
    kept = v.to(pattern.dtype) * member[:, None, :, None]
    grouped = pattern.reshape(batch, v.shape[1], -1, keys)
    return (grouped @ kept).view(batch, heads, queries, -1)
