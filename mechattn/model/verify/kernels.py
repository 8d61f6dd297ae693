"""Checks other computations of attention against the hooks: the model's own kernel, row blocks, a fused kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from mechattn.functional.fused import Fused
from mechattn.functional.rows import Rows
from mechattn.model import hooks
from mechattn.model.hooked import HookedModel
from mechattn.model.patch.streaming import streaming, why_not
from mechattn.model.verify.verification import (
    PROBABILITY,
    PROBE,
    TOLERANCE,
    Check,
    compare,
    compare_positions,
    dtype_of,
    limited,
    probe_tokens,
)

# In a probability. In float32, deeper layers accumulate rounding errors: 4e-5 seen with scores in the hundreds; a wrong
# mask, scale or head gives at least 0.01. In half precision they usually differ by 0.05, and by 0.18 (0.03 in float16)
# with large scores.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4, torch.float16: 1e-1, torch.bfloat16: 3e-1}
# In row blocks: scores in the hundreds, as in large models, are rounded by 3e-5 in float32, and later layers enlarge
# the effect of a layer's rounding: 4e-5 seen in the third of three wide layers. A wrong mask or scale gives 0.01.
_STREAMED = 2e-4
# In half precision the hooks' own scores are rounded to 8 or 11 bits, so that one probability may differ by 0.15
# (0.04 in float16) where nothing is wrong: judged by the root mean square of a layer's differences, in that of its
# pattern. With 30 architectures and four toys it is at most 0.042 (0.0085); a wrong window, sink, slope, head or
# rotation gives 0.12 and more, but a scale that is 5 % off only 0.03, which a check in float32 notices.
_IN_HALF = {torch.float16: 2e-2, torch.bfloat16: 8e-2}
_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # its arguments in order


def attention_of(native: Any) -> str:
    """The attention that a model of transformers runs: "sdpa" or "eager"."""
    return str(getattr(native.config, "_attn_implementation", None) or "eager")


def run_native(
    native: Any, tokens: Int[Tensor, "batch pos"]
) -> tuple[Float[Tensor, "batch pos d_vocab"], list[Float[Tensor, "batch head query key"]], str]:
    """Logits of the model itself, the pattern of each of its attention calls, and how the patterns were obtained.

    If the model calls SDPA, the same call, with whichever kernel torch chooses, is repeated with blocks of identity
    matrices as values. Since ``A · I = A``, the output is the pattern of that kernel; this takes ⌈keys / d_value⌉ calls
    per layer. If the model computes attention eagerly, it returns the weights that it uses.
    """
    eager = attention_of(native) == "eager"
    with torch.no_grad(), _ThroughIdentity() as seen:
        out = native(tokens, use_cache=False, **({"output_attentions": True} if eager else {}))
    if seen.patterns:
        return out.logits, seen.patterns, "SDPA with identity values"
    shown = [pattern for pattern in getattr(out, "attentions", None) or () if pattern is not None]
    return out.logits, shown, "the weights of eager attention"


class _ThroughIdentity(TorchFunctionMode):
    """Repeats each call of SDPA in this thread with identity values."""

    def __init__(self) -> None:
        super().__init__()
        self.patterns: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is scaled_dot_product_attention:
            named = dict(zip(_SDPA, args)) | given
            value, blocks = named["value"], []
            for start in range(0, value.shape[-2], value.shape[-1]):
                blocks.append(func(**named | {"value": _identity_like(value, start)}))
            self.patterns.append(torch.cat(blocks, -1)[..., : value.shape[-2]])
        return func(*args, **given)


def _identity_like(value: Float[Tensor, "... key d_value"], start: int) -> Float[Tensor, "... key d_value"]:
    """``V[k, c] = 1`` where ``k = start + c``."""
    block = torch.zeros(value.shape[-2:], dtype=value.dtype, device=value.device)
    count = min(value.shape[-1], value.shape[-2] - start)
    block[start : start + count, :count] = torch.eye(count, dtype=value.dtype, device=value.device)
    return block.expand_as(value).contiguous()


def check_kernel(
    model: HookedModel,
    shown: dict[str, Tensor],
    patterns: list[Float[Tensor, "batch head query key"]],
    how: str,
    dtype: torch.dtype,
) -> Check:
    """Compare the pattern of each layer at the hooks with that of the model's own attention."""
    layers = hooks.attention_layers(model)
    if len(patterns) != len(layers):
        calls = f"{len(patterns)} calls of attention were seen in {len(layers)} layers"
        return Check("kernel", "not checked", detail=f"the model's own attention cannot be read: {calls}")
    pairs: dict[int, tuple[Tensor, Tensor]] = {}
    for layer, pattern in zip(layers, patterns, strict=True):
        hooked = shown.get(hooks.pattern_hook(layer))
        if hooked is not None and hooked[:1].shape == pattern.shape:
            pairs[layer] = (hooked[0], pattern[0].float().cpu())
    detail = f"hook_pattern against the pattern of the model's own attention, by {how}"
    remedy = "the hooks' pattern differs from the one that the model uses; try another version, or report it"
    return compare("kernel", pairs, _TOLERANCE[dtype], detail, remedy, scale=1.0)


