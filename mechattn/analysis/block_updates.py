"""What the attention block and the MLP of each layer add to the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from mechattn.analysis.analysis import Analysis, AnalysisBase, Captures, Quantity, Sums
from mechattn.errors import ModelError
from mechattn.functional.received import segment_mean
from mechattn.functional.updates import orientation
from mechattn.model.hooked import HookedModel
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.sequences import Batch

BLOCKS = ("attention", "mlp")
_AROUND, _MIDDLE = ("hook_resid_pre", "hook_resid_post"), "hook_resid_mid"
_OUTS = ("hook_attn_out", "hook_mlp_out")
_BEFORE_SCALING = ("attn.hook_out", "mlp.hook_out")
_UNITS = {
    "block_magnitude": ("ratio", "|update of the block| / |residual stream before it|"),
    "block_orientation": ("cosine", "cosine of the block's update and the residual stream before it"),
    "block_norm": ("residual norm", "|update of the block|"),
    "stream_norm": ("residual norm", "|residual stream before the block|"),
}


@dataclass(frozen=True)
class BlockUpdates(AnalysisBase):
    """Measure the magnitude and orientation of the updates by the attention block and the MLP of each layer.

    ``Δ = resid_mid − resid_pre`` and ``Δ = resid_post − resid_mid``, including any norm after the block. In a layer
    with parallel attention and MLP, both are compared with resid_pre. A multiplier of block outputs (Granite's residual
    multiplier) is part of Δ. Means over the tokens of each segment.

    Args:
        per_query: Also keep the magnitude and orientation of each token, as ``…_at``.
    """

    per_query: bool = False
    sequential: bool = True
    outs: tuple[str, str] = field(default=_OUTS, repr=False, compare=False)  # the hooks of the blocks' outputs
    factor: float = field(default=1.0, repr=False, compare=False)  # multiplies what these hooks hold

    name = "block_updates"

    @property
    def coords(self) -> Mapping[str, Seq[object]]:
        """The two blocks of a layer."""
        return {"block": list(BLOCKS)}

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """Quantities of each block."""
        mean = ", mean over the tokens of the segment"
        made = {
            name: Quantity(("block", "segment"), u, d + mean, "difference" if u == "cosine" else "ratio")
            for name, (u, d) in _UNITS.items()
        }
        if self.per_query:
            for name in ("block_magnitude", "block_orientation"):
                units, about = _UNITS[name]
                made[f"{name}_at"] = Quantity(("block", "key"), units, f"{about}, of each token")
        return made

    @property
    def captures(self) -> Seq[str]:
        """The residual stream around both blocks, and the output of each."""
        return (*_AROUND, *([_MIDDLE] if self.sequential else []), *self.outs)

    def calibrated(self, model: HookedModel, layers: Seq[int], measured: Seq[Prompt]) -> Analysis:
        """Find out whether attention and MLP run in parallel, and which hooks give their outputs.

        Raises:
            ModelError: A layer has no hooks that give the outputs of its blocks.
        """
        named = model.hook_dict
        sequential = all(f"blocks.{layer}.{_MIDDLE}" in named for layer in layers)
        # A block that scales its update fires hook_attn_out only for functions that TransformerLens has added.
        factor = getattr(model.blocks[layers[0]], "residual_contribution_scale", None)
        outs = _OUTS if factor is None else _BEFORE_SCALING
        for layer in layers:
            if lacking := [name for name in (*_AROUND, *outs) if f"blocks.{layer}.{name}" not in named]:
                raise ModelError(
                    f"layer {layer} of {model.cfg.model_name} has no {lacking[0]}, so the outputs of its blocks "
                    f"cannot be separated"
                )
        return replace(self, sequential=sequential, outs=outs, factor=1.0 if factor is None else factor)

    def start(self, batch: Batch, heads: int) -> Sums:
        """Empty sums."""
        return {}

    def add_captures(self, sums: Sums, captures: Captures) -> None:
        """Norms and products for each token."""
        before, after = (captures.tensors[name].float() for name in _AROUND)
        attention, mlp = (captures.tensors[name].float() * self.factor for name in self.outs)
        if self.sequential:
            middle = captures.tensors[_MIDDLE].float()
            pairs = [(before, _added(before, attention, middle)), (middle, _added(middle, mlp, after))]
        else:
            pairs = [(before, attention), (before, mlp)]
        sums["stream"] = torch.stack([stream.norm(dim=-1) for stream, _ in pairs], 1)
        sums["norm"] = torch.stack([added.norm(dim=-1) for _, added in pairs], 1)
        sums["product"] = torch.stack([torch.linalg.vecdot(stream, added) for stream, added in pairs], 1)

    def values(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """Means over segments."""
        each = {
            "block_magnitude": sums["norm"] / sums["stream"],
            "block_orientation": orientation(sums["product"], sums["norm"], sums["stream"]),
            "block_norm": sums["norm"],
            "stream_norm": sums["stream"],
        }
        made = {name: segment_mean(value, batch.members()) for name, value in each.items()}
        if self.per_query:
            hidden = ~batch.real[:, None]
            made |= {
                f"{n}_at": each[n].masked_fill(hidden, torch.nan) for n in ("block_magnitude", "block_orientation")
            }
        return made


def _added(
    before: Float[Tensor, "batch pos d_model"],
    out: Float[Tensor, "batch pos d_model"],
    after: Float[Tensor, "batch pos d_model"],
) -> Float[Tensor, "batch pos d_model"]:
    """The block's output from its hook where that is the update (a difference of large numbers loses digits);
    otherwise (BLOOM adds the residual first) the difference."""
    change = after - before
    return torch.where((change - out).norm() < 0.05 * change.norm(), out, change)
