"""Causal attention, computed in blocks of query rows or in single rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

Pattern = Float[Tensor, "batch head query key"]  # attention probabilities
Scores = Float[Tensor, "batch head query key"]  # before the softmax
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
# Small blocks leave an accelerator idle between kernels, so its blocks are larger.
_SCORES_OF_BLOCK = 2**25  # 128 MiB in float32
_LARGEST_BLOCK = 1024  # rows
_MASKED = -1e30  # finite, so adding it to a score cannot give NaN


def working_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which statistics and outputs are computed: at least float32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def in_working_dtype(tensor: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Convert half precision to float32."""
    return tensor.to(working_dtype(tensor))


@dataclass(frozen=True, eq=False)
class EdgeMask:
    """Edges of attention that are cut before the softmax: some queries do not see some keys.

    A token always sees itself.
    """

    queries: Marked  # the queries that do not see the keys
    keys: Marked  # the keys that these queries do not see

    def unseen(
        self, query_positions: QueryPositions, keys: slice
    ) -> Bool[Tensor, "batch query key"]:
        """Which edges from some queries to some keys are cut.

        Args:
            query_positions: Positions of queries, the same number in each sequence.
            keys: The positions of the keys.

        Returns:
            True if the edge is cut; never for a query's own key.
        """
        key_positions = torch.arange(self.keys.shape[1], device=query_positions.device)[keys]
        blind_queries = self.queries.gather(1, query_positions)
        hidden_keys = self.keys[:, keys]
        cut = blind_queries.unsqueeze(2) & hidden_keys.unsqueeze(1)

        return cut & (query_positions.unsqueeze(2) != key_positions)

    def to(self, device: torch.device | str) -> EdgeMask:
        """Return the mask on a device."""
        return EdgeMask(self.queries.to(device), self.keys.to(device))

    def of(self, sequences: SequenceIndices) -> EdgeMask:
        """Return the mask of some sequences of the batch."""
        return EdgeMask(self.queries[sequences], self.keys[sequences])


def visible_keys(
    query_positions: Int[Tensor, "*batch query"], key_count: int, window: int | None = None
) -> Bool[Tensor, "*batch query {key_count}"]:
    """Which keys each query sees: its own and those before it, within the window.

    Args:
        query_positions: The positions of some queries.
        key_count: The number of keys, counted from the first.
        window: How many keys a query sees, including its own; None for all.

    Returns:
        True if the query sees the key.
    """
    key_positions = torch.arange(key_count, device=query_positions.device)
    distance = query_positions.unsqueeze(-1) - key_positions
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    return visible


@dataclass(frozen=True, eq=False)
class Attention:
    """The inputs of causal attention.

    ``A[q, k] = softmax over visible k of cap(scale · q·k) + bias[k]``, with
    ``cap(s) = softcap · tanh(s / softcap)``, or ``cap(s) = s`` without a softcap. With learned
    sinks, the softmax of each row of head h also runs over ``sinks[h]``, whose probability is left
    out of A. Padding on the right needs no mask, since no token sees what comes after it.
    """

    q: Vectors  # queries, after RoPE
    # Keys, after RoPE; head h reads key-value head ``h // (head / kv_head)``
    k: Float[Tensor, "batch kv_head pos d_head"]
    v: Float[Tensor, "batch kv_head pos d_value"]
    scale: float  # the factor of the scores, usually 1 / √d_head
    # Added to the scores of each key (ALiBi); not multiplied by ``scale``
    bias: Float[Tensor, "#batch head pos"] | None = None
    window: int | None = None  # how many keys a query sees, including its own; None for all
    softcap: float | None = None  # the bound of soft-capped scores; None for scores without one
    edge_mask: EdgeMask | None = None  # edges that are cut
    # The score of each head's learned sink, which takes a share of every row and has no value
    sinks: PerHead | None = None

    @property
    def fusable(self) -> bool:
        """Whether a fused kernel can compute this attention.

        It cannot with capped scores, cut edges, or a window that leaves out keys.
        """
        window_hides_keys = self.window is not None and self.window < self.q.shape[2]
        return self.softcap is None and self.edge_mask is None and not window_hides_keys

    def of(self, sequences: SequenceIndices) -> Attention:
        """Return the inputs of some sequences of the batch."""
        bias = self.bias
        if bias is not None and len(bias) > 1:  # a single row is that of all sequences
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

    def rows(
        self, query_positions: QueryPositions, key_count: int
    ) -> Float[Tensor, "batch head query {key_count}"]:
        """Compute the rows of some queries of each sequence.

        Args:
            query_positions: Positions of queries, the same number in each sequence.
            key_count: The number of keys, counted from the first; more than the last of these
                positions.

        Returns:
            Probabilities, at least in float32. A row sums to 1, or to less with a learned sink.
        """
        dtype = working_dtype(self.q)
        _, heads, _, d_head = self.q.shape
        index = query_positions[:, None, :, None].expand(-1, heads, -1, d_head)
        scaled_q = self.q.gather(2, index).to(dtype) * self.scale
        k = self.k[:, :, :key_count].to(dtype)

        # The heads of a group read the same keys: their rows are one product.
        grouped_q = rearrange(
            scaled_q,
            "batch (kv_head group) query d_head -> batch kv_head (group query) d_head",
            kv_head=k.shape[1],
        )
        grouped_scores = grouped_q @ k.mT
        scores = rearrange(
            grouped_scores,
            "batch kv_head (group query) key -> batch (kv_head group) query key",
            query=query_positions.shape[1],
        )
        keys = slice(0, key_count)
        _cap_and_bias(self, scores, keys)

        visible = visible_keys(query_positions, key_count, self.window)
        if self.edge_mask is not None:
            visible &= ~self.edge_mask.unseen(query_positions, keys)
        scores = scores.masked_fill(~visible[:, None], _MASKED)

        pattern = scores.softmax(-1)
        if self.sinks is None:
            return pattern
        return pattern * _share_of_keys(scores, self.sinks)


