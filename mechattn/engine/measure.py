"""One forward pass of a batch: every block of rows is reduced as it comes, every layer when its last block has come."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, cast

from mechattn.analysis.analysis import Analysis, AttentionRows, PairAnalysis, RowAnalysis, Sums
from mechattn.axes import BASELINE
from mechattn.engine.collect import TakesValues
from mechattn.engine.forward import Forward
from mechattn.engine.pairs import PairedLayer, paired_layer
from mechattn.errors import ModelError
from mechattn.functional.rows import Rows
from mechattn.prompts.pairs import pairs_of
from mechattn.prompts.sequences import Batch


def measure_batch(
    model: Any,
    batch: Batch,
    forward: Forward,
    windows: Mapping[int, int | None],
    analyses: Seq[Analysis],
    collectors: Seq[TakesValues],
) -> None:
    """Run the model on a batch and hand each layer's values to the collectors.

    Args:
        model: A hooked model.
        batch: All conditions of some prompts.
        forward: How attention reaches the analyses.
        windows: The layers to look at, and what a query of each can see.
        analyses: What to measure.
        collectors: Where the values of each analysis go.
    """
    placed = batch.to(next(model.parameters()).device)
    see_rows = [isinstance(analysis, RowAnalysis) for analysis in analyses]  # a protocol takes long to ask
    see_pairs = [isinstance(analysis, PairAnalysis) for analysis in analyses]
    pairs = pairs_of(placed, BASELINE) if any(see_pairs) else None
    sums: dict[int, list[Sums]] = {}
    paired: dict[int, PairedLayer] = {}

    def see(layer: int, rows: Rows) -> None:
        window = windows[layer]
        if layer not in sums:
            sums[layer] = [analysis.start(placed, rows.pattern.shape[1]) for analysis in analyses]
            if pairs is not None:
                paired[layer] = paired_layer(layer, rows.attention, pairs, window)
        v = None if rows.attention is None else rows.attention.v
        block = AttentionRows(layer, rows.pattern, rows.queries, rows.keys, placed, window, v)
        both = paired[layer].rows(rows) if layer in paired else None
        for analysis, made, by_row, by_pair in zip(analyses, sums[layer], see_rows, see_pairs, strict=True):
            if by_row:
                cast(RowAnalysis, analysis).add(made, block)
            if by_pair and both is not None:
                cast(PairAnalysis, analysis).add_pairs(made, both)
        if rows.queries.stop == batch.tokens.shape[1]:
            paired.pop(layer, None)
            for analysis, made, collector in zip(analyses, sums.pop(layer), collectors, strict=True):
                _refuse_nan(model, layer, made)
                collector.add(layer, batch, analysis.values(made, placed, window))

    forward(model, placed, windows, see)


def _refuse_nan(model: Any, layer: int, sums: Sums) -> None:
    for value in sums.values():
        if value.is_floating_point() and not value.isfinite().all():
            raise ModelError(
                f"layer {layer} of {model.cfg.model_name} gives NaN or infinity; try another dtype, such as float32"
            )
