"""What is asked of a hooked model: hook names, sizes, windows, and a forward pass that hands over patterns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechattn.errors import OptionError

SeePattern = Callable[[int, Float[Tensor, "batch head query key"]], None]


def pattern_hook(layer: int) -> str:
    """The hook at which the attention pattern of a layer passes."""
    return f"blocks.{layer}.attn.hook_pattern"


def attention_layers(model: Any) -> list[int]:
    """The layers that have attention; not every layer of every model has."""
    return [layer for layer in range(model.cfg.n_layers) if pattern_hook(layer) in model.hook_dict]


def chosen_layers(model: Any, layers: Iterable[int] | int | None) -> list[int]:
    """The layers to look at, checked: all that have attention by default.

    Raises:
        OptionError: A layer doesn't exist or has no attention.
    """
    have = attention_layers(model)
    if layers is None:
        return have
    chosen = [layers] if isinstance(layers, int) else list(layers)
    for layer in chosen:
        if layer not in have:
            raise OptionError(f"layer {layer} is out of range: {model.cfg.model_name} has {_ranges(have)}")
    if not chosen:
        raise OptionError("layers=[] chooses nothing; leave it out for all layers")
    return sorted(set(chosen))


def _ranges(layers: list[int]) -> str:
    if layers == list(range(layers[0], layers[-1] + 1)):
        return f"attention in layers {layers[0]} to {layers[-1]}"
    return f"attention in layers {', '.join(map(str, layers))}"


def attention_window(model: Any, layer: int) -> int | None:
    """How many keys a query of this layer can see at most, its own included; None for full attention."""
    config = getattr(getattr(model, "original_model", None), "config", None)
    config = getattr(config, "text_config", config)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window is None or (kinds is not None and kinds[layer] != "sliding_attention"):
        return None
    if kinds is None and not getattr(config, "use_sliding_window", True):
        return None
    return int(window)


def count_parameters(model: Any) -> int:
    """Number of distinct parameters; a tied embedding counts once."""
    source = getattr(model, "original_model", model)
    return sum(p.numel() for p in {id(p): p for p in source.parameters()}.values())


def forward_with_patterns(
    model: Any,
    tokens: Int[Tensor, "batch pos"],
    real: Tensor,
    layers: list[int],
    see: SeePattern,
) -> None:
    """One forward pass; ``see(layer, pattern)`` is called as each layer's pattern passes, and nothing is kept.

    Args:
        model: A hooked model.
        tokens: Token ids, padded on the right.
        real: Which positions hold tokens, not padding [batch pos].
        layers: The layers whose patterns are wanted.
        see: Reduces a pattern [batch head query key] at once.
    """

    def hook(layer: int) -> tuple[str, Callable]:
        def reduce(pattern: Tensor, hook: Any) -> None:
            see(layer, pattern.detach())

        return pattern_hook(layer), reduce

    device = next(model.parameters()).device
    mask = {} if bool(real.all()) else {"attention_mask": real.to(device).long()}
    with torch.no_grad():
        model.run_with_hooks(tokens.to(device), fwd_hooks=[hook(layer) for layer in layers], return_type=None, **mask)
