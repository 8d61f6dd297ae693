"""Scores of attention in parts: content, bias and ALiBi; the keys with the largest scores."""

from __future__ import annotations

import math

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechattn.functional.attention import Pattern, PerHead, for_each_head

VisibleKeys = Bool[Tensor, "#batch 1 query key"]  # which keys each query sees


def alibi_slopes(heads: int, largest: float = 8.0) -> PerHead:
    """The slopes ``2^(−largest r / P)`` for the next power of two P, those of even r = 2, 4 … first
    unless there are P heads.

    For ``largest=8`` they are those of Press et al., arXiv:2108.12409, and of its code: for other
    numbers of heads than a power of two, the slopes of the power before, and then the odd ones of
    the next.

    Args:
        heads: The number of heads of a layer.
        largest: The largest exponent, ``alibi_bias_max`` in the configuration of MPT.

    Returns:
        A slope for each head, positive, in score per position.
    """
    power = 2 ** math.ceil(math.log2(heads))
    # In float64, so that each slope is rounded once.
    ranks = torch.arange(1, power + 1, dtype=torch.float64)
    slopes = (-largest * ranks / power).exp2().float()
    if power == heads:
        return slopes

    even_first = torch.cat([slopes[1::2], slopes[::2]])
    return even_first[:heads]


def score_parts(
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    b_q: Float[Tensor, "head d_head"],
    b_k: Float[Tensor, "kv_head d_head"],
    scale: float,
) -> tuple[Pattern, Float[Tensor, "batch head 1 key"], Float[Tensor, "batch head query 1"]]:
    """Content, bias, and the rest, which depends only on the query; they add up to
    ``scale · q · k``.

    ``content = (q − b_Q)·(k − b_K)``, ``bias = b_Q·(k − b_K)``, ``rest = q·b_K``, each times the
    scale. The rest drops out of the softmax. The split is that of raw weights: folding a LayerNorm
    changes it.

    Args:
        q: Queries, with their bias.
        k: Keys, with their bias; head h reads key-value head ``h // (head / kv_head)``.
        b_q: The bias of the queries, 0 for a model without one.
        b_k: The bias of the keys, 0 for a model without one.
        scale: The factor of the scores.

    Returns:
        Content of each query and key, bias of each key, and rest of each query.
    """
    heads = q.shape[1]
    keys_of_content = k - b_k[:, None]
    keys = for_each_head(keys_of_content, heads).contiguous().mT

    queries_of_content = q - b_q[:, None]
    content = scale * queries_of_content @ keys
    bias = scale * (b_q[None, :, None] @ keys)

    # Each query meets the same key bias at every key.
    key_biases = b_k.repeat_interleave(heads // len(b_k), 0)
    rest = einsum(q, key_biases, "batch head query d_head, head d_head -> batch head query")
    return content, bias, scale * rest[..., None]


def centred(part: Float[Tensor, "#batch head #query key"], visible: VisibleKeys) -> Pattern:
    """A part minus its mean over the keys that the query sees, which the softmax ignores.

    Args:
        part: A part of the scores, see :func:`score_parts`.
        visible: Which keys each query sees.

    Returns:
        Scores whose mean over each query's visible keys is 0.
    """
    # A part may be the same for all queries; its mean still is one of each query.
    count = visible.sum(-1, keepdim=True).clamp(min=1)
    total = (part * visible).sum(-1, keepdim=True)
    mean = total / count
    return part - mean


def ranked_target(
    scores: Pattern, visible: VisibleKeys, rank: int
) -> Int[Tensor, "batch head query"]:
    """The key of each query with the largest score (rank 0), the second largest (1) …

    Args:
        scores: The scores of each query.
        visible: Which keys each query sees.
        rank: How many visible keys have a larger score.

    Returns:
        Indices of keys.
    """
    seen_scores = scores.masked_fill(~visible, -torch.inf)
    if rank == 0:
        return seen_scores.argmax(-1)

    # With fewer keys than that, the smallest of them.
    count = min(rank + 1, scores.shape[-1])
    largest = seen_scores.topk(count, -1)
    return largest.indices[..., -1]
