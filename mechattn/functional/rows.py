"""Causal attention in blocks of query rows: the output, and each block of probabilities for whoever asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

BLOCK = 64  # rows; 32 and 128 are slower on a CPU
_MASKED = -1e30  # finite: added to a score it cannot make NaN


@dataclass(frozen=True)
class Rows:
    """A block of query rows of one layer's attention. The pattern's memory is used again for the next block.

    Args:
        pattern: Attention probabilities, float32 or better; 0 for unseen keys.
        queries: The positions of these rows.
        keys: The positions of the keys; the others are seen by none of these rows.
        v: The values of all positions.
    """

    pattern: Float[Tensor, "batch head query key"]
    queries: slice
    keys: slice
    v: Float[Tensor, "batch kv_head pos d_value"] | None = None


def attention_by_rows(
    q: Float[Tensor, "batch head pos d_head"],
    k: Float[Tensor, "batch kv_head pos d_head"],
    v: Float[Tensor, "batch kv_head pos d_value"],
    scale: float,
    see: Callable[[Rows], None] | None = None,
    *,
    bias: Float[Tensor, "#batch head pos"] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    block: int = BLOCK,
) -> Float[Tensor, "batch head pos d_value"]:
    """Causal attention; ``see`` is called with every block of rows, and no [query, key] matrix is stored.

    ``A[q, k] = softmax over visible k of cap(scale · q·k) + bias[k]``, ``out[q] = Σ_k A[q, k] v[k]``,
    with ``cap(s) = softcap · tanh(s / softcap)``. Statistics and output are computed in float32 at least. Sequences
    that are padded on the right need no mask: no token sees what comes after it.

    Args:
        q: Queries, after RoPE.
        k: Keys, after RoPE; head h reads key-value head ``h // (head / kv_head)``.
        v: Values.
        scale: The factor of the scores, 1 / √d_head mostly.
        see: Called with each block.
        bias: Added to the scores of each key (ALiBi), already scaled.
        window: How many keys a query sees, its own included; None for all.
        softcap: The bound of soft-capped scores.
        block: Rows in a block.
    """
    batch, heads, length, width = q.shape
    groups = heads // k.shape[1]
    wide = q.dtype if q.dtype in (torch.float32, torch.float64) else torch.float32
    n = batch * k.shape[1]
    queries = q.reshape(n, groups, length, width)
    keys = k.reshape(n, length, width).transpose(1, 2).to(wide).contiguous()
    values = v.reshape(n, length, -1).to(wide)
    out = q.new_empty(n, groups, length, values.shape[-1])
    longest = min(length, window + block) if window else length
    buffer = keys.new_empty(n * groups * min(block, length) * longest)
    before = torch.ones(block, block, device=q.device, dtype=torch.bool).tril()
    future = keys.new_zeros(block, block).masked_fill(~before, _MASKED)
    for start in range(0, length, block):
        end = min(start + block, length)
        rows = end - start
        first = max(0, start - window + 1) if window else 0
        count = end - first
        s = buffer[: n * groups * rows * count].view(n, groups * rows, count)
        asked = (queries[:, :, start:end] * scale).to(wide).reshape(n, groups * rows, width)
        torch.bmm(asked, keys[:, :, first:end], out=s)
        by_head = s.view(n, groups, rows, count)
        if softcap is not None:
            s.div_(softcap).tanh_().mul_(softcap)
        if bias is not None:
            by_head += bias[..., first:end].expand(batch, -1, -1).reshape(n, groups, 1, count)
        by_head[..., start - first :] += future[:rows, :rows]
        if window and end > window:
            _mask_before_window(by_head, start, first, window)
        torch.softmax(s, -1, out=s)
        out[:, :, start:end] = torch.bmm(s, values[:, first:end]).view(n, groups, rows, -1)
        if see is not None:
            see(Rows(s.view(batch, heads, rows, count), slice(start, end), slice(first, end), v))
    return out.view(batch, heads, length, -1)


def _mask_before_window(scores: Tensor, start: int, first: int, window: int) -> None:
    """Hide from each row the keys that lie ``window`` or more before it."""
    rows = scores.shape[-2]
    hidden = first + torch.arange(rows, device=scores.device) <= start - window + torch.arange(
        rows, device=scores.device
    ).unsqueeze(-1)
    hidden = hidden[:, : scores.shape[-1]]
    scores[..., : hidden.shape[1]].masked_fill_(hidden, _MASKED)
