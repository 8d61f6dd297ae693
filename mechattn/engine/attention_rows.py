"""Attention for the analyses: in row blocks, from a fused kernel, or from hooks; for nulls, of a content-blind head."""

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

_OF_ROWS = (protocols.RowAnalysis, protocols.PairAnalysis)
Engine = Literal["auto", "streaming", "fused", "hooks"]
Forward = Callable[[Any, Batch, Mapping[int, int | None], See, int], None]


def chosen_forward(
    model: HookedModel, engine: Engine, analyses: Iterable[Analysis] = ()
) -> tuple[Forward, str]:
    """The engine for this model, and the reason; streaming is compared with the hooks once per model before use."""
    analyses = list(analyses)
    if engine == "hooks":
        return forward_through_hooks, "asked for"
    captured = [
        name for a in analyses if isinstance(a, protocols.CaptureAnalysis) for name in a.captures
    ]
    if silent := next((name for name in captured if not fires_while_streamed(name)), None):
        if engine != "auto":
            raise OptionError(
                f"an analysis captures {silent!r}, which doesn't fire while attention is streamed; choose "
                'engine="hooks" or "auto"'
            )
        return forward_through_hooks, f"not streamed: {silent} fires only with hooks"
    facts = facts_of(model) or ModelFacts()
    if facts.streaming is None:
        facts.streaming = check_streaming(model)
    check = facts.streaming
    if check.outcome != "passed":
        if engine != "auto":
            raise ModelError(
                f'{model.cfg.model_name} cannot be streamed: {check}; choose engine="hooks" or "auto"'
            )
        return forward_through_hooks, f"not streamed: {check.detail}"
    return _fused_or_in_blocks(model, engine, analyses)


def _fused_or_in_blocks(
    model: HookedModel, engine: Engine, analyses: Sequence[Analysis]
) -> tuple[Forward, str]:
    rows = [
        a.name
        for a in analyses
        if isinstance(a, _OF_ROWS) and not isinstance(a, protocols.WholeAnalysis)
    ]
    if engine == "fused" and rows:
        raise OptionError(
            f'{", ".join(rows)} needs rows, which a fused kernel does not give; choose engine="streaming" or "auto", '
            f"or measure analyses without rows in a separate run"
        )
    on_gpu = device_of(model).type == "cuda"
    whole = any(isinstance(analysis, protocols.WholeAnalysis) for analysis in analyses) and not rows
    if engine == "streaming" or not whole or (engine == "auto" and not on_gpu):
        return forward_in_blocks, "its numbers are those of the hooks"
    check = check_fused(model)
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
    """Blocks of query rows, as attention is computed; padding needs no mask, because it is on the right."""
    with streaming(model, windows, see, edge_masks=_edge_masks(model, batch, last), fused=fused):
        hooks.forward_to(model, batch.tokens, last, [], batch.position_ids)


# Whole layers from two calls of a fused kernel, or blocks of rows for a layer that it cannot compute.
forward_fused = partial(forward_in_blocks, fused=True)


def forward_through_hooks(
    model: HookedModel, batch: Batch, windows: Mapping[int, int | None], see: See, last: int
) -> None:
    """Each layer's whole pattern as one block, after checking that it is a pattern."""
    every = slice(0, batch.tokens.shape[1])

    def whole(
        layer: int, pattern: Pattern, v: Float[Tensor, "batch kv_head pos d_head"] | None
    ) -> None:
        window = windows[layer] if layer in windows else hooks.attention_window(model, layer)
        hooks.check_pattern(model, layer, pattern, batch.real, window, edge_masks.get(layer))
        if layer in windows:
            pattern = pattern.float()
            see(layer, Rows(pattern, every, every, None if v is None else PatternRows(pattern, v)))

    edge_masks = _edge_masks(
        model, batch, last
    )  # checked too, because some models ignore changes to their scores
    looked = sorted({*windows, *edge_masks})
    hooks.forward_with_patterns(
        model, batch.tokens, batch.real, looked, whole, edge_masks, batch.position_ids, last
    )


ENGINES = {forward_in_blocks: "streaming", forward_fused: "fused", forward_through_hooks: "hooks"}


def _edge_masks(model: HookedModel, batch: Batch, last: int) -> dict[int, EdgeMask]:
    """The edges that are cut in each computed layer."""
    if batch.edge_mask is None:
        return {}
    edge_masks = {
        layer: batch.at(layer).edge_mask for layer in hooks.attention_layers(model) if layer <= last
    }
    return {
        n: mask.to(device_of(model.blocks[n])) for n, mask in edge_masks.items() if mask is not None
    }


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
        """The block together with the baseline's rows of the same queries, computed (or looked up) on demand."""
        pairs, keys = self.pairs, rows.keys
        count = pairs.reach[rows.queries.stop - 1]
        pattern = rows.pattern
        place, original = pairs.place[:, :count], pairs.original[:, :count]
        inside = original & (place >= keys.start) & (place < keys.stop)
        index = (place - keys.start).clamp(0, pattern.shape[-1] - 1)[:, None, None]
        aligned = pattern.gather(-1, index.expand(*pattern.shape[:3], -1)) * inside[:, None, None]
        queries = pairs.batch.origin[:, rows.queries].clamp(min=0)
        return PairedRows(
            layer=self.number,
            pattern=pattern,
            aligned=aligned,
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
            f"layer {number} shows no hook_v by head, so outputs with and without inserted tokens cannot be compared"
        )
    v = attention.v
    index = pairs.place[:, None, :, None].expand(-1, v.shape[1], -1, v.shape[3])
    return PairedLayer(number, pairs, window, attention.of(pairs.baseline), v, v.gather(2, index))


