"""Received attention of keys and segments, from the queries after them; attention sinks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from mechattn.functional.attention import EdgeMask, Marked, Pattern, PerQuery, Stream, for_each_head

PerKey = Float[Tensor, "batch head key"]
Counted = Bool[Tensor, "batch query"]  # the queries that count
CountOfKey = Float[Tensor, "batch key"]  # of queries
Members = Bool[Tensor, "batch segment key"]  # the keys of each segment
PerSegment = Float[Tensor, "batch head segment"]
OfSequence = Float[Tensor, " batch"]


def column_sums(pattern: Pattern, counted: Counted) -> PerKey:
    """Attention that each key gets from the counted queries, summed over those queries, its own
    included.

    ``sums[k] = Σ_q counted[q] · A[q, k]``, a probability mass. Additive over blocks of query rows.
    A key that a query cannot see has A = 0, so causality and windows need no mask here.

    Args:
        pattern: Attention probabilities of a block of rows.
        counted: Which of these rows count.

    Returns:
        Probability mass per key; it may exceed 1.
    """
    # One row of weights for each head, so the sum is a product.
    weights = counted[:, None, None, :].to(pattern.dtype)
    sums = weights @ pattern
    return sums.squeeze(-2)


def self_attention(pattern: Pattern, first_query: int = 0, first_key: int = 0) -> PerQuery:
    """``A[q, q]`` of each query; a view. The pattern's first row and first key are at these
    positions.

    Args:
        pattern: Attention probabilities of a block of rows.
        first_query: The position of its first row.
        first_key: The position of its first key.

    Returns:
        Probabilities, one for each row.
    """
    return pattern.diagonal(first_query - first_key, -2, -1)


def visible_counts(
    marked: Marked, window: int | None = None, edge_mask: EdgeMask | None = None
) -> Float[Tensor, "batch query"]:
    """The number of marked keys that each query sees, including its own position.

    Args:
        marked: The keys that are counted.
        window: How many keys a query sees, including its own; None for all.
        edge_mask: Edges that are cut.

    Returns:
        Numbers of keys, as float64.
    """
    count = marked.double().cumsum(-1)
    if window is not None and window < marked.shape[-1]:
        count[:, window:] -= count[:, :-window].clone()
    if edge_mask is None:
        return count

    # A blind query loses the masked keys that it would see, but not itself.
    lost = marked & edge_mask.keys
    lost_besides_itself = visible_counts(lost, window) - lost.double()
    return count - edge_mask.queries * lost_besides_itself


def seeing_queries(
    counted: Counted,
    window: int | None = None,
    include_self: bool = False,
    edge_mask: EdgeMask | None = None,
) -> CountOfKey:
    """The number of counted queries that can see each key: the denominator of
    :func:`received_attention`.

    Args:
        counted: The queries that count.
        window: How many keys a query sees, including its own; None for all.
        include_self: Whether a key's own query counts.
        edge_mask: Edges that are cut.

    Returns:
        Numbers of queries, as float32; 0 for a key that no counted query sees.
    """
    count = _seeing_without_cuts(counted, window, include_self)
    if edge_mask is not None:
        # Blind queries don't see these keys; other queries, and each token itself, still do.
        others = _seeing_without_cuts(counted & ~edge_mask.queries, window, include_self)
        own = counted & edge_mask.queries & include_self
        count = torch.where(edge_mask.keys, others + own, count)
    return count.float()


def _seeing_without_cuts(counted: Counted, window: int | None, include_self: bool) -> CountOfKey:
    """For each key the number of counted queries that can see it, whatever edges are cut, from one
    cumulative sum.

    Args:
        counted: The queries that count.
        window: How many keys a query sees, including its own; None for all.
        include_self: Whether a key's own query counts.

    Returns:
        Numbers of queries, as float64.
    """
    length = counted.shape[-1]

    # The number of counted queries from each position on; beyond the end there are none.
    from_last = counted.double().flip(-1)
    counts_from = from_last.cumsum(-1).flip(-1)
    counts_from = torch.nn.functional.pad(counts_from, (0, length + 1))

    # Of key k, the first query that sees it is k + first, and the first that doesn't k + end.
    first = 0 if include_self else 1
    end = length
    if window is not None:
        end = min(max(window, first), length)

    from_first = counts_from[:, first : first + length]
    from_end = counts_from[:, end : end + length]
    return from_first - from_end


def received_attention(sums: PerKey, query_counts: CountOfKey) -> PerKey:
    """Mean attention that each key receives from the counted queries after it.

    ``received[k] = mean of A[q, k] over counted q > k that can see k``

    Args:
        sums: Attention of each key, summed over the counted queries after it.
        query_counts: The number of these queries, see :func:`seeing_queries`.

    Returns:
        Probabilities; NaN for a key that no counted query sees.

    Source: "Average attention weight" in arXiv:2510.01032, section 2.
    """
    # Divided by NaN, because a sum over no queries is no measurement, even if rounding left some.
    divisor = torch.where(query_counts > 0, query_counts, torch.nan)
    return sums / divisor[:, None]


def segment_mean(received: PerKey, member: Members) -> PerSegment:
    """Mean of a per-key quantity over the keys of each segment, keys with NaN left out; NaN for an
    empty segment.

    Args:
        received: A quantity of each key, NaN where it has none.
        member: The keys of each segment.

    Returns:
        Means, in the quantity's unit.
    """
    segments = member.to(received.dtype).mT
    counted = (~received.isnan()).to(received.dtype)

    sums = received.nan_to_num() @ segments
    counts = counted @ segments
    return sums / counts


def segment_means(quantities: Mapping[str, PerKey], member: Members) -> dict[str, PerSegment]:
    """:func:`segment_mean` of several quantities in one product, which costs as much as one of
    them.

    Args:
        quantities: Quantities of each key, by name; all of the same shape.
        member: The keys of each segment.

    Returns:
        The means by the same names.
    """
    tensors = list(quantities.values())
    heads = tensors[0].shape[1]
    stacked = torch.cat(tensors, 1)
    means = segment_mean(stacked, member).split(heads, 1)
    return dict(zip(quantities, means, strict=True))


def add_near_sums(
    near: PerKey, pattern: Pattern, counted: Counted, first_query: int, first_key: int, gap: int
) -> None:
    """Add the attention that each key of a block gets from the counted queries less than ``gap``
    positions later, its own included.

    ``near[k] = Σ_{k ≤ q < k + gap} counted[q] · A[q, k]`` after all blocks of query rows;
    :func:`column_sums` minus this is the attention from further away.

    Args:
        near: The sums so far, over all keys; changed in place.
        pattern: Attention probabilities of a block of rows.
        counted: The queries that count, of the whole sequence.
        first_query: The position of the block's first row.
        first_key: The position of its first key.
        gap: The first distance that is not near, in positions.
    """
    for back in range(gap):
        offset = first_query - first_key - back  # the key of the first row, so far back
        diagonal = pattern.diagonal(offset, -2, -1)

        # The diagonal leaves out the first rows if their keys are before the block, and the first
        # keys if no row lies so near to them.
        first_row = max(0, -offset)
        rows = first_row + torch.arange(diagonal.shape[-1], device=pattern.device)
        start = max(0, offset)
        keys = slice(start, start + len(rows))

        weights = counted[:, None, rows].to(pattern.dtype)
        near[..., keys] += diagonal * weights


def value_norms(
    v: Float[Tensor, "batch kv_head key d_head"], factor: Float[Tensor, "head rank d_head"]
) -> tuple[PerKey, PerKey]:
    """``‖v[k]‖`` and ``‖v[k] W_O‖`` for every query head, the latter from
    ``output_factor(W_O)``.

    Args:
        v: Values of each key.
        factor: The factor of each head's ``W_O``.

    Returns:
        The norm of the value, and the norm of what the head would write of it alone.
    """
    heads = len(factor)
    kv_heads = v.shape[1]
    v = v.to(factor.dtype)

    # The factors of the heads that share a value, side by side: one product for all of them.
    factor_of_group = rearrange(
        factor,
        "(kv_head group) rank d_head -> kv_head d_head (group rank)",
        kv_head=kv_heads,
    )
    written = rearrange(
        v @ factor_of_group,
        "batch kv_head key (group rank) -> batch (kv_head group) key rank",
        group=heads // kv_heads,
    )

    value_norm = for_each_head(v.norm(dim=-1), heads)
    return value_norm, written.norm(dim=-1)


def massive(stream: Stream, real: Marked, least: float, ratio: float) -> dict[str, OfSequence]:
    """Massive activations: entries with ``|h| > least`` and ``|h| > ratio · median |h|`` of their
    sequence.

    Args:
        stream: The residual stream after a layer.
        real: Which positions are tokens, and not padding.
        least: The absolute bound.
        ratio: The bound relative to the median.

    Returns:
        For each sequence the number of massive entries, the largest entry divided by the median,
        and the position of the token that has it.

    Source: Sun et al., "Massive Activations in Large Language Models", arXiv:2402.17762.
    """
    size = stream.abs().float()
    median = _medians(size, real)
    bound = (ratio * median).clamp(min=least)

    # Padding never is the largest, and never counts.
    is_padding = ~real[:, :, None]
    largest = size.masked_fill(is_padding, -1.0).amax(-1)
    above_bound = (size > bound[:, None, None]).masked_fill(is_padding, False)
    count = above_bound.sum((1, 2))

    return {
        "massive_count": count.float(),
        "massive_ratio": largest.amax(-1) / median,
        "massive_position": largest.argmax(-1).float(),
    }


def _medians(size: Stream, real: Marked) -> OfSequence:
    """The median of each sequence's entries, the lower of the two in the middle."""
    if size.device.type != "cpu":  # without waiting for it
        nan_at_padding = size.masked_fill(~real[:, :, None], torch.nan)
        return nan_at_padding.flatten(1).nanmedian(-1).values

    # As torch.median, which takes six times as long on a CPU.
    medians = []
    for row, is_real in zip(size, real, strict=True):
        entries = row[is_real].flatten().numpy()
        middle = (entries.size - 1) // 2
        medians.append(np.partition(entries, middle)[middle])
    return size.new_tensor(np.array(medians))
