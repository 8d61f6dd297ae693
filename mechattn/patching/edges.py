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

from mechattn.errors import ModelError, check_counts
from mechattn.model.hooked import HookedModel, alone
from mechattn.model.load import load_model
from mechattn.model.several_devices import device_of
from mechattn.patching.answer_metrics import Metric, chosen_metric
from mechattn.patching.effects import Patching, checked_sample, effects_dataset
from mechattn.patching.graph import (
    Graph,
    Place,
    Replacing,
    graph_of,
    read_edges,
    run_edges,
    showing_edges,
)
from mechattn.patching.memory import (
    check_edges_fit,
    edges_fixed_bytes,
    edges_row_bytes,
    gradients_row_bytes,
    rows_within,
)
from mechattn.patching.pairs import Pair, about_of, pairs_of, units_of
from mechattn.patching.patched_runs import places_of
from mechattn.patching.refusals import Direction, check_gradients
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt, as_prompts
from mechattn.results.result import MEMORY

_TOKENS = 2**12  # in a batch, at most: more are no faster
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
    metric: Metric | None = None,
    direction: Direction = "noising",
    memory: str = MEMORY,
    seed: int = 0,
) -> Patching:
    """Attribute every edge: how the answer changes when one reader receives one writer's output of
    the other run.

    ``score(u → v) = Σ (z_u of the other run − z_u) · ∂metric/∂(input of v)``, summed over tokens
    that both versions have. Writers u are the embedding, heads and MLPs; readers v are the queries,
    keys and values of heads, MLPs and the logits. Where a norm follows attention (Gemma 2 and 3),
    a head writes its share of what comes after the norm, in each run with that run's scale.

    With one step the gradient is that of the patched run (EAP). With more it is averaged over
    points between the two runs' embeddings, the middles of ``steps`` equal parts (EAP-IG); the
    edges from the embedding then add up to the metric's difference between the embeddings. Eight
    edges are also patched exactly, on four prompts.

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
    model = load_model(model)
    graph = graph_of(model)
    prompts = as_prompts(prompts)
    metric = chosen_metric(metric, prompts)
    check_gradients(model, metric, direction)
    pairs, _ = pairs_of(model, prompts, condition, metric, direction, seed)
    budget = check_edges_fit(model, graph, pairs, memory)
    with showing_edges(model):
        edge_pairs = [EdgePair(model, graph, pair, budget) for pair in pairs]
        effects = [
            edge_pair.attributed(steps, seed + index)
            for index, edge_pair in enumerate(tqdm(edge_pairs, desc="edges", delay=2))
        ]
        axes = {"writer": list(graph.writers), "reader": list(graph.readers)}
        about = about_of(model, prompts, condition, metric, direction, seed)
        sharing = graph.read_by("L0H0.v")
        if len(sharing) > 1:
            about["sharing"] = (
                "k and v are those of key-value heads: L0H0.v is read by " + ", ".join(sharing)
            )
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


@dataclass(frozen=True)
class EdgePair:
    """What can be measured of a pair's edges, while the model shows them."""

    model: HookedModel
    graph: Graph
    pair: Pair
    memory: int  # bytes

    def runs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The logits of both runs; what the base run writes, and what it would write with the
        source run's outputs.
        """
        device = device_of(self.model)
        base = read_edges(self.model, self.graph, self.pair.base)
        source = read_edges(self.model, self.graph, self.pair.source)
        base_places = places_of(self.pair.base, self.pair.origins).to(device)
        source_places = places_of(self.pair.source, self.pair.origins).to(device)
        replacement = base.written.clone()
        replacement[:, base_places] = source.written[:, source_places]

        change = source.stream[source_places] - base.stream[base_places]
        explained = (replacement - base.written)[:, base_places].sum(0)
        missing = float((change - explained).norm() / change.norm().clamp(min=1e-9))
        is_wide = change.dtype in (torch.float32, torch.float64)
        allowed = _CLOSE if is_wide else _CLOSE_IN_HALF_PRECISION
        if missing > allowed:
            raise ModelError(
                f"what heads and MLPs of {self.model.cfg.model_name} write does not add up to the "
                f"residual stream ({missing:.2g} of its change is missing), so edges have no "
                "meaning: patch nodes with ma.patch, or paths between heads with ma.paths"
            )
        return base.logits, source.logits, base.written, replacement

    def attributed(self, steps: int, seed: int) -> dict[str, np.ndarray]:
        """The score of each edge, that of a random step, and the whole effect."""
        base_logits, source_logits, written, replacement = self.runs()
        baseline = source_logits if self.pair.denoising else base_logits
        gradients = self._gradients(steps, written, replacement, baseline)

        def scores(step: Float[Tensor, "writer pos d_model"]) -> np.ndarray:
            by_edge = step.flatten(1) @ gradients.flatten(1).T
            return np.where(self.graph.exists, by_edge.cpu().numpy(), np.nan)

        step = (replacement - written).double()
        effect = scores(step)
        length = step.norm(dim=-1, keepdim=True)
        del step  # as large as what is drawn next
        generator = torch.Generator().manual_seed(seed)
        random_step = torch.randn(replacement.shape, generator=generator, dtype=torch.float64).to(
            length
        )
        random_step *= length / random_step.norm(dim=-1, keepdim=True)
        whole = float(
            self.pair.measure(source_logits, baseline) - self.pair.measure(base_logits, baseline)
        )
        return {
            "effect": effect,
            "random": scores(random_step),
            "whole": np.array(whole),
        }

    def _gradients(
        self, steps: int, written: Tensor, replacement: Tensor, baseline: Tensor
    ) -> Float[Tensor, "reader pos d_model"]:
        """The gradient of the metric with respect to what each reader reads, averaged over the
        steps.
        """
        zeros: dict[Place, Tensor] = {}  # added to each input, to get its gradient

        def read_with_zeros(place: Place, x: Tensor) -> Tensor:
            zeros[place] = torch.zeros_like(x, requires_grad=True)
            return x + zeros[place]

        points = torch.zeros(1)
        if steps > 1:
            points = (torch.arange(steps) + 0.5) / steps
        _, length, width = written.shape
        total = written.new_zeros(len(self.graph.readers), length, width, dtype=torch.float64)
        embedding_step = replacement[0] - written[0]
        row = gradients_row_bytes(self.model, self.graph, self.pair)
        for batch in points.split(self._rows(row)):
            steps_of_rows = batch.to(written)[:, None, None] * embedding_step
            logits = run_edges(
                self.model,
                self.graph,
                self.pair.base,
                len(batch),
                reading=read_with_zeros,
                embedded=partial(torch.add, other=steps_of_rows),
                gradients=True,
            )
            value = self.pair.measure(logits, baseline).sum()
            gradients = torch.autograd.grad(value, list(zeros.values()))
            for place, gradient in zip(zeros, gradients, strict=True):
                by_reader = gradient.sum(0, dtype=torch.float64).transpose(0, 1) / steps
                total[self.graph.places[place]] += by_reader.to(total)
            zeros.clear()
        return total

    def _rows(self, row: int) -> int:
        """How many rows go together."""
        fixed = edges_fixed_bytes(self.model, self.graph, self.pair)
        most = max(1, _TOKENS // len(self.pair.base))
        return min(most, rows_within(self.memory - fixed, row))

    def exact(self, patched_edges: Sequence[tuple[int, int]]) -> np.ndarray:
        """The effect of single edges, each patched exactly."""
        kept_edges = torch.ones(len(patched_edges), *self.graph.exists.shape, dtype=torch.bool)
        for row, (writer, reader) in enumerate(patched_edges):
            kept_edges[row, writer, reader] = False
        base_logits, source_logits, _, replacement = self.runs()
        baseline = source_logits if self.pair.denoising else base_logits
        return self.with_edges(kept_edges, replacement, baseline) - float(
            self.pair.measure(base_logits, baseline)
        )

    def with_edges(
        self, kept_edges: Bool[Tensor, "row writer reader"], replacement: Tensor, baseline: Tensor
    ) -> np.ndarray:
        """The metric with only some edges as they are; all others carry what ``replacement`` has."""
        metrics = []
        row = edges_row_bytes(self.model, self.graph, self.pair)
        for batch in kept_edges.split(self._rows(row)):
            replacing = Replacing(batch, self.graph, replacement)
            logits = run_edges(
                self.model,
                self.graph,
                self.pair.base,
                len(batch),
                reading=replacing.read,
                writing=replacing.write,
            )
            metrics.append(self.pair.measure(logits, baseline).double().cpu())
        return torch.cat(metrics).numpy()
