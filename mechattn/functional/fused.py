"""Causal attention and its column sums from two calls of a fused kernel, without a [query, key] matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mechattn.functional.rows import Attention, for_each_head

_MULTIPLE = 8  # kernels need a last axis that is a multiple of this
_HALF = (torch.float16, torch.bfloat16)
_NOTHING = -200.0  # stands for log 0; small enough for float16 even after division by the scale


@dataclass(frozen=True)
class Fused:
    """A layer's attention from a fused kernel, and the sums over queries that can be computed from it."""

    out: Float[Tensor, "batch head pos d_value"]  # ``Σ_k A[q, k] v[k]``
    lse: Float[Tensor, "batch head pos"]  # ``log Σ_k exp(score[q, k])``, including a learned sink; float32 at least
    own: Float[Tensor, "batch head pos"]  # ``A[q, q]``
    q: Float[Tensor, "batch head pos d"]  # queries, with one more coordinate if there is ALiBi
    k: Float[Tensor, "batch head pos d"]  # keys for each query head, likewise
    scale: float  # the factor of the scores

    def column_sums(self, weights: Float[Tensor, "batch pos group"]) -> Float[Tensor, "batch head pos group"]:
        """``Σ_q A[q, k] w[q, group]`` over the queries q ≥ k, for groups of queries.

        ``A[q, k] = exp(scale · q·k − lse[q])``, so in a causal call with time reversed, keys ``[k, 1]`` as queries and
        queries ``[q, −lse / scale]`` as keys, the log-sum-exp of key k is ``log Σ_{q ≥ k} A[q, k]``. With values w, the
        output is the mean of w under these weights, for many groups in one call. In half precision that mean would keep
        only 8 or 11 bits, so each group gets its own call, with ``log w`` added to its queries.
        """
        back = weights.flip(1)[:, None].expand(-1, self.q.shape[1], -1, -1)
        if self.q.dtype in _HALF:
            calls = [self._reversed_call(each.log().clamp(min=_NOTHING), each[..., None]) for each in back.unbind(-1)]
            return torch.stack([lse.exp() for _, lse in calls], -1).flip(2)
        calls = [self._reversed_call(None, some) for some in back.split(self.q.shape[-1], -1)]
        return torch.cat([mean * lse.exp()[..., None] for mean, lse in calls], -1).flip(2)

    def _reversed_call(
        self, log_weight: Float[Tensor, "batch head pos"] | None, values: Float[Tensor, "batch head pos group"]
    ) -> tuple[Float[Tensor, "batch head pos group"], Float[Tensor, "batch head pos"]]:
        """The causal call with time reversed; arguments and results are in the usual order."""
        added = -self.lse.flip(2) if log_weight is None else log_weight - self.lse.flip(2)
        parts = _in_parts(added / self.scale, self.q.dtype)
        asked = torch.cat([self.q.flip(2), parts], -1)
        asking = torch.cat([self.k.flip(2), torch.ones_like(parts)], -1)
        return _kernel(asking, asked, values.to(self.q.dtype), self.scale)


def why_not_fused(attention: Attention) -> str:
    """Why a layer's attention is computed in rows; "" if a fused kernel can do it."""
    if attention.softcap is not None:
        return "its scores are capped"
    if attention.window is not None and attention.window < attention.q.shape[2]:
        return "it attends in a window"
    return "edges of it are cut" if attention.edge_mask is not None else ""


def fused_attention(attention: Attention) -> Fused:
    """The output and the log-sum-exp of one causal call of the kernel for this device and dtype.

    Statistics that need a row's maximum (the strongest target, the smallest set of keys) or its logarithms cannot be
    computed this way; they are computed in rows (:func:`mechattn.functional.rows.attention_by_rows`).

    Source: "Received attention from two fused calls": the second call's weights are a softmax over queries.
    """
    q, k, v, scale = attention.q, attention.k, attention.v, attention.scale
    k, v = (for_each_head(part, q.shape[1]) for part in (k, v))
    if attention.bias is not None:  # score = scale · [q, 1]·[k, b / scale]
        parts = _in_parts((attention.bias / scale).expand(len(q), -1, -1), q.dtype)
        q, k = torch.cat([q, torch.ones_like(parts)], -1), torch.cat([k, parts], -1)
    out, lse = _kernel(q, k, v, scale)
    if attention.sinks is not None:
        with_sink = torch.logaddexp(lse, attention.sinks.to(lse.dtype)[:, None])
        out, lse = out * (lse - with_sink).exp()[..., None].to(out.dtype), with_sink
    own = ((q.to(lse.dtype) * k.to(lse.dtype)).sum(-1) * scale - lse).exp()
    return Fused(out, lse, own, q, k, scale)


def _in_parts(number: Float[Tensor, "*any"], dtype: torch.dtype) -> Float[Tensor, "*any part"]:
    """Numbers as a sum of parts in ``dtype``: three in half precision, since 8 or 11 bits alone would change A."""
    if dtype not in _HALF:
        return number.to(dtype)[..., None]
    parts, left = [], number.float()
    for _ in range(3):
        parts.append(left.to(dtype))
        left = left - parts[-1].float()
    return torch.stack(parts, -1)


def _kernel(
    q: Float[Tensor, "batch head pos d"], k: Float[Tensor, "batch head pos d"], v: Float[Tensor, "batch head pos d_v"],
    scale: float,
) -> tuple[Float[Tensor, "batch head pos d_v"], Float[Tensor, "batch head pos"]]:  # fmt: skip
    """Causal attention and its log-sum-exp: flash attention, or on a GPU in float32 the memory-efficient kernel."""
    width = -(-max(q.shape[-1], v.shape[-1]) // _MULTIPLE) * _MULTIPLE
    q, k, wide_v = (torch.nn.functional.pad(part, (0, width - part.shape[-1])) for part in (q, k, v))
    aten, length = torch.ops.aten, q.shape[2]
    if q.device.type != "cuda":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, wide_v, 0.0, True, scale=scale)
    elif q.dtype in _HALF:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, wide_v, 0.0, True, scale=scale)
    else:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, wide_v, None, True, 0.0, True, scale=scale)
    return out[..., : v.shape[-1]], lse[..., :length]
