"""Attention statistics from queries and keys alone: no model, no prompts, and no [query, key]
matrix in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from jaxtyping import Float
from torch import Tensor

from mechattn.errors import OptionError, check_counts
from mechattn.functional import received as fn
from mechattn.functional.attention import (
    Attention,
    Marked,
    PerHead,
    Rows,
    Vectors,
    attention_by_rows,
    working_dtype,
)
from mechattn.functional.focus import entropy

Keys = Float[Tensor, "batch kv_head pos d_head"]
Values = Float[Tensor, "batch kv_head pos d_value"]


@dataclass(frozen=True, eq=False)
class AttentionScores:
    """How a model computes the score of a visible key: ``cap(scale · q·k) + alibi · position(k)``.

    Args:
        scale: The factor of the scores; ``1 / √d_head`` by default.
        window: The number of keys that a query sees, including its own; all by default.
        softcap: The bound of soft-capped scores; scores are not capped by default.
        alibi: The slope of each head; none by default.
        sinks: The score of each head's learned sink; none by default.

    Raises:
        OptionError: The window is not a whole number above 0, the soft cap is not a finite number
            above 0, or the scale is not a finite number.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    alibi: PerHead | None = None
    sinks: PerHead | None = None

    def __post_init__(self) -> None:
        if self.window is not None:
            check_counts(window=self.window)
        if self.softcap is not None and not (_is_finite(self.softcap) and self.softcap > 0):
            raise OptionError(f"softcap={self.softcap!r}: give a finite bound above 0, or None")
        if self.scale is not None and not _is_finite(self.scale):
            raise OptionError(f"scale={self.scale!r}: give a finite number, or None")

    def attention(self, q: Vectors, k: Keys, v: Values) -> Attention:
        """Return the inputs of the row kernel for these queries, keys and values.

        Args:
            q: Queries.
            k: Keys; head h reads key-value head ``h // (head / kv_head)``.
            v: Values; their last axis may be empty if no output is needed.
        """
        dtype = working_dtype(q)
        scale = self.scale
        if scale is None:
            scale = q.shape[-1] ** -0.5

        # Slope times the key's position. The query's position would add a constant to its row.
        bias = None
        if self.alibi is not None:
            positions = torch.arange(q.shape[2], device=q.device, dtype=dtype)
            bias = (self.alibi.to(dtype)[:, None] * positions)[None]

        return Attention(
            q,
            k,
            v,
            scale,
            bias=bias,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
        )


def measure(
    q: Vectors,
    k: Keys,
    v: Values | None = None,
    *,
    scores: AttentionScores = AttentionScores(),
    lengths: Sequence[int] | None = None,
    counted: Marked | None = None,
    segments: Mapping[str, Marked] | None = None,
) -> dict[str, Tensor]:
    """Compute statistics of causal attention from queries and keys.

    ``A[q, k] = softmax over visible k of cap(scale · q·k) + alibi · position(k)``, computed in
    blocks of query rows and at least in float32, with the streaming code of ``run``. The softmax
    also runs over a head's sink, whose probability is left out of A.

    Queries of 0 give the null, uniform attention: ``measure(torch.zeros_like(q), k)``. Slopes and
    sinks in ``scores`` would make it non-uniform.

    Args:
        q: Queries as they enter the scores, after RoPE and norms; so are the keys.
        k: Keys; head h reads key-value head ``h // (head / kv_head)``.
        v: Values; with them, "output" is computed too.
        scores: The scale, window, soft cap, ALiBi slopes and sinks of the scores; plain ``q·k /
            √d_head`` by default.
        lengths: The number of positions of each sequence without the padding on its right; all by
            default. The tensors may hold anything at padding, even NaN.
        counted: The queries that count in "received"; all by default.
        segments: The keys of each segment, by name; with them, "mass" is computed too.

    Returns:
        The statistics by name, NaN at padding:

        - "received" [batch head key]: mean of ``A[q, k]`` over counted ``q > k`` that can see k;
            NaN at a key that no counted query sees.
        - "entropy" [batch head query]: the entropy of each query's attention, in nats.
        - "largest" [batch head query]: the largest probability of each query.
        - "target" [batch head query]: the position of the key with this probability.
        - "mass" [batch head query segment]: attention to all keys of each of the ``segments``, in
            their order.
        - "output" [batch head pos d_value]: ``Σ_k A[q, k] v[k]``, to compare with the output of the
            model's own kernel.

    Raises:
        OptionError: The shapes or lengths do not fit together, or a tensor has the wrong dtype.
    """
    _check_vectors(q, k, v)
    _check_options(q, scores, counted, segments)

    if lengths is None:
        is_real = torch.ones(len(q), q.shape[2], dtype=torch.bool, device=q.device)
    else:
        is_real = _real_positions(lengths, q)
        # Some kernels leave NaN at padding, and 0 · NaN is NaN.
        is_padding = ~is_real[:, None, :, None]
        q = q.masked_fill(is_padding, 0)
        k = k.masked_fill(is_padding, 0)
        if v is not None:
            v = v.masked_fill(is_padding, 0)
    is_counted = is_real
    if counted is not None:
        is_counted = is_real & counted

    # Sums over queries grow with each block; statistics of each query are joined at the end.
    column_sums = torch.zeros(q.shape[:3], device=q.device, dtype=working_dtype(q))
    self_attention = torch.zeros_like(column_sums)
    blocks: list[dict[str, Tensor]] = []

    def see(rows: Rows) -> None:
        counted_rows = is_counted[:, rows.queries]
        own_attention = fn.self_attention(rows.pattern, rows.queries.start, rows.keys.start)
        column_sums[..., rows.keys] += fn.column_sums(rows.pattern, counted_rows)
        self_attention[..., rows.queries] = own_attention * counted_rows[:, None]
        blocks.append(_of_queries(rows, segments))

    # With an empty last axis of the values, no output is computed.
    values = v
    if values is None:
        values = k[..., :0]
    with torch.no_grad():
        output = attention_by_rows(scores.attention(q, k, values), see)

    # A query's attention to its own key does not count.
    received = column_sums - self_attention
    seeing_counts = fn.seeing_queries(is_counted, scores.window)
    statistics = {"received": fn.received_attention(received, seeing_counts)}
    for name in blocks[0]:
        statistics[name] = torch.cat([block_statistics[name] for block_statistics in blocks], 2)
    if v is not None:
        statistics["output"] = output

    for statistic in statistics.values():
        statistic.transpose(1, 2)[~is_real] = torch.nan  # [batch pos head] or [batch pos head …]
    return statistics


