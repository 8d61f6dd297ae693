"""How a model counts positions: the length at which its frequencies change, the position ids that
it takes, and how each layer rotates its queries and keys.
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
from mechattn.functional.attention import Attention, Pattern, Rows, in_working_dtype
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
_LARGEST_SHIFT = 1000  # positions by which these are moved, so that slow frequencies matter too
# The largest difference from rounding.
_ROUNDING = {"in_float32": 1e-3, "in_half_precision": 0.1}


@dataclass(frozen=True)
class Boundary:
    """A length at which a model changes its frequencies.

    In a "longrope" model, texts up to this length have one set of factors, and longer texts have
    another. transformers uses the set of the longest row for the whole batch. In a "dynamic" (NTK)
    model, the frequencies of a longer text are those of the longest text that was read so far.
    """

    at: int  # the number of positions of the longest short text
    kind: Literal["longrope", "dynamic"]

    def side(self, positions: int) -> Literal["short", "long"]:
        """Which factors a row of this length has."""
        return "long" if positions > self.at else "short"

    def __str__(self) -> str:
        if self.kind == "longrope":
            return f"short factors up to {self.at:,} positions, long ones beyond (LongRoPE)"
        return f"dynamic NTK beyond {self.at:,} positions, which is not measured"


def boundary_of(model: Any) -> Boundary | None:
    """The boundary of a hooked model or a transformers model, from its configuration.

    None for most models.

    Raises:
        ModelError: The layers have different boundaries.
    """
    config = config_of(model)
    boundaries = set()
    for settings in _rope_settings(config):
        boundary = _boundary(settings, config)
        if boundary is not None:
            boundaries.add(boundary)
    if len(boundaries) > 1:
        lengths = sorted(boundary.at for boundary in boundaries)
        listed_lengths = ", ".join(f"{length:,}" for length in lengths)
        raise ModelError(
            f"the layers of a {type(model).__name__} change their frequencies at different lengths"
            f" ({listed_lengths}), so mechattn cannot separate its prompts by length"
        )
    return next(iter(boundaries), None)


def takes_position_ids(model: HookedModel) -> bool:
    """Whether the model takes position ids and its attention depends on them.

    This is tried on a few tokens.
    """
    ids = torch.arange(_TRIED_LENGTH, device=device_of(model))
    last_layer = hooks.attention_layers(model)[-1]
    change = _change_of_pattern(model, last_layer, ids, 3 * ids)
    return change is not None and change != 0


def takes_negative_ids(model: HookedModel) -> bool:
    """Whether negative position ids work like any others.

    They do in a model with rotary frequencies whose attention depends only on differences of
    position ids, which is tried on a few tokens. Negative ids themselves are not tried: if a model
    looks one up in a table on a GPU, all later calls of the process fail.
    """
    if not _frequencies(model):
        return False
    ids = torch.arange(2 * _TRIED_LENGTH, device=device_of(model))
    first_layer = hooks.attention_layers(model)[0]
    change = _change_of_pattern(model, first_layer, ids, ids + _TRIED_LENGTH)
    return change is not None and change <= rounding_of(model, **_ROUNDING)


class Rotations(NamedTuple):
    """How the layers of a model rotate queries and keys."""

    by_layer: dict[int, Rotation]  # of the layers whose rotation is known
    why_unknown: str = ""  # why the rotation of the other layers is unknown, if there are any


def rotations_of(model: HookedModel, layers: Sequence[int]) -> Rotations:
    """The rotation of each layer in which it is known, and why it is unknown in the others.

    A few tokens are read twice, the second time at positions that are all larger by the same
    number. A rotation is right for a layer if it turns the first queries and keys into the second
    ones. No rotation does if positions are learned, because they change the hidden states. With
    ALiBi, queries and keys are not rotated at all (``NO_ROTATION``).

    The result is kept on the model until its frequencies change, because trying takes as long as a
    short prompt and synchronises with the GPU in each layer.
    """
    frequencies = _frequencies(model)
    facts = facts_of(model) or ModelFacts()
    key = (tuple(layers), tuple(frequencies))
    if key not in facts.rotations:
        facts.rotations[key] = _tried_rotations(model, layers, list(frequencies.values()))
    return facts.rotations[key]


def _rope_settings(config: Any) -> Iterator[Mapping[str, Any]]:
    """The RoPE settings of all layers and of each kind of layer, under the new and the old name."""
    for name in ("rope_parameters", "rope_scaling"):
        settings = getattr(config, name, None)
        if isinstance(settings, Mapping):
            yield settings
            yield from (value for value in settings.values() if isinstance(value, Mapping))


def _boundary(settings: Mapping[str, Any], config: Any) -> Boundary | None:
    """The boundary in RoPE settings; None if they have none."""
    kind = str(settings.get("rope_type") or settings.get("type") or "")
    longest = getattr(config, "max_position_embeddings", None)
    if "dynamic" in kind and longest:
        return Boundary(int(longest), "dynamic")

    if kind in ("longrope", "su") or "long_factor" in settings:  # "su" is its first name
        name = "original_max_position_embeddings"
        length = settings.get(name) or getattr(config, name, longest)
        if length:
            return Boundary(int(length), "longrope")
    return None


def _change_of_pattern(
    model: HookedModel, layer: int, ids: Int[Tensor, " pos"], other_ids: Int[Tensor, " pos"]
) -> float | None:
    """The largest change of a layer's pattern if a few tokens get other position ids.

    None if the model takes no position ids.
    """
    tokens = hooks.few_tokens(model, len(ids))
    real = torch.ones_like(tokens, dtype=torch.bool)
    patterns: list[Float[Tensor, "1 head query key"]] = []

    def keep_pattern(layer: int, pattern: Pattern, v: Any) -> None:
        patterns.append(pattern.float())

    try:
        for row_ids in (ids, other_ids):
            forward_with_patterns(
                model, tokens, real, [layer], keep_pattern, position_ids=row_ids[None]
            )
    except (TypeError, ValueError):  # it has no argument for them, or refuses them
        return None
    pattern, other_pattern = patterns
    return float((other_pattern - pattern).abs().max())


def _frequencies(model: HookedModel) -> dict[Any, Tensor]:
    """The different rotary frequencies in the model's buffers, on the CPU, by their values."""
    frequencies = {}
    for name, buffer in innermost(model).named_buffers():
        if name.endswith("inv_freq"):
            frequencies[tuple(buffer.tolist())] = buffer.detach().cpu().clone()
    return frequencies


