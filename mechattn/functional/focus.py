"""How each query spreads its attention: maxima, entropy, distance, repeats, bands."""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechattn.functional.attention import Marked, Pattern, Tokens

Squares = Float[Tensor, "*batch query key"]
PerQuery = Float[Tensor, "*batch query"]
KeyOfQuery = Int[Tensor, "*batch query"]
PerHead = Float[Tensor, "batch head query"]
Place = Int[Tensor, " place"]
Places = tuple[Place, Place, Place]  # row of the batch, query, key
_CHUNK = 32  # keys
# Elements; beyond this the logarithms leave the CPU's cache, which is four times as slow.
_PIECE = 2**18


def top_two(pattern: Squares) -> tuple[PerQuery, PerQuery, KeyOfQuery]:
    """The largest and the second largest probability of each query, and the index of the largest.

    ``p(1), p(2), argmax``; ties by index. With a single key the second is −1, which is meaningless.
    The pattern is modified temporarily and restored, as two maxima cost half as much as a sort.
    """
    largest, argmax = _largest(pattern)
    index = argmax.unsqueeze(-1)
    pattern.scatter_(-1, index, -1.0)
    second = pattern.amax(-1)
    pattern.scatter_(-1, index, largest.unsqueeze(-1))
    return largest, second, argmax


def _largest(pattern: Squares) -> tuple[PerQuery, KeyOfQuery]:
    """The largest probability of each query and its first index.

    A maximum without an index is vectorised, ten times as fast as one with its index: so the best
    chunk of keys is looked for first.
    """
    chunks = pattern.shape[-1] // _CHUNK
    if chunks < 2:
        return pattern.max(-1)

    in_chunks = chunks * _CHUNK
    chunked = pattern[..., :in_chunks].unflatten(-1, (chunks, _CHUNK))
    largest, best_chunk = chunked.amax(-1).max(-1)
    first_key = best_chunk * _CHUNK
    keys = first_key.unsqueeze(-1) + torch.arange(_CHUNK, device=pattern.device)
    argmax = first_key + pattern.gather(-1, keys).argmax(-1)
    if in_chunks == pattern.shape[-1]:
        return largest, argmax

    largest_of_rest, argmax_of_rest = pattern[..., in_chunks:].max(-1)
    is_in_rest = largest_of_rest > largest
    argmax = torch.where(is_in_rest, argmax_of_rest + in_chunks, argmax)
    return torch.maximum(largest, largest_of_rest), argmax


def entropy(pattern: Squares) -> PerQuery:
    """``−Σ_k A[q, k] log A[q, k]``, in nats; a key with no attention adds nothing."""
    tiny = torch.finfo(pattern.dtype).tiny
    squares = rearrange(pattern, "... query key -> (...) query key")
    at_once = max(1, _PIECE // max(1, squares[0].numel()))
    entropies = []
    for piece in squares.split(at_once):
        entropies.append(-torch.linalg.vecdot(piece, piece.clamp(min=tiny).log_()))
    return torch.cat(entropies).view(pattern.shape[:-1])


def mean_distance(pattern: Squares, first_query: int = 0, first_key: int = 0) -> PerQuery:
    """``Σ_k A[q, k] (q − k)``, in positions: how far back a query looks on average."""
    queries = first_query + torch.arange(pattern.shape[-2], device=pattern.device)
    keys = first_key + torch.arange(pattern.shape[-1], device=pattern.device)
    return queries * pattern.sum(-1) - pattern @ keys.to(pattern.dtype)


def looking_back(pattern: Pattern, back: int, first_query: int = 0, first_key: int = 0) -> PerHead:
    """``A[q, q − back]`` of each query, 0 if that key is not in this block."""
    offset = first_query - first_key - back
    diagonal = pattern.diagonal(offset, -2, -1)
    missing = min(pattern.shape[-2], max(0, -offset))
    return torch.nn.functional.pad(diagonal, (missing, 0))


def half_mass_keys(pattern: Squares) -> KeyOfQuery:
    """The size of the smallest set of keys that holds half of a query's attention to keys.

    ``min n: p(1) + … + p(n) ≥ Σ p / 2``, with probabilities in descending order (a learned sink
    takes the rest). Half counts as reached within 1e-6. Sorts every row, which costs ten times its
    softmax.
    """
    ordered = pattern.sort(-1, descending=True).values
    enough = 0.5 * ordered.sum(-1, keepdim=True) - 1e-6
    return 1 + (ordered.cumsum(-1) < enough).sum(-1).clamp(max=pattern.shape[-1] - 1)


def repeats_of(
    tokens: Tokens, after: int, queries: slice, keys: slice
) -> Bool[Tensor, "batch query key"]:
    """Which keys are ``after`` tokens behind an earlier occurrence of the query's own token, and
    before the query.

    ``p + after`` for all p with ``tokens[p] = tokens[q]`` and ``p + after < q``. The attention to
    them is the duplicate-token mass for ``after=0`` and the induction mass for ``after=1``. A query
    itself belongs to neither.

    Source: "Duplicate token" and "induction" of TransformerLens's head detector, which also counts
    a query's own key.
    """
    query = torch.arange(queries.start, queries.stop, device=tokens.device)
    key = torch.arange(keys.start, keys.stop, device=tokens.device)
    same = tokens[:, query, None] == tokens[:, None, (key - after).clamp(min=0)]
    return same & (key < query[:, None]) & (key >= after)


def looked_up_mass(pattern: Pattern, places: Places) -> PerHead:
    """Each query's attention to some keys, of which there are few in a text."""
    row, query, key = places
    mass = pattern.new_zeros(pattern.shape[0], pattern.shape[2], pattern.shape[1])
    mass.index_put_((row, query), pattern[row, :, query, key], accumulate=True)
    return mass.transpose(1, 2)


def has_repeat(tokens: Tokens, after: int = 0) -> Marked:
    """Which queries have an earlier occurrence p of their own token with ``p + after < q``."""
    places = torch.arange(tokens.shape[-1], device=tokens.device)
    ordered, order = tokens.sort(dim=-1, stable=True)
    is_new = torch.ones_like(ordered, dtype=torch.bool)
    is_new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    start = torch.where(is_new, places, 0).cummax(-1).values
    first = torch.empty_like(order).scatter_(-1, order, order.gather(-1, start))
    return first + after < places
