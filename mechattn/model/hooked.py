"""A hooked model: its interface, what mechattn records and sets on it, the lock that one thread at
a time holds, and the devices on which accelerate has placed its weights."""

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
    from mechattn.model.verify.verification import Check, Report
    from mechattn.model.weights import State

FACTS_NAME = "_mechattn"  # of the attribute of a model that holds our facts
Function = TypeVar("Function", bound=Callable[..., Any])
# Held while any model is made, as transformers and accelerate then modify torch.
model_creation_lock = RLock()
_SECONDS_BEFORE_WARNING = 10.0
# By the configuration and the first parameter, so no lock is pickled or copied.
_locks = WeakIdKeyDictionary()
_lock_table_guard = Lock()


@runtime_checkable
class HookedModel(Protocol):
    """A model of TransformerLens. Functions that also accept a transformers model have ``Any``
    instead."""

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
    """The configuration of a transformers text model, or of the one behind the hooks; None for a
    ``HookedTransformer``."""
    config = getattr(innermost(model), "config", None)
    return getattr(config, "text_config", None) or config


def modules_of(model: Any) -> dict[str, nn.Module]:
    """All modules by their first names; a bridge itself leaves out those that it does not wrap,
    such as dropout.

    A bridge holds most modules under several names, and ``named_modules`` walks through each of
    them at every level, which would take a tenth of a short run.
    """
    modules: dict[str, nn.Module] = {}
    visited: set[int] = set()

    def visit(name: str, module: nn.Module) -> None:
        if id(module) in visited:
            return
        visited.add(id(module))
        modules[name] = module
        for child_name, child in module._modules.items():
            if child is not None:
                visit(f"{name}.{child_name}".removeprefix("."), child)

    visit("", model)
    original = original_of(model)
    if original is not None:
        visit("original_model", original)
    return modules


def unwrapped(module: Any) -> Any:
    """The transformers module behind a bridge; a module that is no bridge itself."""
    return getattr(module, "original_component", None) or module


def rounding_of(model: Any, in_float32: float, in_half_precision: float) -> float:
    """The error that may be rounding, by the dtype of the model's weights."""
    if next(model.parameters()).dtype in (torch.float32, torch.float64):
        return in_float32
    return in_half_precision


@contextmanager
def attribute_set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute on the object itself; a bridge would forward a plain assignment to the
    module that it wraps."""
    missing = object()
    before = vars(owner).get(name, missing)
    object.__setattr__(owner, name, value)

    try:
        yield
    finally:
        if before is missing:
            object.__delattr__(owner, name)
        else:
            object.__setattr__(owner, name, before)


@dataclass
class ModelFacts:
    """What is known about a model: how it was made, mended and verified; kept on the model
    object."""

    # The default warns that they may have been folded.
    weights: Literal["raw", "random", "as given, perhaps processed"] = "as given, perhaps processed"
    revision: str | None = None  # the commit on the hub that the weights come from
    random_weights: Mapping[str, Any] | None = None  # the kind and seed of weights drawn at random
    # A copy without hooks that shares the parameters; None if there cannot be one.
    native: Any = None
    why_not_native: str = ""
    mended: tuple[str, ...] = ()  # a sentence for each correction
    to_verify: bool = True  # False if the user turned verification off
    report: Report | None = None  # the last verification
    # Whether row blocks, and sums of a fused kernel, give the hooks' numbers; None if not tried
    # yet.
    streaming: Check | None = None
    fused: Check | None = None
    weights_hash: str | None = None  # the last one
    hashed_versions: object = None  # of the weights, compared before that hash is used again
    # Of the model when it last passed its verification; None if it has not.
    state: State | None = None
    # By layers and rotary frequencies: the Rotations of model/positions.py.
    rotations: dict[Any, Any] = field(default_factory=dict)
    gguf: Mapping[str, Any] | None = None  # the file, if the weights come from a GGUF file

    @property
    def verified(self) -> bool:
        """Whether the last verification passed."""
        return self.report is not None and self.report.passed


def facts_of(model: Any) -> ModelFacts | None:
    """The facts about ``model``; None for a model that has not gone through ``load_model``."""
    # Not by getattr, as a bridge forwards missing names to the model that it wraps.
    return getattr(model, "__dict__", {}).get(FACTS_NAME)


def architecture_of(model: Any) -> str:
    """The architecture of a hooked model, such as "LlamaForCausalLM"; "unknown" if it names
    none."""
    architecture = getattr(model.cfg, "architecture", None)
    if architecture is None:  # of a HookedTransformer
        architecture = getattr(model.cfg, "original_architecture", None)
    return str(architecture or "unknown")


def limit_of(model: Any, check: str) -> str | None:
    """Why a check at the last verification limits what can be measured; None if it does not."""
    facts = facts_of(model)
    if facts is None or facts.report is None:
        return None
    return facts.report.limited.get(check)


def alone(function: Function) -> Function:
    """Let a function whose first argument is a model run in one thread at a time per model, in eval
    mode."""

    @wraps(function)
    def run_alone(model: Any, *args: Any, **options: Any) -> Any:
        with holding(model), measuring(model):
            return function(model, *args, **options)

    return cast(Function, run_alone)


class _DefaultFloat32:
    """Makes float32 torch's default dtype as long as any thread measures: there is one default for
    all threads, so the first sets it and the last brings back what was there."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.users = 0
        self.before = torch.float32

    def __enter__(self) -> None:
        with self.lock:
            if self.users == 0:
                self.before = torch.get_default_dtype()
                torch.set_default_dtype(torch.float32)
            self.users += 1

    def __exit__(self, *exception: object) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                torch.set_default_dtype(self.before)


