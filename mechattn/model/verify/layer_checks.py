"""Checks that the hooks of each layer fit together: rows, mask and scores of the pattern, values, heads, residual.

z is pattern · v, but some models clip or norm the values, or gate or norm the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Float
from torch import Tensor, nn

from mechattn.functional.received import visible_keys
from mechattn.model import head_parts, hooks
from mechattn.model.hooked import HookedModel
from mechattn.model.several_devices import device_of, weights_here
from mechattn.model.verify.verification import (
    ANOTHER_VERSION,
    PROBABILITY,
    TOLERANCE,
    Check,
    compare,
    limited,
)

GATES = ("hook_q_gate", "hook_gate", "gate.hook_out")  # in attention: the hooks of a gate's input
_GATES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softplus": nn.functional.softplus,
}
_DETAIL = "pattern · v against z"
_GATED = "times a gate of its query ("
_OUTPUT = "Σ_h z W_O + b_O against the attention output"

Mixed = Float[Tensor, "query head d_head"]
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Shown:
    """What the hooks showed of the probe, the first row of the batch, in float32."""

    model: HookedModel
    by_name: Mapping[str, Tensor]
    dtype: torch.dtype  # of the weights
    length: int  # of the probe in tokens

    def each_layer(self, name: str) -> list[tuple[int, Tensor]]:
        """The value of a hook in the layers with attention in which it fires."""
        named = (
            (n, self.by_name.get(f"blocks.{n}.{name}")) for n in hooks.attention_layers(self.model)
        )
        return [(layer, value) for layer, value in named if value is not None]


def is_read(name: str) -> bool:
    """Whether the checks read a hook of a layer, such as "attn.hook_z"."""
    return name in {
        *(f"attn.hook_{part}" for part in ("attn_scores", "pattern", "v", "z", "out")),
        *(f"attn.{gate}" for gate in GATES),
        *(f"hook_{part}" for part in ("resid_pre", "resid_post", "attn_out", "mlp_out")),
    }


def check_layers(shown: Shown) -> list[Check]:
    """All checks of this file."""
    return [
        _rows(shown),
        _mask(shown),
        _scores(shown),
        _values(shown),
        _heads(shown),
        _residual(shown),
    ]


def gate_function(detail: str) -> Callable[[Tensor], Tensor] | None:
    """The function from a hook's value to the gate, found from the detail of a check; None if there is no gate."""
    return next(
        (function for name, function in _GATES.items() if f"{_GATED}{name})" in detail), None
    )


def _rows(shown: Shown) -> Check:
    sinks = hooks.has_sinks(shown.model)
    pairs = {}
    for layer, pattern in shown.each_layer("attn.hook_pattern"):
        sums = pattern[0].sum(-1)
        pairs[layer] = (sums, sums.clamp(0, 1) if sinks else torch.ones_like(sums))
    detail = (
        "rows of the pattern sum to at most 1 (learned sinks)"
        if sinks
        else "rows of the pattern sum to 1"
    )
    tolerance = max(10 * PROBABILITY[shown.dtype], 1e-4)
    return compare(
        "rows", pairs, tolerance, detail, "hook_pattern shows no probabilities", scale=1.0
    )


def _mask(shown: Shown) -> Check:
    """Check that keys that a query cannot see have no mass and, if scores show it, that no visible key is masked."""
    pairs, beyond, length = {}, [], shown.length
    masked = torch.finfo(shown.dtype).min / 2
    for layer, pattern in shown.each_layer("attn.hook_pattern"):
        window = hooks.attention_window(shown.model, layer)
        if window is not None and window >= length:
            beyond.append(window)
        visible = visible_keys(torch.arange(length), length, window)
        stray = pattern[0].masked_fill(visible, 0.0).amax()
        scores = shown.by_name.get(f"blocks.{layer}.attn.hook_attn_scores", pattern)
        missing = (scores[0] < masked).logical_and(visible).any().float()
        pairs[layer] = (torch.stack([stray, missing]), torch.zeros(2))
    detail = "mass on keys that a query cannot see, and masked keys that it can see"
    if beyond:
        detail += f" (the probe of {length} tokens does not reach the window of {min(beyond)}; verify_model(length=…))"
    return compare(
        "mask", pairs, 1e-6, detail, f"the mask is not the model's; {ANOTHER_VERSION}", scale=1.0
    )


