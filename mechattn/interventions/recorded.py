"""Interventions with activations of another run, or with chosen numbers.

They apply an affine map to the heads' outputs, or exchange the keys and values of a segment.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechattn.axes import SEGMENTS
from mechattn.errors import ModelError, OptionError, check_choice
from mechattn.functional.attention import in_working_dtype
from mechattn.interventions.intervention import (
    Acting,
    CurrentTarget,
    Target,
    as_tuple,
    on,
    store_tuples,
    tensors_digest,
)
from mechattn.model.head_parts import output_weights
from mechattn.model.hooks import attention_layers, blocks_of
from mechattn.model.patch.keys_values_z import (
    Part,
    Z,
    changing_keys_values,
    changing_z,
    check_layers,
    heads_of,
)
from mechattn.prompts.token_sequences import TokenSequence

AffineParts = Literal["both", "scale", "shift"]
Positions = Int[Tensor, " pos"]
# λ and Σσ, which broadcast to [pos head d_head], and which of the tokens are changed.
TokenMap = tuple[Tensor, Tensor, Bool[Tensor, " pos"]]


class Affine(NamedTuple):
    """λ and Σσ of one prompt in one layer, for each original token."""

    scale: Float[Tensor, "head original"]  # λ
    shift: Float[Tensor, "head original d_head"]  # Σσ, before W_O


class _AffineMap(ABC):
    """Scales and shifts the output of each head."""

    layers: int | tuple[int, ...]
    parts: AffineParts

    @abstractmethod
    def _map(self, layer: int, prompt: str, positions: Positions) -> TokenMap:
        """λ and Σσ of the tokens at these positions, and which of these tokens they change."""

    def __post_init__(self) -> None:
        check_choice(AffineParts, parts=self.parts)
        store_tuples(self, "layers")

    def only(self, parts: AffineParts) -> _AffineMap:
        """Return a copy that applies "scale", "shift" or "both"."""
        return replace(self, parts=parts)  # type: ignore[type-var]  # a subclass is a dataclass

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """The layers as a tuple, even if there is only one."""
        return as_tuple(self.layers)

    def acting(self, model: Any, target: CurrentTarget) -> Acting:
        """Scale and shift the heads' outputs at the target's tokens inside a ``with`` block."""

        def affine(layer: int, z: Z) -> Z:
            z = z.clone()
            tokens = target()
            positions = tokens.positions.to(z.device)
            for index, row in enumerate(tokens.rows.tolist()):
                scale, shift, is_mapped = self._map(layer, tokens.prompts[index], positions[index])
                outputs = in_working_dtype(z[row])
                mapped_outputs = outputs
                if self.parts != "shift":
                    mapped_outputs = scale.to(outputs) * mapped_outputs
                if self.parts != "scale":
                    mapped_outputs = mapped_outputs + shift.to(outputs)
                z[row] = torch.where(is_mapped[:, None, None], mapped_outputs, outputs)
            return z

        return changing_z(model, {layer: partial(affine, layer) for layer in self.layer_numbers})

    def _described(self, source: str, tensors: Any) -> str:
        """The text by which a result records the intervention, with a digest of its tensors."""
        return (
            f"{type(self).__name__}({source}, layers={self.layer_numbers}, parts={self.parts!r}, "
            f"digest={tensors_digest(tensors)})"
        )

    on = on  # with affine.on(model): … sets it outside a run


@dataclass(frozen=True, eq=False)
class AffineAttention(_AffineMap):
    """Apply ``z → λ · z + Σσ`` with chosen numbers to the output (before W_O) of each head.

    Inserted tokens stay unchanged. :func:`mechattn.record_affine` measures these numbers instead.

    Args:
        scale: λ for all original and generated tokens: one number, or [head].
        shift: Σσ for these tokens: one number, [head 1] or [head d_head].
        layers: One or several layers, counted from 0.
        parts: Which part to apply: "scale", "shift" or "both".

    Raises:
        OptionError: The scale or the shift does not consist of numbers, or ``parts`` is unknown.
    """

    scale: float | Float[Tensor, " head"] = 1.0
    shift: float | Float[Tensor, "head width"] = 0.0
    layers: int | tuple[int, ...] = 0
    parts: AffineParts = "both"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("scale", "shift"):
            value = getattr(self, name)
            try:
                torch.as_tensor(value)
            except (TypeError, ValueError, RuntimeError):
                raise OptionError(f"{name}={value!r}: give a number or a tensor") from None

    def check(self, model: Any, prompts: Sequence[str]) -> None:
        """Refuse layers that don't exist, and a scale or shift with the wrong axes."""
        check_layers(model, self.layer_numbers)
        heads = heads_of(model)
        scale_shape = torch.as_tensor(self.scale).shape
        if scale_shape not in ((), (heads,)):
            raise OptionError(
                f"scale has the shape {tuple(scale_shape)}; give a number, or [head] of {heads}"
                " heads"
            )

        shift_shape = torch.as_tensor(self.shift).shape
        if not shift_shape:
            return
        if len(shift_shape) != 2 or shift_shape[0] != heads:
            raise OptionError(
                f"shift has the shape {tuple(shift_shape)}; give a number, or [head d_head] of"
                f" {heads} heads"
            )
        d_head = _known_width(model, self.layer_numbers[0])
        if d_head is not None and shift_shape[1] not in (1, d_head):
            raise OptionError(
                f"shift has {shift_shape[1]} numbers per head; give d_head = {d_head}, or 1"
            )

    def _map(self, layer: int, prompt: str, positions: Positions) -> TokenMap:
        scale = torch.as_tensor(self.scale)[..., None]
        return scale, torch.as_tensor(self.shift), positions >= 0

    def __repr__(self) -> str:
        return self._described("chosen", [torch.as_tensor(self.scale), torch.as_tensor(self.shift)])


