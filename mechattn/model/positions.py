"""How a model counts positions: the length at which its frequencies change, which position ids it
takes, and how each layer rotates its queries and keys, found among its frequencies by trying them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechattn.errors import ModelError
from mechattn.functional.attention import Attention, Pattern, Rows, working_dtype
from mechattn.functional.budget import NO_ROTATION, Rotation
from mechattn.model import hooks
from mechattn.model.hooked import (
    HookedModel,
    ModelFacts,
    config_of,
    device_of,
    facts_of,
    innermost,
    rounding_of,
)
from mechattn.model.patch.streaming import streaming, why_not_streamed
from mechattn.model.patterns_at_hooks import forward_with_patterns

_TRIED_LENGTH = 6  # tokens on which position ids are tried
_ROTATED_LENGTH = 16  # tokens whose queries and keys are compared
_FAR = 1000  # positions by which these are moved, so that slow frequencies matter too
# The largest differences from rounding, in float32 and in half precision.
_ROUNDING = (1e-3, 0.1)


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
    most.

    Raises:
        ModelError: Its layers have different ones.
    """
    config = config_of(model)
    stated = [_boundary(settings, config) for settings in _rope_settings(config)]
    boundaries = {boundary for boundary in stated if boundary is not None}
    if len(boundaries) > 1:
        lengths = ", ".join(f"{at:,}" for at in sorted(boundary.at for boundary in boundaries))
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
        if length:
            return Boundary(int(length), "longrope")
    return None


def takes_position_ids(model: HookedModel) -> bool:
    """Whether the model's attention depends on the given position ids, tried on a few tokens."""
    ids = torch.arange(_TRIED_LENGTH, device=device_of(model))
    last_layer = hooks.attention_layers(model)[-1]
    change = _change_of_pattern(model, last_layer, ids, 3 * ids)
    return change is not None and change != 0


def takes_negative_ids(model: HookedModel) -> bool:
    """Whether attention depends only on differences of position ids, and none of them is looked up,
    so that negative ids work like any others.

    Negative ids themselves are not tried: a table that is read at one on a GPU makes all later
    calls of the process fail.
    """
    if not _frequencies(model):
        return False
    ids = torch.arange(2 * _TRIED_LENGTH, device=device_of(model))
    first_layer = hooks.attention_layers(model)[0]
    change = _change_of_pattern(model, first_layer, ids, ids + _TRIED_LENGTH)
    return change is not None and change <= rounding_of(model, *_ROUNDING)


def _change_of_pattern(
    model: HookedModel, layer: int, ids: Int[Tensor, " pos"], other_ids: Int[Tensor, " pos"]
) -> float | None:
    """The largest change of a layer's pattern when the same few tokens get other position ids; None
    if the model takes none."""
    tokens = hooks.few_tokens(model, len(ids))
    real = torch.ones_like(tokens)
    patterns: list[Float[Tensor, "1 head query key"]] = []

    def see(layer: int, pattern: Pattern, v: Any) -> None:
        patterns.append(pattern.float())

    try:
        for given_ids in (ids, other_ids):
            forward_with_patterns(model, tokens, real, [layer], see, position_ids=given_ids[None])
    except (TypeError, ValueError):
        return None
    before, after = patterns
    return float((after - before).abs().max())


class Rotations(NamedTuple):
    """How the layers of a model rotate queries and keys."""

    by_layer: dict[int, Rotation]  # of the layers where it is known
    why_unknown: str = ""  # in the others, in words; nothing to say if there are none


def rotations_of(model: HookedModel, layers: Sequence[int]) -> Rotations:
    """The rotation of each layer where it is known, and why it is unknown elsewhere.

    A few tokens are read twice, the second time at positions that are all larger by the same
    number. A rotation is right for a layer if it turns the first queries and keys into the second
    ones. None does if positions are learned, because they change the hidden states. ALiBi leaves
    queries and keys alone: it is a rotation by no angle.

    What was found is kept on the model until its frequencies change: trying costs as much as a
    short prompt, and waits for a card in each layer.
    """
    frequencies = _frequencies(model)
    facts = facts_of(model) or ModelFacts()
    key = (*layers, *frequencies)
    if key not in facts.rotations:
        facts.rotations[key] = _tried_rotations(model, layers, list(frequencies.values()))
    rotations: Rotations = facts.rotations[key]
    return rotations


