"""What attention focuses on (the query itself, the first or previous token, repeats) and how
evenly."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from mechattn.analysis.analysis import (
    HEAD_AND_SEGMENT,
    AnalysisBase,
    AttentionRows,
    Quantities,
    Quantity,
    Sums,
    Values,
    Window,
    means_by_segment,
    means_of,
    nan_outside,
    of_each,
    of_each_query,
    zeros,
)
from mechattn.functional import focus as fn
from mechattn.functional.attention import Marked
from mechattn.functional.budget import masses_of_rows
from mechattn.functional.received import self_attention, visible_counts
from mechattn.prompts.token_sequences import Batch, inserted_span

_NO_LARGEST = "uniform attention has no largest key"
# Conditions are compared by "difference" if the quantity may be 0 in the baseline.
_OF_QUERIES = {
    "self_share": Quantity(
        HEAD_AND_SEGMENT,
        "share",
        "1 if the strongest target is the query",
        compared="difference",
        no_null=_NO_LARGEST,
        title="strongest target: the query itself",
    ),
    "first_share": Quantity(
        HEAD_AND_SEGMENT,
        "share",
        "1 if the strongest target is the first token",
        compared="difference",
        no_null=_NO_LARGEST,
        title="strongest target: the first token",
    ),
    "previous_share": Quantity(
        HEAD_AND_SEGMENT,
        "share",
        "1 if the strongest target is the token before",
        compared="difference",
        no_null=_NO_LARGEST,
        title="strongest target: the token before",
    ),
    "self_mass": Quantity(
        HEAD_AND_SEGMENT,
        "probability",
        "attention of a query to itself",
        title="attention to the query itself",
    ),
    "first_mass": Quantity(
        HEAD_AND_SEGMENT,
        "probability",
        "attention of a query to the first token",
        title="attention to the first token",
    ),
    "previous_mass": Quantity(
        HEAD_AND_SEGMENT,
        "probability",
        "attention of a query to the token before",
        title="attention to the token before",
    ),
    "duplicate_mass": Quantity(
        HEAD_AND_SEGMENT,
        "probability",
        "attention of a query to earlier occurrences of its own token, of queries that have one",
        compared="difference",
        title="attention to earlier occurrences of the same token",
    ),
    "induction_mass": Quantity(
        HEAD_AND_SEGMENT,
        "probability",
        "attention of a query to the tokens after earlier occurrences of its own token, of queries"
        " that have one",
        compared="difference",
        title="attention to the tokens after earlier occurrences of the same token",
    ),
    "inserted_mass": Quantity(
        HEAD_AND_SEGMENT,
        "probability",
        "attention of a query to all inserted tokens together",
        compared="difference",
        title="attention to the inserted tokens",
    ),
    "concentration": Quantity(
        HEAD_AND_SEGMENT,
        "probability",
        "p(1) - p(2): the largest probability minus the second largest",
        no_null="it is 0 under uniform attention for any number of keys",
        title="p(1) − p(2)",
    ),
    "entropy": Quantity(HEAD_AND_SEGMENT, "nats", "- sum over keys of A log A"),
    "entropy_share": Quantity(
        HEAD_AND_SEGMENT,
        "share",
        "entropy / log of the number of keys that the query sees: 1 if uniform",
    ),
    "distance": Quantity(
        HEAD_AND_SEGMENT, "positions", "sum over keys of A (query - key)", title="mean distance"
    ),
    "half_mass_keys": Quantity(
        HEAD_AND_SEGMENT,
        "keys",
        "size of the smallest set of keys that holds half of the attention",
    ),
}
# These are computed in ``values`` from the target and the entropy of each query.
_FROM_SUMS = ("self_share", "first_share", "previous_share", "entropy_share")
# How many positions after an earlier occurrence of the query's token the attended key is.
_AFTER_REPEAT = {"duplicate_mass": 0, "induction_mass": 1}


@dataclass(frozen=True)
class AttentionFocus(AnalysisBase):
    """Measure how focused each head's attention is, and on what (R. Claus, "Attention Focus Plots",
    figures 4 to 6).

    Attention to the query itself, to the first token and to the previous token is measured in two
    ways: the *argmax share* (``…_share``) is the share of queries whose strongest target is that
    token, and the *mass* (``…_mass``) is the attention that they pay to it. All are means over the
    queries of each segment. Queries that see only one key, such as the first, do not count. In a
    tie the earlier key is the target.

    Two masses are the scores of duplicate-token and induction heads. With ``p`` the positions
    before ``q`` that hold the same token as ``q``, ``duplicate_mass[q] = Σ A[q, p]`` and
    ``induction_mass[q] = Σ A[q, p + 1]`` (``p + 1 < q``). They are means over the queries that have
    such a position, and NaN for a segment without such queries. Inserted tokens count too: repeated
    filler tokens are duplicates of each other.

    Args:
        half_mass: Also measure the smallest set of keys that holds half of a query's attention.
            This sorts every row, which takes several times as long as the rest.
        per_query: Also keep each query's values, as ``…_at``, and the index of its strongest
            target, ``target_at``.
    """

    name = "attention_focus"
    half_mass: bool = False
    per_query: bool = False

    @property
    def _query_quantities(self) -> Quantities:
        """The quantities of each query that these options measure."""
        query_quantities = dict(_OF_QUERIES)
        if not self.half_mass:
            del query_quantities["half_mass_keys"]
        return query_quantities

    @property
    def quantities(self) -> Quantities:
        """Means over the queries of each segment; with ``per_query`` also each query's values."""
        query_quantities = self._query_quantities
        quantities = means_of(query_quantities)
        if self.per_query:
            quantities |= of_each(query_quantities)
            quantities["target_at"] = Quantity(
                ("head", "key"), "position", "index of the strongest target", no_null=_NO_LARGEST
            )
        return quantities

    def start(self, batch: Batch, heads: int) -> Sums:
        """Zeros for each query and number."""
        names = [name for name in self._query_quantities if name not in _FROM_SUMS]
        return zeros(batch, heads, *names, "target")

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """Store the values of each query at its position."""
        pattern = rows.pattern
        first_query = rows.queries.start
        first_key = rows.keys.start
        block = (first_query, rows.queries.stop, first_key, rows.keys.stop)
        largest, second, target_column = fn.top_two(pattern)
        block_values = {
            "target": target_column + first_key,
            "self_mass": self_attention(pattern, first_query, first_key),
            "previous_mass": fn.looking_back(pattern, 1, first_query, first_key),
            "concentration": largest - second.clamp(min=0),  # ``second`` is −1 for a single key
            "entropy": fn.entropy(pattern),
            "distance": fn.mean_distance(pattern, first_query, first_key),
        }

        for name, after in _AFTER_REPEAT.items():
            indices = _indices_of_repeats(rows.batch, after, *block)
            block_values[name] = fn.looked_up_mass(pattern, indices)

        # The masses of these two stay 0 if the block has none of their keys.
        if first_key == 0:
            block_values["first_mass"] = pattern[..., 0]
        span_start, span_end = inserted_span(rows.batch)
        if span_start < rows.keys.stop and span_end > first_key:
            inserted = rows.batch.inserted[:, rows.keys].to(pattern.dtype)
            block_values["inserted_mass"] = masses_of_rows(pattern, inserted[:, None])[:, 0]

        if self.half_mass:
            block_values["half_mass_keys"] = fn.half_mass_keys(pattern)

        for name, value in block_values.items():
            sums[name][..., rows.queries] = value

    def values(self, sums: Sums, batch: Batch, window: Window) -> Values:
        """Means over the queries of each segment that see at least two keys."""
        key_counts = visible_counts(torch.ones_like(batch.real), window, batch.edge_mask)
        counted = batch.real & (key_counts >= 2)
        largest_entropy = key_counts.log()[:, None].float()

        query_values = dict(sums)
        target = query_values.pop("target")
        query_values["self_share"] = (target == batch.positions).float()
        query_values["first_share"] = (target == 0).float()
        query_values["previous_share"] = (target == batch.positions - 1).float()
        query_values["entropy_share"] = sums["entropy"] / largest_entropy
        for name, after in _AFTER_REPEAT.items():
            query_values[name] = nan_outside(sums[name], _has_repeat(batch, after))
        query_values = {name: nan_outside(value, counted) for name, value in query_values.items()}

        values = means_by_segment(query_values, batch)
        if self.per_query:
            values |= of_each_query(query_values, query_values, batch)
            values["target_at"] = nan_outside(target, counted)
        return values


# The layers of a batch share them. There is one entry for each block and each value of ``after``;
# 256 suffice for a long sequence. Before Python 3.12 slices cannot be keys of a cache.
@lru_cache(maxsize=256)
def _indices_of_repeats(
    batch: Batch, after: int, first_query: int, end_query: int, first_key: int, end_key: int
) -> fn.PairIndices:
    """The indices (row, query, key) of the keys in a block that ``fn.repeats_of`` marks."""
    queries = slice(first_query, end_query)
    keys = slice(first_key, end_key)
    row, query, key = fn.repeats_of(batch.tokens, after, queries, keys).nonzero(as_tuple=True)
    return row, query, key


@lru_cache(maxsize=4)  # the layers of a batch share them
def _has_repeat(batch: Batch, after: int) -> Marked:
    """The queries that have a key of ``fn.repeats_of``: their token occurs before them, with
    ``after=1`` at least two positions before."""
    return fn.has_repeat(batch.tokens, after)