@dataclass(frozen=True, eq=False)
class PatternRows:
    """A layer's whole pattern from a hook, and its values. Rows are looked up in the pattern."""

    pattern: Float[Tensor, "batch head pos pos"]
    v: Float[Tensor, "batch kv_head pos d_value"]

    def of(self, sequences: SequenceIndices) -> PatternRows:
        """Return the pattern and values of some sequences of the batch."""
        return PatternRows(self.pattern[sequences], self.v[sequences])

    def rows(
        self, query_positions: QueryPositions, key_count: int
    ) -> Float[Tensor, "batch head query {key_count}"]:
        """Look up the rows of some queries of each sequence.

        Args:
            query_positions: Positions of queries, the same number in each sequence.
            key_count: The number of keys, counted from the first.

        Returns:
            Rows of the pattern, in its dtype.
        """
        heads = self.pattern.shape[1]
        index = query_positions[:, None, :, None].expand(-1, heads, -1, key_count)
        columns = self.pattern[..., :key_count]
        return columns.gather(2, index)


AnyRows = Attention | PatternRows  # one layer's attention, from which single rows can be requested


@dataclass(frozen=True, eq=False)
class Rows:
    """A block of query rows of a layer's attention.

    Blocks of :func:`attention_by_rows` share the memory of ``pattern``: the next overwrites it.
    """

    pattern: Pattern  # attention probabilities, float32 or better; 0 for unseen keys
    queries: slice  # the positions of these rows
    keys: slice  # the positions of the columns; these rows see no other keys
    # It can compute other rows, and holds the values; None if the model shows no values by head
    attention: AnyRows | None = None


def mix(
    pattern: Pattern, v: Float[Tensor, "batch kv_head key d_head"]
) -> Float[Tensor, "batch head query d_head"]:
    """``Σ_k A[q, k] v[k]`` of each head; head h reads key-value head ``h // (head / kv_head)``.

    Args:
        pattern: Attention probabilities, or any weights of the keys.
        v: The values of these keys.

    Returns:
        A weighted sum of values for each query, in the dtype of the pattern.
    """
    # The heads of a group read the same values: their rows are one product.
    grouped_pattern = rearrange(
        pattern,
        "batch (kv_head group) query key -> batch kv_head (group query) key",
        kv_head=v.shape[1],
    )
    grouped_out = grouped_pattern @ v.to(pattern.dtype)
    return rearrange(
        grouped_out,
        "batch kv_head (group query) d_head -> batch (kv_head group) query d_head",
        query=pattern.shape[2],
    )


