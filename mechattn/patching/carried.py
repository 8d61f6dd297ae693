"""What a circuit carries by itself: the effect of runs in which all other edges carry the output of
another run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from mechattn.model.hooked import holding
from mechattn.patching.edges import EdgePair, EdgeRuns
from mechattn.patching.graph import EdgeSet, Graph, Written, read_edges, showing_edges
from mechattn.patching.pairs import PatchingRequest

Ablation = Literal["counterpart", "mean", "resample"]
# Effects of circuits, by the order that ranks edges and by the number of edges that are kept.
CircuitEffects = Float[np.ndarray, "unit order size"]


@dataclass(frozen=True)
class Carried:
    """Measures what the first edges of an order carry by themselves, on the half that reports.

    Args:
        ranking: The half whose runs give the replacement of ablated edges.
        reporting: The half on which circuits are run.
        graph: The graph of the model.
        sizes: Numbers of edges, from none to all.
        ablation: What the other edges carry, as for ``circuit``.
        generator: Draws the prompts of "resample".
    """

    ranking: PatchingRequest
    reporting: PatchingRequest
    graph: Graph
    sizes: Sequence[int]
    ablation: Ablation
    generator: np.random.Generator

    def effects(self, orders: Sequence[np.ndarray]) -> CircuitEffects:
        """The metric with the first edges of each order alone, less that of the whole model.

        Args:
            orders: Numbers of the graph's edges, the first to keep first.

        Returns:
            In the units of the metric, means over each unit's prompts.
        """
        circuits = []
        for order in orders:
            for size in self.sizes:
                circuits.append(first_edges(self.graph, order, size))
        kept_edges = torch.from_numpy(np.stack(circuits))

        model = self.reporting.model
        effects = []
        with holding(model), showing_edges(model):
            replacement_of = self._replacement()
            for edge_pair in tqdm(self._edge_pairs(self.reporting), desc="circuits", delay=2):
                runs = edge_pair.runs()
                replacement = replacement_of(runs)
                circuit_effects = edge_pair.with_edges(kept_edges, replacement, runs.unpatched)
                effects.append(circuit_effects)

        prompt_count = len(effects)
        by_order = np.reshape(effects, (prompt_count, len(orders), len(self.sizes)))
        return self.reporting.units.means(by_order)

    def _edge_pairs(self, request: PatchingRequest) -> list[EdgePair]:
        """The pairs of a half, with the graph whose edges are measured."""
        return [EdgePair(request.model, self.graph, pair, request.memory) for pair in request.pairs]

    def _replacement(self) -> Callable[[EdgeRuns], Tensor]:
        """What edges outside a circuit carry in a pair's run."""
        if self.ablation == "counterpart":
            return lambda runs: runs.exchanged

        ranking_pairs = self._edge_pairs(self.ranking)
        if self.ablation == "mean":
            mean = _mean_written(ranking_pairs)
            return lambda runs: mean.expand_as(runs.written)

        draws = deepcopy(self.generator)  # the same prompts for every ranking

        def resampled(runs: EdgeRuns) -> Tensor:
            drawn = int(draws.integers(len(ranking_pairs)))
            return _from_the_end(runs.written, ranking_pairs[drawn])

        return resampled


def _mean_written(pairs: Sequence[EdgePair]) -> Written:
    """The mean of what each writer writes in clean runs: by position if all are as long, else over
    all tokens.
    """
    lengths = [len(pair.pair.base) for pair in pairs]
    same_length = len(set(lengths)) == 1
    count = len(pairs) if same_length else sum(lengths)

    total: Any = 0.0
    for pair in pairs:
        written = read_edges(pair.model, pair.graph, pair.pair.base).written
        if not same_length:
            written = written.sum(1, keepdim=True)
        total = total + written
    return total / count


def _from_the_end(written: Tensor, drawn: EdgePair) -> Written:
    """What is written in another prompt's clean run, aligned at the last tokens."""
    source = read_edges(drawn.model, drawn.graph, drawn.pair.base).written
    shared = min(source.shape[1], written.shape[1])

    # A longer prompt keeps its own outputs at the tokens before.
    resampled = written.clone()
    resampled[:, -shared:] = source[:, -shared:]
    return resampled


def first_edges(graph: Graph, order: np.ndarray, size: int) -> EdgeSet:
    """The first edges of an order, a number of them."""
    writers, readers = graph.exists.nonzero()
    first = order[:size]
    kept_edges = np.zeros_like(graph.exists)
    kept_edges[writers[first], readers[first]] = True
    return kept_edges
