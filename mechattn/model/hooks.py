"""Hook names, layers and windows of a hooked model, and its forward passes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from mechattn.errors import ModelError, OptionError
from mechattn.functional.attention import Tokens
from mechattn.model.architectures import particulars_of
from mechattn.model.hooked import (
    HookedModel,
    attribute_set,
    config_of,
    device_of,
    original_of,
    unwrapped,
    weights_here,
)

# The method in which a bridge computes a norm twice: with the module of transformers, and again for
# the values of the norm's two hooks (transformer-lens 3.9 to 4.3). Without it nothing can be saved.
_NORM_COMPUTED_TWICE = "_hf_autograd_forward_with_hooks"
Hooks = list[tuple[str, Callable]]  # the name of each hook, and the function called there


def pattern_hook(layer: int) -> str:
    """The hook of a layer's attention pattern."""
    return f"blocks.{layer}.attn.hook_pattern"


def attention_layers(model: HookedModel) -> list[int]:
    """The layers that have attention. In some models not all have it."""
    hook_dict = model.hook_dict  # rebuilt at each access, which takes 0.1 ms per layer
    return [layer for layer in range(model.cfg.n_layers) if pattern_hook(layer) in hook_dict]


def chosen_layers(model: HookedModel, layers: Iterable[int] | int | None) -> list[int]:
    """The layers to measure, in order; all that have attention if ``layers`` is None.

    Raises:
        ModelError: No layer has attention.
        OptionError: ``layers`` is empty, or one of them is not a whole number or has no attention.
    """
    attending_layers = attention_layers(model)
    if not attending_layers:
        raise ModelError(
            f"{model.cfg.model_name} has no layer with attention (or none whose hook_pattern"
            " TransformerLens fires), so there is no attention to analyse"
        )

    if layers is None:
        return attending_layers

    requested_layers = list(layers) if isinstance(layers, Iterable) else [layers]
    if not requested_layers:
        raise OptionError("layers=[] selects no layers; omit it for all layers")
    for layer in requested_layers:
        if isinstance(layer, bool) or not isinstance(layer, Integral):
            raise OptionError(f"layers={layers!r}: give whole numbers, or omit it for all layers")
        if layer not in attending_layers:
            first = attending_layers[0]
            last = attending_layers[-1]
            layer_words = f"{first} to {last}"
            if len(attending_layers) != last - first + 1:
                layer_words = ", ".join(map(str, attending_layers))
            raise OptionError(
                f"layer {layer} is out of range: {model.cfg.model_name} has attention in layers"
                f" {layer_words}"
            )

    return sorted({int(layer) for layer in requested_layers})


def attention_window(model: HookedModel, layer: int) -> int | None:
    """The largest number of keys that a query of this layer can see, including its own; None for
    full attention.

    Raises:
        ModelError: The layer's kind of attention is unknown, such as attention in chunks.
    """
    config = config_of(model) or model.cfg
    particulars = particulars_of(model)
    window = getattr(config, particulars.window_field, None)
    kinds = None
    if particulars.kinds_field is not None:
        kinds = getattr(config, particulars.kinds_field, None)

    if kinds is None:
        is_used = getattr(config, "use_sliding_window", True)
        return int(window) if window and is_used else None
    kind = kinds[layer]
    if kind in ("full_attention", "global"):
        return None
    if kind in ("sliding_attention", "local") and window:
        return int(window)
    raise ModelError(
        f"layer {layer} has {kind!r}, and mechattn does not know which keys its queries see"
    )


def sinks_of(model: HookedModel, layer: int) -> Float[Tensor, " head"] | None:
    """The score of each head's learned sink, as in GPT-OSS; None in a layer without sinks.

    A sink gets part of the attention of every query.
    """
    module = unwrapped(model.blocks[layer].attn)
    with weights_here(module):
        sinks = getattr(module, "sinks", None)
        if not isinstance(sinks, nn.Parameter):
            return None
        return sinks.detach().float()


def forward_to(
    model: HookedModel,
    tokens: Tokens,
    last_layer: int,
    fwd_hooks: Hooks,
    position_ids: Tokens | None = None,
    **options: Any,
) -> None:
    """A forward pass that stops after a layer and keeps no cache.

    After the model's last layer, logits are computed as well, at the last position only if the
    model allows this.
    """
    if position_ids is not None:
        # Without a mask, transformers takes position ids with gaps for several packed sequences,
        # and keeps these apart.
        options.setdefault("attention_mask", torch.ones_like(tokens))
        options["position_ids"] = position_ids

    options |= without_cache(model)
    stops_early = last_layer < model.cfg.n_layers - 1
    if stops_early:
        options["stop_at_layer"] = last_layer + 1
    elif "logits_to_keep" in _argument_names(model):
        options |= last_logits_only(model)

    with torch.no_grad(), norms_once(model):
        if fwd_hooks or stops_early:
            model.run_with_hooks(tokens, fwd_hooks=fwd_hooks, return_type=None, **options)
        else:  # the same, without building a list of every hook
            model(tokens, return_type=None, **options)


