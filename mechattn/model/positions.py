"""How a model counts positions: the length at which its frequencies change, and which position ids
it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechattn.errors import ModelError
from mechattn.functional.attention import Pattern
from mechattn.model import hooks
from mechattn.model.hooked import HookedModel, config_of, original_of
from mechattn.model.several_devices import device_of

PROBE_LENGTH = 6  # tokens on which position ids are tried
ROUNDING = 1e-3
ROUNDING_IN_HALF_PRECISION = 0.1


@dataclass(frozen=True)
class Boundary:
    """The number of positions up to which a model uses its frequencies for short texts; beyond it
    uses others.

    In "longrope" there is a second set of factors, and transformers uses the set for the longest
    row on the whole batch. In "dynamic" (NTK) the frequencies of a long text are those of the
    longest text that was read so far.
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
    """The boundary of a hooked model or a transformers model, from its configuration; None for
    most."""
    config = config_of(model)
    if original_of(model) is None:
        config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config

    boundaries = {_boundary(settings, config) for settings in _rope_settings(config)} - {None}
    if len(boundaries) > 1:
        lengths = ", ".join(f"{length:,}" for length in sorted(b.at for b in boundaries if b))
        raise ModelError(
            f"the layers of a {type(model).__name__} change their frequencies at different lengths"
            f" ({lengths}), so mechattn cannot separate its prompts by length"
        )
    return next(iter(boundaries), None)


def _rope_settings(config: Any) -> Iterator[Mapping[str, Any]]:
    """The RoPE settings, for all layers or for each kind of them, under the new name or the old
    one."""
    for name in ("rope_parameters", "rope_scaling"):
        settings = getattr(config, name, None)
        if isinstance(settings, Mapping):
            yield settings
            yield from (value for value in settings.values() if isinstance(value, Mapping))


def _boundary(settings: Mapping[str, Any], config: Any) -> Boundary | None:
    """The boundary that some RoPE settings state; None for most."""
    kind = str(settings.get("rope_type") or settings.get("type") or "")
    longest = getattr(config, "max_position_embeddings", None)
    if "dynamic" in kind and longest:
        return Boundary(int(longest), "dynamic")

    if kind in ("longrope", "su") or "long_factor" in settings:
        name = "original_max_position_embeddings"
        length = settings.get(name) or getattr(config, name, longest)
        return Boundary(int(length), "longrope") if length else None
    return None


def takes_position_ids(model: HookedModel) -> bool:
    """Whether the model's attention depends on the given position ids, tried on a few tokens."""
    if original_of(model) is None:
        return False
    ids = torch.arange(PROBE_LENGTH, device=device_of(model))
    last_layer = hooks.attention_layers(model)[-1]
    try:
        pattern, spread_pattern = _patterns_at(model, last_layer, [ids, 3 * ids])
    except (TypeError, ValueError):
        return False
    return not torch.equal(pattern, spread_pattern)


def takes_negative_ids(model: HookedModel) -> bool:
    """Whether attention depends only on differences of position ids, and none of them is looked up,
    so that negative ids work like any others.

    Negative ids themselves are not tried: a table that is read at one on a GPU makes all later
    calls of the process fail.
    """
    has_computed_rotations = any(
        name.endswith("inv_freq") for name, _ in original_of(model).named_buffers()
    )
    if not has_computed_rotations:
        return False
    ids = torch.arange(2 * PROBE_LENGTH, device=device_of(model))
    first_layer = hooks.attention_layers(model)[0]
    try:
        pattern, shifted = _patterns_at(model, first_layer, [ids, ids + PROBE_LENGTH])
    except (TypeError, ValueError):
        return False

    is_full_precision = next(model.parameters()).dtype in (torch.float32, torch.float64)
    rounding = ROUNDING if is_full_precision else ROUNDING_IN_HALF_PRECISION
    return float((shifted - pattern).abs().max()) <= rounding


def _patterns_at(
    model: HookedModel, layer: int, position_ids: Sequence[Int[Tensor, " pos"]]
) -> list[Float[Tensor, "1 head query key"]]:
    """A layer's pattern of the same few tokens at each of these positions."""
    tokens = torch.arange(5, 5 + len(position_ids[0]), device=position_ids[0].device)[None]
    real = torch.ones_like(tokens)
    patterns: list[Tensor] = []

    def see(layer: int, pattern: Pattern, v: Any) -> None:
        patterns.append(pattern.float())

    for ids in position_ids:
        hooks.forward_with_patterns(model, tokens, real, [layer], see, position_ids=ids[None])
    return patterns
