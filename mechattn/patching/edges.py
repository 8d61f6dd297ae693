"""Edges of a model, attributed: what each writer passes to each reader of the effect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
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
    Unpatched,
    request_of,
)
from mechattn.patching.pass_memory import (
    check_edges_fit,
    edges_fixed_bytes,
    edges_row_bytes,
    gradients_row_bytes,
    rows_within,
)
from mechattn.patching.patched_runs import positions_of
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt
from mechattn.results.result import MEMORY

_MOST_TOKENS = 2**12  # in a batch: more are no faster
# What writers change must add up to two runs' difference, but for this fraction of it: in float32,
# and in half precision, whose sums over many writers are rounded.
_MISSING = (1e-3, 5e-2)


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
    """Attribute every edge: how the answer changes when one reader receives one writer's output of
    the other run.

    ``score(u → v) = Σ (z_u of the other run − z_u) · ∂metric/∂(input of v)``, summed over tokens
    that both versions have. Writers u are the embedding, heads and MLPs; readers v are the queries,
    keys and values of heads, MLPs and the logits. Where a norm follows attention (Gemma 2 and 3), a
    head writes its share of what comes after the norm, in each run with that run's scale.

    With one step the gradient is that of the patched run (EAP). With more it is averaged over
    points between the two runs' embeddings, the middles of ``steps`` equal parts (EAP-IG); the
    edges from the embedding then add up to about the metric's difference between the embeddings,
    exactly in the limit of many steps. Eight edges are also patched exactly, on four prompts.

    Args:
        model: A hooked model, or anything that ``load_model`` accepts; TransformerLens must show
            single heads' inputs.
        prompts: Prompts with an answer that the model reads.
        condition: The other version: ``Counterpart()``, or inserted tokens.
        steps: The number of points along which gradients are averaged.
        metric: As for ``patch``.
        direction: "noising", the field's usual one, patches the clean run; "denoising" the other
            one.
        memory: The memory that a prompt's passes may take; as many rows go together as fit, and a
            graph of which one row needs more is refused before the first pass.
        seed: The seed of random directions and of the edges to check.

    Returns:
        Effects by writer and reader, with a random step of equal norm as control;
        ``.table(top=20)``.

    Raises:
        MechattnError: The model's heads have no inputs of their own, or what heads write does not
            add up in the residual stream; or as for ``patch``.

    Source:
        EAP: arXiv:2310.10348; EAP-IG: arXiv:2403.17806, with right ends of the parts where this has
            middles.
    """
    check_counts(steps=steps)
    request = request_of(model, prompts, condition, metric, direction, memory, seed)
    return attributed_edges(request, graph_of(request.model), steps)


def attributed_edges(request: PatchingRequest, graph: Graph, steps: int) -> Patching:
    """What :func:`edges` returns.

    Args:
        request: What is asked.
        graph: The graph of its model.
        steps: The number of points along which gradients are averaged.

    Raises:
        MechattnError: As for :func:`edges`.
    """
    model = request.model
    request.check_gradients()
    check_edges_fit(model, graph, request.pairs, request.memory)

    method = f"attributed ({steps} steps)"
    if steps == 1:
        method = "attributed (first order)"
    about = {
        "steps": steps,
        "method": method,
        "readers_of_first_values": graph.nodes_after["L0H0.v"],
    }
    axes = {"writer": list(graph.writers), "reader": list(graph.readers)}

    read_pair = partial(edge_runs, model, graph, request.memory)

    def effects_of(pairs: Sequence[Pair]) -> dict[str, PromptEffects]:
        return {pair.id: read_pair(pair).attributed(steps) for pair in pairs}

    with showing_edges(model):
        patching = request.run_patching(request.one_by_one, effects_of, axes, **about)
        sample = checked_sample(patching, request.seed)
        sampled_edges = [graph.edges[index] for index in sample]
        exact = [read_pair(pair).exact(sampled_edges) for pair in request.pairs[:CHECKED_PROMPTS]]
    return patching.with_exact(exact, sample)


def edge_runs(model: HookedModel, graph: Graph, memory: int, pair: Pair) -> EdgeRuns:
    """Read both runs of a pair, while the model shows its edges.

    Args:
        model: The hooked model.
        graph: Its graph.
        memory: The bytes that later passes may take.
        pair: The pair.

    Raises:
        ModelError: What is written does not add up to the residual stream.
    """
    device = device_of(model)
    base = read_edges(model, graph, pair.base)
    source = read_edges(model, graph, pair.source)
    base_positions = positions_of(pair.base, pair.origins).to(device)
    source_positions = positions_of(pair.source, pair.origins).to(device)

    # Tokens that only the base run has keep what they write.
    exchanged = base.written.clone()
    exchanged[:, base_positions] = source.written[:, source_positions]

    # The residual stream is a sum: what writers change must be all of its change.
    change = source.stream[source_positions] - base.stream[base_positions]
    explained = (exchanged - base.written)[:, base_positions].sum(0)
    missing = float((change - explained).norm() / change.norm().clamp(min=1e-9))
    if missing > rounding_of(model, *_MISSING):
        raise ModelError(
            f"what heads and MLPs of {model.cfg.model_name} write does not add up to the residual"
            f" stream ({missing:.2g} of its change is missing), so edges have no meaning: patch"
            " nodes with ma.patch, or paths between heads with ma.paths"
        )
    unpatched = Unpatched(pair, base.logits, source.logits)
    return EdgeRuns(model, graph, memory, unpatched, base.written, exchanged)


@dataclass(frozen=True, eq=False)
class EdgeRuns:
    """A pair's unpatched runs, and what can be measured of its edges while the model shows them.

    Args:
        model: The hooked model.
        graph: Its graph.
        memory: The bytes that passes may take.
        unpatched: The logits of both runs.
        written: What the base run writes.
        exchanged: What it would write with the source run's outputs at the tokens that both have.
    """

    model: HookedModel
    graph: Graph
    memory: int
    unpatched: Unpatched
    written: Written
    exchanged: Written

    @property
    def pair(self) -> Pair:
        """The pair of these runs."""
        return self.unpatched.pair

    def attributed(self, steps: int) -> PromptEffects:
        """The score of each edge, that of a random step, and the whole effect.

        Args:
            steps: The number of points along which gradients are averaged.

        Returns:
            "effect" and "random" [writer reader], NaN where there is no edge, and "whole".
        """
        gradients = self._gradients(steps)

        def scores(step: Written) -> np.ndarray:
            by_edge = step.flatten(1) @ gradients.flatten(1).T
            return np.where(self.graph.exists, by_edge.cpu().numpy(), np.nan)

        step = (self.exchanged - self.written).double()
        generator = torch.Generator().manual_seed(self.pair.seed)
        return {
            "effect": scores(step),
            "random": scores(random_step(generator, step)),
            "whole": self.unpatched.whole,
        }

    def _gradients(self, steps: int) -> Float[Tensor, "reader pos d_model"]:
        """The gradient of the metric with respect to what each reader reads, averaged over the
        steps.
        """
        # All readers read the same stream: a zero that is added to what one of them reads has the
        # gradient of this reader alone.
        zeros: dict[Component, Tensor] = {}

        def read_with_zeros(component: Component, x: Tensor) -> Tensor:
            zeros[component] = torch.zeros_like(x, requires_grad=True)
            return x + zeros[component]

        # The middles of equal parts of the way; with one step, where the patched run is.
        points = (torch.arange(steps) + 0.5) / steps
        if steps == 1:
            points = torch.zeros(1)

        shape = (len(self.graph.readers), *self.written.shape[1:])
        total = self.written.new_zeros(shape, dtype=torch.float64)
        embedding_step = self.exchanged[0] - self.written[0]

        row_bytes = gradients_row_bytes(self.model, self.graph, self.pair)
        for batch in points.split(self._rows(row_bytes)):
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
            value = self.unpatched.measure(logits).sum()
            gradients = torch.autograd.grad(value, list(zeros.values()))
            for component, gradient in zip(zeros, gradients, strict=True):
                by_reader = gradient.sum(0, dtype=torch.float64).transpose(0, 1) / steps
                total[self.graph.components[component]] += by_reader.to(total)
            zeros.clear()
        return total

    def _rows(self, row_bytes: int) -> int:
        """How many rows go together."""
        fixed = edges_fixed_bytes(self.model, self.graph, self.pair)
        most = max(1, _MOST_TOKENS // len(self.pair.base))
        return min(most, rows_within(self.memory - fixed, row_bytes))

    def exact(self, patched_edges: Sequence[Sequence[int]]) -> Float[np.ndarray, " edge"]:
        """The effect of single edges, each patched exactly.

        Args:
            patched_edges: Pairs of a writer's and a reader's number.
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
        """The effect of keeping only some edges, with all others replaced.

        Args:
            kept_edges: The edges that each row keeps.
            replacement: What the other edges carry.
        """
        effects = []
        row_bytes = edges_row_bytes(self.model, self.graph, self.pair)
        for batch in kept_edges.split(self._rows(row_bytes)):
            replaced = ReplacedEdges(batch, self.graph, replacement)
            logits = run_edges(
                self.model,
                self.graph,
                self.pair.base,
                len(batch),
                change_read=replaced.change_read,
                see_written=replaced.see_written,
            )
            effects.append(self.unpatched.effects(logits))
        return np.concatenate(effects)
