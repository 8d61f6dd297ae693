"""The simplest way to write an analysis: numbers of each query from its row of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from mechattn.analysis.analysis import (
    HEAD_AND_SEGMENT,
    AnalysisBase,
    AttentionRows,
    Quantities,
    Quantity,
    Sums,
    Values,
    Window,
    means_by_segment,
    means_of,
    of_each,
    of_each_query,
    zeros,
)
from mechattn.errors import OptionError
from mechattn.prompts.token_sequences import Batch


class QueryAnalysis(AnalysisBase):
    """Base class for numbers that are computed from each query's row of attention.

    A subclass defines ``of_queries``, and three attributes: ``name`` is the name of the dataset,
    ``numbers`` gives (units, description) for each number, and ``each_query = True`` also keeps the
    number of each query, as ``…_at``. The mean of each number over queries is kept per head and
    segment.

    The null is added automatically: the same numbers for a head that attends uniformly to the keys
    it can see.
    """

    name: ClassVar[str]
    numbers: ClassVar[Mapping[str, tuple[str, str]]]
    each_query: ClassVar[bool] = False

    def of_queries(self, rows: AttentionRows) -> Mapping[str, Tensor | tuple[Tensor, Tensor]]:
        """Return each number [batch head query] for a block of queries.

        If a number is undefined for some queries, return a pair of tensors of this shape: the
        number, and a mask that is True where it is defined. The other queries do not count in the
        means.

        Args:
            rows: The block; ``rows.pattern`` is [batch head query key].
        """
        raise NotImplementedError(f"{type(self).__name__} does not define of_queries(rows)")

    @property
    def quantities(self) -> Quantities:
        """Means over the queries of each segment."""
        query_quantities = {
            name: Quantity(HEAD_AND_SEGMENT, units, description)
            for name, (units, description) in self.numbers.items()
        }
        quantities = means_of(query_quantities)
        if self.each_query:
            quantities |= of_each(query_quantities)
        return quantities

    def start(self, batch: Batch, heads: int) -> Sums:
        """Zeros for each number, and masks without an undefined query."""
        sums = zeros(batch, heads, *self.numbers)
        for name in self.numbers:
            sums[_mask_name(name)] = torch.zeros_like(sums[name], dtype=torch.bool)
        return sums

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """Store the numbers of these queries.

        Raises:
            OptionError: ``of_queries`` returns other numbers than ``numbers`` declares, or one with
                a wrong shape.
        """
        block_numbers = self.of_queries(rows)
        if set(block_numbers) != set(self.numbers):
            raise OptionError(
                f"{self.name}: of_queries gives {list(block_numbers)}, and numbers declares"
                f" {list(self.numbers)}"
            )

        for name, number in block_numbers.items():
            if isinstance(number, tuple):
                values, is_defined = number
                # Before masked_fill, which would broadcast a wrong shape.
                self._check_shape(name, is_defined, rows)
                self._check_shape(name, values, rows)
                undefined = ~is_defined.bool()
                sums[_mask_name(name)][..., rows.queries] = undefined
                values = values.masked_fill(undefined, 0)
            else:
                values = number
                self._check_shape(name, values, rows)
            sums[name][..., rows.queries] = values.to(sums[name].dtype)

    def values(self, sums: Sums, batch: Batch, window: Window) -> Values:
        """Means over those queries of each segment for which a number is defined."""
        query_values = {
            name: sums[name].masked_fill(sums[_mask_name(name)], torch.nan) for name in self.numbers
        }
        values = means_by_segment(query_values, batch)
        if self.each_query:
            values |= of_each_query(query_values, self.numbers, batch)
        return values

    def _check_shape(self, name: str, number: object, rows: AttentionRows) -> None:
        """Refuse a number of another shape, which torch would broadcast over queries or heads."""
        expected = list(rows.pattern.shape[:3])
        shape = list(getattr(number, "shape", ()))
        if shape != expected:
            raise OptionError(
                f"{self.name}: of_queries gives {name!r} with the shape {shape}, not"
                f" [batch, head, query] = {expected}: reduce rows.pattern over its keys"
            )


def _mask_name(name: str) -> str:
    """The name under which ``sums`` holds the queries for which the number of this name is
    undefined."""
    return f"{name}_undefined"