def _scores(shown: Shown) -> Check:
    pairs = {}
    for layer, pattern in shown.each_layer("attn.hook_pattern"):
        scores = shown.by_name.get(f"blocks.{layer}.attn.hook_attn_scores")
        if scores is not None and scores.shape == pattern.shape:
            pairs[layer] = (scores[0].softmax(-1) * pattern[0].sum(-1, keepdim=True), pattern[0])
    detail = "softmax of hook_attn_scores against the pattern"
    made = compare("scores", pairs, PROBABILITY[shown.dtype], detail, "", scale=1.0)
    return limited(
        made, "hook_attn_scores does not hold the scores; analyses read queries and keys instead"
    )


@torch.no_grad()
def _values(shown: Shown) -> Check:
    """Check that pattern · v is z or, if not, that a gate or a norm after it gives z."""
    model, pairs, gates = shown.model, {}, {}
    for layer, pattern in shown.each_layer("attn.hook_pattern"):
        found = [
            shown.by_name.get(f"blocks.{layer}.attn.{name}")
            for name in ("hook_v", "hook_z", *GATES)
        ]
        v, z, *given = (None if value is None else value[:1] for value in found)
        if v is None or z is None:
            return Check(
                "values", "limited", detail=f"{_DETAIL}: layer {layer} fires no hook_v or no hook_z"
            )
        v, z = head_parts.positions_first(model, layer, v)[0], _by_head(model, z)[0]
        mixed = _mixed(model, layer, pattern[0], v)
        if mixed is None or mixed.shape != z.shape:
            sizes = [str([1, *part.shape]) for part in (pattern[0], v, z)]
            said = f"pattern {sizes[0]}, v {sizes[1]} and z {sizes[2]} do not fit together"
            return Check("values", "limited", detail=f"{_DETAIL}: layer {layer}: {said}")
        pairs[layer], gates[layer] = (
            (mixed, z),
            next((gate[0] for gate in given if gate is not None), None),
        )
    limit = next(
        (limit for layer in pairs if (limit := head_parts.clip_of(model, layer)) is not None), None
    )
    before = [] if limit is None else [f"clipped at ±{limit:g}"]
    before += (
        ["normed"]
        if any(head_parts.norm_of_values(model, layer) is not None for layer in pairs)
        else []
    )
    detail = _DETAIL + (f", v {' and '.join(before)} after hook_v" if before else "")
    check = compare("values", pairs, TOLERANCE[shown.dtype][1], detail, "")
    return check if check.outcome != "failed" else _explained(shown, check, pairs, gates)


def _mixed(
    model: HookedModel, layer: int, pattern: Float[Tensor, "head query key"], v: Float[Tensor, ...]
) -> Mixed | None:
    """Values mixed by the pattern; None if the layout of v is not [key, kv_head, d_head]."""
    if v.ndim != 3 or v.shape[0] != pattern.shape[-1] or pattern.shape[0] % v.shape[1]:
        return None
    dtype = next(model.parameters()).dtype
    v = head_parts.as_mixed(model, layer, v.to(device_of(model.blocks[layer]), dtype)).float().cpu()
    every = repeat(
        v, "key kv_head d_head -> key (kv_head group) d_head", group=pattern.shape[0] // v.shape[1]
    )
    return einsum(pattern, every, "head query key, key head d_head -> query head d_head")


def _explained(
    shown: Shown,
    check: Check,
    pairs: Mapping[int, Pair],
    gates: Mapping[int, Float[Tensor, ...] | None],
) -> Check:
    """The check if the mix is not z: limited if in each such layer a known step turns it into z, otherwise failed."""
    found, tolerance = [], TOLERANCE[shown.dtype][1]
    for layer, (mixed, z) in pairs.items():
        alone = compare("values", {layer: (mixed, z)}, tolerance, check.detail, "")
        if alone.outcome != "failed":
            continue
        for words, made in _afterwards(shown.model, layer, mixed, gates[layer]):
            if compare("values", {layer: (made, z)}, tolerance, "", "").outcome == "passed":
                found.append(f"z is pattern · v {words}")
                break
        else:
            why = (
                _why(shown.model, layer)
                or "the hooked pattern is not the one that mixes the values"
            )
            return replace(alone, remedy=f"{why}; {ANOTHER_VERSION}")
    return replace(check, outcome="limited", detail=found[0])


