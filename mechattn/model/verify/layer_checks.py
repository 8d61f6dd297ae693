"""Checks of each layer's hooks: the rows of the pattern, the values, the heads and the residual
stream.

z is pattern · v, but some models clip or norm the values, or gate or norm the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from mechattn.functional.attention import mix, visible_keys
from mechattn.model import head_parts, hooks
from mechattn.model.hooked import HookedModel, device_of, facts_of, weights_here
from mechattn.model.verify.verification import (
    ACTIVATION_TOLERANCE,
    ANOTHER_VERSION,
    Check,
    Pairs,
    as_limited,
    compare,
)

# The hooks at the input of a gate in attention, and the functions that gates have.
GATES = ("hook_q_gate", "hook_gate", "gate.hook_out")
GATE_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softplus": nn.functional.softplus,
}

# The largest allowed difference of a row's sum, in which every entry is rounded.
_ROW_TOLERANCE = {
    torch.float64: 1e-4,  # the softmax may be computed in float32
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}

# The hooks of a layer that the checks read.
READ_HOOKS = {
    "attn.hook_pattern",
    "attn.hook_v",
    "attn.hook_z",
    "attn.hook_out",
    *(f"attn.{gate}" for gate in GATES),
    "hook_resid_pre",
    "hook_resid_post",
    "hook_attn_out",
    "hook_mlp_out",
}

Mixed = Float[Tensor, "query head d_head"]


@dataclass(frozen=True, eq=False)
class ProbedHooks:
    """The values at the hooks during a pass over the probe, in float32 on the CPU."""

    model: HookedModel
    by_name: Mapping[str, Tensor]
    dtype: torch.dtype  # of the weights
    length: int  # of the probe, in tokens

    def of_layer(self, layer: int, name: str) -> Tensor | None:
        """The value at a hook of a layer, such as "attn.hook_z"; None if the hook did not fire."""
        return self.by_name.get(f"blocks.{layer}.{name}")

    def each_layer(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """The layers with attention in which a hook fired, and its value there."""
        for layer in hooks.attention_layers(self.model):
            value = self.of_layer(layer, name)
            if value is not None:
                yield layer, value


def checks_of_layers(probe: ProbedHooks) -> list[Check]:
    """Check the rows of the pattern, the values, the heads and the residual stream."""
    return [_rows(probe), _values(probe), _heads(probe), _residual(probe)]


def gate_of(model: HookedModel) -> Callable[[Tensor], Tensor] | None:
    """The function from the value at a gate's hook to the gate of the mixed values.

    It is the one that the last verification found. None if it found no gate, or was not made.
    """
    facts = facts_of(model)
    if facts is None or facts.report is None:
        return None
    gate = facts.report["values"].gate
    return None if gate is None else GATE_FUNCTIONS[gate]


def _rows(probe: ProbedHooks) -> Check:
    """Check that each query's attention to the keys that it can see sums to 1.

    In a layer with learned sinks, check that these keys get all attention that is not the sink's.
    """
    length = probe.length
    sum_words = "1"
    pairs: Pairs = {}
    windows_beyond_probe = []

    for layer, pattern in probe.each_layer("attn.hook_pattern"):
        window = hooks.attention_window(probe.model, layer)
        if window is not None and window >= length:
            windows_beyond_probe.append(window)

        visible = visible_keys(torch.arange(length), length, window)
        visible_mass = pattern[0].masked_fill(~visible, 0.0).sum(-1)
        expected = torch.ones_like(visible_mass)
        if hooks.sinks_of(probe.model, layer) is not None:
            sum_words = "at most 1 (learned sinks)"
            expected = pattern[0].sum(-1).clamp(0, 1)
        pairs[layer] = (visible_mass, expected)

    detail = f"the attention of each query to the keys that it can see sums to {sum_words}"
    if windows_beyond_probe:
        detail += (
            f" (the probe of {length} tokens does not reach the window of"
            f" {min(windows_beyond_probe)}; verify_model(length=…))"
        )

    tolerance = _ROW_TOLERANCE[probe.dtype]
    remedy = (
        "hook_pattern shows no probabilities, or has another mask than the model;"
        f" {ANOTHER_VERSION}"
    )
    return compare("rows", pairs, tolerance, detail, remedy, unit=1.0)


@torch.no_grad()
def _values(probe: ProbedHooks) -> Check:
    """Check that pattern · v is z, or becomes z by a known gate or norm ("limited")."""
    tolerance = ACTIVATION_TOLERANCE[probe.dtype]
    detail = "pattern · v against z"
    pairs: Pairs = {}
    steps = []

    for layer, pattern in probe.each_layer("attn.hook_pattern"):
        stored_v = probe.of_layer(layer, "attn.hook_v")
        stored_z = probe.of_layer(layer, "attn.hook_z")
        if stored_v is None or stored_z is None:
            reason = f"layer {layer} fires no hook_v or no hook_z"
            return Check("values", "limited", detail=f"{detail}: {reason}")

        v = _as_in_model(probe.model, layer, stored_v[:1])
        values = head_parts.mixed_values(probe.model, layer, v, pattern[:1])
        z = _by_head(probe.model, stored_z[:1])[0]
        mixed = None
        if values is not None:
            mixed = mix(pattern[:1], values.float().cpu())[0].transpose(0, 1)

        if mixed is None or mixed.shape != z.shape:
            shapes = f"pattern {list(pattern[0].shape)}, v {list(v[0].shape)}, z {list(z.shape)}"
            reason = f"layer {layer}: {shapes} do not fit together"
            return Check("values", "limited", detail=f"{detail}: {reason}")

        pairs[layer] = (mixed, z)
        layer_check = compare("values", {layer: pairs[layer]}, tolerance, detail)
        if layer_check.outcome == "passed":
            continue
        step = _step_to_z(probe, layer, mixed, z)
        if step is None:
            remedy = f"{_unusual_parts(probe.model, layer)}; {ANOTHER_VERSION}"
            return replace(layer_check, remedy=remedy)
        steps.append(step)

    check = compare("values", pairs, tolerance, detail)
    if not steps:
        return check
    # One function stands for the gates of all layers, so there is none if they differ.
    gates = {step.gate for step in steps}
    gate = gates.pop() if len(gates) == 1 else None
    return replace(as_limited(check, f"z is pattern · v {steps[0].words}"), gate=gate)


def _as_in_model(model: HookedModel, layer: int, values: Tensor) -> Tensor:
    """Values on the device and in the dtype of a layer's weights."""
    return values.to(device_of(model.blocks[layer]), next(model.parameters()).dtype)


