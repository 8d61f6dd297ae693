"""Models on several devices, as accelerate dispatches them: where a part lies, and weights that are offloaded."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mechattn.model.hooked import original_of

WRAPPED = re.compile(
    r"\._?original_component"
)  # in the name of a module that TransformerLens has wrapped


def device_of(part: Any) -> torch.device:
    """Where a model takes its tokens, or a layer its input: with its first weights, or where these are brought to."""
    for module in (original_of(part) or part).modules():
        if (parameter := next(module.parameters(recurse=False), None)) is None:
            continue
        return (
            torch.device(_hook_of(module).execution_device)
            if parameter.is_meta
            else parameter.device
        )
    return torch.device("cpu")


def unoffloaded(model: Any, name: str, tensor: Tensor) -> Tensor:
    """A parameter or buffer of this name; if it is offloaded, what is stored of it."""
    if not tensor.is_meta:
        return tensor
    owner, _, own = name.rpartition(".")
    return _hook_of(model.get_submodule(owner)).weights_map[own]


@contextmanager
def weights_here(part: Any) -> Iterator[None]:
    """Inside a ``with`` block, the offloaded weights of a part of a model can be read; tensors taken then remain."""
    from accelerate.utils import align_module_device

    with ExitStack() as stack:
        for module in part.modules() if isinstance(part, nn.Module) else ():
            if "_hf_hook" in vars(module):
                stack.enter_context(align_module_device(module))
        yield


def dispatched_like(twin: Any, model: Any) -> Any:
    """The twin, with its activations moved and its weights brought from where they are offloaded as the model's are."""
    from accelerate.hooks import add_hook_to_module

    hooks = {
        WRAPPED.sub("", name): vars(part).get("_hf_hook") for name, part in model.named_modules()
    }
    for name, part in twin.named_modules():
        if (hook := hooks.get(name)) is not None:
            add_hook_to_module(part, _copied(hook))
        elif any(parameter.is_meta for parameter in part.parameters(recurse=False)):
            bringing = (each for each in hooks.values() if getattr(each, "offload", False))
            of_all = next(
                each for each in bringing if hasattr(each.weights_map, "dataset")
            )  # not of one module
            add_hook_to_module(part, _copied(of_all, name))
    return twin


def _copied(hook: Any, name: str = "") -> Any:
    """The hook for another module; with its name, for a module that TransformerLens has split or renamed."""
    from accelerate.utils import PrefixedDataset

    made = copy.copy(hook)
    if hasattr(hook, "hooks"):
        made.hooks = tuple(map(_copied, hook.hooks))
    if name:
        made.weights_map = PrefixedDataset(hook.weights_map.dataset, f"{name}.")
    return made


def _hook_of(module: Any) -> Any:
    """The hook of accelerate that places a module's weights."""
    hook = vars(module)["_hf_hook"]
    return next(
        (each for each in getattr(hook, "hooks", ()) if getattr(each, "offload", False)), hook
    )
