"""Patched copies of prompts' base runs: as many of one length in a pass as memory lets, from the
first layer that they change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool
from torch import Tensor
from tqdm.auto import tqdm

from mechattn.model.hooked import HookedModel
from mechattn.patching.memory import pass_bytes, rows_within
from mechattn.patching.pairs import PairRuns
from mechattn.patching.patched_runs import (
    Change,
    Part,
    Where,
    Z,
    equal_ones,
    patched_logits,
    shape_of,
)

_MOST_ROWS = 32  # in a pass: more are no faster


@dataclass(frozen=True)
class PatchedCopy:
    """A copy of a base run, with the outputs of some heads replaced at some of the original
    tokens.
    """

    runs: PairRuns
    heads: tuple[Where, ...]
    patched_tokens: Bool[Tensor, " shared"]
    replacements: Mapping[Where, Z]

    @property
    def first_layer(self) -> int:
        """The first layer that is changed."""
        return min(layer for layer, _ in self.heads)

    @property
    def changes(self) -> list[Change]:
        """What is put at which positions."""
        places = self.runs.base.places[self.patched_tokens]
        return [
            (where, places, self.replacements[where][self.patched_tokens]) for where in self.heads
        ]


def effects_of(
    model: HookedModel, copies: Sequence[PatchedCopy], part: Part, memory: int, progress: tqdm
) -> np.ndarray:
    """The metric of each copy minus that of its base run; ``memory`` in bytes.

    Copies of one shape that start at one layer go together.
    """
    effects = np.empty(len(copies))
    starts = [(shape_of(copy.runs.base.sequence), copy.first_layer) for copy in copies]
    for indices in equal_ones(starts):
        pair = copies[indices[0]].runs.pair
        row_bytes = pass_bytes(model, len(pair.base), len(pair.answer))
        rows = min(_MOST_ROWS, rows_within(memory, row_bytes))
        for start in range(0, len(indices), rows):
            batch = indices[start : start + rows]
            runs = [copies[index].runs.base for index in batch]
            changes = [copies[index].changes for index in batch]
            logits = patched_logits(model, runs, changes, part)
            for row, index in enumerate(batch):
                effects[index] = copies[index].runs.effect(logits[[row]])
            progress.update(len(batch))
    return effects


def first_order(copy: PatchedCopy) -> float:
    """The first-order effect of a copy that changes one head at some of the original tokens."""
    [((layer, head), places, value)] = copy.changes
    z = copy.runs.base.z[layer]
    places = places.to(z.device)
    step = value.double() - z[places, head].double()
    return float((copy.runs.gradients[layer][places, head].double() * step).sum())
