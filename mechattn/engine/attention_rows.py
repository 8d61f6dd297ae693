"""Attention for the analyses: in row blocks, from a fused kernel, or from hooks; for nulls, of a
content-blind head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import starmap
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mechattn.analysis import analysis as protocols
from mechattn.analysis.analysis import Analysis, PairedRows, Quantity, Sums
from mechattn.analysis.received_attention import DILUTION
from mechattn.errors import ModelError, OptionError
from mechattn.functional.attention import (
    AnyRows,
    Attention,
    EdgeMask,
    Pattern,
    PatternRows,
    Rows,
    attention_by_rows,
)
from mechattn.model import hooks
from mechattn.model.hooked import HookedModel, ModelFacts, facts_of
from mechattn.model.patch.streaming import See, fires_while_streamed, streaming
from mechattn.model.scores import BlindScores
from mechattn.model.several_devices import device_of
from mechattn.model.verify.streaming_checks import check_fused, check_streaming
from mechattn.prompts.token_sequences import Batch, Pairs

OF_ROWS = (protocols.RowAnalysis, protocols.PairAnalysis)
Engine = Literal["auto", "streaming", "fused", "hooks"]
Forward = Callable[[Any, Batch, Mapping[int, int | None], See, int], None]


def chosen_forward(
    model: HookedModel, engine: Engine, analyses: Iterable[Analysis] = ()
) -> tuple[Forward, str]:
    """The engine for this model, and the reason; streaming is compared with the hooks once per
    model before use."""
    if engine == "hooks":
        return forward_through_hooks, "asked for"

    analyses = list(analyses)
    for name in _captures(analyses):
        if not fires_while_streamed(name):
            if engine != "auto":
                raise OptionError(
                    f"an analysis captures {name!r}, which doesn't fire while attention is"
                    ' streamed; choose engine="hooks" or "auto"'
                )
            return forward_through_hooks, f"not streamed: {name} fires only with hooks"

    facts = facts_of(model) or ModelFacts()
    if facts.streaming is None:
        facts.streaming = check_streaming(model)
    check = facts.streaming
    if check.outcome != "passed":
        if engine != "auto":
            raise ModelError(
                f'{model.cfg.model_name} cannot be streamed: {check}; choose engine="hooks" or'
                ' "auto"'
            )
        return forward_through_hooks, f"not streamed: {check.detail}"
    return _fused_or_in_blocks(model, engine, analyses)


def _captures(analyses: Sequence[Analysis]) -> list[str]:
    """The names of the hooks that analyses read."""
    return [
        name
        for analysis in analyses
        if isinstance(analysis, protocols.CaptureAnalysis)
        for name in analysis.captures
    ]


def _fused_or_in_blocks(
    model: HookedModel, engine: Engine, analyses: Sequence[Analysis]
) -> tuple[Forward, str]:
    takes_whole_layers = False
    needing_rows = []
    for analysis in analyses:
        if isinstance(analysis, protocols.WholeAnalysis):
            takes_whole_layers = True
        elif isinstance(analysis, OF_ROWS):
            needing_rows.append(analysis.name)

    if engine == "fused" and needing_rows:
        raise OptionError(
            f"{', '.join(needing_rows)} needs rows, which a fused kernel does not give; choose"
            ' engine="streaming" or "auto", or measure analyses without rows in a separate run'
        )
    can_be_fused = takes_whole_layers and not needing_rows
    is_slower_here = engine == "auto" and device_of(model).type != "cuda"
    if engine == "streaming" or not can_be_fused or is_slower_here:
        return forward_in_blocks, "its numbers are those of the hooks"

    facts = facts_of(model) or ModelFacts()
    if facts.fused is None:
        facts.fused = check_fused(model)
    check = facts.fused
    if check.outcome == "passed":
        return (
            forward_fused,
            "no analysis needs rows, and two calls of a fused kernel give the numbers of the hooks",
        )
    if engine == "fused":
        raise ModelError(f'{model.cfg.model_name}: {check}; choose engine="streaming" or "auto"')
    return forward_in_blocks, f"its numbers are those of the hooks; not fused: {check.detail}"


def forward_in_blocks(
    model: HookedModel,
    batch: Batch,
    windows: Mapping[int, int | None],
    see: See,
    last: int,
    fused: bool = False,
) -> None:
    """Blocks of query rows, as attention is computed; padding needs no mask, because it is on the
    right."""
    with streaming(model, windows, see, edge_masks=_edge_masks(model, batch, last), fused=fused):
        hooks.forward_to(model, batch.tokens, last, [], batch.position_ids)


# Whole layers from two calls of a fused kernel, or blocks of rows for a layer that it cannot
# compute.
forward_fused = partial(forward_in_blocks, fused=True)


def forward_through_hooks(
    model: HookedModel, batch: Batch, windows: Mapping[int, int | None], see: See, last: int
) -> None:
    """Each layer's whole pattern as one block, after checking that it is a pattern."""
    edge_masks = _edge_masks(model, batch, last)
    all_positions = slice(0, batch.tokens.shape[1])

    def see_pattern(
        layer: int, pattern: Pattern, v: Float[Tensor, "batch kv_head pos d_head"] | None
    ) -> None:
        is_measured = layer in windows
        window = windows[layer] if is_measured else hooks.attention_window(model, layer)
        hooks.check_pattern(model, layer, pattern, batch.real, window, edge_masks.get(layer))
        if is_measured:
            pattern = pattern.float()
            attention = None if v is None else PatternRows(pattern, v)
            see(layer, Rows(pattern, all_positions, all_positions, attention))

    # Layers with cut edges are checked too, because some models ignore changes to their scores.
    layers = sorted({*windows, *edge_masks})
    hooks.forward_with_patterns(
        model, batch.tokens, batch.real, layers, see_pattern, edge_masks, batch.position_ids, last
    )


