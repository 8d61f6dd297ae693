"""What attention and the MLP of each layer add to the residual stream."""

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
    calibrated_field,
    means_by_segment,
    means_of,
    of_each,
    of_each_query,
)
from mechattn.errors import ModelError
from mechattn.functional.attention import Marked, Stream
from mechattn.functional.head_outputs import orientation
from mechattn.model.hooked import HookedModel
from mechattn.prompts.token_sequences import Batch

_STREAM_HOOKS = ("hook_resid_pre", "hook_resid_post")
_MIDDLE_HOOK = "hook_resid_mid"
_OUTPUT_HOOKS = ("hook_attn_out", "hook_mlp_out")
# The error, relative to the update, up to which a hook counts as holding it. Half precision rounds
# less, and an output that contains the residual stream is off by that stream.
_LARGEST_ERROR = 0.05
_DIMS = ("block", "segment")
_DIRECTIONS = {
    "block_magnitude": Quantity(
        _DIMS,
        "ratio",
        "|update| / |residual stream before it|, of attention or MLP",
        title="magnitude of the updates by attention and MLP",
    ),
    "block_orientation": Quantity(
        _DIMS,
        "cosine",
        "cosine of the update and the residual stream before it, of attention or MLP",
        compared="difference",
    ),
}
_NORMS = {
    "block_norm": Quantity(_DIMS, "residual norm", "|update by attention or MLP|"),
    "stream_norm": Quantity(_DIMS, "residual norm", "|residual stream before the update|"),
}


@dataclass(frozen=True)
class BlockUpdates(AnalysisBase):
    """Measure the magnitude and orientation of what attention and the MLP of each layer add to the
    residual stream.

    ``Δ = resid_mid − resid_pre`` for attention and ``Δ = resid_post − resid_mid`` for the MLP,
    including a norm that follows either. If both run in parallel, Δ is attn_out and mlp_out, and
    both are compared with resid_pre. A factor of the outputs (Granite's residual multiplier) is
    part of Δ. The dimension "block" has the labels "attention" and "mlp". Values are means over the
    tokens of each segment.

    Args:
        per_query: Also keep the magnitude and orientation at each query (token), as ``…_at``.
    """

    name = "block_updates"
    per_query: bool = False
    sequential: bool = calibrated_field(default=True)  # whether the MLP reads what attention wrote
    # The hooks of attn_out and mlp_out, and the factor by which the block multiplies both.
    output_hooks: tuple[str, str] = calibrated_field(default=_OUTPUT_HOOKS)
    factor: float = calibrated_field(default=1.0)

    @property
    def coords(self) -> Coords:
        """The two updates of a layer."""
        return {"block": ["attention", "mlp"]}

    @property
    def quantities(self) -> Quantities:
        """Means over the tokens of each segment; each token's own values with ``per_query``."""
        quantities = means_of(_DIRECTIONS | _NORMS, "tokens")
        if self.per_query:
            quantities |= of_each(_DIRECTIONS, "token")
        return quantities

    @property
    def captures(self) -> Sequence[str]:
        """The residual stream of the layer, and the outputs of attention and MLP."""
        captures = [*_STREAM_HOOKS, *self.output_hooks]
        if self.sequential:
            captures.append(_MIDDLE_HOOK)
        return captures

    def calibrated(self, model: HookedModel, layers: Layers, prompts: Prompts) -> Analysis:
        """Find out whether attention and MLP run in parallel, and which hooks give their outputs.

        Raises:
            ModelError: A layer lacks a hook of the residual stream, of attn_out or of mlp_out.
        """
        hooks = model.hook_dict
        sequential = all(f"blocks.{layer}.{_MIDDLE_HOOK}" in hooks for layer in layers)
        factor = getattr(model.blocks[layers[0]], "residual_contribution_scale", None)
        if factor is None:
            factor = 1.0
            output_hooks = _OUTPUT_HOOKS
        else:
            # TransformerLens's ScaledResidualBlockBridge calls hook_attn_out and hook_mlp_out only
            # if a function was added with ``add_hook``, and not for the torch hooks of the engine.
            output_hooks = ("attn.hook_out", "mlp.hook_out")

        for layer in layers:
            for name in (*_STREAM_HOOKS, *output_hooks):
                if f"blocks.{layer}.{name}" not in hooks:
                    raise ModelError(
                        f"layer {layer} of {model.cfg.model_name} has no {name}, so the updates by"
                        " its attention and MLP cannot be separated"
                    )
        return replace(self, sequential=sequential, output_hooks=output_hooks, factor=factor)

    def add_captures(self, sums: Sums, captures: Captures) -> None:
        """Norms and products for each token."""
        tensors = {name: tensor.float() for name, tensor in captures.tensors.items()}
        resid_pre = tensors["hook_resid_pre"]
        attention_hook, mlp_hook = self.output_hooks
        attention_update = tensors[attention_hook] * self.factor
        mlp_update = tensors[mlp_hook] * self.factor
        mlp_input = resid_pre
        if self.sequential:
            mlp_input = tensors[_MIDDLE_HOOK]
            real = captures.batch.real
            precision = torch.finfo(captures.tensors["hook_resid_post"].dtype).eps
            attention_update = _update(
                stream=resid_pre,
                output=attention_update,
                next_stream=mlp_input,
                real=real,
                precision=precision,
            )
            mlp_update = _update(
                stream=mlp_input,
                output=mlp_update,
                next_stream=tensors["hook_resid_post"],
                real=real,
                precision=precision,
            )

        streams = torch.stack([resid_pre, mlp_input], 1)
        updates = torch.stack([attention_update, mlp_update], 1)
        sums["stream_norm"] = streams.norm(dim=-1)
        sums["update_norm"] = updates.norm(dim=-1)
        sums["product"] = torch.linalg.vecdot(streams, updates)

    def values(self, sums: Sums, batch: Batch, window: Window) -> Values:
        """Means over segments."""
        stream_norm = sums["stream_norm"]
        update_norm = sums["update_norm"]
        per_token = {
            "block_magnitude": update_norm / stream_norm,
            "block_orientation": orientation(sums["product"], update_norm, stream_norm),
            "block_norm": update_norm,
            "stream_norm": stream_norm,
        }

        values = means_by_segment(per_token, batch)
        if self.per_query:
            values |= of_each_query(per_token, _DIRECTIONS, batch)
        return values


def _update(
    stream: Stream, output: Stream, next_stream: Stream, real: Marked, precision: float
) -> Stream:
    """What attention or MLP adds to the residual stream.

    This is the output at its hook if that agrees with the change of the stream at more than half of
    the tokens of a sequence, since a difference of large numbers loses digits. Otherwise it is that
    difference: the hook of BLOOM already holds the sum with the residual stream.

    Args:
        stream: The residual stream before the update.
        output: What the hook of attn_out or mlp_out holds.
        next_stream: The residual stream after the update.
        real: The tokens that are not padding.
        precision: The relative rounding error of the model's dtype.
    """
    difference = next_stream - stream
    error = (difference - output).norm(dim=-1)
    rounding = precision * next_stream.norm(dim=-1)
    is_update = error < _LARGEST_ERROR * difference.norm(dim=-1) + rounding

    # One decision for all tokens of a sequence, since a massive activation at one token says little
    # about the others; not one for the batch, since other prompts must have no effect.
    update_count = (is_update & real).sum(-1)
    holds_update = 2 * update_count > real.sum(-1)
    return torch.where(holds_update[:, None, None], output, difference)
