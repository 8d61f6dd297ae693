"""The interface of a hooked model that ``TransformerBridge`` and ``HookedTransformer`` share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import nn


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