@dataclass(frozen=True, eq=False)
class _Step:
    """A step between the mixed values and W_O."""

    words: str  # after "z is pattern · v"
    result: Mixed
    gate: str | None = None  # the name of the function of a gate; None for a norm


def _step_to_z(probe: ProbedHooks, layer: int, mixed: Mixed, z: Mixed) -> _Step | None:
    """The known step that turns the mixed values into z; None if none does."""
    tolerance = ACTIVATION_TOLERANCE[probe.dtype]
    for step in chain(_gates(probe, layer, mixed), _norms(probe.model, layer, mixed)):
        if compare("values", {layer: (step.result, z)}, tolerance, "").outcome == "passed":
            return step
    return None


def _gates(probe: ProbedHooks, layer: int, mixed: Mixed) -> Iterator[_Step]:
    """The mixed values times each function of each gate that has a hook in this layer."""
    # A gate has a number for each channel, or one for each head.
    sizes_of_gates = (mixed.numel(), mixed[..., 0].numel())
    for hook_name in GATES:
        gate = probe.of_layer(layer, f"attn.{hook_name}")
        if gate is None or gate[0].numel() not in sizes_of_gates:
            continue
        by_head = gate[0].reshape(*mixed.shape[:2], -1)
        for name, function in GATE_FUNCTIONS.items():
            words = f"times a gate of its query ({name}), so values reach W_O through the gate"
            yield _Step(words, mixed * function(by_head), name)


def _norms(model: HookedModel, layer: int, mixed: Mixed) -> Iterator[_Step]:
    """The mixed values after each norm over all heads in the attention module."""
    all_heads = rearrange(mixed, "query head d_head -> query (head d_head)")
    for name, norm in head_parts.norms_of_output(model, layer).items():
        normed = norm(_as_in_model(model, layer, all_heads)).float().cpu()
        words = f"after a norm over all heads ({name}), so a value gives no update of its own"
        yield _Step(words, normed.reshape(mixed.shape))


