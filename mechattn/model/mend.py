"""Known faults of hooked models that can be mended where they stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

_MENDED = "_mechattn_alibi_once"
FALCON = (
    "Falcon's ALiBi is counted once: eager attention, which hooks need, adds it twice in transformers 4.46 to 5.23, "
    "since the mask carries it already"
)


def mend(model: Any) -> tuple[str, ...]:
    """Mend what is known to be wrong in a booted bridge, in place.

    Returns:
        What was mended, a sentence each; empty for most models.
    """
    config = getattr(getattr(model, "original_model", None), "config", None)
    if getattr(config, "model_type", None) == "falcon" and getattr(config, "alibi", False):
        for block in model.blocks:
            _count_alibi_once(block.attn)
        return (FALCON,)
    return ()


def _count_alibi_once(attention: Any) -> None:
    if not hasattr(attention, _MENDED):
        attention._reconstruct_attention = _without_second_alibi(attention._reconstruct_attention)
        setattr(attention, _MENDED, True)


def _without_second_alibi(reconstruct: Callable[..., Any]) -> Callable[..., Any]:
    """Leave out ``alibi`` where the mask holds it: a mask alone is never positive, ALiBi at later keys always is.

    So nothing changes in a version of transformers that keeps the two apart.
    """

    def once(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.is_floating_point() and bool((mask[..., -1, :] > 0).any()):
            kwargs["alibi"] = None
        return reconstruct(q, k, v, **kwargs)

    return once
