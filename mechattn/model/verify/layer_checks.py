"""Checks that the hooks of each layer fit together: rows, mask and scores of the pattern, values,
heads, residual.

z is pattern · v, but some models clip or norm the values, or gate or norm the result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
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

# In attention: the hooks of a gate's input, and the functions that gates have.
GATES = ("hook_q_gate", "hook_gate", "gate.hook_out")
GATE_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softplus": nn.functional.softplus,
}

# The hooks of a layer that the checks read.
READ_HOOKS = {
    "attn.hook_attn_scores",
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

VALUES_DETAIL = "pattern · v against z"
GATED = "times a gate of its query ("
OUTPUT_DETAIL = "Σ_h z W_O + b_O against the attention output"

Mixed = Float[Tensor, "query head d_head"]
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ProbedHooks:
    """What the hooks showed of the probe, the first row of the batch, in float32."""

    model: HookedModel
    by_name: Mapping[str, Tensor]
    dtype: torch.dtype  # of the weights
    length: int  # of the probe in tokens

    def of_layer(self, layer: int, name: str) -> Tensor | None:
        """The value of a hook of a layer, such as "attn.hook_z"; None if it did not fire."""
        return self.by_name.get(f"blocks.{layer}.{name}")

    def each_layer(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """The value of a hook in the layers with attention in which it fires."""
        for layer in hooks.attention_layers(self.model):
            value = self.of_layer(layer, name)
            if value is not None:
                yield layer, value


def is_read(name: str) -> bool:
    """Whether the checks read a hook of a layer, such as "attn.hook_z"."""
    return name in READ_HOOKS


def check_layers(probe: ProbedHooks) -> list[Check]:
    """All checks of this file."""
    return [
        _rows(probe),
        _mask(probe),
        _scores(probe),
        _values(probe),
        _heads(probe),
        _residual(probe),
    ]


def gate_function(detail: str) -> Callable[[Tensor], Tensor] | None:
    """The function from a hook's value to the gate, found from the detail of a check; None if there
    is no gate."""
    for name, function in GATE_FUNCTIONS.items():
        if f"{GATED}{name})" in detail:
            return function
    return None


def _rows(probe: ProbedHooks) -> Check:
    """Check that each query's probabilities add up to 1, or to less where a sink takes the rest."""
    has_sinks = hooks.has_sinks(probe.model)
    pairs = {}
    for layer, pattern in probe.each_layer("attn.hook_pattern"):
        sums = pattern[0].sum(-1)
        expected = sums.clamp(0, 1) if has_sinks else torch.ones_like(sums)
        pairs[layer] = (sums, expected)

    detail = "rows of the pattern sum to 1"
    if has_sinks:
        detail = "rows of the pattern sum to at most 1 (learned sinks)"
    tolerance = max(10 * PROBABILITY[probe.dtype], 1e-4)
    remedy = "hook_pattern shows no probabilities"
    return compare("rows", pairs, tolerance, detail, remedy, scale=1.0)


def _mask(probe: ProbedHooks) -> Check:
    """Check that keys that a query cannot see have no mass and, if scores show it, that no visible
    key is masked."""
    length = probe.length
    masked_score = torch.finfo(probe.dtype).min / 2
    pairs = {}
    windows_beyond_probe = []
    for layer, pattern in probe.each_layer("attn.hook_pattern"):
        window = hooks.attention_window(probe.model, layer)
        if window is not None and window >= length:
            windows_beyond_probe.append(window)

        visible = visible_keys(torch.arange(length), length, window)
        stray_mass = pattern[0].masked_fill(visible, 0.0).amax()
        scores = probe.of_layer(layer, "attn.hook_attn_scores")
        if scores is None:
            scores = pattern
        is_masked = scores[0] < masked_score
        missing = is_masked.logical_and(visible).any().float()
        pairs[layer] = (torch.stack([stray_mass, missing]), torch.zeros(2))

    detail = "mass on keys that a query cannot see, and masked keys that it can see"
    if windows_beyond_probe:
        window = min(windows_beyond_probe)
        detail += (
            f" (the probe of {length} tokens does not reach the window of {window};"
            " verify_model(length=…))"
        )
    remedy = f"the mask is not the model's; {ANOTHER_VERSION}"
    return compare("mask", pairs, 1e-6, detail, remedy, scale=1.0)


def _scores(probe: ProbedHooks) -> Check:
    pairs = {}
    for layer, pattern in probe.each_layer("attn.hook_pattern"):
        scores = probe.of_layer(layer, "attn.hook_attn_scores")
        if scores is not None and scores.shape == pattern.shape:
            row_sums = pattern[0].sum(-1, keepdim=True)  # below 1 where a sink takes the rest
            pairs[layer] = (scores[0].softmax(-1) * row_sums, pattern[0])

    detail = "softmax of hook_attn_scores against the pattern"
    check = compare("scores", pairs, PROBABILITY[probe.dtype], detail, "", scale=1.0)
    return limited(
        check, "hook_attn_scores does not hold the scores; analyses read queries and keys instead"
    )


