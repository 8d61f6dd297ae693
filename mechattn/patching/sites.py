"""What is patched: a part of which heads or layers, and at which tokens."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, get_args

import pandas as pd
import torch
import xarray as xr
from torch import Tensor

from mechattn.errors import ModelError, OptionError, check_choice
from mechattn.model.head_parts import kv_heads_of
from mechattn.model.hooked import HookedModel, device_of
from mechattn.model.hooks import attention_layers, chosen_layers, without_cache
from mechattn.patching.patched_runs import OF_LAYER, Part, Where, changing, hook_of
from mechattn.results.result import head_named


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


# A segment's, the one at a position, or all original ones (None).
CellTokens = str | int | None


@dataclass(frozen=True)
class PatchCell:
    """One patch of a prompt: which heads (or layers, as head 0), and which of their tokens."""

    heads: tuple[Where, ...]
    tokens: CellTokens

    @property
    def first_layer(self) -> int:
        """The first layer that is changed."""
        return min(layer for layer, _ in self.heads)


@dataclass(frozen=True)
class PatchTarget:
    """The sites in a model, and how they are patched.

    Args:
        part: The part of each head or layer.
        heads: The heads; layers as (layer, 0).
        by: What distinguishes tokens that are patched by themselves; None for all at once.
        together: Whether all heads are patched as one set.
        attributed: Whether effects are estimated to first order.
    """

    part: Part
    heads: tuple[Where, ...]
    by: Literal["segment", "position"] | None
    together: bool
    attributed: bool

    @property
    def layers(self) -> list[int]:
        """The layers that are changed."""
        return sorted({layer for layer, _ in self.heads})

    def cells(self, tokens: Sequence[CellTokens]) -> list[PatchCell]:
        """A cell for each head, or for all of them together, at each of these sets of tokens."""
        units = [self.heads] if self.together else [(where,) for where in self.heads]

        cells = []
        for heads in units:
            for token_set in tokens:
                cells.append(PatchCell(heads, token_set))
        return cells

    def by_dimension(self, effects: xr.Dataset, tokens: Sequence[CellTokens]) -> xr.Dataset:
        """Effects [prompt cell] by layer and head, layer, or set, and by segment or position; NaN
        for heads that were not named.

        Args:
            effects: Effects by cell, in the order of ``cells(tokens)``.
            tokens: The sets of tokens that cells were made for.
        """
        if self.together:
            dims = ["set"]
        elif self.part in OF_LAYER:
            dims = ["layer"]
        else:
            dims = ["layer", "head"]

        labels = []
        for cell in self.cells(tokens):
            unit = (self._set_name,) if self.together else cell.heads[0][: len(dims)]
            labels.append((*unit, cell.tokens) if self.by else unit)

        names = [*dims, self.by] if self.by else dims
        index = pd.MultiIndex.from_tuples(labels, names=names)
        coords = xr.Coordinates.from_pandas_multiindex(index, "cell")
        effects = effects.drop_vars("cell").assign_coords(coords).unstack("cell")
        if self.by:  # the order of the text, not of the alphabet
            effects = effects.reindex({self.by: tokens})
        return effects

    @property
    def _set_name(self) -> str:
        """The set in words, such as "L0H1 + L1H4", or "12 heads" of many."""
        has_no_heads = self.part in OF_LAYER
        if len(self.heads) > 8:
            noun = "layers" if has_no_heads else "heads"
            return f"{len(self.heads)} {noun}"

        name = "L{}" if has_no_heads else "L{}H{}"
        return " + ".join(name.format(*where) for where in self.heads)


def target_in(model: HookedModel, at: Any, together: bool) -> PatchTarget:
    """The sites that ``at`` names in a model; all heads' z is attributed, everything else is
    patched exactly.

    Args:
        model: The hooked model.
        at: As for ``patch``.
        together: As for ``patch``.

    Raises:
        OptionError: There is no such part, head or layer.
        ModelError: The layers have no such part, or changing it would have no effect.
    """
    sites = at
    if isinstance(at, str) and at in get_args(Part):
        sites = Sites(at)  # type: ignore[arg-type]
    elif not isinstance(at, Sites):
        sites = Sites("z", at)

    check_choice(Part, part=sites.part)
    check_choice((None, "segment", "position"), by=sites.by)
    if not isinstance(together, bool):
        raise OptionError(f"together={together!r}: give True or False, and name the set in at=…")

    where: Any = sites.where
    if isinstance(where, str) and where == "all":
        where = None
    if sites.part in OF_LAYER:
        heads = [(layer, 0) for layer in chosen_layers(model, where)]
    else:
        count = kv_heads_of(model) if sites.part in ("k", "v") else model.cfg.n_heads
        heads = _heads(model, where, count)

    if sites.part not in ("z", "k", "v"):
        for layer, _ in heads:
            hook_of(model, sites.part, layer)
    if sites.part == "pattern" and not _patterns_act(model):
        raise ModelError(
            f"the attention of {model.cfg.model_name} is computed outside its hooks, so changing "
            'the pattern has no effect; patch "z" or "v"'
        )

    attributed = sites.part == "z" and sites.where is None and not together
    return PatchTarget(sites.part, tuple(heads), sites.by, together, attributed)


def _heads(model: HookedModel, heads: Any, count: int) -> list[Where]:
    """The named heads, each once; by default all, ``count`` per layer."""
    if heads is None:
        layers = attention_layers(model)
        return [(layer, head) for layer in layers for head in range(count)]

    named = []
    if isinstance(heads, (tuple, list)):
        named = [head_named(head) or head for head in heads]
    if not named or not all(map(_is_pair_of_numbers, named)):
        parts = ", ".join(map(repr, get_args(Part)))
        raise OptionError(
            f'at={heads!r}: give heads such as [(1, 4)] or ["L1H4"], "all", or one of {parts}'
        )
    for head in named:
        check_head(model, head, count)
    return list(dict.fromkeys((int(layer), int(head)) for layer, head in named))


def check_head(model: HookedModel, where: Where, count: int) -> None:
    """Refuse a head that a model doesn't have."""
    layer, head = where
    layers = attention_layers(model)
    if layer not in layers or not 0 <= head < count:
        raise OptionError(
            f"there is no head {head} in layer {layer}: {model.cfg.model_name} has heads 0 to "
            f"{count - 1} in layers {', '.join(map(str, layers))}"
        )


def _is_pair_of_numbers(head: Any) -> bool:
    """Whether this is (layer, head), each as an integer."""
    if not isinstance(head, (tuple, list)) or len(head) != 2:
        return False
    return all(isinstance(number, Integral) for number in head)


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

        # Once as it is, then with every token attending to itself alone.
        for changes in ({}, {layer: to_oneself}):
            changed = changing(model, "pattern", changes)
            with changed, changing(model, "z", {layer: record}):
                model(tokens, return_type=None, **without_cache(model))
    return not torch.equal(*outputs)