@dataclass(frozen=True, eq=False)
class RecordedAffine(_AffineMap):
    """Apply the measured ``z → λ · z + Σσ`` to the output (before W_O) of each head.

    This imitates the effect of inserted tokens without inserting them. Only original tokens are
    changed. :func:`mechattn.record_affine` returns such an intervention.

    Values that were recorded with ``.unshifted()`` tokens reproduce the output of layer 0 at the
    original tokens exactly. With shifted tokens re-routing is missing, and in later layers changed
    values are missing too. ``AffineShift`` reports both.

    Args:
        recorded: Measured values by prompt and layer.
        layers: One or several layers, counted from 0.
        source: Where the values come from, in words.
        parts: Which part to apply: "scale", "shift" or "both".
    """

    recorded: Mapping[str, Mapping[int, Affine]]
    layers: int | tuple[int, ...]
    source: str
    parts: AffineParts = "both"

    def check(self, model: Any, prompts: Sequence[str]) -> None:
        """Refuse layers that don't exist, and layers or prompts that were not recorded."""
        check_layers(model, self.layer_numbers)
        _check_recorded_prompts(prompts, self.recorded, "record_affine")
        for prompt in prompts:
            _check_recorded_layers(self.layer_numbers, self.recorded[prompt])

    def _map(self, layer: int, prompt: str, positions: Positions) -> TokenMap:
        recorded = self.recorded[prompt][layer]
        length = recorded.scale.shape[1]

        # A pass that starts at position 0 reads the whole prompt. A later pass with a cache may
        # read only tokens after it, whose count does not show the prompt's length.
        count = int((positions >= 0).sum())
        if (positions == 0).any() and count != length:
            raise OptionError(
                f"prompt {prompt!r} has {count} tokens here but had {length} when recorded,"
                " so it is a different prompt"
            )

        # Tokens that were not recorded, such as generated ones, stay unchanged.
        is_recorded = (positions >= 0) & (positions < length)
        columns = positions.clamp(0, length - 1).to(recorded.scale.device)
        scale = rearrange(recorded.scale[:, columns], "head pos -> pos head 1")
        shift = rearrange(recorded.shift[:, columns], "head pos d_head -> pos head d_head")
        return scale, shift, is_recorded

    def __repr__(self) -> str:
        return self._described(self.source, self.recorded)


