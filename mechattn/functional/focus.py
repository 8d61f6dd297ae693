"""How each query distributes its attention: maxima, entropy, distance, repeated tokens."""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechattn.functional.attention import Marked, Pattern, PerQuery, Tokens, in_working_dtype

AnyPattern = Float[Tensor, "*batch query key"]  # of one or more heads
QueryValues = Float[Tensor, "*batch query"]  # a number for each query
KeyOfQuery = Int[Tensor, "*batch query"]  # the index of a key for each query
KeyCounts = Int[Tensor, "*batch query"]  # a number of keys for each query
Indices = Int[Tensor, " pair"]
PairIndices = tuple[Indices, Indices, Indices]  # row of the batch, query, key
_CHUNK = 32  # keys; few enough to search one chunk, many enough for a vectorised maximum
# Elements; more logarithms do not fit in a CPU's cache, which takes four times as long.
_PIECE = 2**18


def top_two(pattern: AnyPattern) -> tuple[QueryValues, QueryValues, KeyOfQuery]:
    """The largest and the second largest probability of each query, and the key with the largest.

    The pattern is modified and then restored, because two maxima take half as long as a sort.

    Args:
        pattern: Attention probabilities of at least one key.

    Returns:
        The largest probability, the second largest, and the index of the key with the largest (the
        first of several). If the pattern has a single key, the second largest is −1, which is
        meaningless.
    """
    largest, argmax = _largest(pattern)
    index = argmax.unsqueeze(-1)

    # Hide the largest, so that the maximum is the second largest.
    pattern.scatter_(-1, index, -1.0)
    second_largest = pattern.amax(-1)

    # Put the largest back.
    pattern.scatter_(-1, index, largest.unsqueeze(-1))
    return largest, second_largest, argmax


