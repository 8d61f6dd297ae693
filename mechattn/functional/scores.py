"""Parts of attention scores: content, bias and ALiBi; and the keys with the largest scores."""

from __future__ import annotations

import math

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechattn.functional.attention import PerHead, Scores, for_each_head

VisibleKeys = Bool[Tensor, "#batch 1 query key"]  # which keys each query sees


def alibi_slopes(heads: int, largest: float = 8.0) -> PerHead:
    """ALiBi's slopes: ``2^(−largest · rank / power)`` for rank = 1, 2 … power.

    ``power`` is the number of heads, rounded up to a power of two. If the number of heads is not a
    power of two, the slopes of even ranks come first, then those of odd ranks, and the last ones
    are left out. With ``largest=8`` these are the slopes of Press et al., arXiv:2108.12409, and of
    their code.

    Args:
        heads: The number of heads of a layer.
        largest: The largest exponent, ``alibi_bias_max`` in the configuration of MPT.

    Returns:
        A positive slope for each head, in score per position.
    """
    power = 2 ** math.ceil(math.log2(heads))
    # In float64, so that each slope is rounded only once.
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
) -> tuple[Scores, Float[Tensor, "batch head 1 key"], Float[Tensor, "batch head query 1"]]:
    """Split ``scale · q · k`` into content, bias and a rest that depends only on the query.

    ``content = (q − b_Q)·(k − b_K)``, ``bias = b_Q·(k − b_K)``, ``rest = q·b_K``, each times the
    scale. The softmax ignores the rest. The split depends on the weights as they are: folding a
    LayerNorm into them changes it.

    Args:
        q: Queries, with their bias.
        k: Keys, with their bias; head h reads key-value head ``h // (head / kv_head)``.
        b_q: The bias of the queries, 0 for a model without one.
        b_k: The bias of the keys, 0 for a model without one.
        scale: The factor of the scores.

    Returns:
        The content of each query and key, the bias of each key, and the rest of each query.
    """
    heads = q.shape[1]
    unbiased_k = k - b_k[:, None]
    k_columns = for_each_head(unbiased_k, heads).contiguous().mT

    unbiased_q = q - b_q[:, None]
    content = scale * unbiased_q @ k_columns
    bias = scale * (b_q[None, :, None] @ k_columns)

    # b_K is the same for every key, so the rest needs no axis of keys.
    b_k_of_heads = b_k.repeat_interleave(heads // len(b_k), 0)
    rest = einsum(q, b_k_of_heads, "batch head query d_head, head d_head -> batch head query")
    return content, bias, scale * rest[..., None]


def centred(part: Float[Tensor, "#batch head #query key"], visible: VisibleKeys) -> Scores:
    """A part minus its mean over the keys that each query sees; the softmax ignores this mean.

    Args:
        part: A part of the scores, see :func:`score_parts`.
        visible: Which keys each query sees.

    Returns:
        Scores whose mean over each query's visible keys is 0.
    """
    # Even a part that is the same for all queries has another mean for each, since each sees other
    # keys.
    count = visible.sum(-1, keepdim=True).clamp(min=1)
    total = (part * visible).sum(-1, keepdim=True)
    mean = total / count
    return part - mean


def ranked_target(
    scores: Scores, visible: VisibleKeys, rank: int
) -> Int[Tensor, "batch head query"]:
    """The visible key of each query with the largest score (rank 0), the second largest (rank 1) …

    Args:
        scores: The scores of each query.
        visible: Which keys each query sees.
        rank: How many visible keys of the query have larger scores.

    Returns:
        Indices of keys. For a query that sees at most ``rank`` keys, the index is meaningless.
    """
    visible_scores = scores.masked_fill(~visible, -torch.inf)
    if rank == 0:
        return visible_scores.argmax(-1)

    # topk fails if there are fewer keys.
    count = min(rank + 1, scores.shape[-1])
    return visible_scores.topk(count, -1).indices[..., -1]
