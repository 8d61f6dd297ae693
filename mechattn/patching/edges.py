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
from tqdm.auto import tqdm

from mechattn.errors import ModelError, OptionError
from mechattn.model.hooked import HookedModel, alone
from mechattn.model.load import load_model
from mechattn.model.several_devices import device_of
from mechattn.patching.answer_metrics import Metric
from mechattn.patching.effects import Patching, checked_sample, effects_dataset
from mechattn.patching.graph import Graph, graph_of, replaced, run_edges, showing_edges
from mechattn.patching.pairs import Pair, about_of, pairs_of, units_of
from mechattn.patching.patched_runs import places_of
from mechattn.patching.refusals import Direction, check_gradients
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt, as_prompts
from mechattn.results.result import MEMORY, memory_bytes

_CHECKED = 4  # prompts on which attribution is compared with patching
# What writers change must add up to two runs' difference, but for this fraction of it.
_CLOSE = 1e-3
_CLOSE_IN_HALF_PRECISION = 5e-2


@alone
def edges(
    model: Any,
    prompts: Prompt | str | Sequence[Prompt | str],
    condition: Condition,
    *,
    steps: int = 1,
    metric: Metric = "answers",
    direction: Direction = "noising",
    memory: str = MEMORY,
    seed: int = 0,
) -> Patching:
    """Attribute every edge: how the answer changes when one reader receives one writer's output of
    the other run.

    ``score(u → v) = Σ (z_u of the other run − z_u) · ∂metric/∂(input of v)``, summed over tokens
    that both versions have. Writers u are the embedding, heads and MLPs; readers v are the queries,
    keys and values of heads, MLPs and the logits. With one step the gradient is that of the patched
    run (EAP). With more it is averaged over points between the two runs' embeddings, the middles of
    ``steps`` equal parts (EAP-IG); the edges from the embedding then add up to the metric's
    difference between the embeddings. Eight edges are also patched exactly, on four prompts.

    Args:
        model: A hooked model, or anything that ``load_model`` accepts; TransformerLens must show
            single heads' inputs.
        prompts: Prompts with an answer that the model reads.
        condition: The other version: ``Counterpart()``, or inserted tokens.
        steps: The number of points along which gradients are averaged.
        metric: As for ``patch``.
        direction: "noising", the field's usual one, patches the clean run; "denoising" the other
            one.
        memory: The memory for the gradients of a prompt; a graph that needs more is refused before
            the first pass.
        seed: The seed of random directions and of the edges to check.

    Returns:
        Effects by writer and reader, with a random step of equal norm as control;
        ``.table(top=20)``.

    Raises:
        MechattnError: The model's heads have no inputs of their own, or what heads write does not
            add up in the residual stream (norms after attention); or as for ``patch``.

    Source:
        EAP: arXiv:2310.10348; EAP-IG: arXiv:2403.17806, with right ends of the parts where this has
            middles.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise OptionError(f"steps={steps!r}: give a whole number, 1 for EAP, more for EAP-IG")
    model = load_model(model)
    graph = graph_of(model)
    check_gradients(model, metric, direction)
    prompts = as_prompts(prompts)
    pairs, _ = pairs_of(model, prompts, condition, metric, direction, seed)
    _check_memory(model, graph, pairs, memory)
    with showing_edges(model):
        edge_pairs = [EdgePair(model, graph, pair) for pair in pairs]
        effects = []
        for index, edge_pair in enumerate(tqdm(edge_pairs, desc="edges", delay=2)):
            effects.append(edge_pair.attributed(steps, seed + index))
        axes = {"writer": list(graph.writers), "reader": list(graph.readers)}
        about = about_of(model, prompts, condition, metric, direction, seed)
        about["method"] = "attributed (first order)"
        if steps > 1:
            about["method"] = f"attributed ({steps} steps)"
        about["steps"] = steps
        dataset = effects_dataset(effects, prompts, axes)
        patching = Patching(dataset, units_of(prompts), about)

        sample = checked_sample(patching, seed)
        sampled_edges = [graph.edges[index] for index in sample]
        exact = [edge_pair.exact(sampled_edges) for edge_pair in edge_pairs[:_CHECKED]]
    return patching.compared(exact, sample)


def _check_memory(model: HookedModel, graph: Graph, pairs: Sequence[Pair], memory: str) -> None:
    """Refuse a graph whose gradients don't fit."""
    longest = max(max(len(pair.receiver), len(pair.donor)) for pair in pairs)
    # Of writers two runs and a step; of readers the inputs, their gradients and the sums.
    tensors = 3 * len(graph.writers) + 3 * len(graph.readers)
    needed = 8 * longest * tensors * int(model.cfg.d_model)
    if needed > memory_bytes(memory):
        raise OptionError(
            f"the {len(graph.edges):,} edges of {model.cfg.model_name} need about "
            f"{needed / 2**30:.2g} GiB for a prompt of {longest:,} tokens, and "
            f'memory="{memory}": give more, or shorter prompts'
        )


