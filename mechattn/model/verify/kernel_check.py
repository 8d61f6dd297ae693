"""Compares the pattern at the hooks with that of the attention which the model itself runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from mechattn.functional.attention import Pattern, Tokens
from mechattn.model import hooks
from mechattn.model.hooked import HookedModel
from mechattn.model.verify.verification import Check, compare, what_to_try

# In a probability. In float32, deeper layers accumulate rounding errors: 4e-5 seen with scores in
# the hundreds; a wrong mask, scale or head gives at least 0.01. In half precision they usually
# differ by 0.05, and by 0.18 (0.03 in float16) with large scores.
KERNEL_TOLERANCE = {
    torch.float64: 1e-6,
    torch.float32: 2e-4,
    torch.float16: 1e-1,
    torch.bfloat16: 3e-1,
}

# The arguments of scaled_dot_product_attention, in order.
SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def attention_of(native: Any) -> str:
    """The attention that a model of transformers runs: "sdpa" or "eager"."""
    return str(getattr(native.config, "_attn_implementation", None) or "eager")


def run_native(
    native: Any, tokens: Tokens
) -> tuple[Float[Tensor, "batch pos d_vocab"], list[Pattern], str]:
    """Logits of the model itself, the pattern of each of its attention calls, and how the patterns
    were obtained."""
    options = {"output_attentions": True} if attention_of(native) == "eager" else {}
    with torch.no_grad(), _ThroughIdentity() as sdpa_calls:
        output = native(tokens, use_cache=False, **options)

    if sdpa_calls.patterns:
        return output.logits, sdpa_calls.patterns, "SDPA with identity values"
    attentions = getattr(output, "attentions", None) or ()
    patterns = [pattern for pattern in attentions if pattern is not None]
    return output.logits, patterns, "the weights of eager attention"


class _ThroughIdentity(TorchFunctionMode):
    """Repeats each call of SDPA in this thread with blocks of identity matrices as values.

    Since A · I = A, the output is the pattern of that call, by whichever kernel torch chooses for
    it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patterns: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            arguments = dict(zip(SDPA_ARGUMENTS, args)) | kwargs
            keys, width = arguments["value"].shape[-2:]
            blocks = []
            for start in range(0, keys, width):
                identity = arguments["value"].new_zeros(arguments["value"].shape)
                diagonal = identity[..., start : start + width, :].diagonal(dim1=-2, dim2=-1)
                diagonal.fill_(1)  # V[k, c] = 1 where k = start + c
                blocks.append(func(**arguments | {"value": identity}))
            self.patterns.append(torch.cat(blocks, -1)[..., :keys])
        return func(*args, **kwargs)


def check_kernel(
    model: HookedModel,
    hook_values: Mapping[str, Tensor],
    patterns: list[Pattern],
    source: str,
    dtype: torch.dtype,
) -> Check:
    """Compare the pattern of each layer at the hooks with that of the model's own attention."""
    layers = hooks.attention_layers(model)
    if len(patterns) != len(layers):
        calls = f"{len(patterns)} calls of attention were seen in {len(layers)} layers"
        return Check(
            "kernel", "not checked", detail=f"the model's own attention cannot be read: {calls}"
        )

    pairs: dict[int, tuple[Tensor, Tensor]] = {}
    for layer, pattern in zip(layers, patterns, strict=True):
        hooked = hook_values.get(hooks.pattern_hook(layer))
        if hooked is not None and hooked[:1].shape == pattern.shape:
            pairs[layer] = (hooked[0], pattern[0].float().cpu())

    detail = f"hook_pattern against the pattern of the model's own attention, by {source}"
    remedy = f"the hooks' pattern differs from the one that the model uses; {what_to_try(dtype)}"
    return compare("kernel", pairs, KERNEL_TOLERANCE[dtype], detail, remedy, scale=1.0)
