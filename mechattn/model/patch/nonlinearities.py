"""Reads and replaces MLP activations after the nonlinearity, which have no hook; also those of
mixtures of experts."""

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
from mechattn.model.patch.mixtures import Mixture, mixture_in, watching

# What families call the attribute; a bridge that splits a fused gate and up projection has its own.
NAMES = ("act_fn", "act", "activation_fn", "gelu_impl", "activation", "activation_func")
NAMES_IN_BRIDGES = ("_activation_fn",)

Activity = Float[Tensor, "*token d_mlp"]

# Takes the layer and the values before and after the nonlinearity; what it returns, if anything,
# replaces the latter.
SeeActivations = Callable[[int, Activity, Activity], Activity | None]


@contextmanager
def at_nonlinearity(model: Any, layers: Mapping[int, SeeActivations]) -> Iterator[None]:
    """Call a function with ``pre`` and ``act(pre)`` (gated: ``act(gate)``) of a layer's MLP at each
    forward pass."""
    with ExitStack() as stack:
        for layer, see in layers.items():
            mixture = mixture_of(model, layer)
            if mixture is not None:
                stack.enter_context(watching(model, mixture, layer, see))
                continue

            owner, name = nonlinearity_of(model, layer)
            needed = Needed(
                f"layer {layer} has run without its nonlinearity: its MLP computes it elsewhere"
                " (weights that were folded do so), so its activations can be neither seen nor"
                " changed"
            )
            watched = _Watched(getattr(owner, name), layer, see, needed)
            stack.enter_context(attribute_set(owner, name, watched))
            stack.callback(blocks_of(model)[layer].register_forward_hook(needed.check).remove)
        yield


def mixture_of(model: Any, layer: int) -> Mixture | None:
    """The mixture of experts of a layer; None if it has an MLP instead."""
    block = _block(model, layer)
    mixture = mixture_in(block, layer)
    if mixture is not None and any(True for _ in _nonlinearities(block, beside=mixture)):
        raise ModelError(
            f"layer {layer} has an MLP next to its mixture of experts, which is not supported"
        )
    return mixture


def nonlinearity_of(model: Any, layer: int) -> tuple[Any, str]:
    """The module that owns the nonlinearity of a layer's MLP, and the name of the attribute."""
    places: dict[int, tuple[Any, str]] = {}
    for module, name in _nonlinearities(_block(model, layer)):
        places.setdefault(id(getattr(module, name)), (module, name))
    if not places:
        raise ModelError(
            f"layer {layer} has no MLP with a nonlinearity known to mechattn, so its activations"
            " cannot be measured"
        )

    owner, name = next(iter(places.values()))
    if len(places) > 1 or "expert" in type(owner).__name__.lower():
        raise ModelError(
            f"layer {layer} has several MLPs, or experts in a form that mechattn does not know, so"
            " its activations cannot be measured"
        )
    return owner, name


def plain_nonlinearity(model: Any, layer: int) -> Callable[[Tensor], Tensor]:
    """The nonlinearity itself, even while it is being watched."""
    mixture = mixture_of(model, layer)
    if mixture is not None:
        return mixture.act

    owner, name = nonlinearity_of(model, layer)
    nonlinearity = getattr(owner, name)
    while isinstance(nonlinearity, _Watched):
        nonlinearity = nonlinearity.original
    return nonlinearity


def _block(model: Any, layer: int) -> Any:
    blocks = blocks_of(model)
    if not 0 <= layer < len(blocks):
        raise ModelError(f"layer {layer} is out of range: there are layers 0 to {len(blocks) - 1}")
    return unwrapped(blocks[layer])


def _nonlinearities(block: Any, beside: Mixture | None = None) -> Iterator[tuple[Any, str]]:
    """The nonlinearities of MLPs in a block, as module and attribute; not those of a mixture."""
    of_mixture = set()
    if beside is not None:
        of_mixture = {id(module) for module in beside.whole.modules()}

    for path, module in block.named_modules():
        path_parts = path.lower().split(".")
        is_nonlinearity = path_parts[-1] in NAMES  # rather than the owner of one
        is_attention = any("attention" in part or "attn" in part for part in path_parts)
        if is_nonlinearity or is_attention or id(module) in of_mixture:
            continue

        # A bridge forwards the names of what it wraps.
        is_bridge = unwrapped(module) is not module
        for name in NAMES_IN_BRIDGES if is_bridge else NAMES:
            if callable(getattr(module, name, None)):
                yield module, name


@dataclass(frozen=True)
class _Watched:
    """A nonlinearity that passes its input and output to a function."""

    original: Callable[..., Any]
    layer: int
    see: SeeActivations
    needed: Needed

    def __call__(self, pre: Activity, *args: Any, **kwargs: Any) -> Activity:
        self.needed.called = True
        post = self.original(pre, *args, **kwargs)
        replacement = self.see(self.layer, pre, post)
        return post if replacement is None else replacement
