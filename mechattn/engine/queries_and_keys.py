"""Attention statistics from queries and keys alone: no model, no prompts, and no [query, key] matrix in memory."""

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
    """How a model makes the scores of its attention, ``cap(scale · q·k) + alibi · k``, and which of them it sees.

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
        length, width = q.shape[2:]
        places = torch.arange(length, device=q.device, dtype=widened(q))
        bias = None if self.alibi is None else (self.alibi.to(places.dtype)[:, None] * places)[None]
        sinks = None if self.sinks is None else self.sinks.to(places.dtype)
        scale = width**-0.5 if self.scale is None else float(self.scale)
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
    """Compute statistics of causal attention from queries and keys as they enter the softmax (after RoPE and norms).

    ``A[q, k] = softmax over visible k of cap(scale · q·k) + alibi · k``, in blocks of query rows, in float32 at least,
    with the streaming code of ``run``.

    Args:
        q: Queries.
        k: Keys; head h reads key-value head ``h // (head / kv_head)``.
        v: Values, needed only for "output".
        scores: The scale, window, soft cap, ALiBi slopes and sinks of the scores; plain ``q·k / √d_head`` by default.
        lengths: The number of positions of each sequence without the padding on its right; all by default.
        counted: The queries that count in "received"; all by default.
        segments: For "mass": the keys of each segment, by name.
        statistics: The statistics to compute:

            - "received" [batch head key]: mean of ``A[q, k]`` over counted ``q > k`` that can see k.
            - "mass" [batch head query segment]: attention to all keys of each of the ``segments``, in their order.
            - "entropy" [batch head query], in nats. With the same shape: "self_mass", "first_mass",
              "previous_mass"; "largest" probability, its position "target", and its lead "concentration" over the
              second largest; mean "distance" in positions; "half_mass_keys", the fewest keys that hold half.
            - "output" [batch head pos d_value]: ``Σ_k A[q, k] v[k]``, to compare with the kernel that ran.

    Returns:
        The statistics by name; NaN at padding, where a query has no token before it ("previous_mass"), and at keys that
        no counted query sees. For the null, uniform attention, call ``measure(torch.zeros_like(q), k, …)``.

    Raises:
        OptionError: A shape, a statistic or an option is not allowed.
    """
    _check_shapes(q, k, v, scores, {"counted": counted, **(segments or {})})
    real = _real(q, lengths)
    _check_statistics(statistics, v, segments)
    asking = real if counted is None else real & counted
    members = torch.stack([*(segments or {"": real}).values()], -1)
    sums = torch.zeros(2, *q.shape[:3], device=q.device, dtype=widened(q))
    found: dict[str, list[Tensor]] = {
        name: [] for name in statistics if name not in ("received", "output")
    }

    def see(rows: Rows) -> None:
        if "received" in statistics:
            sums[0][..., rows.keys] += fn.column_sums(rows.pattern, asking[:, rows.queries])
            sums[1][..., rows.queries] += fn.self_attention(
                rows.pattern, rows.queries.start, rows.keys.start
            )
        of_block: dict[str, Tensor] = {}
        if _TOP & found.keys():
            largest, second, at = focus.top_two(rows.pattern)
            lead = largest - second.clamp(min=0)
            of_block = {"largest": largest, "target": at + rows.keys.start, "concentration": lead}
        if "mass" in found:
            of_block["mass"] = rows.pattern @ members[:, None, rows.keys].to(rows.pattern)
        for name, blocks in found.items():
            blocks.append(of_block[name] if name in of_block else _OF_ROWS[name](rows).clone())

    with torch.no_grad():
        out = attention_by_rows(
            scores.attention(q, k, torch.zeros_like(k[..., :1]) if v is None else v), see
        )
    made = {name: torch.cat(blocks, 2).to(widened(q)) for name, blocks in found.items()}
    if "output" in statistics:
        made["output"] = out
    if "received" in statistics:
        attended = sums[0] - sums[1] * asking[:, None]
        made["received"] = fn.received_attention(attended, fn.seeing_queries(asking, scores.window))
    for name, each in made.items():
        made[name] = each.masked_fill(
            ~real.view(len(real), 1, -1, *[1] * (each.ndim - 3)), torch.nan
        )
    if "previous_mass" in made:
        made["previous_mass"][..., 0] = torch.nan
    return {name: made[name] for name in statistics}


_TOP = {"largest", "target", "concentration"}
_OF_ROWS: dict[str, Callable[[Rows], Tensor]] = {
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
    batch, length = q.shape[0], q.shape[2]
    made = torch.full((batch,), length) if lengths is None else torch.as_tensor(lengths)
    if (
        tuple(made.shape) != (batch,)
        or made.is_floating_point()
        or int(made.min()) < 1
        or int(made.max()) > length
    ):
        raise OptionError(
            f"lengths={lengths!r}: give a whole number from 1 to {length} for each of {batch} sequences"
        )
    return torch.arange(length, device=q.device) < made.to(q.device)[:, None]


def _kind(given: Any) -> str:
    return (
        f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
    )


def _check_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    scores: AttentionScores,
    masks: Mapping[str, Tensor | None],
) -> None:
    for name, given in (("q", q), ("k", k), ("v", k if v is None else v)):
        if not isinstance(given, Tensor) or given.ndim != 4 or not given.is_floating_point():
            raise OptionError(
                f"{name} is {_kind(given)}; give floating-point numbers [batch, head, pos, d_head]"
            )
    batch, heads, length, width = q.shape
    if (
        k.shape[0] != batch
        or k.shape[2:] != (length, width)
        or not k.shape[1]
        or heads % k.shape[1]
    ):
        raise OptionError(
            f"q is {tuple(q.shape)} and k {tuple(k.shape)}; give [batch, head, pos, d_head] for both, with equal "
            f"numbers of positions, and a number of heads of k that divides that of q"
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
        if mask is not None and (tuple(mask.shape) != (batch, length) or mask.dtype != torch.bool):
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