ENGINES = {forward_in_blocks: "streaming", forward_fused: "fused", forward_through_hooks: "hooks"}


def _edge_masks(model: HookedModel, batch: Batch, last: int) -> dict[int, EdgeMask]:
    """The edges that are cut in each computed layer."""
    if batch.edge_mask is None:
        return {}
    edge_masks = {}
    for layer in hooks.attention_layers(model):
        edge_mask = batch.at(layer).edge_mask
        if edge_mask is not None and layer <= last:
            edge_masks[layer] = edge_mask.to(device_of(model.blocks[layer]))
    return edge_masks


@dataclass(frozen=True)
class PairedLayer:
    """What the blocks of one layer have in common: the baselines' attention, and values."""

    number: int  # of the layer
    pairs: Pairs  # which sequence is paired with which baseline
    window: int | None  # the number of keys that a query sees; None for all
    baseline: AnyRows  # the attention of the baselines
    v: Float[Tensor, "batch kv_head pos d_head"]  # values of the sequences
    # The same for their original tokens alone, in the order of the baseline
    v_aligned: Float[Tensor, "batch kv_head original d_head"]

    def rows(self, rows: Rows) -> PairedRows:
        """The block together with the baseline's rows of the same queries, computed (or looked up)
        on demand."""
        pairs = self.pairs
        keys = rows.keys
        pattern = rows.pattern
        count = pairs.reach[rows.queries.stop - 1]  # of original tokens up to the last query

        # The pattern's columns in the order of the baseline's tokens, 0 for those of other blocks.
        place = pairs.place[:, :count]
        is_in_block = pairs.original[:, :count] & (place >= keys.start) & (place < keys.stop)
        column = (place - keys.start).clamp(0, pattern.shape[-1] - 1)[:, None, None]
        aligned = pattern.gather(-1, column.expand(*pattern.shape[:3], -1))

        queries = pairs.batch.origin[:, rows.queries].clamp(min=0)
        return PairedRows(
            layer=self.number,
            pattern=pattern,
            aligned=aligned * is_in_block[:, None, None],
            baseline=self.baseline.rows(queries, count),
            v=self.v[:, :, keys],
            v_aligned=self.v_aligned[:, :, :count],
            v_baseline=self.baseline.v[:, :, :count],
            segment=pairs.segment[:, :count],
            queries=rows.queries,
            keys=keys,
            batch=pairs.batch,
            window=self.window,
        )


def paired_layer(
    number: int, attention: AnyRows | None, pairs: Pairs, window: int | None
) -> PairedLayer:
    """What a layer's blocks share, made at its first block."""
    if attention is None:
        raise ModelError(
            f"layer {number} shows no hook_v by head, so outputs with and without inserted tokens"
            " cannot be compared"
        )
    v = attention.v
    place = pairs.place[:, None, :, None].expand(-1, v.shape[1], -1, v.shape[3])
    v_aligned = v.gather(2, place)
    return PairedLayer(number, pairs, window, attention.of(pairs.baseline), v, v_aligned)


UNIFORM = "_uniform"
BLIND = "_blind"
NULL_DESCRIPTIONS = {
    UNIFORM: "if every head attended uniformly to the keys it can see",
    BLIND: (
        "if every head attended by position alone: softmax of what the model adds to its scores"
        " (ALiBi, sinks)"
    ),
}

Values = dict[str, Tensor]


def with_nulls(analysis: Analysis) -> dict[str, Quantity]:
    """The quantities of an analysis, each followed by its nulls; a quantity without one says
    why."""
    is_of_rows = isinstance(analysis, OF_ROWS)
    quantities: dict[str, Quantity] = {}
    for name, quantity in analysis.quantities.items():
        if not is_of_rows and not quantity.no_null:
            quantity = replace(quantity, no_null="it is not made of rows of attention")
        quantities[name] = quantity
        if not is_of_rows or not has_null(name, quantity):
            continue
        for kind, description in NULL_DESCRIPTIONS.items():
            null = analysis.quantities.get(name + kind)
            if null is None:
                null = _null_of(quantity, kind, description)
            quantities.setdefault(name + kind, null)
    return quantities


def _null_of(quantity: Quantity, kind: str, description: str) -> Quantity:
    dims = quantity.dims
    if kind == UNIFORM:  # the same in every head
        dims = tuple(dim for dim in dims if dim != "head")
    return replace(quantity, dims=dims, description=f"{quantity.description}, {description}")


