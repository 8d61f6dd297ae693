"""Attention from a fused kernel, which gives no rows: its output, and sums over queries or keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from mechattn.functional.attention import Attention, PerToken, Vectors, for_each_head, working_dtype

PerGroup = Float[Tensor, "batch head pos group"]  # for each key by groups of queries, or reversed
GroupWeights = Float[Tensor, "batch pos group"]

_MULTIPLE = 8  # kernels need a last axis that is a multiple of this
_HALF = (torch.float16, torch.bfloat16)
# The logarithm of a weight of 0: its exponential is 0 in float32, and divided by the scale,
# 1 / √d_head, it is within the range of float16.
_LOG_OF_ZERO = -200.0


@dataclass(frozen=True, eq=False)
class Fused:
    """A layer's attention from a fused kernel, and sums of it over queries or keys."""

    out: Float[Tensor, "batch head pos d_value"]  # ``Σ_k A[q, k] v[k]``
    lse: PerToken  # ``log Σ_k exp(score[q, k])``, including a learned sink; at least float32
    own: PerToken  # ``A[q, q]``
    q: Vectors  # queries, with further coordinates if there is a bias (ALiBi)
    k: Vectors  # keys for each query head, with the same coordinates
    scale: float  # the factor of the scores

    def column_sums(self, weights: GroupWeights) -> PerGroup:
        """The attention that each key gets from groups of queries, ``Σ_q A[q, k] w[q, group]``.

        ``A[q, k] = exp(scale · q·k − lse[q])``. Make a causal call in which time is reversed, the
        keys ``[k, 1]`` are the queries, and the queries ``[q, −lse / scale]`` are the keys. Then
        the log-sum-exp of key k is ``log Σ_{q ≥ k} A[q, k]``. With w as values, the output is the
        mean of w with these weights, for many groups at once. In half precision this mean would
        have only 8 or 11 bits, so each group has its own call, with ``log w`` added to its queries.

        Args:
            weights: The weight of each query in each group, at least 0; for a set of queries, 1 for
                its members and 0 for all others.

        Returns:
            The probability mass of each key from each group, including the key's own query.

        Source: Own derivation; the weights of the reversed call are a softmax over queries.
        """
        heads = self.q.shape[1]
        reversed_weights = weights.flip(1)[:, None].expand(-1, heads, -1, -1)
        minus_lse = -self.lse.flip(2)

        sums = []
        if self.q.dtype in _HALF:
            # One call per group. Its log-sum-exp is the logarithm of the sum; its output is unused.
            for weights_of_group in reversed_weights.split(1, -1):
                log_weights = weights_of_group[..., 0].log().clamp(min=_LOG_OF_ZERO)
                _, lse = self._reversed_call(weights_of_group, log_weights + minus_lse)
                sums.append(lse.exp()[..., None])
        else:
            # d_head groups per call, since the kernel pads the values to the width of the queries.
            for weights_of_call in reversed_weights.split(self.q.shape[-1], -1):
                mean, lse = self._reversed_call(weights_of_call, minus_lse)
                sums.append(mean * lse.exp()[..., None])

        # Back to the order of positions.
        return torch.cat(sums, -1).flip(2)

    def query_sums(self, weights: GroupWeights) -> PerGroup:
        """The attention of each query to groups of keys, ``Σ_k A[q, k] w[k, group]``.

        This is one more causal call, with the weights as values. In half precision its output would
        have only 8 or 11 bits, so the call is in float32.

        Args:
            weights: The weight of each key in each group; for a set of keys, 1 for its members and
                0 for all others.

        Returns:
            The probability mass of each query on each group.
        """
        dtype = working_dtype(self.q)
        heads = self.q.shape[1]
        values = weights.to(dtype)[:, None].expand(-1, heads, -1, -1)

        q = self.q.to(dtype)
        k = self.k.to(dtype)
        mean, lse = _kernel(q, k, values, self.scale)

        # This call has no sinks, so its mean is multiplied by the share that a sink leaves.
        share_of_keys = (lse - self.lse).exp()
        return mean * share_of_keys[..., None]

    def _reversed_call(self, values: PerGroup, addend: PerToken) -> tuple[PerGroup, PerToken]:
        """Make the causal call in which queries and keys are exchanged and time is reversed.

        Args:
            values: The value of each query, in reversed order.
            addend: What is added to the scores of each query, in reversed order.

        Returns:
            The output and the log-sum-exp of each key, in reversed order.
        """
        dtype = self.q.dtype

        # The addend becomes further coordinates of the queries; those of the keys are 1.
        extra_coordinates = _in_parts(addend / self.scale, dtype)
        ones = torch.ones_like(extra_coordinates)
        queries_as_keys = torch.cat([self.q.flip(2), extra_coordinates], -1)
        keys_as_queries = torch.cat([self.k.flip(2), ones], -1)
        return _kernel(keys_as_queries, queries_as_keys, values.to(dtype), self.scale)


