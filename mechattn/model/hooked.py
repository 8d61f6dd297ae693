"""A hooked model: its interface, the facts that mechattn keeps on it, its locks, and the devices on
which accelerate has placed its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from mechattn.errors import warn

if TYPE_CHECKING:
    from mechattn.model.positions import Rotations
    from mechattn.model.verify.verification import Check, Report
    from mechattn.model.weights import State

FACTS_NAME = "_mechattn"  # the attribute of a model that holds its ModelFacts
Function = TypeVar("Function", bound=Callable[..., Any])
# Held while a model is made, because transformers and accelerate then modify torch.
model_creation_lock = RLock()
_SECONDS_BEFORE_WARNING = 10.0  # how long a thread waits for a model before it says so
# The lock of each configuration and each first parameter. It is not kept on the model, because a
# lock cannot be pickled or copied.
_locks = WeakIdKeyDictionary()
_lock_table_guard = Lock()


@runtime_checkable
class HookedModel(Protocol):
    """A model of TransformerLens. Functions that also accept a transformers model are annotated
    with ``Any`` instead."""

    cfg: Any
    tokenizer: Any

    def run_with_hooks(
        self, *inputs: Any, fwd_hooks: list[tuple[str, Callable[..., Any]]], **options: Any
    ) -> Any:
        """A forward pass with functions at named hooks, which are removed afterwards."""

    # Not checked at run time: isinstance does not see submodules, and rebuilds hook_dict.
    if TYPE_CHECKING:
        blocks: Sequence[Any]  # each with its hooks by name

        @property
        def hook_dict(self) -> Mapping[str, Any]: ...
        def parameters(self) -> Iterator[nn.Parameter]: ...
        def __call__(self, *inputs: Any, **options: Any) -> Any: ...


def original_of(model: Any) -> Any:
    """The transformers model behind the hooks; None for a ``HookedTransformer``, which has its own
    modules."""
    return getattr(model, "original_model", None)


def innermost(model: Any) -> Any:
    """The transformers model behind the hooks; the model itself if there is none."""
    original = original_of(model)
    return model if original is None else original


def config_of(model: Any) -> Any:
    """The configuration of a transformers model, or of the one behind the hooks.

    That of a multimodal model is its text model's. None for a ``HookedTransformer``.
    """
    config = getattr(innermost(model), "config", None)
    return getattr(config, "text_config", None) or config


def modules_of(model: Any) -> dict[str, nn.Module]:
    """All modules, each once, by the first of its names.

    Those of the transformers model behind a bridge are included, because a bridge does not list
    modules that it does not wrap, such as dropout. ``named_modules`` would take a tenth of a short
    run: a bridge holds most modules under several names, and it walks through all of them.
    """
    names: dict[nn.Module, str] = {}

    def visit(name: str, module: nn.Module | None) -> None:
        if module is None or module in names:
            return
        names[module] = name
        for child_name, child in module._modules.items():
            visit(f"{name}.{child_name}".removeprefix("."), child)

    visit("", model)
    visit("original_model", original_of(model))
    return {name: module for module, name in names.items()}


def unwrapped(module: Any) -> Any:
    """The transformers module that a bridge wraps; the module itself if it is not a bridge."""
    return getattr(module, "original_component", None) or module


def rounding_of(model: Any, in_float32: float, in_half_precision: float) -> float:
    """The one of two error bounds that holds for the dtype of the model's first parameter."""
    if next(model.parameters()).dtype in (torch.float32, torch.float64):
        return in_float32
    return in_half_precision


