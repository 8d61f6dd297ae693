"""Attribution of edges: how much of the effect each writer passes to each reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechattn.errors import ModelError, check_counts
from mechattn.model.hooked import HookedModel, alone, device_of, rounding_of
from mechattn.patching.answer_metrics import Metric
from mechattn.patching.controls import random_step
from mechattn.patching.effects import CHECKED_PROMPTS, Patching, checked_sample
from mechattn.patching.graph import (
    Component,
    Graph,
    ReplacedEdges,
    Written,
    graph_of,
    read_edges,
    run_edges,
    showing_edges,
)
from mechattn.patching.pairs import (
    Direction,
    Pair,
    PatchingRequest,
    PromptEffects,
    UnpatchedLogits,
    request_of,
)
from mechattn.patching.patched_runs import positions_of
from mechattn.patching.plan import (
    check_edges_fit,
    edges_fixed_bytes,
    edges_row_bytes,
    gradients_row_bytes,
    rows_within,
)
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt
from mechattn.results.result import MEMORY

_MOST_TOKENS = 2**12  # in a batch; more are not faster
# The changes of all writers must add up to the difference of two runs' residual streams. At most
# this fraction of it may be missing: in float32, and in half precision, where a sum over many
# writers is rounded.
_MISSING_FRACTIONS = (1e-3, 5e-2)


@alone
def edges(
    model: Any,
    prompts: Prompt | str | Sequence[Prompt | str],
    condition: Condition,
    *,
    steps: int = 1,
    metric: Metric | None = None,
    direction: Direction = "noising",
    memory: str = MEMORY,
    seed: int = 0,
) -> Patching:
    """Attribute every edge: estimate how the answer changes when one reader receives one writer's
    output from the other run.

    ``score(u → v) = Σ (output of u in the other run − output of u) · ∂metric/∂(input of v)``

    The sum is over the tokens that both versions have. Writers u are the embedding, heads and MLPs.
    Readers v are the queries, keys and values of heads, the MLPs and the logits. Where a norm
    follows attention (Gemma 2 and 3), a head writes its share of the norm's output; the norm's
    scale is that of each run.

    With one step, the gradient is taken in the run that is patched (EAP). With more steps, it is
    averaged over points between that run's embeddings and the same embeddings with those of the
    other run at the tokens that both have (EAP-IG). The points are the middles of ``steps`` equal
    parts. The edges from the embedding then add up to about the difference of the metric between
    the two ends, and exactly to it in the limit of many steps. On the first four prompts, eight
    edges are also patched exactly.

    Args:
        model: A hooked model, or anything that ``load_model`` accepts. TransformerLens must have
            hooks for the inputs of single heads.
        prompts: Prompts with an answer that the model reads.
        condition: The other version: ``Counterpart()``, or inserted tokens.
        steps: The number of points over which gradients are averaged.
        metric: As for ``patch``.
        direction: "noising" patches the clean run, as is usual in the field. "denoising" patches
            the run under the condition.
        memory: The memory that a prompt's passes may take. As many rows share a pass as fit. A
            graph is refused before the first pass if a single row does not fit.
        seed: The seed of random directions, of the condition's draws and of the edges to check.

    Returns:
        Scores by writer and reader, with a random step of equal norm as control. ``.table(top=20)``
        shows the largest.

    Raises:
        MechattnError: The model has no hooks for the inputs of single heads, or what its writers
            write does not add up to the residual stream; or as for ``patch``.

    Source:
        EAP: arXiv:2310.10348. EAP-IG: arXiv:2403.17806, which takes the right ends of the parts
        instead of their middles.
    """
    check_counts(steps=steps)
    request = request_of(model, prompts, condition, metric, direction, memory, seed)
    return attributed_edges(request, graph_of(request.model), steps)


def attributed_edges(request: PatchingRequest, graph: Graph, steps: int) -> Patching:
    """The scores that :func:`edges` returns.

    Args:
        request: The prompts, the model and how they are patched.
        graph: The graph of the model.
        steps: The number of points over which gradients are averaged.

    Raises:
        MechattnError: As for :func:`edges`.
    """
    model = request.model
    request.check_gradients()
    check_edges_fit(model, graph, request.pairs, request.memory)

    read_pair = partial(edge_runs, model, graph, request.memory)
    with showing_edges(model):
        batches = ({pair.id: read_pair(pair).attributed(steps)} for pair in request.pairs)
        patching = request.run_patching(
            batches,
            {"writer": list(graph.writers), "reader": list(graph.readers)},
            method="attribution",
            steps=steps,
            readers_of_first_values=graph.nodes_after["L0H0.v"],
        )
        sample = checked_sample(patching, request.seed)
        sampled_edges = graph.edges[sample]
        exact_effects = [
            read_pair(pair).exact(sampled_edges) for pair in request.pairs[:CHECKED_PROMPTS]
        ]
    return patching.with_exact(exact_effects, sample)


def edge_runs(model: HookedModel, graph: Graph, memory: int, pair: Pair) -> EdgeRuns:
    """Read both runs of a pair, inside a ``showing_edges`` block.

    Args:
        model: The hooked model.
        graph: The graph of the model.
        memory: The bytes that later passes may take.
        pair: The pair.

    Raises:
        ModelError: The changes of all writers do not add up to that of the residual stream.
    """
    device = device_of(model)
    base = read_edges(model, graph, pair.base)
    source = read_edges(model, graph, pair.source)
    base_positions = positions_of(pair.base, pair.origins).to(device)
    source_positions = positions_of(pair.source, pair.origins).to(device)

    # Tokens that only the base run has keep what they write.
    exchanged = base.written.clone()
    exchanged[:, base_positions] = source.written[:, source_positions]

    # The residual stream is a sum, so the changes of all writers must add up to its change.
    stream_change = source.stream[source_positions] - base.stream[base_positions]
    written_change = (exchanged - base.written)[:, base_positions].sum(0)
    missing_change = (stream_change - written_change).norm()
    missing_fraction = float(missing_change / stream_change.norm().clamp(min=1e-9))
    if missing_fraction > rounding_of(model, *_MISSING_FRACTIONS):
        raise ModelError(
            f"what heads and MLPs of {model.cfg.model_name} write does not add up to the residual"
            f" stream ({missing_fraction:.2g} of its change is missing), so edges have no meaning:"
            " patch nodes with ma.patch, or paths between heads with ma.paths"
        )
    unpatched_logits = UnpatchedLogits(pair, base.logits, source.logits)
    return EdgeRuns(model, graph, memory, unpatched_logits, base.written, exchanged)


@dataclass(frozen=True, eq=False)
class EdgeRuns:
    """A pair's unpatched runs, from which the effects of edges are measured.

    Its methods must be called inside a ``showing_edges`` block.

    Args:
        model: The hooked model.
        graph: The graph of the model.
        memory: The bytes that passes may take.
        unpatched_logits: The logits of both runs.
        written: The output of each writer in the base run.
        exchanged: The same, with the outputs of the source run at the tokens that both runs have.
    """

    model: HookedModel
    graph: Graph
    memory: int
    unpatched_logits: UnpatchedLogits
    written: Written
    exchanged: Written

    @property
    def pair(self) -> Pair:
        """The pair of these runs."""
        return self.unpatched_logits.pair

    def attributed(self, steps: int) -> PromptEffects:
        """The score of each edge, the score of a random step, and the whole effect.

        Args:
            steps: The number of points over which gradients are averaged.

        Returns:
            "effect" and "random" [writer reader], which are NaN where no edge exists, and "whole".
        """
        gradients = self._gradients(steps)

        def scores(step: Written) -> np.ndarray:
            by_edge = step.flatten(1) @ gradients.flatten(1).T
            return np.where(self.graph.exists, by_edge.cpu().numpy(), np.nan)

        exchange = (self.exchanged - self.written).double()
        generator = torch.Generator().manual_seed(self.pair.seed)
        return {
            "effect": scores(exchange),
            "random": scores(random_step(generator, exchange)),
            "whole": self.unpatched_logits.whole,
        }

    def exact(self, patched_edges: Int[np.ndarray, "edge 2"]) -> Float[np.ndarray, " edge"]:
        """The effect of each edge, patched alone and exactly.

        Args:
            patched_edges: For each edge, the index of its writer and the index of its reader.
        """
        kept_edges = torch.ones(len(patched_edges), *self.graph.exists.shape, dtype=torch.bool)
        for row, (writer, reader) in enumerate(patched_edges):
            kept_edges[row, writer, reader] = False
        return self.with_edges(kept_edges, self.exchanged)

    def with_edges(
        self,
        kept_edges: Bool[Tensor, "row writer reader"],
        replacement: Written,
    ) -> Float[np.ndarray, " row"]:
        """The effect of replacing what all edges carry, except some that are kept.

        Args:
            kept_edges: The edges that each row keeps.
            replacement: What each writer passes along the other edges.
        """
        effects = []
        bytes_per_row = edges_row_bytes(self.model, self.graph, self.pair)
        for batch in kept_edges.split(self._most_rows(bytes_per_row)):
            replaced = ReplacedEdges(batch, self.graph, replacement)
            logits = run_edges(
                self.model,
                self.graph,
                self.pair.base,
                len(batch),
                change_read=replaced.change_read,
                see_written=replaced.see_written,
            )
            effects.append(self.unpatched_logits.effects(logits))
        return np.concatenate(effects)

    def _gradients(self, steps: int) -> Float[Tensor, "reader pos d_model"]:
        """The gradient of the metric with respect to each reader's input, averaged over points."""
        # All readers of a layer read the same stream. A zero that is added to the input of one
        # reader has the gradient of this reader alone.
        zeros: dict[Component, Tensor] = {}

        def read_with_zeros(component: Component, x: Tensor) -> Tensor:
            zeros[component] = torch.zeros_like(x, requires_grad=True)
            return x + zeros[component]

        # 0 is the base run and 1 the exchanged embeddings. Points are the middles of equal parts;
        # with one step, the point is the base run.
        points = (torch.arange(steps) + 0.5) / steps
        if steps == 1:
            points = torch.zeros(1)

        shape = (len(self.graph.readers), *self.written.shape[1:])
        mean_gradients = self.written.new_zeros(shape, dtype=torch.float64)
        embedding_step = self.exchanged[0] - self.written[0]

        bytes_per_row = gradients_row_bytes(self.model, self.graph, self.pair)
        for batch in points.split(self._most_rows(bytes_per_row)):
            embedding_steps = batch.to(self.written)[:, None, None] * embedding_step
            logits = run_edges(
                self.model,
                self.graph,
                self.pair.base,
                len(batch),
                change_read=read_with_zeros,
                change_embedding=partial(torch.add, other=embedding_steps),
                gradients=True,
            )
            metric_sum = self.unpatched_logits.measure(logits).sum()
            gradients = torch.autograd.grad(metric_sum, list(zeros.values()))
            for component, gradient in zip(zeros, gradients, strict=True):
                by_reader = gradient.sum(0, dtype=torch.float64).transpose(0, 1) / steps
                readers = self.graph.components[component]
                mean_gradients[readers] += by_reader.to(mean_gradients)
            zeros.clear()
        return mean_gradients

    def _most_rows(self, bytes_per_row: int) -> int:
        """The number of rows that may share a pass."""
        fixed_bytes = edges_fixed_bytes(self.model, self.graph, self.pair)
        fast_rows = max(1, _MOST_TOKENS // len(self.pair.base))
        return min(fast_rows, rows_within(self.memory - fixed_bytes, bytes_per_row))
