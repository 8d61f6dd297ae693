"""Causal attention in blocks of rows, or as sums from a fused kernel; its scores in parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

Pattern = Float[Tensor, "batch head query key"]  # attention probabilities, or scores
Tokens = Int[Tensor, "batch pos"]
Marked = Bool[Tensor, "batch pos"]  # some tokens of each sequence
BLOCK = 64  # rows; 32 and 128 are slower on a CPU
# An accelerator waits for its orders where a block is small: at most 128 MiB of scores, and so many
# rows.
_SCORES_OF_BLOCK = 2**25
_LARGEST_BLOCK = 1024
_APART = "batch kv_head (group query) last -> batch (kv_head group) query last"  # of grouped heads
_MASKED = -1e30  # finite, so adding it to a score cannot give NaN


def widened(tensor: Tensor) -> torch.dtype:
    """The dtype in which statistics and outputs are computed: float32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


@dataclass(frozen=True)
class EdgeMask:
    """Edges of attention that are cut before the softmax: some queries don't see some keys. A token
    sees itself.

    For one sequence [pos] or a batch [batch pos].
    """

    queries: Bool[Tensor, "*batch pos"]  # the queries that are blind to the keys
    keys: Bool[Tensor, "*batch pos"]
    # For one sequence: the layers where these edges are cut; None for all.
    layers: tuple[int, ...] | None = None
    later: bool = True  # for one sequence: whether tokens generated after it are blind too

    def unseen(
        self, queries: Int[Tensor, "batch query"], keys: slice
    ) -> Bool[Tensor, "batch query key"]:
        """The keys at these positions that each of the queries doesn't see."""
        positions = torch.arange(self.keys.shape[1], device=queries.device)[keys]
        cut = self.queries.gather(1, queries).unsqueeze(2) & self.keys[:, keys].unsqueeze(1)
        return cut & (queries.unsqueeze(2) != positions)

    def to(self, device: torch.device | str) -> EdgeMask:
        """The same on a device."""
        return replace(self, queries=self.queries.to(device), keys=self.keys.to(device))

    def of(self, sequences: Int[Tensor, " chosen"]) -> EdgeMask:
        """The same for some sequences of the batch."""
        return EdgeMask(self.queries[sequences], self.keys[sequences])


@dataclass(frozen=True)
class Attention:
    """The inputs of causal attention. ``A[q, k] = softmax over visible k of cap(scale · q·k) +
    bias[k]``.

    ``cap(s) = softcap · tanh(s / softcap)``. Sequences that are padded on the right need no mask:
    no token sees what comes after it.
    """

    q: Float[Tensor, "batch head pos d_head"]  # queries, after RoPE
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
    sinks: Float[Tensor, " head"] | None = None

    @property
    def fusable(self) -> bool:
        """Whether a fused kernel can compute it: not with capped scores, cut edges or a window that
        leaves keys out.
        """
        windowed = self.window is not None and self.window < self.q.shape[2]
        return self.softcap is None and self.edge_mask is None and not windowed

    def of(self, sequences: Int[Tensor, " chosen"]) -> Attention:
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

    def rows(
        self, queries: Int[Tensor, "batch query"], keys: int
    ) -> Float[Tensor, "batch head query {keys}"]:
        """Probabilities of any queries of each sequence over the first ``keys`` keys, all that they
        can see.
        """
        wide = widened(self.q)
        index = queries[:, None, :, None].expand(-1, self.q.shape[1], -1, self.q.shape[3])
        chosen = self.q.gather(2, index).to(wide) * self.scale
        chosen = rearrange(
            chosen,
            "batch (kv_head group) query d -> batch kv_head (group query) d",
            kv_head=self.k.shape[1],
        )
        transposed = self.k[:, :, :keys].to(wide).transpose(2, 3)
        scores = rearrange(chosen @ transposed, _APART, query=queries.shape[1])
        _cap_and_bias(self, scores, slice(0, keys))
        distance = queries[:, :, None] - torch.arange(keys, device=queries.device)
        unseen = distance < 0
        if self.window is not None:
            unseen |= distance >= self.window
        if self.edge_mask is not None:
            unseen |= self.edge_mask.unseen(queries, slice(0, keys))
        scores = scores.masked_fill(unseen[:, None], _MASKED)
        pattern = scores.softmax(-1)
        if self.sinks is None:
            return pattern
        return pattern * _left_by_sinks(scores, self.sinks)


