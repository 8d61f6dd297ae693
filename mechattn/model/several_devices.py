"""Models on several devices, as accelerate dispatches them: where a part lies, and weights that are
offloaded."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mechattn.model.hooked import original_of

# In the name of a module that TransformerLens has wrapped.
WRAPPED = re.compile(r"\._?original_component")


def device_of(model: Any) -> torch.device:
    """Where a model takes its tokens, or a layer its input: with its first weights, or where these
    are brought to."""
    for module in (original_of(model) or model).modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_meta:
                return torch.device(_hook_of(module).execution_device)
            return parameter.device
    return torch.device("cpu")


def unoffloaded(model: Any, name: str, tensor: Tensor) -> Tensor:
    """A parameter or buffer of this name; if it is offloaded, what is stored of it."""
    if not tensor.is_meta:
        return tensor
    owner, _, own = name.rpartition(".")
    return _hook_of(model.get_submodule(owner)).weights_map[own]


@contextmanager
def weights_here(module: Any) -> Iterator[None]:
    """Inside a ``with`` block, the offloaded weights of a module can be read; tensors taken then
    remain."""
    from accelerate.utils import align_module_device

    submodules = module.modules() if isinstance(module, nn.Module) else ()
    with ExitStack() as stack:
        for submodule in submodules:
            if "_hf_hook" in vars(submodule):
                stack.enter_context(align_module_device(submodule))
        yield


def dispatched_like(twin: Any, model: Any) -> Any:
    """The twin, with its activations moved and its weights brought from where they are offloaded as
    the model's are."""
    from accelerate.hooks import add_hook_to_module

    hooks = {
        WRAPPED.sub("", name): vars(module)["_hf_hook"]
        for name, module in model.named_modules()
        if "_hf_hook" in vars(module)
    }
    for name, module in twin.named_modules():
        if name in hooks:
            add_hook_to_module(module, _copied(hooks[name]))
        elif any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            # A hook with the weights of all modules, not of one.
            of_all = next(
                hook
                for hook in hooks.values()
                if getattr(hook, "offload", False) and hasattr(hook.weights_map, "dataset")
            )
            add_hook_to_module(module, _copied(of_all, name))

    return twin


def _copied(hook: Any, name: str = "") -> Any:
    """The hook for another module; with its name, for a module that TransformerLens has split or
    renamed."""
    from accelerate.utils import PrefixedDataset

    copied = copy.copy(hook)
    if hasattr(hook, "hooks"):
        copied.hooks = tuple(map(_copied, hook.hooks))
    if name:
        copied.weights_map = PrefixedDataset(hook.weights_map.dataset, f"{name}.")
    return copied


def _hook_of(module: Any) -> Any:
    """The hook of accelerate that places a module's weights."""
    hook = vars(module)["_hf_hook"]
    for inner in getattr(hook, "hooks", ()):
        if getattr(inner, "offload", False):
            return inner
    return hook
