"""Edges of a model's graph, attributed: how much of an effect passes from each writer to each reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm.auto import tqdm

from mechattn.errors import ModelError, OptionError
from mechattn.model.hooked import HookedModel, alone
from mechattn.model.load import load_model
from mechattn.model.several_devices import device_of
from mechattn.patching.answer_metrics import Metric
from mechattn.patching.effects import Patching, checked_sample
from mechattn.patching.graph import Graph, graph_of, replaced, run_edges, showing_edges
from mechattn.patching.pairs import Pair, about_of, pairs_of, units_of
from mechattn.patching.patched_runs import places_of
from mechattn.patching.refusals import Direction, check_gradients
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt, as_prompts
from mechattn.results.result import MEMORY, memory_bytes

_CHECKED = 4  # prompts on which attribution is compared with patching
_CLOSE, _COARSE = (
    1e-3,
    5e-2,
)  # of two runs' difference, to which the writers' must add up; and in half precision


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
    """Attribute every edge: how the answer changes when one reader receives one writer's output of the other run.

    ``score(u → v) = Σ (z_u of the other run − z_u) · ∂metric/∂(input of v)``, summed over tokens that both versions
    have. Writers u are the embedding, heads and MLPs; readers v are the queries, keys and values of heads, MLPs and the
    logits. With one step the gradient is that of the patched run (EAP). With more it is averaged over points between
    the two runs' embeddings, the middles of ``steps`` equal parts (EAP-IG); the edges from the embedding then add up to
    the metric's difference between the embeddings. Eight edges are also patched exactly, on four prompts.

    Args:
        model: A hooked model, or anything that ``load_model`` accepts; TransformerLens must show single heads' inputs.
        prompts: Prompts with an answer that the model reads.
        condition: The other version: ``Counterpart()``, or inserted tokens.
        steps: The number of points along which gradients are averaged.
        metric: As for ``patch``.
        direction: "noising", the field's usual one, patches the clean run; "denoising" the other one.
        memory: The memory for the gradients of a prompt; a graph that needs more is refused before the first pass.
        seed: The seed of random directions and of the edges to check.

    Returns:
        Effects by writer and reader, with a random step of equal norm as control; ``.table(top=20)``.

    Raises:
        MechattnError: The model's heads have no inputs of their own, or what heads write does not add up in the
            residual stream (norms after attention); or as for ``patch``.

    Source:
        EAP: arXiv:2310.10348; EAP-IG: arXiv:2403.17806, with right ends of the parts where this has middles.
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
        ones = [EdgePair(model, graph, pair) for pair in pairs]
        found = [
            one.attributed(steps, seed + i)
            for i, one in enumerate(tqdm(ones, desc="edges", delay=2))
        ]
        made = {name: np.stack([each[name] for each in found]) for name in found[0]}
        dims = ("prompt", "writer", "reader")
        data: xr.Dataset = xr.Dataset(
            {name: (dims[: each.ndim], each) for name, each in made.items()},
            {
                "prompt": [p.id for p in prompts],
                "writer": list(graph.writers),
                "reader": list(graph.readers),
            },
        )
        method = "attributed (first order)" if steps == 1 else f"attributed ({steps} steps)"
        about = about_of(model, prompts, condition, metric, direction, seed) | {
            "method": method,
            "steps": steps,
        }
        patching = Patching(data, units_of(prompts), about)
        sample = checked_sample(patching, seed)
        edges_there = graph.edges
        exact = [one.exact([edges_there[i] for i in sample]) for one in ones[:_CHECKED]]
    return patching.compared(exact, sample)


def _check_memory(model: HookedModel, graph: Graph, pairs: Sequence[Pair], memory: str) -> None:
    """Refuse a graph whose gradients don't fit."""
    longest = max(len(one) for pair in pairs for one in (pair.receiver, pair.donor))
    held = 3 * len(graph.writers) + 3 * len(
        graph.readers
    )  # two runs and a step; the inputs, their gradients, the sums
    needed = 8 * longest * held * int(model.cfg.d_model)
    if needed > memory_bytes(memory):
        raise OptionError(
            f"the {len(graph.edges):,} edges of {model.cfg.model_name} need about {needed / 2**30:.2g} GiB for a "
            f'prompt of {longest:,} tokens, and memory="{memory}": give more, or shorter prompts'
        )


