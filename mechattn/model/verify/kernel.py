"""Reads the pattern of the attention kernel that a model runs, by passing identity matrices as values."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from mechattn.model.hooked import HookedModel
from mechattn.model.hooks import attention_layers, pattern_hook
from mechattn.model.verify.native import attention_of
from mechattn.model.verify.tensor_differences import compare
from mechattn.model.verify.verification import Check

# In a probability. In float32, deeper layers accumulate rounding errors: 4e-5 seen with scores in the hundreds; a wrong
# mask, scale or head gives at least 0.01. In half precision they usually differ by 0.05, and by 0.18 (0.03 in float16)
# with large scores.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4, torch.float16: 1e-1, torch.bfloat16: 3e-1}
_REMEDY = "the hooks' pattern differs from the one that the model uses; try another version, or report it"


def run_native(
    twin: Any, tokens: Int[Tensor, "batch pos"]
) -> tuple[Float[Tensor, "batch pos d_vocab"], list[Float[Tensor, "batch head query key"]], str]:
    """Logits of the model itself, the pattern of each of its attention calls, and how the patterns were obtained.

    If the model calls SDPA, the same call, with whichever kernel torch chooses, is repeated with blocks of identity
    matrices as values. Since ``A · I = A``, the output is the pattern of that kernel; this takes ⌈keys / d_value⌉ calls
    per layer. If the model computes attention eagerly, it returns the weights that it uses.
    """
    eager = attention_of(twin) == "eager"
    with torch.no_grad(), _ThroughIdentity() as seen:
        out = twin(tokens, use_cache=False, **({"output_attentions": True} if eager else {}))
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
            self.patterns.append(_pattern(func, args, given))
        return func(*args, **given)


def _pattern(kernel: Any, args: tuple, given: dict[str, Any]) -> Float[Tensor, "batch head query key"]:
    named = "value" in given
    value = given["value"] if named else args[2]
    blocks = []
    for start in range(0, value.shape[-2], value.shape[-1]):
        block = _identity_like(value, start)
        blocks.append(
            kernel(*args, **given | {"value": block}) if named else kernel(*args[:2], block, *args[3:], **given)
        )
    return torch.cat(blocks, -1)[..., : value.shape[-2]]


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
    layers = attention_layers(model)
    if len(patterns) != len(layers):
        calls = f"{len(patterns)} calls of attention were seen in {len(layers)} layers"
        return Check("kernel", "not checked", detail=f"the model's own attention cannot be read: {calls}")
    pairs: dict[int, tuple[Tensor, Tensor]] = {}
    for layer, pattern in zip(layers, patterns, strict=True):
        hooked = shown.get(pattern_hook(layer))
        if hooked is not None and hooked[:1].shape == pattern.shape:
            pairs[layer] = (hooked[0], pattern[0].float().cpu())
    detail = f"hook_pattern against the pattern of the model's own attention, by {how}"
    return compare("kernel", pairs, _TOLERANCE[dtype], detail, _REMEDY, scale=1.0)
