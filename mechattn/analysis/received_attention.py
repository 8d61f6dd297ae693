"""Attention that each key and each segment receives, attention between segments, and the map of a
short prompt."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from mechattn.analysis.analysis import (
    DEPENDS_ON_VALUES,
    HEAD_AND_SEGMENT,
    AnalysisBase,
    AttentionRows,
    Quantities,
    Quantity,
    Sums,
    Values,
    WholeAttention,
    Window,
    means_of,
    nan_outside,
    zeros,
    zeros_of_rows,
)
from mechattn.axes import SEGMENTS
from mechattn.errors import check_choice, check_counts
from mechattn.functional import received as fn
from mechattn.functional.attention import Marked, for_each_head
from mechattn.functional.budget import masses_of_rows
from mechattn.prompts.token_sequences import Batch, TokenSequence, pad_right, pairs_of

Queries = Literal["original", "all", "question", "answer"]
KeyWeights = Float[Tensor, "batch segment key"]  # the weight of each key in a segment's mean
DILUTION = "_dilution"  # ends the name of a quantity's dilution null
_BY_SEGMENT = {
    "received_by_segment": "received attention, mean over the keys of the segment",
    "mass_by_segment": (
        "attention of a counted query to all keys of the segment together, mean over the counted"
        " queries"
    ),
}
# Groups of keys: each segment with two sets of weights, then the inserted tokens.
_GROUPS = 2 * len(SEGMENTS) + 1
_INSERTED_GROUP = _GROUPS - 1


@dataclass(frozen=True)
class ReceivedAttention(AnalysisBase):
    """Measure how much attention each key and each segment receives (arXiv:2510.01032, section 2).

    ``received[k] = mean of A[q, k] over counted q > k that can see k``

    What each segment receives comes with its dilution null: what the segment would receive if the
    original tokens kept their attention to each other, and gave way to the inserted ones in
    proportion. For each head and query q, it is computed from the row ``(1 − M[q]) · A[q, k]``,
    where A is the baseline's row of the same query and M[q] the measured attention of q to all
    inserted tokens. It is NaN if the condition changes tokens of the baseline (``Counterpart``).
    With ``queries="all"`` there is no dilution null.

    Args:
        queries: Which queries count: "original" (all but the inserted ones), "all", "question" or
            "answer".
        include_self: Whether a query's attention to its own key counts (not in the paper).
        skip_first: Leave out the first token as a key, since it absorbs most of the mass (the paper
            does so for Llama and Gemma). Its received attention is then NaN, and it counts in no
            segment.
    """

    name = "received_attention"
    queries: Queries = "original"
    include_self: bool = False
    skip_first: bool = False

    def __post_init__(self) -> None:
        check_choice(Queries, queries=self.queries)

    @property
    def _has_dilution(self) -> bool:
        """Whether there is a dilution null; inserted queries have no row in the baseline."""
        return self.queries != "all"

    @property
    def quantities(self) -> Quantities:
        """Received attention per key and per segment, the mass of each segment, and the dilution
        null of both."""
        per_key = (
            "mean attention that the key receives from the counted queries after it that can see it"
        )
        quantities = {"received": Quantity(("head", "key"), "probability", per_key)}

        for name, description in _BY_SEGMENT.items():
            quantities[name] = Quantity(HEAD_AND_SEGMENT, "probability", description)
            if self._has_dilution:
                quantities[name + DILUTION] = Quantity(
                    HEAD_AND_SEGMENT,
                    "probability",
                    f"{description}, if the original tokens kept their attention to each other",
                    no_null="it is a null",
                )
        return quantities

    def problem(self, sequence: TokenSequence) -> str | None:
        """A sequence is refused if no query counts, or if no key lies before a counted query."""
        if self.queries in ("question", "answer") and not sequence.of_segment(self.queries).any():
            return (
                f"has no {self.queries} tokens, the only ones that queries={self.queries!r} counts"
            )

        # The first key that counts, and the first query whose attention to it counts.
        first_key = 1 if self.skip_first else 0
        first_query = first_key if self.include_self else first_key + 1
        batch = pad_right([sequence], rows=[(0, "")], pad_token=0)  # a batch of one
        if not _counted(self.queries, batch)[0, first_query:].any():
            return "has no key before a counted query, so no attention is received"
        return None

    def start(self, batch: Batch, heads: int) -> Sums:
        """Zero column sums, self-attention, and sums over groups of keys."""
        sums = zeros(batch, heads, "column_sums", "own")
        if self._has_dilution:
            sums["group_masses"] = zeros_of_rows(batch, _GROUPS, heads, batch.tokens.shape[1])
        return sums

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """Add column sums over the counted queries in this block; store each query's attention to
        itself, and to groups of keys for the dilution null."""
        counted = _counted(self.queries, rows.batch)[:, rows.queries]
        sums["column_sums"][..., rows.keys] += fn.column_sums(rows.pattern, counted)
        own = fn.self_attention(rows.pattern, rows.queries.start, rows.keys.start)
        sums["own"][..., rows.queries] = own
        if self._has_dilution:
            groups = _key_groups(self, rows.batch, rows.window)[..., rows.keys]
            sums["group_masses"][..., rows.queries] = masses_of_rows(rows.pattern, groups)

    def add_whole(self, sums: Sums, whole: WholeAttention) -> None:
        """Add the same sums from a fused kernel."""
        counted = _counted(self.queries, whole.batch)[..., None].to(sums["column_sums"].dtype)
        sums["column_sums"] += whole.fused.column_sums(counted)[..., 0]
        sums["own"] += whole.fused.own
        if self._has_dilution:
            groups = _key_groups(self, whole.batch, whole.window)
            group_masses = whole.fused.query_sums(groups.mT)
            sums["group_masses"] += rearrange(
                group_masses, "batch head query group -> batch group head query"
            )

    def values(self, sums: Sums, batch: Batch, window: Window) -> Values:
        """What each key receives, the mean over the keys of each segment, the mass of each segment,
        and the dilution nulls."""
        column_sums = sums["column_sums"]
        received = column_sums
        if not self.include_self:
            received = column_sums - sums["own"] * _counted(self.queries, batch)[:, None]

        key_weights, segment_weights, mass_weights = _weights(self, batch, window)
        values = {
            "received": received * key_weights,
            "received_by_segment": received @ segment_weights.mT,
            "mass_by_segment": column_sums @ mass_weights.mT,
        }
        if self._has_dilution:
            values |= _diluted(self, sums, batch, window, values)
        return values


@dataclass(frozen=True)
class SegmentFlow(AnalysisBase):
    """Measure the attention that the queries of each segment pay to the keys of each segment.

    ``flow[s, t] = mean over queries q of s of Σ_{k in t} A[q, k]``. Each row sums to 1, or to less
    in a model with learned sinks. A query's own key counts. ``value_flow`` is the same for
    ``A[q, k] · |v[k]|``, divided by its sum over all keys.

    Args:
        predicting: Whether the queries of s are those that predict its tokens: each token of s is
            replaced by the token before it.
    """

    name = "segment_flow"
    predicting: bool = False

    @property
    def quantities(self) -> Quantities:
        """The flow of attention, and the flow of values."""
        dims = ("head", "segment", "to_segment")
        flow = Quantity(
            dims,
            "probability",
            "attention of a query of the segment to all keys of to_segment together",
        )
        value_flow = Quantity(
            dims,
            "share",
            "sum over keys of to_segment of A |v|, divided by the sum over all keys",
            no_null=DEPENDS_ON_VALUES,
        )
        return means_of({"flow": flow, "value_flow": value_flow})

    def start(self, batch: Batch, heads: int) -> Sums:
        """Zero flow."""
        flow = zeros_of_rows(batch, heads, len(SEGMENTS), len(SEGMENTS))
        return {"flow": flow, "value_flow": torch.zeros_like(flow)}

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """Add the flow of these queries."""
        pattern = rows.pattern
        is_query = self._query_members(rows.batch)[:, None, :, rows.queries].to(pattern.dtype)
        is_key = rows.batch.members()[:, None, :, rows.keys].to(pattern.dtype).mT
        if rows.v is None:
            sums["flow"] += is_query @ (pattern @ is_key)
            return

        norms = rows.v[:, :, rows.keys].to(pattern.dtype).norm(dim=-1)
        norms = for_each_head(norms, pattern.shape[1]).unsqueeze(-1)
        # One product for both: reading the pattern again would cost more than the added columns.
        columns = torch.cat([is_key.expand(*norms.shape[:3], -1), norms * is_key], -1)
        query_flow, query_value_flow = (pattern @ columns).chunk(2, -1)
        # Every key that is seen is in one segment, so the segments add up to all keys.
        total = query_value_flow.sum(-1, keepdim=True).clamp(min=torch.finfo(norms.dtype).tiny)
        sums["flow"] += is_query @ query_flow
        sums["value_flow"] += is_query @ (query_value_flow / total)

    def values(self, sums: Sums, batch: Batch, window: Window) -> Values:
        """Means over the queries of each segment.

        They are NaN for a segment without tokens; the flow of values is also NaN without values.
        """
        query_counts = self._query_members(batch).sum(-1)[:, None, :, None]
        is_empty = ~batch.members().any(-1)[:, None, None]
        # The shares of a query add up to 1, so all are 0 only if the model gives no values.
        without_values = ~sums["value_flow"].any()
        flow = sums["flow"] / query_counts  # 0 / 0 is NaN for a segment without queries
        value_flow = sums["value_flow"] / query_counts
        return {
            "flow": flow.masked_fill(is_empty, torch.nan),
            "value_flow": value_flow.masked_fill(is_empty | without_values, torch.nan),
        }

    def _query_members(self, batch: Batch) -> fn.Members:
        """The queries of each segment; with ``predicting`` those one position earlier."""
        members = batch.members()
        if not self.predicting:
            return members
        return torch.nn.functional.pad(members[..., 1:], (0, 1))


@dataclass(frozen=True)
class AttentionMap(AnalysisBase):
    """Keep the attention probabilities of every query and key of short prompts.

    ``pattern[q, k] = A[q, k]``; NaN beyond the end of a sequence.

    Args:
        max_tokens: The largest number of tokens of a sequence; longer ones are refused. It is also
            the size of each map.
    """

    name = "attention_map"
    max_tokens: int = 256

    def __post_init__(self) -> None:
        check_counts(2, max_tokens=self.max_tokens)

    @property
    def quantities(self) -> Quantities:
        """The map."""
        return {
            "pattern": Quantity(
                ("head", "query", "target"), "probability", "attention from query to target"
            )
        }

    def problem(self, sequence: TokenSequence) -> str | None:
        """A sequence longer than ``max_tokens`` is refused, since its map would be unreadable and
        would fill a page."""
        if len(sequence) <= self.max_tokens:
            return None
        return (
            f"has {len(sequence)} tokens, and a map shows at most {self.max_tokens}: shorten the"
            " prompt, or raise max_tokens (page size grows with its square)"
        )

    def start(self, batch: Batch, heads: int) -> Sums:
        """Zero maps [batch head query key]."""
        return {"pattern": zeros_of_rows(batch, heads, self.max_tokens, self.max_tokens)}

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """Copy this block of rows to its place in the map."""
        sums["pattern"][:, :, rows.queries, rows.keys] = rows.pattern

    def values(self, sums: Sums, batch: Batch, window: Window) -> Values:
        """The maps; NaN beyond the end of a sequence."""
        positions = torch.arange(self.max_tokens, device=batch.lengths.device)
        inside = positions < batch.lengths[:, None]
        is_pair = inside[:, :, None] & inside[:, None]
        return {"pattern": nan_outside(sums["pattern"], is_pair)}


@lru_cache(maxsize=4)  # the layers and blocks of a batch share it, and the weights below
def _counted(queries: Queries, batch: Batch) -> Marked:
    """The queries that count."""
    if queries == "all":
        return batch.real
    if queries == "original":
        return batch.original
    return batch.of_segment(queries)


@lru_cache(maxsize=4)
def _weights(
    analysis: ReceivedAttention, batch: Batch, window: Window
) -> tuple[Float[Tensor, "batch 1 key"], KeyWeights, KeyWeights]:
    """The factors that turn sums over counted queries into means; NaN if there is nothing to
    average.

    Returns:
        The factors of each key's received attention, of received attention by segment, and of mass
        by segment.
    """
    counted = _counted(analysis.queries, batch)
    is_key = batch.real.clone()
    if analysis.skip_first:
        is_key[:, 0] = False

    query_counts = fn.seeing_queries(counted, window, analysis.include_self, batch.edge_mask)
    is_seen = is_key & (query_counts > 0)
    key_weights = nan_outside(1 / query_counts[:, None], is_seen)

    members = batch.members() & is_key[:, None]
    seen_members = members & is_seen[:, None]
    segment_weights = seen_members * key_weights.nan_to_num()
    # 0 / 0 is NaN for a segment without keys.
    segment_weights = segment_weights / seen_members.sum(-1, keepdim=True)
    mass_weights = members / members.any(-1, keepdim=True) / counted.sum(-1)[:, None, None]
    return key_weights, segment_weights, mass_weights


@lru_cache(maxsize=4)
def _key_groups(
    analysis: ReceivedAttention, batch: Batch, window: Window
) -> Float[Tensor, "batch group key"]:
    """The weights of the keys in each group: for every segment those of received attention, then
    for every segment those of mass, then 1 for the inserted tokens."""
    _, segment_weights, mass_weights = _weights(analysis, batch, window)
    inserted = batch.inserted[:, None].to(mass_weights.dtype)
    return torch.cat([segment_weights, mass_weights, inserted], 1).nan_to_num()


def _diluted(
    analysis: ReceivedAttention,
    sums: Sums,
    batch: Batch,
    window: Window,
    measured_values: Values,
) -> Values:
    """The dilution nulls, from the baseline's rows of the same queries times ``1 − M[q]``.

    Args:
        analysis: The options.
        sums: The sums of a layer.
        batch: The sequences.
        window: The largest number of keys that a query of this layer sees.
        measured_values: The measured values; the null is NaN wherever that of the baseline is NaN.
    """
    pairs = pairs_of(batch)
    baseline = pairs.baseline
    original_count = pairs.place.shape[1]

    # What the inserted tokens leave of each query's attention, 1 − M[q], by the query's position in
    # the baseline.
    remaining_at = 1 - sums["group_masses"][:, _INSERTED_GROUP]
    positions = pairs.place[:, None].expand(-1, remaining_at.shape[1], -1)
    counted = pairs.original & _counted(analysis.queries, batch).gather(1, pairs.place)
    remaining = remaining_at.gather(2, positions) * counted[:, None]

    segment_masses = sums["group_masses"][:, :_INSERTED_GROUP]
    baseline_masses = segment_masses[baseline, ..., :original_count]
    diluted = einsum(
        remaining, baseline_masses, "batch head query, batch group head query -> batch head group"
    )
    received, mass = diluted.chunk(2, -1)
    if not analysis.include_self:
        own = remaining * sums["own"][baseline, :, :original_count]
        segment_weights = _key_groups(analysis, batch, window)[:, : len(SEGMENTS)]
        baseline_weights = segment_weights[baseline, :, :original_count]
        received = received - own @ baseline_weights.mT

    # The rows of the baseline do not apply to a counterpart, which has other tokens.
    tokens = batch.tokens.gather(1, pairs.place)
    is_changed = (tokens != tokens[baseline]) & pairs.original
    has_changed = is_changed.any(-1)[:, None, None]

    values = {}
    for name, value in (("received_by_segment", received), ("mass_by_segment", mass)):
        is_unknown = measured_values[name][baseline].isnan() | has_changed
        values[name + DILUTION] = value.masked_fill(is_unknown, torch.nan)
    return values
