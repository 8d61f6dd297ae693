"""The twin of a hooked model: a transformers model without hooks that shares its parameters.

It runs the attention that transformers chooses for it.
"""

from __future__ import annotations

import copy
import re
from typing import Any

from mechattn.errors import ModelError, reason, warn
from mechattn.model.hooked import ModelFacts, device_of, model_creation_lock, original_of

# In the name of a module that TransformerLens has wrapped.
WRAPPED = re.compile(r"\._?original_component")


def keep_twin(model: Any, facts: ModelFacts) -> None:
    """Keep a new twin of a hooked model in its facts, or the reason why there is none."""
    facts.native = None
    facts.native_is_given = False
    facts.why_not_native = ""
    original = original_of(model)
    if original is None:
        facts.why_not_native = f"a {type(model).__name__} has no transformers model behind it"
    elif getattr(model, "_weights_processed", False):
        facts.why_not_native = (
            "its weights were processed (folded or centred) in place, so the original weights are"
            " gone"
        )
    elif getattr(original, "is_quantized", False):
        facts.why_not_native = "its weights are quantised, and a second model cannot share them"
    else:
        try:
            with model_creation_lock:
                facts.native = _rebuilt(original)
        except Exception as error:  # of the model's own class, which may be a user's
            facts.why_not_native = f"it cannot be rebuilt from its configuration ({reason(error)})"


def unhooked(model: Any) -> Any:
    """A transformers model without hooks: the given one, or a rebuilt one if it was hooked before.

    It is rebuilt with the same parameters, because TransformerLens replaces the modules of a model
    that it hooks. Other changes to the object, such as a replaced function, are lost, so a warning
    says so.

    Raises:
        ModelError: It was hooked before, and cannot be rebuilt.
    """
    if not any(WRAPPED.search(name) for name, _ in model.named_parameters()):
        return model
    warn(
        f"this {type(model).__name__} was hooked before: it is built again from its configuration"
        " and hooked with the same weights; other changes to the object are lost"
    )
    try:
        return _rebuilt(model)
    except Exception as error:
        raise ModelError(
            f"this {type(model).__name__} was hooked before and cannot be rebuilt without its hooks"
            f" ({reason(error)}); use the hooked model, or load the checkpoint again"
        ) from error


def config_for_rebuilding(model: Any) -> Any:
    """A copy of a transformers model's configuration, from which a new model makes its own choice
    of attention: SDPA if its class has it."""
    config = copy.deepcopy(model.config)
    config._attn_implementation_internal = None
    config.output_attentions = False
    return config


def _rebuilt(original: Any) -> Any:
    """A model of the same class and configuration with the same parameters.

    Raises:
        LookupError: The given model lacks a parameter, because TransformerLens left it out.
    """
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        twin = type(original)(config_for_rebuilding(original))

    tensors = [
        *original.named_buffers(remove_duplicate=False),
        *original.named_parameters(remove_duplicate=False),
    ]
    # By the names that the parameters had before TransformerLens wrapped their modules.
    shared_tensors = {WRAPPED.sub("", name): tensor for name, tensor in tensors}
    twin.load_state_dict(shared_tensors, strict=False, assign=True)
    twin.tie_weights()
    # A new model takes its settings from its configuration, which lacks end tokens that only
    # generation_config.json names.
    twin.generation_config = getattr(original, "generation_config", None)

    for name, parameter in twin.named_parameters():
        if parameter.is_meta and name not in shared_tensors:
            raise LookupError(f"the hooked model has no parameter named {name}")

    # load_state_dict leaves out buffers that are not saved with a model.
    device = device_of(original)
    for name, buffer in twin.named_buffers():
        if name in shared_tensors:
            buffer.data = shared_tensors[name].data
        else:
            buffer.data = buffer.data.to(device)

    _dispatch_like(original, twin)
    return twin.eval()


def _dispatch_like(original: Any, twin: Any) -> None:
    """Give the twin copies of accelerate's hooks on the original, which move activations between
    devices and load offloaded weights."""
    from accelerate.hooks import add_hook_to_module
    from accelerate.utils import PrefixedDataset

    hooks = {
        WRAPPED.sub("", name): vars(module)["_hf_hook"]
        for name, module in original.named_modules()
        if "_hf_hook" in vars(module)
    }
    for name, module in twin.named_modules():
        if name in hooks:
            add_hook_to_module(module, _copied(hooks[name]))
        elif any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            # TransformerLens has split or renamed this module in the original, so no hook has its
            # name. The dataset of any offloading hook holds the weights of all modules.
            offloading_hook = next(
                hook
                for hook in hooks.values()
                if getattr(hook, "offload", False) and hasattr(hook.weights_map, "dataset")
            )
            renamed_hook = _copied(offloading_hook)
            weights = offloading_hook.weights_map.dataset
            renamed_hook.weights_map = PrefixedDataset(weights, f"{name}.")
            add_hook_to_module(module, renamed_hook)


def _copied(hook: Any) -> Any:
    """A copy of a hook of accelerate, or of a sequence of hooks, for another module."""
    hook_copy = copy.copy(hook)
    if hasattr(hook, "hooks"):
        hook_copy.hooks = tuple(map(_copied, hook.hooks))
    return hook_copy