@dataclass(frozen=True)
class PatternRows:
    """A whole pattern from a hook, and its values; rows are looked up."""

    pattern: Float[Tensor, "batch head pos pos"]
    v: Float[Tensor, "batch kv_head pos d_value"]

    def of(self, sequences: Int[Tensor, " chosen"]) -> PatternRows:
        """The same for some sequences of the batch."""
        return PatternRows(self.pattern[sequences], self.v[sequences])

    def rows(
        self, queries: Int[Tensor, "batch query"], keys: int
    ) -> Float[Tensor, "batch head query {keys}"]:
        """Probabilities of any queries of each sequence over the first ``keys`` keys."""
        index = queries[:, None, :, None].expand(-1, self.pattern.shape[1], -1, keys)
        return self.pattern[..., :keys].gather(2, index)


AnyRows = Attention | PatternRows  # one layer's attention, from which single rows can be requested


@dataclass(frozen=True)
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
    """``Σ_k A[q, k] v[k]``; head h reads key-value head ``h // (head / kv_head)``."""
    together = "batch (kv_head group) query key -> batch kv_head (group query) key"
    mixed = rearrange(pattern, together, kv_head=v.shape[1]) @ v.to(pattern.dtype)
    return rearrange(mixed, _APART, query=pattern.shape[2])


def attention_by_rows(
    attention: Attention,
    see: Callable[[Rows], None] | None = None,
    block: int | None = None,
    queries_of: slice | None = None,
) -> Float[Tensor, "batch head pos d_value"]:
    """``out[q] = Σ_k A[q, k] v[k]``; ``see`` is called with every block of rows; no [query, key]
    matrix is stored.

    With ``queries_of`` only these positions are computed, and the output of others is undefined.
    Values may have no dimensions, for rows alone. A block has :func:`rows_of_block` rows if no other
    number is given.
    """
    # The inner loop of every run. Plain torch, because one buffer has three shapes and must not be
    # copied.
    q = attention.q
    window = attention.window
    wide = widened(q)
    batch, heads, length, width = q.shape
    kv_heads = attention.k.shape[1]
    groups = heads // kv_heads
    n = batch * kv_heads
    queries = q.reshape(n, groups, length, width)
    keys = attention.k.reshape(n, length, width).transpose(1, 2).to(wide).contiguous()
    d_value = attention.v.shape[-1]
    values = attention.v.reshape(n, length, d_value).to(wide)
    if queries_of is None:
        queries_of = slice(0, length)
    if block is None:
        block = rows_of_block(batch * heads * length, q.device)

    # In the layout that the model needs, to avoid a copy.
    out = q.new_empty(batch, length, heads, d_value)
    most_keys = length
    if window:
        most_keys = min(length, window + block)
    buffer = keys.new_empty(n * groups * min(block, length) * most_keys)
    future = _future(block, wide, q.device)
    for start in range(queries_of.start, queries_of.stop, block):
        end = min(start + block, queries_of.stop)
        rows = end - start
        first_key = 0
        if window:
            first_key = max(0, start - window + 1)
        seen_keys = slice(first_key, end)
        count = end - first_key

        # The heads of a group are stacked as rows of one product, so their shared keys are read
        # once and not repeated.
        scores = buffer[: n * groups * rows * count].view(n, groups * rows, count)
        by_head = scores.view(batch, heads, rows, count)
        scaled = queries[:, :, start:end].to(wide) * attention.scale
        torch.bmm(scaled.reshape(n, groups * rows, width), keys[:, :, seen_keys], out=scores)
        _cap_and_bias(attention, by_head, seen_keys)

        # All other keys are before the block: no mask needed.
        by_head[..., start - first_key :] += future[:rows, :rows]
        positions = torch.arange(start, end, device=q.device)
        if window and end > window:
            early_keys = torch.arange(first_key, min(first_key + rows, end), device=q.device)
            outside = early_keys <= positions[:, None] - window
            by_head[..., : len(early_keys)].masked_fill_(outside, _MASKED)
        if attention.edge_mask is not None:
            unseen = attention.edge_mask.unseen(positions.expand(batch, -1), seen_keys)
            by_head.masked_fill_(unseen[:, None], _MASKED)

        # A sink takes its share of a row but has no value. The softmax overwrites the scores.
        left = None
        if attention.sinks is not None:
            left = _left_by_sinks(by_head, attention.sinks)
        pattern = torch.softmax(scores, -1, out=scores)
        if left is not None:
            by_head.mul_(left)
        if d_value:
            mixed = torch.bmm(pattern, values[:, seen_keys])
            out[:, start:end] = mixed.view(batch, heads, rows, d_value).transpose(1, 2)
        if see is not None:
            see(Rows(by_head, slice(start, end), seen_keys, attention))
    return out.transpose(1, 2)