def _tried_rotations(
    model: HookedModel, layers: Sequence[int], frequencies: Sequence[Tensor]
) -> Rotations:
    """The rotations of these layers, found by trying those with the model's frequencies."""
    fault = why_not_streamed(model, hooks.attention_layers(model))
    if fault is not None:
        return Rotations({}, fault)
    boundary = boundary_of(model)
    if boundary is not None and boundary.kind == "longrope":
        return Rotations({}, "its rotary frequencies depend on the length of the text (LongRoPE)")

    # With ALiBi, positions are added to the scores. Some of these models take no position ids, so
    # this comes first.
    attentions = _attentions(model, layers, rows=1)
    if all(attention.bias is not None for attention in attentions.values()):
        return Rotations(dict.fromkeys(layers, NO_ROTATION))

    position_count = model.cfg.n_ctx
    if boundary is not None:
        position_count = min(position_count, boundary.at)
    positions = torch.arange(_ROTATED_LENGTH, device=device_of(model))
    shift = min(_LARGEST_SHIFT, position_count - _ROTATED_LENGTH)
    position_ids = torch.stack([positions, positions + shift])

    try:
        attentions = _attentions(model, layers, rows=2, position_ids=position_ids)
    except (TypeError, ValueError, IndexError):  # it has no argument for them, or no such positions
        return Rotations(
            {}, "it takes no position ids, so its tokens cannot be moved to other positions"
        )

    d_head = attentions[layers[0]].q.shape[-1]
    candidates = list(_candidates(frequencies, d_head))
    rotations: dict[int, Rotation] = {}

    for layer in layers:
        errors = [_error(rotation, attentions[layer], position_ids) for rotation in candidates]
        best_index = int(np.argmin(errors))
        if errors[best_index] <= rounding_of(model, **_ROUNDING):
            rotations[layer] = candidates[best_index]

    # This is also what a model that ignores position ids looks like.
    if all(rotation is NO_ROTATION for rotation in rotations.values()):
        return Rotations(
            {}, "its positions are learned, or none of its rotary frequencies moves its queries"
        )
    unknown_layers = [layer for layer in layers if layer not in rotations]
    if not unknown_layers:
        return Rotations(rotations)
    listed_layers = ", ".join(map(str, unknown_layers))
    return Rotations(rotations, f"no rotation moves the queries and keys of layer {listed_layers}")


def _attentions(
    model: HookedModel, layers: Sequence[int], rows: int, position_ids: Tensor | None = None
) -> Mapping[int, Attention]:
    """The queries and keys of each layer for a few tokens. All rows have the same tokens."""
    attention_of_layer: dict[int, Attention] = {}

    def see(layer: int, block: Rows) -> None:
        assert isinstance(block.attention, Attention), "streamed attention has queries and keys"
        attention_of_layer[layer] = block.attention

    tokens = hooks.few_tokens(model, _ROTATED_LENGTH).expand(rows, -1)
    with streaming(model, layers, see):
        hooks.forward_to(model, tokens, max(layers), [], position_ids)
    return attention_of_layer


def _candidates(frequencies: Sequence[Tensor], d_head: int) -> Iterator[Rotation]:
    """No rotation, and every way in which models use each set of frequencies.

    The two channels of a pair are adjacent, or one is in the first half of the rotated channels and
    one in the second. If not all channels are rotated, the first or the last ones are.
    """
    yield NO_ROTATION
    for pair_frequencies in frequencies:
        unrotated_channels = d_head - 2 * len(pair_frequencies)
        if unrotated_channels < 0:
            continue
        first_channels = {0, unrotated_channels}  # one if all channels are rotated
        for adjacent in (False, True):
            for first in first_channels:
                yield Rotation(pair_frequencies, adjacent, first)


def _error(rotation: Rotation, attention: Attention, position_ids: Int[Tensor, "2 pos"]) -> float:
    """The larger of two errors of a rotation that is to turn the first row into the second.

    The error of queries, and that of keys, is the largest difference between the rotated first row
    and the second row, relative to the largest number of both rows.
    """
    errors = []
    for vectors in (attention.q, attention.k):
        rows = in_working_dtype(vectors)
        first_row = rows[:1]
        second_row = rows[1:]
        ids = position_ids.to(rows.device)
        turns = rotation.turns(ids[:1], ids[1:], rows.dtype)
        difference = rotation.moved(first_row, turns) - second_row
        largest = rows.abs().max().clamp(min=torch.finfo(rows.dtype).tiny)  # all may be 0
        errors.append(float(difference.abs().max() / largest))
    return max(errors)
