"""Effects of circuits: how the metric changes if all other edges carry outputs of another run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from tqdm.auto import tqdm

from mechattn.model.hooked import holding
from mechattn.patching.edges import EdgeRuns, edge_runs
from mechattn.patching.graph import EdgeSet, Graph, Written, read_edges, showing_edges
from mechattn.patching.pairs import Pair, PatchingRequest

Ablation = Literal["counterpart", "mean", "resample"]
# Effects of circuits, by the order of the edges and by the number of edges that are kept.
CircuitEffects = Float[np.ndarray, "unit order size"]


def first_edges(graph: Graph, order: np.ndarray, size: int) -> EdgeSet:
    """The set of the first edges of an order.

    Args:
        graph: The graph.
        order: The numbers of its edges.
        size: The number of edges in the set.
    """
    kept_edges = np.zeros_like(graph.exists)
    kept_edges.flat[np.flatnonzero(graph.exists)[order[:size]]] = True
    return kept_edges


@dataclass(frozen=True)
class CircuitMeasurement:
    """Measures what the first edges of an order carry alone, on the reporting half of the prompts.

    Args:
        ranking_request: The request for the ranking half, whose clean runs "mean" and "resample"
            use.
        reporting_request: The request for the reporting half, on which circuits are run.
        graph: The graph of the model.
        sizes: Numbers of edges, from 0 to all.
        ablation: What the other edges carry, as for ``circuit``.
        generator: Draws the prompts for "resample".
    """

    ranking_request: PatchingRequest
    reporting_request: PatchingRequest
    graph: Graph
    sizes: Sequence[int]
    ablation: Ablation
    generator: np.random.Generator

    def effects(self, orders: Sequence[np.ndarray]) -> CircuitEffects:
        """The metric with only the first edges of each order, minus the metric of the whole model.

        Args:
            orders: The numbers of the graph's edges, in the order in which they are kept.

        Returns:
            Means over the prompts of each unit, in the units of the metric.
        """
        circuits = [first_edges(self.graph, order, size) for order in orders for size in self.sizes]
        kept_edges = torch.from_numpy(np.stack(circuits))

        request = self.reporting_request
        effects_by_pair = []
        with holding(request.model), showing_edges(request.model):
            replacement_of = self._replacement()
            for pair in tqdm(request.pairs, desc="circuits", delay=2):
                runs = edge_runs(request.model, self.graph, request.memory, pair)
                effects_by_pair.append(runs.with_edges(kept_edges, replacement_of(runs)))

        shape = (len(request.pairs), len(orders), len(self.sizes))
        effects = np.reshape(effects_by_pair, shape)
        return request.units.means(effects)

    def _replacement(self) -> Callable[[EdgeRuns], Written]:
        """A function that returns what the edges outside a circuit carry, for a pair's runs."""
        if self.ablation == "counterpart":
            return lambda runs: runs.exchanged
        if self.ablation == "mean":
            mean = self._mean_written()
            return lambda runs: mean.expand_as(runs.written)

        generator = deepcopy(self.generator)  # so that every ranking gets the same prompts

        def resampled(runs: EdgeRuns) -> Written:
            pairs = self.ranking_request.pairs
            index = int(generator.integers(len(pairs)))
            source = self._written(pairs[index])
            return _aligned_from_the_end(runs.written, source)

        return resampled

    def _mean_written(self) -> Written:
        """The mean of what each writer writes in the clean runs of the ranking half.

        It is taken by position if all prompts of both halves have the same length, and otherwise
        over all tokens.
        """
        ranking_pairs = self.ranking_request.pairs
        all_pairs = [*ranking_pairs, *self.reporting_request.pairs]
        have_one_length = len({len(pair.base) for pair in all_pairs}) == 1

        written_by_pair = (self._written(pair) for pair in ranking_pairs)  # one at a time
        if have_one_length:
            return reduce(torch.add, written_by_pair) / len(ranking_pairs)

        sums_over_tokens = (written.sum(1, keepdim=True) for written in written_by_pair)
        token_count = sum(len(pair.base) for pair in ranking_pairs)
        return reduce(torch.add, sums_over_tokens) / token_count

    def _written(self, pair: Pair) -> Written:
        """What each writer writes in a pair's clean run."""
        return read_edges(self.ranking_request.model, self.graph, pair.base).written


def _aligned_from_the_end(written: Written, source: Written) -> Written:
    """What is written in another run, aligned with this run at the last token.

    Where this run is longer, its first tokens keep what they write.
    """
    shorter_length = min(source.shape[1], written.shape[1])
    aligned = written.clone()
    aligned[:, -shorter_length:] = source[:, -shorter_length:]
    return aligned
