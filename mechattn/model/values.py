"""What attention does to values beside mixing them by its pattern: some clip or norm them, or gate or norm the mix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mechattn.model.compare import compare
from mechattn.model.report import Check

GATES = ("hook_q_gate", "hook_gate", "gate.hook_out")  # of attention: where a bridge shows what a gate is made of
_GATES: Mapping[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "softplus": nn.functional.softplus}
_DETAIL = "pattern · v against z"
_EARLIER = ("q", "k", "v")  # norms whose names begin so are of queries, keys and values

Mixed = Float[Tensor, "query head d_head"]


@dataclass(frozen=True)
class Shown:
    """What the hooks of a layer show of a row of the probe, in float32; None where none does.

    Args:
        pattern: The pattern.
        v: The values.
        z: Each head's output before W_O.
        gate: What a gate is made of.
    """

    pattern: Float[Tensor, "head query key"]
    v: Tensor | None
    z: Tensor | None
    gate: Tensor | None = None


def as_mixed(
    model: Any, layer: int, v: Float[Tensor, "*batch kv_head d_head"]
) -> Float[Tensor, "*batch kv_head d_head"]:
    """The values that the pattern mixes, from those of hook_v, after which the model may clip or norm them."""
    limit, norm = clip_of(model, layer), _norm_of_values(model, layer)
    if limit is not None:
        v = v.clamp(-limit, limit)
    return v if norm is None else norm(v)


def clip_of(model: Any, layer: int) -> float | None:
    """Where a layer clips queries, keys and values after their hooks (some OLMo, MPT); None in most models."""
    module = _attention(model, layer)
    limit = getattr(module, "clip_qkv", None) or getattr(getattr(module, "config", None), "clip_qkv", None)
    return float(limit) if limit else None


def norm_before_output(model: Any, layer: int) -> str | None:
    """The name of a norm over all heads between the mixed values and W_O (BitNet); None in most models."""
    return next((name for name, _ in _norms_of_output(model, layer)), None)


@torch.no_grad()
def check_values(model: Any, layers: Mapping[int, Shown], tolerance: float) -> Check:
    """Whether pattern · v is z; where it isn't, whether a gate or a norm after it makes it z."""
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


def _explained(
    model: Any, check: Check, layers: Mapping[int, Shown], pairs: Mapping[int, tuple[Tensor, Tensor]], tolerance: float
) -> Check:
    """The check where the mix is not z: limited if in each such layer one known step makes it z, else failed."""
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


def _mixed_values(model: Any, layer: int, v: Tensor) -> Tensor:
    parameter = next(model.parameters())
    return as_mixed(model, layer, v.to(parameter.device, parameter.dtype)).float().cpu() if v.ndim == 3 else v


def _mixed(pattern: Float[Tensor, "head query key"], v: Tensor) -> Mixed | None:
    """Values mixed by the pattern; None where v has another layout than [key, kv_head, d_head]."""
    if v.ndim != 3 or v.shape[0] != pattern.shape[-1] or pattern.shape[0] % v.shape[1]:
        return None
    every = v.repeat_interleave(pattern.shape[0] // v.shape[1], dim=1)
    return torch.einsum("hqk,khd->qhd", pattern, every)


def _before(model: Any, layers: list[int]) -> str:
    """What happens to values after hook_v, in words."""
    limit = next((limit for layer in layers if (limit := clip_of(model, layer)) is not None), None)
    said = [] if limit is None else [f"clipped at ±{limit:g}"]
    said += ["normed"] if any(_norm_of_values(model, layer) is not None for layer in layers) else []
    return f", v {' and '.join(said)} after hook_v" if said else ""


def _afterwards(model: Any, layer: int, mixed: Mixed, gate: Tensor | None) -> Iterator[tuple[str, Mixed]]:
    """What may happen to the mix before W_O, in words, and what it makes of it."""
    if gate is not None and gate.numel() in (mixed.numel(), mixed[..., 0].numel()):
        for name, function in _GATES.items():
            opened = function(gate.reshape(*mixed.shape[:2], -1))
            yield f"times a gate of its query ({name}), so values reach W_O through the gate", mixed * opened
    parameter = next(model.parameters())
    for name, norm in _norms_of_output(model, layer):
        flat = mixed.flatten(1).to(parameter.device, parameter.dtype)
        yield (
            f"after a norm over all heads ({name}), so a value gives no update of its own",
            norm(flat).float().cpu().reshape(mixed.shape),
        )


def _norms_of_output(model: Any, layer: int) -> Iterator[tuple[str, nn.Module]]:
    module = _attention(model, layer)
    width = int(model.cfg.n_heads) * int(model.cfg.d_head)
    for name, part in [] if module is None else module.named_children():
        norm = getattr(part, "original_component", part)
        weight = getattr(norm, "weight", None)
        normed = "norm" in type(norm).__name__.lower() and weight is not None and weight.numel() == width
        if normed and not name.startswith(_EARLIER):
            yield name, norm


def _norm_of_values(model: Any, layer: int) -> nn.Module | None:
    norm = getattr(_attention(model, layer), "v_norm", None)
    return getattr(norm, "original_component", norm)


def _why(model: Any, layer: int) -> str:
    """What in the attention module may come between the pattern and z, where no known step explains it."""
    module = _attention(model, layer)
    usual = ("q_proj", "k_proj", "v_proj", "o_proj")
    others = [] if module is None else [name for name, _ in module.named_children() if name not in usual]
    unlike = [name for name in others if "norm" in name or "gate" in name or name.startswith("g_")]
    if clip := clip_of(model, layer):
        unlike.append(f"clip_qkv={clip:g}")
    if unlike:
        return f"its attention has {', '.join(unlike)}, and mechattn does not know how these make z of pattern · v"
    return ""


def _attention(model: Any, layer: int) -> Any:
    """The attention module of transformers in a layer; None where there is none behind the hooks."""
    return getattr(getattr(model.blocks[layer], "attn", None), "original_component", None)
