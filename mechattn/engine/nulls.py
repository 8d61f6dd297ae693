"""The nulls of each quantity: its values under attention that ignores content."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import starmap
from typing import Any

import torch

from mechattn.analysis.analysis import (
    OF_ROWS,
    Analysis,
    AttentionRows,
    PairAnalysis,
    Quantity,
    RowAnalysis,
    Sums,
    Values,
    Window,
)
from mechattn.engine.placed_batch import paired_layer
from mechattn.errors import ModelError, reason
from mechattn.functional.attention import Attention, Rows, attention_by_rows
from mechattn.model.scores import BlindScores
from mechattn.prompts.token_sequences import Batch, pairs_of

UNIFORM = "_uniform"
BLIND = "_blind"
NULL_DESCRIPTIONS = {
    UNIFORM: "if every head attended uniformly to the keys it can see",
    BLIND: (
        "if every head attended by position alone: softmax of what the model adds to its scores"
        " (ALiBi, sinks)"
    ),
}


def with_nulls(analysis: Analysis) -> dict[str, Quantity]:
    """The quantities of an analysis, each followed by its nulls.

    A quantity that has no null, and is not itself one, says why in ``no_null``.
    """
    is_of_rows = isinstance(analysis, OF_ROWS)
    quantities: dict[str, Quantity] = {}

    for name, quantity in analysis.quantities.items():
        if not is_of_rows and not quantity.no_null:
            quantity = replace(quantity, no_null="it is not made of rows of attention")

        quantities[name] = quantity
        if not has_null(name, quantity):
            continue

        for kind, null_description in NULL_DESCRIPTIONS.items():
            dims = quantity.dims
            if kind == UNIFORM:  # the same in every head
                dims = tuple(dim for dim in dims if dim != "head")
            description = f"{quantity.description}, {null_description}"
            null = replace(quantity, dims=dims, description=description, title="")
            # An analysis may measure a null itself.
            quantities[name + kind] = analysis.quantities.get(name + kind, null)

    return quantities


def has_null(name: str, quantity: Quantity) -> bool:
    """Whether this quantity has a null: not if it declares none, or is itself a null."""
    return not quantity.no_null and not name.endswith((UNIFORM, BLIND))


@dataclass
class Nulls:
    """The nulls of one batch, computed once for all layers whose queries see the same keys.

    The uniform null comes from queries of 0, which give a score of 0 to every visible key, and to
    the learned sink of a layer that has one. If the model adds something to its scores regardless
    of content, there is a second null (``_blind``), which includes it.
    """

    analyses: Sequence[Analysis]
    batch: Batch  # on the device of the model
    blind: BlindScores  # what the model adds to its scores regardless of content
    _cache: dict[Any, dict[int, Values]] = field(default_factory=dict)

    @cached_property
    def _of_rows(self) -> dict[int, Analysis]:
        """The analyses of rows that have a quantity with nulls, by their indices."""
        return {
            analysis_index: analysis
            for analysis_index, analysis in enumerate(self.analyses)
            if isinstance(analysis, OF_ROWS) and any(starmap(has_null, analysis.quantities.items()))
        }

    def of(self, analysis_index: int, layer: int, window: Window) -> Values:
        """The nulls of all quantities of an analysis, for one layer.

        Args:
            analysis_index: The index of the analysis.
            layer: The layer.
            window: The number of keys that its queries see; None for all.

        Returns:
            Values by the names of :func:`with_nulls`; empty for an analysis without nulls.
        """
        if analysis_index not in self._of_rows:
            return {}

        values = self._values(UNIFORM, layer, window)[analysis_index]

        # If the model adds nothing to its scores, the second null would repeat the first. If only
        # some layers have sinks, all have the second null, as a dataset needs it of every layer.
        if self.blind.alibi is not None or self.blind.sinks:
            values = values | self._values(BLIND, layer, window)[analysis_index]

        return values

    def _values(self, kind: str, layer: int, window: Window) -> dict[int, Values]:
        """The values of every analysis under one kind of null, cached by what determines them."""
        has_sinks = layer in self.blind.sinks
        layer_of_sinks = None  # the layer, if the scores of its sinks determine the values
        if kind == BLIND and has_sinks:
            layer_of_sinks = layer

        key = (kind, window, self.batch.masked_in(layer), has_sinks, layer_of_sinks)
        if key not in self._cache:
            self._cache[key] = self._measured(kind, layer, window)
        return self._cache[key]

    def _measured(self, kind: str, layer: int, window: Window) -> dict[int, Values]:
        """Measure every analysis on the rows of content-blind heads."""
        batch = self.batch.as_read_by(layer)
        attention = self._blind_attention(kind, layer, window, batch)

        paired_null = None
        if any(isinstance(analysis, PairAnalysis) for analysis in self._of_rows.values()):
            pairs = replace(pairs_of(self.batch), batch=batch)
            paired_null = paired_layer(layer, attention, pairs, window)

        sums = {
            analysis_index: analysis.start(batch, attention.q.shape[1])
            for analysis_index, analysis in self._of_rows.items()
        }

        def see(rows: Rows) -> None:
            """Add a block of the null's rows to the sums of every analysis."""
            block = AttentionRows(
                layer=layer,
                pattern=rows.pattern,
                queries=rows.queries,
                keys=rows.keys,
                batch=batch,
                window=window,
                v=attention.v,
                null=True,
            )

            for analysis_index, analysis in self._of_rows.items():
                with _saying_no_null(analysis):
                    if isinstance(analysis, RowAnalysis):
                        analysis.add(sums[analysis_index], block)
                    if paired_null is not None and isinstance(analysis, PairAnalysis):
                        analysis.add_pairs(sums[analysis_index], paired_null.rows(rows))

        attention_by_rows(attention, see)

        nulls = {}
        for analysis_index, analysis in self._of_rows.items():
            # Inside the context too: a quantity that values() lacks must declare no_null.
            with _saying_no_null(analysis):
                nulls[analysis_index] = _null_values(
                    analysis, sums[analysis_index], kind, batch, window
                )
        return nulls

    def _blind_attention(self, kind: str, layer: int, window: Window, batch: Batch) -> Attention:
        """The attention of queries of 0; uniform attention has a single head, for all."""
        row_count, length = batch.tokens.shape
        if kind == BLIND:
            heads = self.blind.heads
            bias = self.blind.bias(length)
            sinks = self.blind.sinks.get(layer)
        else:
            heads = 1
            bias = None
            sinks = self.blind.uniform_sink(layer)

        # Queries and keys of 0 need a single dimension, whatever d_head is.
        q = torch.zeros(row_count, heads, length, 1, device=batch.tokens.device)
        k = q[:, :1]
        v = torch.ones_like(k)

        return Attention(
            q, k, v, scale=1.0, bias=bias, window=window, edge_mask=batch.edge_mask, sinks=sinks
        )


def _null_values(analysis: Analysis, sums: Sums, kind: str, batch: Batch, window: Window) -> Values:
    """The values of one kind of null, by name; without a head dimension if it is uniform."""
    values = analysis.values(sums, batch, window)
    nulls = {}
    for name, quantity in analysis.quantities.items():
        measures_its_own = name + kind in analysis.quantities
        if measures_its_own or not has_null(name, quantity):
            continue

        null = values[name]
        if kind == UNIFORM and "head" in quantity.dims:
            null = null.select(1 + quantity.dims.index("head"), 0)
        nulls[name + kind] = null

    return nulls


@contextmanager
def _saying_no_null(analysis: Analysis) -> Iterator[None]:
    """Turn an analysis's error on the null's rows into one that says how to declare ``no_null``."""
    try:
        yield
    except Exception as error:
        raise ModelError(
            f"{analysis.name} cannot be measured on the rows of a content-blind head, which give"
            f" the null of its quantities ({reason(error)}). If a quantity needs more than rows of"
            ' attention, declare it: Quantity(…, no_null="it depends on the values")'
        ) from error
