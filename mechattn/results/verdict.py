"""How the attention that a segment receives changed from the baseline, against its uniform null."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mechattn.axes import BASELINE
from mechattn.errors import OptionError
from mechattn.results.units import units_of
from mechattn.stats.comparison import Verdict, against_null
from mechattn.stats.intervals import FEWEST
from mechattn.stats.units import Unit

if TYPE_CHECKING:
    from mechattn.results.result import Result


def verdict(result: Result, condition: str | None, segment: str, unit: Unit) -> Verdict:
    """See :meth:`mechattn.results.result.Result.verdict`, which explains the arguments."""
    condition = result.condition(condition)
    dataset = result["received_attention"]
    if not {"received_by_segment", "received_by_segment_uniform"} <= set(dataset):
        raise OptionError("this result lacks the attention of segments, or its null: it was changed since it was made")
    if segment not in dataset.segment.values or dataset.received_by_segment.sel(segment=segment).isnull().any():
        raise OptionError(f"not every prompt has received attention in the segment {segment!r}")
    dataset = dataset.sel(segment=segment).transpose("prompt", "condition", "layer", ...)
    units = units_of(result, dataset.sizes["prompt"], unit)
    units.refuse_below(FEWEST)

    def values(quantity: str, of: str) -> np.ndarray:
        return dataset[quantity].sel(condition=of).values.astype(np.float64)

    return against_null(
        values("received_by_segment", condition),
        values("received_by_segment", BASELINE),
        values("received_by_segment_uniform", condition)[..., None],
        values("received_by_segment_uniform", BASELINE)[..., None],
        units=units,
    )