UNIFORM, BLIND = "_uniform", "_blind"
_ABOUT = {
    UNIFORM: "if every head attended uniformly to the keys it can see",
    BLIND: "if every head attended by position alone: softmax of what the model adds to its scores (ALiBi, sinks)",
}

Values = dict[str, Tensor]


def with_nulls(analysis: Analysis) -> dict[str, Quantity]:
    """The quantities of an analysis, each followed by its nulls; a quantity without one says why."""
    given = analysis.quantities
    of_rows = isinstance(analysis, _OF_ROWS)
    made: dict[str, Quantity] = {}
    for name, quantity in given.items():
        why = quantity.no_null or ("" if of_rows else "it is not made of rows of attention")
        made[name] = replace(quantity, no_null=why)
        if of_rows and has_null(name, quantity):
            for kind, about in _ABOUT.items():
                dims = tuple(dim for dim in quantity.dims if dim != "head" or kind == BLIND)
                described = replace(
                    quantity, dims=dims, description=f"{quantity.description}, {about}"
                )
                made.setdefault(name + kind, given.get(name + kind, described))
    return made


def has_null(name: str, quantity: Quantity) -> bool:
    """Whether the engine computes a null of this quantity; it does not if the quantity is itself a null."""
    return not quantity.no_null and not name.endswith((UNIFORM, BLIND, DILUTION))


@dataclass
class Nulls:
    """The nulls of one batch, computed once for all layers whose queries see the same keys."""

    # Uniform attention comes from queries that are zero: every key that a query sees, and a learned sink, has a score
    # of 0. If the model adds something to its scores regardless of content, a second null (``_blind``) includes it.

    analyses: Sequence[Analysis]
    batch: Batch  # on the device of the model
    pairs: Pairs | None  # each sequence with its baseline, if an analysis needs it
    blind: BlindScores  # what the model adds to its scores
    _made: dict[Any, dict[int, Values]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._wanted = [
            isinstance(a, _OF_ROWS) and any(starmap(has_null, a.quantities.items()))
            for a in self.analyses
        ]

    def of(self, number: int, layer: int, window: int | None) -> Values:
        """The nulls of all quantities of an analysis, for one layer."""
        if not self._wanted[number]:
            return {}
        found = self._values(UNIFORM, layer, window)[number]
        may_differ = (
            self.blind.alibi is not None or layer in self.blind.sinks
        )  # from uniform attention
        return found | self._values(BLIND, layer, window)[number] if may_differ else found

    def _values(self, kind: str, layer: int, window: int | None) -> dict[int, Values]:
        """The values of every analysis, cached by what determines them."""
        sinks = (
            layer if kind == BLIND and layer in self.blind.sinks else None
        )  # which differ by layer
        key = (kind, window, self.batch.masked_in(layer), sinks)
        if key not in self._made:
            self._made[key] = self._measured(kind, layer, window)
        return self._made[key]

    def _measured(self, kind: str, layer: int, window: int | None) -> dict[int, Values]:
        here, length = self.batch.at(layer), self.batch.tokens.shape[1]
        bias, sinks = self.blind.scores(layer, length, kind == BLIND)
        heads = self.blind.heads if kind == BLIND else 1
        zero = torch.zeros(len(self.batch.rows), heads, length, 1, device=self.batch.tokens.device)
        key = zero[:, :1]
        attention = Attention(
            zero, key, torch.ones_like(key), 1.0, bias, window, None, here.edge_mask, sinks
        )
        paired = (
            paired_layer(layer, attention, self.pairs, window) if self.pairs is not None else None
        )
        started = {
            i: a.start(self.batch, heads) for i, a in enumerate(self.analyses) if self._wanted[i]
        }

        def see(rows: Rows) -> None:
            given = (rows.pattern, rows.queries, rows.keys, self.batch, window, attention.v)
            block = protocols.AttentionRows(layer, *given, null=True)
            for number, sums in started.items():
                analysis = self.analyses[number]
                with _saying_no_null(analysis):
                    if isinstance(analysis, protocols.RowAnalysis):
                        analysis.add(sums, block)
                    if isinstance(analysis, protocols.PairAnalysis) and paired is not None:
                        analysis.add_pairs(sums, paired.rows(rows))

        attention_by_rows(attention, see)
        return {
            i: _null_values(self.analyses[i], sums, kind, here, window)
            for i, sums in started.items()
        }


def _null_values(
    analysis: Analysis, sums: Sums, kind: str, batch: Batch, window: int | None
) -> Values:
    """The nulls, named after their quantities; without a head dimension if all heads are equal."""
    given = analysis.quantities
    named = {name: q for name, q in given.items() if has_null(name, q) and name + kind not in given}
    with _saying_no_null(analysis):
        values = analysis.values(sums, batch, window)
        if lacking := [name for name in named if name not in values]:
            raise ValueError(f"its values hold no {lacking[0]!r}")
    if kind == UNIFORM:  # the same in every head
        heads = {name: 1 + q.dims.index("head") for name, q in named.items() if "head" in q.dims}
        values = {
            n: value.select(heads[n], 0) if n in heads else value for n, value in values.items()
        }
    return {name + kind: values[name] for name in named}


@contextmanager
def _saying_no_null(analysis: Analysis) -> Iterator[None]:
    """Say of an analysis that raises an error on such rows how to declare a quantity without a null."""
    try:
        yield
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{analysis.name} cannot be measured on the rows of a content-blind head, which give the null of its "
            f"quantities ({reason}). If a quantity needs more than rows of attention, declare it: "
            'Quantity(…, no_null="it depends on the values")'
        ) from error