def rows_of_block(scores_of_row: int, device: torch.device) -> int:
    """How many query rows of a layer are computed together, all heads and sequences of a batch
    taken together."""
    if device.type == "cpu":
        return BLOCK
    return min(max(BLOCK, _SCORES_OF_BLOCK // scores_of_row), _LARGEST_BLOCK)


@lru_cache(maxsize=32)  # a copy to a GPU waits for it
def constant(
    numbers: tuple[int, ...] | tuple[float, ...],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Shaped[Tensor, " number"]:
    """Fixed numbers as a tensor, one for all blocks and layers."""
    return torch.tensor(numbers, device=device, dtype=dtype)


@lru_cache(maxsize=8)
def _future(block: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "query key"]:
    """The mask added to the scores of a block's own keys, so that no row sees the keys after it."""
    return torch.full((block, block), _MASKED, dtype=dtype, device=device).triu(1)


def _cap_and_bias(attention: Attention, scores: Pattern, keys: slice) -> None:
    """Cap the scores and add the bias, in place."""
    if attention.softcap is not None:
        scores.div_(attention.softcap).tanh_().mul_(attention.softcap)
    if attention.bias is not None:
        scores += attention.bias[:, :, None, keys]


def _left_by_sinks(
    scores: Pattern, sinks: Float[Tensor, " head"]
) -> Float[Tensor, "batch head query 1"]:
    """The fraction of each row that a learned sink leaves: ``Σ exp(s) / (Σ exp(s) +
    exp(sink))``."""
    return torch.sigmoid(scores.logsumexp(-1, keepdim=True) - sinks[:, None, None])


def for_each_head(
    x: Float[Tensor, "batch kv_head pos *d_head"], heads: int
) -> Float[Tensor, "batch {heads} pos *d_head"]:
    """Repeat the tensor of each key-value head for its query heads: head h reads
    ``h // (head / kv_head)``.
    """
    return repeat(
        x, "batch kv_head pos ... -> batch (kv_head group) pos ...", group=heads // x.shape[1]
    )


def alibi_slopes(heads: int) -> Float[Tensor, " head"]:
    """The slope of each head: ``base^(h + 1)``, ``base = 2^(−8 / P)``, for the P heads of the
    largest power of two.

    The other heads get the odd powers of ``2^(−4 / P)``. Source: Press et al., arXiv:2108.12409,
    and its code.
    """
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    slopes += [2 ** (-4 * (2 * head + 1) / power) for head in range(heads - power)]
    return torch.tensor(slopes, dtype=torch.float64).float()


def mpt_slopes(heads: int, largest: float = 8.0) -> Float[Tensor, " head"]:
    """The slopes of MPT: those of the next power of two P, ``2^(−largest (h + 1) / P)``, with the
    odd ones first.
    """
    power = 2 ** math.ceil(math.log2(heads))
    slopes = 2.0 ** -(torch.arange(1, power + 1, dtype=torch.float64) * largest / power)
    if power > heads:
        slopes = torch.cat([slopes[1::2], slopes[::2]])[:heads]
    return slopes.float()


def score_parts(
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    b_q: Float[Tensor, "head d_head"],
    b_k: Float[Tensor, "kv_head d_head"],
    scale: float,
) -> tuple[Pattern, Float[Tensor, "batch head 1 key"], Float[Tensor, "batch head query 1"]]:
    """Content, bias, and the rest, which depends only on the query; they add up to
    ``scale · q · k``.

    ``content = (q − b_Q)·(k − b_K)``, ``bias = b_Q·(k − b_K)``, ``rest = q·b_K``, each times the
    scale. The rest drops out of the softmax. The split is that of raw weights: folding a LayerNorm
    changes it.
    """
    keys = for_each_head(k - b_k[:, None], q.shape[1]).contiguous()
    keys = rearrange(keys, "batch head key d_head -> batch head d_head key")
    content = scale * (q - b_q[:, None]) @ keys
    bias = scale * (b_q[None, :, None] @ keys)
    b_k = for_each_head(b_k[None, :, None], q.shape[1])[0, :, 0]
    rest = scale * einsum(q, b_k, "batch head query d_head, head d_head -> batch head query")
    return content, bias, rest[..., None]


def centred(
    part: Float[Tensor, "#batch head #query key"], visible: Bool[Tensor, "#batch 1 query key"]
) -> Pattern:
    """A part minus its mean over the keys that the query sees, which the softmax ignores."""
    part = part.expand(*part.shape[:2], *visible.shape[2:])
    count = visible.sum(-1, keepdim=True).clamp(min=1)
    return part - (part * visible).sum(-1, keepdim=True) / count


def ranked_target(
    scores: Pattern, visible: Bool[Tensor, "#batch 1 query key"], rank: int
) -> Int[Tensor, "batch head query"]:
    """The key with the largest score (rank 0), the second largest (1) … of each query [batch head
    query].
    """
    hidden = scores.masked_fill(~visible, -torch.inf)
    if rank == 0:
        return hidden.argmax(-1)
    return hidden.topk(min(rank + 1, hidden.shape[-1]), -1).indices[..., -1]


_MULTIPLE = 8  # kernels need a last axis that is a multiple of this
_HALF = (torch.float16, torch.bfloat16)
_NOTHING = -200.0  # stands for log 0; small enough for float16 even after division by the scale


@dataclass(frozen=True)
class Fused:
    """A layer's attention from a fused kernel, and the sums over queries that can be computed from
    it.
    """

    out: Float[Tensor, "batch head pos d_value"]  # ``Σ_k A[q, k] v[k]``
    # ``log Σ_k exp(score[q, k])``, including a learned sink; float32 at least
    lse: Float[Tensor, "batch head pos"]
    own: Float[Tensor, "batch head pos"]  # ``A[q, q]``
    q: Float[Tensor, "batch head pos d"]  # queries, with one more coordinate if there is ALiBi
    k: Float[Tensor, "batch head pos d"]  # keys for each query head, likewise
    scale: float  # the factor of the scores

    def column_sums(
        self, weights: Float[Tensor, "batch pos group"]
    ) -> Float[Tensor, "batch head pos group"]:
        """``Σ_q A[q, k] w[q, group]`` over the queries q ≥ k, for groups of queries.

        ``A[q, k] = exp(scale · q·k − lse[q])``, so in a causal call with time reversed, keys
        ``[k, 1]`` as queries and queries ``[q, −lse / scale]`` as keys, the log-sum-exp of key k is
        ``log Σ_{q ≥ k} A[q, k]``. With values w, the output is the mean of w under these weights,
        for many groups in one call. In half precision that mean would keep only 8 or 11 bits, so
        each group gets its own call, with ``log w`` added to its queries.
        """
        reversed_weights = weights.flip(1)[:, None].expand(-1, self.q.shape[1], -1, -1)
        sums = []
        if self.q.dtype in _HALF:
            for weight in reversed_weights.unbind(-1):
                log_weight = weight.log().clamp(min=_NOTHING)
                _, lse = self._reversed_call(log_weight, weight[..., None])
                sums.append(lse.exp())
            return torch.stack(sums, -1).flip(2)
        # As many groups in a call as there are dimensions.
        for values in reversed_weights.split(self.q.shape[-1], -1):
            mean, lse = self._reversed_call(None, values)
            sums.append(mean * lse.exp()[..., None])
        return torch.cat(sums, -1).flip(2)

    def query_sums(
        self, weights: Float[Tensor, "batch pos group"]
    ) -> Float[Tensor, "batch head pos group"]:
        """``Σ_k A[q, k] w[k, group]`` of each query, for groups of keys.

        One more causal call, with these weights as values. In half precision its output would keep
        only 8 or 11 bits, so the call is in float32.
        """
        dtype = torch.float32 if self.q.dtype in _HALF else self.q.dtype
        values = weights.to(dtype)[:, None].expand(-1, self.q.shape[1], -1, -1)
        mean, lse = _kernel(self.q.to(dtype), self.k.to(dtype), values, self.scale)
        without_sink = (lse - self.lse).exp()
        return mean * without_sink[..., None]

    def _reversed_call(
        self,
        log_weight: Float[Tensor, "batch head pos"] | None,
        values: Float[Tensor, "batch head pos group"],
    ) -> tuple[Float[Tensor, "batch head pos group"], Float[Tensor, "batch head pos"]]:
        """The causal call with time reversed; arguments and results are in the usual order."""
        added = -self.lse.flip(2)
        if log_weight is not None:
            added = log_weight + added
        extra = _in_parts(added / self.scale, self.q.dtype)
        queries_as_keys = torch.cat([self.q.flip(2), extra], -1)
        keys_as_queries = torch.cat([self.k.flip(2), torch.ones_like(extra)], -1)
        return _kernel(keys_as_queries, queries_as_keys, values.to(self.q.dtype), self.scale)


def fused_attention(attention: Attention) -> Fused:
    """The output and the log-sum-exp of one causal call of the kernel for this device and dtype.

    Statistics that need a row's maximum (the strongest target, the smallest set of keys) or its
    logarithms cannot be computed this way; they are computed in rows
    (:func:`mechattn.functional.attention.attention_by_rows`).

    Source: Own derivation: the second call's weights are a softmax over queries.
    """
    q = attention.q
    k = for_each_head(attention.k, q.shape[1])
    v = for_each_head(attention.v, q.shape[1])
    scale = attention.scale
    if attention.bias is not None:  # score = scale · [q, 1]·[k, b / scale]
        extra = _in_parts((attention.bias / scale).expand(len(q), -1, -1), q.dtype)
        q = torch.cat([q, torch.ones_like(extra)], -1)
        k = torch.cat([k, extra], -1)
    out, lse = _kernel(q, k, v, scale)
    if attention.sinks is not None:
        lse_of_keys = lse
        lse = torch.logaddexp(lse, attention.sinks.to(lse.dtype)[:, None])
        left = (lse_of_keys - lse).exp()
        out = out * left[..., None].to(out.dtype)
    own = ((q.to(lse.dtype) * k.to(lse.dtype)).sum(-1) * scale - lse).exp()
    return Fused(out, lse, own, q, k, scale)


def _in_parts(number: Float[Tensor, "*any"], dtype: torch.dtype) -> Float[Tensor, "*any part"]:
    """Numbers as a sum of parts in ``dtype``: three in half precision, since 8 or 11 bits alone
    would change A.
    """
    if dtype not in _HALF:
        return number.to(dtype)[..., None]
    summands = []
    remainder = number.float()
    for _ in range(3):
        summand = remainder.to(dtype)
        summands.append(summand)
        remainder = remainder - summand.float()
    return torch.stack(summands, -1)


def _kernel(
    q: Float[Tensor, "batch head pos d"],
    k: Float[Tensor, "batch head pos d"],
    v: Float[Tensor, "batch head pos d_v"],
    scale: float,
) -> tuple[Float[Tensor, "batch head pos d_v"], Float[Tensor, "batch head pos"]]:
    """Causal attention and its log-sum-exp: flash attention, or on a GPU in float32 the
    memory-efficient kernel.
    """
    length = q.shape[2]
    d_v = v.shape[-1]
    width = -(-max(q.shape[-1], d_v) // _MULTIPLE) * _MULTIPLE
    q = torch.nn.functional.pad(q, (0, width - q.shape[-1]))
    k = torch.nn.functional.pad(k, (0, width - k.shape[-1]))
    v = torch.nn.functional.pad(v, (0, width - d_v))
    aten = torch.ops.aten
    if q.device.type != "cuda":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    elif q.dtype in _HALF:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)
    else:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, True, scale=scale
        )
    return out[..., :d_v], lse[..., :length]
