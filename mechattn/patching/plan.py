"""Patches the cells of pairs: reads their runs, and gives as many patched copies to a pass as
memory lets, from the first layer that they change; and how much memory a row of a pass takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor

from mechattn.axes import SEGMENTS
from mechattn.errors import OptionError
from mechattn.model.hooked import HookedModel, device_of
from mechattn.patching.graph import Graph
from mechattn.patching.pairs import Pair, PatchingRequest, PromptEffects, Unpatched
from mechattn.patching.patched_runs import (
    Change,
    RecordedRun,
    Shape,
    Where,
    Z,
    gradients_of,
    patched_logits,
    recorded_runs,
    shape_of,
)
from mechattn.patching.sites import PatchCell, PatchTarget

_MOST_PAIRS = 8  # that are read together: their copies fill a pass for each layer
_MOST_ROWS = 32  # in a pass: more are no faster
# With fewer rows than these, reading the weights takes longer than computing with them: then copies
# that change a later layer join the pass, though it starts too early for them.
_ENOUGH_ROWS_ON_CPU = 4
_BYTES = 4  # of a number; half precision is counted as if it were whole
_OF_SUMS = 8  # gradients and scores are summed in float64


@dataclass(frozen=True, eq=False)
class PairRuns:
    """Both runs of a pair, unpatched, and what else its copies need.

    Args:
        pair: The pair.
        base: The run that is patched.
        source: The run from which activations are taken.
        partner: Another prompt's source run, if it is a control.
        gradients: Of the metric with respect to each head's output in the base run, by layer, if
            effects are attributed.
    """

    pair: Pair
    base: RecordedRun
    source: RecordedRun
    partner: RecordedRun | None = None
    gradients: Mapping[int, Z] = field(default_factory=dict)

    @cached_property
    def unpatched(self) -> Unpatched:
        """What effects are counted from."""
        return Unpatched(self.pair, self.base.logits, self.source.logits)

    def patched_tokens(self, cell: PatchCell) -> Bool[Tensor, " shared"]:
        """Which of the tokens that both runs have are those of a cell."""
        segments = self.base.sequence.segment[self.base.places]
        tokens = cell.tokens

        if tokens is None:
            return segments >= 0
        if isinstance(tokens, str):
            return segments == SEGMENTS.index(tokens)
        return self.pair.origins == tokens


@dataclass(frozen=True, eq=False)
class PatchedCopy:
    """A copy of a base run with one cell patched.

    Args:
        runs: The runs of its pair.
        cell: The heads and tokens that are patched.
        values: What replaces each head's output, at the tokens that both runs have.
    """

    runs: PairRuns
    cell: PatchCell
    values: Mapping[Where, Z]

    @property
    def changes(self) -> list[Change]:
        """What is put at which positions of the base run."""
        tokens = self.runs.patched_tokens(self.cell)
        places = self.runs.base.places[tokens]

        changes = []
        for where in self.cell.heads:
            value = self.values[where][tokens]
            changes.append((where, places, value))
        return changes


# From a pair's runs to what replaces each head's output, for the effect and for each control.
Replacements = Callable[[PairRuns], Mapping[str, Mapping[Where, Z]]]


@dataclass(frozen=True)
class PatchingPlan:
    """The cells to patch, and what with.

    Args:
        request: What is asked.
        target: The heads or layers, and the part of them that is patched.
        cells: The patches of each prompt.
        replacements: From a pair's runs to what is put in place of each head's output.
        starts: The layers at which a pass may start.
        partners: Other prompts' pairs by id, for the control "other_prompt".
        controls: The controls to measure.
    """

    request: PatchingRequest
    target: PatchTarget
    cells: Sequence[PatchCell]
    replacements: Replacements
    starts: Sequence[int] = ()
    partners: Mapping[str, Pair] = field(default_factory=dict)
    controls: Sequence[str] = ()

    def batches(self, pairs: Sequence[Pair]) -> list[list[Pair]]:
        """Pairs whose base runs have one shape, as many together as memory lets."""
        by_shape: dict[Shape, list[Pair]] = {}
        for pair in pairs:
            alike = by_shape.setdefault(shape_of(pair.base), [])
            alike.append(pair)

        batches = []
        for alike in by_shape.values():
            longest = max(alike, key=lambda pair: pair.length)
            size = min(_MOST_PAIRS, rows_within(self.request.memory, self._bytes(longest)))
            for start in range(0, len(alike), size):
                batches.append(alike[start : start + size])
        return batches

    def _bytes(self, pair: Pair) -> int:
        """What a pair takes with one of its copies."""
        model = self.request.model
        return prompt_bytes(model, self.target, pair) + row_bytes(model, pair)

    def effects(self, pairs: Sequence[Pair]) -> list[PromptEffects]:
        """The effect of each cell and its controls [cell]; the whole effect, and the metric of the
        base run.

        An effect is NaN where both runs share no token of the cell, a control also where no other
        prompt is long enough.

        Args:
            pairs: Pairs whose base runs have one shape.

        Returns:
            For each pair "effect" and the controls [cell], "whole" and "before", in the units of
            the metric.
        """
        all_runs = self._read(pairs)
        # Before anything is patched, as they refuse metrics that give no numbers.
        of_runs = [(runs.unpatched.whole, runs.unpatched.before) for runs in all_runs]

        copies = []
        destinations = []  # of each copy: the number of its pair, the name, the number of its cell
        for pair_index, runs in enumerate(all_runs):
            # A segment may have no token in this prompt.
            patchable = [
                index for index, cell in enumerate(self.cells) if runs.patched_tokens(cell).any()
            ]
            # Nothing replaces for "other_prompt" where no other prompt is long enough.
            for name, values in self.replacements(runs).items():
                for index in patchable:
                    copies.append(PatchedCopy(runs, self.cells[index], values))
                    destinations.append((pair_index, name, index))

        if self.target.attributed:
            measured = _first_order(copies)
        else:
            measured = self._exact(pairs, copies)

        names = ("effect", *self.controls)
        effects = [{name: np.full(len(self.cells), np.nan) for name in names} for _ in pairs]
        for (pair_index, name, index), effect in zip(destinations, measured, strict=True):
            effects[pair_index][name][index] = effect

        return [
            {"whole": whole, "before": before, **of_pair}
            for (whole, before), of_pair in zip(of_runs, effects, strict=True)
        ]

    def _read(self, pairs: Sequence[Pair]) -> list[PairRuns]:
        """The unpatched runs of each pair, those of one shape in one pass."""
        model = self.request.model
        layers = self.target.layers
        part = self.target.part
        base_sequences = [(pair.base, pair.origins) for pair in pairs]
        source_sequences = [(pair.source, pair.origins) for pair in pairs]
        bases = recorded_runs(model, base_sequences, layers, part, self.starts)
        sources = recorded_runs(model, source_sequences, layers, part)

        partners = {pair.id: self.partners[pair.id] for pair in pairs if pair.id in self.partners}
        partner_sequences = [(partner.source, partner.origins) for partner in partners.values()]
        partner_runs = recorded_runs(model, partner_sequences, layers, part)
        partner_run_of = dict(zip(partners, partner_runs, strict=True))

        all_runs = []
        for pair, base, source in zip(pairs, bases, sources, strict=True):
            runs = PairRuns(pair, base, source, partner_run_of.get(pair.id))
            if self.target.attributed:
                gradients = gradients_of(model, pair.base, layers, runs.unpatched.measure)
                runs = replace(runs, gradients=gradients)
            all_runs.append(runs)
        return all_runs

    def _exact(
        self, pairs: Sequence[Pair], copies: Sequence[PatchedCopy]
    ) -> Float[np.ndarray, " copy"]:
        """The metric of each copy, minus that of its base run."""
        model = self.request.model
        prompts_memory = sum(prompt_bytes(model, self.target, pair) for pair in pairs)
        memory = self.request.memory - prompts_memory
        rows = min(_MOST_ROWS, rows_within(memory, row_bytes(model, pairs[0])))

        effects = np.empty(len(copies))
        for indices in self._passes(copies, rows):
            runs = [copies[index].runs for index in indices]
            base_runs = [runs_of_row.base for runs_of_row in runs]
            changes = [copies[index].changes for index in indices]
            logits = patched_logits(model, base_runs, changes, self.target.part)

            for row, index in enumerate(indices):
                [effect] = runs[row].unpatched.effects(logits[[row]])
                effects[index] = effect
        return effects

    def _passes(self, copies: Sequence[PatchedCopy], most: int) -> list[list[int]]:
        """The numbers of the copies of each pass, in the order of the first layers that they
        change, as a pass starts at the first of all."""
        is_on_cpu = device_of(self.request.model).type == "cpu"
        enough = _ENOUGH_ROWS_ON_CPU if is_on_cpu else most
        first_layers = [copy.cell.first_layer for copy in copies]

        passes: list[list[int]] = []
        for index in np.argsort(first_layers, kind="stable").tolist():
            current = passes[-1] if passes else []
            is_full = len(current) == most
            is_later = bool(current) and first_layers[index] > first_layers[current[0]]
            if not current or is_full or (is_later and len(current) >= enough):
                passes.append([index])
            else:
                current.append(index)
        return passes


def _first_order(copies: Sequence[PatchedCopy]) -> Float[np.ndarray, " copy"]:
    """The first-order effect of changing single heads: ``Σ gradient · (value − z)``."""
    effects = []
    for copy in copies:
        [((layer, head), places, value)] = copy.changes
        z = copy.runs.base.activations[layer]
        places = places.to(z.device)
        step = value.double() - z[places, head].double()
        gradient = copy.runs.gradients[layer][places, head].double()
        effect = (gradient * step).sum()
        effects.append(float(effect))
    return np.array(effects)


def rows_within(budget: int, row: int) -> int:
    """As many rows as fit in a budget, at least one."""
    return max(1, budget // row)


def row_bytes(model: HookedModel, pair: Pair, beside: int = 0) -> int:
    """What a row of a forward pass takes: a layer at work, and logits before the answer.

    ``4 · (tokens · (8 d_model + heads · (6 d_head + 3 tokens) + MLP + beside) + logits)``

    Args:
        model: The hooked model.
        pair: The pair whose base run is patched.
        beside: Further numbers that are kept for each token.

    Returns:
        Bytes.
    """
    cfg = model.cfg
    length = len(pair.base)

    attention = cfg.n_heads * (6 * cfg.d_head + 3 * length)
    numbers_of_token = 8 * cfg.d_model + attention + _of_mlp(model) + beside
    logits = 4 * len(pair.answer) * cfg.d_vocab

    numbers = length * numbers_of_token + logits
    return _BYTES * int(numbers)


def _of_mlp(model: HookedModel) -> int:
    """The numbers that an MLP keeps for a token; four times d_model wide if the model doesn't
    say."""
    width = getattr(model.cfg, "d_mlp", 0) or 4 * model.cfg.d_model
    return 4 * width


def prompt_bytes(model: HookedModel, target: PatchTarget, pair: Pair) -> int:
    """What a prompt takes while it is patched, beside its patched copies: three runs' outputs, as
    much to replace them, and the streams at which passes start or the gradients.

    Args:
        model: The hooked model.
        target: What is patched; a row of a pattern is as wide as the prompt is long.
        pair: The prompt's pair.

    Returns:
        Bytes.
    """
    cfg = model.cfg
    length = pair.length
    layer_count = len(target.layers)

    width_of_head = length if target.part == "pattern" else cfg.d_head
    width = max(cfg.d_model, cfg.n_heads * width_of_head)
    return _BYTES * int(7 * length * layer_count * width)


def paths_row_bytes(model: HookedModel, pair: Pair) -> int:
    """What a row of a path's passes takes: what all layers' receivers get, and a pass."""
    cfg = model.cfg
    of_receivers = 3 * cfg.n_layers * cfg.n_heads * cfg.d_head
    return row_bytes(model, pair, of_receivers)


def edges_row_bytes(model: HookedModel, graph: Graph, pair: Pair) -> int:
    """What a row of a pass with replaced edges takes: the steps of all writers, and the inputs of a
    layer's heads.
    """
    cfg = model.cfg
    steps = len(graph.writers)
    inputs = 4 * cfg.n_heads
    return row_bytes(model, pair, cfg.d_model * (steps + inputs))


def gradients_row_bytes(model: HookedModel, graph: Graph, pair: Pair) -> int:
    """What a row of a pass takes that keeps all layers for the gradients of what readers read."""
    cfg = model.cfg
    attention = cfg.n_heads * (6 * cfg.d_head + 4 * len(pair.base))
    of_layer = 4 * cfg.d_model + _of_mlp(model) + attention
    of_readers = 2 * cfg.d_model * len(graph.readers)
    return row_bytes(model, pair, of_readers + cfg.n_layers * of_layer)


def edges_fixed_bytes(model: HookedModel, graph: Graph, pair: Pair) -> int:
    """What a pair's edges take whatever the rows: outputs of two runs and exchanged ones, two steps
    while one is scaled to the other, sums of gradients."""
    of_writer = 3 * _BYTES + 4 * _OF_SUMS
    of_token = len(graph.writers) * of_writer + len(graph.readers) * _OF_SUMS
    return int(pair.length * model.cfg.d_model * of_token)


def check_edges_fit(model: HookedModel, graph: Graph, pairs: list[Pair], budget: int) -> None:
    """Refuse a graph if one row of the longest pair's passes does not fit."""
    longest = max(pairs, key=lambda pair: pair.length)

    row_with_gradients = gradients_row_bytes(model, graph, longest)
    row_with_replaced_edges = edges_row_bytes(model, graph, longest)
    row = max(row_with_gradients, row_with_replaced_edges)

    needed = edges_fixed_bytes(model, graph, longest) + row
    if needed > budget:
        raise OptionError(
            f"the {int(graph.exists.sum()):,} edges of {model.cfg.model_name} need about "
            f"{needed / 2**30:.2g} GiB for a prompt of {longest.length:,} tokens, more than"
            " memory=…: give more, or shorter prompts"
        )
