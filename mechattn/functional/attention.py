"""Causal attention in blocks of query rows, or single rows of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

Pattern = Float[Tensor, "batch head query key"]  # attention probabilities, or scores
Tokens = Int[Tensor, "batch pos"]
Stream = Float[Tensor, "batch pos d_model"]  # the residual stream, or a direction in it
Marked = Bool[Tensor, "batch pos"]  # some tokens of each sequence
Vectors = Float[Tensor, "batch head pos d_head"]  # queries, keys or outputs of each head
PerHead = Float[Tensor, " head"]
PerQuery = Float[Tensor, "batch head query"]
PerToken = Float[Tensor, "batch head pos"]
QueryPositions = Int[Tensor, "batch query"]  # of some queries of each sequence
SequenceIndices = Int[Tensor, " chosen"]  # of some sequences of a batch
BLOCK = 64  # rows; 32 and 128 are slower on a CPU
# An accelerator waits for its orders where a block is small: at most 128 MiB of scores, and so many
# rows.
_SCORES_OF_BLOCK = 2**25
_LARGEST_BLOCK = 1024
# Heads that share keys, as rows of one product, and apart again.
_TOGETHER = "batch (kv_head group) query last -> batch kv_head (group query) last"
_APART = "batch kv_head (group query) last -> batch (kv_head group) query last"
_MASKED = -1e30  # finite, so adding it to a score cannot give NaN


def working_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which statistics and outputs are computed: float32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


def in_working_dtype(tensor: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Convert to float32 at least."""
    return tensor.to(working_dtype(tensor))


@dataclass(frozen=True, eq=False)
class EdgeMask:
    """Edges of attention that are cut before the softmax: some queries don't see some keys. A token
    sees itself."""

    queries: Marked  # the queries that are blind to the keys
    keys: Marked

    def unseen(self, queries: QueryPositions, keys: slice) -> Bool[Tensor, "batch query key"]:
        """The keys at these positions that each of the queries doesn't see.

        Args:
            queries: Positions of queries, the same number in each sequence.
            keys: The positions of the keys asked for.

        Returns:
            True where the edge from a query to a key is cut; never for a query's own key.
        """
        positions = torch.arange(self.keys.shape[1], device=queries.device)[keys]
        blind_queries = self.queries.gather(1, queries)
        hidden_keys = self.keys[:, keys]
        cut = blind_queries.unsqueeze(2) & hidden_keys.unsqueeze(1)

        # A token always sees itself.
        return cut & (queries.unsqueeze(2) != positions)

    def to(self, device: torch.device | str) -> EdgeMask:
        """The same on a device."""
        return EdgeMask(self.queries.to(device), self.keys.to(device))

    def of(self, sequences: SequenceIndices) -> EdgeMask:
        """The same for some sequences of the batch."""
        return EdgeMask(self.queries[sequences], self.keys[sequences])


def visible_keys(
    queries: Int[Tensor, "*batch query"], keys: int, window: int | None = None
) -> Bool[Tensor, "*batch query {keys}"]:
    """Which keys each query can see: those not after it, in a windowed layer the last ``window`` of
    these.

    Args:
        queries: The positions of some queries.
        keys: The number of keys, from the first on.
        window: How many keys a query sees, including its own; None for all.

    Returns:
        True where a query sees a key.
    """
    distance = queries.unsqueeze(-1) - torch.arange(keys, device=queries.device)
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    return visible


