"""Checks that attention in row blocks and the fused kernel agree with the hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from mechattn.functional.fused import Fused
from mechattn.functional.rows import Rows
from mechattn.model import hooks
from mechattn.model.hooked import HookedModel
from mechattn.model.patch.streaming import streaming, why_not
from mechattn.model.verify.probe_tokens import PROBE, probe_tokens
from mechattn.model.verify.tensor_differences import (
    PROBABILITY,
    TOLERANCE,
    compare,
    compare_positions,
    dtype_of,
    limited,
)
from mechattn.model.verify.verification import Check

# Scores in the hundreds, as in large models, are rounded by 3e-5 in float32, and later layers enlarge the effect of a
# layer's rounding: 4e-5 seen in the third of three wide layers. A wrong mask or scale gives at least 0.01.
STREAMED = 2e-4
_SILENT = "its attention function cannot be replaced"


def check_streaming(model: HookedModel) -> Check:
    """Check that attention in blocks of rows gives the same logits and patterns as the hooks, on the probe."""
    blocks: dict[int, list[Rows]] = {layer: [] for layer in hooks.attention_layers(model)}

    def see(layer: int, rows: Rows | Fused) -> None:
        assert isinstance(rows, Rows)
        blocks[layer].append(replace(rows, pattern=rows.pattern.clone()))

    return _compared(model, "streaming", see, lambda: {n: _assembled(seen) for n, seen in blocks.items() if seen})


def check_fused(model: HookedModel) -> Check:
    """Check that a fused kernel gives the hooks' logits, and the sums of their patterns over queries, on the probe."""
    sums: dict[int, Tensor] = {}

    def see(layer: int, seen: Rows | Fused) -> None:
        if isinstance(seen, Fused):
            sums[layer] = seen.column_sums(_groups(seen.own.shape[-1]).to(seen.own)).cpu()
            return
        part = _sums(seen.pattern.cpu(), _groups(seen.queries.stop)[:, seen.queries])
        whole = sums.setdefault(layer, part.new_zeros(*part.shape[:2], seen.keys.stop, 2))
        if whole.shape[2] < seen.keys.stop:
            whole = sums[layer] = torch.nn.functional.pad(whole, (0, 0, 0, seen.keys.stop - whole.shape[2]))
        whole[:, :, seen.keys] += part

    return _compared(
        model, "fused", see, lambda: sums, lambda pattern: _sums(pattern, _groups(pattern.shape[-1])), True
    )


def _groups(queries: int) -> Float[Tensor, "1 query 2"]:
    every = torch.ones(queries)
    return torch.stack([every, every.cumsum(0) % 2], -1)[None]


def _sums(
    pattern: Float[Tensor, "batch head query key"], groups: Float[Tensor, "1 query group"]
) -> Float[Tensor, "batch head key group"]:
    return rearrange(pattern, "batch head query key -> batch head key query") @ groups[:, None].to(pattern)


def _compared(
    model: HookedModel,
    name: str,
    see: Callable[[int, Rows | Fused], None],
    found: Callable[[], dict[int, Tensor]],
    of_pattern: Callable[[Tensor], Tensor] = lambda pattern: pattern,
    fused: bool = False,
) -> Check:
    """Compare a pass through the hooks with one without them, layer by layer."""
    if reason := why_not(model):
        return Check(name, "limited", detail=reason)
    tokens = probe_tokens(model, PROBE).to(next(model.parameters()).device)
    windows = {layer: hooks.attention_window(model, layer) for layer in hooks.attention_layers(model)}
    expected, shown = _through_hooks(model, tokens, list(windows))
    try:
        with torch.no_grad(), streaming(model, windows, see, block=8, fused=fused):
            got = model(tokens, return_type="logits", **hooks.keeping_nothing(model))[0].float()
    except Exception as error:
        return Check(name, "limited", detail=f"it raises {type(error).__name__}: {error}")
    pairs: Any = {layer: (value, of_pattern(shown[layer])) for layer, value in found().items()}
    if silent := [layer for layer in windows if layer not in pairs]:
        return Check(name, "limited", silent[0], detail=_SILENT)
    dtype = dtype_of(model)
    tolerance = STREAMED if dtype is torch.float32 else PROBABILITY[dtype]
    how = "sums over queries of a fused kernel" if fused else "attention in row blocks"
    patterns = compare(name, pairs, tolerance * (tokens.shape[1] if fused else 1), _detail(how, fused), "", scale=1.0)
    detail = f"{how} against the hooks: logits"
    logits = compare_positions(name, got.cpu(), expected.cpu(), TOLERANCE[dtype][0], detail, "")
    return next((limited(check, str(check)) for check in (patterns, logits) if check.outcome != "passed"), patterns)


def _detail(how: str, fused: bool) -> str:
    return f"{how} against the hooks" + ("" if fused else ": patterns")


def _through_hooks(
    model: HookedModel, tokens: Tensor, layers: list[int]
) -> tuple[Float[Tensor, "pos d_vocab"], dict[int, Float[Tensor, "batch head query key"]]]:
    shown: dict[str, Tensor] = {}
    names = {layer: hooks.pattern_hook(layer) for layer in layers}
    named = [(n, lambda value, hook: shown.update({hook.name: value.detach().float().cpu()})) for n in names.values()]
    options = hooks.keeping_nothing(model)
    with torch.no_grad():
        logits = model.run_with_hooks(tokens, fwd_hooks=named, return_type="logits", **options)[0].float()
    return logits, {layer: shown[name] for layer, name in names.items()}


def _assembled(blocks: list[Rows]) -> Float[Tensor, "batch head query key"]:
    """The whole pattern [batch head query key], assembled from its blocks."""
    length = max(rows.keys.stop for rows in blocks)
    whole = blocks[0].pattern.new_zeros((*blocks[0].pattern.shape[:2], length, length))
    for rows in blocks:
        whole[:, :, rows.queries, rows.keys] = rows.pattern
    return whole.cpu()
