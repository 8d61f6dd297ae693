"""The simplest analysis: one number per query and head, averaged over the queries of each segment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from mechattn.analysis.analysis import AnalysisBase, AttentionRows, Quantity, Sums
from mechattn.errors import OptionError
from mechattn.functional.received import segment_mean
from mechattn.prompts.sequences import Batch


class QueryAnalysis(AnalysisBase):
    """Base class for numbers computed from each query's row of attention; a subclass defines ``of_queries``.

    The null is added automatically: the same numbers for a head that attends uniformly to the keys it can see.

    ``name`` is the name of the dataset. ``numbers`` gives (units, description) for each number; its mean over queries
    is kept per head and segment.
    """

    name: ClassVar[str]
    numbers: ClassVar[Mapping[str, tuple[str, str]]]

    def of_queries(self, rows: AttentionRows) -> Mapping[str, Tensor]:
        """Return each number [batch head query] for a block of queries; ``rows.pattern`` is [batch head query key]."""
        raise NotImplementedError(f"{type(self).__name__} does not define of_queries(rows)")

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """Means over the queries of each segment."""
        dims, mean = ("head", "segment"), "mean over the queries of the segment"
        return {name: Quantity(dims, units, f"{about}, {mean}") for name, (units, about) in self.numbers.items()}

    def start(self, batch: Batch, heads: int) -> Sums:
        """Empty sums."""
        shape = (len(batch.rows), heads, batch.tokens.shape[1])
        return {name: torch.zeros(shape, device=batch.tokens.device) for name in self.numbers}

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """Store the numbers of these queries."""
        made, wanted = self.of_queries(rows), rows.pattern.shape[:3]
        if set(made) != set(self.numbers):
            raise OptionError(f"{self.name}: of_queries gives {list(made)}, and numbers declares {list(self.numbers)}")
        for name, value in made.items():
            if not isinstance(value, Tensor) or value.shape != wanted:
                given = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise OptionError(
                    f"{self.name}: of_queries gives {name!r} as {given}, not as [batch, head, query] = {list(wanted)}: "
                    "reduce rows.pattern [batch head query key] over its keys"
                )
            sums[name][..., rows.queries] = value.to(sums[name].dtype)

    def values(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """Means over segments."""
        return {name: segment_mean(value, batch.members()) for name, value in sums.items()}