def logits_and_values(
    model: HookedModel, tokens: Tokens, names: Iterable[str]
) -> tuple[Float[Tensor, "... pos d_vocab"], dict[str, Tensor]]:
    """The logits of a forward pass, and the tensors at the hooks with these names."""
    activations: dict[str, Tensor] = {}

    def keep(value: Any, hook: Any, name: str) -> None:
        if isinstance(value, Tensor):
            activations[name] = value.detach().clone()  # some modules add to it in place

    fwd_hooks: Hooks = [(name, partial(keep, name=name)) for name in names]
    options = without_cache(model)
    with torch.no_grad():
        logits = model.run_with_hooks(tokens, fwd_hooks=fwd_hooks, return_type="logits", **options)
    return logits, activations


def few_tokens(model: Any, count: int) -> Int[Tensor, "1 pos"]:
    """Tokens 5, 6 … on which a hooked model or a transformers model is tried.

    The first tokens of a vocabulary are left out, because they are often special.
    """
    return torch.arange(5, 5 + count, device=device_of(model))[None]


def without_cache(model: HookedModel) -> dict[str, bool]:
    """The option with which a forward pass keeps no cache; empty if the model does not have it."""
    if "use_cache" not in _argument_names(model):
        return {}
    return {"use_cache": False}


def last_logits_only(model: Any) -> dict[str, int]:
    """The option to compute logits at the last position only, for a model with ``logits_to_keep``.

    Empty for a model whose last layers read the keys of earlier ones (Gemma 4): with the option,
    transformers would run these layers too at the last position only.
    """
    if getattr(config_of(model), "num_kv_shared_layers", 0):
        return {}
    return {"logits_to_keep": 1}


def blocks_of(model: Any) -> nn.ModuleList:
    """The layers of a hooked model or a transformers model.

    Those of a transformers model are the longest of its lists of modules.

    Raises:
        ModelError: The model has no list of layers.
    """
    hooked_blocks = getattr(model, "blocks", None)
    if hooked_blocks is not None:
        return hooked_blocks
    module_lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not module_lists:
        raise ModelError(f"a {type(model).__name__} has no list of layers")
    return max(module_lists, key=len)


def block_of(model: Any, layer: int) -> Any:
    """A layer of a hooked model or a transformers model.

    Raises:
        OptionError: There is no such layer.
    """
    blocks = blocks_of(model)
    if not 0 <= layer < len(blocks):
        raise OptionError(f"layer {layer} is out of range: there are layers 0 to {len(blocks) - 1}")
    return blocks[layer]


@dataclass
class RequiredCall:
    """A call that must happen while a layer runs.

    ``check`` is a forward hook of the layer. It refuses a layer that has run without the call.
    """

    refusal: str
    called: bool = False

    def check(self, block: Any, args: Any, output: Any) -> None:
        """Raise ``refusal`` as a ``ModelError`` if the call did not happen."""
        if not self.called:
            raise ModelError(self.refusal)
        self.called = False  # for the next pass


@contextmanager
def norms_once(model: Any) -> Iterator[None]:
    """Inside a ``with`` block, a bridge computes each norm only once, with the module of
    transformers. The result is the same."""
    # The norms of the model, its blocks and their parts. A search for deeper ones would take longer
    # than it saves.
    owners = [model, *model.blocks]
    for block in model.blocks:
        owners += block.children()

    with ExitStack() as stack:
        for owner in owners:
            for norm in owner.children():
                if hasattr(type(norm), _NORM_COMPUTED_TWICE):
                    compute_twice = getattr(norm, _NORM_COMPUTED_TWICE)
                    compute_once = partial(_computed_once, norm, compute_twice)
                    stack.enter_context(attribute_set(norm, _NORM_COMPUTED_TWICE, compute_once))
        yield


def split_heads(
    joint: Float[Tensor, "batch pos *rest"], head_count: int
) -> Float[Tensor, "batch pos {head_count} d_head"]:
    """Queries, keys, values or z by head, however a bridge splits the last dimensions."""
    if joint.ndim == 4 and joint.shape[2] == head_count:
        return joint
    flat = joint.flatten(2)
    return rearrange(flat, "batch pos (head d_head) -> batch pos head d_head", head=head_count)


def _argument_names(model: HookedModel) -> set[str]:
    """The names of the arguments that the forward pass of the transformers model behind the hooks
    takes; empty for a ``HookedTransformer``."""
    original = original_of(model)
    if original is None:
        return set()
    return set(inspect.signature(original.forward).parameters)


def _computed_once(
    norm: Any, compute_twice: Callable[[Tensor], Tensor], x: Float[Tensor, "*batch channel"]
) -> Float[Tensor, "*batch channel"]:
    """The output of a norm's own module, or of ``compute_twice`` if a hook in the norm is used."""
    for hook_point in (norm.hook_scale, norm.hook_normalized):
        if hook_point._forward_hooks or hook_point._forward_pre_hooks or hook_point._backward_hooks:
            return compute_twice(x)
    return norm.original_component(x).to(x.dtype)