def attention_by_rows(
    attention: Attention,
    see: Callable[[Rows], None] | None = None,
    block: int | None = None,
    queries: slice | None = None,
) -> Float[Tensor, "batch head pos d_value"]:
    """Compute attention, ``out[q] = Σ_k A[q, k] v[k]``, in blocks of query rows.

    No [query, key] matrix is stored. The last axis of the values may be empty, if only the rows are
    needed.

    Args:
        attention: The inputs of a layer's attention.
        see: Receives each block in turn, before the next one overwrites its memory.
        block: The number of query rows in a block; that of :func:`rows_of_block` by default.
        queries: The positions of the queries to compute, all by default.

    Returns:
        The output of each head before W_O, in the dtype of the queries; undefined for queries that
        are not computed.
    """
    q = attention.q
    batch, heads, length, _ = q.shape
    d_value = attention.v.shape[-1]
    if block is None:
        block = rows_of_block(batch * heads * length, q.device)
    if queries is None:
        queries = slice(0, length)

    kernel = _BlockKernel(attention, block)
    # Positions before heads, as the model's next operation needs them, to avoid a copy.
    out = q.new_empty(batch, length, heads, d_value)

    for start in range(queries.start, queries.stop, block):
        stop = min(start + block, queries.stop)
        block_queries = slice(start, stop)
        keys = kernel.keys_before(block_queries)

        pattern = kernel.pattern(block_queries, keys)
        out[:, block_queries] = kernel.output(pattern, keys)
        if see is not None:
            see(Rows(pattern, block_queries, keys, attention))
    return out.transpose(1, 2)


def rows_of_block(scores_of_row: int, device: torch.device) -> int:
    """The number of query rows that are computed together.

    Args:
        scores_of_row: The number of scores of one query position, in all heads and sequences.
        device: Where they are computed.

    Returns:
        :data:`BLOCK` on a CPU; on an accelerator the number of rows whose scores take 128 MiB, but
        at least :data:`BLOCK` and at most 1,024.
    """
    if device.type == "cpu":
        return BLOCK
    rows_in_memory = _SCORES_OF_BLOCK // scores_of_row
    return min(max(BLOCK, rows_in_memory), _LARGEST_BLOCK)


