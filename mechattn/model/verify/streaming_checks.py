"""Compares attention in row blocks, and a fused kernel's sums, with the patterns at the hooks."""

from __future__ import annotations

from dataclasses import replace

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from mechattn.functional.attention import Pattern, Rows
from mechattn.functional.fused import Fused
from mechattn.model import hooks
from mechattn.model.hooked import HookedModel
from mechattn.model.patch.streaming import streaming, why_not
from mechattn.model.several_devices import device_of
from mechattn.model.verify import verification as probe
from mechattn.model.verify.verification import Check, compare, compare_positions, limited

# Scores in the hundreds, as in large models, are rounded by 3e-5 in float32, and later layers
# enlarge the effect of a layer's rounding: 4e-5 seen in the third of three wide layers. A wrong
# mask or scale gives 0.01.
TOLERANCE_IN_FLOAT32 = 2e-4

# In half precision the hooks' own scores are rounded to 8 or 11 bits, so that one probability may
# differ by 0.15 (0.04 in float16) where nothing is wrong: judged by the root mean square of a
# layer's differences, in that of its pattern. With 30 architectures and four toys it is at most
# 0.042 (0.0085); a wrong window, sink, slope, head or rotation gives 0.12 and more, but a scale
# that is 5 % off only 0.03, which a check in float32 notices.
TOLERANCE_IN_HALF_PRECISION = {torch.float16: 2e-2, torch.bfloat16: 8e-2}


def check_streaming(model: HookedModel) -> Check:
    """Check that attention in blocks of rows gives the same logits and patterns as the hooks, on
    the probe."""
    return _against_hooks(model, "streaming", "patterns of row blocks", fused=False)


def check_fused(model: HookedModel) -> Check:
    """Check that a fused kernel gives the hooks' logits, and the sums of their patterns over
    queries, on the probe."""
    return _against_hooks(model, "fused", "sums over queries of a fused kernel", fused=True)


def _against_hooks(model: HookedModel, name: str, way: str, fused: bool) -> Check:
    """Compare a pass without hooks with one through them, layer by layer: patterns, or with
    ``fused`` their sums."""
    reason = why_not(model)
    if reason:
        return Check(name, "limited", detail=reason)

    layers = hooks.attention_layers(model)
    tokens = probe.probe_tokens(model, probe.PROBE).to(device_of(model))
    expected_logits, hook_values = hooks.logits_and_values(
        model, tokens, map(hooks.pattern_hook, layers)
    )
    expected = {}

    for layer in layers:
        expected[layer] = hook_values[hooks.pattern_hook(layer)].float().cpu()
        if fused:
            expected[layer] = _sums(expected[layer])

    try:
        logits, streamed = _streamed(model, tokens, fused)
    except Exception as error:
        return Check(name, "limited", detail=f"it raises {type(error).__name__}: {error}")

    for layer in layers:
        if layer not in streamed:
            return Check(name, "limited", layer, detail="its attention function cannot be replaced")

    detail = f"{way} against the hooks"
    dtype = probe.dtype_of(model)
    pairs = {layer: (streamed[layer], expected[layer]) for layer in expected}
    if dtype in TOLERANCE_IN_HALF_PRECISION:
        tolerance = TOLERANCE_IN_HALF_PRECISION[dtype]
        measure = f"{detail}, root mean square"
        check = compare(name, pairs, tolerance, measure, "", overall=True)
    else:
        tolerance = TOLERANCE_IN_FLOAT32 if dtype is torch.float32 else probe.PROBABILITY[dtype]
        queries = tokens.shape[1] if fused else 1  # whose differences add up in a sum
        check = compare(name, pairs, queries * tolerance, detail, "", scale=1.0)

    tolerance_of_logits = probe.TOLERANCE[dtype][0]
    check_of_logits = compare_positions(
        name, logits, expected_logits[0].float().cpu(), tolerance_of_logits, f"{detail}: logits", ""
    )
    for failed in (check, check_of_logits):
        if failed.outcome != "passed":
            return limited(failed, str(failed))

    return check


def _streamed(
    model: HookedModel, tokens: Tensor, fused: bool
) -> tuple[Float[Tensor, "pos d_vocab"], dict[int, Tensor]]:
    """Logits, and by layer the pattern or its sums, of a pass without hooks."""
    blocks: dict[int, list[Rows]] = {}
    sums: dict[int, Tensor] = {}

    def see(layer: int, attention: Rows | Fused) -> None:
        if isinstance(attention, Fused):
            groups = _groups(attention.own.shape[-1]).to(attention.own)
            sums[layer] = attention.column_sums(groups).cpu()
        else:
            stored = replace(attention, pattern=attention.pattern.clone())
            blocks.setdefault(layer, []).append(stored)

    windows = {
        layer: hooks.attention_window(model, layer) for layer in hooks.attention_layers(model)
    }
    with torch.no_grad(), streaming(model, windows, see, block=8, fused=fused):
        logits = model(tokens, return_type="logits", **hooks.keeping_nothing(model))[0]

    streamed = dict(sums)
    for layer, rows in blocks.items():
        streamed[layer] = _assembled(rows)
        if fused:
            streamed[layer] = _sums(streamed[layer])

    return logits.float().cpu(), streamed


def _assembled(blocks: list[Rows]) -> Pattern:
    """The whole pattern, assembled from its blocks."""
    length = max(rows.keys.stop for rows in blocks)
    batch, heads = blocks[0].pattern.shape[:2]
    pattern = blocks[0].pattern.new_zeros((batch, heads, length, length))
    for rows in blocks:
        pattern[:, :, rows.queries, rows.keys] = rows.pattern
    return pattern.cpu()


def _sums(pattern: Pattern) -> Float[Tensor, "batch head key 2"]:
    """What the keys receive from all queries, and from every second one."""
    by_key = rearrange(pattern, "batch head query key -> batch head key query")
    return by_key @ _groups(pattern.shape[-1])[:, None].to(pattern)


def _groups(queries: int) -> Float[Tensor, "1 query 2"]:
    """All queries, and every second one."""
    ones = torch.ones(queries)
    return torch.stack([ones, ones.cumsum(0) % 2], -1)[None]