@contextmanager
def attribute_set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside a ``with`` block, an attribute of an object has another value.

    It is set on the object itself: a bridge would forward a plain assignment to the module that it
    wraps.
    """
    was_set = name in vars(owner)
    previous_value = vars(owner).get(name)
    object.__setattr__(owner, name, value)

    try:
        yield
    finally:
        if was_set:
            object.__setattr__(owner, name, previous_value)
        else:
            object.__delattr__(owner, name)


@dataclass
class ModelFacts:
    """How a model was made, mended and verified. It is kept on the model object."""

    # The default is for models that were hooked elsewhere: their weights may have been folded.
    weights: Literal["raw", "random", "as given, perhaps processed"] = "as given, perhaps processed"
    revision: str | None = None  # the commit on the hub that the weights come from
    random_weights: Mapping[str, Any] | None = None  # the kind and seed of weights drawn at random
    # The twin of model/native_twin.py, or the model that the user gave as ``native``; None if there
    # is neither.
    native: Any = None
    native_is_given: bool = False  # whether the user gave it
    why_not_native: str = ""  # why there is no twin; empty if there is one
    mended: tuple[str, ...] = ()  # a sentence for each correction
    to_verify: bool = True  # False if the user turned verification off
    report: Report | None = None  # of the last verification that passed, or that verify_model made
    # Whether row blocks, and sums of a fused kernel, give the hooks' numbers; None if not tried
    # yet.
    streaming: Check | None = None
    fused: Check | None = None
    weights_hash: str | None = None  # the last one
    # The versions of the weights at that hash, which is used again if they are the same.
    hashed_versions: object = None
    # The model's state when it passed its last verification; None if it was never verified or its
    # last verification failed.
    state: State | None = None
    # By the layers and the frequencies.
    rotations: dict[Any, Rotations] = field(default_factory=dict)
    gguf: Mapping[str, Any] | None = None  # the file, if the weights come from a GGUF file

    @property
    def verified(self) -> bool:
        """Whether the last verification passed."""
        return self.report is not None and self.report.passed


def facts_of(model: Any) -> ModelFacts | None:
    """The facts about ``model``; None for a model that has not gone through ``load_model``."""
    # getattr(model, …) would not do: a bridge forwards missing names to the model that it wraps.
    return getattr(model, "__dict__", {}).get(FACTS_NAME)


def architecture_of(model: Any) -> str:
    """The architecture of a hooked model, such as "LlamaForCausalLM", or "unknown"."""
    cfg = model.cfg
    # The second is the name that a HookedTransformer has for it.
    architecture = getattr(cfg, "architecture", None) or getattr(cfg, "original_architecture", None)
    return str(architecture or "unknown")


def limit_of(model: Any, check: str) -> str | None:
    """Why this check limits what can be measured; None if it does not, or there is no report."""
    facts = facts_of(model)
    if facts is None or facts.report is None:
        return None
    return facts.report.limited.get(check)


def alone(function: Function) -> Function:
    """Decorate a function whose first argument is a model: only one thread at a time runs it with
    that model, under the settings of ``measuring``."""

    @wraps(function)
    def run_alone(model: Any, *args: Any, **options: Any) -> Any:
        with holding(model), measuring(model):
            return function(model, *args, **options)

    return cast(Function, run_alone)


@contextmanager
def measuring(model: Any) -> Iterator[None]:
    """Inside a ``with`` block, numbers do not depend on the settings of the model or the process.

    A hooked model is in eval mode, so dropout is off; afterwards it is as it was. Gradients can be
    taken, the default dtype is float32, the default device is the CPU, and autocast is off on the
    CPU and on CUDA.
    """
    training_modules = []
    if hasattr(model, "cfg") and isinstance(model, nn.Module):
        training_modules = [module for module in modules_of(model).values() if module.training]
    for module in training_modules:
        module.training = False

    try:
        with ExitStack() as stack:
            stack.enter_context(_default_float32)
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
            yield
    finally:
        for module in training_modules:
            module.training = True


@contextmanager
def holding(model: Any) -> Iterator[None]:
    """Inside a ``with`` block, no other thread can hold the model. The same thread can hold it
    again."""
    with ExitStack() as stack:
        for lock in _locks_of(model):
            if not lock.acquire(timeout=_SECONDS_BEFORE_WARNING):
                cfg = getattr(model, "cfg", None)
                name = getattr(cfg, "model_name", type(model).__name__)
                warn(
                    f"waiting: another thread has used {name} for"
                    f" {_SECONDS_BEFORE_WARNING:.0f} s. Hooks and patches are on the model, so one"
                    " thread at a time can use it; load it by name in each thread to use several"
                    " at once"
                )
                lock.acquire()
            stack.callback(lock.release)
        yield


def device_of(model: Any) -> torch.device:
    """The device of a model's tokens, or of a layer's input.

    It is that of the first parameter or, if this is offloaded, the device on which it is used; the
    CPU if there are no parameters.
    """
    for module in innermost(model).modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_meta:
                return torch.device(_hook_of(module).execution_device)
            return parameter.device
    return torch.device("cpu")


def unoffloaded(model: Any, name: str, tensor: Tensor) -> Tensor:
    """The tensor of a parameter or buffer; if it is offloaded, its stored values."""
    if not tensor.is_meta:
        return tensor
    module_name, _, parameter_name = name.rpartition(".")
    return _hook_of(model.get_submodule(module_name)).weights_map[parameter_name]


@contextmanager
def weights_here(module: Any) -> Iterator[None]:
    """Inside a ``with`` block, the offloaded weights of a module can be read.

    A tensor that was read there can be used afterwards. Anything but a module is left alone.
    """
    from accelerate.utils import align_module_device

    submodules = module.modules() if isinstance(module, nn.Module) else ()
    with ExitStack() as stack:
        for submodule in submodules:
            if "_hf_hook" in vars(submodule):
                stack.enter_context(align_module_device(submodule))
        yield


class _DefaultFloat32:
    """Makes float32 torch's default dtype as long as any thread measures.

    All threads share one default, so the first thread sets it and the last restores the previous
    one.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.users = 0
        self.previous_dtype = torch.float32

    def __enter__(self) -> None:
        with self.lock:
            if self.users == 0:
                self.previous_dtype = torch.get_default_dtype()
                torch.set_default_dtype(torch.float32)
            self.users += 1

    def __exit__(self, *exception: object) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                torch.set_default_dtype(self.previous_dtype)


_default_float32 = _DefaultFloat32()


def _locks_of(model: Any) -> list[Any]:
    """The locks of the configuration and the first parameter, which models may share.

    They are always acquired in this order, so that two threads cannot wait for each other.
    """
    if not isinstance(model, nn.Module):
        return []
    config = config_of(model)
    first_parameter = next(model.parameters(), None)
    owners = [owner for owner in (config, first_parameter) if owner is not None]
    with _lock_table_guard:
        return [_locks.setdefault(owner, RLock()) for owner in owners]


def _hook_of(module: Any) -> Any:
    """The hook with which accelerate places a module's weights; among several, the one that loads
    offloaded weights."""
    hook = vars(module)["_hf_hook"]
    for inner in getattr(hook, "hooks", ()):
        if getattr(inner, "offload", False):
            return inner
    return hook