def _tried_rotations(
    model: HookedModel, layers: Sequence[int], frequencies: Sequence[Tensor]
) -> Rotations:
    """The rotations that are right for these layers, among those with the model's frequencies."""
    reason = why_not_streamed(model, hooks.attention_layers(model))
    if reason is not None:
        return Rotations({}, reason)
    boundary = boundary_of(model)
    if boundary is not None and boundary.kind == "longrope":
        return Rotations({}, "its rotary frequencies depend on the length of the text (LongRoPE)")

    # Positions are added to the scores (ALiBi). Some such models take no position ids.
    attentions = _attentions(model, layers, rows=1)
    if all(attention.bias is not None for attention in attentions.values()):
        return Rotations(dict.fromkeys(layers, NO_ROTATION))

    longest = model.cfg.n_ctx
    if boundary is not None:
        longest = min(longest, boundary.at)
    positions = torch.arange(_ROTATED_LENGTH, device=device_of(model))
    shift = min(_FAR, longest - _ROTATED_LENGTH)
    position_ids = torch.stack([positions, positions + shift])

    try:
        attentions = _attentions(model, layers, rows=2, position_ids=position_ids)
    except (TypeError, ValueError, IndexError):
        return Rotations(
            {}, "it takes no position ids, so its tokens cannot be moved to other positions"
        )

    d_head = attentions[layers[0]].q.shape[-1]
    candidates = list(_candidates(frequencies, d_head))
    rotations: dict[int, Rotation] = {}

    for layer in layers:
        errors = [_error(rotation, attentions[layer], position_ids) for rotation in candidates]
        best = int(np.argmin(errors))
        if errors[best] <= rounding_of(model, *_ROUNDING):
            rotations[layer] = candidates[best]

    # A model that ignores position ids looks as if it had no positions.
    if all(rotation is NO_ROTATION for rotation in rotations.values()):
        return Rotations(
            {}, "its positions are learned, or none of its rotary frequencies moves its queries"
        )
    failing = ", ".join(str(layer) for layer in layers if layer not in rotations)
    if not failing:
        return Rotations(rotations)
    return Rotations(rotations, f"no rotation moves the queries and keys of layer {failing}")


def _attentions(
    model: HookedModel, layers: Sequence[int], rows: int, position_ids: Tensor | None = None
) -> Mapping[int, Attention]:
    """The queries and keys of each layer for a few tokens, repeated in each row."""
    attention_of_layer: dict[int, Attention] = {}

    def see(layer: int, block: Rows) -> None:
        assert isinstance(block.attention, Attention), "what is streamed has queries and keys"
        attention_of_layer[layer] = block.attention

    tokens = hooks.few_tokens(model, _ROTATED_LENGTH).expand(rows, -1)
    with streaming(model, layers, see):
        hooks.forward_to(model, tokens, max(layers), [], position_ids)
    return attention_of_layer


def _frequencies(model: HookedModel) -> dict[Any, Tensor]:
    """The different rotary frequencies in the model's buffers, on the CPU, by their numbers."""
    frequencies = {}
    for name, buffer in innermost(model).named_buffers():
        if name.endswith("inv_freq"):
            frequencies[tuple(buffer.tolist())] = buffer.detach().cpu().clone()
    return frequencies


def _candidates(frequencies: Sequence[Tensor], width: int) -> Iterator[Rotation]:
    """No rotation, and for all frequencies the ways in which models use them: they turn adjacent
    channels or halves; where not all channels are turned, the first or the last ones."""
    yield NO_ROTATION
    for pair_frequencies in frequencies:
        unrotated = width - 2 * len(pair_frequencies)
        if unrotated < 0:
            continue
        for adjacent in (False, True):
            for first in {0, unrotated}:
                yield Rotation(pair_frequencies, adjacent, first)


def _error(rotation: Rotation, attention: Attention, position_ids: Int[Tensor, "2 pos"]) -> float:
    """How far the first row, rotated, is from the second: the largest difference relative to the
    largest number, of queries or keys."""
    errors = []
    for x in (attention.q, attention.k):
        x = x.to(working_dtype(x))
        ids = position_ids.to(x.device)
        turns = rotation.turns(ids[:1], ids[1:], x.dtype)
        moved = rotation.moved(x[:1], turns)
        largest = x.abs().max().clamp(min=torch.finfo(x.dtype).tiny)  # all may be 0
        errors.append(float((moved - x[1:]).abs().max() / largest))
    return max(errors)
