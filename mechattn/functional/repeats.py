"""Attention to earlier occurrences of the same token (duplicates) and to the tokens after them (induction)."""

from __future__ import annotations

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor


def repeated_mass(
    pattern: Float[Tensor, "batch head query key"],
    tokens: Int[Tensor, "batch pos"],
    after: int = 0,
    first_query: int = 0,
    first_key: int = 0,
) -> Float[Tensor, "batch head query"]:
    """Each query's attention to positions ``after`` tokens behind earlier occurrences of its own token.

    ``Σ A[q, p + after]`` over all p with ``tokens[p] = tokens[q]`` and ``p + after < q``: the duplicate-token mass for
    ``after=0``, the induction mass for ``after=1``. A query's attention to itself belongs to neither.

    Source:
        "Duplicate token" and "induction" of TransformerLens's head detector, which also counts a query's own position.
    """
    queries = first_query + torch.arange(pattern.shape[-2], device=tokens.device)
    keys = first_key + torch.arange(pattern.shape[-1], device=tokens.device)
    same = tokens[:, queries, None] == tokens[:, None, (keys - after).clamp(min=0)]
    there = same & (keys < queries[:, None]) & (keys >= after)
    return masked_mass(pattern, there) if pattern.is_cuda else looked_up_mass(pattern, there)


def masked_mass(
    pattern: Float[Tensor, "batch head query key"], there: Bool[Tensor, "batch query key"]
) -> Float[Tensor, "batch head query"]:
    """Each query's attention to some keys, computed with a mask over all keys: for a GPU, to avoid a sync."""
    return einsum(pattern, there.to(pattern.dtype), "batch head query key, batch query key -> batch head query")


def looked_up_mass(
    pattern: Float[Tensor, "batch head query key"], there: Bool[Tensor, "batch query key"]
) -> Float[Tensor, "batch head query"]:
    """The same, by looking up only these keys: for a CPU, as there are few of them in a text."""
    row, query, key = there.nonzero(as_tuple=True)
    mass = pattern.new_zeros(pattern.shape[0], pattern.shape[2], pattern.shape[1])
    mass.index_put_((row, query), pattern[row, :, query, key], accumulate=True)
    return mass.transpose(1, 2)


def has_repeat(tokens: Int[Tensor, "batch pos"], after: int = 0) -> Bool[Tensor, "batch pos"]:
    """Which queries have an earlier occurrence p of their own token with ``p + after < q``."""
    places = torch.arange(tokens.shape[-1], device=tokens.device)
    ordered, order = tokens.sort(dim=-1, stable=True)
    is_new = torch.cat([torch.ones_like(ordered[:, :1], dtype=torch.bool), ordered[:, 1:] != ordered[:, :-1]], -1)
    start = torch.where(is_new, places, 0).cummax(-1).values
    first = torch.empty_like(order).scatter_(-1, order, order.gather(-1, start))
    return first + after < places
