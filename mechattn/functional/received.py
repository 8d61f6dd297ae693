"""Received attention: how much attention a key, or a segment of keys, gets from the queries after it."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mechattn.functional.rows import EdgeMask


def visible_keys(
    queries: Int[Tensor, " query"], keys: int, window: int | None = None, include_self: bool = True
) -> Bool[Tensor, "query key"]:
    """Which keys each query can see: the keys not after it and, in a windowed layer, the last ``window`` of these."""
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


def self_attention(
    pattern: Float[Tensor, "batch head query key"], first_query: int = 0, first_key: int = 0
) -> Float[Tensor, "batch head query"]:
    """``A[q, q]`` of each query; a view. The pattern's first row and first key are at these positions."""
    return pattern.diagonal(first_query - first_key, -2, -1)


def _sums_over_seeing(
    weight: Shaped[Tensor, "batch query"], window: int | None, include_self: bool
) -> Float[Tensor, "batch key"]:
    """For each key the sum of the weights of the queries that can see it, from one cumulative sum."""
    length = weight.shape[-1]
    after = torch.nn.functional.pad(weight.double().flip(-1).cumsum(-1).flip(-1), (0, length + 1))
    first = 0 if include_self else 1
    last = length if window is None else min(max(window, first), length)
    return after[:, first : first + length] - after[:, last : last + length]


def visible_counts(
    marked: Bool[Tensor, "batch pos"], window: int | None = None, edge_mask: EdgeMask | None = None
) -> Float[Tensor, "batch query"]:
    """The number of marked keys that each query sees, including its own position."""
    seen = marked.double().cumsum(-1)
    if window is not None and window < marked.shape[-1]:
        seen[:, window:] -= seen[:, :-window].clone()
    if edge_mask is None:
        return seen
    lost = marked & edge_mask.keys
    return seen - edge_mask.queries * (visible_counts(lost, window) - lost.double())


def seeing_queries(
    counted: Bool[Tensor, "batch query"],
    window: int | None = None,
    include_self: bool = False,
    edge_mask: EdgeMask | None = None,
) -> Float[Tensor, "batch key"]:
    """The number of counted queries that can see each key: the denominator of :func:`received_attention`."""
    sums = _sums_over_seeing(counted.double(), window, include_self)
    if edge_mask is not None:  # blind queries don't see these keys; other queries, and each token itself, still do
        others = _sums_over_seeing(counted & ~edge_mask.queries, window, include_self)
        own = counted & edge_mask.queries & include_self
        sums = torch.where(edge_mask.keys, others + own, sums)
    return sums.round().float()


def received_attention(
    sums: Float[Tensor, "batch head key"], queries: Float[Tensor, "batch key"]
) -> Float[Tensor, "batch head key"]:
    """Mean attention that each key receives from the counted queries after it.

    ``received[k] = mean of A[q, k] over counted q > k that can see k``

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
    return columns @ member.to(columns.dtype).mT


def segment_mean(
    received: Float[Tensor, "batch head key"], member: Bool[Tensor, "batch segment key"]
) -> Float[Tensor, "batch head segment"]:
    """Mean of a per-key quantity over the keys of each segment, keys with NaN left out; NaN for an empty segment."""
    segments = member.to(received.dtype).mT
    known = ~received.isnan()
    return (received.nan_to_num() @ segments) / (known.to(received.dtype) @ segments)
