"""A run before its prompts: what is asked for, checked and calibrated once; then any prompts can be measured."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mechattn.analysis.analysis import Analysis, Calibrates
from mechattn.engine.check import (
    check_captures,
    check_interventions,
    check_sequences,
    check_variants,
    with_baseline,
    with_names,
)
from mechattn.engine.collect import Collector, Positions, TakesValues
from mechattn.engine.describe import described, sequences_dataset
from mechattn.engine.forward import Engine, Forward, chosen_forward, forward_through_hooks, position_width
from mechattn.engine.halve import measure_halving
from mechattn.engine.measure import measure_batch
from mechattn.engine.plan import Cost, batch_plan, memory_bytes
from mechattn.engine.sides import sides_of
from mechattn.errors import OptionError
from mechattn.model import hooks
from mechattn.model.load import as_hooked, load_model
from mechattn.model.scores import BlindScores, blind_scores
from mechattn.prompts.conditions import Condition
from mechattn.prompts.likeness import warn_of_likeness
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.sequences import Batch, Sequence, pad_right
from mechattn.results.result import Result

Sequences = list[dict[str, Sequence]]


@dataclass(frozen=True)
class Plan:
    """What is asked of a model: the arguments of ``run``, checked as far as they can be without a prompt."""

    model: Any
    conditions: Mapping[str, Condition]
    analyses: Seq[Analysis]
    layers: list[int]
    seed: int
    positions: Positions
    memory: str
    engine: Engine
    paths: bool = False

    def sequences(self, prompts: Seq[Prompt]) -> Sequences:
        """Every prompt under every condition, checked.

        Raises:
            MechattnError: A prompt, a condition or an intervention cannot be used with this model.
        """
        named = dict(self.conditions)
        made = [{name: some.apply(p, self.model, self.seed) for name, some in named.items()} for p in prompts]
        for prompt, sequences in zip(prompts, made, strict=True):
            check_sequences(prompt, sequences, named, self.analyses, self.model)
        check_interventions(self.model, [prompt.id for prompt in prompts], made)
        check_variants(load_model(self.model), made)  # verified again if another model was made since
        return made

    def ready(self, measured: Seq[Prompt]) -> Ready:
        """With what the analyses learn from the model before a run; ``measured`` are all prompts of the whole run."""
        warn_of_likeness(measured)
        found = [
            a.calibrated(self.model, self.layers, measured) if isinstance(a, Calibrates) else a for a in self.analyses
        ]
        check_captures(self.model, found, self.layers)
        forward, why = chosen_forward(self.model, self.engine)
        return Ready(replace(self, analyses=found), forward, why, blind_scores(self.model))


@dataclass(frozen=True)
class Ready:
    """A plan whose analyses are calibrated, and how attention reaches them."""

    plan: Plan
    forward: Forward
    why: str
    blind: BlindScores

    def measured(
        self, prompts: Seq[Prompt], sequences: Sequences, places: Seq[int], *, progress: bool = True
    ) -> Result:
        """Run the model on some prompts, whose sequences were made by :meth:`Plan.sequences`."""
        begun = time.monotonic()
        plan, ids = self.plan, [prompt.id for prompt in prompts]
        square = self.forward is forward_through_hooks
        cost = Cost(plan.model.cfg.n_heads, position_width(plan.model), square)
        lengths, sides = [[len(s) for s in made.values()] for made in sequences], sides_of(plan.model, sequences)
        batches = batch_plan(lengths, cost, plan.memory, sides)
        collectors = [Collector(a, ids, list(plan.conditions), plan.layers, plan.positions) for a in plan.analyses]
        measure, made = partial(self._measure, ids), partial(_batch, plan.model, sequences)
        halved = [
            {"prompts": size, "first": ids[indices[0]]}
            for indices in _progress(batches, progress)
            for size in measure_halving(measure, made, indices, collectors)
        ]
        datasets = {collector.analysis.name: collector.dataset() for collector in collectors}
        datasets["sequences"] = sequences_dataset(plan.model, prompts, list(plan.conditions), sequences, places)
        about = described(plan.model, prompts, plan.conditions, plan.analyses, plan.layers, plan.paths)
        about |= {"engine": "hooks" if square else "streaming", "engine_reason": self.why, "seed": plan.seed}
        about |= {"memory": plan.memory, "positions": plan.positions, "halved": halved}
        return Result(datasets, about | {"seconds": round(time.monotonic() - begun, 3)})

    def _measure(self, ids: list[str], batch: Batch, collectors: Seq[TakesValues]) -> None:
        plan = self.plan
        windows = {layer: hooks.attention_window(plan.model, layer) for layer in plan.layers}
        measure_batch(plan.model, batch, self.forward, windows, plan.analyses, collectors, ids, self.blind)


def planned(
    model: Any,
    conditions: Mapping[str, Condition] | None = None,
    analyses: Seq[Analysis] | Analysis | None = None,
    *,
    layers: Iterable[int] | int | None = None,
    seed: int = 0,
    positions: Positions = "moments",
    memory: str = "2GiB",
    engine: Engine = "auto",
    paths: bool = False,
) -> Plan:
    """The arguments of ``run`` but the prompts, checked.

    Raises:
        MechattnError: One of them cannot be used.
    """
    model = as_hooked(model)
    memory_bytes(memory)
    chosen = hooks.chosen_layers(model, layers)
    named, looked = with_baseline(conditions), with_names(analyses)
    if positions not in ("moments", "prompts"):
        raise OptionError(f'positions={positions!r}: choose "moments" or "prompts"')
    return Plan(model, named, looked, chosen, seed, positions, memory, engine, paths)


def _batch(model: Any, sequences: Sequences, indices: Seq[int]) -> Batch:
    rows = [(index, name) for index in indices for name in sequences[index]]
    pad = getattr(model.tokenizer, "pad_token_id", None) or 0
    return pad_right([sequences[index][name] for index, name in rows], rows, pad)


def _progress(batches: list[list[int]], show: bool) -> Iterable[list[int]]:
    from tqdm.auto import tqdm

    return tqdm(batches, desc="prompts", unit="batch", delay=2, disable=not show)
