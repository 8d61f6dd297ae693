"""Attention sinks: which keys are sinks, whether inserted tokens are among them, and what they
contribute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from mechattn.analysis.analysis import (
    DEPENDS_ON_VALUES,
    Analysis,
    AnalysisBase,
    AttentionRows,
    Captures,
    Layers,
    Prompts,
    Quantities,
    Quantity,
    Sums,
    Values,
    Window,
    calibrated_field,
    nan_outside,
    zeros,
)
from mechattn.errors import OptionError, check_counts
from mechattn.functional import received as fn
from mechattn.functional.attention import Marked
from mechattn.functional.head_outputs import (
    Factor,
    effective_rank,
    output_factor,
    spectrum,
    update_norm,
)
from mechattn.model.head_parts import output_weights
from mechattn.model.hooked import HookedModel
from mechattn.prompts.token_sequences import Batch, TokenSequence, inserted_span

# Units and descriptions. The quantities of the second table may be 0 in the baseline, so conditions
# are compared by their difference.
_OF_PATTERNS = {
    "first_alpha": (
        "probability",
        "mean attention to the first token of the queries that can see it",
    ),
    "strongest_alpha": (
        "probability",
        "the largest mean attention of a key, among those that enough queries see",
    ),
}
_OF_PATTERNS_FROM_ZERO = {
    "first_sink": (
        "share",
        "1 if the first token is a sink: its mean attention is above the threshold",
    ),
    "sinks": ("keys", "the number of sinks, among keys that enough queries see"),
    "inserted_alpha": ("probability", "the largest mean attention of an inserted token"),
    "inserted_sink": ("share", "1 if an inserted token is a sink"),
    "span_sink": (
        "share",
        "1 if the inserted tokens together are a sink: span_mass is above the threshold",
    ),
}
_OF_VALUES = {
    "value_drain": (
        "ratio",
        "|v| of the first token / mean |v| of all tokens: small if the sink contributes little",
    ),
    "strongest_value_ratio": (
        "ratio",
        "|v| of the key with the largest mean attention / mean |v| of all tokens",
    ),
    "first_norm_share": (
        "share",
        "sum A |v W_O| of the first token / that of all tokens (before interventions on z)",
    ),
    "first_output_share": (
        "ratio",
        "mean A |v W_O| of the first token / mean |z W_O|: near 1 if it is broadcast",
    ),
    "output_rank": (
        "dimensions",
        "effective rank of z over the tokens (exp entropy of its singular values' shares)",
    ),
    "output_ratio": ("ratio", "mean |z W_O| / its mean over the heads of the layer"),
    "inactive": ("share", "1 if output_ratio is below inactive_below"),
}
_PER_LAYER = {
    "massive_count": ("entries", "entries of resid_post with |h| above both bounds"),
    "massive_ratio": ("ratio", "largest |h| of resid_post / median |h|"),
    "massive_position": ("position", "the position of the largest |h| of resid_post"),
    "length": ("tokens", "length of the sequence, on which the means depend"),
}
_PER_KEY = {
    "alpha": (
        "probability",
        "mean attention that the key gets from itself and the queries after it",
    ),
    "vertical": (
        "probability",
        "vertical score: mean attention that the key gets from queries at least `gap` later",
    ),
}
_VALUES_PER_KEY = {
    "value_norm": ("value norm", "|v|"),
    "output_value_norm": ("residual norm", "|v W_O|"),
}


@dataclass(frozen=True)
class AttentionSinks(AnalysisBase):
    """Find the attention sinks of each head and measure what they contribute to its output.

    ``α[k] = mean over q ≥ k of A[q, k]``; a head has a sink at k if ``α[k] > threshold``. The sink
    rate is the mean of ``first_sink`` (or of ``sinks > 0``) over layers, heads and prompts. α
    depends on the length of the sequence, which is recorded. Every query counts, including inserted
    ones. A sink that contributes little (small ``value_drain`` and ``first_output_share``) lets a
    head do nothing; one that contributes much adds the same vector to every token
    (``first_output_share`` near 1, ``output_rank`` near 1).

    Args:
        threshold: The threshold of α.
        least_queries: The number of queries that must see a key for it to count as a sink, since
            the mean over few queries is noisy. The first token is judged in any case.
        gap: The smallest distance between query and key that counts for the vertical score.
        inactive_below: A head is inactive if its ``output_ratio`` is below this.
        massive: The bounds that a massive activation exceeds: of |h|, and of |h| / median |h|.

    Source:
        Gu et al., arXiv:2410.10781 (α, threshold 0.3); Sun et al., arXiv:2402.17762 (massive
        activations); Kobayashi et al., arXiv:2004.10102 (norms); Bogdan et al., arXiv:2506.19143
        (vertical scores).
    """

    name = "attention_sinks"
    threshold: float = 0.3
    least_queries: int = 16
    gap: int = 4
    inactive_below: float = 0.1
    massive: tuple[float, float] = (100.0, 1000.0)
    factors: Mapping[int, Factor] = calibrated_field(default_factory=dict)  # of W_O, by layer

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise OptionError(f"threshold={self.threshold!r}: give a number between 0 and 1")
        try:
            _, _ = map(float, self.massive)  # fails unless there are two numbers
        except (TypeError, ValueError):
            raise OptionError(
                f"massive={self.massive!r}: give two bounds, of |h| and of |h| / median |h|"
            ) from None
        check_counts(least_queries=self.least_queries, gap=self.gap)

    @property
    def quantities(self) -> Quantities:
        """Quantities of each head, of each layer and of each key."""
        by_head = ("head",)
        by_key = ("head", "key")
        return {
            **_quantities(_OF_PATTERNS, by_head),
            **_quantities(_OF_PATTERNS_FROM_ZERO, by_head, compared="difference"),
            "span_mass": Quantity(
                by_head,
                "probability",
                "attention to all inserted tokens, mean over the original queries after them",
                compared="difference",
                title="attention to all inserted tokens",
            ),
            "strongest_position": Quantity(
                by_head,
                "position",
                "the position of the key with the largest mean attention",
                compared="difference",
                no_null="uniform attention has no largest key",
            ),
            **_quantities(_OF_VALUES, by_head, no_null=DEPENDS_ON_VALUES),
            **_quantities(
                _PER_LAYER, (), compared="difference", no_null="it is not made of attention"
            ),
            **_quantities(_PER_KEY, by_key),
            **_quantities(_VALUES_PER_KEY, by_key, no_null=DEPENDS_ON_VALUES),
        }

    @property
    def captures(self) -> Sequence[str]:
        """Each head's output before W_O, and the residual stream after the layer."""
        return ("attn.hook_z", "hook_resid_post")

    def problem(self, sequence: TokenSequence) -> str | None:
        """A sequence of fewer than ``least_queries`` tokens is refused, since it cannot have a
        sink."""
        if len(sequence) >= self.least_queries:
            return None
        return (
            f"has {len(sequence)} tokens; a sink must be seen by {self.least_queries} queries"
            " (least_queries=…)"
        )

    def calibrated(self, model: HookedModel, layers: Layers, prompts: Prompts) -> Analysis:
        """Prepare the factors of each layer's W_O."""
        factors = {layer: output_factor(output_weights(model, layer)) for layer in layers}
        return replace(self, factors=factors)

    def start(self, batch: Batch, heads: int) -> Sums:
        """Zero sums over queries for each key."""
        return zeros(batch, heads, "column_sums", "column_sums_after", "near_column_sums")

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """Add column sums over all queries, over the original ones after the insertion, and over
        those near the key; with a layer's first block, store the norms of the values."""
        pattern = rows.pattern
        keys = rows.keys
        queries = rows.queries

        # Once per layer, since these are the values of all positions; a null has none.
        if rows.is_first_block and not rows.null:
            v = rows.values_for("a sink's contribution")
            value_norm, output_value_norm = fn.value_norms(v, self.factors[rows.layer])
            sums["value_norm"] = value_norm
            sums["output_value_norm"] = output_value_norm

        real = rows.batch.real[:, queries]
        sums["column_sums"][..., keys] += fn.column_sums(pattern, real)
        near_column_sums = sums["near_column_sums"][..., keys]
        fn.add_near_sums(near_column_sums, pattern, real, queries.start, keys.start, self.gap)

        span_start, span_end = inserted_span(rows.batch)
        has_inserted = span_start < span_end
        if has_inserted and queries.stop > span_start:
            is_after = rows.batch.after_inserted[:, queries]
            sums["column_sums_after"][..., keys] += fn.column_sums(pattern, is_after)

    def add_captures(self, sums: Sums, captures: Captures) -> None:
        """Store the norm and the Gram matrix of each head's output, and the massive
        activations."""
        factor = self.factors[captures.layer]
        real = captures.batch.real
        z = captures.by_head("attn.hook_z", len(factor)).to(factor.dtype)
        sums["output_norm"] = update_norm(z, factor)

        # In float64, since a Gram matrix squares the condition number.
        z_by_head = rearrange(z, "batch pos head d_head -> batch head pos d_head").double()
        real_z = z_by_head * real[:, None, :, None]
        sums["gram"] = real_z.mT @ real_z

        stream = captures.tensors["hook_resid_post"].to(factor.dtype)
        size_bound, ratio_bound = self.massive
        sums |= fn.massive(stream, real, float(size_bound), float(ratio_bound))

    def values(self, sums: Sums, batch: Batch, window: Window) -> Values:
        """Everything that follows from α; except for the null, also what needs values, z and the
        residual stream."""
        query_counts = fn.seeing_queries(
            batch.real, window, include_self=True, edge_mask=batch.edge_mask
        )
        values = self._alpha_values(sums, batch, query_counts)
        span_sums = (sums["column_sums_after"] * batch.inserted[:, None]).sum(-1)
        counts_after = batch.after_inserted.sum(-1)[:, None].float()
        values["span_mass"] = span_sums / counts_after
        values["span_sink"] = _above(values["span_mass"], self.threshold)

        near_window = self.gap if window is None else min(self.gap, window)
        near_query_counts = fn.seeing_queries(
            batch.real, near_window, include_self=True, edge_mask=batch.edge_mask
        )
        distant_query_counts = query_counts - near_query_counts
        distant_column_sums = sums["column_sums"] - sums["near_column_sums"]
        vertical = distant_column_sums / distant_query_counts[:, None]
        values["vertical"] = nan_outside(vertical, batch.real & (distant_query_counts > 0))
        is_null = "output_norm" not in sums  # no hook fires for it, so nothing was captured
        if is_null:
            return values

        values |= self._contribution_values(sums, batch, values["strongest_position"])
        values["length"] = batch.lengths.float()
        for name in ("massive_count", "massive_ratio", "massive_position"):
            values[name] = sums[name]
        for name in _VALUES_PER_KEY:
            values[name] = nan_outside(sums[name], batch.real)
        return values

    def _alpha_values(self, sums: Sums, batch: Batch, query_counts: fn.CountOfKey) -> Values:
        """α of every key, the number of sinks, and α of the first, the strongest and the strongest
        inserted key.

        Args:
            sums: The layer's sums.
            batch: The sequences.
            query_counts: The number of queries that see each key, itself included.
        """
        alpha = fn.received_attention(sums["column_sums"], query_counts * batch.real)
        is_candidate = (query_counts >= self.least_queries) & batch.real
        candidate_alpha = alpha.masked_fill(~is_candidate[:, None], -torch.inf)
        strongest_alpha, strongest_position = candidate_alpha.max(-1)
        sink_count = (candidate_alpha > self.threshold).sum(-1).float()
        has_candidate = is_candidate.any(-1)  # False in a window narrower than ``least_queries``

        is_inserted = is_candidate & batch.inserted
        inserted_alpha = alpha.masked_fill(~is_inserted[:, None], -torch.inf).amax(-1)
        inserted_alpha = nan_outside(inserted_alpha, is_inserted.any(-1))
        first_alpha = alpha[..., 0]
        return {
            "alpha": alpha,
            "first_alpha": first_alpha,
            "first_sink": _above(first_alpha, self.threshold),
            "strongest_alpha": nan_outside(strongest_alpha, has_candidate),
            "strongest_position": nan_outside(strongest_position.float(), has_candidate),
            "sinks": nan_outside(sink_count, has_candidate),
            "inserted_alpha": inserted_alpha,
            "inserted_sink": _above(inserted_alpha, self.threshold),
        }

    def _contribution_values(
        self, sums: Sums, batch: Batch, strongest_position: Float[Tensor, "batch head"]
    ) -> Values:
        """What the first and the strongest key contribute, the size and rank of each head's output,
        and which heads are inactive.

        Args:
            sums: The layer's sums.
            batch: The sequences.
            strongest_position: The position of the key with the largest α; NaN if no key counts.
        """
        value_norm = sums["value_norm"]
        mean_value_norm = _mean(value_norm, batch.real)

        key_index = strongest_position.nan_to_num(0.0).long()[..., None]
        strongest_value_norm = value_norm.gather(-1, key_index)[..., 0]
        has_no_strongest = strongest_position.isnan()
        strongest_value_norm = strongest_value_norm.masked_fill(has_no_strongest, torch.nan)

        mean_output_norm = _mean(sums["output_norm"], batch.real)
        output_ratio = mean_output_norm / mean_output_norm.mean(1, keepdim=True)
        is_inactive = (output_ratio < self.inactive_below).float()
        # The mean over queries of A |v W_O|, for each key.
        lengths = batch.lengths[:, None, None]
        contributions = sums["column_sums"] * sums["output_value_norm"] / lengths
        first_contribution = contributions[..., 0]
        first_output_share = first_contribution / mean_output_norm

        return {
            "value_drain": value_norm[..., 0] / mean_value_norm,
            "strongest_value_ratio": strongest_value_norm / mean_value_norm,
            "first_norm_share": first_contribution / contributions.sum(-1),
            "first_output_share": torch.where(mean_output_norm > 0, first_output_share, torch.nan),
            "output_rank": effective_rank(spectrum(sums["gram"])).float(),
            "output_ratio": output_ratio,
            "inactive": is_inactive.masked_fill(output_ratio.isnan(), torch.nan),
        }


def _quantities(
    table: Mapping[str, tuple[str, str]],
    dims: tuple[str, ...],
    compared: Literal["ratio", "difference"] = "ratio",
    no_null: str = "",
) -> dict[str, Quantity]:
    """The quantities of a table, all with these dimensions."""
    return {
        name: Quantity(dims, units, description, compared=compared, no_null=no_null)
        for name, (units, description) in table.items()
    }


def _mean(value: fn.PerKey, counted: Marked) -> Float[Tensor, "batch head"]:
    """The mean over the counted positions; NaN if there are none."""
    weight = counted[:, None].to(value.dtype)
    return (value * weight).sum(-1) / weight.sum(-1)


def _above(value: Float[Tensor, "*any"], bound: float) -> Float[Tensor, "*any"]:
    """1 if a value is above the bound, 0 if it is not, NaN if the value is NaN."""
    return torch.where(value.isnan(), torch.nan, (value > bound).float())