@dataclass(frozen=True)
class EdgePair:
    """What can be measured of a pair's edges, while the model shows them."""

    model: HookedModel
    graph: Graph
    pair: Pair

    def runs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The logits of both runs; what the receiver writes, and what it would write with the
        donor's outputs.
        """
        device = device_of(self.model)
        streams: list[Tensor] = []  # what the logits read, in each run

        def record(place: tuple[str, int], x: Tensor, written: Any) -> Tensor:
            if place[0] == "logits":
                streams.append(x[0, :, 0].detach())
            return x

        with torch.no_grad():
            own, own_written = run_edges(self.model, self.graph, self.pair.receiver, 1, record)
            other, other_written = run_edges(self.model, self.graph, self.pair.donor, 1, record)
        own_stream, other_stream = streams
        own_places = places_of(self.pair.receiver, self.pair.origins).to(device)
        other_places = places_of(self.pair.donor, self.pair.origins).to(device)
        mine = own_written[0]
        put = mine.clone()
        put[own_places] = other_written[0, other_places]

        change = other_stream[other_places] - own_stream[own_places]
        explained = (put - mine)[own_places].sum(1)
        missing = float((change - explained).norm() / change.norm().clamp(min=1e-9))
        allowed = _CLOSE
        if change.dtype not in (torch.float32, torch.float64):
            allowed = _CLOSE_IN_HALF_PRECISION
        if missing > allowed:
            raise ModelError(
                f"what heads and MLPs of {self.model.cfg.model_name} write does not add up to the "
                f"residual stream ({missing:.2g} of its change is missing), as with norms after "
                "attention, so edges have no meaning: patch nodes with ma.patch, or paths between "
                "heads with ma.paths"
            )
        return own, other, mine, put

    def attributed(self, steps: int, seed: int) -> dict[str, np.ndarray]:
        """The score of each edge, that of a random step, and the whole effect."""
        own, other, mine, put = self.runs()
        base = other if self.pair.denoising else own
        gradients = self._gradients(steps, mine, put, base)

        def scores(step: Tensor) -> np.ndarray:
            by_edge = torch.einsum("pwd,prd->wr", step, gradients).cpu().numpy()
            return np.where(self.graph.exists, by_edge, np.nan)

        step = (put - mine).double()
        generator = torch.Generator().manual_seed(seed)
        direction = torch.randn(step.shape, generator=generator, dtype=torch.float64).to(step)
        length = step.norm(dim=-1, keepdim=True)
        random_step = direction * length / direction.norm(dim=-1, keepdim=True)
        whole = float(self.pair.measure(other, base) - self.pair.measure(own, base))
        return {
            "effect": scores(step),
            "random": scores(random_step),
            "whole": np.array(whole),
        }

    def _gradients(
        self, steps: int, mine: Tensor, put: Tensor, base: Tensor
    ) -> Float[Tensor, "pos reader d_model"]:
        """The gradient of the metric with respect to what each reader reads, averaged over the
        steps.
        """
        zeros: dict[tuple[str, int], Tensor] = {}  # added to each input, to get its gradient

        def read_with_zeros(place: tuple[str, int], x: Tensor, written: Any) -> Tensor:
            zeros[place] = torch.zeros_like(x, requires_grad=True)
            return x + zeros[place]

        points = torch.zeros(1)
        if steps > 1:
            points = (torch.arange(steps) + 0.5) / steps
        total = torch.zeros(
            len(mine),
            len(self.graph.readers),
            mine.shape[-1],
            dtype=torch.float64,
            device=mine.device,
        )
        embedding_step = (put - mine)[:, 0]
        for batch in points.split(max(1, 2**11 // len(mine))):
            steps_of_rows = batch.to(mine)[:, None, None] * embedding_step
            logits, _ = run_edges(
                self.model,
                self.graph,
                self.pair.receiver,
                len(batch),
                read_with_zeros,
                partial(torch.add, other=steps_of_rows),
                True,
            )
            value = self.pair.measure(logits, base).sum()
            gradients = torch.autograd.grad(value, list(zeros.values()))
            for place, gradient in zip(zeros, gradients, strict=True):
                total[:, self.graph.places[place]] += gradient.double().sum(0) / steps
        return total

    def exact(self, patched_edges: Sequence[tuple[int, int]]) -> np.ndarray:
        """The effect of single edges, each patched exactly."""
        kept = torch.ones(len(patched_edges), *self.graph.exists.shape, dtype=torch.bool)
        for row, (writer, reader) in enumerate(patched_edges):
            kept[row, writer, reader] = False
        own, other, _, put = self.runs()
        base = other if self.pair.denoising else own
        return self.with_edges(kept, put, base) - float(self.pair.measure(own, base))

    def with_edges(
        self, kept: Bool[Tensor, "row writer reader"], put: Tensor, base: Tensor
    ) -> np.ndarray:
        """The metric with only some edges as they are; all others carry what ``put`` has."""
        metrics = []
        for batch in kept.split(max(1, 2**12 // len(put))):
            reading = replaced(batch.to(put.device), self.graph, put)
            logits, _ = run_edges(self.model, self.graph, self.pair.receiver, len(batch), reading)
            metrics.append(self.pair.measure(logits, base).double().cpu())
        return torch.cat(metrics).numpy()
