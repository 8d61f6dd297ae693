"""Attention statistics from queries and keys alone: no model, no prompts, and no [query, key] matrix in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechattn.errors import OptionError
from mechattn.functional import focus
from mechattn.functional import received as fn
from mechattn.functional.rows import Attention, Rows, attention_by_rows

Statistic = Literal[
    "received", "mass", "entropy", "self_mass", "first_mass", "previous_mass", "largest", "target", "concentration",
    "distance", "half_mass_keys", "output",
]  # fmt: skip


def measure(
    q: Float[Tensor, "batch head pos d_head"],
    k: Float[Tensor, "batch kv_head pos d_head"],
    v: Float[Tensor, "batch kv_head pos d_value"] | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi: Float[Tensor, " head"] | None = None,
    sinks: Float[Tensor, " head"] | None = None,
    lengths: Seq[int] | Int[Tensor, " batch"] | None = None,
    counted: Bool[Tensor, "batch pos"] | None = None,
    segments: Mapping[str, Bool[Tensor, "batch pos"]] | None = None,
    statistics: Seq[Statistic] = ("received", "entropy"),
) -> dict[str, Tensor]:
    """Compute statistics of causal attention from queries and keys as they enter the softmax (after RoPE and norms).

    ``A[q, k] = softmax over visible k of cap(scale · q·k) + alibi · k``, in blocks of query rows, in float32 at least,
    with the streaming code of ``run``.

    Args:
        q: Queries.
        k: Keys; head h reads key-value head ``h // (head / kv_head)``.
        v: Values, needed only for "output".
        scale: The factor of the scores; ``1 / √d_head`` by default.
        window: The number of keys that a query sees, including its own; all by default.
        softcap: The bound of soft-capped scores.
        alibi: The slope of each head.
        sinks: The score of each head's learned sink.
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
    real = _real(q, _checked_lengths(q, lengths))
    _check_shapes(q, k, v, {"alibi": alibi, "sinks": sinks}, {"counted": counted, **(segments or {})})
    _check_options(v, segments, window, softcap, statistics)
    attention = _attention(q, k, v, scale, window, softcap, alibi, sinks)
    asking = real if counted is None else real & counted
    members = torch.stack([*(segments or {"": real}).values()], -1)
    sums = torch.zeros(2, *q.shape[:3], device=q.device, dtype=_wide(q))
    found: dict[str, list[Tensor]] = {name: [] for name in statistics if name not in ("received", "output")}

    def see(rows: Rows) -> None:
        if "received" in statistics:
            sums[0][..., rows.keys] += fn.column_sums(rows.pattern, asking[:, rows.queries])
            sums[1][..., rows.queries] += fn.self_attention(rows.pattern, rows.queries.start, rows.keys.start)
        of_block = _top(rows) if _TOP & found.keys() else {}
        if "mass" in found:
            of_block["mass"] = rows.pattern @ members[:, None, rows.keys].to(rows.pattern)
        for name, blocks in found.items():
            blocks.append(of_block[name] if name in of_block else _OF_ROWS[name](rows).clone())

    with torch.no_grad():
        out = attention_by_rows(attention, see)
    made = {name: torch.cat(blocks, 2).to(_wide(q)) for name, blocks in found.items()}
    if "output" in statistics:
        made["output"] = out
    if "received" in statistics:
        attended = sums[0] - sums[1] * asking[:, None]
        made["received"] = fn.received_attention(attended, fn.seeing_queries(asking, window))
    made = _where_defined(made, real)
    return {name: made[name] for name in statistics}


_TOP = {"largest", "target", "concentration"}
_OF_ROWS: dict[str, Callable[[Rows], Tensor]] = {
    "entropy": lambda rows: focus.entropy(rows.pattern),
    "self_mass": lambda rows: fn.self_attention(rows.pattern, rows.queries.start, rows.keys.start),
    "first_mass": lambda rows: rows.pattern[..., 0] * (rows.keys.start == 0),
    "previous_mass": lambda rows: focus.previous_token(rows.pattern, rows.queries.start, rows.keys.start),
    "distance": lambda rows: focus.mean_distance(rows.pattern, rows.queries.start, rows.keys.start),
    "half_mass_keys": lambda rows: focus.half_mass_keys(rows.pattern),
}


def _wide(q: Tensor) -> torch.dtype:
    return q.dtype if q.dtype == torch.float64 else torch.float32


