"""Keeps hooked models verified: the facts about each, the state in which it was verified, and
verification again after a change."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from mechattn.errors import MechattnError, ModelError, warn
from mechattn.model.architectures import mend
from mechattn.model.checkpoint import reason
from mechattn.model.hooked import (
    FACTS_NAME,
    HookedModel,
    ModelFacts,
    device_of,
    facts_of,
    model_creation_lock,
    modules_of,
    original_of,
)
from mechattn.model.verify.checks import check_model
from mechattn.model.verify.verification import ANOTHER_VERSION, AT_LOADING

# In the name of a module that TransformerLens has wrapped.
WRAPPED = re.compile(r"\._?original_component")

Outcome = TypeVar("Outcome")
State = Mapping[str, dict[str, Any]]  # by what can be changed, and the name of the part

# These register hooks of their own when a model first runs, none of which changes a value.
_LIBRARIES = ("transformers.", "transformer_lens.", "accelerate.", "mechattn.")
_WORD_BYTES = 8  # of an int64, in which weights are summed
_LOAD_AGAIN = (
    "Load the model again as it is now; load_model(model, verify=False) measures it anyway, and "
    "every result then records verified: false"
)
# By what was changed, with the name of the part, and its value now and before.
_CHANGES = {
    "class": (
        "{name} is {now} where {before} was. Adapters are merged (merge_and_unload) before "
        "load_model. " + _LOAD_AGAIN
    ),
    "dtype": (
        "{name} is {now} and was {before}. Give the dtype to load_model(…, dtype=…), which leaves"
        " the rotary frequencies in float32"
    ),
    "attention": "{name} is {now!r} and was {before!r}, for which hooks may not fire. "
    + _LOAD_AGAIN,
    "weights": "the weights of {name} were edited. " + _LOAD_AGAIN,
}


def verified(model: Any, verify: bool) -> Any:
    """The model, verified if that is asked for and was not done since it last changed.

    Raises:
        ModelError: It is not the model itself, or was changed since it was verified.
    """
    facts = known_facts(model)
    if not verify:
        _take_as_it_is(model, facts)
        return model
    if facts.verified and facts.state is not None:
        _notice_changes(model, facts)
    elif facts.report is None and facts.to_verify:
        _verify(model, facts)
    return model


def known_facts(model: Any) -> ModelFacts:
    """The facts about a hooked model; one that was hooked elsewhere is examined and mended now."""
    facts = facts_of(model)
    if facts is not None:
        return facts
    native, why = _native_twin(model)
    facts = ModelFacts(native=native, why_not_native=why, mended=mend(model))
    setattr(model, FACTS_NAME, facts)
    return facts


def _verify(model: Any, facts: ModelFacts) -> None:
    """Verify a model now; hooks that change its values are named."""
    report = tried(check_model, model, facts, AT_LOADING)
    state = state_of(model)
    try:
        report.require()
    except ModelError as error:
        if not state["hooks"]:
            raise
        hooked = ", ".join(WRAPPED.sub("", name) for name in state["hooks"])
        raise ModelError(
            f"{model.cfg.model_name} has hooks at {hooked} that change its "
            f"values; remove them, or give an intervention instead. {error}"
        ) from error

    facts.report = report
    facts.state = state


def _take_as_it_is(model: Any, facts: ModelFacts) -> None:
    """Forget the verification of a model that was changed since."""
    if facts.report is None:
        facts.to_verify = False
        return
    if facts.state is None or facts.state == state_of(model):
        return

    facts.native, facts.why_not_native = _native_twin(model)
    facts.to_verify = False
    facts.report = None
    facts.state = None
    facts.streaming = None
    facts.fused = None


def _notice_changes(model: Any, facts: ModelFacts) -> None:
    """Refuse a changed model; verify it again if it was moved, or has other hooks.

    Raises:
        ModelError: Says what was changed, or what the new verification found.
    """
    before = facts.state
    assert before is not None, "asked of a verified model only"
    now = state_of(model)
    refuse_changes(model, before, now)
    is_moved = before["device"] != now["device"]
    if is_moved:
        facts.native, facts.why_not_native = _native_twin(model)
    if is_moved or before["hooks"] != now["hooks"]:
        _verify(model, facts)
    facts.state = now


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
    is_whole = octets.numel() % _WORD_BYTES == 0 and octets.storage_offset() % _WORD_BYTES == 0
    if not is_whole:
        return int(octets.sum())
    return int(octets.view(torch.int64).sum())


def _is_of_a_library(hook: Any) -> bool:
    """Whether a hook was registered by a library, which changes no value."""
    function = getattr(hook, "func", hook)  # of a partial
    return str(getattr(function, "__module__", "")).startswith(_LIBRARIES)


def tried(check: Callable[..., Outcome], model: HookedModel, *arguments: Any) -> Outcome:
    """The outcome of a check.

    Raises:
        ModelError: A forward pass failed, in whatever way.
    """
    try:
        return check(model, *arguments)
    except MechattnError:
        raise
    except Exception as error:
        raise ModelError(
            f"{model.cfg.model_name} cannot be used as a hooked model: a forward pass of a few"
            f" tokens raises {reason(error)}. {ANOTHER_VERSION.capitalize()}"
        ) from error


def _native_twin(bridge: Any) -> tuple[Any | None, str]:
    """A transformers model that shares the parameters of ``bridge`` and runs its default attention
    (usually SDPA); or None, and why there is none."""
    hooked = original_of(bridge)
    if hooked is None:
        return None, f"a {type(bridge).__name__} has no transformers model behind it"
    if getattr(bridge, "_weights_processed", False):
        why_not = "its weights were processed (folded or centred) in place, so the original weights"
        return None, f"{why_not} are gone"
    if getattr(hooked, "is_quantized", False):
        return None, "its weights are quantised, and a second model cannot share them"

    try:
        with model_creation_lock:
            return _rebuilt(hooked), ""
    except Exception as error:
        why_not = f"it cannot be rebuilt from its configuration ({type(error).__name__}: {error})"
        return None, why_not


def unhooked(model: Any) -> Any:
    """The model; one that was loaded before is rebuilt with the same parameters, because
    TransformerLens replaces the modules of a model that it hooks. A warning says so, as other
    changes of the object, such as a function that was replaced, are left behind.

    Raises:
        ModelError: It was hooked before, and cannot be rebuilt.
    """
    if not any(WRAPPED.search(name) for name, _ in model.named_parameters()):
        return model
    warn(
        f"this {type(model).__name__} was hooked before: it is built again from its configuration"
        " and hooked with the same weights; whatever else was changed on it is not in the new one"
    )
    try:
        return _rebuilt(model)
    except Exception as error:
        raise ModelError(
            f"this {type(model).__name__} was hooked before and cannot be rebuilt without its hooks"
            f" ({type(error).__name__}: {error}); use the hooked model, or load the checkpoint"
            " again"
        ) from error


def _rebuilt(hooked: Any) -> Any:
    """A model of the same class and configuration with the same parameters."""
    from accelerate import init_empty_weights

    config = copy.deepcopy(hooked.config)
    config._attn_implementation_internal = None  # the class chooses again: SDPA if it has it
    config.output_attentions = False

    with init_empty_weights(include_buffers=False):
        twin = type(hooked)(config)

    named = [
        *hooked.named_buffers(remove_duplicate=False),
        *hooked.named_parameters(remove_duplicate=False),
    ]
    # Under the names that parameters had before TransformerLens wrapped their modules.
    shared = {WRAPPED.sub("", name): tensor for name, tensor in named}
    twin.load_state_dict(shared, strict=False, assign=True)
    twin.tie_weights()
    # A new model's settings are those of its configuration, which lacks end tokens that only
    # generation_config.json names.
    twin.generation_config = getattr(hooked, "generation_config", None)

    for name, tensor in twin.named_parameters():
        if tensor.is_meta and name not in shared:
            raise LookupError(f"the hooked model has no parameter named {name}")

    device = device_of(hooked)
    for name, buffer in twin.named_buffers():
        if name in shared:
            buffer.data = shared[name].data
        else:
            buffer.data = buffer.data.to(device)

    return _dispatched_like(twin, hooked).eval()


def _dispatched_like(twin: Any, model: Any) -> Any:
    """The twin, with its activations moved and its weights brought from where they are offloaded as
    the model's are."""
    from accelerate.hooks import add_hook_to_module
    from accelerate.utils import PrefixedDataset

    hooks = {
        WRAPPED.sub("", name): vars(module)["_hf_hook"]
        for name, module in model.named_modules()
        if "_hf_hook" in vars(module)
    }
    for name, module in twin.named_modules():
        if name in hooks:
            add_hook_to_module(module, _copied(hooks[name]))
        elif any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            # TransformerLens has split or renamed this module, so a hook that reads the weights of
            # all modules is given its name.
            of_all = next(
                hook
                for hook in hooks.values()
                if getattr(hook, "offload", False) and hasattr(hook.weights_map, "dataset")
            )
            renamed = _copied(of_all)
            renamed.weights_map = PrefixedDataset(of_all.weights_map.dataset, f"{name}.")
            add_hook_to_module(module, renamed)

    return twin


def _copied(hook: Any) -> Any:
    """The hook, or the sequence of hooks, for another module."""
    copied = copy.copy(hook)
    if hasattr(hook, "hooks"):
        copied.hooks = tuple(map(_copied, hook.hooks))
    return copied
