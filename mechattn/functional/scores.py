"""Attention scores as a sum of position (ALiBi), bias (shared by all queries) and content."""

from __future__ import annotations

import math

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechattn.functional.rows import Pattern, for_each_head


def alibi_slopes(heads: int) -> Float[Tensor, " head"]:
    """The slope of each head: ``base^(h + 1)``, ``base = 2^(−8 / P)``, for the P heads of the largest power of two.

    The other heads get the odd powers of ``2^(−4 / P)``. Source: Press et al., arXiv:2108.12409, and its code.
    """
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    more = [2 ** (-4 * (2 * h + 1) / power) for h in range(heads - power)]
    return torch.tensor(slopes + more, dtype=torch.float64).float()


def mpt_slopes(heads: int, largest: float = 8.0) -> Float[Tensor, " head"]:
    """The slopes of MPT: those of the next power of two P, ``2^(−largest (h + 1) / P)``, with the odd ones first."""
    power = 2 ** math.ceil(math.log2(heads))
    slopes = 2.0 ** -(torch.arange(1, power + 1, dtype=torch.float64) * largest / power)
    return (slopes if power == heads else torch.cat([slopes[1::2], slopes[::2]])[:heads]).float()


def score_parts(
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    b_q: Float[Tensor, "head d_head"],
    b_k: Float[Tensor, "kv_head d_head"],
    scale: float,
) -> tuple[Pattern, Float[Tensor, "batch head 1 key"], Float[Tensor, "batch head query 1"]]:
    """Content, bias, and the rest, which depends only on the query; they add up to ``scale · q · k``.

    ``content = (q − b_Q)·(k − b_K)``, ``bias = b_Q·(k − b_K)``, ``rest = q·b_K``, each times the scale. The rest drops
    out of the softmax. The split is that of raw weights: folding a LayerNorm changes it.
    """
    keys = for_each_head(k - b_k[:, None], q.shape[1]).contiguous()
    keys = rearrange(keys, "batch head key d_head -> batch head d_head key")
    content = scale * (q - b_q[:, None]) @ keys
    bias = scale * (b_q[None, :, None] @ keys)
    of_each = for_each_head(b_k[None, :, None], q.shape[1])[0, :, 0]
    rest = scale * einsum(q, of_each, "batch head query d_head, head d_head -> batch head query")
    return content, bias, rest[..., None]


def centred(part: Float[Tensor, "#batch head #query key"], visible: Bool[Tensor, "#batch 1 query key"]) -> Pattern:
    """A part minus its mean over the keys that the query sees, which the softmax ignores."""
    part = part.expand(*part.shape[:2], *visible.shape[2:])
    mean = (part * visible).sum(-1, keepdim=True) / visible.sum(-1, keepdim=True).clamp(min=1)
    return part - mean


def ranked_target(
    scores: Pattern, visible: Bool[Tensor, "#batch 1 query key"], rank: int
) -> Int[Tensor, "batch head query"]:
    """The key with the largest score (rank 0), the second largest (1) … of each query [batch head query]."""
    hidden = scores.masked_fill(~visible, -torch.inf)
    if rank == 0:
        return hidden.argmax(-1)
    return hidden.topk(min(rank + 1, hidden.shape[-1]), -1).indices[..., -1]