def _attention(
    q: Float[Tensor, "batch head pos d_head"],
    k: Float[Tensor, "batch kv_head pos d_head"],
    v: Float[Tensor, "batch kv_head pos d_value"] | None,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    alibi: Float[Tensor, " head"] | None,
    sinks: Float[Tensor, " head"] | None,
) -> Attention:
    """The arguments of :func:`measure` in the form that the row kernel takes; without values, one zero per key."""
    length, width = q.shape[2:]
    places = torch.arange(length, device=q.device, dtype=_wide(q))
    return Attention(
        q, k, torch.zeros_like(k[..., :1]) if v is None else v, width**-0.5 if scale is None else float(scale),
        None if alibi is None else (alibi.to(places.dtype)[:, None] * places)[None], window, softcap, None,
        None if sinks is None else sinks.to(places.dtype),
    )  # fmt: skip


def _where_defined(made: dict[str, Tensor], real: Bool[Tensor, "batch pos"]) -> dict[str, Tensor]:
    """NaN at padding, and where a query has no token before it."""
    absent = ~real[:, None]
    made = {
        name: each.masked_fill(absent if each.ndim == 3 else absent[..., None], torch.nan)
        for name, each in made.items()
    }
    if "previous_mass" in made:
        made["previous_mass"][..., 0] = torch.nan
    return made


def _top(rows: Rows) -> dict[str, Tensor]:
    largest, second, at = focus.top_two(rows.pattern)
    return {"largest": largest, "target": at + rows.keys.start, "concentration": largest - second.clamp(min=0)}


def _real(q: Float[Tensor, "batch head pos d_head"], lengths: Int[Tensor, " batch"]) -> Bool[Tensor, "batch pos"]:
    return torch.arange(q.shape[2], device=q.device) < lengths.to(q.device)[:, None]


def _checked_lengths(q: Tensor, lengths: Any) -> Int[Tensor, " batch"]:
    if not isinstance(q, Tensor) or q.ndim != 4:
        raise OptionError(f"q is {_kind(q)}; give floating-point numbers [batch, head, pos, d_head]")
    batch, length = q.shape[0], q.shape[2]
    made = torch.full((batch,), length) if lengths is None else torch.as_tensor(lengths)
    if tuple(made.shape) != (batch,) or made.is_floating_point() or int(made.min()) < 1 or int(made.max()) > length:
        raise OptionError(f"lengths={lengths!r}: give a whole number from 1 to {length} for each of {batch} sequences")
    return made


def _kind(given: Any) -> str:
    return f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__


def _check_shapes(
    q: Tensor, k: Tensor, v: Tensor | None, of_heads: Mapping[str, Tensor | None], masks: Mapping[str, Tensor | None]
) -> None:
    batch, heads, length, width = q.shape
    for name, given in (("q", q), ("k", k), ("v", k if v is None else v)):
        if not isinstance(given, Tensor) or given.ndim != 4 or not given.is_floating_point():
            raise OptionError(f"{name} is {_kind(given)}; give floating-point numbers [batch, head, pos, d_head]")
    if k.shape[0] != batch or k.shape[2:] != (length, width) or not k.shape[1] or heads % k.shape[1]:
        raise OptionError(
            f"q is {tuple(q.shape)} and k {tuple(k.shape)}; give [batch, head, pos, d_head] for both, with equal "
            f"numbers of positions, and a number of heads of k that divides that of q"
        )
    if v is not None and v.shape[:3] != k.shape[:3]:
        raise OptionError(f"v is {tuple(v.shape)} and k {tuple(k.shape)}; only the last axis may differ")
    for name, numbers in of_heads.items():
        if numbers is not None and tuple(numbers.shape) != (heads,):
            raise OptionError(f"{name} is {_kind(numbers)}; give one number for each of {heads} heads")
    for name, mask in masks.items():
        if mask is not None and (tuple(mask.shape) != (batch, length) or mask.dtype != torch.bool):
            raise OptionError(f"{name} is {_kind(mask)}; give torch.bool ({batch}, {length})")


def _check_options(
    v: Tensor | None, segments: Mapping[str, Tensor] | None, window: Any, softcap: Any, statistics: Any
) -> None:
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise OptionError(f"window={window!r}: give a number of keys, at least 1, or None for all")
    if softcap is not None and not softcap > 0:
        raise OptionError(f"softcap={softcap!r}: give a bound above 0, or None")
    known = get_args(Statistic)
    if isinstance(statistics, str) or not statistics or not set(statistics) <= set(known):
        raise OptionError(f"statistics={statistics!r}: give a list of {', '.join(map(repr, known))}")
    if "mass" in statistics and not segments:
        raise OptionError('"mass" needs segments={name: mask of its keys, torch.bool [batch, pos]}')
    if "output" in statistics and v is None:
        raise OptionError('"output" needs the values v')