def fused_attention(attention: Attention) -> Fused:
    """Compute attention in one causal call of the kernel for this device and dtype.

    Statistics that need a row's maximum (the strongest target, the smallest set of keys) or its
    logarithms need :func:`mechattn.functional.attention.attention_by_rows`.

    Args:
        attention: Inputs for which :attr:`Attention.fusable` is true.

    Returns:
        The output, and the numbers that sums over queries or keys need.
    """
    q = attention.q
    k = for_each_head(attention.k, q.shape[1])
    v = for_each_head(attention.v, q.shape[1])
    scale = attention.scale

    # The kernel takes no bias, so it becomes coordinates: score = scale · [q, 1]·[k, b / scale].
    if attention.bias is not None:
        unscaled_bias = (attention.bias / scale).expand(len(q), -1, -1)
        extra_coordinates = _in_parts(unscaled_bias, q.dtype)
        ones = torch.ones_like(extra_coordinates)
        q = torch.cat([q, ones], -1)
        k = torch.cat([k, extra_coordinates], -1)

    out, lse = _kernel(q, k, v, scale)

    # The kernel takes no sinks. A sink is one more key, with a value of 0.
    if attention.sinks is not None:
        lse_of_keys = lse
        sinks = attention.sinks.to(lse.dtype)
        lse = torch.logaddexp(lse, sinks[:, None])
        share_of_keys = (lse_of_keys - lse).exp()
        out = out * share_of_keys[..., None].to(out.dtype)

    own_scores = scale * torch.linalg.vecdot(q.to(lse.dtype), k.to(lse.dtype))
    own = (own_scores - lse).exp()
    return Fused(out=out, lse=lse, own=own, q=q, k=k, scale=scale)


def _in_parts(numbers: Float[Tensor, "*any"], dtype: torch.dtype) -> Float[Tensor, "*any part"]:
    """Split numbers into summands in ``dtype``.

    Half precision gets three, because the 8 or 11 bits of one would change the pattern.
    """
    if dtype not in _HALF:
        return numbers.to(dtype)[..., None]

    # Each summand is the rounded remainder that those before it leave.
    summands = []
    remainder = numbers.float()
    for _ in range(3):
        summand = remainder.to(dtype)
        summands.append(summand)
        remainder = remainder - summand.float()
    return torch.stack(summands, -1)


def _kernel(
    q: Vectors, k: Vectors, v: Float[Tensor, "batch head pos d_v"], scale: float
) -> tuple[Float[Tensor, "batch head pos d_v"], PerToken]:
    """Make a causal call of torch's flash attention, or on a GPU in float32 of its
    memory-efficient attention.

    Args:
        q: Queries.
        k: Keys for each query head.
        v: Values of any width for each query head.
        scale: The factor of the scores.

    Returns:
        The output, in the dtype of the values, and the log-sum-exp of each query's scores.
    """
    length = q.shape[2]
    d_v = v.shape[-1]

    # Zeros on the right change no score, and what they add to the output is cut off.
    width = math.ceil(max(q.shape[-1], d_v) / _MULTIPLE) * _MULTIPLE
    q = pad(q, (0, width - q.shape[-1]))
    k = pad(k, (0, width - k.shape[-1]))
    v = pad(v, (0, width - d_v))

    # The operators of the kernels, since torch.nn.functional returns no log-sum-exp.
    aten = torch.ops.aten
    if q.device.type != "cuda":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=True, scale=scale
        )
    elif q.dtype in _HALF:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(
            q, k, v, is_causal=True, scale=scale
        )
    else:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, attn_bias=None, compute_log_sumexp=True, is_causal=True, scale=scale
        )

    # The memory-efficient kernel pads the log-sum-exp.
    return out[..., :d_v], lse[..., :length]
