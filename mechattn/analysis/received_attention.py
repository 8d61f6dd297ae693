"""Received attention of each key and each segment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechattn.analysis.analysis import AnalysisBase, AttentionRows, Quantity, Sums, WholeAttention
from mechattn.errors import OptionError
from mechattn.functional import received as fn
from mechattn.prompts.sequences import Batch, Sequence, pad_right

Queries = Literal["original", "all", "question", "answer"]


@dataclass(frozen=True)
class ReceivedAttention(AnalysisBase):
    """Measure how much attention each key and each segment receives (arXiv:2510.01032, section 2).

    ``received[k] = mean of A[q, k] over counted q > k that can see k``

    Args:
        queries: Which queries count: "original" (all but the inserted ones), "all", "question" or "answer".
        include_self: Whether a query's attention to its own key counts (not in the paper).
        skip_first: Leave out the first token as a key, since it absorbs most of the mass (the paper does so for Llama
            and Gemma). Its received attention is then NaN and it counts in no segment.
    """

    queries: Queries = "original"
    include_self: bool = False
    skip_first: bool = False

    def __post_init__(self) -> None:
        if self.queries not in get_args(Queries):
            raise OptionError(f"queries={self.queries!r}: choose one of {', '.join(map(repr, get_args(Queries)))}")

    name = "received_attention"

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """Received attention per key and per segment, and the mass of each segment."""
        per_key = "mean attention that the key receives from the counted queries after it that can see it"
        per_segment = "received attention, mean over the keys of the segment"
        mass = "attention of a counted query to all keys of the segment together, mean over the counted queries"
        return {
            "received": Quantity(("head", "key"), "probability", per_key),
            "received_by_segment": Quantity(("head", "segment"), "probability", per_segment),
            "mass_by_segment": Quantity(("head", "segment"), "probability", mass),
        }

    def problem(self, sequence: Sequence) -> str | None:
        """A sequence without any counted query is refused."""
        if self.queries in ("question", "answer") and not sequence.of_segment(self.queries).any():
            return f"has no {self.queries} tokens, the only ones that queries={self.queries!r} counts"
        first = 1 if self.skip_first else 0
        counted = _counted(self.queries, pad_right([sequence], [(0, "")], 0))[0]
        if not counted[first + (0 if self.include_self else 1) :].any():
            return "has no key before a counted query, so no attention is received"
        return None

    def start(self, batch: Batch, heads: int) -> Sums:
        """Zero column sums and self-attention."""
        shape = (len(batch.rows), heads, batch.tokens.shape[1])
        return {name: torch.zeros(shape, device=batch.tokens.device) for name in ("columns", "own")}

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """Add column sums over the counted queries in this block, and each query's attention to itself."""
        counted = _counted(self.queries, rows.batch)[:, rows.queries]
        sums["columns"][..., rows.keys].add_(fn.column_sums(rows.pattern, counted))
        sums["own"][..., rows.queries].add_(fn.self_attention(rows.pattern, rows.queries.start, rows.keys.start))

    def add_whole(self, sums: Sums, whole: WholeAttention) -> None:
        """The same from a fused kernel."""
        counted = _counted(self.queries, whole.batch)[..., None].to(sums["columns"].dtype)
        sums["columns"].add_(whole.fused.column_sums(counted)[..., 0])
        sums["own"].add_(whole.fused.own)

    def values(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """The means: per key over the queries that see it, per segment over its keys, mass over the counted queries."""
        columns = sums["columns"]
        attended = columns if self.include_self else columns - sums["own"] * _counted(self.queries, batch)[:, None]
        return _weights(self, batch, window).quantities(attended, columns)


@dataclass(frozen=True)
class _Weights:
    """The factors that turn sums over the counted queries into means; NaN where there is nothing to average."""

    received: Float[Tensor, "batch 1 key"]
    by_segment: Float[Tensor, "batch key segment"]
    mass: Float[Tensor, "batch key segment"]

    def quantities(
        self, attended: Float[Tensor, "batch head key"], columns: Float[Tensor, "batch head key"]
    ) -> dict[str, Tensor]:
        """Means from sums over queries, without and with a query's own key; cheap, as every layer needs it."""
        return {
            "received": attended * self.received,
            "received_by_segment": attended @ self.by_segment,
            "mass_by_segment": columns @ self.mass,
        }


@lru_cache(maxsize=4)  # shared by the layers and blocks of a batch, like the weights below
def _counted(queries: Queries, batch: Batch) -> Bool[Tensor, "batch query"]:
    """The queries that count."""
    if queries == "all":
        return batch.real
    if queries == "original":
        return batch.origin >= 0
    return batch.of_segment(queries)


@lru_cache(maxsize=4)
def _weights(analysis: ReceivedAttention, batch: Batch, window: int | None) -> _Weights:
    """The weights of a batch, the same for all layers with this window."""
    counted = _counted(analysis.queries, batch)
    seeing = fn.seeing_queries(counted, window, analysis.include_self, batch.edge_mask)
    looked_at = batch.real.clone()
    if analysis.skip_first:
        looked_at[:, 0] = False
    each = fn.received_attention(torch.ones_like(seeing)[:, None], seeing).masked_fill(~looked_at[:, None], torch.nan)
    keys = batch.members() & looked_at[:, None]
    seen = keys & ~each.isnan()
    return _Weights(
        received=each,
        by_segment=(seen * each.nan_to_num() / seen.sum(-1, keepdim=True)).mT,
        mass=(keys / keys.any(-1, keepdim=True) / counted.sum(-1)[:, None, None]).mT,
    )
