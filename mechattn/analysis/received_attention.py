"""Received attention of every key and every segment, beside its value under uniform attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool
from torch import Tensor

from mechattn.analysis.analysis import AttentionRows, Quantity, Sums
from mechattn.errors import OptionError
from mechattn.functional import received as fn
from mechattn.prompts.sequences import Batch, Sequence, pad_right

Queries = Literal["original", "all", "question", "answer"]


@dataclass(frozen=True)
class ReceivedAttention:
    """How much attention each key and each segment receives (arXiv:2510.01032, section 2).

    ``received[k] = mean of A[q, k] over counted q > k that can see k``

    Args:
        queries: Which queries count: "original" (all but the inserted ones), "all", "question" or "answer".
        include_self: Whether the attention of a query to its own key counts (the paper: no).
        skip_first: Leave the first token out as a key: it absorbs most of the mass (the paper does so for Llama and
            Gemma). Its received attention is then NaN and it counts in no segment.
    """

    queries: Queries = "original"
    include_self: bool = False
    skip_first: bool = False

    def __post_init__(self) -> None:
        if self.queries not in get_args(Queries):
            raise OptionError(f"queries={self.queries!r}: choose one of {', '.join(map(repr, get_args(Queries)))}")

    @property
    def name(self) -> str:
        """The name of the dataset."""
        return "received_attention"

    @property
    def options(self) -> Mapping[str, Any]:
        """What is recorded with the result."""
        return asdict(self)

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """Received attention per key and per segment, and the mass of each segment; each with its uniform null."""
        per_key = "mean attention that the key receives from the counted queries after it that can see it"
        per_segment = "received attention, mean over the keys of the segment"
        mass = "attention of a counted query to all keys of the segment together, mean over the counted queries"
        null = " if every head attended uniformly to the keys it can see"
        return {
            "received": Quantity(("head", "key"), "probability", per_key),
            "received_uniform": Quantity(("key",), "probability", per_key + null),
            "received_by_segment": Quantity(("head", "segment"), "probability", per_segment),
            "received_by_segment_uniform": Quantity(("segment",), "probability", per_segment + null),
            "mass_by_segment": Quantity(("head", "segment"), "probability", mass),
            "mass_by_segment_uniform": Quantity(("segment",), "probability", mass + null),
        }

    def problem(self, sequence: Sequence) -> str | None:
        """A sequence without a token of the segment whose queries count cannot be measured."""
        if self.queries in ("question", "answer") and not sequence.of_segment(self.queries).any():
            return f"has no {self.queries} tokens, and queries={self.queries!r} counts only those"
        first = 1 if self.skip_first else 0
        counted = self._counted(pad_right([sequence], [(0, "")], 0))[0]
        if not counted[first + (0 if self.include_self else 1) :].any():
            return "has no key that a counted query comes after, so nothing is received"
        return None

    def start(self, batch: Batch, heads: int) -> Sums:
        """Column sums and self attention, zero."""
        shape = (len(batch.rows), heads, batch.tokens.shape[1])
        return {name: torch.zeros(shape, device=batch.tokens.device) for name in ("columns", "own")}

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """Column sums of the counted queries in this block, and the attention of each query to itself."""
        counted = _marks(self, rows.batch).counted[:, rows.queries]
        sums["columns"][..., rows.keys] += fn.column_sums(rows.pattern, counted)
        sums["own"][..., rows.queries] = fn.self_attention(rows.pattern, rows.queries.start, rows.keys.start)

    def values(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """The means: per key over the queries that see it, per segment over its keys, mass over the counted queries."""
        columns, marks = sums["columns"], _marks(self, batch)
        attended = columns if self.include_self else columns - sums["own"] * marks.counted[:, None]
        null = _uniform(self, batch, window)
        return _means(attended, columns, null.seeing, marks) | dict(null.values)

    def _counted(self, batch: Batch) -> Bool[Tensor, "batch query"]:
        if self.queries == "all":
            return batch.real
        if self.queries == "original":
            return batch.origin >= 0
        return batch.of_segment(self.queries)


@dataclass(frozen=True)
class _Marks:
    """Which queries count, which keys are looked at, and which of these are in which segment."""

    counted: Bool[Tensor, "batch query"]
    known: Bool[Tensor, "batch key"]
    member: Bool[Tensor, "batch segment key"]


@dataclass(frozen=True)
class _Uniform:
    """How many counted queries see each key, and the quantities under uniform attention."""

    seeing: Tensor
    values: Mapping[str, Tensor]


@lru_cache(maxsize=4)  # as with _uniform, the layers of a batch share it
def _marks(analysis: ReceivedAttention, batch: Batch) -> _Marks:
    known = batch.real.clone()
    if analysis.skip_first:
        known[:, 0] = False
    return _Marks(analysis._counted(batch), known, batch.members() & known[:, None])


@lru_cache(maxsize=4)
def _uniform(analysis: ReceivedAttention, batch: Batch, window: int | None) -> _Uniform:
    marks, own = _marks(analysis, batch), analysis.include_self
    seeing = fn.seeing_queries(marks.counted, window, own, batch.cut)
    columns = fn.uniform_sums(marks.counted, window, cut=batch.cut)[:, None]
    attended = columns if own else fn.uniform_sums(marks.counted, window, own, batch.cut)[:, None]
    made = _means(attended, columns, seeing, marks)
    return _Uniform(seeing, {f"{name}_uniform": value.squeeze(1) for name, value in made.items()})


def _means(attended: Tensor, columns: Tensor, seeing: Tensor, marks: _Marks) -> dict[str, Tensor]:
    """From sums over queries, without and with a query's own key, to the quantities."""
    received = fn.received_attention(attended, seeing).masked_fill(~marks.known[:, None], torch.nan)
    mass = fn.segment_mass(columns, marks.member) / marks.counted.sum(-1)[:, None, None]
    return {
        "received": received,
        "received_by_segment": fn.segment_mean(received, marks.member),
        "mass_by_segment": mass.masked_fill(~marks.member.any(-1)[:, None], torch.nan),
    }
