"""The interface of a hooked model that ``TransformerBridge`` and ``HookedTransformer`` share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import nn


@runtime_checkable
class HookedModel(Protocol):
    """A model of TransformerLens. Functions that also take a model of transformers say ``Any``."""

    cfg: Any
    tokenizer: Any

    def run_with_hooks(self, *inputs: Any, fwd_hooks: list[tuple[str, Callable]], **options: Any) -> Any:
        """A forward pass with functions at named hooks, which are taken off afterwards."""
        ...

    if TYPE_CHECKING:  # not asked at run time: modules lie where isinstance does not look, and hook_dict is made anew
        blocks: Sequence[Any]  # each with its hooks by name

        @property
        def hook_dict(self) -> Mapping[str, Any]: ...
        def parameters(self) -> Iterator[nn.Parameter]: ...
        def __call__(self, *inputs: Any, **options: Any) -> Any: ...


def original_of(model: Any) -> Any:
    """The model of transformers behind the hooks; None for a ``HookedTransformer``, which has its own parts."""
    return getattr(model, "original_model", None)


def config_of(model: Any) -> Any:
    """The configuration of the text model of transformers behind the hooks; None where there is none."""
    config = getattr(original_of(model), "config", None)
    return getattr(config, "text_config", None) or config