_default_float32 = _DefaultFloat32()


@contextmanager
def measuring(model: Any) -> Iterator[None]:
    """Measure alike whatever the process has set, inside a ``with`` block.

    A hooked model is in eval mode, where dropout is off, and then as it was. Gradients can be
    taken, numbers without a dtype are float32, and no other dtype is chosen for operations.
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
    """Hold the lock of a model inside a ``with`` block; a thread that has it may take it again."""
    with ExitStack() as stack:
        for lock in _locks_of(model):
            if not lock.acquire(timeout=_SECONDS_BEFORE_WARNING):
                name = getattr(getattr(model, "cfg", None), "model_name", type(model).__name__)
                warn(
                    f"waiting: another thread has used {name} for"
                    f" {_SECONDS_BEFORE_WARNING:.0f} s. Hooks and patches are on the model, so one"
                    " thread at a time can use it; load it by name in each thread to use several"
                    " at once"
                )
                lock.acquire()
            stack.callback(lock.release)
        yield


def _locks_of(model: Any) -> list[Any]:
    """The locks of what a model may share with others, always in the same order, so that no two
    threads block."""
    if not isinstance(model, nn.Module):
        return []
    config = config_of(model)
    first_parameter = next(model.parameters(), None)
    owners = [owner for owner in (config, first_parameter) if owner is not None]
    with _lock_table_guard:
        return [_locks.setdefault(owner, RLock()) for owner in owners]


def device_of(model: Any) -> torch.device:
    """Where a model takes its tokens, or a layer its input: with its first weights, or where these
    are brought to."""
    for module in innermost(model).modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_meta:
                return torch.device(_hook_of(module).execution_device)
            return parameter.device
    return torch.device("cpu")


def unoffloaded(model: Any, name: str, tensor: Tensor) -> Tensor:
    """A parameter or buffer of this name; if it is offloaded, what is stored of it."""
    if not tensor.is_meta:
        return tensor
    module_name, _, parameter_name = name.rpartition(".")
    return _hook_of(model.get_submodule(module_name)).weights_map[parameter_name]


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


def _hook_of(module: Any) -> Any:
    """The hook of accelerate that places a module's weights."""
    hook = vars(module)["_hf_hook"]
    for inner in getattr(hook, "hooks", ()):
        if getattr(inner, "offload", False):
            return inner
    return hook
