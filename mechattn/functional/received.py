"""Received attention: how much attention a key, or a segment of keys, gets from the queries after it."""

from __future__ import annotations

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor


def visible_keys(
    queries: Int[Tensor, " query"], keys: int, window: int | None = None, include_self: bool = True
) -> Bool[Tensor, "query key"]:
    """Which keys each query may look at: the keys not after it and, in a windowed layer, the last ``window`` of these.

    Args:
        queries: Positions of the queries.
        keys: Number of key positions.
        window: Width of a sliding window, the query's own position included; None for full attention.
        include_self: Whether the query's own key counts as visible.
    """
    distance = queries[:, None] - torch.arange(keys, device=queries.device)
    visible = distance >= (0 if include_self else 1)
    return visible if window is None else visible & (distance < window)


def column_sums(
    pattern: Float[Tensor, "batch head query key"], counted: Bool[Tensor, "batch query"]
) -> Float[Tensor, "batch head key"]:
    """Attention that each key gets from the counted queries, summed over those queries, its own included.

    ``sums[k] = Σ_q counted[q] · A[q, k]``, a probability mass. Additive over blocks of query rows. A key that a query
    cannot see has A = 0, so causality and windows need no mask here.
    """
    return (counted[:, None, None, :].to(pattern.dtype) @ pattern).squeeze(-2)


def self_sums(
    pattern: Float[Tensor, "batch head query key"],
    counted: Bool[Tensor, "batch query"],
    queries: Int[Tensor, " query"],
) -> Float[Tensor, "batch head key"]:
    """The part of :func:`column_sums` that the keys get from the query at their own position."""
    rows = torch.arange(len(queries), device=queries.device)
    own = pattern[:, :, rows, queries] * counted[:, None].to(pattern.dtype)
    sums = pattern.new_zeros((pattern.shape[0], pattern.shape[1], pattern.shape[3]))
    return sums.index_copy(-1, queries, own)


def seeing_queries(
    counted: Bool[Tensor, "batch query"], visible: Bool[Tensor, "query key"]
) -> Float[Tensor, "batch key"]:
    """How many counted queries can see each key: the denominator of :func:`received_attention`."""
    return counted.float() @ visible.float()


def received_attention(
    sums: Float[Tensor, "batch head key"], queries: Float[Tensor, "batch key"]
) -> Float[Tensor, "batch head key"]:
    """Mean attention that each key receives from the counted queries after it.

    ``received[k] = mean of A[q, k] over counted q > k that can see k``

    Args:
        sums: What :func:`column_sums` (less :func:`self_sums`) gave over all query rows.
        queries: How many counted queries can see each key.

    Returns:
        Probabilities; NaN for a key that no counted query can see.

    Source:
        "Average attention weight" in arXiv:2510.01032, section 2.
    """
    return torch.where(queries > 0, 1.0, torch.nan)[:, None] * sums / queries.clamp(min=1)[:, None]


def segment_mass(
    columns: Float[Tensor, "batch head key"], member: Bool[Tensor, "batch segment key"]
) -> Float[Tensor, "batch head segment"]:
    """Column sums added up over the keys of each segment.

    ``mass[s] = Σ_{k in s} Σ_q counted[q] · A[q, k]``; a query's own key counts.
    """
    member = member.to(columns.dtype)
    return einsum(columns, member, "batch head key, batch segment key -> batch head segment")


def segment_mean(
    received: Float[Tensor, "batch head key"], member: Bool[Tensor, "batch segment key"]
) -> Float[Tensor, "batch head segment"]:
    """Mean of a per-key quantity over the keys of each segment, keys with NaN left out; NaN for an empty segment."""
    known = ~received.isnan()
    weight = member[:, None] & known[:, :, None]
    weight = weight.to(received.dtype)
    sums = einsum(received.nan_to_num(), weight, "batch head key, batch head segment key -> batch head segment")
    return sums / weight.sum(-1)


def uniform_pattern(queries: Int[Tensor, " query"], keys: int, window: int | None = None) -> Float[Tensor, "query key"]:
    """The pattern of a head that is blind to content: every visible key gets ``1 / number of visible keys``."""
    visible = visible_keys(queries, keys, window).float()
    return visible / visible.sum(-1, keepdim=True)