def entropy(pattern: AnyPattern) -> QueryValues:
    """The entropy of each query's attention, ``−Σ_k A[q, k] log A[q, k]``.

    Args:
        pattern: Attention probabilities; with a learned sink, a row sums to less than 1.

    Returns:
        Entropies in nats; 0 for a query that attends to a single key.
    """
    tiny = torch.finfo(pattern.dtype).tiny
    by_head = rearrange(pattern, "... query key -> (...) query key")

    # The number of heads that fit in the cache together.
    elements_of_head = max(1, by_head[0].numel())
    heads_of_piece = max(1, _PIECE // elements_of_head)

    entropies = []
    for piece in by_head.split(heads_of_piece):
        # 0 · log(tiny) is 0, but 0 · log(0) would be NaN. No name holds the logarithms, so that the
        # next piece reuses their memory, which is still in the cache.
        entropies.append(-torch.linalg.vecdot(piece, piece.clamp(min=tiny).log_()))
    return torch.cat(entropies).view(pattern.shape[:-1])


def mean_distance(pattern: AnyPattern, first_query: int = 0, first_key: int = 0) -> QueryValues:
    """How far back each query attends on average, ``Σ_k A[q, k] (q − k)``.

    Attention to a learned sink counts as a distance of 0.

    Args:
        pattern: Attention probabilities of a block.
        first_query: The position of the block's first row.
        first_key: The position of its first key.

    Returns:
        Distances in positions; 0 for a query that attends only to itself.
    """
    query_positions = first_query + torch.arange(pattern.shape[-2], device=pattern.device)
    key_positions = first_key + torch.arange(pattern.shape[-1], device=pattern.device)

    # Σ A (q − k) = q Σ A − Σ A k, which needs no [query, key] distances. bfloat16 cannot represent
    # all whole numbers above 256.
    probabilities = in_working_dtype(pattern)
    mass = probabilities.sum(-1)
    weighted_keys = probabilities @ key_positions.to(probabilities.dtype)
    return query_positions * mass - weighted_keys


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
    row_count = pattern.shape[-2]
    rows_before = min(row_count, max(0, -offset))
    # The keys of the last queries may be after the block's last key.
    rows_after = row_count - rows_before - diagonal.shape[-1]
    return torch.nn.functional.pad(diagonal, (rows_before, rows_after))


def half_mass_keys(pattern: AnyPattern) -> KeyCounts:
    """The smallest number of keys that together have half of a query's attention to keys.

    This is the smallest n with ``p(1) + … + p(n) ≥ Σ p / 2 − 1e-6``, with probabilities in
    descending order; the 1e-6 allows for rounding. Attention to a learned sink does not count.
    Every row is sorted, which takes ten times as long as its softmax.

    Args:
        pattern: Attention probabilities.

    Returns:
        Numbers of keys, at least 1.
    """
    descending = in_working_dtype(pattern).sort(-1, descending=True).values
    half_mass = 0.5 * descending.sum(-1, keepdim=True) - 1e-6

    # The sums below half, and the one that reaches it.
    is_below_half = descending.cumsum(-1) < half_mass
    return 1 + is_below_half.sum(-1)


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
    query_positions = torch.arange(queries.start, queries.stop, device=tokens.device)
    key_positions = torch.arange(keys.start, keys.stop, device=tokens.device)

    # The earlier occurrence is ``after`` positions before the key; the first keys have none.
    earlier_positions = (key_positions - after).clamp(min=0)
    is_same_token = tokens[:, query_positions, None] == tokens[:, None, earlier_positions]
    is_before_query = key_positions < query_positions[:, None]
    return is_same_token & is_before_query & (key_positions >= after)


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
    batch, heads, query_count, _ = pattern.shape

    # In half precision, adding many small probabilities one by one would lose them.
    probabilities = in_working_dtype(pattern[row, :, query, key])
    mass = probabilities.new_zeros(batch, query_count, heads)
    mass.index_put_((row, query), probabilities, accumulate=True)
    return mass.transpose(1, 2)


def has_repeat(tokens: Tokens, after: int = 0) -> Marked:
    """Which queries q have an earlier occurrence p of their token with ``p + after < q``.

    Args:
        tokens: Token ids of whole sequences.
        after: The distance from the earlier occurrence to the key, as in :func:`repeats_of`.

    Returns:
        True for the queries that have at least one key in :func:`repeats_of`.
    """
    positions = torch.arange(tokens.shape[-1], device=tokens.device)

    # A stable sort by id puts the occurrences of a token next to each other, in order of position.
    sorted_tokens, order = tokens.sort(dim=-1, stable=True)
    is_first = torch.ones_like(sorted_tokens, dtype=torch.bool)
    is_first[:, 1:] = sorted_tokens[:, 1:] != sorted_tokens[:, :-1]

    # For each occurrence, the index of the token's first one in this order, and its position.
    index_of_first = torch.where(is_first, positions, 0).cummax(-1).values
    position_of_first = order.gather(-1, index_of_first)

    # Back to the order of positions.
    first_occurrence = torch.empty_like(order).scatter_(-1, order, position_of_first)
    return first_occurrence + after < positions


def _largest(pattern: AnyPattern) -> tuple[QueryValues, KeyOfQuery]:
    """The largest probability of each query, and the first key that has it.

    A maximum without its index is vectorised and takes a tenth of the time of one with its index.
    The chunk of keys with the maximum is therefore found first.
    """
    chunk_count = pattern.shape[-1] // _CHUNK
    if chunk_count < 2:
        return pattern.max(-1)

    # The first chunk that has the maximum of each query.
    chunked_keys = chunk_count * _CHUNK
    chunks = pattern[..., :chunked_keys].unflatten(-1, (chunk_count, _CHUNK))
    largest_of_chunk = chunks.amax(-1)
    largest, best_chunk = largest_of_chunk.max(-1)

    # The first key of that chunk with this maximum.
    first_key = best_chunk * _CHUNK
    keys_of_chunk = torch.arange(_CHUNK, device=pattern.device)
    keys = first_key.unsqueeze(-1) + keys_of_chunk
    argmax_in_chunk = pattern.gather(-1, keys).argmax(-1)
    argmax_of_chunks = first_key + argmax_in_chunk
    if chunked_keys == pattern.shape[-1]:
        return largest, argmax_of_chunks

    # The first of equal keys is returned, so a key after the last whole chunk must have more.
    largest_of_rest, argmax_of_rest = pattern[..., chunked_keys:].max(-1)
    is_in_rest = largest_of_rest > largest
    argmax = torch.where(is_in_rest, argmax_of_rest + chunked_keys, argmax_of_chunks)
    return torch.maximum(largest, largest_of_rest), argmax
