"""The affine map by which inserted tokens change attention's output, applied without inserting them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from mechattn.errors import OptionError
from mechattn.interventions.intervention import Target, digest, on
from mechattn.model.patch.keys_values_z import changing_z, check_layers, heads_of

Parts = Literal["both", "scale", "shift"]


@dataclass(frozen=True)
class Affine:
    """λ and Σσ of one prompt in one layer, for each original token."""

    scale: Float[Tensor, "head original"]  # λ
    shift: Float[Tensor, "head original d_head"]  # Σσ, before W_O


@dataclass(frozen=True, eq=False)
class AffineAttention:
    """Apply ``z → λ · z + Σσ`` to each original token and head (before W_O): the effect of insertion, without it.

    Measured values come from :func:`mechattn.record_affine`; you can also choose your own. Values recorded with
    ``.unshifted()`` tokens reproduce layer 0's output at the original tokens exactly. Otherwise re-routing is missing,
    and in later layers also changed values (``AffineShift`` reports both).

    Args:
        scale: A chosen λ for all tokens: one number, or one per head.
        shift: A chosen Σσ for all tokens [head d_head]; none by default.
        layers: The layers, from 0.
        parts: Which part to apply: "scale", "shift" or "both".
        recorded: Measured values by prompt and layer, in place of chosen ones.
        source: Where the values come from, in words.
    """

    scale: float | Float[Tensor, " head"] = 1.0
    shift: Float[Tensor, "head d_head"] | None = None
    layers: int | tuple[int, ...] = 0
    parts: Parts = "both"
    recorded: Mapping[str, Mapping[int, Affine]] | None = None
    source: str = "chosen"

    def __post_init__(self) -> None:
        if self.parts not in get_args(Parts):
            raise OptionError(f"parts={self.parts!r}: choose one of {', '.join(map(repr, get_args(Parts)))}")

    def only(self, parts: Parts) -> AffineAttention:
        """Return the intervention with only the scale, or only the shift."""
        return replace(self, parts=parts)

    @property
    def which(self) -> tuple[int, ...]:
        """The layers."""
        return (self.layers,) if isinstance(self.layers, int) else tuple(self.layers)

    def check(self, model: Any, prompts: Sequence[str]) -> None:
        """Refuse layers that don't exist and prompts that were not recorded."""
        check_layers(model, self.which)
        heads = heads_of(model)
        if self.recorded is None:
            if isinstance(self.scale, Tensor) and self.scale.shape != (heads,):
                raise OptionError(f"scale has the shape {tuple(self.scale.shape)}; give a number, or {heads} numbers")
            if self.shift is not None and self.shift.shape[0] != heads:
                raise OptionError(
                    f"shift has the shape {tuple(self.shift.shape)}; give [head d_head], with {heads} heads"
                )
            return
        missing = [prompt for prompt in prompts if prompt not in self.recorded]
        if missing or not prompts:
            what = f"prompt {missing[0]!r} was not recorded" if missing else "name the prompts"
            raise OptionError(
                f"{what}: an AffineAttention from record_affine acts only on the prompts that it was recorded on"
            )

    def acting(self, model: Any, target: Callable[[], Target]) -> AbstractContextManager[None]:
        """Scale and shift the output of these tokens."""

        def change(layer: int) -> Callable[[Tensor], Tensor]:
            def affine(z: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch pos head d_head"]:
                z, now = z.clone(), target()
                for row, prompt, positions in zip(
                    now.rows.tolist(), now.prompts, now.positions.to(z.device), strict=True
                ):
                    z[row] = self._applied(z[row], layer, prompt, positions)
                return z

            return affine

        return changing_z(model, {layer: change(layer) for layer in self.which})

    def _applied(
        self, z: Float[Tensor, "pos head d_head"], layer: int, prompt: str, positions: Int[Tensor, " pos"]
    ) -> Float[Tensor, "pos head d_head"]:
        """The output of one sequence; tokens that were not recorded, such as generated ones, do not change."""
        there = positions >= 0
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        if self.recorded is None:
            scale = torch.as_tensor(self.scale, device=z.device, dtype=z.dtype)[..., None]
            shift = torch.zeros((), device=z.device) if self.shift is None else self.shift.to(z)
        else:
            found = self.recorded[prompt][layer]
            length = found.scale.shape[1]
            if bool((positions == 0).any()) and int(there.sum()) != length:
                raise OptionError(
                    f"prompt {prompt!r} has {int(there.sum())} tokens here but had {length} when recorded, so it is "
                    f"another prompt"
                )
            there &= positions < length
            at = positions.clamp(0, length - 1)
            scale = rearrange(found.scale.to(z)[:, at], "head pos -> pos head 1")
            shift = rearrange(found.shift.to(z)[:, at], "head pos d_head -> pos head d_head")
        scaled = z if self.parts == "shift" else scale * z
        moved = scaled if self.parts == "scale" else scaled + shift
        return torch.where(there[:, None, None], moved, z)

    def __repr__(self) -> str:
        chosen = [torch.as_tensor(self.scale), *([] if self.shift is None else [self.shift])]
        maps = [m for layers in (self.recorded or {}).values() for m in layers.values()]
        made = digest([part for m in maps for part in (m.scale, m.shift)] if maps else chosen)
        return f"AffineAttention({self.source}, layers={self.which}, parts={self.parts!r}, digest={made})"

    on = on
