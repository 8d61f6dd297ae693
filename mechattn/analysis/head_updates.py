"""What each head adds to the residual stream: its relative size, and its components along and across the stream."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from mechattn.analysis.analysis import Analysis, AnalysisBase, AttentionRows, Captures, Quantity, Sums
from mechattn.errors import ModelError
from mechattn.functional import updates as fn
from mechattn.functional.focus import top_two
from mechattn.functional.grouped_heads import for_each_head
from mechattn.functional.received import segment_mean
from mechattn.model.hooked import HookedModel
from mechattn.model.weights import output_weights, wide
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.sequences import Batch

Weights = Mapping[int, tuple[Tensor, Tensor]]  # of each layer, W_O [head d_head d_model] and its factor

_HOOKS = ("hook_resid_pre", "attn.hook_z")
_MAGNITUDES = tuple(round(10 ** (i / 4 - 4), 6) for i in range(25))  # 0.0001 to 100, four bins a decade
_ORIENTATIONS = tuple(round(i / 20 - 1, 2) for i in range(41))
_UNITS = {
    "magnitude": ("ratio", "|update| / |resid_pre|"),
    "orientation": ("cosine", "cosine of update and resid_pre"),
    "parallel": ("ratio", "part of the update along resid_pre, signed, / |resid_pre|"),
    "orthogonal": ("ratio", "|part of the update across resid_pre| / |resid_pre|"),
    "update_norm": ("residual norm", "|update|"),
}
_SIGNED = ("orientation", "parallel")


@dataclass(frozen=True)
class HeadUpdates(AnalysisBase):
    """Measure the magnitude and orientation of each head's update of the residual stream (R. Claus, figures 7 to 10).

    ``Δ[q, h] = z[q, h] W_O[h]``; ``magnitude = ‖Δ‖ / ‖resid_pre‖``; ``orientation = cos(resid_pre, Δ)``. The updates of
    all heads of a layer and b_O add up to the attention output (before the norm that follows it in Gemma 2 and 3 and
    OLMo 2). Gives means over the tokens of each segment, and counts of the original tokens in fixed bins, which can be
    added over prompts.

    Args:
        per_query: Also keep the magnitude and orientation of each token, as ``…_at``.
    """

    per_query: bool = False
    weights: Any = field(default=None, repr=False, compare=False)  # Weights

    name = "head_updates"

    @property
    def coords(self) -> Mapping[str, Seq[object]]:
        """Labels of the bins: their lower edges."""
        return _bins()

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """Quantities of a head's whole update."""
        return _quantities("", self.per_query)

    @property
    def captures(self) -> Seq[str]:
        """The residual stream before the block, and each head's output before W_O."""
        return _HOOKS

    def calibrated(self, model: HookedModel, layers: Seq[int], measured: Seq[Prompt]) -> Analysis:
        """Prepare W_O of the layers and its factors."""
        return replace(self, weights=_weights(model, layers))

    def start(self, batch: Batch, heads: int) -> Sums:
        """Empty sums."""
        return {}

    def add_captures(self, sums: Sums, captures: Captures) -> None:
        """Norms and products for each token."""
        weights = (self.weights or {})[captures.layer]
        sums |= _measured(captures.by_head("attn.hook_z", len(weights[0])), captures.tensors["hook_resid_pre"], weights)

    def values(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """Means over segments, and counts."""
        return _values(sums, batch, "", self.per_query)


@dataclass(frozen=True)
class TopTargetUpdates(AnalysisBase):
    """Measure the part of each head's update that comes from its strongest target, as :class:`HeadUpdates` does.

    ``Δ[q, h] = A[q, k] v[k] W_O[h]``, k = argmax A[q]: the reading of the published figures 7 to 9. Interventions on z
    (an ablated head) act later and have no effect on it.

    Args:
        per_query: Also keep the magnitude and orientation of each token, as ``…_at``.
    """

    per_query: bool = False
    weights: Any = field(default=None, repr=False, compare=False)

    name = "top_target_updates"

    @property
    def coords(self) -> Mapping[str, Seq[object]]:
        """Labels of the bins: their lower edges."""
        return _bins()

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """Quantities of the part of a head's update that comes from its strongest target."""
        return _quantities("top_target_", self.per_query)

    @property
    def captures(self) -> Seq[str]:
        """The residual stream before the block, and each head's output before W_O, which arrives after its rows."""
        return _HOOKS

    def calibrated(self, model: HookedModel, layers: Seq[int], measured: Seq[Prompt]) -> Analysis:
        """Prepare W_O of the layers and its factors."""
        return replace(self, weights=_weights(model, layers))

    def start(self, batch: Batch, heads: int) -> Sums:
        """Empty sums."""
        return {}

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """Store what each query reads from its strongest target."""
        if rows.v is None:
            raise ModelError(
                f"layer {rows.layer} has no hook_v per head, so a target's contribution cannot be measured"
            )
        first, _, at = top_two(rows.pattern)
        v = for_each_head(rows.v[:, :, rows.keys], rows.pattern.shape[1]).to(first.dtype)
        read = v.gather(2, at[..., None].expand(*at.shape, v.shape[-1])) * first[..., None]
        if "read" not in sums:
            sums["read"] = read.new_zeros((len(read), rows.batch.tokens.shape[1], *read.shape[1::2]))
        sums["read"][:, rows.queries] = rearrange(read, "batch head query d_head -> batch query head d_head")

    def add_captures(self, sums: Sums, captures: Captures) -> None:
        """Norms and products for each token."""
        sums |= _measured(sums.pop("read"), captures.tensors["hook_resid_pre"], (self.weights or {})[captures.layer])

    def values(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """Means over segments, and counts."""
        return _values(sums, batch, "top_target_", self.per_query)


def _weights(model: HookedModel, layers: Seq[int]) -> Weights:
    made = {layer: output_weights(model, layer) for layer in layers}
    return {layer: (w_o, fn.output_factor(wide(w_o))) for layer, w_o in made.items()}


def _bins() -> Mapping[str, Seq[object]]:
    below = float("-inf")
    return {"magnitude_bin": [0.0, *_MAGNITUDES], "orientation_bin": [below, *_ORIENTATIONS]}


def _quantities(prefix: str, per_query: bool) -> Mapping[str, Quantity]:
    mean, counts, no_null = (
        ", mean over the tokens of the segment",
        "original tokens with a",
        "it depends on the values",
    )
    made = {
        f"{prefix}{name}": Quantity(
            ("head", "segment"), units, about + mean, "difference" if name in _SIGNED else "ratio", no_null
        )
        for name, (units, about) in _UNITS.items()
    }
    made |= {
        f"{prefix}{name}": Quantity(dims, "tokens", f"{counts}{about}", no_null=no_null)
        for name, dims, about in (
            ("magnitude_counts", ("head", "magnitude_bin"), " magnitude in the bin"),
            ("orientation_counts", ("head", "orientation_bin"), "n orientation in the bin"),
            (
                "joint_counts",
                ("magnitude_bin", "orientation_bin"),
                " magnitude and orientation in the bins, all heads",
            ),
        )
    }
    if per_query:
        for name in ("magnitude", "orientation"):
            units, about = _UNITS[name]
            made[f"{prefix}{name}_at"] = Quantity(("head", "key"), units, f"{about}, of each token", no_null=no_null)
    return made


def _measured(
    z: Float[Tensor, "batch pos head d_head"],
    resid: Float[Tensor, "batch pos d_model"],
    weights: tuple[Float[Tensor, "head d_head d_model"], Float[Tensor, "head rank d_head"]],
) -> Sums:
    w_o, factor = wide(weights[0]), weights[1]
    stream = resid.to(w_o.dtype)
    z = z.to(w_o.dtype)
    return {
        "norm": fn.update_norm(z, factor),
        "product": fn.update_product(z, w_o, stream),
        "stream": stream.norm(dim=-1)[:, None],
    }


def _values(sums: Sums, batch: Batch, prefix: str, per_query: bool) -> dict[str, Tensor]:
    norm, stream = sums["norm"], sums["stream"]
    turned = fn.orientation(sums["product"], norm, stream)
    magnitude = norm / stream
    each = {
        "magnitude": magnitude,
        "orientation": turned,
        "parallel": sums["product"] / stream**2,
        "orthogonal": magnitude * (1 - turned.nan_to_num() ** 2).sqrt(),
        "update_norm": norm,
    }
    members, original = batch.members(), batch.origin >= 0
    edges = tuple(torch.tensor(e, device=norm.device, dtype=norm.dtype) for e in (_MAGNITUDES, _ORIENTATIONS))
    made = {f"{prefix}{name}": segment_mean(value, members) for name, value in each.items()}
    made |= {
        f"{prefix}magnitude_counts": fn.counts_in_bins(magnitude, edges[0], original),
        f"{prefix}orientation_counts": fn.counts_in_bins(turned, edges[1], original),
        f"{prefix}joint_counts": fn.counts_in_pairs_of_bins(magnitude, turned, (edges[0], edges[1]), original),
    }
    if per_query:
        hidden = ~batch.real[:, None]
        made |= {f"{prefix}{n}_at": each[n].masked_fill(hidden, torch.nan) for n in ("magnitude", "orientation")}
    return made
