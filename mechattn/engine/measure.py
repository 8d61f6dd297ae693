"""One forward pass of a batch: every block of rows is reduced as it comes, every layer when its last block has come."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from mechattn.analysis.analysis import (
    ActivationAnalysis,
    Activations,
    Analysis,
    AttentionRows,
    PairAnalysis,
    RowAnalysis,
    Sums,
)
from mechattn.axes import BASELINE
from mechattn.engine.collect import TakesValues
from mechattn.engine.forward import Forward
from mechattn.engine.pairs import PairedLayer, paired_layer
from mechattn.errors import ModelError
from mechattn.functional.activations import minimum_of
from mechattn.functional.rows import Rows
from mechattn.interventions.intervention import Acted, Intervention
from mechattn.model.activations import at_nonlinearity, plain_nonlinearity
from mechattn.prompts.pairs import Pairs, pairs_of
from mechattn.prompts.sequences import Batch

Taken = tuple[Analysis, TakesValues]


def measure_batch(
    model: Any,
    batch: Batch,
    forward: Forward,
    windows: Mapping[int, int | None],
    analyses: Seq[Analysis],
    collectors: Seq[TakesValues],
    prompt_ids: Seq[str] = (),
) -> None:
    """Run the model on a batch and hand each layer's values to the collectors.

    Args:
        model: A hooked model.
        batch: All conditions of some prompts.
        forward: How attention reaches the analyses.
        windows: The layers to look at, and what a query of each can see.
        analyses: What to measure.
        collectors: Where the values of each analysis go.
        prompt_ids: The id of every prompt of the run, for interventions.
    """
    placed = batch.to(next(model.parameters()).device)
    taken = list(zip(analyses, collectors, strict=True))
    of_attention = [pair for pair in taken if not isinstance(pair[0], ActivationAnalysis)]
    of_activations = [pair for pair in taken if isinstance(pair[0], ActivationAnalysis)]
    paired = of_activations or any(isinstance(analysis, PairAnalysis) for analysis in analyses)
    pairs = pairs_of(placed, BASELINE) if paired else None
    one = _Pass(model, batch, placed, windows, pairs)
    rows = _Rows(one, of_attention)
    with ExitStack() as stack:
        if of_activations:  # made before anything acts on the nonlinearities, entered after: it sees what goes on
            mlps = _Mlps(one, of_activations)
        for intervention, acted in _acting(placed, prompt_ids):
            stack.enter_context(intervention.acting(model, partial(_same, acted)))
        if of_activations:
            stack.enter_context(at_nonlinearity(model, dict.fromkeys(windows, mlps.see)))
        forward(model, placed, windows if of_attention else {}, rows.see, max(windows))


def _same(acted: Acted) -> Acted:
    return acted


def _acting(batch: Batch, prompt_ids: Seq[str]) -> list[tuple[Intervention, Acted]]:
    """Each intervention of each condition of a batch, in its order, with the tokens that it acts on."""
    found: dict[tuple[str, int], tuple[Intervention, list[int]]] = {}
    for row, interventions in enumerate(batch.interventions):
        for order, intervention in enumerate(interventions):
            found.setdefault((batch.rows[row][1], order), (intervention, []))[1].append(row)
    place = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    positions = torch.where(batch.origin >= 0, batch.origin, -1 - place)
    made = []
    for intervention, rows in found.values():
        index = torch.tensor(rows, device=batch.tokens.device)
        ids = tuple(prompt_ids[batch.rows[row][0]] for row in rows)
        made.append((intervention, Acted(index, ids, positions[index])))
    return made


@dataclass(frozen=True)
class _Pass:
    """A forward pass of a batch: as it was given, and on the device of the model; what is looked at."""

    model: Any
    batch: Batch
    placed: Batch
    windows: Mapping[int, int | None]
    pairs: Pairs | None


class _Rows:
    """Takes blocks of attention rows, layer by layer."""

    def __init__(self, one: _Pass, taken: Seq[Taken]) -> None:
        self.one, self.taken = one, taken
        self.by_row = [isinstance(analysis, RowAnalysis) for analysis, _ in taken]  # a protocol takes long to ask
        self.by_pair = [isinstance(analysis, PairAnalysis) for analysis, _ in taken]
        self.sums: dict[int, list[Sums]] = {}
        self.paired: dict[int, PairedLayer] = {}
        self.at: dict[int, Batch] = {}

    def see(self, layer: int, rows: Rows) -> None:
        """A block of a layer; after the last one its values go to the collectors."""
        window = self.one.windows[layer]
        if layer not in self.sums:
            self.at[layer] = self.one.placed.at(layer)
            self.sums[layer] = [analysis.start(self.one.placed, rows.pattern.shape[1]) for analysis, _ in self.taken]
            if self.one.pairs is not None and any(self.by_pair):
                self.paired[layer] = paired_layer(layer, rows.attention, self.one.pairs, window)
        v = None if rows.attention is None else rows.attention.v
        block = AttentionRows(layer, rows.pattern, rows.queries, rows.keys, self.one.placed, window, v)
        both = self.paired[layer].rows(rows) if layer in self.paired else None
        for (analysis, _), made, by_row, by_pair in zip(
            self.taken, self.sums[layer], self.by_row, self.by_pair, strict=True
        ):
            if by_row:
                cast(RowAnalysis, analysis).add(made, block)
            if by_pair and both is not None:
                cast(PairAnalysis, analysis).add_pairs(made, both)
        if rows.queries.stop == self.one.batch.tokens.shape[1]:
            self.paired.pop(layer, None)
            at = self.at.pop(layer)
            for (analysis, collector), made in zip(self.taken, self.sums.pop(layer), strict=True):
                _refuse_nan(self.one.model, layer, made)
                collector.add(layer, self.one.batch, analysis.values(made, at, window))


class _Mlps:
    """Takes the activations of MLPs, layer by layer."""

    def __init__(self, one: _Pass, taken: Seq[Taken]) -> None:
        self.one, self.taken = one, taken
        self.minimum = {layer: minimum_of(plain_nonlinearity(one.model, layer)) for layer in one.windows}

    def see(self, layer: int, pre: Tensor, post: Tensor) -> None:
        """All activations of a layer; their values go to the collectors."""
        shape = (*self.one.placed.tokens.shape, pre.shape[-1])
        if pre.numel() != pre.shape[-1] * self.one.placed.tokens.numel():
            raise ModelError(
                f"the MLP of layer {layer} doesn't see every token, so its activations mean something else"
            )
        passed = Activations(
            layer,
            pre.detach().reshape(shape),
            post.detach().reshape(shape),
            self.minimum[layer],
            self.one.placed,
            cast(Pairs, self.one.pairs),
        )
        for analysis, collector in self.taken:
            sums = analysis.start(self.one.placed, int(self.one.model.cfg.n_heads))
            cast(ActivationAnalysis, analysis).add_activations(sums, passed)
            _refuse_nan(self.one.model, layer, sums)
            collector.add(layer, self.one.batch, analysis.values(sums, self.one.placed, self.one.windows[layer]))


def _refuse_nan(model: Any, layer: int, sums: Sums) -> None:
    for value in sums.values():
        if value.is_floating_point() and not value.isfinite().all():
            raise ModelError(
                f"layer {layer} of {model.cfg.model_name} gives NaN or infinity; try another dtype, such as float32"
            )
