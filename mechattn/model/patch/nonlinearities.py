"""The activations of MLPs right after their nonlinearity, which no hook carries: seen, and replaced, as they pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from jaxtyping import Float
from torch import Tensor

from mechattn.errors import ModelError
from mechattn.model.attributes import attribute_set
from mechattn.model.hooks import blocks_of

_NAMES = ("act_fn", "act", "activation_fn", "gelu_impl", "activation", "activation_func")
_WRAPPER_NAMES = ("_activation_fn",)  # of a bridge that splits a fused gate and up projection, and runs it itself

# Layer, before and after the nonlinearity; what is returned, if anything, takes the place of what came after it.
SeeActivations = Callable[
    [int, Float[Tensor, "*token d_mlp"], Float[Tensor, "*token d_mlp"]], Float[Tensor, "*token d_mlp"] | None
]


@contextmanager
def at_nonlinearity(model: Any, layers: Mapping[int, SeeActivations]) -> Iterator[None]:
    """Call a function with ``pre`` and ``act(pre)`` of a layer's MLP at each forward pass; ``act(gate)`` in gated MLPs.

    What the function returns goes on in place of ``act(pre)``. Nested, the outer functions come first. The model is
    put back as it was at the end, also after an exception.

    Args:
        model: A hooked model, or a model of transformers.
        layers: The function for each layer.

    Raises:
        ModelError: A layer has no MLP whose nonlinearity is known; or, when it has run, didn't call it.
    """
    with ExitStack() as stack:
        for layer, see in layers.items():
            owner, name = nonlinearity_of(model, layer)
            watched = _Watched(getattr(owner, name), layer, see)
            stack.enter_context(attribute_set(owner, name, watched))
            stack.callback(blocks_of(model)[layer].register_forward_hook(watched.check).remove)
        yield


def nonlinearity_of(model: Any, layer: int) -> tuple[Any, str]:
    """The module of a layer that owns the nonlinearity of its MLP, and the attribute that holds it.

    Raises:
        ModelError: There is none, it is one of a mixture of experts, or there are several.
    """
    blocks = blocks_of(model)
    if not 0 <= layer < len(blocks):
        raise ModelError(f"layer {layer} is out of range: there are layers 0 to {len(blocks) - 1}")
    block = getattr(blocks[layer], "original_component", None) or blocks[layer]
    found: dict[int, tuple[Any, str]] = {}
    for path, module in block.named_modules():
        parts = path.lower().split(".")
        if parts[-1] in _NAMES or any("attention" in part or "attn" in part for part in parts):
            continue
        for name in _WRAPPER_NAMES if _is_wrapper(module) else _NAMES:
            if callable(getattr(module, name, None)):
                found.setdefault(id(getattr(module, name)), (module, name))
    if not found:
        raise ModelError(f"layer {layer} has no MLP whose nonlinearity is known to mechattn, so it cannot be looked at")
    owner, name = next(iter(found.values()))
    if len(found) > 1 or "expert" in type(owner).__name__.lower():
        raise ModelError(f"layer {layer} is a mixture of experts or has several MLPs, which are not looked at yet")
    return owner, name


def plain_nonlinearity(model: Any, layer: int) -> Callable[[Tensor], Tensor]:
    """The function itself, whoever looks at it now."""
    found = getattr(*nonlinearity_of(model, layer))
    while isinstance(found, _Watched):
        found = found.original
    return found


def _is_wrapper(module: Any) -> bool:
    """Whether a module is a bridge, which hands attributes of the module that it wraps on."""
    return getattr(module, "original_component", None) is not None


class _Watched:
    """A nonlinearity that shows what it is given and what it gives."""

    def __init__(self, original: Callable, layer: int, see: SeeActivations) -> None:
        self.original, self.layer, self.see = original, layer, see
        self.called = False

    def __call__(self, pre: Float[Tensor, "*token d_mlp"], *args: Any, **kwargs: Any) -> Float[Tensor, "*token d_mlp"]:
        self.called = True
        post = self.original(pre, *args, **kwargs)
        made = self.see(self.layer, pre, post)
        return post if made is None else made

    def check(self, block: Any, given: Any, out: Any) -> None:
        """When the layer has run: was this called?"""
        if not self.called:
            raise ModelError(
                f"layer {self.layer} has run without its nonlinearity: its MLP computes it elsewhere (weights that "
                "were folded do so), so its activations can be neither seen nor changed"
            )
        self.called = False
