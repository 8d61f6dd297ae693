"""The shortest analysis: one number for each query and head, averaged over the queries of each segment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from mechattn.analysis.analysis import AnalysisBase, AttentionRows, Quantity, Sums
from mechattn.functional.received import segment_mean
from mechattn.prompts.sequences import Batch


class QueryAnalysis(AnalysisBase):
    """An analysis of numbers that each query has of its own row of attention; a subclass gives ``of_queries``.

    The null comes by itself: the same numbers of a head that attends uniformly to the keys it can see.

    ``name``: of the dataset. ``numbers``: what each is, as (units, description); a mean over queries is kept, by head
    and segment.
    """

    name: ClassVar[str]
    numbers: ClassVar[Mapping[str, tuple[str, str]]]

    def of_queries(self, rows: AttentionRows) -> Mapping[str, Tensor]:
        """Each number for the queries of a block [batch head query], from ``rows.pattern`` [batch head query key]."""
        raise NotImplementedError(f"{type(self).__name__} has no of_queries(rows)")

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """Means over the queries of each segment."""
        dims, mean = ("head", "segment"), "mean over the queries of the segment"
        return {name: Quantity(dims, units, f"{about}, {mean}") for name, (units, about) in self.numbers.items()}

    def start(self, batch: Batch, heads: int) -> Sums:
        """No number yet."""
        shape = (len(batch.rows), heads, batch.tokens.shape[1])
        return {name: torch.zeros(shape, device=batch.tokens.device) for name in self.numbers}

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """The numbers of these queries."""
        for name, value in self.of_queries(rows).items():
            sums[name][..., rows.queries] = value.to(sums[name].dtype)

    def values(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """Means over segments."""
        return {name: segment_mean(value, batch.members()) for name, value in sums.items()}
