"""Passes attention to the analyses: streamed in row blocks, from a fused kernel, or from hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from mechattn.analysis.analysis import (
    Analysis,
    CaptureAnalysis,
    PairAnalysis,
    PairedRows,
    RowAnalysis,
    WholeAnalysis,
)
from mechattn.errors import ModelError, OptionError
from mechattn.functional.rows import AnyRows, EdgeMask, PatternRows, Rows
from mechattn.model import hooks
from mechattn.model.hooked import HookedModel, ModelFacts, facts_of
from mechattn.model.patch.streaming import See, fires_while_streamed, streaming
from mechattn.model.verify.kernels import check_fused, check_streaming
from mechattn.prompts.sequences import Batch, Pairs

Engine = Literal["auto", "streaming", "fused", "hooks"]
Forward = Callable[[Any, Batch, Mapping[int, int | None], See, int], None]


def chosen_forward(model: HookedModel, engine: Engine, analyses: Iterable[Analysis] = ()) -> tuple[Forward, str]:
    """The engine for this model, and the reason; streaming is compared with the hooks once per model before use."""
    analyses = list(analyses)
    if engine == "hooks":
        return forward_through_hooks, "asked for"
    captured = [name for analysis in analyses if isinstance(analysis, CaptureAnalysis) for name in analysis.captures]
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
            raise ModelError(f'{model.cfg.model_name} cannot be streamed: {check}; choose engine="hooks" or "auto"')
        return forward_through_hooks, f"not streamed: {check.detail}"
    return _fused_or_in_blocks(model, engine, analyses)


def _fused_or_in_blocks(model: HookedModel, engine: Engine, analyses: Seq[Analysis]) -> tuple[Forward, str]:
    rows = [a.name for a in analyses if isinstance(a, (RowAnalysis, PairAnalysis)) and not isinstance(a, WholeAnalysis)]
    if engine == "fused" and rows:
        raise OptionError(
            f'{", ".join(rows)} needs rows, which a fused kernel does not give; choose engine="streaming" or "auto", '
            f"or measure analyses without rows in a separate run"
        )
    on_gpu = next(model.parameters()).device.type == "cuda"
    whole = any(isinstance(analysis, WholeAnalysis) for analysis in analyses) and not rows
    if engine == "streaming" or not whole or (engine == "auto" and not on_gpu):
        return forward_in_blocks, "its numbers are those of the hooks"
    check = check_fused(model)
    if check.outcome == "passed":
        return forward_fused, "no analysis needs rows, and two calls of a fused kernel give the numbers of the hooks"
    if engine == "fused":
        raise ModelError(f'{model.cfg.model_name}: {check}; choose engine="streaming" or "auto"')
    return forward_in_blocks, f"its numbers are those of the hooks; not fused: {check.detail}"


def forward_fused(model: HookedModel, batch: Batch, windows: Mapping[int, int | None], see: See, last: int) -> None:
    """Whole layers from two calls of a fused kernel, or blocks of rows for a layer that it cannot compute."""
    with streaming(model, windows, see, edge_masks=_edge_masks(model, batch, last), fused=True):
        hooks.forward_to(model, batch.tokens, last, [], batch.position_ids)


def forward_in_blocks(model: HookedModel, batch: Batch, windows: Mapping[int, int | None], see: See, last: int) -> None:
    """Blocks of query rows, as attention is computed; padding needs no mask, because it is on the right."""
    with streaming(model, windows, see, edge_masks=_edge_masks(model, batch, last)):
        hooks.forward_to(model, batch.tokens, last, [], batch.position_ids)


def forward_through_hooks(
    model: HookedModel, batch: Batch, windows: Mapping[int, int | None], see: See, last: int
) -> None:
    """Each layer's whole pattern as one block, after checking that it is a pattern."""
    every = slice(0, batch.tokens.shape[1])

    def whole(
        layer: int, pattern: Float[Tensor, "batch head query key"], v: Float[Tensor, "batch kv_head pos d_head"] | None
    ) -> None:
        window = windows[layer] if layer in windows else hooks.attention_window(model, layer)
        hooks.check_pattern(model, layer, pattern, batch.real, window, edge_masks.get(layer))
        if layer in windows:
            pattern = pattern.float()
            see(layer, Rows(pattern, every, every, None if v is None else PatternRows(pattern, v)))

    edge_masks = _edge_masks(model, batch, last)  # checked too, because some models ignore changes to their scores
    looked = sorted({*windows, *edge_masks})
    hooks.forward_with_patterns(model, batch.tokens, batch.real, looked, whole, edge_masks, batch.position_ids, last)


def _edge_masks(model: HookedModel, batch: Batch, last: int) -> dict[int, EdgeMask]:
    """The edges that are cut in each computed layer."""
    if batch.edge_mask is None:
        return {}
    edge_masks = {layer: batch.at(layer).edge_mask for layer in hooks.attention_layers(model) if layer <= last}
    return {layer: edge_mask for layer, edge_mask in edge_masks.items() if edge_mask is not None}


def position_width(model: HookedModel) -> int:
    """About how many numbers are in memory at the same time for each position of a sequence."""
    cfg = model.cfg
    return 8 * int(cfg.d_model) + 3 * int(cfg.d_mlp or 4 * cfg.d_model)


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


def paired_layer(number: int, attention: AnyRows | None, pairs: Pairs, window: int | None) -> PairedLayer:
    """What a layer's blocks share, made at its first block."""
    if attention is None:
        raise ModelError(
            f"layer {number} shows no hook_v by head, so outputs with and without inserted tokens cannot be compared"
        )
    v = attention.v
    index = pairs.place[:, None, :, None].expand(-1, v.shape[1], -1, v.shape[3])
    return PairedLayer(number, pairs, window, attention.of(pairs.baseline), v, v.gather(2, index))
