"""What the attention block and the MLP of each layer add to the residual stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mechattn.analysis.analysis import (
    Analysis,
    AnalysisBase,
    Captures,
    Coords,
    Layers,
    Prompts,
    Quantities,
    Quantity,
    Sums,
    Values,
    Window,
    at_positions,
    calibrated_field,
    means_by_segment,
    means_of,
    of_each,
)
from mechattn.errors import ModelError
from mechattn.functional.attention import Marked, Stream
from mechattn.functional.head_outputs import orientation
from mechattn.model.hooked import HookedModel
from mechattn.prompts.token_sequences import Batch

_STREAM_HOOKS = ("hook_resid_pre", "hook_resid_post")
_MIDDLE_HOOK = "hook_resid_mid"
_OUTPUT_HOOKS = ("hook_attn_out", "hook_mlp_out")
_DIMS = ("block", "segment")
_DIRECTIONS = {
    "block_magnitude": Quantity(
        _DIMS,
        "ratio",
        "|update of the block| / |residual stream before it|",
        title="magnitude of the block's update",
    ),
    "block_orientation": Quantity(
        _DIMS,
        "cosine",
        "cosine of the block's update and the residual stream before it",
        "difference",
    ),
}
_NORMS = {
    "block_norm": Quantity(_DIMS, "residual norm", "|update of the block|"),
    "stream_norm": Quantity(_DIMS, "residual norm", "|residual stream before the block|"),
}


@dataclass(frozen=True)
class BlockUpdates(AnalysisBase):
    """Measure the magnitude and orientation of the updates by the attention block and the MLP of
    each layer.

    ``Δ = resid_mid − resid_pre`` and ``Δ = resid_post − resid_mid``, including any norm after the
    block. In a layer with parallel attention and MLP, both are compared with resid_pre. A
    multiplier of block outputs (Granite's residual multiplier) is part of Δ. Means over the tokens
    of each segment.

    Args:
        per_query: Also keep the magnitude and orientation of each token, as ``…_at``.
    """

    name = "block_updates"
    per_query: bool = False
    sequential: bool = calibrated_field(default=True)  # whether the MLP reads what attention wrote
    # The hooks of the blocks' outputs, and what multiplies what they hold.
    output_hooks: tuple[str, str] = calibrated_field(default=_OUTPUT_HOOKS)
    factor: float = calibrated_field(default=1.0)

    @property
    def coords(self) -> Coords:
        """The two blocks of a layer."""
        return {"block": ["attention", "mlp"]}

    @property
    def quantities(self) -> Quantities:
        """Quantities of each block."""
        quantities = means_of(_DIRECTIONS | _NORMS, "tokens")
        if self.per_query:
            quantities |= of_each(_DIRECTIONS, "token")
        return quantities

    @property
    def captures(self) -> Sequence[str]:
        """The residual stream around both blocks, and the output of each."""
        captures = [*_STREAM_HOOKS, *self.output_hooks]
        if self.sequential:
            captures.append(_MIDDLE_HOOK)
        return captures

    def calibrated(self, model: HookedModel, layers: Layers, measured: Prompts) -> Analysis:
        """Find out whether attention and MLP run in parallel, and which hooks give their outputs.

        Raises:
            ModelError: A layer has no hooks that give the outputs of its blocks.
        """
        hooks = model.hook_dict
        sequential = all(f"blocks.{layer}.{_MIDDLE_HOOK}" in hooks for layer in layers)
        factor = getattr(model.blocks[layers[0]], "residual_contribution_scale", None)
        if factor is None:
            factor = 1.0
            output_hooks = _OUTPUT_HOOKS
        else:
            # Such a block fires hook_attn_out only for functions that TransformerLens has added.
            output_hooks = ("attn.hook_out", "mlp.hook_out")

        for layer in layers:
            for name in (*_STREAM_HOOKS, *output_hooks):
                if f"blocks.{layer}.{name}" not in hooks:
                    raise ModelError(
                        f"layer {layer} of {model.cfg.model_name} has no {name}, so the outputs of"
                        " its blocks cannot be separated"
                    )
        return replace(self, sequential=sequential, output_hooks=output_hooks, factor=factor)

    def add_captures(self, sums: Sums, captures: Captures) -> None:
        """Norms and products for each token."""
        tensors = {name: tensor.float() for name, tensor in captures.tensors.items()}
        before = tensors["hook_resid_pre"]
        attention_hook, mlp_hook = self.output_hooks
        attention = tensors[attention_hook] * self.factor
        mlp = tensors[mlp_hook] * self.factor
        middle = before  # what a parallel MLP reads
        if self.sequential:
            middle = tensors[_MIDDLE_HOOK]
            real = captures.batch.real
            precision = torch.finfo(captures.tensors["hook_resid_post"].dtype).eps
            attention = _added(before, attention, middle, real, precision)
            mlp = _added(middle, mlp, tensors["hook_resid_post"], real, precision)

        streams = torch.stack([before, middle], 1)
        updates = torch.stack([attention, mlp], 1)
        sums["stream"] = streams.norm(dim=-1)
        sums["norm"] = updates.norm(dim=-1)
        sums["product"] = torch.linalg.vecdot(streams, updates)

    def values(self, sums: Sums, batch: Batch, window: Window) -> Values:
        """Means over segments."""
        stream = sums["stream"]
        norm = sums["norm"]
        per_token = {
            "block_magnitude": norm / stream,
            "block_orientation": orientation(sums["product"], norm, stream),
            "block_norm": norm,
            "stream_norm": stream,
        }

        values = means_by_segment(per_token, batch)
        if self.per_query:
            values |= at_positions(per_token, _DIRECTIONS, batch)
        return values


def _added(before: Stream, out: Stream, after: Stream, real: Marked, precision: float) -> Stream:
    """The block's output from its hook if that is the update at most tokens of a sequence (a
    difference of large numbers loses digits); otherwise (BLOOM adds the residual first) the
    difference."""
    change = after - before
    error = (change - out).norm(dim=-1)
    rounding = precision * after.norm(dim=-1)
    is_update = error < 0.05 * change.norm(dim=-1) + rounding

    # One decision for all tokens of a sequence, as a massive activation at one token says little of
    # the others; not for the batch, whose other prompts must have no effect.
    update_count = (is_update & real).sum(-1)
    holds_update = 2 * update_count > real.sum(-1)
    return torch.where(holds_update[:, None, None], out, change)