@torch.no_grad()
def _values(probe: ProbedHooks) -> Check:
    """Check that pattern · v is z or, if not, that a gate or a norm after it gives z."""
    model = probe.model
    pairs: dict[int, Pair] = {}
    gates: dict[int, Tensor | None] = {}
    for layer, pattern in probe.each_layer("attn.hook_pattern"):
        stored_v = probe.of_layer(layer, "attn.hook_v")
        stored_z = probe.of_layer(layer, "attn.hook_z")
        if stored_v is None or stored_z is None:
            reason = f"layer {layer} fires no hook_v or no hook_z"
            return Check("values", "limited", detail=f"{VALUES_DETAIL}: {reason}")

        v = head_parts.positions_first(model, layer, stored_v[:1])[0]
        z = _by_head(model, stored_z[:1])[0]
        mixed = _mixed(model, layer, pattern[0], v)
        if mixed is None or mixed.shape != z.shape:
            pattern_size, v_size, z_size = ([1, *part.shape] for part in (pattern[0], v, z))
            reason = f"pattern {pattern_size}, v {v_size} and z {z_size} do not fit together"
            return Check("values", "limited", detail=f"{VALUES_DETAIL}: layer {layer}: {reason}")

        pairs[layer] = (mixed, z)
        gates[layer] = _gate_input(probe, layer)

    detail = VALUES_DETAIL + _steps_after_hook_v(model, pairs)
    check = compare("values", pairs, TOLERANCE[probe.dtype][1], detail, "")
    if check.outcome == "failed":
        return _explained(probe, check, pairs, gates)
    return check


def _gate_input(probe: ProbedHooks, layer: int) -> Tensor | None:
    for name in GATES:
        value = probe.of_layer(layer, f"attn.{name}")
        if value is not None:
            return value[0]
    return None


def _steps_after_hook_v(model: HookedModel, layers: Collection[int]) -> str:
    """What a model does with values before it mixes them, in words; "" if nothing."""
    limits = [head_parts.clip_of(model, layer) for layer in layers]
    clips = [f"clipped at ±{limit:g}" for limit in limits if limit is not None]
    norms = [head_parts.norm_of_values(model, layer) for layer in layers]

    steps = clips[:1]
    if any(norm is not None for norm in norms):
        steps.append("normed")
    return f", v {' and '.join(steps)} after hook_v" if steps else ""


def _mixed(
    model: HookedModel, layer: int, pattern: Float[Tensor, "head query key"], v: Float[Tensor, ...]
) -> Mixed | None:
    """Values mixed by the pattern; None if the layout of v is not [key, kv_head, d_head]."""
    heads, _, keys = pattern.shape
    if v.ndim != 3 or v.shape[0] != keys or heads % v.shape[1]:
        return None
    dtype = next(model.parameters()).dtype
    v = v.to(device_of(model.blocks[layer]), dtype)
    v = head_parts.as_mixed(model, layer, v).float().cpu()
    v_of_head = repeat(
        v, "key kv_head d_head -> key (kv_head group) d_head", group=heads // v.shape[1]
    )
    return einsum(pattern, v_of_head, "head query key, key head d_head -> query head d_head")


def _explained(
    probe: ProbedHooks,
    check: Check,
    pairs: Mapping[int, Pair],
    gates: Mapping[int, Float[Tensor, ...] | None],
) -> Check:
    """The check if the mix is not z: limited if in each such layer a known step turns it into z,
    otherwise failed."""
    tolerance = TOLERANCE[probe.dtype][1]
    steps = []
    for layer, (mixed, z) in pairs.items():
        check_of_layer = compare("values", {layer: (mixed, z)}, tolerance, check.detail, "")
        if check_of_layer.outcome != "failed":
            continue
        step = _step_to_z(probe.model, layer, mixed, z, gates[layer], tolerance)
        if step is None:
            reason = _unknown_parts(probe.model, layer)
            if not reason:
                reason = "the hooked pattern is not the one that mixes the values"
            return replace(check_of_layer, remedy=f"{reason}; {ANOTHER_VERSION}")
        steps.append(step)
    return replace(check, outcome="limited", detail=f"z is pattern · v {steps[0]}")


def _step_to_z(
    model: HookedModel,
    layer: int,
    mixed: Mixed,
    z: Mixed,
    gate: Float[Tensor, ...] | None,
    tolerance: float,
) -> str | None:
    """The step that turns the mix into z, in words; None if no known one does."""
    for words, result in _known_steps(model, layer, mixed, gate):
        if compare("values", {layer: (result, z)}, tolerance, "", "").outcome == "passed":
            return words
    return None