@dataclass(frozen=True, eq=False)
class KeysValues:
    """Recorded keys and values of one segment's tokens.

    :func:`mechattn.record_keys_values` returns them.

    Args:
        by_prompt: Keys and values [pos width] by prompt, layer, and "k" or "v", before RoPE and
            norms. The heads are concatenated.
        segment: The recorded segment.
        description: Where they come from, in words.
        sources: For each prompt, the prompt whose keys and values it gets. By default each gets its
            own.
    """

    by_prompt: Mapping[str, Mapping[int, Mapping[Part, Float[Tensor, "pos width"]]]]
    segment: str
    description: str
    sources: Mapping[str, str] = field(default_factory=dict)

    def from_other_prompts(self, seed: int = 0) -> KeysValues:
        """Return a copy that gives each prompt the keys and values of a different prompt.

        The prompts are drawn at random, and each is the source of exactly one other.

        Raises:
            OptionError: Fewer than two prompts were recorded.
        """
        if len(self.by_prompt) < 2:
            raise OptionError(
                "only one prompt was recorded, so there is no other prompt to take keys and values "
                "from"
            )
        rng = random.Random(f"sources {seed}")
        ring = rng.sample(sorted(self.by_prompt), len(self.by_prompt))
        # Each prompt gets those of the next in the ring, so none gets its own.
        next_in_ring = [*ring[1:], ring[0]]
        return replace(
            self,
            sources=dict(zip(ring, next_in_ring, strict=True)),
            description=f"{self.description}, each from another prompt (seed {seed})",
        )

    def source_of(self, prompt: str) -> str:
        """The prompt whose keys and values this prompt gets."""
        return self.sources.get(prompt, prompt)

    @property
    def layers(self) -> tuple[int, ...]:
        """The recorded layers."""
        return tuple(next(iter(self.by_prompt.values())))

    def __repr__(self) -> str:
        digest = tensors_digest(self.by_prompt)
        return f"KeysValues({self.segment!r}, {self.description}, digest={digest})"


