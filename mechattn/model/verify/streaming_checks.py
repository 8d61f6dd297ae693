"""Compares attention in row blocks, and from a fused kernel, with the patterns at the hooks."""

from __future__ import annotations

import torch
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
    """Check that a fused kernel gives the hooks' logits, and sums over queries that are the hooks'
    patterns, on the probe."""
    return _against_hooks(model, "fused", "sums over queries of a fused kernel", fused=True)


def _against_hooks(model: HookedModel, name: str, way: str, fused: bool) -> Check:
    """Compare a pass without hooks with one through them: logits, and the pattern of each layer."""
    reason = why_not(model)
    if reason:
        return Check(name, "limited", detail=reason)

    layers = hooks.attention_layers(model)
    tokens = probe.probe_tokens(model, probe.PROBE).to(device_of(model))
    pattern_hooks = [hooks.pattern_hook(layer) for layer in layers]
    expected_logits, patterns = hooks.logits_and_values(model, tokens, pattern_hooks)
    try:
        logits, streamed = _streamed(model, tokens, fused)
    except Exception as error:
        return Check(name, "limited", detail=f"it raises {type(error).__name__}: {error}")

    pairs: dict[int, tuple[Tensor, Tensor]] = {}
    for layer, pattern_hook in zip(layers, pattern_hooks, strict=True):
        if layer not in streamed:
            return Check(name, "limited", layer, detail="its attention function cannot be replaced")
        pairs[layer] = (streamed[layer], patterns[pattern_hook].float().cpu())

    detail = f"{way} against the hooks"
    dtype = probe.dtype_of(model)
    if dtype in TOLERANCE_IN_HALF_PRECISION:
        tolerance = TOLERANCE_IN_HALF_PRECISION[dtype]
        check = compare(name, pairs, tolerance, f"{detail}, root mean square", overall=True)
    else:
        tolerance = TOLERANCE_IN_FLOAT32 if dtype is torch.float32 else probe.PROBABILITY[dtype]
        check = compare(name, pairs, tolerance, detail, scale=1.0)

    tolerance_of_logits = probe.TOLERANCE[dtype][0]
    expected = expected_logits[0].float().cpu()
    check_of_logits = compare_positions(
        name, logits, expected, tolerance_of_logits, f"{detail}: logits"
    )
    for failed in (check, check_of_logits):
        if failed.outcome != "passed":
            return limited(failed, str(failed))

    return check


def _streamed(
    model: HookedModel, tokens: Tensor, fused: bool
) -> tuple[Float[Tensor, "pos d_vocab"], dict[int, Pattern]]:
    """Logits, and by layer the pattern, of a pass without hooks."""
    patterns: dict[int, Pattern] = {}
    length = tokens.shape[1]

    def see(layer: int, attention: Rows | Fused) -> None:
        if isinstance(attention, Fused):
            # With each query as a group of its own, the sums over queries are the pattern.
            each_query = torch.eye(length).to(attention.own)[None]
            patterns[layer] = attention.column_sums(each_query).mT.cpu()
            return
        rows = attention.pattern.cpu()
        if layer not in patterns:
            patterns[layer] = rows.new_zeros(*rows.shape[:2], length, length)
        patterns[layer][:, :, attention.queries, attention.keys] = rows

    windows = {
        layer: hooks.attention_window(model, layer) for layer in hooks.attention_layers(model)
    }
    with torch.no_grad(), streaming(model, windows, see, block=8, fused=fused):
        logits = model(tokens, return_type="logits", **hooks.keeping_nothing(model))[0]
    return logits.float().cpu(), patterns
