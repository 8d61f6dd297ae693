"""The null of every quantity: the same analysis of a content-blind head."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mechattn.analysis.analysis import Analysis, AttentionRows, PairAnalysis, Quantity, RowAnalysis, Sums
from mechattn.engine.forward import PairedLayer, paired_layer
from mechattn.errors import ModelError
from mechattn.functional.rows import Attention, Rows, attention_by_rows
from mechattn.model.score_terms import BlindScores
from mechattn.prompts.sequences import Batch, Pairs

UNIFORM, BLIND = "_uniform", "_blind"
_NOT_OF_ROWS = "it is not made of rows of attention"
_ABOUT = {
    UNIFORM: "if every head attended uniformly to the keys it can see",
    BLIND: "if every head attended by position alone: softmax of what the model adds to its scores (ALiBi, sinks)",
}

Values = dict[str, Tensor]


def with_nulls(analysis: Analysis) -> dict[str, Quantity]:
    """The quantities of an analysis, each followed by its nulls; a quantity without one says why."""
    given = analysis.quantities
    of_rows = isinstance(analysis, (RowAnalysis, PairAnalysis))
    made: dict[str, Quantity] = {}
    for name, quantity in given.items():
        made[name] = quantity if of_rows or quantity.no_null else replace(quantity, no_null=_NOT_OF_ROWS)
        if of_rows and has_null(name, quantity):
            for kind, about in _ABOUT.items():
                dims = tuple(dim for dim in quantity.dims if dim != "head" or kind == BLIND)
                described = replace(quantity, dims=dims, description=f"{quantity.description}, {about}")
                made.setdefault(name + kind, given.get(name + kind, described))
    return made


def has_null(name: str, quantity: Quantity) -> bool:
    """Whether the engine computes a null of this quantity; it does not if the quantity is itself a null."""
    return not quantity.no_null and not name.endswith((UNIFORM, BLIND))


@dataclass
class Nulls:
    """The nulls of one batch, computed once for all layers whose queries see the same keys.

    Uniform attention comes from queries that are zero: every key that a query sees, and a learned sink, has a score of
    0. If the model adds something to its scores that does not depend on content, a second null (``_blind``) includes
    it.
    """

    analyses: Seq[Analysis]
    batch: Batch  # on the device of the model
    pairs: Pairs | None  # each sequence with its baseline, if an analysis needs it
    blind: BlindScores  # what the model adds to its scores
    _made: dict[Any, dict[int, Values]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._wanted = [
            isinstance(a, (RowAnalysis, PairAnalysis)) and any(has_null(*named) for named in a.quantities.items())
            for a in self.analyses
        ]

    def of(self, number: int, layer: int, window: int | None) -> Values:
        """The nulls of all quantities of an analysis, for one layer."""
        if not self._wanted[number]:
            return {}
        found = self._values(UNIFORM, layer, window)[number]
        return found | self._values(BLIND, layer, window)[number] if self.blind.differ(layer) else found

    def _values(self, kind: str, layer: int, window: int | None) -> dict[int, Values]:
        """The values of every analysis, cached by what determines them."""
        key = (kind, window, self.batch.masked_in(layer), self.blind.key(layer) if kind == BLIND else None)
        if key not in self._made:
            self._made[key] = self._measured(kind, layer, window)
        return self._made[key]

    def _measured(self, kind: str, layer: int, window: int | None) -> dict[int, Values]:
        here, length = self.batch.at(layer), self.batch.tokens.shape[1]
        bias, sinks = self.blind.scores(layer, length, kind == BLIND)
        heads = self.blind.heads if kind == BLIND else 1
        zero = torch.zeros(len(self.batch.rows), heads, length, 1, device=self.batch.tokens.device)
        attention = Attention(
            zero, zero[:, :1], torch.ones_like(zero[:, :1]), 1.0, bias, window, None, here.edge_mask, sinks
        )
        paired = paired_layer(layer, attention, self.pairs, window) if self.pairs is not None else None
        passes = {i: _Pass(a, a.start(self.batch, heads)) for i, a in enumerate(self.analyses) if self._wanted[i]}

        def see(rows: Rows) -> None:
            block = AttentionRows(
                layer, rows.pattern, rows.queries, rows.keys, self.batch, window, attention.v, null=True
            )
            for one in passes.values():
                one.add(block, rows, paired)

        attention_by_rows(attention, see)
        return {number: one.values(kind, here, window) for number, one in passes.items()}


@dataclass
class _Pass:
    """One analysis, running over the rows of a content-blind head."""

    analysis: Analysis
    sums: Sums

    def add(self, block: AttentionRows, rows: Rows, paired: PairedLayer | None) -> None:
        """Reduce a block of rows like any other."""
        try:
            if isinstance(self.analysis, RowAnalysis):
                self.analysis.add(self.sums, block)
            if isinstance(self.analysis, PairAnalysis) and paired is not None:
                self.analysis.add_pairs(self.sums, paired.rows(rows))
        except Exception as error:
            raise self._no_null(error) from error

    def values(self, kind: str, batch: Batch, window: int | None) -> Values:
        """The nulls, named after their quantities; without a head dimension if all heads are equal."""
        try:
            values = self.analysis.values(self.sums, batch, window)
        except Exception as error:
            raise self._no_null(error) from error
        given = self.analysis.quantities
        named = {name: q for name, q in given.items() if has_null(name, q) and name + kind not in given}
        if lacking := [name for name in named if name not in values]:
            raise self._no_null(f"its values hold no {lacking[0]!r}")
        if kind == UNIFORM:  # the same in every head
            heads = {name: 1 + q.dims.index("head") for name, q in named.items() if "head" in q.dims}
            values = {n: value.select(heads[n], 0) if n in heads else value for n, value in values.items()}
        return {name + kind: values[name] for name in named}

    def _no_null(self, why: object) -> ModelError:
        reason = (str(why).splitlines() or [type(why).__name__])[0]
        return ModelError(
            f"{self.analysis.name} cannot be measured on the rows of a content-blind head, which give the null of its "
            f"quantities ({reason}). If a quantity needs more than rows of attention, declare it: "
            'Quantity(…, no_null="it depends on the values")'
        )
