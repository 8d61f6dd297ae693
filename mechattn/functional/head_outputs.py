"""What heads write: updates of the stream, and their affine parts under inserted tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechattn.functional.attention import (
    Marked,
    Pattern,
    PerQuery,
    PerToken,
    Stream,
    mix,
    working_dtype,
)

Outputs = Float[Tensor, "batch head query d_head"]  # of each head, before W_O
Aligned = Float[Tensor, "batch head query original"]  # attention to the original keys
Weights = Float[Tensor, "head d_head d_model"]  # W_O
PerPart = Float[Tensor, "batch part pos"]  # of heads, or other parts of a layer
Z = Float[Tensor, "batch pos head d_head"]
BinEdges = Float[Tensor, " edge"]
Energies = Float[Tensor, "*batch d_head"]  # squared singular values, largest first
PerMatrix = Float[Tensor, "*batch"]
OriginalValues = Float[Tensor, "batch kv_head original d_head"]
Factor = Float[Tensor, "head rank d_head"]  # see output_factor


def output_factor(w_o: Weights) -> Factor:
    """R of the QR decomposition ``W_O[h]ᵀ = Q R``.

    ``‖z W_O[h]‖ = ‖z Rᵀ‖``, with d_head numbers in place of d_model. The Gram form
    ``z (W_O W_Oᵀ) zᵀ`` squares the condition number: in float32 it loses up to 19 % of a small
    update. The decomposition costs about as much as ten tokens in a forward pass.
    """
    return torch.linalg.qr(w_o.mT.to(working_dtype(w_o)), mode="r").R


def update_norm(z: Z, factor: Factor) -> PerToken:
    """``‖Δ‖`` of each head's update ``Δ = z W_O[h]``, from :func:`output_factor`."""
    by_head = rearrange(z, "batch pos head d_head -> batch head pos d_head")
    return (by_head @ factor.mT).norm(dim=-1)


def update_product(z: Z, w_o: Weights, direction: Stream) -> PerToken:
    """``⟨direction, Δ⟩ = z · (W_O[h] direction)`` of each head's update; no [pos, head, d_model] is
    built.
    """
    read = direction @ rearrange(w_o, "head d_head d_model -> d_model (head d_head)")
    read_by_head = read.unflatten(-1, (len(w_o), -1))
    return torch.linalg.vecdot(read_by_head, z).mT


def orientation(
    product: Float[Tensor, "*batch pos"],
    size: Float[Tensor, "*batch pos"],
    stream: Float[Tensor, "*#batch pos"],
) -> Float[Tensor, "*batch pos"]:
    """``cos = ⟨resid, Δ⟩ / (‖resid‖ ‖Δ‖)``, within −1 and 1; NaN for an update of 0."""
    return (product / (size * stream)).clamp(-1, 1)


def counts_in_bins(
    value: PerPart, edges: BinEdges, counted: Marked
) -> Float[Tensor, "batch part bin"]:
    """The number of counted tokens below the first edge, between each two edges, and at or above
    the last.

    Bin i holds ``edges[i − 1] ≤ value < edges[i]``. Counts of several prompts can be added.

    Args:
        value: A value of each part and token; NaN is not counted.
        edges: Edges in ascending order.
        counted: The tokens that count.

    Returns:
        Counts, one more than there are edges.
    """
    bins = _bins(value, edges)
    weight = (counted[:, None] & ~value.isnan()).to(value.dtype)
    counts = value.new_zeros((*value.shape[:-1], len(edges) + 1))
    return counts.scatter_add_(-1, bins, weight.expand(value.shape))


def counts_in_pairs_of_bins(
    first: PerPart,
    second: PerPart,
    first_edges: BinEdges,
    second_edges: Float[Tensor, " edge2"],
    counted: Marked,
) -> Float[Tensor, "batch bin bin2"]:
    """The number of counted tokens in each pair of bins of two values, over all parts together.

    Args:
        first: A value of each part and token; NaN is not counted.
        second: Another, likewise.
        first_edges: The edges of the first value's bins, as in :func:`counts_in_bins`.
        second_edges: Those of the second value's bins.
        counted: The tokens that count.

    Returns:
        Counts; those of several prompts can be added.
    """
    second_bins = len(second_edges) + 1
    pair = _bins(first, first_edges) * second_bins + _bins(second, second_edges)
    is_counted = counted[:, None] & ~first.isnan() & ~second.isnan()
    counts = first.new_zeros((len(first), (len(first_edges) + 1) * second_bins))
    counts.scatter_add_(1, pair.flatten(1), is_counted.to(first.dtype).flatten(1))
    return rearrange(counts, "batch (bin bin2) -> batch bin bin2", bin2=second_bins)


