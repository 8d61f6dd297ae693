"""Attention statistics from queries and keys alone: no model, no prompts, and no [query, key]
matrix in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechattn.errors import OptionError
from mechattn.functional import focus
from mechattn.functional import received as fn
from mechattn.functional.attention import Attention, Rows, attention_by_rows, widened

Statistic = Literal[
    "received", "mass", "entropy", "self_mass", "first_mass", "previous_mass", "largest", "target", "concentration",
    "distance", "half_mass_keys", "output",
]  # fmt: skip


@dataclass(frozen=True)
class AttentionScores:
    """How a model makes the scores of its attention, ``cap(scale · q·k) + alibi · k``, and which of
    them it sees.

    Args:
        scale: The factor of the scores; ``1 / √d_head`` by default.
        window: The number of keys that a query sees, including its own; all by default.
        softcap: The bound of soft-capped scores.
        alibi: The slope of each head.
        sinks: The score of each head's learned sink.

    Raises:
        OptionError: A window without keys, or a bound of 0 or less.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    alibi: Float[Tensor, " head"] | None = None
    sinks: Float[Tensor, " head"] | None = None

    def __post_init__(self) -> None:
        if self.window is not None and (type(self.window) is not int or self.window < 1):
            raise OptionError(
                f"window={self.window!r}: give a number of keys, at least 1, or None for all"
            )
        if self.softcap is not None and not self.softcap > 0:
            raise OptionError(f"softcap={self.softcap!r}: give a bound above 0, or None")

    def attention(
        self,
        q: Float[Tensor, "batch head pos d_head"],
        k: Float[Tensor, "batch kv_head pos d_head"],
        v: Float[Tensor, "batch kv_head pos d_value"],
    ) -> Attention:
        """The attention of these queries, keys and values, as the row kernel takes it."""
        length, d_head = q.shape[2:]
        dtype = widened(q)
        bias = None
        if self.alibi is not None:
            positions = torch.arange(length, device=q.device, dtype=dtype)
            bias = (self.alibi.to(dtype)[:, None] * positions)[None]
        sinks = None if self.sinks is None else self.sinks.to(dtype)
        scale = d_head**-0.5 if self.scale is None else float(self.scale)
        return Attention(q, k, v, scale, bias, self.window, self.softcap, None, sinks)


def measure(
    q: Float[Tensor, "batch head pos d_head"],
    k: Float[Tensor, "batch kv_head pos d_head"],
    v: Float[Tensor, "batch kv_head pos d_value"] | None = None,
    *,
    scores: AttentionScores = AttentionScores(),
    lengths: Sequence[int] | Int[Tensor, " batch"] | None = None,
    counted: Bool[Tensor, "batch pos"] | None = None,
    segments: Mapping[str, Bool[Tensor, "batch pos"]] | None = None,
    statistics: Sequence[Statistic] = ("received", "entropy"),
) -> dict[str, Tensor]:
    """Compute statistics of causal attention from queries and keys as they enter the softmax (after
    RoPE and norms).

    ``A[q, k] = softmax over visible k of cap(scale · q·k) + alibi · k``, in blocks of query rows,
    in float32 at least, with the streaming code of ``run``.

    Args:
        q: Queries.
        k: Keys; head h reads key-value head ``h // (head / kv_head)``.
        v: Values, needed only for "output".
        scores: The scale, window, soft cap, ALiBi slopes and sinks of the scores; plain ``q·k /
            √d_head`` by default.
        lengths: The number of positions of each sequence without the padding on its right; all by
            default.
        counted: The queries that count in "received"; all by default.
        segments: For "mass": the keys of each segment, by name.
        statistics: The statistics to compute:

            - "received" [batch head key]: mean of ``A[q, k]`` over counted ``q > k`` that can see
              k.
            - "mass" [batch head query segment]: attention to all keys of each of the ``segments``,
              in their order.
            - "entropy" [batch head query], in nats. With the same shape: "self_mass", "first_mass",
              "previous_mass"; "largest" probability, its position "target", and its lead
              "concentration" over the second largest; mean "distance" in positions;
              "half_mass_keys", the fewest keys that hold half.
            - "output" [batch head pos d_value]: ``Σ_k A[q, k] v[k]``, to compare with the kernel
              that ran.

    Returns:
        The statistics by name; NaN at padding, where a query has no token before it
        ("previous_mass"), and at keys that no counted query sees. For the null, uniform attention,
        call ``measure(torch.zeros_like(q), k, …)``.

    Raises:
        OptionError: A shape, a statistic or an option is not allowed.
    """
    _check_shapes(q, k, v, scores, {"counted": counted, **(segments or {})})
    real = _real(q, lengths)
    _check_statistics(statistics, v, segments)
    is_counted = real if counted is None else real & counted
    members = torch.stack([*(segments or {"": real}).values()], -1)
    dtype = widened(q)
    column_sums = torch.zeros(*q.shape[:3], device=q.device, dtype=dtype)
    self_attention = torch.zeros_like(column_sums)
    by_query = [name for name in statistics if name not in ("received", "output")]
    blocks: dict[str, list[Tensor]] = {name: [] for name in by_query}

    def see(rows: Rows) -> None:
        if "received" in statistics:
            column_sums[..., rows.keys] += fn.column_sums(rows.pattern, is_counted[:, rows.queries])
            self_attention[..., rows.queries] += fn.self_attention(
                rows.pattern, rows.queries.start, rows.keys.start
            )
        of_block = _largest_of(rows) if OF_LARGEST & set(by_query) else {}
        for name in by_query:
            if name == "mass":
                value = rows.pattern @ members[:, None, rows.keys].to(rows.pattern)
            elif name in of_block:
                value = of_block[name]
            else:
                value = OF_ROWS[name](rows).clone()
            blocks[name].append(value)

    if v is None:
        v = torch.zeros_like(k[..., :1])
    with torch.no_grad():
        output = attention_by_rows(scores.attention(q, k, v), see)

    values = {name: torch.cat(of_name, 2).to(dtype) for name, of_name in blocks.items()}
    if "output" in statistics:
        values["output"] = output
    if "received" in statistics:
        attended = column_sums - self_attention * is_counted[:, None]
        seeing = fn.seeing_queries(is_counted, scores.window)
        values["received"] = fn.received_attention(attended, seeing)

    for name, value in values.items():
        is_padding = ~real.view(len(real), 1, -1, *[1] * (value.ndim - 3))
        values[name] = value.masked_fill(is_padding, torch.nan)
    if "previous_mass" in values:
        values["previous_mass"][..., 0] = torch.nan
    return {name: values[name] for name in statistics}