def check_streaming(model: HookedModel) -> Check:
    """Check that attention in blocks of rows gives the same logits and patterns as the hooks, on the probe."""
    return _against_hooks(model, "streaming", "attention in row blocks", fused=False)


def check_fused(model: HookedModel) -> Check:
    """Check that a fused kernel gives the hooks' logits, and the sums of their patterns over queries, on the probe."""
    return _against_hooks(model, "fused", "sums over queries of a fused kernel", fused=True)


def _against_hooks(model: HookedModel, name: str, how: str, fused: bool) -> Check:
    """Compare a pass without hooks with one through them, layer by layer: patterns, or with ``fused`` their sums."""
    if reason := why_not(model):
        return Check(name, "limited", detail=reason)
    tokens = probe_tokens(model, PROBE).to(next(model.parameters()).device)
    windows = {layer: hooks.attention_window(model, layer) for layer in hooks.attention_layers(model)}
    expected, shown = hooks.logits_and_values(model, tokens, map(hooks.pattern_hook, windows))
    patterns = {layer: shown[hooks.pattern_hook(layer)].float().cpu() for layer in windows}
    found: dict[int, Tensor] = {}
    blocks: dict[int, list[Rows]] = {}

    def see(layer: int, seen: Rows | Fused) -> None:
        if isinstance(seen, Fused):
            found[layer] = seen.column_sums(_groups(seen.own.shape[-1]).to(seen.own)).cpu()
        else:
            blocks.setdefault(layer, []).append(replace(seen, pattern=seen.pattern.clone()))

    try:
        with torch.no_grad(), streaming(model, windows, see, block=8, fused=fused):
            got = model(tokens, return_type="logits", **hooks.keeping_nothing(model))[0].float()
    except Exception as error:
        return Check(name, "limited", detail=f"it raises {type(error).__name__}: {error}")
    found |= {layer: _sums(_assembled(rows)) if fused else _assembled(rows) for layer, rows in blocks.items()}
    if silent := [layer for layer in windows if layer not in found]:
        return Check(name, "limited", silent[0], detail="its attention function cannot be replaced")
    pairs = {n: (found[n], _sums(patterns[n]) if fused else patterns[n]) for n in windows if n in found}
    dtype = dtype_of(model)
    overall = dtype in _IN_HALF and not fused
    tolerance = _IN_HALF[dtype] if overall else _STREAMED if dtype is torch.float32 else PROBABILITY[dtype]
    tolerance *= tokens.shape[1] if fused else 1
    detail = f"{how} against the hooks"
    about = detail + ("" if fused else ": patterns" + ", root mean square" * overall)
    checks = (
        compare(name, pairs, tolerance, about, "", None if overall else 1.0, overall),
        compare_positions(name, got.cpu(), expected[0].float().cpu(), TOLERANCE[dtype][0], f"{detail}: logits", ""),
    )
    return next((limited(check, str(check)) for check in checks if check.outcome != "passed"), checks[0])


def _assembled(blocks: list[Rows]) -> Float[Tensor, "batch head query key"]:
    """The whole pattern, assembled from its blocks."""
    length = max(rows.keys.stop for rows in blocks)
    whole = blocks[0].pattern.new_zeros((*blocks[0].pattern.shape[:2], length, length))
    for rows in blocks:
        whole[:, :, rows.queries, rows.keys] = rows.pattern
    return whole.cpu()


def _sums(pattern: Float[Tensor, "batch head query key"]) -> Float[Tensor, "batch head key 2"]:
    """What the keys receive from all queries, and from every second one."""
    turned = rearrange(pattern, "batch head query key -> batch head key query")
    return turned @ _groups(pattern.shape[-1])[:, None].to(pattern)


def _groups(queries: int) -> Float[Tensor, "1 query 2"]:
    every = torch.ones(queries)
    return torch.stack([every, every.cumsum(0) % 2], -1)[None]
