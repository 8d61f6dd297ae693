"""Patches the cells of a pair: reads its runs, and gives as many patched copies to a pass as memory
lets, from the first layer that they change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Bool
from torch import Tensor

from mechattn.axes import SEGMENTS
from mechattn.model.several_devices import device_of
from mechattn.patching.memory import prompt_bytes, row_bytes, rows_within
from mechattn.patching.pairs import Pair, PatchingRequest, Unpatched
from mechattn.patching.patched_runs import (
    Change,
    RecordedRun,
    Where,
    Z,
    gradients_of,
    patched_logits,
    read,
)
from mechattn.patching.sites import PatchCell, PatchTarget

_MOST_ROWS = 32  # in a pass: more are no faster
_MOST_ROWS_ON_CPU = 4


@dataclass(frozen=True)
class PairRuns:
    """Both runs of a pair, unpatched.

    Args:
        pair: The pair.
        base: The run that is patched.
        source: The run from which activations are taken.
        partner: Another prompt's source run, if it is a control.
    """

    pair: Pair
    base: RecordedRun
    source: RecordedRun
    partner: RecordedRun | None = None

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

    def changes(self, cell: PatchCell, values: Mapping[Where, Z]) -> list[Change]:
        """What a cell puts at which positions of the base run.

        Args:
            cell: The patch.
            values: What replaces each head's output, at the tokens that both runs have.
        """
        tokens = self.patched_tokens(cell)
        places = self.base.places[tokens]

        changes = []
        for where in cell.heads:
            value = values[where][tokens]
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

    def effects(self, pair: Pair) -> dict[str, Any]:
        """The effect of each cell and its controls [cell], NaN where no token has a partner; the
        whole effect, and the metric of the base run.

        Returns:
            "effect" and the controls [cell], "whole" and "before", in the units of the metric.
        """
        model = self.request.model
        target = self.target
        base = read(model, pair.base, pair.origins, target.layers, target.part, self.starts)
        source = read(model, pair.source, pair.origins, target.layers, target.part)
        runs = PairRuns(pair, base, source)

        partner = self.partners.get(pair.id)
        if partner is not None:
            other_source = read(model, partner.source, partner.origins, target.layers, target.part)
            runs = replace(runs, partner=other_source)

        effects: dict[str, Any] = {
            "whole": runs.unpatched.whole,
            "before": runs.unpatched.before,
        }

        # A segment may have no token in this prompt.
        cells = []
        for index, cell in enumerate(self.cells):
            if runs.patched_tokens(cell).any():
                cells.append(index)

        # All cells with the other run's output first, then all with each control's.
        replacements = self.replacements(runs)
        changes = []
        for values in replacements.values():
            for index in cells:
                changes.append(runs.changes(self.cells[index], values))

        measured = self._first_order if target.attributed else self._exact
        values_by_name = measured(runs, changes).reshape(len(replacements), len(cells))

        for name in ("effect", *self.controls):
            effects[name] = np.full(len(self.cells), np.nan)
        for name, of_cells in zip(replacements, values_by_name, strict=True):
            effects[name][cells] = of_cells
        return effects

    def _exact(self, runs: PairRuns, changes: Sequence[list[Change]]) -> np.ndarray:
        """The metric of a copy of the base run with each list of changes, minus that of the run."""
        model = self.request.model
        pair = runs.pair

        memory = self.request.memory - prompt_bytes(model, self.target, pair)
        rows = rows_within(memory, row_bytes(model, pair))
        # On a CPU each row costs its layers, so that few rows which start late are cheaper than many.
        is_on_cpu = device_of(model).type == "cpu"
        rows = min(_MOST_ROWS_ON_CPU if is_on_cpu else _MOST_ROWS, rows)

        # Copies that change neighbouring layers go together, so that their pass can start there.
        first_layers = []
        for changes_of_copy in changes:
            changed_layers = [layer for (layer, _), _, _ in changes_of_copy]
            first_layers.append(min(changed_layers))
        order = np.argsort(first_layers, kind="stable")

        effects = np.empty(len(changes))
        for start in range(0, len(order), rows):
            batch = order[start : start + rows]
            changes_by_row = [changes[index] for index in batch]
            logits = patched_logits(model, runs.base, changes_by_row, self.target.part)
            effects[batch] = runs.unpatched.effects(logits)
        return effects

    def _first_order(self, runs: PairRuns, changes: Sequence[list[Change]]) -> np.ndarray:
        """The first-order effect of changing single heads: ``Σ gradient · (value − z)``."""
        model = self.request.model
        measure = runs.unpatched.measure
        gradients = gradients_of(model, runs.pair.base, self.target.layers, measure)

        effects = []
        for [(where, places, value)] in changes:
            layer, head = where
            z = runs.base.z[layer]
            places = places.to(z.device)
            step = value.double() - z[places, head].double()
            gradient = gradients[layer][places, head].double()
            effect = (gradient * step).sum()
            effects.append(float(effect))
        return np.array(effects)
