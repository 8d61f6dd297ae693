"""Ablation of heads: their output is replaced by zero or by a mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from mechattn.errors import OptionError
from mechattn.interventions.intervention import Target, digest, on
from mechattn.model.patch.head_outputs import changing_z, check_layers, heads_of


@dataclass(frozen=True)
class HeadMeans:
    """Each head's mean output before W_O over the tokens of some prompts; see :func:`mechattn.head_means`."""

    # A config can name HeadAblation, without means.
    __pydantic_config__: ClassVar[dict[str, bool]] = {"arbitrary_types_allowed": True}

    by_layer: Mapping[int, Float[Tensor, "head d_head"]]
    prompts: int

    def __repr__(self) -> str:
        made = digest(self.by_layer[layer] for layer in sorted(self.by_layer))
        return f"HeadMeans(of {self.prompts} prompts, layers {sorted(self.by_layer)}, digest={made})"


@dataclass(frozen=True)
class HeadAblation:
    """Replace the output of some heads (before W_O) by 0, or by its mean over other prompts, at every token.

    Args:
        heads: (layer, head) pairs, from 0.
        means: Means that replace the output; 0 by default, which is further from the model's usual activations.
    """

    heads: tuple[tuple[int, int], ...]
    means: HeadMeans | None = None

    def __post_init__(self) -> None:
        for pair in self.heads if isinstance(self.heads, (tuple, list)) else (self.heads,):
            numbers = pair if isinstance(pair, (tuple, list)) else ()
            if len(numbers) != 2 or not all(type(n) is int for n in numbers):
                raise OptionError(
                    f"heads={self.heads!r}: give a tuple of (layer, head) pairs, such as HeadAblation(((1, 4),))"
                )

    def check(self, model: Any, prompts: Sequence[str]) -> None:
        """Refuse a layer or head that doesn't exist, or that has no mean if means are given."""
        if not self.heads:
            raise OptionError("heads=() ablates nothing; give (layer, head) pairs")
        check_layers(model, [layer for layer, _ in self.heads])
        for layer, head in self.heads:
            if not 0 <= head < heads_of(model):
                raise OptionError(
                    f"head {head} is out of range: {model.cfg.model_name} has heads 0 to {model.cfg.n_heads - 1}"
                )
            if self.means is not None and layer not in self.means.by_layer:
                raise OptionError(f"the means cover layers {sorted(self.means.by_layer)}, not layer {layer}")

    def acting(self, model: Any, target: Callable[[], Target]) -> AbstractContextManager[None]:
        """Replace the output of these heads."""

        def change(layer: int) -> Callable[[Tensor], Tensor]:
            heads = [head for n, head in self.heads if n == layer]

            def ablate(z: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch pos head d_head"]:
                z, rows = z.clone(), target().rows.to(z.device)
                for head in heads:
                    z[rows, :, head] = 0.0 if self.means is None else self.means.by_layer[layer][head].to(z)
                return z

            return ablate

        return changing_z(model, {layer: change(layer) for layer in sorted({layer for layer, _ in self.heads})})

    on = on
