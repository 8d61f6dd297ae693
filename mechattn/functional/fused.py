"""Attention from a fused kernel, which shows no rows: its output, and sums over queries or keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from mechattn.functional.attention import Attention, PerToken, Vectors, for_each_head, working_dtype

PerGroup = Float[Tensor, "batch head pos group"]  # of each key or query, by groups of the others
GroupWeights = Float[Tensor, "batch pos group"]

_MULTIPLE = 8  # kernels need a last axis that is a multiple of this
_HALF = (torch.float16, torch.bfloat16)
_LOG_OF_ZERO = -200.0  # small enough, also for float16 after division by the scale


@dataclass(frozen=True, eq=False)
class Fused:
    """A layer's attention from a fused kernel, and the sums over queries that can be computed from
    it.
    """

    out: Float[Tensor, "batch head pos d_value"]  # ``Σ_k A[q, k] v[k]``
    lse: PerToken  # ``log Σ_k exp(score[q, k])`` with a learned sink; float32 at least
    own: PerToken  # ``A[q, q]``
    q: Vectors  # queries, with one more coordinate if there is ALiBi
    k: Vectors  # keys for each query head, likewise
    scale: float  # the factor of the scores

    def column_sums(self, weights: GroupWeights) -> PerGroup:
        """``Σ_q A[q, k] w[q, group]`` over the queries q ≥ k, for groups of queries.

        ``A[q, k] = exp(scale · q·k − lse[q])``, so in a causal call with time reversed, keys
        ``[k, 1]`` as queries and queries ``[q, −lse / scale]`` as keys, the log-sum-exp of key k is
        ``log Σ_{q ≥ k} A[q, k]``. With values w, the output is the mean of w under these weights,
        for many groups in one call. In half precision that mean would keep only 8 or 11 bits, so
        each group gets its own call, with ``log w`` added to its queries.

        Args:
            weights: The weight of each query in each group, not negative; 1 or 0 for groups that
                are sets of queries.

        Returns:
            Probability mass of each key from each group, a query's own key included.
        """
        heads = self.q.shape[1]
        reversed_weights = weights.flip(1)[:, None].expand(-1, heads, -1, -1)
        minus_lse = -self.lse.flip(2)

        sums = []
        if self.q.dtype in _HALF:
            # A call for each group: its log-sum-exp alone is the sum, and the output is not used.
            for weight in reversed_weights.split(1, -1):
                log_weight = weight[..., 0].log().clamp(min=_LOG_OF_ZERO)
                _, lse = self._reversed_call(weight, log_weight + minus_lse)
                sums.append(lse.exp()[..., None])
        else:
            # As many groups in a call as there are dimensions.
            for values in reversed_weights.split(self.q.shape[-1], -1):
                mean, lse = self._reversed_call(values, minus_lse)
                sums.append(mean * lse.exp()[..., None])

        # Back in the order of time.
        return torch.cat(sums, -1).flip(2)

    def query_sums(self, weights: GroupWeights) -> PerGroup:
        """``Σ_k A[q, k] w[k, group]`` of each query, for groups of keys.

        One more causal call, with these weights as values. In half precision its output would keep
        only 8 or 11 bits, so the call is in float32.

        Args:
            weights: The weight of each key in each group, 1 or 0 for groups that are sets of keys.

        Returns:
            Probability mass of each query on each group; together less than 1 beside a learned
            sink.
        """
        dtype = working_dtype(self.q)
        heads = self.q.shape[1]
        values = weights.to(dtype)[:, None].expand(-1, heads, -1, -1)

        q = self.q.to(dtype)
        k = self.k.to(dtype)
        mean, lse = _kernel(q, k, values, self.scale)

        # The mean is over the keys alone: a learned sink leaves them less than the whole row.
        without_sink = (lse - self.lse).exp()
        return mean * without_sink[..., None]

    def _reversed_call(self, values: PerGroup, added: PerToken) -> tuple[PerGroup, PerToken]:
        """The causal call with queries and keys exchanged; values, what is ``added`` to the score
        of each query, and results are in the reversed order of time."""
        dtype = self.q.dtype

        # What is added becomes one more coordinate of the queries, and a 1 of the keys.
        extra = _in_parts(added / self.scale, dtype)
        ones = torch.ones_like(extra)
        queries_as_keys = torch.cat([self.q.flip(2), extra], -1)
        keys_as_queries = torch.cat([self.k.flip(2), ones], -1)
        return _kernel(keys_as_queries, queries_as_keys, values.to(dtype), self.scale)


def fused_attention(attention: Attention) -> Fused:
    """The output and the log-sum-exp of one causal call of the kernel for this device and dtype.

    Statistics that need a row's maximum (the strongest target, the smallest set of keys) or its
    logarithms cannot be computed this way; they are computed in rows
    (:func:`mechattn.functional.attention.attention_by_rows`).

    Args:
        attention: Inputs for which :attr:`Attention.fusable` is true.

    Returns:
        Output, log-sum-exp and own attention of each query, and what further sums need.

    Source: Own derivation: the second call's weights are a softmax over queries.
    """
    q = attention.q
    k = for_each_head(attention.k, q.shape[1])
    v = for_each_head(attention.v, q.shape[1])
    scale = attention.scale

    # The kernel takes no bias: score = scale · [q, 1]·[k, b / scale].
    if attention.bias is not None:
        bias = (attention.bias / scale).expand(len(q), -1, -1)
        extra = _in_parts(bias, q.dtype)
        ones = torch.ones_like(extra)
        q = torch.cat([q, ones], -1)
        k = torch.cat([k, extra], -1)

    out, lse = _kernel(q, k, v, scale)

    # Nor does it take sinks, each of which is one more key without a value.
    if attention.sinks is not None:
        lse_of_keys = lse
        sinks = attention.sinks.to(lse.dtype)
        lse = torch.logaddexp(lse, sinks[:, None])
        left_by_sinks = (lse_of_keys - lse).exp()
        out = out * left_by_sinks[..., None].to(out.dtype)

    wide_q = q.to(lse.dtype)
    wide_k = k.to(lse.dtype)
    own_scores = scale * torch.linalg.vecdot(wide_q, wide_k)
    own = (own_scores - lse).exp()
    return Fused(out=out, lse=lse, own=own, q=q, k=k, scale=scale)


def _in_parts(number: Float[Tensor, "*any"], dtype: torch.dtype) -> Float[Tensor, "*any part"]:
    """Numbers as a sum of parts in ``dtype``: three in half precision, since 8 or 11 bits alone
    would change A.
    """
    if dtype not in _HALF:
        return number.to(dtype)[..., None]

    # Each part is the rounded remainder of those before it.
    summands = []
    remainder = number.float()
    for _ in range(3):
        summand = remainder.to(dtype)
        summands.append(summand)
        remainder = remainder - summand.float()
    return torch.stack(summands, -1)


def _kernel(
    q: Vectors, k: Vectors, v: Float[Tensor, "batch head pos d_v"], scale: float
) -> tuple[Float[Tensor, "batch head pos d_v"], PerToken]:
    """Causal attention and its log-sum-exp: flash attention, or on a GPU in float32 the
    memory-efficient kernel.

    Args:
        q: Queries.
        k: Keys, one for each query head.
        v: Values, one for each query head; of any width.
        scale: The factor of the scores.

    Returns:
        The output, in the dtype of the values, and the log-sum-exp of each query's scores.
    """
    length = q.shape[2]
    d_v = v.shape[-1]

    # Zeros on the right change no score, and no value that is kept.
    widest = max(q.shape[-1], d_v)
    width = widest + -widest % _MULTIPLE
    q = pad(q, (0, width - q.shape[-1]))
    k = pad(k, (0, width - k.shape[-1]))
    v = pad(v, (0, width - d_v))

    # The kernels' own operators: torch.nn.functional shows no log-sum-exp.
    aten = torch.ops.aten
    if q.device.type != "cuda":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    elif q.dtype in _HALF:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)
    else:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, True, scale=scale
        )

    # The memory-efficient kernel pads the log-sum-exp.
    return out[..., :d_v], lse[..., :length]
