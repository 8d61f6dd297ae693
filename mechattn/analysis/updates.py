"""What each head adds to the residual stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from mechattn.analysis.analysis import (
    DEPENDS_ON_VALUES,
    HEAD_AND_SEGMENT,
    Analysis,
    AnalysisBase,
    AttentionRows,
    Captures,
    Coords,
    Layers,
    Prompts,
    Quantities,
    Quantity,
    Sums,
    Values,
    Window,
    calibrated_field,
    means_by_segment,
    means_of,
    of_each,
    of_each_query,
)
from mechattn.analysis.direct_logits import NORM_INPUT, norms_after
from mechattn.functional import head_outputs as fn
from mechattn.functional.attention import for_each_head, in_working_dtype
from mechattn.functional.focus import top_two
from mechattn.model.head_parts import output_weights
from mechattn.model.hooked import HookedModel
from mechattn.model.unembedding import FrozenNorm
from mechattn.prompts.token_sequences import Batch

# The edges of the bins: four per decade from 0.0001 to 100, and steps of 0.05 from −1 to 1.
_MAGNITUDE_EDGES = tuple(round(10 ** (i / 4 - 4), 6) for i in range(25))
_ORIENTATION_EDGES = tuple(round(i / 20 - 1, 2) for i in range(41))
BEFORE_NORM = "_before_norm"  # suffix of quantities of updates before a norm that follows attention
_AFTER_NORM_WORDS = ", after the norm that follows attention (its scale is shared by the heads)"
_BEFORE_NORM_WORDS = (
    ", before the norm that follows attention, so not what reaches the residual stream"
)
_DIRECTIONS = {
    "magnitude": Quantity(HEAD_AND_SEGMENT, "ratio", "|update| / |resid_pre|"),
    # May be 0, so conditions are compared by their difference.
    "orientation": Quantity(
        HEAD_AND_SEGMENT, "cosine", "cosine of update and resid_pre", compared="difference"
    ),
}
_COMPONENTS = {
    "parallel": Quantity(
        HEAD_AND_SEGMENT,
        "ratio",
        "part of the update along resid_pre, signed, / |resid_pre|",
        compared="difference",
    ),
    "orthogonal": Quantity(
        HEAD_AND_SEGMENT, "ratio", "|part of the update across resid_pre| / |resid_pre|"
    ),
    "update_norm": Quantity(HEAD_AND_SEGMENT, "residual norm", "|update|"),
}
_COUNTS = {
    "magnitude_counts": Quantity(
        ("head", "magnitude_bin"), "tokens", "original tokens with a magnitude in the bin"
    ),
    "orientation_counts": Quantity(
        ("head", "orientation_bin"), "tokens", "original tokens with an orientation in the bin"
    ),
    "joint_counts": Quantity(
        ("magnitude_bin", "orientation_bin"),
        "tokens",
        "original tokens with a magnitude and orientation in the bins, all heads",
    ),
}


@dataclass(frozen=True)
class _Updates(AnalysisBase):
    """Base class of :class:`HeadUpdates` and :class:`TopTargetUpdates`."""

    per_query: bool = False
    weights: Mapping[int, _LayerWeights] = calibrated_field(default_factory=dict)  # by layer

    name: ClassVar[str]
    prefix: ClassVar[str] = ""

    @property
    def coords(self) -> Coords:
        """The labels of the bins, which are their lower edges."""
        return {
            "magnitude_bin": [0.0, *_MAGNITUDE_EDGES],
            "orientation_bin": [float("-inf"), *_ORIENTATION_EDGES],
        }

    @property
    def _has_norm(self) -> bool:
        """Whether a norm follows attention; False until ``calibrated`` has inspected the model."""
        return any(layer.norm is not None for layer in self.weights.values())

    @property
    def quantities(self) -> Quantities:
        """Means over the tokens of each segment, counts in bins, and with ``per_query`` the values
        of each token.

        In a model with a norm after attention, all of these describe updates after the norm, and
        the means are also given for what enters it.
        """
        means = means_of(_DIRECTIONS | _COMPONENTS, "tokens")
        updates = means | _COUNTS
        if self.per_query:
            updates |= of_each(_DIRECTIONS, "token")

        quantities = _with_words(updates, _AFTER_NORM_WORDS if self._has_norm else "")
        if self._has_norm:
            for name, quantity in _with_words(means, _BEFORE_NORM_WORDS).items():
                quantities[name + BEFORE_NORM] = quantity
        return {self.prefix + name: quantity for name, quantity in quantities.items()}

    @property
    def captures(self) -> Sequence[str]:
        """The residual stream before the layer, each head's output before W_O, and the input of a
        norm after attention."""
        hooks = ["hook_resid_pre", "attn.hook_z"]
        if self._has_norm:
            hooks.append(NORM_INPUT)
        return hooks

    def calibrated(self, model: HookedModel, layers: Layers, prompts: Prompts) -> Analysis:
        """Prepare W_O of the layers, its factors and the norms after attention.

        Raises:
            ModelError: The model's heads have no separate updates, or a norm after attention has no
                known scale.
        """
        norms = norms_after(model, layers)
        weights = {}
        for layer in layers:
            w_o = output_weights(model, layer)
            norm = norms.get(layer)
            factor = fn.output_factor(w_o)
            factor_after = factor
            if norm is not None:
                factor_after = fn.output_factor(norm.of_part(in_working_dtype(w_o)))
            weights[layer] = _LayerWeights(w_o, factor, norm, factor_after)
        return replace(self, weights=weights)

    def sums_of(self, z: fn.Z, captures: Captures) -> Sums:
        """The norm of each head's update and its product with the residual stream, for each token.

        Args:
            z: Each head's output before W_O, or the part of it from one target.
            captures: The residual stream, and the input of a norm after attention.
        """
        layer_weights = self.weights[captures.layer]
        w_o = in_working_dtype(layer_weights.w_o)
        stream = captures.tensors["hook_resid_pre"].to(w_o.dtype)
        z = z.to(w_o.dtype)
        stream_norm = stream.norm(dim=-1)[:, None]
        update_norm = fn.update_norm(z, layer_weights.factor)
        product = fn.update_product(z, w_o, stream)
        norm = layer_weights.norm
        if norm is None:
            return {"stream_norm": stream_norm, "update_norm": update_norm, "product": product}

        # The heads share the scale of their summed output, so that their updates add up to what
        # attention adds to the residual stream.
        scale = norm.scale(captures.tensors[NORM_INPUT]).to(w_o.dtype)[:, None]
        stream_before_norm = norm.toward(stream)
        return {
            "stream_norm": stream_norm,
            "update_norm": fn.update_norm(z, layer_weights.factor_after) / scale,
            "product": fn.update_product(z, w_o, stream_before_norm) / scale,
            "update_norm" + BEFORE_NORM: update_norm,
            "product" + BEFORE_NORM: product,
        }

    def values(self, sums: Sums, batch: Batch, window: Window) -> Values:
        """Means over segments, and counts in bins."""
        stream_norm = sums["stream_norm"]
        per_token = _per_token(sums["update_norm"], sums["product"], stream_norm)
        if self._has_norm:
            update_norm = sums["update_norm" + BEFORE_NORM]
            token_values = _per_token(update_norm, sums["product" + BEFORE_NORM], stream_norm)
            for name, value in token_values.items():
                per_token[name + BEFORE_NORM] = value

        values = means_by_segment(per_token, batch)
        if self.per_query:
            values |= of_each_query(per_token, _DIRECTIONS, batch)

        magnitude = per_token["magnitude"]
        orientation = per_token["orientation"]
        magnitude_edges = _bin_edges(_MAGNITUDE_EDGES, magnitude.device, magnitude.dtype)
        orientation_edges = _bin_edges(_ORIENTATION_EDGES, magnitude.device, magnitude.dtype)
        original = batch.original
        values["magnitude_counts"] = fn.counts_in_bins(magnitude, magnitude_edges, original)
        values["orientation_counts"] = fn.counts_in_bins(orientation, orientation_edges, original)
        values["joint_counts"] = fn.counts_in_pairs_of_bins(
            magnitude, orientation, magnitude_edges, orientation_edges, original
        )
        return {self.prefix + name: value for name, value in values.items()}


@dataclass(frozen=True)
class HeadUpdates(_Updates):
    """Measure the magnitude and orientation of each head's update of the residual stream (R. Claus,
    figures 7 to 10).

    ``Δ[q, h] = z[q, h] W_O[h]``; ``magnitude = ‖Δ‖ / ‖resid_pre‖``; ``orientation = cos(resid_pre,
    Δ)``. If a norm follows attention (Gemma 2 and 3, OLMo 2, GLM-4), ``Δ[q, h] = γ · z[q, h] W_O[h]
    / σ[q]`` with the norm's weight γ and the scale σ of attention's whole output at that
    token. The updates of all heads of a layer, together with b_O taken through the same norm, add
    up to what attention adds to the residual stream. For such a model, the means of what enters the
    norm are given too, as ``…_before_norm``.

    Gives means over the tokens of each segment, and counts of the original tokens in fixed bins,
    which can be added over prompts.

    Args:
        per_query: Also keep the magnitude and orientation at each query (token), as ``…_at``.
    """

    name = "head_updates"

    def add_captures(self, sums: Sums, captures: Captures) -> None:
        """Store the norm and product of each head's update, for each token."""
        heads = len(self.weights[captures.layer].w_o)
        sums |= self.sums_of(captures.by_head("attn.hook_z", heads), captures)


