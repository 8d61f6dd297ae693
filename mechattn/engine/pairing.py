"""The rows of a block beside those of the same queries in the baseline."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from mechattn.analysis.analysis import PairedRows
from mechattn.errors import ModelError
from mechattn.functional.attention import (
    AnyRows,
    Rows,
)
from mechattn.prompts.token_sequences import Pairs


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
        on demand.

        Args:
            rows: A block of the batch's attention.

        Returns:
            The block of the paired sequences, their columns in the baseline's order, and the
            baseline's rows of the same original tokens.
        """
        pairs = self.pairs
        keys = rows.keys
        pattern = rows.pattern
        count = pairs.reach[rows.queries.stop - 1]  # of original tokens up to the last query

        # The pattern's columns in the order of the baseline's tokens, 0 for those of other blocks.
        place = pairs.place[:, :count]
        is_in_block = pairs.original[:, :count] & (place >= keys.start) & (place < keys.stop)
        column = (place - keys.start).clamp(0, pattern.shape[-1] - 1)[:, None, None]
        aligned = pattern.gather(-1, column.expand(*pattern.shape[:3], -1))

        # An inserted query has none in the baseline: what its row holds is not used.
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
    """What a layer's blocks share, made at its first block.

    Args:
        number: The number of the layer.
        attention: The attention of the whole batch, or None if it cannot be asked for.
        pairs: Which sequence is paired with which baseline, on the layer's device.
        window: The number of keys that a query sees; None for all.

    Raises:
        ModelError: Single rows and values cannot be asked for.
    """
    if attention is None:
        raise ModelError(
            f"layer {number} shows no hook_v by head, so outputs with and without inserted tokens"
            " cannot be compared"
        )

    # The values of the original tokens, in the order of the baseline.
    v = attention.v
    place = pairs.place[:, None, :, None].expand(-1, v.shape[1], -1, v.shape[3])
    v_aligned = v.gather(2, place)

    return PairedLayer(number, pairs, window, attention.of(pairs.baseline), v, v_aligned)