@dataclass(frozen=True, eq=False)
class Attention:
    """The inputs of causal attention. ``A[q, k] = softmax over visible k of cap(scale · q·k) +
    bias[k]``.

    ``cap(s) = softcap · tanh(s / softcap)``. Sequences that are padded on the right need no mask:
    no token sees what comes after it.
    """

    q: Vectors  # queries, after RoPE
    # Keys, after RoPE; head h reads key-value head ``h // (head / kv_head)``
    k: Float[Tensor, "batch kv_head pos d_head"]
    v: Float[Tensor, "batch kv_head pos d_value"]
    scale: float  # the factor of the scores, usually 1 / √d_head
    # Added to the scores of each key (ALiBi), already scaled.
    bias: Float[Tensor, "#batch head pos"] | None = None
    window: int | None = None  # how many keys a query sees, including its own; None for all
    softcap: float | None = None  # the bound of soft-capped scores
    edge_mask: EdgeMask | None = None  # edges that are cut
    # The score of each head's learned sink, which keeps its share of every row to itself
    sinks: PerHead | None = None

    @property
    def fusable(self) -> bool:
        """Whether a fused kernel can compute it: not with capped scores, cut edges or a window that
        leaves keys out.
        """
        windowed = self.window is not None and self.window < self.q.shape[2]
        return self.softcap is None and self.edge_mask is None and not windowed

    def of(self, sequences: SequenceIndices) -> Attention:
        """The same for some sequences of the batch."""
        bias = self.bias
        if bias is not None and len(bias) > 1:
            bias = bias[sequences]

        edge_mask = self.edge_mask
        if edge_mask is not None:
            edge_mask = edge_mask.of(sequences)
        return replace(
            self,
            q=self.q[sequences],
            k=self.k[sequences],
            v=self.v[sequences],
            bias=bias,
            edge_mask=edge_mask,
        )

    def rows(self, queries: QueryPositions, keys: int) -> Float[Tensor, "batch head query {keys}"]:
        """Probabilities of any queries of each sequence over the first ``keys`` keys, all that they
        can see.

        Args:
            queries: Positions of queries, the same number in each sequence.
            keys: The number of keys; none of the queries lies beyond them.

        Returns:
            Probabilities in float32 at least. A row sums to 1, or with a learned sink to less.
        """
        dtype = working_dtype(self.q)
        _, heads, _, d_head = self.q.shape
        index = queries[:, None, :, None].expand(-1, heads, -1, d_head)
        scaled_queries = self.q.gather(2, index).to(dtype) * self.scale
        seen_keys = self.k[:, :, :keys].to(dtype)

        # The heads of a group read the same keys: their rows are one product.
        grouped_queries = rearrange(scaled_queries, _TOGETHER, kv_head=self.k.shape[1])
        grouped_scores = grouped_queries @ seen_keys.mT
        scores = rearrange(grouped_scores, _APART, query=queries.shape[1])
        _cap_and_bias(self, scores, slice(0, keys))

        visible = visible_keys(queries, keys, self.window)
        if self.edge_mask is not None:
            visible &= ~self.edge_mask.unseen(queries, slice(0, keys))
        scores = scores.masked_fill(~visible[:, None], _MASKED)

        pattern = scores.softmax(-1)
        if self.sinks is None:
            return pattern
        return pattern * _left_by_sinks(scores, self.sinks)


@dataclass(frozen=True, eq=False)
class PatternRows:
    """A whole pattern from a hook, and its values; rows are looked up."""

    pattern: Float[Tensor, "batch head pos pos"]
    v: Float[Tensor, "batch kv_head pos d_value"]

    def of(self, sequences: SequenceIndices) -> PatternRows:
        """The same for some sequences of the batch."""
        return PatternRows(self.pattern[sequences], self.v[sequences])

    def rows(self, queries: QueryPositions, keys: int) -> Float[Tensor, "batch head query {keys}"]:
        """Probabilities of any queries of each sequence over the first ``keys`` keys.

        Args:
            queries: Positions of queries, the same number in each sequence.
            keys: The number of keys; none of the queries lies beyond them.

        Returns:
            Rows of the pattern, in its dtype.
        """
        heads = self.pattern.shape[1]
        index = queries[:, None, :, None].expand(-1, heads, -1, keys)
        seen_columns = self.pattern[..., :keys]
        return seen_columns.gather(2, index)


AnyRows = Attention | PatternRows  # one layer's attention, from which single rows can be requested


@dataclass(frozen=True, eq=False)
class Rows:
    """A block of query rows of one layer's attention. The pattern's memory is reused for the next
    block.
    """

    pattern: Pattern  # attention probabilities, float32 or better; 0 for unseen keys
    queries: slice  # the positions of these rows
    keys: slice  # the positions of the keys; none of these rows sees the others
    attention: AnyRows | None = None  # has other rows and the values; None if not requested


def mix(
    pattern: Pattern, v: Float[Tensor, "batch kv_head key d_head"]
) -> Float[Tensor, "batch head query d_head"]:
    """``Σ_k A[q, k] v[k]``; head h reads key-value head ``h // (head / kv_head)``.

    Args:
        pattern: Attention probabilities, or any weights of the keys.
        v: The values of these keys.

    Returns:
        A weighted sum of values for each query, in the dtype of the pattern.
    """
    grouped = rearrange(pattern, _TOGETHER, kv_head=v.shape[1])
    mixed = grouped @ v.to(pattern.dtype)
    return rearrange(mixed, _APART, query=pattern.shape[2])


