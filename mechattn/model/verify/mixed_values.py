"""Checks that z is pattern · v; some models clip or norm the values, or gate or norm the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Float
from torch import Tensor, nn

from mechattn.model.hooked import HookedModel
from mechattn.model.values import as_mixed, attention_module, clip_of, norm_of_values, norms_of_output
from mechattn.model.verify.tensor_differences import compare
from mechattn.model.verify.verification import Check

GATES = ("hook_q_gate", "hook_gate", "gate.hook_out")  # in attention: the hooks of a gate's input
_GATES: Mapping[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "softplus": nn.functional.softplus}
_DETAIL = "pattern · v against z"
_GATED = "times a gate of its query ("

Mixed = Float[Tensor, "query head d_head"]


@dataclass(frozen=True)
class LayerProbe:
    """The values of a layer's hooks on a row of the probe, in float32; None where there is no hook.

    Args:
        pattern: The pattern.
        v: The values.
        z: Each head's output before W_O.
        gate: The input of a gate.
    """

    pattern: Float[Tensor, "head query key"]
    v: Float[Tensor, ...] | None
    z: Float[Tensor, ...] | None
    gate: Float[Tensor, ...] | None = None


@torch.no_grad()
def check_values(model: HookedModel, layers: Mapping[int, LayerProbe], tolerance: float) -> Check:
    """Check that pattern · v is z or, if not, that a gate or a norm after it gives z."""
    pairs: dict[int, tuple[Tensor, Tensor]] = {}
    for layer, shown in layers.items():
        if shown.v is None or shown.z is None:
            return Check("values", "limited", detail=f"{_DETAIL}: layer {layer} fires no hook_v or no hook_z")
        mixed = _mixed(shown.pattern, _mixed_values(model, layer, shown.v))
        if mixed is None or mixed.shape != shown.z.shape:
            sizes = [str([1, *part.shape]) for part in (shown.pattern, shown.v, shown.z)]
            said = f"pattern {sizes[0]}, v {sizes[1]} and z {sizes[2]} do not fit together"
            return Check("values", "limited", detail=f"{_DETAIL}: layer {layer}: {said}")
        pairs[layer] = (mixed, shown.z)
    check = compare("values", pairs, tolerance, _DETAIL + _before(model, list(layers)), "")
    return check if check.outcome != "failed" else _explained(model, check, layers, pairs, tolerance)


def gate_function(detail: str) -> Callable[[Tensor], Tensor] | None:
    """The function from a hook's value to the gate, found from the detail of a check; None if there is no gate."""
    return next((function for name, function in _GATES.items() if f"{_GATED}{name})" in detail), None)


def _explained(
    model: HookedModel,
    check: Check,
    layers: Mapping[int, LayerProbe],
    pairs: Mapping[int, tuple[Tensor, Tensor]],
    tolerance: float,
) -> Check:
    """The check if the mix is not z: limited if in each such layer a known step turns it into z, otherwise failed."""
    found = []
    for layer, (mixed, z) in pairs.items():
        alone = compare("values", {layer: (mixed, z)}, tolerance, check.detail, "")
        if alone.outcome != "failed":
            continue
        for words, made in _afterwards(model, layer, mixed, layers[layer].gate):
            if compare("values", {layer: (made, z)}, tolerance, "", "").outcome == "passed":
                found.append(f"z is pattern · v {words}")
                break
        else:
            return replace(alone, remedy=_why(model, layer))
    return replace(check, outcome="limited", detail=found[0])


def _mixed_values(model: HookedModel, layer: int, v: Float[Tensor, ...]) -> Float[Tensor, ...]:
    parameter = next(model.parameters())
    return as_mixed(model, layer, v.to(parameter.device, parameter.dtype)).float().cpu() if v.ndim == 3 else v


def _mixed(pattern: Float[Tensor, "head query key"], v: Float[Tensor, ...]) -> Mixed | None:
    """Values mixed by the pattern; None if the layout of v is not [key, kv_head, d_head]."""
    if v.ndim != 3 or v.shape[0] != pattern.shape[-1] or pattern.shape[0] % v.shape[1]:
        return None
    every = repeat(v, "key kv_head d_head -> key (kv_head group) d_head", group=pattern.shape[0] // v.shape[1])
    return einsum(pattern, every, "head query key, key head d_head -> query head d_head")


def _before(model: HookedModel, layers: list[int]) -> str:
    """What happens to values after hook_v, in words."""
    limit = next((limit for layer in layers if (limit := clip_of(model, layer)) is not None), None)
    said = [] if limit is None else [f"clipped at ±{limit:g}"]
    said += ["normed"] if any(norm_of_values(model, layer) is not None for layer in layers) else []
    return f", v {' and '.join(said)} after hook_v" if said else ""


def _afterwards(
    model: HookedModel, layer: int, mixed: Mixed, gate: Float[Tensor, ...] | None
) -> Iterator[tuple[str, Mixed]]:
    """The steps that may follow the mix before W_O, in words, with their results."""
    if gate is not None and gate.numel() in (mixed.numel(), mixed[..., 0].numel()):
        for name, function in _GATES.items():
            opened = function(gate.reshape(*mixed.shape[:2], -1))  # one number per head, or one per channel
            yield f"{_GATED}{name}), so values reach W_O through the gate", mixed * opened
    parameter = next(model.parameters())
    for name, norm in norms_of_output(model, layer):
        flat = rearrange(mixed, "query head d_head -> query (head d_head)").to(parameter.device, parameter.dtype)
        yield (
            f"after a norm over all heads ({name}), so a value gives no update of its own",
            rearrange(norm(flat).float().cpu(), "query (head d_head) -> query head d_head", head=mixed.shape[1]),
        )


def _why(model: HookedModel, layer: int) -> str:
    """The parts of the attention module that may act between the pattern and z, if no known step explains it."""
    module = attention_module(model, layer)
    usual = ("q_proj", "k_proj", "v_proj", "o_proj")
    others = [] if module is None else [name for name, _ in module.named_children() if name not in usual]
    unlike = [name for name in others if "norm" in name or "gate" in name or name.startswith("g_")]
    if clip := clip_of(model, layer):
        unlike.append(f"clip_qkv={clip:g}")
    if unlike:
        return f"its attention has {', '.join(unlike)}, and mechattn does not know how these turn pattern · v into z"
    return ""