def has_null(name: str, quantity: Quantity) -> bool:
    """Whether the engine computes a null of this quantity; it does not if the quantity is itself a
    null."""
    return not quantity.no_null and not name.endswith((UNIFORM, BLIND, DILUTION))


@dataclass
class Nulls:
    """The nulls of one batch, computed once for all layers whose queries see the same keys."""

    # Uniform attention comes from queries that are zero: every key that a query sees, and a learned
    # sink, has a score of 0. If the model adds something to its scores regardless of content, a
    # second null (``_blind``) includes it.

    analyses: Sequence[Analysis]
    batch: Batch  # on the device of the model
    pairs: Pairs | None  # each sequence with its baseline, if an analysis needs it
    blind: BlindScores  # what the model adds to its scores
    _cache: dict[Any, dict[int, Values]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._has_nulls = [
            isinstance(analysis, OF_ROWS) and any(starmap(has_null, analysis.quantities.items()))
            for analysis in self.analyses
        ]

    def of(self, number: int, layer: int, window: int | None) -> Values:
        """The nulls of all quantities of an analysis, for one layer."""
        if not self._has_nulls[number]:
            return {}
        values = self._values(UNIFORM, layer, window)[number]
        blind_differs = self.blind.alibi is not None or layer in self.blind.sinks
        if blind_differs:
            values = values | self._values(BLIND, layer, window)[number]
        return values

    def _values(self, kind: str, layer: int, window: int | None) -> dict[int, Values]:
        """The values of every analysis, cached by what determines them."""
        layer_of_sinks = None  # which differ by layer
        if kind == BLIND and layer in self.blind.sinks:
            layer_of_sinks = layer
        key = (kind, window, self.batch.masked_in(layer), layer_of_sinks)
        if key not in self._cache:
            self._cache[key] = self._measured(kind, layer, window)
        return self._cache[key]

    def _measured(self, kind: str, layer: int, window: int | None) -> dict[int, Values]:
        attention = self._blind_attention(kind, layer, window)
        paired = None
        if self.pairs is not None:
            paired = paired_layer(layer, attention, self.pairs, window)
        sums = {
            number: analysis.start(self.batch, attention.q.shape[1])
            for number, analysis in enumerate(self.analyses)
            if self._has_nulls[number]
        }

        def see(rows: Rows) -> None:
            block = protocols.AttentionRows(
                layer,
                rows.pattern,
                rows.queries,
                rows.keys,
                self.batch,
                window,
                attention.v,
                null=True,
            )
            for number, of_analysis in sums.items():
                analysis = self.analyses[number]
                with _saying_no_null(analysis):
                    if isinstance(analysis, protocols.RowAnalysis):
                        analysis.add(of_analysis, block)
                    if isinstance(analysis, protocols.PairAnalysis) and paired is not None:
                        analysis.add_pairs(of_analysis, paired.rows(rows))

        attention_by_rows(attention, see)
        batch = self.batch.at(layer)
        return {
            number: _null_values(self.analyses[number], of_analysis, kind, batch, window)
            for number, of_analysis in sums.items()
        }

    def _blind_attention(self, kind: str, layer: int, window: int | None) -> Attention:
        """The attention of queries that are 0, in one head for all where these are equal."""
        batch, length = self.batch.tokens.shape
        heads = self.blind.heads if kind == BLIND else 1
        q = torch.zeros(batch, heads, length, 1, device=self.batch.tokens.device)
        k = q[:, :1]
        v = torch.ones_like(k)
        bias, sinks = self.blind.scores(layer, length, kind == BLIND)
        edge_mask = self.batch.at(layer).edge_mask
        return Attention(q, k, v, 1.0, bias, window, None, edge_mask, sinks)


def _null_values(
    analysis: Analysis, sums: Sums, kind: str, batch: Batch, window: int | None
) -> Values:
    """The nulls, named after their quantities; without a head dimension if all heads are equal."""
    with _saying_no_null(analysis):
        values = analysis.values(sums, batch, window)

    nulls = {}
    for name, quantity in analysis.quantities.items():
        measures_its_own = name + kind in analysis.quantities
        if measures_its_own or not has_null(name, quantity):
            continue
        with _saying_no_null(analysis):
            if name not in values:
                raise ValueError(f"its values hold no {name!r}")
        null = values[name]
        if kind == UNIFORM and "head" in quantity.dims:  # the same in every head
            null = null.select(1 + quantity.dims.index("head"), 0)
        nulls[name + kind] = null
    return nulls


@contextmanager
def _saying_no_null(analysis: Analysis) -> Iterator[None]:
    """Say of an analysis that raises an error on such rows how to declare a quantity without a
    null."""
    try:
        yield
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{analysis.name} cannot be measured on the rows of a content-blind head, which give"
            f" the null of its quantities ({reason}). If a quantity needs more than rows of"
            ' attention, declare it: Quantity(…, no_null="it depends on the values")'
        ) from error