@dataclass(frozen=True)
class TopTargetUpdates(_Updates):
    """Measure the part of each head's update that comes from its strongest target, as
    :class:`HeadUpdates` does.

    ``Δ[q, h] = A[q, k] v[k] W_O[h]`` with k = argmax A[q], as in the published figures 7 to 9. If a
    norm follows attention, Δ is taken through it with the scale of attention's whole output.
    Interventions on z, such as an ablated head, act later and have no effect on Δ before that norm.

    Args:
        per_query: Also keep the magnitude and orientation at each query (token), as ``…_at``.
    """

    name = "top_target_updates"
    prefix = "top_target_"

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """Store the contribution of each query's strongest target to z."""
        v = rows.values_for("a target's contribution")[:, :, rows.keys]
        largest, _, target = top_two(rows.pattern)
        v = for_each_head(v, rows.pattern.shape[1]).to(largest.dtype)

        channel_index = target[..., None].expand(*target.shape, v.shape[-1])
        z = v.gather(2, channel_index) * largest[..., None]

        if rows.is_first_block:  # ``start`` does not know d_head
            batch, heads, _, d_head = z.shape
            length = rows.batch.tokens.shape[1]
            sums["z"] = z.new_zeros(batch, length, heads, d_head)
        sums["z"][:, rows.queries] = rearrange(
            z, "batch head query d_head -> batch query head d_head"
        )

    def add_captures(self, sums: Sums, captures: Captures) -> None:
        """Store the norm and product of each update, for each token."""
        sums |= self.sums_of(sums.pop("z"), captures)


