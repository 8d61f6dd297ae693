"""Per-query statistics of how attention spreads over keys, for a block of rows or a whole pattern."""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechattn.functional.rows import mix

_CHUNK = 64  # keys
_PIECE = 2**18  # elements; beyond this the logarithms leave the CPU's cache, which is four times as slow


def top_two(
    pattern: Float[Tensor, "*batch query key"],
) -> tuple[Float[Tensor, "*batch query"], Float[Tensor, "*batch query"], Int[Tensor, "*batch query"]]:
    """The largest and the second largest probability of each query, and the index of the largest.

    ``p(1), p(2), argmax``; ties by index. With a single key the second is −1, which is meaningless. The pattern is
    modified temporarily and restored, as two maxima cost half as much as a sort.
    """
    first, at = _largest(pattern)
    where = at.unsqueeze(-1)
    pattern.scatter_(-1, where, -1.0)
    second = pattern.amax(-1)
    pattern.scatter_(-1, where, first.unsqueeze(-1))
    return first, second, at


def _largest(
    pattern: Float[Tensor, "*batch query key"],
) -> tuple[Float[Tensor, "*batch query"], Int[Tensor, "*batch query"]]:
    """The maximum and its index. A maximum without an index is vectorised, ten times as fast: so use chunks first."""
    chunks = pattern.shape[-1] // _CHUNK
    if chunks < 2:
        return pattern.max(-1)
    even, rest = pattern.split([chunks * _CHUNK, pattern.shape[-1] - chunks * _CHUNK], -1)
    value, chunk = rearrange(even, "... (chunk key) -> ... chunk key", key=_CHUNK).amax(-1).max(-1)
    start = chunk.unsqueeze(-1) * _CHUNK
    at = chunk * _CHUNK + pattern.gather(-1, start + torch.arange(_CHUNK, device=pattern.device)).argmax(-1)
    if not rest.shape[-1]:
        return value, at
    last, last_at = rest.max(-1)
    return torch.maximum(value, last), torch.where(last > value, last_at + chunks * _CHUNK, at)


def entropy(pattern: Float[Tensor, "*batch query key"]) -> Float[Tensor, "*batch query"]:
    """``−Σ_k A[q, k] log A[q, k]``, in nats; a key with no attention adds nothing."""
    tiny = torch.finfo(pattern.dtype).tiny
    squares = rearrange(pattern, "... query key -> (...) query key")
    pieces = squares.split(max(1, _PIECE // max(1, squares[0].numel())))
    return torch.cat([-torch.linalg.vecdot(p, p.clamp(min=tiny).log_()) for p in pieces]).view(pattern.shape[:-1])


def mean_distance(
    pattern: Float[Tensor, "*batch query key"], first_query: int = 0, first_key: int = 0
) -> Float[Tensor, "*batch query"]:
    """``Σ_k A[q, k] (q − k)``, in positions: how far back a query looks on average."""
    queries = first_query + torch.arange(pattern.shape[-2], device=pattern.device)
    keys = first_key + torch.arange(pattern.shape[-1], device=pattern.device)
    return queries * pattern.sum(-1) - pattern @ keys.to(pattern.dtype)


def previous_token(
    pattern: Float[Tensor, "batch head query key"], first_query: int = 0, first_key: int = 0
) -> Float[Tensor, "batch head query"]:
    """``A[q, q − 1]`` of each query; 0 for the first, which has none, and if the key is not in this block."""
    return looking_back(pattern, 1, first_query, first_key)[0]


def looking_back(
    pattern: Float[Tensor, "batch head query key"], back: int, first_query: int = 0, first_key: int = 0
) -> tuple[Float[Tensor, "batch head query"], slice]:
    """``A[q, q − back]`` of each query, 0 if that key is not in this block; and the keys that are, in order."""
    offset = first_query - first_key - back
    found = pattern.diagonal(offset, -2, -1)
    missing = min(pattern.shape[-2], max(0, -offset))
    start = max(0, offset)
    return torch.nn.functional.pad(found, (missing, 0)), slice(start, start + found.shape[-1])


def half_mass_keys(pattern: Float[Tensor, "*batch query key"], share: float = 0.5) -> Int[Tensor, "*batch query"]:
    """The size of the smallest set of keys that holds a given fraction of a query's attention to keys.

    ``min n: p(1) + … + p(n) ≥ share · Σ p``, with probabilities in descending order (a learned sink takes the rest).
    The share counts as reached within 1e-6. Sorts every row, which costs ten times its softmax.
    """
    ordered = pattern.sort(-1, descending=True).values
    enough = share * ordered.sum(-1, keepdim=True) - 1e-6
    return 1 + (ordered.cumsum(-1) < enough).sum(-1).clamp(max=pattern.shape[-1] - 1)


def shift(
    pattern: Float[Tensor, "batch head query key"],
    v: Float[Tensor, "batch kv_head key d_head"],
    member: Bool[Tensor, "batch key"],
) -> Float[Tensor, "batch head query d_head"]:
    """The part of each head's output that comes from the keys of a segment: Σσ in arXiv:2510.01032 for inserted ones.

    ``shift[q] = Σ_{k in segment} A[q, k] v[k]``, before the output projection.
    """
    return mix(pattern, v * member[:, None, :, None])
