"""Received attention: how much a key, or a segment of keys, gets from the queries after it; attention sinks."""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mechattn.functional.attention import EdgeMask, Marked, Pattern, for_each_head
from mechattn.functional.focus import looking_back

PerKey = Float[Tensor, "batch head key"]
Counted = Bool[Tensor, "batch query"]


def visible_keys(
    queries: Int[Tensor, " query"], keys: int, window: int | None = None
) -> Bool[Tensor, "query key"]:
    """Which keys each query can see: the keys not after it and, in a windowed layer, the last ``window`` of these."""
    distance = queries[:, None] - torch.arange(keys, device=queries.device)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def column_sums(pattern: Pattern, counted: Counted) -> PerKey:
    """Attention that each key gets from the counted queries, summed over those queries, its own included.

    ``sums[k] = Σ_q counted[q] · A[q, k]``, a probability mass. Additive over blocks of query rows. A key that a query
    cannot see has A = 0, so causality and windows need no mask here.
    """
    return (counted[:, None, None, :].to(pattern.dtype) @ pattern).squeeze(-2)


def self_attention(
    pattern: Pattern, first_query: int = 0, first_key: int = 0
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
    marked: Marked, window: int | None = None, edge_mask: EdgeMask | None = None
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
    counted: Counted,
    window: int | None = None,
    include_self: bool = False,
    edge_mask: EdgeMask | None = None,
) -> Float[Tensor, "batch key"]:
    """The number of counted queries that can see each key: the denominator of :func:`received_attention`."""
    sums = _sums_over_seeing(counted.double(), window, include_self)
    if (
        edge_mask is not None
    ):  # blind queries don't see these keys; other queries, and each token itself, still do
        others = _sums_over_seeing(counted & ~edge_mask.queries, window, include_self)
        own = counted & edge_mask.queries & include_self
        sums = torch.where(edge_mask.keys, others + own, sums)
    return sums.round().float()


def received_attention(sums: PerKey, queries: Float[Tensor, "batch key"]) -> PerKey:
    """Mean attention that each key receives from the counted queries after it.

    ``received[k] = mean of A[q, k] over counted q > k that can see k``

    Source: "Average attention weight" in arXiv:2510.01032, section 2.
    """
    return torch.where(queries > 0, 1.0, torch.nan)[:, None] * sums / queries.clamp(min=1)[:, None]


def segment_mean(
    received: PerKey, member: Bool[Tensor, "batch segment key"]
) -> Float[Tensor, "batch head segment"]:
    """Mean of a per-key quantity over the keys of each segment, keys with NaN left out; NaN for an empty segment."""
    segments = member.to(received.dtype).mT
    known = ~received.isnan()
    return (received.nan_to_num() @ segments) / (known.to(received.dtype) @ segments)


def near_sums(
    pattern: Pattern, counted: Counted, gap: int, first_query: int = 0, first_key: int = 0
) -> PerKey:
    """Attention that each key gets from the counted queries less than ``gap`` positions later, its own included.

    ``near[k] = Σ_{k ≤ q < k + gap} counted[q] · A[q, k]``; :func:`column_sums` minus this is the attention from further
    away.
    """
    sums = pattern.new_zeros((*pattern.shape[:2], pattern.shape[3]))
    weight = counted[:, None].to(pattern.dtype)
    for back in range(min(gap, first_query - first_key + pattern.shape[2])):
        seen, keys = looking_back(pattern, back, first_query, first_key)
        count = keys.stop - keys.start
        sums[..., keys] += (seen * weight)[..., seen.shape[-1] - count :]
    return sums


def near_queries(
    real: Marked, gap: int, window: int | None = None, edge_mask: EdgeMask | None = None
) -> Float[Tensor, "batch key"]:
    """The number of real queries less than ``gap`` positions later that see each key, its own included."""
    length = real.shape[1]
    near = torch.zeros(real.shape, device=real.device)
    for back in range(min(gap, length, window or length)):
        sees = real[:, back:].clone()
        if edge_mask is not None and back:
            sees &= ~(edge_mask.queries[:, back:] & edge_mask.keys[:, : length - back])
        near[:, : length - back] += sees
    return near


def value_norms(
    v: Float[Tensor, "batch kv_head key d_head"], factor: Float[Tensor, "head rank d_head"]
) -> tuple[PerKey, PerKey]:
    """``‖v[k]‖`` and ``‖v[k] W_O‖`` for every query head, the latter from ``output_factor(W_O)``."""
    every = for_each_head(v.to(factor.dtype), len(factor))
    written = every @ rearrange(factor, "head rank d_head -> head d_head rank")
    return every.norm(dim=-1), written.norm(dim=-1)


def kurtosis_over_keys(
    value: PerKey, counted: Bool[Tensor, "batch key"]
) -> Float[Tensor, "batch head"]:
    """``mean (x − mean)⁴ / variance²`` over the counted keys: 3 if normal, large where a few keys stand out.

    NaN if all are equal.
    """
    weight = counted[:, None].double()
    n = weight.sum(-1)
    away = (value.double() - ((value.double() * weight).sum(-1) / n)[..., None]) * weight
    variance = away.square().sum(-1) / n
    return torch.where(variance > 0, away.pow(4).sum(-1) / n / variance.square(), torch.nan).float()


def massive(
    stream: Float[Tensor, "batch pos d_model"], real: Marked, least: float, ratio: float
) -> dict[str, Float[Tensor, " batch"]]:
    """Massive activations: entries with ``|h| > least`` and ``|h| > ratio · median |h|`` of their sequence.

    Source: Sun et al., "Massive Activations in Large Language Models", arXiv:2402.17762.
    """
    count, top, at = [], [], []
    for row, there in zip(stream, real, strict=True):
        size = row[there].abs().float()
        median = size.median()
        bound = torch.maximum(ratio * median, median.new_tensor(least))
        count.append((size > bound).sum().float())
        top.append(size.max() / median)
        at.append(size.amax(-1).argmax().float())
    return {
        "massive_count": torch.stack(count),
        "massive_ratio": torch.stack(top),
        "massive_position": torch.stack(at),
    }
