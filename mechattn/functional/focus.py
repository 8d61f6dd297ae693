"""How each query distributes its attention: maxima, entropy, distance, repeated tokens."""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechattn.functional.attention import Marked, Pattern, PerQuery, Tokens, in_working_dtype

Patterns = Float[Tensor, "*batch query key"]  # attention probabilities of one or more heads
QueryValues = Float[Tensor, "*batch query"]  # a number for each query
KeyOfQuery = Int[Tensor, "*batch query"]  # the index of a key for each query
KeyCounts = Int[Tensor, "*batch query"]  # a number of keys for each query
Indices = Int[Tensor, " pair"]
PairIndices = tuple[Indices, Indices, Indices]  # row of the batch, query, key
_CHUNK = 32  # keys; few enough to search one chunk, many enough for a vectorised maximum
# Elements; the logarithms of more do not fit in a CPU's cache, which takes four times as long.
_PIECE = 2**18


def top_two(pattern: Patterns) -> tuple[QueryValues, QueryValues, KeyOfQuery]:
    """The largest and the second largest probability of each query, and the key with the largest.

    The pattern is modified and then restored, because two maxima take half as long as a sort.

    Args:
        pattern: Attention probabilities of at least one key.

    Returns:
        The largest probability, the second largest, and the index of the key with the largest (the
        first one of several). If the pattern has a single key, the second largest is −1, which is
        meaningless.
    """
    largest, argmax = _largest(pattern)
    index = argmax.unsqueeze(-1)

    # Hide the largest, so that the maximum is the second largest.
    pattern.scatter_(-1, index, -1.0)
    second = pattern.amax(-1)

    # Put the largest back.
    pattern.scatter_(-1, index, largest.unsqueeze(-1))
    return largest, second, argmax