def _is_finite(number: object) -> bool:
    """Whether this is a number other than NaN and infinity."""
    return isinstance(number, Real) and math.isfinite(number)


def _check_vectors(q: Vectors, k: Keys, v: Values | None) -> None:
    """Refuse queries, keys and values that are not float tensors with shapes that fit together."""
    vectors = [q, k]
    if v is not None:
        vectors.append(v)
    are_floats = all(
        isinstance(tensor, Tensor) and tensor.is_floating_point() for tensor in vectors
    )
    if are_floats and _shapes_fit(q, k, v):
        return

    shapes = [list(getattr(tensor, "shape", ())) for tensor in vectors]
    raise OptionError(
        f"q, k (and v) have the shapes {shapes}: give float tensors [batch, head, pos, d_head]"
        " of the same sizes, except that the number of heads of k and v may be a divisor of"
        " that of q, and v may have another last axis"
    )


def _shapes_fit(q: Vectors, k: Keys, v: Values | None) -> bool:
    """Whether queries, keys and values fit together. Keys and values may have fewer heads, and
    values another width."""
    if q.ndim != 4 or k.ndim != 4 or q.numel() == 0 or k.numel() == 0:
        return False
    if v is not None and (v.ndim != 4 or v.shape[:3] != k.shape[:3]):
        return False
    return k.shape == (len(q), k.shape[1], *q.shape[2:]) and q.shape[1] % k.shape[1] == 0


def _check_options(
    q: Vectors,
    scores: AttentionScores,
    counted: Marked | None,
    segments: Mapping[str, Marked] | None,
) -> None:
    """Refuse slopes and sinks of another number of heads, and marks that are not boolean tensors of
    these positions."""
    _, heads, length, _ = q.shape
    _check_shape("alibi", scores.alibi, head=heads)
    _check_shape("sinks", scores.sinks, head=heads)
    for name, marked in (("counted", counted), *(segments or {}).items()):
        _check_shape(name, marked, batch=len(q), pos=length)
        if marked is not None and marked.dtype != torch.bool:
            raise OptionError(f"{name} has the dtype {marked.dtype}: give a boolean tensor")


def _check_shape(name: str, tensor: Tensor | None, **sizes: int) -> None:
    """Refuse anything but None and a tensor of these sizes."""
    if tensor is None:
        return
    shape = list(getattr(tensor, "shape", ()))
    if not isinstance(tensor, Tensor) or shape != list(sizes.values()):
        raise OptionError(
            f"{name} has the shape {shape}: give a tensor [{', '.join(sizes)}] ="
            f" {list(sizes.values())}"
        )


def _real_positions(lengths: Sequence[int], q: Vectors) -> Marked:
    """Which positions of the queries hold a token rather than padding."""
    batch, _, longest, _ = q.shape
    error = OptionError(f"lengths={lengths!r}: give {batch} whole numbers from 1 to {longest}")
    try:
        counts = torch.as_tensor(lengths, device=q.device)
    except (TypeError, ValueError, RuntimeError):  # such as lists of different lengths
        raise error from None
    is_whole = not counts.is_floating_point() and counts.dtype != torch.bool
    if not is_whole or counts.shape != (batch,) or (counts < 1).any() or (counts > longest).any():
        raise error
    return torch.arange(longest, device=q.device) < counts[:, None]


def _of_queries(rows: Rows, segments: Mapping[str, Marked] | None) -> dict[str, Tensor]:
    """The statistics of each query of a block, [batch head query …]."""
    largest, column = rows.pattern.max(-1)
    statistics = {
        "entropy": entropy(rows.pattern),
        "largest": largest,
        "target": (column + rows.keys.start).to(largest.dtype),
    }
    if segments:
        segment_marks = torch.stack([*segments.values()], -1)
        key_marks = segment_marks[:, None, rows.keys].to(largest.dtype)
        statistics["mass"] = rows.pattern @ key_marks
    return statistics
