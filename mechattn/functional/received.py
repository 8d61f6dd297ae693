"""The attention that keys and segments receive from later queries; value norms and massive
activations, for attention sinks."""

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
CountOfKey = Float[Tensor, "batch key"]  # a number of queries for each key
Members = Bool[Tensor, "batch segment key"]  # the keys of each segment
PerSegment = Float[Tensor, "batch head segment"]
OfSequence = Float[Tensor, " batch"]


def column_sums(pattern: Pattern, counted: Counted) -> PerKey:
    """The sum of the attention that each key gets from the counted queries, its own included.

    ``sums[k] = Σ_q counted[q] · A[q, k]``. The sums of several blocks of rows can be added. No mask
    is needed, because A is 0 for a key that a query cannot see.

    Args:
        pattern: Attention probabilities of a block of rows.
        counted: Which of these rows count.

    Returns:
        Probability masses; they may exceed 1.
    """
    # As a product with one row of weights per sequence.
    weights = counted[:, None, None, :].to(pattern.dtype)
    sums = weights @ pattern
    return sums.squeeze(-2)


def self_attention(pattern: Pattern, first_query: int = 0, first_key: int = 0) -> PerQuery:
    """The attention of each query to its own key, ``A[q, q]``.

    Args:
        pattern: Attention probabilities of a block of rows.
        first_query: The position of its first row.
        first_key: The position of its first key.

    Returns:
        A probability for each row, as a view of the pattern.
    """
    return pattern.diagonal(first_query - first_key, -2, -1)


def visible_counts(
    marked: Marked, window: int | None = None, edge_mask: EdgeMask | None = None
) -> Float[Tensor, "batch query"]:
    """The number of marked keys that each query sees, its own included.

    Args:
        marked: The keys that are counted.
        window: How many keys a query sees, including its own; None for all.
        edge_mask: The edges that are cut; None for none.

    Returns:
        Numbers of keys, as float64.
    """
    counts = marked.double().cumsum(-1)
    if window is not None and window < marked.shape[-1]:
        counts[:, window:] -= counts[:, :-window].clone()
    if edge_mask is None:
        return counts

    # A blind query does not see the hidden keys, except its own.
    hidden_keys = marked & edge_mask.keys
    hidden_counts = visible_counts(hidden_keys, window) - hidden_keys.double()
    return counts - edge_mask.queries * hidden_counts


def seeing_queries(
    counted: Counted,
    window: int | None = None,
    include_self: bool = False,
    edge_mask: EdgeMask | None = None,
) -> CountOfKey:
    """The number of counted queries that see each key, the denominator of received attention.

    Args:
        counted: The queries that count.
        window: How many keys a query sees, including its own; None for all.
        include_self: Whether a key's own query counts.
        edge_mask: The edges that are cut; None for none.

    Returns:
        Numbers of queries, as float32; 0 for a key that no counted query sees.
    """
    counts = _seeing_without_cuts(counted, window, include_self)
    if edge_mask is not None:
        # A hidden key is seen by queries that are not blind, and by its own query.
        sighted_queries = counted & ~edge_mask.queries
        sighted_counts = _seeing_without_cuts(sighted_queries, window, include_self)
        own_query = counted & edge_mask.queries & include_self
        counts = torch.where(edge_mask.keys, sighted_counts + own_query, counts)
    return counts.float()


def received_attention(sums: PerKey, query_counts: CountOfKey) -> PerKey:
    """The mean attention that each key receives from the counted queries after it.

    ``received[k] = mean of A[q, k] over counted q > k that can see k``

    Args:
        sums: Attention of each key, summed over the counted queries after it.
        query_counts: The number of these queries, see :func:`seeing_queries`.

    Returns:
        Means; NaN for a key that no counted query sees.

    Source: "Average attention weight" in arXiv:2510.01032, section 2.
    """
    # A sum over no queries may differ from 0 by rounding, so it is divided by NaN rather than 0.
    divisor = torch.where(query_counts > 0, query_counts, torch.nan)
    return sums / divisor[:, None]


def segment_mean(quantity: PerKey, member: Members) -> PerSegment:
    """The mean of a quantity over the keys of each segment, leaving out keys where it is NaN.

    Args:
        quantity: A number for each key.
        member: The keys of each segment.

    Returns:
        Means in the quantity's unit; NaN for a segment in which every key is left out.
    """
    member_weights = member.to(quantity.dtype).mT
    is_defined = (~quantity.isnan()).to(quantity.dtype)

    sums = quantity.nan_to_num() @ member_weights
    counts = is_defined @ member_weights
    return sums / counts