def for_each_head(
    x: Float[Tensor, "batch kv_head pos *d_head"], heads: int
) -> Float[Tensor, "batch {heads} pos *d_head"]:
    """Repeat the entries of each key-value head for its query heads.

    Query head h gets those of key-value head ``h // (head / kv_head)``.

    Args:
        x: Keys, values, or numbers that describe them, by key-value head.
        heads: The number of query heads, a multiple of the key-value heads.

    Returns:
        A copy in the order of the query heads.
    """
    return x.repeat_interleave(heads // x.shape[1], 1)


class _BlockKernel:
    """Computes the pattern of a block of queries, the inner loop of every run.

    All blocks share a buffer. It is viewed in several shapes and must not be copied, so the views
    are plain torch rather than einops. The heads of a group, which share keys, are stacked as rows
    of one product, so their keys are read once and not repeated.
    """

    def __init__(self, attention: Attention, block: int) -> None:
        """Stack queries, keys and values by key-value head, and allocate the buffer.

        Args:
            attention: The inputs of a layer's attention.
            block: The largest number of query rows in a block.
        """
        q = attention.q
        batch, heads, length, d_head = q.shape
        kv_heads = attention.k.shape[1]
        d_value = attention.v.shape[-1]
        dtype = working_dtype(q)

        self.attention = attention
        self.group_size = heads // kv_heads  # the number of heads that share keys
        stacks = batch * kv_heads
        self.q = q.reshape(stacks, self.group_size, length, d_head)

        # The keys are columns of the product, contiguous because every block reads them.
        k = attention.k.reshape(stacks, length, d_head).transpose(1, 2)
        self.k = k.to(dtype).contiguous()
        v = attention.v.reshape(stacks, length, d_value)
        self.v = v.to(dtype)

        # With a window, a block's queries see only the keys from the first one's window on.
        most_keys = length
        if attention.window is not None:
            most_keys = min(length, attention.window + block)
        most_rows = min(block, length)
        most_scores = batch * heads * most_rows * most_keys
        self.buffer = self.k.new_empty(most_scores)
        self.future_mask = _future_mask(block, dtype, q.device)

    def keys_before(self, queries: slice) -> slice:
        """The keys from the first to the last that any query of the block sees."""
        window = self.attention.window
        if window is None:
            return slice(0, queries.stop)

        # The block's first query sees furthest back.
        first_key = max(0, queries.start - window + 1)
        return slice(first_key, queries.stop)

    def pattern(self, queries: slice, keys: slice) -> Pattern:
        """Compute a block's attention probabilities in the buffer, which the next one overwrites.

        Args:
            queries: The positions of the block's rows.
            keys: The positions of its keys, see :meth:`keys_before`.

        Returns:
            Probabilities [batch head query key], a view of the buffer.
        """
        attention = self.attention
        stacks, _, _, d_head = self.q.shape
        row_count = self.group_size * (queries.stop - queries.start)
        key_count = keys.stop - keys.start

        # Two views of the same memory: by stack for the product, by head for everything else.
        score_count = stacks * row_count * key_count
        stacked = self.buffer[:score_count].view(stacks, row_count, key_count)
        by_head = stacked.view(*attention.q.shape[:2], -1, key_count)

        q = self.q[:, :, queries].to(stacked.dtype)
        scaled_q = (q * attention.scale).reshape(stacks, row_count, d_head)
        torch.bmm(scaled_q, self.k[:, :, keys], out=stacked)
        _cap_and_bias(attention, by_head, keys)
        self._mask(by_head, queries, keys)

        # A sink takes its share of a row. Computed first, since the softmax overwrites the scores.
        share_of_keys = None
        if attention.sinks is not None:
            share_of_keys = _share_of_keys(by_head, attention.sinks)
        torch.softmax(stacked, -1, out=stacked)
        if share_of_keys is not None:
            by_head.mul_(share_of_keys)
        return by_head

    def _mask(self, scores: Scores, queries: slice, keys: slice) -> None:
        """Mask the scores of keys that a query does not see, in place."""
        window = self.attention.window
        edge_mask = self.attention.edge_mask
        query_count = queries.stop - queries.start

        # Only the last keys, at the block's own positions, can be after one of its queries.
        own_keys = slice(queries.start - keys.start, None)
        scores[..., own_keys] += self.future_mask[:query_count, :query_count]

        # The window of an early query reaches back to the first key, and hides nothing.
        if edge_mask is None and (window is None or queries.stop <= window):
            return

        query_positions = torch.arange(queries.start, queries.stop, device=scores.device)
        if window is not None:
            # The first of ``keys`` is the first key that the block's first query sees. Each later
            # query's window starts one key later, so only the first ``query_count`` keys can be
            # outside one.
            stop = min(keys.start + query_count, keys.stop)
            early_positions = torch.arange(keys.start, stop, device=scores.device)
            is_outside = early_positions <= query_positions[:, None] - window
            scores[..., : len(early_positions)].masked_fill_(is_outside, _MASKED)

        if edge_mask is not None:
            unseen = edge_mask.unseen(query_positions.expand(len(scores), -1), keys)
            scores.masked_fill_(unseen[:, None], _MASKED)

    def output(self, pattern: Pattern, keys: slice) -> Float[Tensor, "batch query head d_value"]:
        """The output of the block's queries."""
        batch, heads, query_count, key_count = pattern.shape
        stacked = pattern.view(len(self.v), -1, key_count)
        out = torch.bmm(stacked, self.v[:, keys])
        return out.view(batch, heads, query_count, -1).transpose(1, 2)


@lru_cache(maxsize=8)  # every layer of every pass needs the same one
def _future_mask(
    block: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "query key"]:
    """The mask added to the scores of a block's own keys, so that no row sees the keys after it."""
    masked = torch.full((block, block), _MASKED, dtype=dtype, device=device)
    return masked.triu(1)


def _cap_and_bias(attention: Attention, scores: Scores, keys: slice) -> None:
    """Cap the scores of these keys and add the bias, in place."""
    if attention.softcap is not None:
        scores.div_(attention.softcap).tanh_().mul_(attention.softcap)
    if attention.bias is not None:
        scores += attention.bias[:, :, None, keys]


def _share_of_keys(scores: Scores, sinks: PerHead) -> Float[Tensor, "batch head query 1"]:
    """The share of each row that goes to keys rather than to the learned sink:
    ``Σ exp(s) / (Σ exp(s) + exp(sink))``."""
    lse_of_keys = scores.logsumexp(-1, keepdim=True)
    return torch.sigmoid(lse_of_keys - sinks[:, None, None])
