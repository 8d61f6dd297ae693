"""Attention that each key and each segment receives, attention between segments, and the map of a
short prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from mechattn.analysis.analysis import (
    AnalysisBase,
    AttentionRows,
    Quantity,
    Sums,
    WholeAttention,
    zeros,
)
from mechattn.axes import BASELINE, SEGMENTS
from mechattn.errors import OptionError, check_choice
from mechattn.functional import received as fn
from mechattn.functional.attention import for_each_head
from mechattn.functional.budget import masses_of_rows
from mechattn.prompts.token_sequences import Batch, Pairs, TokenSequence, pad_right, pairs_of

Queries = Literal["original", "all", "question", "answer"]
DILUTION = "_dilution"  # after a quantity's name: its dilution null
# Of keys: each segment by two sets of weights, and the inserted tokens.
_GROUPS = 2 * len(SEGMENTS) + 1


@dataclass(frozen=True)
class ReceivedAttention(AnalysisBase):
    """Measure how much attention each key and each segment receives (arXiv:2510.01032, section 2).

    ``received[k] = mean of A[q, k] over counted q > k that can see k``

    What each segment receives comes with its dilution null: what it would be if the original tokens
    kept their attention to each other, and gave way to the inserted ones in equal parts. For each
    head and query q it is that of the row ``(1 − M[q]) · A[q, k]``, where A is the baseline's row
    of the same query and M[q] the attention of q to all inserted tokens, as measured. It is NaN
    where tokens of the baseline are changed (``Counterpart``).

    Args:
        queries: Which queries count: "original" (all but the inserted ones), "all", "question" or
            "answer".
        include_self: Whether a query's attention to its own key counts (not in the paper).
        skip_first: Leave out the first token as a key, since it absorbs most of the mass (the paper
            does so for Llama and Gemma). Its received attention is then NaN and it counts in no
            segment.
    """

    name = "received_attention"
    queries: Queries = "original"
    include_self: bool = False
    skip_first: bool = False

    def __post_init__(self) -> None:
        check_choice(Queries, queries=self.queries)

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """Received attention per key and per segment, the mass of each segment, and the dilution
        null of both."""
        per_key = (
            "mean attention that the key receives from the counted queries after it that can see it"
        )
        per_segment = "received attention, mean over the keys of the segment"
        mass = (
            "attention of a counted query to all keys of the segment together, mean over the"
            " counted queries"
        )
        by_segment = {"received_by_segment": per_segment, "mass_by_segment": mass}
        quantities = {"received": Quantity(("head", "key"), "probability", per_key)}
        for name, description in by_segment.items():
            quantities[name] = Quantity(("head", "segment"), "probability", description)
        if self.queries == "all":  # inserted queries have no row in the baseline
            return quantities
        for name, description in by_segment.items():
            diluted = f"{description}, if the original tokens kept their attention to each other"
            quantities[name + DILUTION] = Quantity(
                ("head", "segment"), "probability", diluted, no_null="it is a null"
            )
        return quantities

    def problem(self, sequence: TokenSequence) -> str | None:
        """A sequence without any counted query is refused."""
        if self.queries in ("question", "answer") and not sequence.of_segment(self.queries).any():
            return (
                f"has no {self.queries} tokens, the only ones that queries={self.queries!r} counts"
            )
        first = 1 if self.skip_first else 0
        counted = _counted(self.queries, pad_right([sequence], [(0, "")], 0))[0]
        if not counted[first + (0 if self.include_self else 1) :].any():
            return "has no key before a counted query, so no attention is received"
        return None

    def start(self, batch: Batch, heads: int) -> Sums:
        """Zero column sums, self-attention, and sums over groups of keys."""
        sums = zeros(batch, heads, "columns", "own")
        if self.queries != "all":
            shape = (len(batch.rows), _GROUPS, heads, batch.tokens.shape[1])
            sums["by_query"] = torch.zeros(shape, device=batch.tokens.device)
        return sums

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """Add column sums over the counted queries in this block, and each query's attention to
        itself."""
        counted = _counted(self.queries, rows.batch)[:, rows.queries]
        sums["columns"][..., rows.keys].add_(fn.column_sums(rows.pattern, counted))
        own = fn.self_attention(rows.pattern, rows.queries.start, rows.keys.start)
        sums["own"][..., rows.queries].add_(own)
        if "by_query" in sums:
            groups = _key_groups(self, rows.batch, rows.window)[..., rows.keys]
            sums["by_query"][..., rows.queries] = masses_of_rows(rows.pattern, groups)

    def add_whole(self, sums: Sums, whole: WholeAttention) -> None:
        """The same from a fused kernel."""
        counted = _counted(self.queries, whole.batch)[..., None].to(sums["columns"].dtype)
        sums["columns"].add_(whole.fused.column_sums(counted)[..., 0])
        sums["own"].add_(whole.fused.own)
        if "by_query" in sums:
            groups = _key_groups(self, whole.batch, whole.window)
            by_query = whole.fused.query_sums(groups.mT)
            sums["by_query"].add_(by_query.permute(0, 3, 1, 2))

    def values(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """The means: per key over the queries that see it, per segment over its keys, mass over the
        counted queries."""
        columns = sums["columns"]
        attended = columns
        if not self.include_self:
            attended = columns - sums["own"] * _counted(self.queries, batch)[:, None]
        received, by_segment, mass = _weights(self, batch, window)
        values = {
            "received": attended * received,
            "received_by_segment": attended @ by_segment,
            "mass_by_segment": columns @ mass,
        }
        if "by_query" in sums:
            values |= _diluted(self, sums, batch, window, values)
        return values


@lru_cache(maxsize=4)  # shared by the layers and blocks of a batch, like the weights below
def _counted(queries: Queries, batch: Batch) -> Bool[Tensor, "batch query"]:
    """The queries that count."""
    if queries == "all":
        return batch.real
    if queries == "original":
        return batch.origin >= 0
    return batch.of_segment(queries)


@lru_cache(maxsize=4)
def _weights(
    analysis: ReceivedAttention, batch: Batch, window: int | None
) -> tuple[
    Float[Tensor, "batch 1 key"],
    Float[Tensor, "batch key segment"],
    Float[Tensor, "batch key segment"],
]:
    """The factors that turn sums over counted queries into the three means; NaN where there is
    nothing to average."""
    counted = _counted(analysis.queries, batch)
    seeing = fn.seeing_queries(counted, window, analysis.include_self, batch.edge_mask)
    looked_at = batch.real.clone()
    if analysis.skip_first:
        looked_at[:, 0] = False
    per_key = fn.received_attention(torch.ones_like(seeing)[:, None], seeing)
    per_key = per_key.masked_fill(~looked_at[:, None], torch.nan)
    keys = batch.members() & looked_at[:, None]
    seen = keys & ~per_key.isnan()
    by_segment = seen * per_key.nan_to_num() / seen.sum(-1, keepdim=True)
    mass = keys / keys.any(-1, keepdim=True) / counted.sum(-1)[:, None, None]
    return per_key, by_segment.mT, mass.mT


@lru_cache(maxsize=4)
def _key_groups(
    analysis: ReceivedAttention, batch: Batch, window: int | None
) -> Float[Tensor, "batch group key"]:
    """Groups of keys: by their weights in received attention by segment, in mass, and the inserted
    tokens."""
    _, by_segment, mass = _weights(analysis, batch, window)
    inserted = batch.inserted[:, None].to(mass.dtype)
    return torch.cat([by_segment.mT.nan_to_num(), mass.mT.nan_to_num(), inserted], 1)


@lru_cache(maxsize=4)  # its pairs are made on the CPU
def _pairs(batch: Batch) -> tuple[Pairs, Bool[Tensor, " pair"]]:
    """Each sequence with its baseline, and whether it has the baseline's tokens, none of them
    changed."""
    pairs = pairs_of(batch, BASELINE)
    tokens = batch.tokens.gather(1, pairs.place)
    baseline_tokens = tokens[pairs.baseline]
    return pairs, ((tokens == baseline_tokens) | ~pairs.original).all(-1)


def _diluted(
    analysis: ReceivedAttention,
    sums: Sums,
    batch: Batch,
    window: int | None,
    measured: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """The dilution nulls: the baseline's rows of the same queries, times ``1 − M[q]``."""
    pairs, comparable = _pairs(batch)
    baseline = pairs.baseline
    originals = pairs.place.shape[1]
    left = 1 - sums["by_query"][:, -1]  # of each query's attention, by the inserted tokens
    counts = pairs.original & _counted(analysis.queries, batch).gather(1, pairs.place)
    place = pairs.place[:, None].expand(-1, left.shape[1], -1)
    left = left.gather(2, place) * counts[:, None]  # by the position in the baseline

    rows = sums["by_query"][baseline, :-1, :, :originals]
    received, mass = torch.einsum("bhq,bghq->bhg", left, rows).chunk(2, -1)
    if not analysis.include_self:
        own = left * sums["own"][baseline, :, :originals]
        weights = _key_groups(analysis, batch, window)[baseline, : len(SEGMENTS), :originals]
        received = received - own @ weights.mT
    diluted = {"received_by_segment": received, "mass_by_segment": mass}
    values = {}
    for name, value in diluted.items():
        unknown = measured[name][baseline].isnan() | ~comparable[:, None, None]
        values[name + DILUTION] = value.masked_fill(unknown, torch.nan)
    return values


