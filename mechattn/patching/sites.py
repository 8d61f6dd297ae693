"""The sites that are patched: a part of some heads or layers, at some tokens."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import pandas as pd
import torch
import xarray as xr
from torch import Tensor

from mechattn.axes import SEGMENTS
from mechattn.errors import ModelError, OptionError, check_choice
from mechattn.interventions.intervention import is_head
from mechattn.model.hooked import HookedModel
from mechattn.model.hooks import attention_layers, chosen_layers, few_tokens, without_cache
from mechattn.patching.pairs import Pair
from mechattn.patching.patched_runs import (
    LAYER_PARTS,
    LayerHead,
    Part,
    SharedTokens,
    changing,
    head_count,
    hook_of,
    positions_of,
)
from mechattn.results.result import head_name, head_named

_MOST_NAMED = 8  # heads or layers; with more, the name of a set is too long for a column


@dataclass(frozen=True)
class Sites:
    """What to patch: a part of some heads or layers, at some original tokens.

    Args:
        part: Of a head: "z", its output before W_O; "q", "k" or "v", its queries, keys or values
            before norms and RoPE, where k and v are those of key-value heads; or "pattern", its
            attention among the original tokens. Of a layer: "resid_post", the residual stream after
            it; "attn_out" or "mlp_out", what attention or the MLP adds to the stream.
        where: Heads as (layer, head), counted from 0, or as "L0H2". For a part of a layer, the
            numbers of layers. The default is all heads or layers.
        by: "segment" patches the tokens of each segment separately, and "position" each token, for
            which prompts must have equal length. By default all original tokens are patched
            together.
    """

    part: Part = "z"
    where: Sequence[LayerHead | str] | Sequence[int] | None = None
    by: Literal["segment", "position"] | None = None


@dataclass(frozen=True)
class PatchCell:
    """One patch of a prompt: a part of some heads, or of layers as head 0, at a group of tokens."""

    part: Part
    heads: tuple[LayerHead, ...]
    token_group: int

    @property
    def first_layer(self) -> int:
        """The first layer that is patched."""
        return min(layer for layer, _ in self.heads)


@dataclass(frozen=True)
class PatchTarget:
    """The sites in a model.

    Args:
        part: The part of each head or layer.
        heads: The heads, or layers as (layer, 0).
        by: Whether tokens are patched by segment or by position; None for all tokens together.
        together: Whether all heads are patched as one set.
        token_groups: The groups of tokens: the indices of segments in ``SEGMENTS``, or positions.
    """

    part: Part
    heads: tuple[LayerHead, ...]
    by: Literal["segment", "position"] | None
    together: bool
    token_groups: Sequence[int] = (0,)

    @property
    def layers(self) -> list[int]:
        """The layers that are patched, in ascending order."""
        return sorted({layer for layer, _ in self.heads})

    @property
    def cells(self) -> list[PatchCell]:
        """A cell for each head, or for all of them together, at each group of tokens."""
        sets: list[tuple[LayerHead, ...]] = [(head,) for head in self.heads]
        if self.together:
            sets = [self.heads]
        return [PatchCell(self.part, heads, group) for heads in sets for group in self.token_groups]

    def groups_of(self, pair: Pair) -> SharedTokens:
        """The token group of each token that both runs of a pair have."""
        if self.by == "position":
            return pair.origins
        if self.by == "segment":
            return pair.base.segment[positions_of(pair.base, pair.origins)]
        return torch.zeros_like(pair.origins)

    def by_dimension(self, effects: xr.Dataset) -> xr.Dataset:
        """Replace the axis of cells by axes of layers and heads, of layers, or of sets, and of
        segments or positions.

        Heads that were not patched are NaN.

        Args:
            effects: Effects [prompt cell], in the order of ``cells``.
        """
        cells = self.cells
        labels: dict[str, list[int | str]] = {}
        if self.together:
            labels["set"] = [self._set_name] * len(cells)
        else:
            layer_heads = [cell.heads[0] for cell in cells]  # the only head of each cell
            labels["layer"] = [layer for layer, _ in layer_heads]
            if self.part not in LAYER_PARTS:
                labels["head"] = [head for _, head in layer_heads]
        if self.by is not None:
            labels[self.by] = [cell.token_group for cell in cells]

        index = pd.MultiIndex.from_arrays(list(labels.values()), names=list(labels))
        coords = xr.Coordinates.from_pandas_multiindex(index, "cell")
        effects = effects.assign_coords(coords).unstack("cell")
        if self.by == "segment":
            names = [SEGMENTS[group] for group in self.token_groups]
            effects = effects.assign_coords(segment=names)
        return effects

    @property
    def _set_name(self) -> str:
        """The name of the set, such as "L0H1 + L1H4", or "12 heads" if there are more than 8."""
        noun = "heads"
        names = [head_name(layer, head) for layer, head in self.heads]
        if self.part in LAYER_PARTS:
            noun = "layers"
            names = [f"L{layer}" for layer, _ in self.heads]

        if len(names) > _MOST_NAMED:
            return f"{len(names)} {noun}"
        return " + ".join(names)


def sites_of(at: Any) -> Sites:
    """The sites that the argument ``at`` of ``patch`` names.

    Raises:
        OptionError: A part doesn't exist, or ``by`` is not one of its choices.
    """
    if isinstance(at, Sites):
        sites = at
    elif isinstance(at, str) and at in get_args(Part):
        sites = Sites(at)  # type: ignore[arg-type]
    else:
        sites = Sites("z", at)

    check_choice(Part, part=sites.part)
    check_choice((None, "segment", "position"), by=sites.by)
    return sites


def target_in(model: HookedModel, sites: Sites, together: bool = False) -> PatchTarget:
    """The sites in a model.

    Args:
        model: The hooked model.
        sites: The sites, whose part exists.
        together: Whether all heads are patched as one set.

    Raises:
        OptionError: A head or layer doesn't exist.
        ModelError: A layer has no hook for the part, or changing the part would have no effect.
    """
    where: Any = sites.where
    if sites.part in LAYER_PARTS:
        heads = [(layer, 0) for layer in chosen_layers(model, where)]
    else:
        heads = _heads(model, where, sites.part)

    if sites.part != "z":  # which is read without a hook of this name
        for layer, _ in heads:
            hook_of(model, sites.part, layer)  # refuses a layer that has none
    if sites.part == "pattern" and not _pattern_has_effect(model):
        raise ModelError(
            f"the attention of {model.cfg.model_name} is computed outside its hooks, so changing "
            'the pattern has no effect; patch "z" or "v"'
        )

    return PatchTarget(sites.part, tuple(heads), sites.by, together)


def check_head(model: HookedModel, layer_head: LayerHead, part: Part) -> None:
    """Refuse a head that a model doesn't have. There may be fewer heads for k and v than for q.

    Raises:
        OptionError: The layer has no such head.
    """
    layer, head = layer_head
    layers = attention_layers(model)
    count = head_count(model, part)
    if layer not in layers or not 0 <= head < count:
        layer_numbers = ", ".join(map(str, layers))
        raise OptionError(
            f"there is no head {head} in layer {layer}: {model.cfg.model_name} has heads 0 to "
            f"{count - 1} in layers {layer_numbers}"
        )


def _heads(model: HookedModel, heads: Any, part: Part) -> list[LayerHead]:
    """The named heads, each once; all heads if none are named.

    Raises:
        OptionError: A name is not that of a head of the model.
    """
    if heads is None:
        count = head_count(model, part)
        return [(layer, head) for layer in attention_layers(model) for head in range(count)]

    layer_heads = []
    if isinstance(heads, (tuple, list)):
        layer_heads = [head_named(head) or head for head in heads]  # "L1H4" or (1, 4)
    if not layer_heads or not all(map(is_head, layer_heads)):
        part_names = ", ".join(map(repr, get_args(Part)))
        raise OptionError(
            f'at={heads!r}: give heads such as [(1, 4)] or ["L1H4"], or for all heads or layers '
            f"one of {part_names}"
        )
    for layer_head in layer_heads:
        check_head(model, layer_head, part)
    return list(dict.fromkeys((int(layer), int(head)) for layer, head in layer_heads))


def _pattern_has_effect(model: HookedModel) -> bool:
    """Whether changing the pattern at its hook changes the logits, tried on a few tokens."""
    tokens = few_tokens(model, 6)  # more than one, so that there is other attention to change to
    layer = attention_layers(model)[0]
    logits_of_tokens = partial(model, tokens, return_type="logits", **without_cache(model))

    def attend_to_oneself(pattern: Tensor) -> Tensor:
        identity = torch.eye(pattern.shape[1], device=pattern.device, dtype=pattern.dtype)
        return identity[None, :, None].expand_as(pattern)

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TransformerLens warns of the same

        logits = logits_of_tokens()
        with changing(model, "pattern", {layer: attend_to_oneself}):
            changed_logits = logits_of_tokens()
    return not torch.equal(logits, changed_logits)
