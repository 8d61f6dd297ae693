"""The model behind a hooked model: the same weights in transformers's classes, with its own attention."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_PATCHED = ("transformers.models.gemma2.modeling_gemma2", "transformers.models.gemma3.modeling_gemma3")


def native_twin(bridge: Any) -> tuple[Any | None, str]:
    """A transformers model that shares the parameters of ``bridge`` and runs its default attention (usually SDPA)."""
    hooked = getattr(bridge, "original_model", None)
    if hooked is None:
        return None, f"a {type(bridge).__name__} has no transformers model behind it"
    if getattr(bridge, "_weights_processed", False):
        return None, "its weights were processed (folded or centred) in place, so the original weights are gone"
    if getattr(hooked, "is_quantized", False):
        return None, "its weights are quantised, and a second model cannot share them"
    if len(set(getattr(hooked, "hf_device_map", {}).values())) > 1:
        return None, "it is spread over several devices"
    try:
        return _rebuilt(hooked), ""
    except Exception as error:
        return None, f"it cannot be rebuilt from its configuration ({type(error).__name__}: {error})"


def _rebuilt(hooked: Any) -> Any:
    from accelerate import init_empty_weights

    config = copy.deepcopy(hooked.config)
    config._attn_implementation_internal = None  # the class chooses again: SDPA if it has it
    config.output_attentions = False
    with init_empty_weights(include_buffers=False):
        twin = type(hooked)(config)
    wanted = set(twin.state_dict())
    named = [*hooked.named_buffers(remove_duplicate=False), *hooked.named_parameters(remove_duplicate=False)]
    shared = {_own_name(name): tensor for name, tensor in named}
    twin.load_state_dict({name: shared[name] for name in wanted & set(shared)}, strict=False, assign=True)
    twin.tie_weights()
    without = [name for name, tensor in twin.named_parameters() if tensor.device.type == "meta"]
    if without:
        raise LookupError(f"the hooked model has no parameter named {without[0]}")
    device = next(hooked.parameters()).device
    for name, buffer in twin.named_buffers():
        buffer.data = shared[name].data if name in shared else buffer.data.to(device)
    return twin.eval()


def _own_name(name: str) -> str:
    """The name of a parameter before TransformerLens wrapped its module."""
    return name.replace("._original_component", "").replace(".original_component", "")


def attention_of(twin: Any) -> str:
    """The attention that a twin runs: "sdpa" or "eager"."""
    return str(getattr(twin.config, "_attn_implementation", None) or "eager")


@contextmanager
def classes_left_alone() -> Iterator[None]:
    """Undo the changes that booting a model makes to classes of transformers (TransformerLens issue 1795)."""
    import importlib

    modules: list[Any] = [importlib.import_module(name) for name in _PATCHED]
    before = [module.eager_attention_forward for module in modules]
    try:
        yield
    finally:
        for module, function in zip(modules, before, strict=True):
            module.eager_attention_forward = function
