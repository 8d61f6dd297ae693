"""The plan by which pairs are patched.

It reads the runs of each pair, and puts as many patched copies into a pass as memory allows. A pass
starts at the first layer that its copies change. The memory that a row of a pass takes is counted
here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool
from torch import Tensor

from mechattn.errors import OptionError
from mechattn.model.hooked import HookedModel, device_of
from mechattn.patching.effects import Method
from mechattn.patching.graph import Graph
from mechattn.patching.pairs import Pair, PatchingRequest, PromptEffects, UnpatchedLogits
from mechattn.patching.patched_runs import (
    Activation,
    HeadChange,
    HeadOutput,
    LayerHead,
    RecordedRun,
    gradients_of,
    of_one_shape,
    patched_logits,
    recorded_runs,
)
from mechattn.patching.sites import PatchCell, PatchTarget

_MOST_PAIRS = 8  # that are read together; their copies already fill a pass for each layer
_MOST_ROWS = 32  # in a pass; more are not faster
# With fewer rows, reading the weights takes longer than computing with them. Copies that change a
# later layer then join a pass, although it starts earlier than they need.
_ENOUGH_ROWS_ON_CPU = 4

_BYTES = 4  # of a number in float32; half precision is counted as float32
_BYTES_OF_SUMS = 8  # of a number in float64, in which gradients and scores are summed

# What replaces each head's output in a pair's base run, for the effect and for each control.
Replacements = Mapping[str, Mapping[LayerHead, HeadOutput]]


@dataclass(frozen=True, eq=False)
class PairRuns:
    """The unpatched runs of a pair, and what else its patched copies need.

    Args:
        pair: The pair.
        base: The run that is patched.
        source: The run from which activations are taken.
        unpatched_logits: The logits of both runs, from which effects are measured.
        partner: The source run of another prompt, for the control "other_prompt"; None without it.
        gradients: The gradients of the metric with respect to each head's output in the base run,
            by layer. They are empty unless effects are attributed.
    """

    pair: Pair
    base: RecordedRun
    source: RecordedRun
    unpatched_logits: UnpatchedLogits
    partner: RecordedRun | None
    gradients: Mapping[int, Activation]


@dataclass(frozen=True, eq=False)
class PatchedCopy:
    """A copy of a base run with one cell patched.

    Args:
        runs: The runs of its pair.
        variable: The variable that it measures: "effect", or a control.
        cell_index: The index of the cell.
        cell: The heads that are patched.
        token_mask: Which of the tokens that both runs have are patched.
        values: What replaces each head's output at all tokens that both runs have.
    """

    runs: PairRuns
    variable: str
    cell_index: int
    cell: PatchCell
    token_mask: Bool[Tensor, " shared"]
    values: Mapping[LayerHead, HeadOutput]

    @property
    def changes(self) -> list[HeadChange]:
        """The changes of the base run."""
        positions = self.runs.base.positions[self.token_mask]

        changes = []
        for where in self.cell.heads:
            value = self.values[where][self.token_mask]
            changes.append(HeadChange(self.cell.part, where, positions, value))
        return changes


@dataclass(frozen=True)
class PatchingPlan:
    """The cells to patch in each prompt, and what replaces their activations.

    Args:
        request: The prompts, the model and the metric.
        target: The heads or layers, and the part of them that is patched.
        cells: The cells that are patched one by one.
        replacements: A function of this plan and a pair's runs that returns what replaces each
            head's output.
        method: Whether cells are patched exactly, or their effects are estimated to first order.
        controls: The controls to measure.
        starts: The layers at which a pass may start.
        partners: For the control "other_prompt", another prompt's pair for each pair, by id.
    """

    request: PatchingRequest
    target: PatchTarget
    cells: Sequence[PatchCell]
    replacements: Callable[[PatchingPlan, PairRuns], Replacements]
    method: Method = "exact"
    controls: Sequence[str] = ()
    starts: Sequence[int] = ()
    partners: Mapping[str, Pair] = field(default_factory=dict)

    def batches(self, pairs: Sequence[Pair]) -> list[list[Pair]]:
        """Batches of pairs whose base sequences have the same shape, as large as memory allows."""
        model = self.request.model
        batches = []
        for indices in of_one_shape([pair.base for pair in pairs]):
            same_shape = [pairs[index] for index in indices]
            longest = max(same_shape, key=lambda pair: pair.length)
            # At least one copy of each pair must fit.
            bytes_per_pair = self._pair_bytes(longest) + patched_row_bytes(model, longest)
            pair_count = min(_MOST_PAIRS, rows_within(self.request.memory, bytes_per_pair))
            for start in range(0, len(same_shape), pair_count):
                batches.append(same_shape[start : start + pair_count])
        return batches

    def effects(self, pairs: Sequence[Pair]) -> Mapping[str, PromptEffects]:
        """The effect of each cell with its controls, the whole effect, and the metric of the
        unpatched base run.

        An effect is NaN if the two runs share no token of the cell. The control "other_prompt" is
        also NaN if no other prompt is long enough.

        Args:
            pairs: Pairs whose base sequences have the same shape.

        Returns:
            For each id of a prompt, "effect" and the controls [cell], "whole", and "base_metric";
            all in the units of the metric.
        """
        effects_by_id: dict[str, dict[str, Any]] = {}
        copies = []
        for runs in self._read(pairs):
            # The metric is computed first, so that unusable values are refused before any patch.
            effects: dict[str, Any] = {
                "whole": runs.unpatched_logits.whole,
                "base_metric": runs.unpatched_logits.base_metric,
            }
            for variable in ("effect", *self.controls):
                effects[variable] = np.full(len(self.cells), np.nan)
            effects_by_id[runs.pair.id] = effects
            copies += self._copies(runs)

        if self.method == "attribution":
            effect_of_copy = _first_order_effects(copies)
        else:
            effect_of_copy = self._exact_effects(pairs, copies)
        for copy, effect in effect_of_copy.items():
            effects_by_id[copy.runs.pair.id][copy.variable][copy.cell_index] = effect
        return effects_by_id

    def _copies(self, runs: PairRuns) -> list[PatchedCopy]:
        """The copies of a pair's base run, for the effect and each control of each cell."""
        token_groups = self.target.groups_of(runs.pair)
        copies = []
        # There are no replacements for "other_prompt" if no other prompt is long enough.
        for variable, values in self.replacements(self, runs).items():
            for cell_index, cell in enumerate(self.cells):
                token_mask = token_groups == cell.token_group
                # The two runs may share no token of the cell.
                if token_mask.any():
                    copies.append(
                        PatchedCopy(
                            runs=runs,
                            variable=variable,
                            cell_index=cell_index,
                            cell=cell,
                            token_mask=token_mask,
                            values=values,
                        )
                    )
        return copies

    def _read(self, pairs: Sequence[Pair]) -> list[PairRuns]:
        """The unpatched runs of each pair; sequences of the same shape share a pass."""
        model = self.request.model
        layers = self.target.layers
        part = self.target.part
        base_sequences = [(pair.base, pair.origins) for pair in pairs]
        source_sequences = [(pair.source, pair.origins) for pair in pairs]
        base_runs = recorded_runs(model, base_sequences, layers, part, self.starts)
        source_runs = recorded_runs(model, source_sequences, layers, part)

        # A pair that is longer than all others has no partner.
        ids_with_partner = [pair.id for pair in pairs if pair.id in self.partners]
        partners = [self.partners[id] for id in ids_with_partner]
        partner_sequences = [(partner.source, partner.origins) for partner in partners]
        partner_runs = recorded_runs(model, partner_sequences, layers, part)
        partner_run_by_id = dict(zip(ids_with_partner, partner_runs, strict=True))

        all_runs = []
        for pair, base, source in zip(pairs, base_runs, source_runs, strict=True):
            unpatched_logits = UnpatchedLogits(pair, base.logits, source.logits)
            gradients = {}
            if self.method == "attribution":
                gradients = gradients_of(model, pair.base, layers, unpatched_logits.measure)
            runs = PairRuns(
                pair,
                base,
                source,
                unpatched_logits,
                partner=partner_run_by_id.get(pair.id),
                gradients=gradients,
            )
            all_runs.append(runs)
        return all_runs

    def _exact_effects(
        self, pairs: Sequence[Pair], copies: Sequence[PatchedCopy]
    ) -> dict[PatchedCopy, float]:
        """The effect of each copy: its metric minus that of its base run."""
        model = self.request.model
        bytes_left = self.request.memory - sum(map(self._pair_bytes, pairs))
        bytes_per_row = patched_row_bytes(model, pairs[0])  # the same for all, as their shape is
        most_rows = min(_MOST_ROWS, rows_within(bytes_left, bytes_per_row))

        effects = {}
        for batch in self._passes(copies, most_rows):
            base_runs = [copy.runs.base for copy in batch]
            changes = [copy.changes for copy in batch]
            logits = patched_logits(model, base_runs, changes)
            for row, copy in enumerate(batch):
                [effect] = copy.runs.unpatched_logits.effects(logits[[row]])
                effects[copy] = effect
        return effects

    def _pair_bytes(self, pair: Pair) -> int:
        """The bytes that a pair takes while it is patched, besides its patched copies.

        They are those of seven times the outputs of its layers: three runs' outputs, three sets of
        replacements, and the residual streams at which passes start, or the gradients.
        """
        cfg = self.request.model.cfg
        # A row of a pattern has a number for each token.
        width_of_head = pair.length if self.target.part == "pattern" else cfg.d_head
        width = max(cfg.d_model, cfg.n_heads * width_of_head)
        return _BYTES * 7 * pair.length * len(self.target.layers) * int(width)

    def _passes(self, copies: Sequence[PatchedCopy], most_rows: int) -> list[list[PatchedCopy]]:
        """The copies of each pass.

        Copies are in the order of the first layer that they change, since a pass starts at the
        first layer that any of its copies changes.
        """
        enough_rows = most_rows
        if device_of(self.request.model).type == "cpu":
            enough_rows = _ENOUGH_ROWS_ON_CPU

        passes: list[list[PatchedCopy]] = []
        for copy in sorted(copies, key=lambda copy: copy.cell.first_layer):
            if not passes:
                passes.append([copy])
                continue

            last_pass = passes[-1]
            starts_later = copy.cell.first_layer > last_pass[0].cell.first_layer
            if len(last_pass) == most_rows or (starts_later and len(last_pass) >= enough_rows):
                passes.append([copy])
            else:
                last_pass.append(copy)
        return passes