def _bins(value: PerPart, edges: Float[Tensor, " any_edge"]) -> Int[Tensor, "batch part pos"]:
    """The bin of each value, whatever it is where the value is unknown."""
    return torch.bucketize(value.nan_to_num().contiguous(), edges, right=True)


@dataclass(frozen=True, eq=False)
class Split:
    """The exact decomposition of each head's output [batch head query d_head] under inserted
    tokens.

    ``output = scale · before + shift + rerouting + new_values``
    """

    output: Outputs  # the output with the inserted tokens, before W_O
    before: Outputs  # the output of the same query without them
    # What is left to the original keys: λ in arXiv:2510.01032, ``1 − Σ_{m inserted} A'[q, m]``
    scale: PerQuery
    shift: Outputs  # Σσ there, ``Σ_{m inserted} A'[q, m] v'[m]``
    # ``Σ_{k original} (A'[q, k] − λ A[q, k]) v[k]``: attention among the original keys has changed
    rerouting: Outputs
    # ``Σ_{k original} A'[q, k] (v'[k] − v[k])``: the values of the original tokens have changed
    new_values: Outputs

    @property
    def dilution(self) -> Outputs:
        """``(λ − 1) · before``: the part of the change due to dilution."""
        return (self.scale - 1).unsqueeze(-1) * self.before

    @property
    def change(self) -> Outputs:
        """``output − before``."""
        return self.output - self.before


def split(
    pattern: Pattern,
    v: Float[Tensor, "batch kv_head key d_head"],
    inserted: Bool[Tensor, "batch key"],
    aligned: Aligned,
    v_aligned: OriginalValues,
    baseline: Aligned,
    v_baseline: OriginalValues,
) -> Split:
    """Split each query's output into four parts, from the same query with and without inserted
    tokens.

    Args:
        pattern: Attention with the inserted tokens.
        v: Values with the inserted tokens.
        inserted: Which keys are inserted.
        aligned: The columns of ``pattern`` that belong to original keys, in the baseline's order.
        v_aligned: The values of these keys.
        baseline: Attention of the same queries without the inserted tokens.
        v_baseline: Values without the inserted tokens.

    Returns:
        Output, its four parts, and the output before.
    """
    to_inserted = pattern * inserted[:, None, None].to(pattern.dtype)
    scale = 1 - to_inserted.sum(-1)
    # 1 minus a sum near 1 has lost its digits.
    scale = torch.where(scale < 1e-3, aligned.sum(-1), scale)
    return Split(
        output=mix(pattern, v),
        before=mix(baseline, v_baseline),
        scale=scale,
        shift=mix(to_inserted, v),
        rerouting=mix(aligned - scale.unsqueeze(-1) * baseline, v_baseline),
        new_values=mix(aligned, v_aligned - v_baseline),
    )


def total_variation(aligned: Aligned, baseline: Aligned, scale: PerQuery) -> PerQuery:
    """``½ Σ_k |A'[q, k] / λ − A[q, k]|`` over the original keys: 0 if attention among them is only
    diluted.

    Args:
        aligned: Attention to the original keys, with inserted tokens.
        baseline: Attention to the same keys, without them.
        scale: What is left to the original keys, λ.

    Returns:
        A distance from 0 to 1 for each query.
    """
    return (aligned / scale.unsqueeze(-1) - baseline).abs().sum(-1) / 2


def question_ratio(
    aligned: Aligned, baseline: Aligned, question: Bool[Tensor, "batch original"]
) -> PerQuery:
    """``ρ_Q[q] = Σ_{k in question} A'[q, k] / Σ_{k in question} A[q, k]``; NaN where the baseline
    has none there.

    In layer 0 with RoPE or ALiBi and full attention every question key has this ratio. It may
    exceed 1.
    """
    member = question[:, None, None].to(aligned.dtype)
    return (aligned * member).sum(-1) / (baseline * member).sum(-1)


def spectrum(gram: Float[Tensor, "*batch d_head d_head"]) -> Energies:
    """Squared singular values of a matrix from its Gram matrix, largest first."""
    return torch.linalg.eigvalsh(gram).clamp(min=0).flip(-1)


def rank_one_share(energies: Energies) -> PerMatrix:
    """``s₁² / Σ s²``: 1 for a matrix of rank 1; NaN for a zero matrix, which has no rank."""
    return energies[..., 0] / energies.sum(-1)


def effective_rank(energies: Energies) -> PerMatrix:
    """``exp(−Σ p log p)`` with ``p = s / Σ s``; NaN for a zero matrix. Source: Roy and Vetterli,
    EUSIPCO 2007.
    """
    singular_values = energies.sqrt()
    shares = singular_values / singular_values.sum(-1, keepdim=True)
    return torch.special.entr(shares).sum(-1).exp()
