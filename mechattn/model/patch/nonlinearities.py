"""Reads and replaces MLP activations after the nonlinearity, which have no hook."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from mechattn.errors import ModelError
from mechattn.model.hooked import attribute_set, unwrapped
from mechattn.model.hooks import Needed, blocks_of
from mechattn.model.patch.experts import Mixture, mixture_in, watching

_NAMES = ("act_fn", "act", "activation_fn", "gelu_impl", "activation", "activation_func")
# Of a bridge that splits a fused gate and up projection and runs it itself; it forwards the names of what it wraps.
_BRIDGE_NAMES = ("_activation_fn",)

# Receives the layer and the values before and after the nonlinearity; what it returns, if anything, replaces the latter
SeeActivations = Callable[
    [int, Float[Tensor, "*token d_mlp"], Float[Tensor, "*token d_mlp"]], Float[Tensor, "*token d_mlp"] | None
]


@contextmanager
def at_nonlinearity(model: Any, layers: Mapping[int, SeeActivations]) -> Iterator[None]:
    """Call a function with ``pre`` and ``act(pre)`` (gated: ``act(gate)``) of a layer's MLP at each forward pass."""
    with ExitStack() as stack:
        for layer, see in layers.items():
            if (mixture := mixture_of(model, layer)) is not None:
                stack.enter_context(watching(model, mixture, layer, see))
                continue
            owner, name = nonlinearity_of(model, layer)
            needed = Needed(
                f"layer {layer} has run without its nonlinearity: its MLP computes it elsewhere (weights that were "
                "folded do so), so its activations can be neither seen nor changed"
            )
            stack.enter_context(attribute_set(owner, name, _Watched(getattr(owner, name), layer, see, needed)))
            stack.callback(blocks_of(model)[layer].register_forward_hook(needed.check).remove)
        yield


def mixture_of(model: Any, layer: int) -> Mixture | None:
    """The mixture of experts of a layer; None if it has an MLP instead."""
    block = _block(model, layer)
    mixture = mixture_in(block, layer)
    if mixture is not None and any(True for _ in _nonlinearities(block, beside=mixture)):
        raise ModelError(f"layer {layer} has an MLP next to its mixture of experts, which is not supported")
    return mixture


def nonlinearity_of(model: Any, layer: int) -> tuple[Any, str]:
    """The module that owns the nonlinearity of a layer's MLP, and the name of the attribute."""
    found: dict[int, tuple[Any, str]] = {}
    for place in _nonlinearities(_block(model, layer)):
        found.setdefault(id(getattr(*place)), place)
    if not found:
        raise ModelError(
            f"layer {layer} has no MLP with a nonlinearity known to mechattn, so its activations cannot be measured"
        )
    owner, name = next(iter(found.values()))
    if len(found) > 1 or "expert" in type(owner).__name__.lower():
        raise ModelError(
            f"layer {layer} has several MLPs, or experts in a form that mechattn does not know, so its activations "
            f"cannot be measured"
        )
    return owner, name


def plain_nonlinearity(model: Any, layer: int) -> Callable[[Tensor], Tensor]:
    """The nonlinearity itself, even while it is being watched."""
    if (mixture := mixture_of(model, layer)) is not None:
        return mixture.act
    found = getattr(*nonlinearity_of(model, layer))
    while isinstance(found, _Watched):
        found = found.original
    return found


def _block(model: Any, layer: int) -> Any:
    blocks = blocks_of(model)
    if not 0 <= layer < len(blocks):
        raise ModelError(f"layer {layer} is out of range: there are layers 0 to {len(blocks) - 1}")
    return unwrapped(blocks[layer])


def _nonlinearities(block: Any, beside: Mixture | None = None) -> Iterator[tuple[Any, str]]:
    """The nonlinearities of MLPs in a block, as module and attribute."""
    inside = set() if beside is None else {id(module) for module in beside.whole.modules()}
    for path, module in block.named_modules():
        parts = path.lower().split(".")
        if parts[-1] in _NAMES or any("attention" in part or "attn" in part for part in parts) or id(module) in inside:
            continue
        for name in _NAMES if unwrapped(module) is module else _BRIDGE_NAMES:
            if callable(getattr(module, name, None)):
                yield module, name


@dataclass(frozen=True)
class _Watched:
    """A nonlinearity that passes its input and output to a function."""

    original: Callable[..., Any]
    layer: int
    see: SeeActivations
    needed: Needed

    def __call__(self, pre: Float[Tensor, "*token d_mlp"], *args: Any, **kwargs: Any) -> Float[Tensor, "*token d_mlp"]:
        self.needed.called = True
        post = self.original(pre, *args, **kwargs)
        made = self.see(self.layer, pre, post)
        return post if made is None else made