def rows_within(budget: int, bytes_per_row: int) -> int:
    """The number of rows that fit in a budget of bytes, at least one."""
    return max(1, budget // bytes_per_row)


def patched_row_bytes(model: HookedModel, pair: Pair, further_values: int = 0) -> int:
    """The bytes that a row of a forward pass takes in the layer at work and for the logits.

    ``4 · (tokens · (8 d_model + heads · (6 d_head + 3 tokens) + 4 d_mlp + further_values)
    + 4 answer · d_vocab)``

    Args:
        model: The hooked model.
        pair: The pair whose base run is patched.
        further_values: The number of further values that are kept for each token.
    """
    cfg = model.cfg
    length = len(pair.base)

    attention = cfg.n_heads * (6 * cfg.d_head + 3 * length)
    token_values = 8 * cfg.d_model + attention + _mlp_values(model) + further_values
    logits = 4 * len(pair.answer) * cfg.d_vocab

    return _BYTES * int(length * token_values + logits)


def edges_row_bytes(model: HookedModel, graph: Graph, pair: Pair) -> int:
    """The bytes that a row of a pass with replaced edges takes.

    They include the steps of all writers and the inputs of a layer's heads.
    """
    cfg = model.cfg
    steps_and_inputs = len(graph.writers) + 4 * cfg.n_heads
    return patched_row_bytes(model, pair, cfg.d_model * steps_and_inputs)


def gradients_row_bytes(model: HookedModel, graph: Graph, pair: Pair) -> int:
    """The bytes that a row takes in a pass with gradients, which keeps all layers."""
    cfg = model.cfg
    attention = cfg.n_heads * (6 * cfg.d_head + 4 * len(pair.base))
    layer_values = 4 * cfg.d_model + _mlp_values(model) + attention
    reader_values = 2 * cfg.d_model * len(graph.readers)
    return patched_row_bytes(model, pair, reader_values + cfg.n_layers * layer_values)


def edges_fixed_bytes(model: HookedModel, graph: Graph, pair: Pair) -> int:
    """The bytes that a pair's edges take, whatever the number of rows."""
    # In float32, the outputs of both runs and the exchanged ones; in float64, the step, the random
    # step and the two temporaries from which that is computed.
    writer_bytes = 3 * _BYTES + 4 * _BYTES_OF_SUMS
    value_bytes = len(graph.writers) * writer_bytes + len(graph.readers) * _BYTES_OF_SUMS
    return int(pair.length * model.cfg.d_model * value_bytes)


def check_edges_fit(model: HookedModel, graph: Graph, pairs: Sequence[Pair], budget: int) -> None:
    """Refuse a graph if a single row of the longest pair's passes does not fit.

    Raises:
        OptionError: It does not fit.
    """
    longest = max(pairs, key=lambda pair: pair.length)

    bytes_per_row = max(
        gradients_row_bytes(model, graph, longest), edges_row_bytes(model, graph, longest)
    )
    needed_bytes = edges_fixed_bytes(model, graph, longest) + bytes_per_row
    if needed_bytes > budget:
        raise OptionError(
            f"the {len(graph.edges):,} edges of {model.cfg.model_name} need about "
            f"{needed_bytes / 2**30:.2g} GiB for a prompt of {longest.length:,} tokens, more than"
            " memory=…: allow more memory, or give shorter prompts"
        )


def _first_order_effects(copies: Sequence[PatchedCopy]) -> dict[PatchedCopy, float]:
    """The first-order effect of copies that change a single head: ``Σ gradient · (value − z)``."""
    effects = {}
    for copy in copies:
        [change] = copy.changes
        layer, head = change.where
        z = copy.runs.base.output_of(change.where, change.positions)
        step = change.value.double() - z.double()
        gradient = copy.runs.gradients[layer][change.positions.to(z.device), head].double()
        effects[copy] = float((gradient * step).sum())
    return effects


def _mlp_values(model: HookedModel) -> int:
    """The number of values that an MLP keeps for a token.

    Without a d_mlp in the configuration, the usual four times d_model is assumed.
    """
    width = getattr(model.cfg, "d_mlp", 0) or 4 * model.cfg.d_model
    return 4 * width