@dataclass(frozen=True, eq=False)
class KVPatch:
    """Replace the keys and values at a segment's tokens by those of another run.

    ``k[l, i], v[l, i] → k′[l, i], v′[l, i]``

    Later tokens read the replaced keys and values, as if a key-value cache had been edited. The
    outputs of the segment's own tokens stay those of a first pass without the exchange, so what
    they predict does not change either. However, ``run`` measures their attention over the
    exchanged keys. Keys are exchanged before RoPE, so they get the positions of the receiving
    tokens.

    If the answer changes to that of the other run, these tokens carried it (as in "Reading Between
    the Dots", ICML workshop 2026). The first token of the answer cannot change if it is predicted
    by a token of the segment.

    Args:
        segment: The segment to replace; "inserted" for filler.
        from_: The result of :func:`mechattn.record_keys_values`. It was recorded for the same
            prompts under another filler of equal length; or, after ``.from_other_prompts()``, it
            gives each prompt the keys and values of another prompt under the same filler.
        layers: The layers, counted from 0; all recorded layers by default.

    Raises:
        OptionError: ``from_`` was not recorded at this segment or in these layers.
    """

    segment: str
    from_: KeysValues
    layers: int | tuple[int, ...] | None = None
    reads_first: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.from_, KeysValues):
            raise OptionError(f"from_={self.from_!r}: give what ma.record_keys_values(…) returns")
        if self.from_.segment != self.segment:
            raise OptionError(
                f"from_ was recorded at {self.from_.segment!r} tokens, not at {self.segment!r}"
            )

        store_tuples(self, "layers")
        _check_recorded_layers(self.layer_numbers, self.from_.layers)

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """The layers as a tuple, even if there is only one."""
        if self.layers is None:
            return self.from_.layers
        return as_tuple(self.layers)

    def check(self, model: Any, prompts: Sequence[str]) -> None:
        """Refuse layers that don't exist, sources that were not recorded, and a model in which
        layers without attention would carry the segment's content past the exchange.
        """
        check_layers(model, self.layer_numbers)
        if hasattr(model, "hook_dict"):  # models of transformers have none
            attending_count = len(attention_layers(model))
            if attending_count < model.cfg.n_layers:
                raise OptionError(
                    f"{model.cfg.model_name} has attention in {attending_count} of "
                    f"{model.cfg.n_layers} layers; the other layers pass on these tokens' content, "
                    "so exchanging keys and values would not replace it"
                )
        sources = [self.from_.source_of(prompt) for prompt in prompts]
        _check_recorded_prompts(sources, self.from_.by_prompt, "record_keys_values")

    def check_sequence(self, prompt: str, sequence: TokenSequence) -> None:
        """Refuse a sequence whose segment differs in length from the recorded one."""
        count = int(sequence.of_segment(self.segment).sum())
        source = self.from_.source_of(prompt)
        recorded_count = len(self.from_.by_prompt[source][self.layer_numbers[0]]["k"])
        if recorded_count != count:
            raise OptionError(
                f"prompt {prompt} has {count} {self.segment} tokens, but {recorded_count} were "
                f"recorded for prompt {source}: the numbers must be equal"
            )

    @contextmanager
    def acting(self, model: Any, target: CurrentTarget) -> Iterator[None]:
        """Exchange keys and values at the segment's tokens inside a ``with`` block, and give these
        tokens the outputs of the first pass.
        """
        # ``reads_first`` makes the engine read each batch twice. The hook of z stores the output of
        # the first pass, and fires after the hooks of keys and values. So a layer without a stored
        # output is in its first pass.
        first_outputs: dict[int, Tensor] = {}  # by layer, at the segment's tokens, before W_O

        def exchange(layer: int, part: Part, x: Float[Tensor, "batch pos width"]) -> Tensor:
            """In the second pass, put the other run's keys or values at these tokens."""
            tokens = target()
            mask = self._acts_on(tokens, x)
            is_first_pass = layer not in first_outputs
            if is_first_pass or not mask.any():
                return x
            # masked_scatter fills row by row, so the prompts must be in the order of the rows.
            sources = [self.from_.source_of(prompt) for prompt in tokens.prompts]
            recorded = torch.cat([self.from_.by_prompt[source][layer][part] for source in sources])
            return x.masked_scatter(mask[..., None], recorded.to(x))

        def store_or_restore(layer: int, z: Z) -> Tensor:
            """Store the outputs at these tokens in the first pass; restore them in the second."""
            mask = self._acts_on(target(), z)
            if not mask.any():
                return z
            if layer not in first_outputs:
                first_outputs[layer] = z[mask]
                return z
            return z.masked_scatter(mask[..., None, None], first_outputs[layer])

        exchanges = {layer: partial(exchange, layer) for layer in self.layer_numbers}
        # The exchange changes the outputs of its first layer and of all layers after it.
        changed_layers = range(min(self.layer_numbers), len(blocks_of(model)))
        restorations = {layer: partial(store_or_restore, layer) for layer in changed_layers}
        with changing_keys_values(model, exchanges), changing_z(model, restorations):
            yield

    def _acts_on(
        self, tokens: Target, tensor: Float[Tensor, "batch pos ..."]
    ) -> Bool[Tensor, "batch pos"]:
        """Which positions of a tensor belong to the segment; generated tokens never do."""
        if tokens.segments is None:
            raise OptionError(
                "a KVPatch needs the segment of each token, which only run and evaluate know: use"
                " it as the intervention of a condition"
            )
        mask = torch.zeros(tensor.shape[:2], dtype=torch.bool, device=tensor.device)
        in_segment = tokens.segments == SEGMENTS.index(self.segment)
        mask[tokens.rows.to(tensor.device)] = in_segment.to(tensor.device)
        return mask

    def __repr__(self) -> str:
        return f"KVPatch({self.segment!r}, from_={self.from_!r}, layers={self.layer_numbers})"

    on = on  # its first pass is refused, since tokens have no segments outside a run


def _known_width(model: Any, layer: int) -> int | None:
    """The width of z, which is that of W_O by head; None if the model does not show W_O by head, as
    a model of transformers and some hooked models do not."""
    if not hasattr(model, "hook_dict"):
        return None
    try:
        return output_weights(model, layer).shape[1]
    except ModelError:
        return None


def _check_recorded_prompts(
    prompts: Sequence[str], recorded: Collection[str], recorder: str
) -> None:
    """Refuse prompts that were not recorded, and an empty list of prompts.

    Args:
        prompts: The ids of prompts.
        recorded: The ids of the recorded prompts.
        recorder: The name of the function that records, for the message.
    """
    reason = f"this intervention acts only on the prompts that {recorder} recorded"
    if not prompts:
        raise OptionError(f"name the prompts: {reason}")
    for prompt in prompts:
        if prompt not in recorded:
            raise OptionError(f"prompt {prompt!r} was not recorded: {reason}")


def _check_recorded_layers(layers: Sequence[int], recorded: Collection[int]) -> None:
    """Refuse layers that were not recorded, and an empty list of layers."""
    if not layers or not set(layers) <= set(recorded):
        raise OptionError(f"layers={layers}: the recorded layers are {list(recorded)}")
