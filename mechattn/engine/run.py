"""Runs a model on prompts under conditions: checks and calibrates once, then measures batch by batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from mechattn.analysis.analysis import Analysis, Calibrates
from mechattn.engine.batch_values import LayerValues, measure_batch
from mechattn.engine.check import (
    check_captures,
    check_interventions,
    check_read,
    check_sequences,
    check_variants,
    made_sequences,
    sides_of,
    with_baseline,
    with_names,
)
from mechattn.engine.collect import Collector, Positions
from mechattn.engine.describe import described, sequences_dataset
from mechattn.engine.forward import (
    Engine,
    Forward,
    chosen_forward,
    forward_fused,
    forward_in_blocks,
    forward_through_hooks,
    position_width,
)
from mechattn.engine.plan import Cost, batch_plan, memory_bytes
from mechattn.errors import ModelError, OptionError
from mechattn.model import hooks
from mechattn.model.hooked import HookedModel
from mechattn.model.load import as_hooked, load_model
from mechattn.model.lock import alone
from mechattn.model.score_terms import BlindScores, blind_scores
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt, as_prompts
from mechattn.prompts.sequences import Batch, Sequence, pad_right
from mechattn.prompts.similar_prompts import warn_of_likeness
from mechattn.results.result import Result

Fitting = TypeVar("Fitting")
_CPU = ("not enough memory", "can't allocate memory", "cannot allocate memory", "out of memory")


@alone
def run(
    model: Any,
    prompts: Prompt | str | Tensor | Seq[Prompt | str],
    conditions: Mapping[str, Condition] | None = None,
    analyses: Seq[Analysis] | Analysis | None = None,
    *,
    layers: Iterable[int] | int | None = None,
    seed: int = 0,
    positions: Positions = "moments",
    memory: str = "2GiB",
    engine: Engine = "auto",
    progress: bool = True,
    places: Seq[int] | None = None,
    paths: bool = False,
) -> Result:
    """Measure attention on every prompt under every condition and the baseline.

    Args:
        model: A hooked model, or anything that ``load_model`` accepts.
        prompts: Prompts from ``load_prompts``, a text, a list of texts, or token ids [batch pos].
        conditions: Conditions by name; "baseline" is added.
        analyses: The analyses; received attention by default. All share one forward pass.
        layers: The layers to measure, from 0; all with attention by default.
        seed: The seed of all random draws, used together with the prompt's id.
        positions: "moments" keeps mean, variance and n over prompts for each position; "prompts" also keeps each
            prompt's values.
        memory: The memory budget for one layer of one batch; it and the lengths determine the batches.
        engine: "streaming" computes attention in blocks of query rows and stores no [query, key] matrix; "fused" takes
            sums over queries from two calls of a fused kernel, for analyses that need no rows; "hooks" reduces each
            layer's pattern from TransformerLens's hooks; "auto" streams if that gives the model's own numbers.
        progress: Show a progress bar if the run takes longer than two seconds.
        places: If these prompts are part of a larger set: the index of each in that set, used to order results when
            parts are merged.
        paths: Record the full path of a checkpoint's directory in the provenance, not only its name.

    Returns:
        A result with one dataset per analysis, and "sequences", the tokens that the model read.

    Raises:
        MechattnError: An argument cannot be used. Raised before the first forward pass, except for invalid attention
            (NaN, a wrong mask), which is found at the first batch with it.
    """
    plan = make_plan(
        model,
        conditions,
        analyses,
        layers=layers,
        seed=seed,
        positions=positions,
        memory=memory,
        engine=engine,
        paths=paths,
    )
    prompts = as_prompts(prompts)
    places = _checked_places(places, len(prompts))
    sequences = plan.sequences(prompts)
    return plan.calibrated(prompts).result(prompts, sequences, places, progress=progress)


Sequences = list[dict[str, Sequence]]


@dataclass(frozen=True)
class Plan:
    """The arguments of ``run``, checked as far as possible without prompts."""

    model: HookedModel
    conditions: Mapping[str, Condition]
    analyses: Seq[Analysis]
    layers: list[int]
    seed: int
    positions: Positions
    memory: str
    engine: Engine
    paths: bool = False

    def sequences(self, prompts: Seq[Prompt]) -> Sequences:
        """The sequence of every prompt under every condition, checked."""
        named = dict(self.conditions)
        made = made_sequences(named, prompts, self.model, self.seed)
        for prompt, sequences in zip(prompts, made, strict=True):
            check_sequences(prompt, sequences, named, self.analyses, self.model)
            check_read(prompt, sequences)
        check_interventions(self.model, [prompt.id for prompt in prompts], made)
        check_variants(load_model(self.model), made)  # verified again if another model was made since
        return made

    def calibrated(self, prompts: Seq[Prompt]) -> Run:
        """Calibrate the analyses on the model; ``prompts`` are all prompts of the whole run."""
        warn_of_likeness(prompts)
        found = [
            a.calibrated(self.model, self.layers, prompts) if isinstance(a, Calibrates) else a for a in self.analyses
        ]
        check_captures(self.model, found, self.layers)
        forward, why = chosen_forward(self.model, self.engine, found)
        return Run(replace(self, analyses=found), forward, why, blind_scores(self.model))


_ENGINES: Mapping[Forward, str] = {
    forward_in_blocks: "streaming",
    forward_fused: "fused",
    forward_through_hooks: "hooks",
}


@dataclass(frozen=True)
class Run:
    """A plan with calibrated analyses and a chosen engine, which can measure any prompts."""

    plan: Plan
    forward: Forward
    why: str
    blind: BlindScores

    def result(self, prompts: Seq[Prompt], sequences: Sequences, places: Seq[int], *, progress: bool = True) -> Result:
        """Run the model on some prompts, whose sequences were made by :meth:`Plan.sequences`."""
        begun = time.monotonic()
        plan, ids = self.plan, [prompt.id for prompt in prompts]
        square = self.forward is forward_through_hooks
        cost = Cost(plan.model.cfg.n_heads, position_width(plan.model), square)
        lengths, sides = [[len(s) for s in made.values()] for made in sequences], sides_of(plan.model, sequences)
        collectors = [Collector(a, ids, list(plan.conditions), plan.layers, plan.positions) for a in plan.analyses]
        halved = []
        for indices in _progress(batch_plan(lengths, cost, plan.memory, sides), progress):
            measured, too_large = in_halves(indices, lambda some: self._measured(some, sequences, ids))
            halved += [{"prompts": size, "first": ids[indices[0]]} for size in too_large]
            for batch, values in measured:
                for collector, by_layer in zip(collectors, values, strict=True):
                    collector.add(batch, by_layer)
        datasets = {collector.analysis.name: collector.dataset() for collector in collectors}
        datasets["sequences"] = sequences_dataset(plan.model, prompts, list(plan.conditions), sequences, places)
        about = described(plan.model, prompts, plan.conditions, sequences[0], plan.analyses, plan.layers, plan.paths)
        about |= {"engine": _ENGINES[self.forward], "engine_reason": self.why, "seed": plan.seed}
        about |= {"memory": plan.memory, "positions": plan.positions, "halved": halved}
        return Result(datasets, about | {"seconds": round(time.monotonic() - begun, 3)})

    def _measured(self, indices: Seq[int], sequences: Sequences, ids: list[str]) -> tuple[Batch, list[LayerValues]]:
        """The batch of some prompts, and the values of each analysis."""
        plan = self.plan
        batch = _batch(plan.model, sequences, indices)
        windows = {layer: hooks.attention_window(plan.model, layer) for layer in plan.layers}
        return batch, measure_batch(plan.model, batch, self.forward, windows, plan.analyses, ids, self.blind)


def make_plan(
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
    """The arguments of ``run`` except the prompts, checked."""
    model = as_hooked(model)
    memory_bytes(memory)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise OptionError(f"seed={seed!r}: give a whole number")
    chosen = hooks.chosen_layers(model, layers)
    named, looked = with_baseline(conditions), with_names(analyses)
    if positions not in ("moments", "prompts"):
        raise OptionError(f'positions={positions!r}: choose "moments" or "prompts"')
    return Plan(model, named, looked, chosen, seed, positions, memory, engine, paths)


def in_halves(indices: Seq[int], measure: Callable[[Seq[int]], Fitting]) -> tuple[list[Fitting], list[int]]:
    """Measure some prompts together; if they don't fit in memory, each half of them, and so on."""
    measured, too_large, waiting = [], [], [list(indices)]
    while waiting:
        some = waiting.pop(0)
        try:
            measured.append(measure(some))
            continue
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        # Outside the except block, where the error no longer keeps the tensors of the pass alive.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if len(some) == 1:
            raise ModelError(
                f"a batch of prompt number {some[0]} alone with all its conditions does not fit in memory ({reason}); "
                f"use fewer conditions per run, a shorter prompt, or a machine with more memory"
            )
        too_large.append(len(some))
        waiting[:0] = [some[: len(some) // 2], some[len(some) // 2 :]]
    return measured, too_large


def is_out_of_memory(error: Any) -> bool:
    """Whether a device or the machine had no memory left."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _CPU)


def _batch(model: HookedModel, sequences: Sequences, indices: Seq[int]) -> Batch:
    rows = [(index, name) for index in indices for name in sequences[index]]
    pad = getattr(model.tokenizer, "pad_token_id", None) or 0
    return pad_right([sequences[index][name] for index, name in rows], rows, pad)


def _progress(batches: list[list[int]], show: bool) -> Iterable[list[int]]:
    from tqdm.auto import tqdm

    return tqdm(batches, desc="prompts", unit="batch", delay=2, disable=not show)


def _checked_places(places: Seq[int] | None, prompts: int) -> Seq[int]:
    """The indices of the prompts in a larger set; by default in this set."""
    if places is None:
        return range(prompts)
    if len(places) != prompts or list(places) != sorted({int(place) for place in places}) or min(places) < 0:
        raise OptionError(
            f"places: give the index of each of the {prompts} prompts in the whole set, in increasing order"
        )
    return places
