"""Position ids: whether a model accepts negative ones, and RoPE frequencies that depend on the batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mechattn.errors import ModelError
from mechattn.model.hooked import HookedModel, config_of, original_of
from mechattn.model.hooks import attention_layers, forward_with_patterns

_aten = torch.ops.aten
_LOOKUPS = (_aten.embedding, _aten.gather, _aten.index, _aten.index_select, _aten.take)
_SHIFT = 6


@dataclass(frozen=True)
class Boundary:
    """The number of positions up to which a model uses its frequencies for short texts; beyond it uses others.

    In "longrope" there is a second set of factors, and transformers uses the set for the longest row on the whole
    batch. In "dynamic" (NTK) the frequencies of a long text are those of the longest text that was read so far.
    """

    at: int
    kind: Literal["longrope", "dynamic"]

    def side(self, positions: int) -> Literal["short", "long"]:
        """The factors for a row of this length."""
        return "long" if positions > self.at else "short"

    def __str__(self) -> str:
        if self.kind == "longrope":
            return f"short factors up to {self.at:,} positions, long ones beyond (LongRoPE)"
        return f"dynamic NTK beyond {self.at:,} positions, which is not measured"


def boundary_of(model: Any) -> Boundary | None:
    """The boundary of a hooked model or a transformers model, from its configuration; None for most."""
    config = config_of(model) if original_of(model) is not None else getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    # The RoPE settings, for all layers or for each kind, under the new name or the old one.
    settings = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    given = [each for each in settings if isinstance(each, Mapping)]
    scalings = [*given, *(each for whole in given for each in whole.values() if isinstance(each, Mapping))]
    found = {boundary for scaling in scalings if (boundary := _boundary(scaling, config)) is not None}
    if len(found) > 1:
        several = ", ".join(f"{each.at:,}" for each in sorted(found, key=lambda each: each.at))
        raise ModelError(
            f"the layers of a {type(model).__name__} change their frequencies at different lengths ({several}), so "
            f"mechattn cannot separate its prompts by length"
        )
    return next(iter(found), None)


def _boundary(scaling: Mapping[str, Any], config: Any) -> Boundary | None:
    kind = str(scaling.get("rope_type") or scaling.get("type") or "")
    longest = getattr(config, "max_position_embeddings", None)
    if "dynamic" in kind and longest:
        return Boundary(int(longest), "dynamic")
    if kind in ("longrope", "su") or "long_factor" in scaling:
        name = "original_max_position_embeddings"
        at = scaling.get(name) or getattr(config, name, longest)
        return Boundary(int(at), "longrope") if at else None
    return None


def takes_negative_ids(model: HookedModel) -> bool:
    """Whether attention depends only on differences of position ids, so that negative ids work like any others."""
    layer = attention_layers(model)[0]
    parameter = next(model.parameters())
    tokens = torch.arange(5, 5 + 2 * _SHIFT, device=parameter.device)[None]
    seen: list[Tensor] = []
    try:
        for moved in (0, _SHIFT, -_SHIFT):
            ids = torch.arange(2 * _SHIFT, device=parameter.device)[None] + moved
            with _NoNegativeRow():
                forward_with_patterns(
                    model, tokens, torch.ones_like(tokens), [layer], lambda n, p, v: seen.append(p.float()), None, ids,
                    last=int(model.cfg.n_layers) - 1,
                )  # fmt: skip
    except (_NegativeRow, TypeError, ValueError, IndexError, RuntimeError):
        return False
    rounding = 1e-3 if parameter.dtype in (torch.float32, torch.float64) else 0.1
    return all(float((other - seen[0]).abs().max()) <= rounding for other in seen[1:])


class _NegativeRow(Exception):
    """A table was read at a negative index."""


class _NoNegativeRow(TorchDispatchMode):
    """Prevent reading a table at a negative index, which on a GPU would make all later calls of the process fail."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _LOOKUPS:
            given = [each for arg in args[1:] for each in (arg if isinstance(arg, (list, tuple)) else [arg])]
            for index in given:
                if isinstance(index, Tensor) and index.dtype in (torch.int32, torch.int64) and (index < 0).any():
                    raise _NegativeRow
        return func(*args, **(kwargs or {}))
