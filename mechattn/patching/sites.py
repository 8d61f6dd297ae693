"""What is patched: a part of which heads or layers, and at which tokens."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mechattn.axes import head_named
from mechattn.errors import ModelError, OptionError, check_choice
from mechattn.model.head_parts import kv_heads_of
from mechattn.model.hooked import HookedModel
from mechattn.model.hooks import attention_layers, chosen_layers, keeping_nothing
from mechattn.model.several_devices import device_of
from mechattn.patching.patched_runs import OF_LAYER, Part, Where, changing


@dataclass(frozen=True)
class Sites:
    """What to patch: a part of some heads or layers, at all original tokens, or by segment or
    position.

    Args:
        part: "z", a head's output before W_O; "q", "k" or "v", its queries, keys or values before
            norms and RoPE (for heads with keys and values of their own); "pattern", its attention
            among the original tokens; or, of a whole layer, "resid_post", the residual stream after
            it, "attn_out" or "mlp_out", what attention or the MLP adds.
        where: Heads as (layer, head) or "L0H2", from 0; layers as numbers for a part of a layer.
            All by default: for "z" these are attributed, and with "all" patched exactly.
        by: "segment" patches the tokens of each segment by themselves, "position" each token
            (prompts then have equally many); by default all original tokens together.
    """

    part: Part = "z"
    where: Sequence[Where | str] | Sequence[int] | Literal["all"] | None = None
    by: Literal["segment", "position"] | None = None


@dataclass(frozen=True)
class Target:
    """The sites in a model: (layer, head) pairs, the segments to patch one by one, and how."""

    part: Part
    heads: tuple[Where, ...]
    by: Literal["segment", "position"] | None
    together: bool
    attributed: bool

    @property
    def of_layers(self) -> bool:
        """Whether the part is one of whole layers, not of heads."""
        return self.part in OF_LAYER

    @property
    def layers(self) -> list[int]:
        """The layers that are changed."""
        return sorted({layer for layer, _ in self.heads})

    @property
    def units(self) -> list[tuple[Where, ...]]:
        """The heads of each unit: one, or all of them together."""
        if self.together:
            return [self.heads]
        return [(where,) for where in self.heads]


def target_in(model: HookedModel, at: Any, together: bool) -> Target:
    """The sites that ``at`` names in a model; all heads' z is attributed, everything else is
    patched exactly.
    """
    if isinstance(at, str) and at in get_args(Part):
        at = Sites(at)  # type: ignore[arg-type]
    sites = at
    if not isinstance(sites, Sites):
        sites = Sites("z", at)
    check_choice(Part, part=sites.part)
    if sites.by not in (None, "segment", "position"):
        raise OptionError(f'by={sites.by!r}: give "segment", "position" or None')
    if not isinstance(together, bool):
        raise OptionError(f"together={together!r}: give True or False, and name the set in at=…")
    where: Any = sites.where
    if isinstance(where, str) and where == "all":
        where = None
    if sites.part in OF_LAYER:
        heads = [(layer, 0) for layer in chosen_layers(model, where)]
    else:
        count = kv_heads_of(model) if sites.part in ("k", "v") else int(model.cfg.n_heads)
        heads = _heads(model, where, count)
    if sites.part == "pattern" and not _patterns_act(model):
        raise ModelError(
            f"the attention of {model.cfg.model_name} is computed outside its hooks, so changing "
            'the pattern has no effect; patch "z" or "v"'
        )
    attributed = sites.part == "z" and sites.where is None and not together
    return Target(sites.part, tuple(heads), sites.by, together, attributed)


def _heads(model: HookedModel, heads: Any, count: int) -> list[Where]:
    """The named heads, each once; by default all, ``count`` per layer."""
    layers = attention_layers(model)
    if heads is None:
        return [(layer, head) for layer in layers for head in range(count)]
    pairs = []
    if isinstance(heads, (tuple, list)):
        pairs = [head_named(head) or head for head in heads]
    if not pairs or not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
        parts = ", ".join(map(repr, get_args(Part)))
        raise OptionError(
            f'at={heads!r}: give heads such as [(1, 4)] or ["L1H4"], "all", or one of {parts}'
        )
    for layer, head in pairs:
        if not _is_whole(layer) or not _is_whole(head):
            raise OptionError(
                f"at={heads!r}: ({layer!r}, {head!r}) is not two whole numbers; give such as "
                "[(1, 4)]"
            )
        if layer not in layers or not 0 <= head < count:
            raise OptionError(
                f"there is no head {head} in layer {layer}: {model.cfg.model_name} has heads 0 to "
                f"{count - 1} in layers {', '.join(map(str, layers))}"
            )
    return list(dict.fromkeys((int(layer), int(head)) for layer, head in pairs))


def _is_whole(number: Any) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool)


def _patterns_act(model: HookedModel) -> bool:
    """Whether changing the pattern at its hook changes the head's output, tried on a few tokens."""
    tokens = torch.arange(3, 9, device=device_of(model))[None]
    layer = attention_layers(model)[0]
    outputs: list[Tensor] = []

    def record(z: Tensor) -> Tensor:
        outputs.append(z.detach().clone())
        return z

    def to_oneself(pattern: Tensor) -> Tensor:
        identity = torch.eye(pattern.shape[1], device=pattern.device, dtype=pattern.dtype)
        return identity[None, :, None].expand_as(pattern)

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TransformerLens warns of the same
        for changes in ({}, {layer: to_oneself}):
            changed = changing(model, "pattern", changes)
            with changed, changing(model, "z", {layer: record}):
                model(tokens, return_type=None, **keeping_nothing(model))
    return not torch.equal(*outputs)