def _unusual_parts(model: HookedModel, layer: int) -> str:
    """The parts of a layer that may act between the pattern and z, as a sentence."""
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    module = head_parts.attention_module(model, layer)
    part_names = []
    if module is not None:
        part_names = [name for name, _ in module.named_children() if name not in projections]
    clip = head_parts.clip_of(model, layer)
    if clip is not None:
        part_names.append(f"clip_qkv={clip:g}")
    if not part_names:
        return "the hooked pattern is not the one that mixes the values"
    return (
        f"its attention has {', '.join(part_names)}, and mechattn does not know how these turn"
        " pattern · v into z"
    )


def _heads(probe: ProbedHooks) -> Check:
    """Check that the heads' outputs add up to the attention output."""
    detail = "Σ_h z W_O + b_O against the attention output"
    pairs: Pairs = {}
    for layer, stored_z in probe.each_layer("attn.hook_z"):
        z = _by_head(probe.model, stored_z)
        sum_of_heads = _sum_of_heads(probe.model, layer, z)
        outputs_by_distance: dict[float, Tensor] = {}
        for name in ("attn.hook_out", "hook_attn_out"):
            output = probe.of_layer(layer, name)
            if output is None or sum_of_heads is None or output.shape != sum_of_heads.shape:
                continue
            distance = float((output - sum_of_heads).abs().max())
            outputs_by_distance.setdefault(distance, output)
        if sum_of_heads is None or not outputs_by_distance:
            reason = f"z {list(z.shape)} and W_O do not give an output of the heads' shape"
            return Check("heads", "limited", detail=f"{detail}: layer {layer}: {reason}")

        # The two hooks differ in Gemma, where one is after the post-norm, and in BLOOM, where one
        # is after the residual is added. The nearer one is the heads' output.
        nearest_output = outputs_by_distance[min(outputs_by_distance)]
        pairs[layer] = (sum_of_heads[0], nearest_output[0])

    remedy = f"the heads' outputs are not what reaches the residual stream; {ANOTHER_VERSION}"
    return compare("heads", pairs, ACTIVATION_TOLERANCE[probe.dtype], detail, remedy)


def _sum_of_heads(model: HookedModel, layer: int, z: Tensor) -> Tensor | None:
    """Σ_h z W_O + b_O; None if z and W_O do not fit together."""
    attention = model.blocks[layer].attn
    try:
        w_o = head_parts.output_projection(model, layer).float().cpu()
        with weights_here(attention):
            b_o = getattr(attention, "b_O", None)
    # AttentionBridge.W_O raises AttributeError or the errors of a weight of an unknown shape, and
    # MLAAttentionBridge.b_O raises NotImplementedError.
    except Exception:
        return None

    if w_o.ndim != 3 or z.shape[2:] != w_o.shape[:2]:
        return None
    sum_without_bias = z.flatten(2) @ w_o.flatten(0, 1)
    if b_o is None:
        return sum_without_bias
    return sum_without_bias + b_o.detach().float().cpu()


def _residual(probe: ProbedHooks) -> Check:
    """Check that resid_pre + attn_out + mlp_out is resid_post."""
    pairs: Pairs = {}
    for layer in hooks.attention_layers(probe.model):
        resid_pre = probe.of_layer(layer, "hook_resid_pre")
        attn_out = probe.of_layer(layer, "hook_attn_out")
        mlp_out = probe.of_layer(layer, "hook_mlp_out")
        resid_post = probe.of_layer(layer, "hook_resid_post")
        if resid_pre is None or attn_out is None or mlp_out is None or resid_post is None:
            continue
        # Rounded after each addition, as in the model: in bfloat16 the rounding of an entry of
        # 12,000 is half the root mean square of all entries.
        resid_mid = (resid_pre[0] + attn_out[0]).to(probe.dtype).float()
        sum_of_parts = (resid_mid + mlp_out[0]).to(probe.dtype).float()
        pairs[layer] = (sum_of_parts, resid_post[0])

    detail = "residual + attention + MLP = residual after"
    check = compare("residual", pairs, ACTIVATION_TOLERANCE[probe.dtype], detail)
    return as_limited(
        check,
        "the hooked parts do not add up to the residual stream, so analyses of updates refuse this"
        " model",
    )


def _by_head(model: HookedModel, z: Float[Tensor, ...]) -> Float[Tensor, ...]:
    """z by head; unchanged if its size is not a multiple of the number of heads."""
    heads = model.cfg.n_heads
    if z[0, 0].numel() % heads:
        return z
    return hooks.split_heads(z, heads)