@dataclass(frozen=True)
class EdgePair:
    """What can be measured of a pair's edges, while the model shows them."""

    model: HookedModel
    graph: Graph
    pair: Pair

    def runs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The logits of both runs; what the receiver writes, and what it would write with the donor's outputs."""
        pair, device = self.pair, device_of(self.model)
        last: list[Tensor] = []

        def keep(place: tuple[str, int], x: Tensor, written: Any) -> Tensor:
            if place[0] == "logits":
                last.append(x[0, :, 0].detach())
            return x

        with torch.no_grad():
            runs = [
                run_edges(self.model, self.graph, one, 1, keep)
                for one in (pair.receiver, pair.donor)
            ]
        (own, mine), (other, theirs) = runs
        here, there = (
            places_of(one, pair.origins).to(device) for one in (pair.receiver, pair.donor)
        )
        put = mine[0].clone()
        put[here] = theirs[0, there]
        moved = last[1][there] - last[0][here]
        off = float((moved - (put - mine[0])[here].sum(1)).norm() / moved.norm().clamp(min=1e-9))
        if off > (_CLOSE if moved.dtype in (torch.float32, torch.float64) else _COARSE):
            raise ModelError(
                f"what heads and MLPs of {self.model.cfg.model_name} write does not add up to the residual stream "
                f"({off:.2g} of its change is missing), as with norms after attention, so edges have no meaning: patch "
                "nodes with ma.patch, or paths between heads with ma.paths"
            )
        return own, other, mine[0], put

    def attributed(self, steps: int, seed: int) -> dict[str, np.ndarray]:
        """The score of each edge, that of a random step, and the whole effect."""
        own, other, mine, put = self.runs()
        base = other if self.pair.denoising else own
        by_input = self._gradients(steps, mine, put, base)
        step = (put - mine).double()
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(step.shape, generator=generator, dtype=torch.float64).to(step)
        random = drawn * step.norm(dim=-1, keepdim=True) / drawn.norm(dim=-1, keepdim=True)
        made = {}
        for name, each in (("effect", step), ("random", random)):
            scores = torch.einsum("pwd,prd->wr", each, by_input).cpu().numpy()
            made[name] = np.where(self.graph.exists, scores, np.nan)
        return made | {
            "whole": np.array(float(self.pair.measure(other, base) - self.pair.measure(own, base)))
        }

    def _gradients(
        self, steps: int, mine: Tensor, put: Tensor, base: Tensor
    ) -> Float[Tensor, "pos reader d_model"]:
        """The gradient of the metric with respect to what each reader reads, averaged over the steps."""
        added: dict[tuple[str, int], Tensor] = {}

        def reading(place: tuple[str, int], x: Tensor, written: Any) -> Tensor:
            added[place] = torch.zeros_like(x, requires_grad=True)
            return x + added[place]

        at = torch.zeros(1) if steps == 1 else (torch.arange(steps) + 0.5) / steps
        total = torch.zeros(
            len(mine),
            len(self.graph.readers),
            mine.shape[-1],
            dtype=torch.float64,
            device=mine.device,
        )
        for some in at.split(max(1, 2**11 // len(mine))):
            embedded = partial(torch.add, other=some.to(mine)[:, None, None] * (put - mine)[:, 0])
            logits, _ = run_edges(
                self.model, self.graph, self.pair.receiver, len(some), reading, embedded, True
            )
            value = self.pair.measure(logits, base).sum()
            for place, each in zip(
                added, torch.autograd.grad(value, list(added.values())), strict=True
            ):
                total[:, self.graph.places[place]] += each.double().sum(0) / steps
        return total

    def exact(self, some: Sequence[tuple[int, int]]) -> np.ndarray:
        """The effect of single edges, each patched exactly."""
        kept = torch.ones(len(some), *self.graph.exists.shape, dtype=torch.bool)
        for row, (writer, reader) in enumerate(some):
            kept[row, writer, reader] = False
        own, other, _, put = self.runs()
        base = other if self.pair.denoising else own
        return self.with_edges(kept, put, base) - float(self.pair.measure(own, base))

    def with_edges(
        self, kept: Bool[Tensor, "row writer reader"], put: Tensor, base: Tensor
    ) -> np.ndarray:
        """The metric with only some edges as they are; all others carry what ``put`` has."""
        found = []
        for some in kept.split(max(1, 2**12 // len(put))):
            reading = replaced(some.to(put.device), self.graph, put)
            logits, _ = run_edges(self.model, self.graph, self.pair.receiver, len(some), reading)
            found.append(self.pair.measure(logits, base).double().cpu())
        return torch.cat(found).numpy()
