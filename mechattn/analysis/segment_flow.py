"""Attention between segments: question to inserted, inserted to system, answer to question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from mechattn.analysis.analysis import AnalysisBase, AttentionRows, Quantity, Sums
from mechattn.axes import SEGMENTS
from mechattn.functional.grouped_heads import for_each_head
from mechattn.prompts.sequences import Batch


@dataclass(frozen=True)
class SegmentFlow(AnalysisBase):
    """Measure the attention that the queries of each segment pay to the keys of each segment.

    ``flow[s, t] = mean over queries q of s of Σ_{k in t} A[q, k]``; each row sums to 1 (less in a model with learned
    sinks). A query's own key counts.

    Args:
        predicting: Whether the queries of s are those that predict its tokens, one position earlier than they.
    """

    predicting: bool = False

    name = "segment_flow"

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """The flow of attention, and the flow of values."""
        dims = ("head", "segment", "to_segment")
        flow = "attention of a query of the segment to all keys of to_segment together, mean over the queries"
        by_value = "sum over keys of to_segment of A |v|, divided by the sum over all keys, mean over the queries"
        return {
            "flow": Quantity(dims, "probability", flow),
            "value_flow": Quantity(dims, "share", by_value, no_null="it depends on the values"),
        }

    def start(self, batch: Batch, heads: int) -> Sums:
        """Zero flow."""
        shape = (len(batch.rows), heads, len(SEGMENTS), len(SEGMENTS))
        return {name: torch.zeros(shape, device=batch.tokens.device) for name in ("flow", "value_flow")}

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """Add the flow of these queries."""
        queries, member = (part.to(rows.pattern.dtype) for part in (self._queries(rows.batch), rows.batch.members()))
        of_queries = rearrange(queries[..., rows.queries], "batch segment query -> batch 1 segment query")
        of_keys = rearrange(member[..., rows.keys], "batch segment key -> batch 1 key segment")
        sums["flow"] += of_queries @ (rows.pattern @ of_keys)
        if rows.v is None:
            sums["value_flow"].fill_(-1)
            return
        norms = rows.v[:, :, rows.keys].to(rows.pattern.dtype).norm(dim=-1)
        norms = for_each_head(norms, rows.pattern.shape[1])
        by_value = rows.pattern @ (norms.unsqueeze(-1) * of_keys)
        total = (rows.pattern @ norms.unsqueeze(-1)).clamp(min=torch.finfo(norms.dtype).tiny)
        sums["value_flow"] += of_queries @ (by_value / total)

    def values(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """Means over the queries; NaN for a segment without tokens."""
        queries = self._queries(batch).sum(-1)
        there = (queries > 0)[:, :, None] & batch.members().any(-1)[:, None, :]

        def mean(
            flow: Float[Tensor, "batch *head segment to"], there: Bool[Tensor, "batch *head segment to"]
        ) -> Float[Tensor, "batch *head segment to"]:
            counted = queries.clamp(min=1).view(len(queries), *[1] * (flow.ndim - 3), -1, 1)
            return (flow / counted).masked_fill(~there, torch.nan)

        heads = there[:, None].expand_as(sums["flow"])
        shown = (sums["value_flow"] >= 0).all()
        return {
            "flow": mean(sums["flow"], heads),
            "value_flow": mean(sums["value_flow"], heads & shown),
        }

    def _queries(self, batch: Batch) -> Bool[Tensor, "batch segment query"]:
        """The queries of each segment."""
        member = batch.members()
        return torch.nn.functional.pad(member[..., 1:], (0, 1)) if self.predicting else member