@dataclass(frozen=True, eq=False)
class _LayerWeights:
    """The weights that turn the z of a layer's heads into their updates."""

    w_o: fn.Weights  # in the model's dtype
    factor: fn.Factor  # of W_O
    norm: FrozenNorm | None  # the norm between attention and the residual stream
    factor_after: fn.Factor  # of W_O followed by γ of that norm; without a norm, that of W_O


def _with_words(quantities: Quantities, words: str) -> dict[str, Quantity]:
    """The quantities with these words after their descriptions, and without a null."""
    return {
        name: replace(quantity, description=quantity.description + words, no_null=DEPENDS_ON_VALUES)
        for name, quantity in quantities.items()
    }


def _per_token(
    update_norm: fn.PerPart, product: fn.PerPart, stream_norm: Float[Tensor, " batch #part pos"]
) -> Values:
    """The quantities of each token, from ``‖Δ‖``, ``⟨resid_pre, Δ⟩`` and ``‖resid_pre‖``."""
    orientation = fn.orientation(product, update_norm, stream_norm)
    magnitude = update_norm / stream_norm
    # An update of 0 has no orientation, but an orthogonal part of 0.
    orthogonal = magnitude * (1 - orientation.nan_to_num() ** 2).sqrt()
    return {
        "magnitude": magnitude,
        "orientation": orientation,
        "parallel": product / stream_norm**2,
        "orthogonal": orthogonal,
        "update_norm": update_norm,
    }


@lru_cache(maxsize=32)  # copied once, since a copy to a GPU waits for all of its earlier work
def _bin_edges(edges: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> fn.BinEdges:
    """The edges of bins as a tensor, which all layers share."""
    return torch.tensor(edges, device=device, dtype=dtype)