def _afterwards(
    model: HookedModel, layer: int, mixed: Mixed, gate: Float[Tensor, ...] | None
) -> Iterator[tuple[str, Mixed]]:
    """The steps that may follow the mix before W_O, in words, with their results."""
    if gate is not None and gate.numel() in (mixed.numel(), mixed[..., 0].numel()):
        for name, function in _GATES.items():
            opened = function(
                gate.reshape(*mixed.shape[:2], -1)
            )  # one number per head, or one per channel
            yield f"{_GATED}{name}), so values reach W_O through the gate", mixed * opened
    device, dtype = device_of(model.blocks[layer]), next(model.parameters()).dtype
    for name, norm in head_parts.norms_of_output(model, layer):
        flat = rearrange(mixed, "query head d_head -> query (head d_head)").to(device, dtype)
        yield (
            f"after a norm over all heads ({name}), so a value gives no update of its own",
            rearrange(
                norm(flat).float().cpu(),
                "query (head d_head) -> query head d_head",
                head=mixed.shape[1],
            ),
        )


def _why(model: HookedModel, layer: int) -> str:
    """The parts of the attention module that may act between the pattern and z, if no known step explains it."""
    module = head_parts.attention_module(model, layer)
    usual = ("q_proj", "k_proj", "v_proj", "o_proj")
    others = (
        [] if module is None else [name for name, _ in module.named_children() if name not in usual]
    )
    unlike = [name for name in others if "norm" in name or "gate" in name or name.startswith("g_")]
    if clip := head_parts.clip_of(model, layer):
        unlike.append(f"clip_qkv={clip:g}")
    if not unlike:
        return ""
    return f"its attention has {', '.join(unlike)}, and mechattn does not know how these turn pattern · v into z"


def _heads(shown: Shown) -> Check:
    pairs = {}
    for layer, given in shown.each_layer("attn.hook_z"):
        z = _by_head(shown.model, given)
        parts = _sum_of_heads(shown.model, layer, z)
        # If the two differ, one is before Gemma's post-norm, or after BLOOM has added the residual.
        outs = [
            shown.by_name.get(f"blocks.{layer}.{name}")
            for name in ("attn.hook_out", "hook_attn_out")
        ]
        alike = [
            out
            for out in outs
            if out is not None and parts is not None and parts.shape == out.shape
        ]
        if parts is None or not alike:
            why = f"{_OUTPUT}: layer {layer}: z {list(z.shape)} and W_O do not give an output of the heads' shape"
            return Check("heads", "limited", detail=why)
        pairs[layer] = (
            parts[0],
            min((out[0] for out in alike), key=lambda out: float((out - parts[0]).abs().max())),
        )
    remedy = f"the heads' outputs are not what reaches the residual stream; {ANOTHER_VERSION}"
    return compare("heads", pairs, TOLERANCE[shown.dtype][1], _OUTPUT, remedy)


def _sum_of_heads(model: HookedModel, layer: int, z: Tensor) -> Tensor | None:
    try:
        w_o = head_parts.output_projection(model, layer).float().cpu()
        with weights_here(attention := model.blocks[layer].attn):
            b_o = getattr(attention, "b_O", None)
    except Exception:  # an adapter that does not declare its output weights
        return None
    if z.ndim != 4 or w_o.ndim != 3 or z.shape[2:] != w_o.shape[:2]:
        return None
    return z.flatten(2) @ w_o.flatten(0, 1) + (0.0 if b_o is None else b_o.detach().float().cpu())


def _residual(shown: Shown) -> Check:
    pairs = {}
    for layer in hooks.attention_layers(shown.model):
        names = [
            f"blocks.{layer}.hook_{name}"
            for name in ("resid_pre", "attn_out", "mlp_out", "resid_post")
        ]
        if all(name in shown.by_name for name in names):
            before, attention, mlp, after = (shown.by_name[name][0] for name in names)
            # Rounded after each addition as the model's are: in bfloat16 the rounding of an entry of 12,000 is half the
            # root mean square of all.
            middle = (before + attention).to(shown.dtype).float()
            pairs[layer] = ((middle + mlp).to(shown.dtype).float(), after)
    made = compare(
        "residual",
        pairs,
        TOLERANCE[shown.dtype][1],
        "residual + attention + MLP = residual after",
        "",
    )
    why = "the hooked parts do not add up to the residual stream, so analyses of updates refuse this model"
    return limited(made, why)


def _by_head(model: HookedModel, z: Float[Tensor, ...]) -> Float[Tensor, ...]:
    """z of each head; unchanged if its size is not a multiple of the number of heads."""
    count = int(model.cfg.n_heads)
    return z if z[0, 0].numel() % count else head_parts.split_heads(z, count)
