"""Scores of attention in parts: content, bias and ALiBi; the keys with the largest scores."""

from __future__ import annotations

import math

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechattn.functional.attention import Pattern, for_each_head

PerHead = Float[Tensor, " head"]
VisibleKeys = Bool[Tensor, "#batch 1 query key"]  # which keys each query sees


def alibi_slopes(heads: int) -> PerHead:
    """The slope of each head: ``base^(h + 1)``, ``base = 2^(−8 / P)``, for the P heads of the
    largest power of two.

    The other heads get the odd powers of ``2^(−4 / P)``. Source: Press et al., arXiv:2108.12409,
    and its code.
    """
    power = 2 ** int(math.log2(heads))
    exponents = [-8 * (head + 1) / power for head in range(power)]
    exponents += [-4 * (2 * head + 1) / power for head in range(heads - power)]
    return torch.tensor(exponents, dtype=torch.float64).exp2().float()


def mpt_slopes(heads: int, largest: float = 8.0) -> PerHead:
    """The slopes of MPT: those of the next power of two P, ``2^(−largest (h + 1) / P)``, with the
    odd ones first.
    """
    power = 2 ** math.ceil(math.log2(heads))
    ranks = torch.arange(1, power + 1, dtype=torch.float64)
    slopes = (-largest * ranks / power).exp2().float()
    if power == heads:
        return slopes
    return torch.cat([slopes[1::2], slopes[::2]])[:heads]


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
    """
    heads = q.shape[1]
    keys = for_each_head(k - b_k[:, None], heads).contiguous().mT
    content = scale * (q - b_q[:, None]) @ keys
    bias = scale * (b_q[None, :, None] @ keys)

    key_biases = for_each_head(b_k[None, :, None], heads)[0, :, 0]
    rest = einsum(q, key_biases, "batch head query d_head, head d_head -> batch head query")
    return content, bias, scale * rest[..., None]


def centred(part: Float[Tensor, "#batch head #query key"], visible: VisibleKeys) -> Pattern:
    """A part minus its mean over the keys that the query sees, which the softmax ignores."""
    part = part.expand(*part.shape[:2], *visible.shape[2:])
    count = visible.sum(-1, keepdim=True).clamp(min=1)
    mean = (part * visible).sum(-1, keepdim=True) / count
    return part - mean


def ranked_target(
    scores: Pattern, visible: VisibleKeys, rank: int
) -> Int[Tensor, "batch head query"]:
    """The key of each query with the largest score (rank 0), the second largest (1) …"""
    seen_scores = scores.masked_fill(~visible, -torch.inf)
    if rank == 0:
        return seen_scores.argmax(-1)
    count = min(rank + 1, scores.shape[-1])
    return seen_scores.topk(count, -1).indices[..., -1]
