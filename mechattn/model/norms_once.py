"""Avoids a bridge's second computation of norms whose inner hooks are unused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from jaxtyping import Float
from torch import Tensor

from mechattn.model.attribute_setting import attribute_set

_COMPUTED_TWICE = "_hf_autograd_forward_with_hooks"  # the transformers norm, and the values of its two hooks


@contextmanager
def norms_once(model: Any) -> Iterator[None]:
    """Inside a ``with`` block, compute a bridge's norms once, with the model's own module, to the same numbers."""
    with ExitStack() as stack:
        for norm in _norms(model):
            stack.enter_context(attribute_set(norm, _COMPUTED_TWICE, _once(norm, getattr(norm, _COMPUTED_TWICE))))
        yield


def _norms(model: Any) -> list[Any]:
    """The norms of the model, its blocks and their parts; deeper ones are not searched for, to save time."""
    parts = [model, *model.blocks, *(part for block in model.blocks for part in block.children())]
    return [module for part in parts for module in part.children() if hasattr(type(module), _COMPUTED_TWICE)]


def _once(norm: Any, twice: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    points = (norm.hook_scale, norm.hook_normalized)

    def forward(x: Float[Tensor, "*batch channel"]) -> Float[Tensor, "*batch channel"]:
        watched = any(p._forward_hooks or p._forward_pre_hooks or p._backward_hooks for p in points)
        return twice(x) if watched else norm.original_component(x).to(x.dtype)

    return forward