def entropy(pattern: Patterns) -> QueryValues:
    """The entropy of each query's attention, ``−Σ_k A[q, k] log A[q, k]``.

    Args:
        pattern: Attention probabilities; with a learned sink, a row sums to less than 1.

    Returns:
        Entropies in nats; 0 for a query that attends to a single key.
    """
    tiny = torch.finfo(pattern.dtype).tiny
    patterns = rearrange(pattern, "... query key -> (...) query key")

    # The number of heads that fit in the cache together.
    elements = max(1, patterns[0].numel())
    at_once = max(1, _PIECE // elements)

    entropies = []
    for piece in patterns.split(at_once):
        # 0 · log(tiny) is 0, but 0 · log(0) would be NaN. No name holds the logarithms, so that the
        # next piece reuses their memory, which is still in the cache.
        entropies.append(-torch.linalg.vecdot(piece, piece.clamp(min=tiny).log_()))
    return torch.cat(entropies).view(pattern.shape[:-1])


def mean_distance(pattern: Patterns, first_query: int = 0, first_key: int = 0) -> QueryValues:
    """How far back each query attends on average, ``Σ_k A[q, k] (q − k)``.

    Attention to a learned sink counts as a distance of 0.

    Args:
        pattern: Attention probabilities of a block.
        first_query: The position of the block's first row.
        first_key: The position of its first key.

    Returns:
        Distances in positions; 0 for a query that attends only to itself.
    """
    queries = first_query + torch.arange(pattern.shape[-2], device=pattern.device)
    keys = first_key + torch.arange(pattern.shape[-1], device=pattern.device)

    # Σ A (q − k) = q Σ A − Σ A k, which needs no [query, key] distances. bfloat16 cannot represent
    # all whole numbers above 256.
    pattern = in_working_dtype(pattern)
    mass = pattern.sum(-1)
    mean_key = pattern @ keys.to(pattern.dtype)
    return queries * mass - mean_key


def looking_back(pattern: Pattern, back: int, first_query: int = 0, first_key: int = 0) -> PerQuery:
    """The attention of each query to the key ``back`` positions before it, ``A[q, q − back]``.

    Args:
        pattern: Attention probabilities of a block.
        back: The distance of the key from the query, in positions.
        first_query: The position of the block's first row.
        first_key: The position of its first key.

    Returns:
        A probability for each row of the block; 0 if the key is not in the block.
    """
    offset = first_query - first_key - back
    diagonal = pattern.diagonal(offset, -2, -1)

    # The keys of the first queries may be before the block's first key.
    rows = pattern.shape[-2]
    before = min(rows, max(0, -offset))
    # The keys of the last queries may be after the block's last key.
    after = rows - before - diagonal.shape[-1]
    return torch.nn.functional.pad(diagonal, (before, after))


def half_mass_keys(pattern: Patterns) -> KeyCounts:
    """The smallest number of keys that together have half of a query's attention to keys.

    ``min n: p(1) + … + p(n) ≥ Σ p / 2 − 1e-6``, with probabilities in descending order; the 1e-6
    allows for rounding. Attention to a learned sink does not count. Every row is sorted, which
    takes ten times as long as its softmax.

    Args:
        pattern: Attention probabilities.

    Returns:
        Numbers of keys, at least 1.
    """
    ordered = in_working_dtype(pattern).sort(-1, descending=True).values
    half = 0.5 * ordered.sum(-1, keepdim=True) - 1e-6

    # The sums below half, and the one that reaches it.
    falls_short = ordered.cumsum(-1) < half
    most = pattern.shape[-1] - 1
    return 1 + falls_short.sum(-1).clamp(max=most)


def repeats_of(
    tokens: Tokens, after: int, queries: slice, keys: slice
) -> Bool[Tensor, "batch query key"]:
    """Which keys come ``after`` positions after an earlier occurrence of the query's token.

    These are the keys ``p + after`` with ``tokens[p] = tokens[q]`` and ``p + after < q``. The
    attention to them is the duplicate-token mass for ``after=0`` and the induction mass for
    ``after=1``. The query's own position counts in neither.

    Args:
        tokens: Token ids of whole sequences.
        after: The distance from the earlier occurrence to the key, in positions.
        queries: The positions of a block's rows.
        keys: The positions of its keys.

    Returns:
        True for these keys.

    Source: "Duplicate token" and "induction" of TransformerLens's head detector, whose induction
    pattern also counts a query's own key.
    """
    query = torch.arange(queries.start, queries.stop, device=tokens.device)
    key = torch.arange(keys.start, keys.stop, device=tokens.device)

    # The earlier occurrence is ``after`` positions before the key; the first keys have none.
    earlier = (key - after).clamp(min=0)
    is_same = tokens[:, query, None] == tokens[:, None, earlier]
    is_before_query = key < query[:, None]
    return is_same & is_before_query & (key >= after)


def looked_up_mass(pattern: Pattern, places: PairIndices) -> PerQuery:
    """The attention of each query to a few keys, given by their indices.

    Args:
        pattern: Attention probabilities.
        places: The indices of the sequence, the query and the key of each probability.

    Returns:
        The sum of these probabilities for each query, at least in float32; 0 for a query without
        such a key.
    """
    row, query, key = places
    batch, heads, queries, _ = pattern.shape

    # In half precision, adding many small probabilities one by one would lose them.
    probabilities = in_working_dtype(pattern[row, :, query, key])
    mass = probabilities.new_zeros(batch, queries, heads)
    mass.index_put_((row, query), probabilities, accumulate=True)
    return mass.transpose(1, 2)


def has_repeat(tokens: Tokens, after: int = 0) -> Marked:
    """Which queries q have an earlier occurrence p of their token with ``p + after < q``.

    Args:
        tokens: Token ids of whole sequences.
        after: As in :func:`repeats_of`.

    Returns:
        True for the queries that have at least one key in :func:`repeats_of`.
    """
    positions = torch.arange(tokens.shape[-1], device=tokens.device)

    # A stable sort by id puts the occurrences of a token next to each other, in order of position.
    ordered, order = tokens.sort(dim=-1, stable=True)
    is_new = torch.ones_like(ordered, dtype=torch.bool)
    is_new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]

    # For each occurrence, the index of the token's first one in this order, and its position.
    start = torch.where(is_new, positions, 0).cummax(-1).values
    first_of_ordered = order.gather(-1, start)

    # Back to the order of positions.
    first = torch.empty_like(order).scatter_(-1, order, first_of_ordered)
    return first + after < positions


def _largest(pattern: Patterns) -> tuple[QueryValues, KeyOfQuery]:
    """The largest probability of each query, and the first key that has it.

    A maximum without its index is vectorised and takes a tenth of the time of one with its index.
    The chunk of keys with the maximum is therefore found first.
    """
    chunks = pattern.shape[-1] // _CHUNK
    if chunks < 2:
        return pattern.max(-1)

    # The first chunk that has the maximum of each query.
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

    # The first of equal keys is returned, so a key after the last whole chunk must have more.
    largest_of_rest, argmax_of_rest = pattern[..., in_chunks:].max(-1)
    is_in_rest = largest_of_rest > largest
    argmax = torch.where(is_in_rest, argmax_of_rest + in_chunks, argmax)
    return torch.maximum(largest, largest_of_rest), argmax
