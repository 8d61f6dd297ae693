"""Attention sinks: their column sums, their contributions, and massive activations."""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from mechattn.functional.focus import looking_back
from mechattn.functional.rows import EdgeMask, for_each_head


def near_sums(
    pattern: Float[Tensor, "batch head query key"],
    counted: Bool[Tensor, "batch query"],
    gap: int,
    first_query: int = 0,
    first_key: int = 0,
) -> Float[Tensor, "batch head key"]:
    """Attention that each key gets from the counted queries less than ``gap`` positions later, its own included.

    ``near[k] = Σ_{k ≤ q < k + gap} counted[q] · A[q, k]``; :func:`column_sums` minus this is the attention from further
    away.
    """
    sums = pattern.new_zeros((*pattern.shape[:2], pattern.shape[3]))
    weight = counted[:, None].to(pattern.dtype)
    for back in range(min(gap, first_query - first_key + pattern.shape[2])):
        seen, keys = looking_back(pattern, back, first_query, first_key)
        count = keys.stop - keys.start
        sums[..., keys] += (seen * weight)[..., seen.shape[-1] - count :]
    return sums


def near_queries(
    real: Bool[Tensor, "batch pos"], gap: int, window: int | None = None, edge_mask: EdgeMask | None = None
) -> Float[Tensor, "batch key"]:
    """The number of real queries less than ``gap`` positions later that see each key, its own included."""
    length = real.shape[1]
    near = torch.zeros(real.shape, device=real.device)
    for back in range(min(gap, length, window or length)):
        sees = real[:, back:].clone()
        if edge_mask is not None and back:
            sees &= ~(edge_mask.queries[:, back:] & edge_mask.keys[:, : length - back])
        near[:, : length - back] += sees
    return near


def value_norms(
    v: Float[Tensor, "batch kv_head key d_head"], factor: Float[Tensor, "head rank d_head"]
) -> tuple[Float[Tensor, "batch head key"], Float[Tensor, "batch head key"]]:
    """``‖v[k]‖`` and ``‖v[k] W_O‖`` for every query head, the latter from ``output_factor(W_O)``."""
    every = for_each_head(v.to(factor.dtype), len(factor))
    written = every @ rearrange(factor, "head rank d_head -> head d_head rank")
    return every.norm(dim=-1), written.norm(dim=-1)


def kurtosis_over_keys(
    value: Float[Tensor, "batch head key"], counted: Bool[Tensor, "batch key"]
) -> Float[Tensor, "batch head"]:
    """``mean (x − mean)⁴ / variance²`` over the counted keys: 3 if normal, large where a few keys stand out.

    NaN if all are equal.
    """
    weight = counted[:, None].double()
    n = weight.sum(-1)
    away = (value.double() - ((value.double() * weight).sum(-1) / n)[..., None]) * weight
    variance = away.square().sum(-1) / n
    return torch.where(variance > 0, away.pow(4).sum(-1) / n / variance.square(), torch.nan).float()


def massive(
    stream: Float[Tensor, "batch pos d_model"], real: Bool[Tensor, "batch pos"], least: float, ratio: float
) -> dict[str, Float[Tensor, " batch"]]:
    """Massive activations: entries with ``|h| > least`` and ``|h| > ratio · median |h|`` of their sequence.

    Source:
        Sun et al., "Massive Activations in Large Language Models", arXiv:2402.17762.
    """
    count, top, at = [], [], []
    for row, there in zip(stream, real, strict=True):
        size = row[there].abs().float()
        median = size.median()
        bound = torch.maximum(ratio * median, median.new_tensor(least))
        count.append((size > bound).sum().float())
        top.append(size.max() / median)
        at.append(size.amax(-1).argmax().float())
    return {
        "massive_count": torch.stack(count),
        "massive_ratio": torch.stack(top),
        "massive_position": torch.stack(at),
    }
