"""The state in which a model was verified, so that what is changed on it afterwards is noticed
before a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mechattn.errors import ModelError
from mechattn.model.hooked import HookedModel, modules_of, original_of
from mechattn.model.several_devices import WRAPPED

State = Mapping[str, dict[str, Any]]  # by what can be changed, and the name of the part

# These register hooks of their own when a model first runs, none of which changes a value.
_LIBRARIES = ("transformers.", "transformer_lens.", "accelerate.", "mechattn.")
_WORD = 8  # bytes
_LOAD_AGAIN = (
    "Load the model again as it is now; load_model(model, verify=False) measures it anyway, and "
    "every result then records verified: false"
)
_CHANGES = {
    "class": (
        "{name} is {now} where {before} was. Adapters are merged (merge_and_unload) before "
        f"load_model. {_LOAD_AGAIN}"
    ),
    "dtype": (
        "{name} is {now} and was {before}. Give the dtype to load_model(…, dtype=…), which leaves"
        " the rotary frequencies in float32"
    ),
    "attention": (
        "{name} is {now!r} and was {before!r}, for which hooks may not fire. " + _LOAD_AGAIN
    ),
    "weights": "the weights of {name} were edited. " + _LOAD_AGAIN,
}


def state_of(model: HookedModel) -> State:
    """What a user can change on a loaded model; of its weights, sums of their bits.

    Reading all weights takes as long as a few tokens in a forward pass.
    """
    modules = modules_of(model)
    parameters: dict[int, tuple[str, Tensor]] = {}  # each once, by the first of its names
    hooks = {}

    for name, module in modules.items():
        for own_name, values in module._parameters.items():
            if values is not None:
                parameters.setdefault(id(values), (f"{name}.{own_name}", values))
        functions = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        foreign = [function for function in functions if not _is_of_a_library(function)]
        # TransformerLens wraps the functions that are added to its hook points.
        foreign += getattr(module, "fwd_hooks", [])
        if foreign:
            hooks[name] = frozenset(map(id, foreign))

    weights = dict(parameters.values())
    config = getattr(original_of(model), "config", None)
    return {
        "class": {name: type(module).__qualname__ for name, module in modules.items()},
        "dtype": {name: values.dtype for name, values in weights.items()},
        "attention": {"its attention": getattr(config, "_attn_implementation", "")},
        "weights": {name: _sum_of_bits(values) for name, values in weights.items()},
        "device": {name: values.device for name, values in weights.items()},
        "hooks": hooks,
    }


def refuse_changes(model: HookedModel, before: State, now: State) -> None:
    """Refuse a model whose parts, dtype, attention or weights are not those that were verified.

    Raises:
        ModelError: Says what was changed, and what to do.
    """
    for kind, sentence in _CHANGES.items():
        for name in {**before[kind], **now[kind]}:
            values = {"before": before[kind].get(name), "now": now[kind].get(name)}
            if values["before"] != values["now"]:
                change = sentence.format(name=WRAPPED.sub("", name), **values)
                raise ModelError(
                    f"{model.cfg.model_name} was changed after it was verified: {change}"
                )


def _sum_of_bits(values: Tensor) -> int:
    """A sum over a tensor's memory as whole numbers, which may overflow, always alike; 0 if it is
    offloaded."""
    if values.is_meta:
        return 0
    octets = values.detach().reshape(-1).view(torch.uint8)
    is_whole = octets.numel() % _WORD == 0 and octets.storage_offset() % _WORD == 0
    if not is_whole:
        return int(octets.sum())
    return int(octets.view(torch.int64).sum())


def _is_of_a_library(hook: Any) -> bool:
    """Whether a hook was registered by a library, which changes no value."""
    function = getattr(hook, "func", hook)  # of a partial
    return str(getattr(function, "__module__", "")).startswith(_LIBRARIES)
