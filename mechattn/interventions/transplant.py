"""Transplant: gives some tokens the keys and values of another run, to test whether the answer follows them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechattn.axes import SEGMENTS
from mechattn.errors import OptionError
from mechattn.interventions.intervention import Target, digest, on
from mechattn.model.hooks import attention_layers, blocks_of
from mechattn.model.patch.keys_values_z import Part, changing_keys_values, changing_z, check_layers
from mechattn.prompts.sequences import Sequence as Tokens


@dataclass(frozen=True, eq=False)
class KeysValues:
    """Recorded keys and values of one segment's tokens; see :func:`mechattn.record_keys_values`.

    Args:
        of: By prompt, layer and "k" or "v": all heads concatenated, before RoPE and norms [pos width].
        segment: The recorded segment.
        source: Where they come from, in words.
        donors: For each prompt, the prompt whose keys and values it gets; itself by default.
    """

    of: Mapping[str, Mapping[int, Mapping[Part, Float[Tensor, "pos width"]]]]
    segment: str
    source: str
    donors: Mapping[str, str] = field(default_factory=dict)

    def from_other_prompts(self, seed: int = 0) -> KeysValues:
        """Return a version that gives each prompt the keys and values of another, drawn at random without repeats.

        Raises:
            OptionError: Only one prompt was recorded.
        """
        if len(self.of) < 2:
            raise OptionError("only one prompt was recorded, so there is no other prompt to take keys and values from")
        order = random.Random(f"donors {seed}").sample(sorted(self.of), len(self.of))
        donors = dict(zip(order, [*order[1:], order[0]], strict=True))  # a ring, so no prompt gets its own
        return replace(self, donors=donors, source=f"{self.source}, each from another prompt (seed {seed})")

    def donor(self, prompt: str) -> str:
        """The prompt whose keys and values this prompt gets."""
        return self.donors.get(prompt, prompt)

    @property
    def layers(self) -> tuple[int, ...]:
        """The recorded layers."""
        return tuple(next(iter(self.of.values())))

    def __repr__(self) -> str:
        made = digest(part for one in self.of.values() for layer in one.values() for part in layer.values())
        return f"KeysValues({self.segment!r}, {self.source}, digest={made})"


@dataclass(frozen=True, eq=False)
class Transplant:
    """Replace keys and values at a segment's tokens by those of another run: ``k[l, i], v[l, i] → k′[l, i], v′[l, i]``.

    Later tokens then read the other run's keys and values there. What these tokens themselves read and predict does not
    change, as in a key-value cache that is edited after them: their heads' outputs are those of a first pass without
    the exchange (yet ``run`` measures these tokens' own rows of attention over the exchanged keys). Keys are exchanged
    before RoPE, so they get the receiving tokens' positions. If the answer follows, these tokens carried it (as in
    "Reading Between the Dots", ICML workshop 2026); its first token cannot, where one of these tokens predicts it.

    Args:
        segment: The segment to replace; "inserted" for filler.
        from_: The result of :func:`mechattn.record_keys_values`: for the same prompts under another filler of equal
            length, or, with ``.from_other_prompts()``, for another prompt under the same filler.
        layers: The layers, from 0; all recorded ones by default.
    """

    segment: str = "inserted"
    from_: KeysValues | None = None
    layers: int | tuple[int, ...] | None = None
    reads_first: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.segment not in SEGMENTS:
            raise OptionError(f"segment={self.segment!r}: choose one of {', '.join(map(repr, SEGMENTS))}")
        if not isinstance(self.from_, KeysValues):
            raise OptionError(
                f"from_={self.from_!r}: give the result of ma.record_keys_values(model, prompts, condition), "
                f"optionally with .from_other_prompts()"
            )
        if self.from_.segment != self.segment:
            raise OptionError(f"from_ was recorded at {self.from_.segment!r} tokens, not at {self.segment!r}")
        missing = [layer for layer in self.which if layer not in self.from_.layers]
        if missing or not self.which:
            raise OptionError(f"layers={self.layers!r}: the recorded layers are {list(self.from_.layers)}")

    @property
    def recorded(self) -> KeysValues:
        """The recorded keys and values."""
        assert self.from_ is not None  # otherwise __post_init__ would have refused it
        return self.from_

    @property
    def which(self) -> tuple[int, ...]:
        """The layers."""
        if self.layers is None:
            return self.recorded.layers
        return (self.layers,) if isinstance(self.layers, int) else tuple(self.layers)

    def check(self, model: Any, prompts: Sequence[str]) -> None:
        """Refuse layers that don't exist, and prompts or donors that were not recorded."""
        check_layers(model, self.which)
        attending = attention_layers(model) if hasattr(model, "hook_dict") else []
        if attending and len(attending) < model.cfg.n_layers:
            raise OptionError(
                f"{model.cfg.model_name} has attention in {len(attending)} of {model.cfg.n_layers} layers; the other "
                f"layers pass on these tokens' content whatever their keys and values are"
            )
        missing = [prompt for prompt in prompts if self.recorded.donor(prompt) not in self.recorded.of]
        if missing or not prompts:
            what = f"prompt {missing[0]!r} was not recorded" if missing else "name the prompts"
            raise OptionError(f"{what}: a Transplant acts only on the prompts that record_keys_values recorded")

    def check_sequence(self, prompt: str, sequence: Tokens) -> None:
        """Refuse a sequence whose segment has another length than the recorded one."""
        there = int(sequence.of_segment(self.segment).sum())
        whose = self.recorded.donor(prompt)
        if (recorded := len(self.recorded.of[whose][self.which[0]]["k"])) != there:
            raise OptionError(
                f"prompt {prompt} has {there} {self.segment} tokens, but {recorded} were recorded for prompt {whose}: "
                f"the numbers must be equal"
            )

    @contextmanager
    def acting(self, model: Any, target: Callable[[], Target]) -> Iterator[None]:
        """Exchange keys and values of these tokens, and keep their own outputs as they were in the first pass."""
        first: dict[int, Tensor] = {}  # each layer's outputs at these tokens, before W_O

        def places(like: Float[Tensor, "batch pos ..."]) -> Bool[Tensor, "batch pos"]:
            now = target()
            if now.segments is None:
                raise OptionError("a Transplant needs the segment of each token: use it in run or evaluate")
            made = torch.zeros(like.shape[:2], dtype=torch.bool, device=like.device)
            made[now.rows.to(like.device)] = (now.segments == SEGMENTS.index(self.segment)).to(like.device)
            return made  # without any token while an answer is generated

        def exchanged(layer: int, part: Part, shown: Float[Tensor, "batch pos width"]) -> Tensor:
            where = places(shown)
            if layer not in first or not where.any():
                return shown
            given = [self.recorded.of[self.recorded.donor(prompt)][layer][part] for prompt in target().prompts]
            return shown.masked_scatter(where[..., None], torch.cat(given).to(shown))

        def kept(layer: int, z: Float[Tensor, "batch pos head d_head"]) -> Tensor:
            where = places(z)
            return z.masked_scatter(where[..., None, None], first.setdefault(layer, z[where])) if where.any() else z

        outputs = {layer: partial(kept, layer) for layer in range(min(self.which), len(blocks_of(model)))}
        with (
            changing_keys_values(model, {layer: partial(exchanged, layer) for layer in self.which}),
            changing_z(model, outputs),
        ):
            yield

    def __repr__(self) -> str:
        return f"Transplant({self.segment!r}, from_={self.recorded!r}, layers={self.which})"

    on = on