@dataclass(frozen=True)
class SegmentFlow(AnalysisBase):
    """Measure the attention that the queries of each segment pay to the keys of each segment.

    ``flow[s, t] = mean over queries q of s of Σ_{k in t} A[q, k]``; each row sums to 1 (less in a
    model with learned sinks). A query's own key counts.

    Args:
        predicting: Whether the queries of s are those that predict its tokens, one position earlier
            than they.
    """

    name = "segment_flow"
    predicting: bool = False

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """The flow of attention, and the flow of values."""
        dims = ("head", "segment", "to_segment")
        flow = (
            "attention of a query of the segment to all keys of to_segment together, mean over the"
            " queries"
        )
        by_value = (
            "sum over keys of to_segment of A |v|, divided by the sum over all keys, mean over the"
            " queries"
        )
        return {
            "flow": Quantity(dims, "probability", flow),
            "value_flow": Quantity(dims, "share", by_value, no_null="it depends on the values"),
        }

    def start(self, batch: Batch, heads: int) -> Sums:
        """Zero flow."""
        shape = (len(batch.rows), heads, len(SEGMENTS), len(SEGMENTS))
        flow = torch.zeros(shape, device=batch.tokens.device)
        return {"flow": flow, "value_flow": torch.zeros_like(flow)}

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """Add the flow of these queries."""
        pattern = rows.pattern
        queries = self._queries(rows.batch)[..., rows.queries].to(pattern.dtype)
        members = rows.batch.members()[..., rows.keys].to(pattern.dtype)
        of_queries = rearrange(queries, "batch segment query -> batch 1 segment query")
        of_keys = rearrange(members, "batch segment key -> batch 1 key segment")
        if rows.v is None:
            sums["flow"] += of_queries @ (pattern @ of_keys)
            return
        norms = rows.v[:, :, rows.keys].to(pattern.dtype).norm(dim=-1)
        norms = for_each_head(norms, pattern.shape[1]).unsqueeze(-1)
        # One product for both: reading the pattern costs more than a few columns.
        columns = torch.cat([of_keys.expand(*norms.shape[:3], -1), norms * of_keys], -1)
        flow, by_value = (pattern @ columns).chunk(2, -1)
        sums["flow"] += of_queries @ flow
        # Every key that is seen is in one segment, so the segments add up to all keys.
        total = by_value.sum(-1, keepdim=True).clamp(min=torch.finfo(norms.dtype).tiny)
        sums["value_flow"] += of_queries @ (by_value / total)

    def values(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """Means over the queries; NaN for a segment without tokens."""
        queries = self._queries(batch).sum(-1)
        has_keys = batch.members().any(-1)
        is_empty = (queries == 0)[:, None, :, None] | ~has_keys[:, None, None, :]
        # The shares of a query add up to 1, so all are 0 only where the model shows no values.
        without_values = ~sums["value_flow"].any()
        counted = queries.clamp(min=1)[:, None, :, None]
        flow = sums["flow"] / counted
        value_flow = sums["value_flow"] / counted
        return {
            "flow": flow.masked_fill(is_empty, torch.nan),
            "value_flow": value_flow.masked_fill(is_empty | without_values, torch.nan),
        }

    def _queries(self, batch: Batch) -> Bool[Tensor, "batch segment query"]:
        """The queries of each segment."""
        members = batch.members()
        if not self.predicting:
            return members
        return torch.nn.functional.pad(members[..., 1:], (0, 1))


@dataclass(frozen=True)
class AttentionMap(AnalysisBase):
    """Keep the attention probabilities of every query and key of prompts with up to ``max_tokens``
    tokens.

    ``pattern[q, k] = A[q, k]``; NaN beyond the end of a sequence.
    """

    name = "attention_map"
    max_tokens: int = 256

    def __post_init__(self) -> None:
        if not isinstance(self.max_tokens, int) or not 2 <= self.max_tokens <= 1024:
            raise OptionError(
                f"max_tokens={self.max_tokens}: give a number from 2 to 1,024, the sizes at which a"
                " map is readable"
            )

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """The map."""
        return {
            "pattern": Quantity(
                ("head", "query", "target"), "probability", "attention from query to target"
            )
        }

    def problem(self, sequence: TokenSequence) -> str | None:
        """A sequence longer than ``max_tokens`` is refused: its map would be unreadable and would
        fill the page."""
        if len(sequence) <= self.max_tokens:
            return None
        return (
            f"has {len(sequence)} tokens, and a map shows at most {self.max_tokens}: shorten the"
            " prompt, or raise max_tokens (page size grows with its square)"
        )

    def start(self, batch: Batch, heads: int) -> Sums:
        """Empty [query, key] maps."""
        shape = (len(batch.rows), heads, self.max_tokens, self.max_tokens)
        return {"pattern": torch.zeros(shape, device=batch.tokens.device)}

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """Copy this block of rows to its place in the map."""
        sums["pattern"][:, :, rows.queries, rows.keys] = rows.pattern

    def values(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """The maps, NaN where there is no token."""
        lengths = batch.lengths.to(sums["pattern"].device)
        inside = torch.arange(self.max_tokens, device=lengths.device) < lengths[:, None]
        both = inside[:, None, :, None] & inside[:, None, None, :]
        return {"pattern": sums["pattern"].masked_fill(~both, torch.nan)}