OF_LARGEST = {"largest", "target", "concentration"}


def _largest_of(rows: Rows) -> dict[str, Tensor]:
    """Each query's largest probability, its position, and its lead over the second largest."""
    largest, second, index = focus.top_two(rows.pattern)
    return {
        "largest": largest,
        "target": index + rows.keys.start,
        "concentration": largest - second.clamp(min=0),
    }


OF_ROWS: dict[str, Callable[[Rows], Tensor]] = {
    "entropy": lambda rows: focus.entropy(rows.pattern),
    "self_mass": lambda rows: fn.self_attention(rows.pattern, rows.queries.start, rows.keys.start),
    "first_mass": lambda rows: rows.pattern[..., 0] * (rows.keys.start == 0),
    "previous_mass": lambda rows: focus.looking_back(
        rows.pattern, 1, rows.queries.start, rows.keys.start
    )[0],
    "distance": lambda rows: focus.mean_distance(rows.pattern, rows.queries.start, rows.keys.start),
    "half_mass_keys": lambda rows: focus.half_mass_keys(rows.pattern),
}


def _real(q: Tensor, lengths: Any) -> Bool[Tensor, "batch pos"]:
    """The positions that are not padding, from checked lengths."""
    batch, _, longest, _ = q.shape
    counts = torch.full((batch,), longest) if lengths is None else torch.as_tensor(lengths)
    is_one_a_sequence = tuple(counts.shape) == (batch,) and not counts.is_floating_point()
    if not is_one_a_sequence or int(counts.min()) < 1 or int(counts.max()) > longest:
        raise OptionError(
            f"lengths={lengths!r}: give a whole number from 1 to {longest} for each of {batch}"
            " sequences"
        )
    return torch.arange(longest, device=q.device) < counts.to(q.device)[:, None]


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return type(value).__name__


def _check_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    scores: AttentionScores,
    masks: Mapping[str, Tensor | None],
) -> None:
    for name, array in (("q", q), ("k", k), ("v", k if v is None else v)):
        if not isinstance(array, Tensor) or array.ndim != 4 or not array.is_floating_point():
            raise OptionError(
                f"{name} is {_kind(array)}; give floating-point numbers [batch, head, pos, d_head]"
            )
    batch, heads, length, _ = q.shape
    kv_heads = k.shape[1]
    others_agree = k.shape[0] == batch and k.shape[2:] == q.shape[2:]
    if not others_agree or not kv_heads or heads % kv_heads:
        raise OptionError(
            f"q is {tuple(q.shape)} and k {tuple(k.shape)}; give [batch, head, pos, d_head] for"
            " both, with equal numbers of positions, and a number of heads of k that divides that"
            " of q"
        )
    if v is not None and v.shape[:3] != k.shape[:3]:
        raise OptionError(
            f"v is {tuple(v.shape)} and k {tuple(k.shape)}; only the last axis may differ"
        )
    for name, numbers in (("alibi", scores.alibi), ("sinks", scores.sinks)):
        if numbers is not None and tuple(numbers.shape) != (heads,):
            raise OptionError(
                f"{name} is {_kind(numbers)}; give one number for each of {heads} heads"
            )
    for name, mask in masks.items():
        if mask is None:
            continue
        if tuple(mask.shape) != (batch, length) or mask.dtype != torch.bool:
            raise OptionError(f"{name} is {_kind(mask)}; give torch.bool ({batch}, {length})")


def _check_statistics(
    statistics: Any, v: Tensor | None, segments: Mapping[str, Tensor] | None
) -> None:
    known = get_args(Statistic)
    if isinstance(statistics, str) or not statistics or not set(statistics) <= set(known):
        raise OptionError(
            f"statistics={statistics!r}: give a list of {', '.join(map(repr, known))}"
        )
    if "mass" in statistics and not segments:
        raise OptionError('"mass" needs segments={name: mask of its keys, torch.bool [batch, pos]}')
    if "output" in statistics and v is None:
        raise OptionError('"output" needs the values v')