def _known_steps(
    model: HookedModel, layer: int, mixed: Mixed, gate: Float[Tensor, ...] | None
) -> Iterator[tuple[str, Mixed]]:
    """The steps that may follow the mix before W_O, in words, with their results."""
    sizes_of_gates = (mixed.numel(), mixed[..., 0].numel())  # one number a channel, or one a head
    if gate is not None and gate.numel() in sizes_of_gates:
        by_head = gate.reshape(*mixed.shape[:2], -1)
        for name, function in GATE_FUNCTIONS.items():
            words = f"{GATED}{name}), so values reach W_O through the gate"
            yield words, mixed * function(by_head)

    device = device_of(model.blocks[layer])
    dtype = next(model.parameters()).dtype
    for name, norm in head_parts.norms_of_output(model, layer):
        all_heads = rearrange(mixed, "query head d_head -> query (head d_head)")
        normed = norm(all_heads.to(device, dtype)).float().cpu()
        words = f"after a norm over all heads ({name}), so a value gives no update of its own"
        yield words, normed.reshape(mixed.shape)


def _unknown_parts(model: HookedModel, layer: int) -> str:
    """The parts of the attention module that may act between the pattern and z, in words; "" if
    there are none."""
    usual = ("q_proj", "k_proj", "v_proj", "o_proj")
    module = head_parts.attention_module(model, layer)
    names = [] if module is None else [name for name, _ in module.named_children()]
    unusual = [name for name in names if name not in usual]
    suspects = [
        name for name in unusual if "norm" in name or "gate" in name or name.startswith("g_")
    ]

    clip = head_parts.clip_of(model, layer)
    if clip:
        suspects.append(f"clip_qkv={clip:g}")
    if not suspects:
        return ""
    return (
        f"its attention has {', '.join(suspects)}, and mechattn does not know how these turn pattern ·"
        " v into z"
    )


def _heads(probe: ProbedHooks) -> Check:
    """Check that the heads' outputs add up to the attention output."""
    pairs = {}
    for layer, stored_z in probe.each_layer("attn.hook_z"):
        z = _by_head(probe.model, stored_z)
        total = _sum_of_heads(probe.model, layer, z)
        outputs = []
        for name in ("attn.hook_out", "hook_attn_out"):
            output = probe.of_layer(layer, name)
            if output is not None and total is not None and output.shape == total.shape:
                outputs.append(output[0])
        if total is None or not outputs:
            reason = (
                f"layer {layer}: z {list(z.shape)} and W_O do not give an output of the heads'"
                " shape"
            )
            return Check("heads", "limited", detail=f"{OUTPUT_DETAIL}: {reason}")

        # If the two differ, one is before Gemma's post-norm, or after BLOOM has added the residual.
        errors = [float((output - total[0]).abs().max()) for output in outputs]
        pairs[layer] = (total[0], outputs[errors.index(min(errors))])

    remedy = f"the heads' outputs are not what reaches the residual stream; {ANOTHER_VERSION}"
    return compare("heads", pairs, TOLERANCE[probe.dtype][1], OUTPUT_DETAIL, remedy)


def _sum_of_heads(model: HookedModel, layer: int, z: Tensor) -> Tensor | None:
    attention = model.blocks[layer].attn
    try:
        w_o = head_parts.output_projection(model, layer).float().cpu()
        with weights_here(attention):
            b_o = getattr(attention, "b_O", None)
    except Exception:  # an adapter that does not declare its output weights
        return None

    if z.ndim != 4 or w_o.ndim != 3 or z.shape[2:] != w_o.shape[:2]:
        return None
    total = z.flatten(2) @ w_o.flatten(0, 1)
    if b_o is None:
        return total
    return total + b_o.detach().float().cpu()


def _residual(probe: ProbedHooks) -> Check:
    """Check that the stream after a layer is that before it, plus attention, plus MLP."""
    pairs = {}
    for layer in hooks.attention_layers(probe.model):
        before = probe.of_layer(layer, "hook_resid_pre")
        attention = probe.of_layer(layer, "hook_attn_out")
        mlp = probe.of_layer(layer, "hook_mlp_out")
        after = probe.of_layer(layer, "hook_resid_post")
        if before is None or attention is None or mlp is None or after is None:
            continue
        # Rounded after each addition as the model's are: in bfloat16 the rounding of an entry of
        # 12,000 is half the root mean square of all.
        middle = (before[0] + attention[0]).to(probe.dtype).float()
        total = (middle + mlp[0]).to(probe.dtype).float()
        pairs[layer] = (total, after[0])

    detail = "residual + attention + MLP = residual after"
    check = compare("residual", pairs, TOLERANCE[probe.dtype][1], detail, "")
    return limited(
        check,
        "the hooked parts do not add up to the residual stream, so analyses of updates refuse this"
        " model",
    )


def _by_head(model: HookedModel, z: Float[Tensor, ...]) -> Float[Tensor, ...]:
    """z of each head; unchanged if its size is not a multiple of the number of heads."""
    heads = int(model.cfg.n_heads)
    if z[0, 0].numel() % heads:
        return z
    return head_parts.split_heads(z, heads)