def attention_by_rows(
    attention: Attention,
    see: Callable[[Rows], None] | None = None,
    block: int | None = None,
    queries: slice | None = None,
) -> Float[Tensor, "batch head pos d_value"]:
    """``out[q] = Σ_k A[q, k] v[k]``; ``see`` is called with every block of rows; no [query, key]
    matrix is stored.

    Values may have no dimensions, for rows alone. A block has :func:`rows_of_block` rows if no
    other number is given.

    Args:
        attention: The inputs of a layer's attention.
        see: Receives each block in turn, before the next one overwrites its memory.
        block: The number of query rows of a block.
        queries: The positions of the queries to compute; the output of others is undefined. All by
            default.

    Returns:
        The output of each head before W_O, in the dtype of the queries.
    """
    q = attention.q
    batch, heads, length, _ = q.shape
    d_value = attention.v.shape[-1]
    if block is None:
        block = rows_of_block(batch * heads * length, q.device)
    if queries is None:
        queries = slice(0, length)

    kernel = _BlockKernel(attention, block)
    # In the layout that the model needs, to avoid a copy.
    out = q.new_empty(batch, length, heads, d_value)

    for start in range(queries.start, queries.stop, block):
        stop = min(start + block, queries.stop)
        block_queries = slice(start, stop)
        keys = kernel.keys_before(block_queries)

        pattern = kernel.pattern(block_queries, keys)
        if d_value:
            out[:, block_queries] = kernel.output(pattern, keys)
        if see is not None:
            see(Rows(pattern, block_queries, keys, attention))
    return out.transpose(1, 2)


class _BlockKernel:
    """The inner loop of every run: the pattern of a block of queries, in a buffer for all blocks.

    Plain torch, because one buffer has several shapes and must not be copied. The heads of a group
    are stacked as rows of one product, so the keys that they share are read once and not repeated.
    """

    def __init__(self, attention: Attention, block: int) -> None:
        """Stack queries, keys and values by key-value head, and allocate the buffer."""
        q = attention.q
        batch, heads, length, d_head = q.shape
        kv_heads = attention.k.shape[1]
        d_value = attention.v.shape[-1]
        dtype = working_dtype(q)

        self.attention = attention
        self.groups = heads // kv_heads  # how many heads share the keys of one
        stacks = batch * kv_heads
        self.queries = q.reshape(stacks, self.groups, length, d_head)

        # Keys as columns of the product, contiguous because every block reads them.
        keys = attention.k.reshape(stacks, length, d_head).transpose(1, 2)
        self.keys = keys.to(dtype).contiguous()
        values = attention.v.reshape(stacks, length, d_value)
        self.values = values.to(dtype)

        # The most scores that a block has; a window leaves out the keys before it.
        most_keys = length
        if attention.window is not None:
            most_keys = min(length, attention.window + block)
        most_rows = min(block, length)
        size = batch * heads * most_rows * most_keys
        self.buffer = self.keys.new_empty(size)
        self.future = _future(block, dtype, q.device)

    def keys_before(self, queries: slice) -> slice:
        """The keys up to the last query, without those that no query of the block sees."""
        window = self.attention.window
        if window is None:
            return slice(0, queries.stop)

        # The block's first query sees furthest back.
        first_key = max(0, queries.start - window + 1)
        return slice(first_key, queries.stop)

    def pattern(self, queries: slice, keys: slice) -> Pattern:
        """Attention probabilities, in the buffer, which the next block overwrites.

        Args:
            queries: The positions of the block's rows.
            keys: The positions of its keys, see :meth:`keys_before`.

        Returns:
            Probabilities [batch head query key], a view of the buffer.
        """
        attention = self.attention
        stacks, _, _, d_head = self.queries.shape
        rows = self.groups * (queries.stop - queries.start)
        count = keys.stop - keys.start

        # Two views of the same memory: by stack for the products, by head for all else.
        size = stacks * rows * count
        stacked = self.buffer[:size].view(stacks, rows, count)
        by_head = stacked.view(*attention.q.shape[:2], -1, count)

        queries_of_block = self.queries[:, :, queries].to(stacked.dtype)
        scaled = (queries_of_block * attention.scale).reshape(stacks, rows, d_head)
        torch.bmm(scaled, self.keys[:, :, keys], out=stacked)
        _cap_and_bias(attention, by_head, keys)
        self._mask(by_head, queries, keys)

        # A sink takes its share of a row but has no value. The softmax overwrites the scores.
        left_by_sinks = None
        if attention.sinks is not None:
            left_by_sinks = _left_by_sinks(by_head, attention.sinks)
        torch.softmax(stacked, -1, out=stacked)
        if left_by_sinks is not None:
            by_head.mul_(left_by_sinks)
        return by_head

    def _mask(self, scores: Pattern, queries: slice, keys: slice) -> None:
        """Hide the keys that a query doesn't see, in place."""
        window = self.attention.window
        edge_mask = self.attention.edge_mask
        rows = queries.stop - queries.start

        # Only the block's own keys, the last ones here, can come after one of its queries.
        own_keys = slice(queries.start - keys.start, None)
        scores[..., own_keys] += self.future[:rows, :rows]
        positions = torch.arange(queries.start, queries.stop, device=scores.device)

        # The window of an early query reaches back to the first key, and hides nothing.
        if window is not None and queries.stop > window:
            # ``keys`` starts at or after the first query's window. Each later query's window starts
            # one key later, so only the first ``rows`` keys can be outside one.
            stop = min(keys.start + rows, keys.stop)
            early_keys = torch.arange(keys.start, stop, device=scores.device)
            is_outside = early_keys <= positions[:, None] - window
            scores[..., : len(early_keys)].masked_fill_(is_outside, _MASKED)

        if edge_mask is not None:
            positions_of_batch = positions.expand(len(scores), -1)
            unseen = edge_mask.unseen(positions_of_batch, keys)
            scores.masked_fill_(unseen[:, None], _MASKED)

    def output(self, pattern: Pattern, keys: slice) -> Float[Tensor, "batch query head d_value"]:
        """What the block's queries read from the values of these keys."""
        batch, heads, rows, count = pattern.shape
        stacked = pattern.view(len(self.values), -1, count)
        mixed = torch.bmm(stacked, self.values[:, keys])
        return mixed.view(batch, heads, rows, -1).transpose(1, 2)


