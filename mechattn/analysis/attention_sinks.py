"""Attention sinks: which keys are sinks, whether inserted tokens are among them, and what they contribute."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from mechattn.analysis.analysis import (
    Analysis,
    AnalysisBase,
    AttentionRows,
    Captures,
    Quantity,
    Sums,
    zeros,
)
from mechattn.errors import ModelError, OptionError, check_counts
from mechattn.functional import received as fn
from mechattn.functional.head_outputs import effective_rank, spectrum, update_norm
from mechattn.model.head_parts import output_factor_of, output_weights
from mechattn.model.hooked import HookedModel
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.token_sequences import Batch, Sequence, inserted_span

_PER_HEAD = {
    "first_alpha": ("probability", "mean attention to the first token of the queries that can see it"),
    "first_sink": ("share", "1 if the first token is a sink: its mean attention is above the threshold"),
    "sinks": ("keys", "the number of sinks, among keys that enough queries see"),
    "strongest_alpha": ("probability", "the largest mean attention of a key, among those that enough queries see"),
    "strongest_position": ("position", "the position of that key"),
    "inserted_alpha": ("probability", "the largest mean attention of an inserted token"),
    "inserted_sink": ("share", "1 if an inserted token is a sink"),
    "span_mass": ("probability", "attention to all inserted tokens, mean over the original queries after them"),
    "span_sink": ("share", "1 if the inserted tokens together are a sink: that mass is above the threshold"),
    "value_drain": ("ratio", "|v| of the first token / mean |v| of all: small if the sink contributes little"),
    "strongest_value_ratio": ("ratio", "|v| of the key with the largest mean attention / mean |v| of all"),
    "inserted_value_ratio": ("ratio", "mean |v| of the inserted tokens / mean |v| of the others"),
    "first_norm_share": ("share", "share of sum A |v W_O| of the first token (norm-based; before interventions on z)"),
    "first_output_share": ("ratio", "mean A |v W_O| of the first token / mean |z W_O|: near 1 if it is broadcast"),
    "output_rank": ("dimensions", "effective rank of z over the tokens (exp entropy of its singular values' shares)"),
    "output_ratio": ("ratio", "mean |z W_O| / its mean over the heads of the layer"),
    "inactive": ("share", "1 if that ratio is below the bound"),
    "vertical_kurtosis": ("ratio", "kurtosis over keys of the vertical score; 3 if normal"),
}  # fmt: skip
_PER_LAYER = {
    "massive_count": ("entries", "entries of resid_post with |h| above both bounds"),
    "massive_ratio": ("ratio", "largest |h| of resid_post / median |h|"),
    "massive_position": ("position", "the position of the largest |h| of resid_post"),
    "length": ("tokens", "length of the sequence, on which the means depend"),
}
_PER_KEY = {
    "alpha": (
        "probability",
        "mean attention that the key gets from the queries from it on, its own included",
    ),
    "vertical": (
        "probability",
        "vertical score: mean attention that the key gets from queries at least `gap` later",
    ),
    "value_norm": ("value norm", "|v|"),
    "output_value_norm": ("residual norm", "|v W_O|"),
}
_OF_VALUES = (
    "value_drain", "inserted_value_ratio", "first_norm_share", "strongest_value_ratio", "value_norm",
    "output_value_norm", "first_output_share", "output_rank", "output_ratio", "inactive",
)  # fmt: skip
_NO_NULL = {
    "strongest_position": "uniform attention has no largest key",
    **dict.fromkeys(_OF_VALUES, "it depends on the values"),
    **dict.fromkeys(_PER_LAYER, "it is not made of attention"),
}
_INSERTED = ("inserted_alpha", "inserted_sink", "span_mass", "span_sink", "inserted_value_ratio")


@dataclass(frozen=True)
class AttentionSinks(AnalysisBase):
    """Find the attention sinks of each head and measure what they contribute to its output.

    ``α[k] = mean over q ≥ k of A[q, k]``; a head has a sink at k if ``α[k] > threshold``; the sink rate is the mean of
    ``first_sink`` (or of ``sinks > 0``) over layers, heads and prompts. α depends on the length of the sequence, which
    is recorded. Every query counts, including inserted ones. A sink that contributes little (small ``value_drain`` and
    ``first_output_share``) lets a head do nothing; one that contributes much adds the same vector to every token
    (``first_output_share`` near 1, ``output_rank`` near 1).

    Args:
        threshold: The threshold of α.
        least_queries: The number of queries that must see a key for it to count as a sink; the last keys are seen by
            few.
        gap: The smallest distance between query and key that counts for the vertical score.
        inactive_below: The threshold of ``output_ratio`` below which a head is inactive.
        massive: The bounds of a massive activation: |h|, and |h| / median |h|.

    Source:
        Gu et al., arXiv:2410.10781 (α, threshold 0.3); Sun et al., arXiv:2402.17762 (massive activations); Kobayashi et
        al., arXiv:2004.10102 (norms); Bogdan et al., arXiv:2506.19143 (vertical scores).
    """

    name = "attention_sinks"
    threshold: float = 0.3
    least_queries: int = 16
    gap: int = 4
    inactive_below: float = 0.1
    massive: tuple[float, float] = (100.0, 1000.0)
    factors: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, most in (("threshold", 1), ("inactive_below", float("inf"))):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not 0 < value < most
            ):
                below = ", below 1, such as 0.3" if most == 1 else ""
                raise OptionError(f"{name}={value!r}: give a number above 0{below}")
        bounds = self.massive if isinstance(self.massive, (tuple, list)) else ()
        if len(bounds) != 2 or not all(isinstance(bound, (int, float)) for bound in bounds):
            raise OptionError(
                f"massive={self.massive!r}: give two numbers, of |h| and of |h| / median, such as (100, 1000)"
            )
        check_counts(least_queries=self.least_queries, gap=self.gap)

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """Per head, per layer and per key."""
        plain = (
            "share",
            "keys",
            "position",
        )  # may be 0, so conditions are compared by their difference
        made = {}
        for name, (units, about) in _PER_HEAD.items():
            compared: Any = "difference" if units in plain or name in _INSERTED else "ratio"
            made[name] = Quantity(("head",), units, about, compared, _NO_NULL.get(name, ""))
        made |= {
            name: Quantity((), u, d, "difference", _NO_NULL[name])
            for name, (u, d) in _PER_LAYER.items()
        }
        dims = ("head", "key")
        return made | {
            n: Quantity(dims, u, d, no_null=_NO_NULL.get(n, "")) for n, (u, d) in _PER_KEY.items()
        }

    @property
    def captures(self) -> Seq[str]:
        """Each head's output before W_O, and the residual stream after the block."""
        return ("attn.hook_z", "hook_resid_post")

    def problem(self, sequence: Sequence) -> str | None:
        """A sequence in which no key is seen by enough queries is refused."""
        if len(sequence) >= self.least_queries:
            return None
        return f"has {len(sequence)} tokens; a sink must be seen by {self.least_queries} queries (least_queries=…)"

    def calibrated(self, model: HookedModel, layers: Seq[int], measured: Seq[Prompt]) -> Analysis:
        """Prepare the factors of each layer's W_O."""
        factors = {layer: output_factor_of(output_weights(model, layer)) for layer in layers}
        return replace(self, factors=factors)

    def start(self, batch: Batch, heads: int) -> Sums:
        """Empty sums."""
        sums = zeros(batch, heads, "columns", "columns_after")
        return sums | zeros(batch, heads, "near", last=(self.gap,))

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """Add column sums over all queries, over those after the insertion, and over those near the key."""
        pattern, keys = rows.pattern, rows.keys
        if "value_norm" not in sums and not rows.null:
            if rows.v is None:
                raise ModelError(
                    f"layer {rows.layer} has no hook_v per head, so a sink's contribution cannot be measured"
                )
            sums["value_norm"], sums["output_value_norm"] = fn.value_norms(
                rows.v, self.factors[rows.layer]
            )
        counted = rows.batch.real[:, rows.queries]
        sums["columns"][..., keys] += fn.column_sums(pattern, counted)
        sums["near"][:, :, rows.queries] = fn.near_band(
            pattern, self.gap, rows.queries.start, keys.start
        )
        first, beyond = inserted_span(rows.batch)
        if beyond and rows.queries.stop > first:
            sums["columns_after"][..., keys] += fn.column_sums(
                pattern, rows.batch.after_inserted[:, rows.queries]
            )

    def add_captures(self, sums: Sums, captures: Captures) -> None:
        """Measure the norm and rank of each head's output, and the largest activations."""
        factor, real = self.factors[captures.layer], captures.batch.real
        z = captures.by_head("attn.hook_z", len(factor)).to(factor.dtype)
        sums["output"] = update_norm(z, factor)
        by_head = rearrange(z, "batch pos head d_head -> batch head pos d_head")
        by_head = by_head.to(torch.float64, copy=True)  # the model's own is not to be changed
        by_head *= real[:, None, :, None]
        sums["gram"] = by_head.mT @ by_head
        sums |= fn.massive(
            captures.tensors["hook_resid_post"].to(factor.dtype), real, *map(float, self.massive)
        )

    def values(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """α and what follows from it (the null has only these), and the rest."""
        span = (sums["columns_after"] * batch.inserted[:, None]).sum(-1) / batch.after_inserted.sum(
            -1
        )[:, None].float()
        of_attention = {
            **self._of_keys(sums, batch, window),
            "span_mass": span,
            "span_sink": _above(span, self.threshold),
            **self._vertical(sums, batch, window),
        }
        if "value_norm" not in sums:
            return of_attention
        hidden = ~batch.real[:, None]
        return {
            **of_attention,
            **self._of_values(sums, batch, of_attention["strongest_position"]),
            **{name: sums[name] for name in _PER_LAYER if name != "length"},
            "length": batch.lengths.float(),
            **{
                name: sums[name].masked_fill(hidden, torch.nan)
                for name in ("value_norm", "output_value_norm")
            },
        }

    def _of_keys(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """α of every key, which keys are sinks, and the strongest inserted key."""
        seeing = fn.seeing_queries(batch.real, window, include_self=True, edge_mask=batch.edge_mask)
        alpha = fn.received_attention(sums["columns"], seeing * batch.real)
        enough = (seeing >= self.least_queries) & batch.real
        among = alpha.masked_fill(~enough[:, None], -1.0)
        strongest, at = among.max(-1)
        none = ~enough.any(-1)[:, None]  # such as in a narrower window
        of_inserted = among.masked_fill(~batch.inserted[:, None], -1.0).amax(-1)
        of_inserted = of_inserted.masked_fill(of_inserted < 0, torch.nan)
        return {
            "alpha": alpha,
            "first_alpha": alpha[..., 0],
            "first_sink": _above(alpha[..., 0], self.threshold),
            "sinks": (among > self.threshold).sum(-1).float().masked_fill(none, torch.nan),
            "strongest_alpha": strongest.masked_fill(none, torch.nan),
            "strongest_position": at.float().masked_fill(none, torch.nan),
            "inserted_alpha": of_inserted,
            "inserted_sink": _above(of_inserted, self.threshold),
        }

    def _of_values(
        self, sums: Sums, batch: Batch, strongest: Float[Tensor, "batch head"]
    ) -> dict[str, Tensor]:
        """The contributions of the inserted tokens, the first token and the strongest sink; inactive heads."""
        norms, inserted, mean_norm = (
            sums["value_norm"],
            batch.inserted,
            _mean(sums["value_norm"], batch.real),
        )
        output = _mean(sums["output"], batch.real)
        given = (
            sums["columns"] * sums["output_value_norm"] / batch.lengths[:, None, None]
        )  # mean of A |v W_O|
        ratio = output / output.mean(1, keepdim=True)
        at_strongest = norms.gather(-1, strongest.nan_to_num(0.0).long()[..., None])[..., 0]
        return {
            "inserted_value_ratio": _mean(norms, inserted) / _mean(norms, batch.real & ~inserted),
            "value_drain": norms[..., 0] / mean_norm,
            "strongest_value_ratio": (at_strongest / mean_norm).masked_fill(
                strongest.isnan(), torch.nan
            ),
            "first_norm_share": given[..., 0] / given.sum(-1),
            "first_output_share": torch.where(output > 0, given[..., 0] / output, torch.nan),
            "output_rank": effective_rank(spectrum(sums["gram"])).float(),
            "output_ratio": ratio,
            "inactive": (ratio < self.inactive_below).float(),
        }

    def _vertical(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """Attention from distant queries to each key, and its kurtosis over keys."""
        seeing = fn.seeing_queries(batch.real, window, include_self=True, edge_mask=batch.edge_mask)
        distant = seeing - fn.near_queries(batch.real, self.gap, window, batch.edge_mask)
        far = batch.real & (distant > 0)
        near = fn.near_sums(sums["near"], batch.real)
        score = (sums["columns"] - near) / distant.clamp(min=1)[:, None]
        shown = score.masked_fill(~far[:, None], torch.nan)
        return {"vertical": shown, "vertical_kurtosis": fn.kurtosis_over_keys(score, far)}


def _mean(
    value: Float[Tensor, "batch head pos"], counted: Bool[Tensor, "batch pos"]
) -> Float[Tensor, "batch head"]:
    """The mean over the counted positions [batch head]; NaN if there are none."""
    weight = counted[:, None].to(value.dtype)
    return (value * weight).sum(-1) / weight.sum(-1)


def _above(value: Float[Tensor, "*any"], bound: float) -> Float[Tensor, "*any"]:
    return torch.where(value.isnan(), torch.nan, (value > bound).float())
