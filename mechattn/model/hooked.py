"""A hooked model: its interface, the transformers model behind it, and what mechattn records and sets on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

    from mechattn.model.verify.verification import Check, Report


@runtime_checkable
class HookedModel(Protocol):
    """A model of TransformerLens. Functions that also accept a transformers model have ``Any`` instead."""

    cfg: Any
    tokenizer: Any

    def run_with_hooks(self, *inputs: Any, fwd_hooks: list[tuple[str, Callable[..., Any]]], **options: Any) -> Any:
        """A forward pass with functions at named hooks, which are removed afterwards."""
        ...

    if TYPE_CHECKING:  # not checked at run time: isinstance does not see submodules, and rebuilds hook_dict
        blocks: Sequence[Any]  # each with its hooks by name

        @property
        def hook_dict(self) -> Mapping[str, Any]: ...
        def parameters(self) -> Iterator[nn.Parameter]: ...
        def __call__(self, *inputs: Any, **options: Any) -> Any: ...


def original_of(model: Any) -> Any:
    """The transformers model behind the hooks; None for a ``HookedTransformer``, which has its own modules."""
    return getattr(model, "original_model", None)


def config_of(model: Any) -> Any:
    """The configuration of the transformers text model behind the hooks; None if there is none."""
    config = getattr(original_of(model), "config", None)
    return getattr(config, "text_config", None) or config


def unwrapped(module: Any) -> Any:
    """The transformers module behind a bridge; a module that is no bridge itself."""
    return getattr(module, "original_component", None) or module


@contextmanager
def attribute_set(thing: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute on the object itself; a bridge would forward a plain assignment to the module that it wraps."""
    missing = object()
    before = vars(thing).get(name, missing)
    object.__setattr__(thing, name, value)
    try:
        yield
    finally:
        if before is missing:
            object.__delattr__(thing, name)
        else:
            object.__setattr__(thing, name, before)


_NAME = "_mechattn"
_boots = 0


@dataclass
class ModelFacts:
    """What is known about a model: how it was made, mended and verified; kept on the model object."""

    weights: str = "as given, perhaps processed"  # or "raw"; the default warns that they may have been folded
    native: Any = None  # a copy without hooks that shares the parameters; None if there cannot be one
    why_not_native: str = ""
    mended: tuple[str, ...] = ()  # a sentence for each correction
    to_verify: bool = True  # False if the user turned verification off
    probe_logits: Tensor | None = None  # the native logits when the model was loaded
    report: Report | None = None  # the last verification
    boots: int = -1  # how many models the process had made at that time
    streaming: Check | None = None  # whether row blocks give the hooks' numbers; None if not tried yet
    hashed: tuple[object, str] | None = None  # what was hashed of the weights, and the last hash

    @property
    def verified(self) -> bool:
        """Whether the last verification passed."""
        return self.report is not None and self.report.passed


def facts_of(model: Any) -> ModelFacts | None:
    """The facts about ``model``; None for a model that has not gone through ``load_model``."""
    return getattr(model, "__dict__", {}).get(_NAME)


def remember(model: Any, what: ModelFacts) -> ModelFacts:
    """Store ``what`` on the model."""
    setattr(model, _NAME, what)
    return what


def count_boot() -> None:
    """Count a model that was made; booting one can change classes that others use (TransformerLens issue 1795)."""
    global _boots
    _boots += 1


def boots() -> int:
    """The number of models made in this process."""
    return _boots
