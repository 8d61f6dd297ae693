"""Received attention of every key and every segment, beside its value under uniform attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
        """Column sums of the counted queries in this block, and their attention to themselves."""
        counted = self._counted(rows.batch)[:, rows.queries]
        sums["columns"][..., rows.keys] += fn.column_sums(rows.pattern, counted)
        own = fn.self_attention(rows.pattern, rows.queries.start, rows.keys.start)
        sums["own"][..., rows.queries] = own * counted[:, None]

    def values(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """The means: per key over the queries that see it, per segment over its keys, mass over the counted queries."""
        counted, member, known = self._counted(batch), self._members(batch), self._keys(batch)
        seeing = fn.seeing_queries(counted, window, self.include_self, batch.cut)
        attended = sums["columns"] if self.include_self else sums["columns"] - sums["own"]
        null = fn.uniform_sums(counted, window, self.include_self, batch.cut)[:, None]
        null_with_own = fn.uniform_sums(counted, window, cut=batch.cut)[:, None]
        made = {}
        for suffix, others, every in (("", attended, sums["columns"]), ("_uniform", null, null_with_own)):
            received = fn.received_attention(others, seeing).masked_fill(~known[:, None], torch.nan)
            made["received" + suffix] = received
            made["received_by_segment" + suffix] = fn.segment_mean(received, member)
            mass = fn.segment_mass(every, member) / counted.sum(-1)[:, None, None]
            made["mass_by_segment" + suffix] = mass.masked_fill(~member.any(-1)[:, None], torch.nan)
        return {name: value.squeeze(1) if name.endswith("_uniform") else value for name, value in made.items()}

    def _counted(self, batch: Batch) -> Bool[Tensor, "batch query"]:
        if self.queries == "all":
            return batch.real
        if self.queries == "original":
            return batch.origin >= 0
        return batch.of_segment(self.queries)

    def _keys(self, batch: Batch) -> Bool[Tensor, "batch key"]:
        keys = batch.real.clone()
        if self.skip_first:
            keys[:, 0] = False
        return keys

    def _members(self, batch: Batch) -> Bool[Tensor, "batch segment key"]:
        return batch.members() & self._keys(batch)[:, None]
