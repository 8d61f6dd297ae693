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
from mechattn.model.hooks import RequiredCall, block_of

# The names of the attribute in transformers models, and in a bridge that splits a fused projection
# to gate and up.
_NAMES_IN_MODELS = ("act_fn", "act", "activation_fn", "gelu_impl", "activation", "activation_func")
_NAMES_IN_BRIDGES = ("_activation_fn",)

Activity = Float[Tensor, "*token d_mlp"]
Place = tuple[Any, str]  # a module, and the name of its attribute with the nonlinearity

# Called with the layer and the activations before and after the nonlinearity. What it returns
# replaces the latter; None leaves them.
SeeActivations = Callable[[int, Activity, Activity], Activity | None]


@contextmanager
def at_nonlinearity(model: Any, functions: Mapping[int, SeeActivations]) -> Iterator[None]:
    """Inside a ``with`` block, each forward pass calls a function at the nonlinearity of an MLP.

    Args:
        model: A hooked model or a transformers model.
        functions: By layer, the function, which is called with the layer, ``pre`` and
            ``act(pre)``. In a gated MLP, ``pre`` is the gate.

    Raises:
        OptionError: There is no such layer.
        ModelError: A layer has no MLP with a known nonlinearity, or several; or, inside the block,
            a layer has run without calling its nonlinearity.
    """
    with ExitStack() as stack:
        for layer, see in functions.items():
            owner, name = nonlinearity_of(model, layer)
            required_call = RequiredCall(
                f"layer {layer} has run without its nonlinearity: its MLP computes it elsewhere"
                " (weights that were folded do so), so its activations can be neither seen nor"
                " changed"
            )
            watched = _WatchedNonlinearity(getattr(owner, name), layer, see, required_call)
            stack.enter_context(attribute_set(owner, name, watched))
            handle = block_of(model, layer).register_forward_hook(required_call.check)
            stack.callback(handle.remove)
        yield


def nonlinearity_of(model: Any, layer: int) -> Place:
    """The place of the nonlinearity of a layer's MLP.

    Raises:
        OptionError: There is no such layer.
        ModelError: The layer is a mixture of experts, has several MLPs, or has no MLP with a known
            nonlinearity.
    """
    block = unwrapped(block_of(model, layer))
    if any("expert" in path.lower() for path, _ in block.named_modules()):
        raise ModelError(
            f"layer {layer} is a mixture of experts; MlpActivations and ARM need an MLP that all"
            " tokens go through, so leave them out, or name other layers"
        )

    # By the id of the nonlinearity, because one may be an attribute of several modules.
    places: dict[int, Place] = {}
    for module, name in _nonlinearities(block):
        places.setdefault(id(getattr(module, name)), (module, name))

    if len(places) != 1:
        mlps = "several MLPs" if places else "no MLP with a nonlinearity known to mechattn"
        raise ModelError(f"layer {layer} has {mlps}, so its activations cannot be measured")
    return next(iter(places.values()))


def plain_nonlinearity(model: Any, layer: int) -> Callable[[Tensor], Tensor]:
    """The nonlinearity of a layer's MLP itself, even inside ``at_nonlinearity``."""
    owner, name = nonlinearity_of(model, layer)
    nonlinearity = getattr(owner, name)
    while isinstance(nonlinearity, _WatchedNonlinearity):
        nonlinearity = nonlinearity.original
    return nonlinearity


def _nonlinearities(block: Any) -> Iterator[Place]:
    """The places of the nonlinearities of a block's MLPs."""
    for path, module in block.named_modules():
        path_parts = path.lower().split(".")
        # A nonlinearity is left out as a module, because it may have an attribute of such a name.
        is_nonlinearity = path_parts[-1] in _NAMES_IN_MODELS
        is_attention = any("attention" in part or "attn" in part for part in path_parts)
        if is_nonlinearity or is_attention:
            continue

        # A bridge also has the attributes of the module that it wraps, which is visited itself.
        is_bridge = unwrapped(module) is not module
        names = _NAMES_IN_BRIDGES if is_bridge else _NAMES_IN_MODELS
        for name in names:
            if callable(getattr(module, name, None)):
                yield module, name


@dataclass(frozen=True)
class _WatchedNonlinearity:
    """A nonlinearity that calls a function with its input and output."""

    original: Callable[..., Any]
    layer: int
    see: SeeActivations
    required_call: RequiredCall

    def __call__(self, pre: Activity, *args: Any, **kwargs: Any) -> Activity:
        self.required_call.called = True
        post = self.original(pre, *args, **kwargs)
        replacement = self.see(self.layer, pre, post)
        if replacement is None:
            return post
        return replacement