def rows_of_block(scores_of_row: int, device: torch.device) -> int:
    """How many query rows of a layer are computed together, all heads and sequences of a batch
    taken together.

    Args:
        scores_of_row: The number of scores that one query row of each head and sequence has.
        device: Where they are computed.

    Returns:
        Always :data:`BLOCK` on a CPU; on an accelerator as many as its memory allows.
    """
    if device.type == "cpu":
        return BLOCK
    rows_in_memory = _SCORES_OF_BLOCK // scores_of_row
    return min(max(BLOCK, rows_in_memory), _LARGEST_BLOCK)


@lru_cache(maxsize=8)  # every layer of every pass asks for the same one
def _future(block: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "query key"]:
    """The mask added to the scores of a block's own keys, so that no row sees the keys after it."""
    masked = torch.full((block, block), _MASKED, dtype=dtype, device=device)
    return masked.triu(1)


def _cap_and_bias(attention: Attention, scores: Pattern, keys: slice) -> None:
    """Cap the scores and add the bias, in place."""
    if attention.softcap is not None:
        scores.div_(attention.softcap).tanh_().mul_(attention.softcap)
    if attention.bias is not None:
        scores += attention.bias[:, :, None, keys]


def _left_by_sinks(scores: Pattern, sinks: PerHead) -> Float[Tensor, "batch head query 1"]:
    """The fraction of each row that a learned sink leaves: ``Σ exp(s) / (Σ exp(s) +
    exp(sink))``."""
    score_of_keys = scores.logsumexp(-1, keepdim=True)
    return torch.sigmoid(score_of_keys - sinks[:, None, None])


def for_each_head(
    x: Float[Tensor, "batch kv_head pos *d_head"], heads: int
) -> Float[Tensor, "batch {heads} pos *d_head"]:
    """Repeat the tensor of each key-value head for its query heads: head h reads
    ``h // (head / kv_head)``.

    Args:
        x: Keys, values, or a number of each, by key-value head.
        heads: The number of query heads, a multiple of the key-value heads.

    Returns:
        A copy in the order of the query heads.
    """
    return x.repeat_interleave(heads // x.shape[1], 1)