def segment_means(quantities: Mapping[str, PerKey], member: Members) -> dict[str, PerSegment]:
    """:func:`segment_mean` of several quantities, computed together to save time.

    Args:
        quantities: Quantities for each key, by name; all of the same shape.
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
    """Add the attention that each key gets from the near queries of a block, its own included.

    A query is near if it is less than ``gap`` positions later. After all blocks,
    ``near[k] = Σ_{k ≤ q < k + gap} counted[q] · A[q, k]``; :func:`column_sums` minus this is the
    attention from further away.

    Args:
        near: The sums of the block's keys so far; changed in place. It is a view of the sums of all
            keys, from ``first_key`` on.
        pattern: Attention probabilities of a block of rows.
        counted: Which of these rows count.
        first_query: The position of the block's first row.
        first_key: The position of its first key.
        gap: The smallest distance that is not near, in positions.
    """
    for back in range(gap):
        offset = first_query - first_key - back  # the first row's key is in this column
        diagonal = pattern.diagonal(offset, -2, -1)

        # The diagonal lacks the first rows if their keys come before the block's, and the first
        # columns if no row is ``back`` positions after them.
        first_row = max(0, -offset)
        rows = first_row + torch.arange(diagonal.shape[-1], device=pattern.device)
        first_column = max(0, offset)
        columns = slice(first_column, first_column + len(rows))

        weights = counted[:, None, rows].to(pattern.dtype)
        near[..., columns] += diagonal * weights


def value_norms(
    v: Float[Tensor, "batch kv_head key d_head"], factor: Float[Tensor, "head rank d_head"]
) -> tuple[PerKey, PerKey]:
    """The norm of each key's value, ``‖v[k]‖``, and of what a head writes of it, ``‖v[k] W_O[h]‖``.

    Args:
        v: The value of each key.
        factor: ``output_factor(W_O)`` of each query head.

    Returns:
        For each head, the norms of the values that it reads, and of what it would write if it
        attended to this key alone.
    """
    heads = len(factor)
    kv_heads = v.shape[1]
    values = v.to(factor.dtype)

    # The factors of heads that share a value are put side by side, for one product.
    factor_of_group = rearrange(
        factor,
        "(kv_head group) rank d_head -> kv_head d_head (group rank)",
        kv_head=kv_heads,
    )
    written = rearrange(
        values @ factor_of_group,
        "batch kv_head key (group rank) -> batch (kv_head group) key rank",
        group=heads // kv_heads,
    )

    value_norm = for_each_head(values.norm(dim=-1), heads)
    return value_norm, written.norm(dim=-1)


def massive(
    stream: Stream, real: Marked, size_bound: float, ratio_bound: float
) -> dict[str, OfSequence]:
    """Massive activations: ``|h| > size_bound`` and ``|h| > ratio_bound · median |h|``.

    Args:
        stream: The residual stream h after a layer.
        real: Which positions are tokens, and not padding.
        size_bound: The absolute bound.
        ratio_bound: The bound relative to the median over the tokens of the sequence.

    Returns:
        For each sequence, "massive_count" is the number of massive entries, "massive_ratio" the
        largest ``|h|`` divided by the median, and "massive_position" the position of its token.

    Source: Sun et al., "Massive Activations in Large Language Models", arXiv:2402.17762.
    """
    sizes = stream.abs().float()
    median = _medians(sizes, real)
    bound = (ratio_bound * median).clamp(min=size_bound)

    # Padding is neither the largest nor massive.
    is_padding = ~real[:, :, None]
    largest_of_token = sizes.masked_fill(is_padding, -1.0).amax(-1)
    is_massive = (sizes > bound[:, None, None]).masked_fill(is_padding, False)
    count = is_massive.sum((1, 2))

    return {
        "massive_count": count.float(),
        "massive_ratio": largest_of_token.amax(-1) / median,
        "massive_position": largest_of_token.argmax(-1).float(),
    }


def _seeing_without_cuts(counted: Counted, window: int | None, include_self: bool) -> CountOfKey:
    """The number of counted queries that see each key if no edges are cut, as float64."""
    length = counted.shape[-1]

    # The number of counted queries from each position on, which is 0 beyond the end.
    reversed_sums = counted.double().flip(-1).cumsum(-1)
    counts_from = torch.nn.functional.pad(reversed_sums.flip(-1), (0, length + 1))

    # Key k is seen by the queries from k + first to k + end − 1.
    first = 0 if include_self else 1
    end = length if window is None else min(window, length)
    return counts_from[:, first : first + length] - counts_from[:, end : end + length]


def _medians(sizes: Stream, real: Marked) -> OfSequence:
    """The median of each sequence's entries, the lower of the two in the middle."""
    if sizes.device.type != "cpu":
        # Indexing with ``real`` would wait for the device.
        nan_at_padding = sizes.masked_fill(~real[:, :, None], torch.nan)
        return nan_at_padding.flatten(1).nanmedian(-1).values

    # The same as torch.median, which takes six times as long on a CPU.
    medians = []
    for sizes_of_sequence, is_real in zip(sizes, real, strict=True):
        entries = sizes_of_sequence[is_real].flatten().numpy()
        middle = (entries.size - 1) // 2
        medians.append(np.partition(entries, middle)[middle])
    return sizes.new_tensor(np.array(medians))
