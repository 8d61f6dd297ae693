"""Each block of query rows beside the same queries of the baseline, which is in the same batch."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from mechattn.analysis.analysis import PairedRows
from mechattn.errors import ModelError
from mechattn.functional.rows import AnyRows, Rows
from mechattn.prompts.pairs import Pairs


@dataclass(frozen=True)
class PairedLayer:
    """What the blocks of one layer have in common: the baselines' attention, and values.

    Args:
        number: The layer.
        pairs: Which sequences belong together.
        window: How many keys a query sees; None for all.
        baseline: The attention of the baselines.
        v: Values of the sequences.
        v_aligned: The same for their original tokens alone, in the order of the baseline.
    """

    number: int
    pairs: Pairs
    window: int | None
    baseline: AnyRows
    v: Float[Tensor, "batch kv_head pos d_head"]
    v_aligned: Float[Tensor, "batch kv_head original d_head"]

    def rows(self, rows: Rows) -> PairedRows:
        """The block with the baseline's rows of the same queries, computed (or looked up) now."""
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
    """What a layer's first block brings.

    Raises:
        ModelError: The hooks show no values.
    """
    if attention is None:
        raise ModelError(
            f"layer {number} shows no hook_v by head, so outputs with and without tokens can't be compared"
        )
    v = attention.v
    index = pairs.place[:, None, :, None].expand(-1, v.shape[1], -1, v.shape[3])
    return PairedLayer(number, pairs, window, attention.of(pairs.baseline), v, v.gather(2, index))
