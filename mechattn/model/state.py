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
_SAMPLE = 1024  # words of a tensor, about; of a smaller one all are read
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


def state_of(model: HookedModel, before: State | None = None) -> State:
    """What a user can change on a loaded model; of its weights, sums of their bits.

    Weights that lie where they lay ``before``, that torch has counted no change of, and whose
    sample is the same are not read again, as reading them all takes a tenth of a short run. So an
    edit through ``.data`` of a few words may not be noticed.
    """
    modules = modules_of(model)
    parameters: dict[int, tuple[str, Tensor]] = {}  # each once, by the first of its names
    hooks = {}
    for name, module in modules.items():
        for own, values in module._parameters.items():
            if values is None:
                continue
            parameters.setdefault(id(values), (f"{name}.{own}", values))
        functions = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        foreign = [function for function in functions if not _is_of_a_library(function)]
        # TransformerLens wraps the functions that are added to its hook points.
        foreign += getattr(module, "fwd_hooks", [])
        if foreign:
            hooks[name] = frozenset(map(id, foreign))
    weights = dict(parameters.values())
    traces = _traces(weights)
    last = {"traces": {}, "weights": {}} if before is None else before
    sums = {}
    for name, trace in traces.items():
        is_known = last["traces"].get(name) == trace
        sums[name] = last["weights"][name] if is_known else _sum_of_bits(weights[name])
    config = getattr(original_of(model), "config", None)
    return {
        "class": {name: type(module).__qualname__ for name, module in modules.items()},
        "dtype": {name: values.dtype for name, values in weights.items()},
        "attention": {"its attention": getattr(config, "_attn_implementation", "")},
        "weights": sums,
        "traces": traces,
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


def _traces(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Where each tensor lies, how often torch has changed it, and a sample, for changes through
    ``.data``."""
    sums: dict[
        torch.device, dict[str, Tensor]
    ] = {}  # on each device, so that it is waited for once
    for name, values in weights.items():
        if not values.is_meta:
            words = _words(values)
            step = (
                len(words) // _SAMPLE | 1
            )  # odd, so that it walks through the columns of a matrix
            sums.setdefault(values.device, {})[name] = words[::step].sum()

    traces: dict[str, tuple[int, ...]] = dict.fromkeys(weights, ())
    for of_device in sums.values():
        numbers = torch.stack(list(of_device.values())).tolist()
        for name, number in zip(of_device, numbers, strict=True):
            traces[name] = (weights[name].data_ptr(), weights[name]._version, number)
    return traces


def _sum_of_bits(values: Tensor) -> int:
    """A sum over a tensor's memory, which takes as long as reading it once; 0 if it is
    offloaded."""
    return 0 if values.is_meta else int(_words(values).sum())


def _words(values: Tensor) -> Tensor:
    """A tensor's memory as whole numbers, whose sum may overflow, always alike."""
    octets = values.detach().reshape(-1).view(torch.uint8)
    is_whole = octets.numel() % _WORD == 0 and octets.storage_offset() % _WORD == 0
    return octets.view(torch.int64) if is_whole else octets


def is_same(before: State, now: State) -> bool:
    """Whether nothing was changed that changes what a model computes."""
    return all(before[kind] == now[kind] for kind in before if kind != "traces")


def _is_of_a_library(hook: Any) -> bool:
    function = getattr(hook, "func", hook)  # of a partial
    return str(getattr(function, "__module__", "")).startswith(_LIBRARIES)
