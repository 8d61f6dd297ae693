"""How each query spreads its attention: maxima, entropy, distance, repeats, bands."""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechattn.functional.attention import Marked, Pattern, PerQuery, Tokens, in_working_dtype

Squares = Float[Tensor, "*batch query key"]
QueryValues = Float[Tensor, "*batch query"]  # a number of each query
KeyOfQuery = Int[Tensor, "*batch query"]  # an index, or a number, of keys
Indices = Int[Tensor, " pair"]
PairIndices = tuple[Indices, Indices, Indices]  # row of the batch, query, key
_CHUNK = 32  # keys
# Elements; beyond this the logarithms leave the CPU's cache, which is four times as slow.
_PIECE = 2**18


def top_two(pattern: Squares) -> tuple[QueryValues, QueryValues, KeyOfQuery]:
    """The largest and the second largest probability of each query, and the index of the largest.

    ``p(1), p(2), argmax``; ties by index. With a single key the second is −1, which is meaningless.
    The pattern is modified temporarily and restored, as two maxima cost half as much as a sort.

    Args:
        pattern: Attention probabilities, at least one key.

    Returns:
        Largest probability, second largest probability, and the index of the key with the largest.
    """
    largest, argmax = _largest(pattern)
    index = argmax.unsqueeze(-1)

    # Without the largest, the maximum is the second largest.
    pattern.scatter_(-1, index, -1.0)
    second = pattern.amax(-1)

    # Put the largest back.
    pattern.scatter_(-1, index, largest.unsqueeze(-1))
    return largest, second, argmax


def _largest(pattern: Squares) -> tuple[QueryValues, KeyOfQuery]:
    """The largest probability of each query and its first index.

    A maximum without an index is vectorised, ten times as fast as one with its index: so the best
    chunk of keys is looked for first.
    """
    chunks = pattern.shape[-1] // _CHUNK
    if chunks < 2:
        return pattern.max(-1)

    # The first chunk that holds a query's maximum.
    in_chunks = chunks * _CHUNK
    chunked = pattern[..., :in_chunks].unflatten(-1, (chunks, _CHUNK))
    largest_of_chunk = chunked.amax(-1)
    largest, best_chunk = largest_of_chunk.max(-1)

    # The first key of that chunk with this maximum.
    first_key = best_chunk * _CHUNK
    keys_of_chunk = torch.arange(_CHUNK, device=pattern.device)
    keys = first_key.unsqueeze(-1) + keys_of_chunk
    argmax_in_chunk = pattern.gather(-1, keys).argmax(-1)
    argmax = first_key + argmax_in_chunk
    if in_chunks == pattern.shape[-1]:
        return largest, argmax

    # The keys after the last whole chunk win only if they hold more: ties go to the first key.
    largest_of_rest, argmax_of_rest = pattern[..., in_chunks:].max(-1)
    is_in_rest = largest_of_rest > largest
    argmax = torch.where(is_in_rest, argmax_of_rest + in_chunks, argmax)
    return torch.maximum(largest, largest_of_rest), argmax


