"""Ablation of heads (by zero or by a mean) and of attention edges (attention knockout)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechattn.axes import SEGMENTS
from mechattn.errors import OptionError, check_choice
from mechattn.interventions.intervention import (
    Acting,
    CurrentTarget,
    as_tuple,
    is_head,
    on,
    store_tuples,
    tensors_digest,
)
from mechattn.model.patch.keys_values_z import Z, changing_z, check_layers, heads_of
from mechattn.prompts.token_sequences import CutEdges, TokenSequence

_ORIGINAL_SEGMENTS = tuple(name for name in SEGMENTS if name != "inserted")


@dataclass(frozen=True, eq=False)
class HeadMeans:
    """Each head's output before W_O, averaged over all tokens of some prompts.

    :func:`mechattn.head_means` computes them.

    Args:
        by_layer: The mean output of each head, by layer.
        prompts: The number of prompts.
    """

    # pydantic, which reads HeadAblation from a config, has no schema for the tensors. A config gives
    # no means.
    __pydantic_config__: ClassVar[dict[str, bool]] = {"arbitrary_types_allowed": True}

    by_layer: Mapping[int, Float[Tensor, "head d_head"]]
    prompts: int

    def __repr__(self) -> str:
        layers = sorted(self.by_layer)
        short_hash = tensors_digest(self.by_layer[layer] for layer in layers)
        return f"HeadMeans(of {self.prompts} prompts, layers {layers}, digest={short_hash})"


@dataclass(frozen=True)
class HeadAblation:
    """Replace the output of some heads (before W_O) at every token.

    Args:
        heads: (layer, head) pairs, counted from 0.
        means: Each head's mean output, which replaces its output. By default 0 replaces it,
            although a model rarely has such outputs.

    Raises:
        OptionError: ``heads`` is empty or does not consist of pairs, or ``means`` is not what
            :func:`mechattn.head_means` returns.
    """

    heads: tuple[tuple[int, int], ...]
    means: HeadMeans | None = None

    def __post_init__(self) -> None:
        heads = as_tuple(self.heads)
        if not heads or not all(map(is_head, heads)):
            raise OptionError(
                f"heads={self.heads!r}: give a tuple of (layer, head) pairs, such as ((1, 4),)"
            )
        object.__setattr__(self, "heads", tuple(map(tuple, heads)))  # the dataclass is frozen
        if not isinstance(self.means, HeadMeans | None):
            raise OptionError(f"means={self.means!r}: give what ma.head_means(…) returns")

    def check(self, model: Any, prompts: Sequence[str]) -> None:
        """Refuse a layer or head that doesn't exist, or a layer that the means don't cover."""
        check_layers(model, [layer for layer, _ in self.heads])
        head_count = heads_of(model)
        for layer, head in self.heads:
            if not 0 <= head < head_count:
                raise OptionError(
                    f"head {head} is out of range: the model has heads 0 to {head_count - 1}"
                )
            if self.means is not None and layer not in self.means.by_layer:
                raise OptionError(
                    f"the means cover layers {sorted(self.means.by_layer)}, not layer {layer}"
                )

    def acting(self, model: Any, target: CurrentTarget) -> Acting:
        """Replace the output of these heads inside a ``with`` block."""
        heads_by_layer: dict[int, list[int]] = {}
        for layer, head in self.heads:
            heads_by_layer.setdefault(layer, []).append(head)

        def ablate(layer: int, z: Z) -> Z:
            z = z.clone()
            rows = target().rows.to(z.device)
            replacements = z.new_zeros(z.shape[2:])
            if self.means is not None:
                replacements = self.means.by_layer[layer].to(z)
            if replacements.shape != z.shape[2:]:
                raise OptionError(
                    f"the means of layer {layer} have the shape {list(replacements.shape)}, but its"
                    f" outputs have {list(z.shape[2:])} [head d_head]: the means come from another"
                    " model"
                )
            for head in heads_by_layer[layer]:
                z[rows, :, head] = replacements[head]
            return z

        return changing_z(model, {layer: partial(ablate, layer) for layer in heads_by_layer})

    on = on  # with ablation.on(model): … sets it outside a run


@dataclass(frozen=True)
class AttentionKnockout:
    """Hide the keys of some segments from the queries of others.

    The softmax is over the remaining keys. A token always sees itself.
    ``AttentionKnockout(keys="inserted")`` has the same effect as ``.masked()``.

    Args:
        queries: The segment or segments of the affected queries. By default all queries are
            affected except those of inserted tokens. Tokens that ``evaluate`` generates belong to
            the answer.
        keys: The segment or segments to hide.
        layers: The layers, counted from 0; all by default.

    Raises:
        OptionError: A segment does not exist, or no segment is given.

    Source: arXiv:2304.14767.
    """

    queries: str | tuple[str, ...] = _ORIGINAL_SEGMENTS
    keys: str | tuple[str, ...] = "inserted"
    layers: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        store_tuples(self, "queries", "keys", "layers")
        if not as_tuple(self.queries) or not as_tuple(self.keys):
            raise OptionError(
                f"{self} cuts no edge: give at least one segment of queries and of keys"
            )
        for segment in as_tuple(self.queries):
            check_choice(SEGMENTS, queries=segment)
        for segment in as_tuple(self.keys):
            check_choice(SEGMENTS, keys=segment)

    def marked(self, sequence: TokenSequence) -> TokenSequence:
        """Return the sequence with these edges cut.

        Generated tokens belong to the answer. They are affected if the answer's queries are.

        Raises:
            OptionError: The sequence already has cut edges, or no edge would be cut, neither of a
                token of the sequence nor of a generated one.
        """
        if sequence.cut_edges is not None:
            raise OptionError(
                "this sequence already has cut edges (masked, or another AttentionKnockout): use a"
                " single AttentionKnockout"
            )

        queries = _in_segments(sequence, self.queries)
        keys = _in_segments(sequence, self.keys)
        earlier_counts = keys.cumsum(0) - keys.long()  # of hidden keys, before each token
        cuts_present = bool((queries & (earlier_counts > 0)).any())
        cuts_generated = "answer" in as_tuple(self.queries) and bool(keys.any())
        if not cuts_present and not cuts_generated:
            raise OptionError(
                f"{self} cuts no edge: no token of {self.queries} comes after one of {self.keys}"
                " in this sequence"
            )

        layers = None if self.layers is None else as_tuple(self.layers)
        return replace(sequence, cut_edges=CutEdges(queries, keys, layers, later=cuts_generated))


def _in_segments(sequence: TokenSequence, segments: str | tuple[str, ...]) -> Bool[Tensor, " pos"]:
    """Which tokens belong to one of these segments."""
    memberships = [sequence.of_segment(segment) for segment in as_tuple(segments)]
    return torch.stack(memberships).any(0)