def entropy(pattern: Squares) -> QueryValues:
    """``−Σ_k A[q, k] log A[q, k]``, in nats; a key with no attention adds nothing.

    Args:
        pattern: Attention probabilities; a row may sum to less than 1 beside a learned sink.

    Returns:
        Nats, 0 for a query that looks at a single key.
    """
    tiny = torch.finfo(pattern.dtype).tiny
    squares = rearrange(pattern, "... query key -> (...) query key")

    # As many heads at a time as fit in the cache.
    elements = max(1, squares[0].numel())
    at_once = max(1, _PIECE // elements)

    entropies = []
    for piece in squares.split(at_once):
        # 0 · log(tiny) is 0, where 0 · log(0) would be NaN. The logarithms have no name, so that
        # their memory is free, and still in the cache, for the next piece.
        entropies.append(-torch.linalg.vecdot(piece, piece.clamp(min=tiny).log_()))
    return torch.cat(entropies).view(pattern.shape[:-1])


def mean_distance(pattern: Squares, first_query: int = 0, first_key: int = 0) -> QueryValues:
    """``Σ_k A[q, k] (q − k)``, in positions: how far back a query looks on average.

    Args:
        pattern: Attention probabilities of a block.
        first_query: The position of the block's first row.
        first_key: The position of its first key.

    Returns:
        Positions, 0 for a query that looks at itself.
    """
    queries = first_query + torch.arange(pattern.shape[-2], device=pattern.device)
    keys = first_key + torch.arange(pattern.shape[-1], device=pattern.device)

    # Σ A (q − k) = q Σ A − Σ A k: a product with the keys needs no [query, key] distances. Half
    # precision has no whole numbers beyond a few hundred.
    pattern = in_working_dtype(pattern)
    mass = pattern.sum(-1)
    mean_key = pattern @ keys.to(pattern.dtype)
    return queries * mass - mean_key


def looking_back(pattern: Pattern, back: int, first_query: int = 0, first_key: int = 0) -> PerQuery:
    """``A[q, q − back]`` of each query, 0 if that key is not in this block.

    Args:
        pattern: Attention probabilities of a block.
        back: How many positions before the query the key lies.
        first_query: The position of the block's first row.
        first_key: The position of its first key.

    Returns:
        The probability at that key, for each row of the block.
    """
    offset = first_query - first_key - back
    diagonal = pattern.diagonal(offset, -2, -1)

    # The first queries may have no key so far back.
    rows = pattern.shape[-2]
    before = min(rows, max(0, -offset))
    # The last ones may have theirs after this block.
    after = rows - before - diagonal.shape[-1]
    return torch.nn.functional.pad(diagonal, (before, after))


def half_mass_keys(pattern: Squares) -> KeyOfQuery:
    """The size of the smallest set of keys that holds half of a query's attention to keys.

    ``min n: p(1) + … + p(n) ≥ Σ p / 2``, with probabilities in descending order (a learned sink
    takes the rest). Half counts as reached within 1e-6. Sorts every row, which costs ten times its
    softmax.

    Args:
        pattern: Attention probabilities.

    Returns:
        A number of keys, at least 1.
    """
    ordered = in_working_dtype(pattern).sort(-1, descending=True).values
    enough = 0.5 * ordered.sum(-1, keepdim=True) - 1e-6

    # The sums that fall short, and the one that does not.
    falls_short = ordered.cumsum(-1) < enough
    most = pattern.shape[-1] - 1
    return 1 + falls_short.sum(-1).clamp(max=most)


def repeats_of(
    tokens: Tokens, after: int, queries: slice, keys: slice
) -> Bool[Tensor, "batch query key"]:
    """Which keys are ``after`` tokens behind an earlier occurrence of the query's own token, and
    before the query.

    ``p + after`` for all p with ``tokens[p] = tokens[q]`` and ``p + after < q``. The attention to
    them is the duplicate-token mass for ``after=0`` and the induction mass for ``after=1``. A query
    itself belongs to neither.

    Args:
        tokens: Token ids of whole sequences.
        after: How many positions after the earlier occurrence the key lies.
        queries: The positions of a block's rows.
        keys: The positions of its keys.

    Returns:
        True for the keys whose attention is summed.

    Source: "Duplicate token" and "induction" of TransformerLens's head detector, whose induction
    pattern also counts a query's own key.
    """
    query = torch.arange(queries.start, queries.stop, device=tokens.device)
    key = torch.arange(keys.start, keys.stop, device=tokens.device)

    # The earlier occurrence is ``after`` tokens before the key; keys before that have none.
    earlier = (key - after).clamp(min=0)
    is_same = tokens[:, query, None] == tokens[:, None, earlier]
    is_before_query = key < query[:, None]
    return is_same & is_before_query & (key >= after)


def looked_up_mass(pattern: Pattern, places: PairIndices) -> PerQuery:
    """Each query's attention to some keys, of which there are few in a text.

    Args:
        pattern: Attention probabilities.
        places: Sequence, row and column of each key, as three index tensors of one length.

    Returns:
        The sum of these probabilities for each query, in float32 at least; 0 for one without such a
        key.
    """
    row, query, key = places
    batch, heads, queries, _ = pattern.shape

    # Added up one by one: in half precision, many small ones would be lost.
    probabilities = in_working_dtype(pattern[row, :, query, key])
    mass = probabilities.new_zeros(batch, queries, heads)
    mass.index_put_((row, query), probabilities, accumulate=True)
    return mass.transpose(1, 2)


def has_repeat(tokens: Tokens, after: int = 0) -> Marked:
    """Which queries have an earlier occurrence p of their own token with ``p + after < q``.

    Args:
        tokens: Token ids of whole sequences.
        after: As in :func:`repeats_of`.

    Returns:
        True for the queries that :func:`repeats_of` gives at least one key.
    """
    positions = torch.arange(tokens.shape[-1], device=tokens.device)

    # Sorted by id and then by position, each token's occurrences lie together, the first in front.
    ordered, order = tokens.sort(dim=-1, stable=True)
    is_new = torch.ones_like(ordered, dtype=torch.bool)
    is_new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]

    # Where a token's occurrences start in this order, and the position that lies there.
    start = torch.where(is_new, positions, 0).cummax(-1).values
    first_of_ordered = order.gather(-1, start)

    # Back in the order of the text.
    first = torch.empty_like(order).scatter_(-1, order, first_of_ordered)
    return first + after < positions
