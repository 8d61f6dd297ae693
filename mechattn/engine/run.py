"""Runs a model on prompts under conditions: checks and calibrates once, plans batches, and measures each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm.auto import tqdm

from mechattn.analysis.analysis import Analysis, Calibrates
from mechattn.axes import BASELINE
from mechattn.engine import request_checks as checks
from mechattn.engine.attention_rows import (
    ENGINES,
    Engine,
    Forward,
    chosen_forward,
    forward_through_hooks,
)
from mechattn.engine.batch_pass import LayerValues, measure_batch
from mechattn.engine.labelled_datasets import Collector, Positions, described, sequences_dataset
from mechattn.errors import ModelError, OptionError, check_choice
from mechattn.functional.attention import BLOCK
from mechattn.model import hooks
from mechattn.model.hooked import HookedModel, alone
from mechattn.model.load import as_hooked
from mechattn.model.scores import BlindScores, blind_scores
from mechattn.model.weights import Kind, check_draw, random_weights
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt, as_prompts, warn_of_likeness
from mechattn.prompts.token_sequences import Batch, Sequence, pad_right
from mechattn.results.result import MEMORY, Result, memory_bytes
from mechattn.stats.random_effects import FEWEST_DRAWS


@dataclass(frozen=True)
class RunOptions:
    """The options of :func:`mechattn.run`, which explains them; a :class:`mechattn.Job` takes them as one object.

    Raises:
        OptionError: An option cannot be used with any model.
    """

    layers: Iterable[int] | int | None = None
    seed: int = 0
    positions: Positions = "moments"
    memory: str = MEMORY
    engine: Engine = "auto"

    def __post_init__(self) -> None:
        memory_bytes(self.memory)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise OptionError(f"seed={self.seed!r}: give a whole number")
        check_choice(Positions, positions=self.positions)
        check_choice(Engine, engine=self.engine)


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
    memory: str = MEMORY,
    engine: Engine = "auto",
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

    Returns:
        A result with one dataset per analysis, and "sequences", the tokens that the model read.

    Raises:
        MechattnError: An argument cannot be used. Raised before the first forward pass, except for invalid attention
            (NaN, a wrong mask), which is found at the first batch with it.
    """
    plan = make_plan(
        model, conditions, analyses, RunOptions(layers, seed, positions, memory, engine)
    )
    prompts = as_prompts(prompts)
    sequences = plan.sequences(prompts)
    return plan.calibrated(prompts).result(prompts, sequences, range(len(prompts)))


Sequences = list[dict[str, Sequence]]


@dataclass(frozen=True)
class Plan:
    """The arguments of ``run``, checked as far as possible without prompts."""

    model: HookedModel
    conditions: Mapping[str, Condition]
    analyses: Seq[Analysis]
    layers: list[int]
    options: RunOptions
    paths: bool

    def sequences(self, prompts: Seq[Prompt]) -> Sequences:
        """The sequence of every prompt under every condition, checked."""
        made = checks.checked_sequences(
            self.conditions, prompts, self.model, self.options.seed, self.analyses
        )
        for prompt, sequences in zip(prompts, made, strict=True):
            checks.check_read(prompt, sequences)
        return made

    def calibrated(self, prompts: Seq[Prompt]) -> Run:
        """Calibrate the analyses on the model; ``prompts`` are all prompts of the whole run."""
        alike = {said: len(prompts)} if (said := warn_of_likeness(prompts)) else {}
        given = (self.model, self.layers, prompts)
        found = [
            each.calibrated(*given) if isinstance(each, Calibrates) else each
            for each in self.analyses
        ]
        checks.check_captures(self.model, found, self.layers)
        forward, why = chosen_forward(self.model, self.options.engine, found)
        return Run(replace(self, analyses=found), forward, why, blind_scores(self.model), alike)


@dataclass(frozen=True)
class Run:
    """A plan with calibrated analyses and a chosen engine, which can measure any prompts."""

    plan: Plan
    forward: Forward
    why: str
    blind: BlindScores
    alike: Mapping[
        str, int
    ]  # how much the prompts of the whole run repeat each other, and how many these are

    def result(self, prompts: Seq[Prompt], sequences: Sequences, places: Seq[int]) -> Result:
        """Run the model on some prompts, at these places of the whole set, with sequences from ``Plan.sequences``."""
        begun = time.monotonic()
        plan, options, ids = self.plan, self.plan.options, [prompt.id for prompt in prompts]
        square, cfg = self.forward is forward_through_hooks, plan.model.cfg
        # About how many numbers are in memory at the same time for each position of a sequence.
        width = 8 * int(cfg.d_model) + 3 * int(cfg.d_mlp or 4 * cfg.d_model)
        cost = Cost(plan.model.cfg.n_heads, width, square)
        lengths, sides = (
            [[len(s) for s in made.values()] for made in sequences],
            checks.sides_of(plan.model, sequences),
        )
        coords: dict[str, list] = {
            "prompt": ids,
            "condition": list(plan.conditions),
            "layer": plan.layers,
        }
        widths = {
            "key": max(map(max, lengths)),
            "original_key": max(len(made[BASELINE]) for made in sequences),
        }
        collectors = [Collector(a, coords, widths, options.positions) for a in plan.analyses]
        halved = []
        batches = batch_plan(lengths, cost, options.memory, sides)
        for indices in tqdm(
            batches, desc="prompts", unit="batch", delay=2, leave=None
        ):  # one of several chunks goes
            measured, too_large = in_halves(
                indices, lambda some: self._measured(some, sequences, ids)
            )
            halved += [{"prompts": size, "first": ids[indices[0]]} for size in too_large]
            for batch, values in measured:
                for collector, by_layer in zip(collectors, values, strict=True):
                    collector.add(batch, by_layer)
        datasets = {collector.analysis.name: collector.dataset() for collector in collectors}
        datasets["sequences"] = sequences_dataset(plan, prompts, sequences, places)
        about = described(plan, prompts, sequences[0])
        about["prompts"] |= {"alike": self.alike} if self.alike else {}
        about |= {"engine": ENGINES[self.forward], "engine_reason": self.why, "seed": options.seed}
        about |= {"memory": options.memory, "positions": options.positions, "halved": halved}
        return Result(datasets, about | {"seconds": round(time.monotonic() - begun, 3)})

    def _measured(
        self, indices: Seq[int], sequences: Sequences, ids: list[str]
    ) -> tuple[Batch, list[LayerValues]]:
        """The batch of some prompts, and the values of each analysis."""
        plan = self.plan
        rows = [(index, name) for index in indices for name in sequences[index]]
        pad = getattr(plan.model.tokenizer, "pad_token_id", None) or 0
        batch = pad_right([sequences[index][name] for index, name in rows], rows, pad)
        windows = {layer: hooks.attention_window(plan.model, layer) for layer in plan.layers}
        return batch, measure_batch(
            plan.model, batch, self.forward, windows, plan.analyses, ids, self.blind
        )


def make_plan(
    model: Any,
    conditions: Mapping[str, Condition] | None = None,
    analyses: Seq[Analysis] | Analysis | None = None,
    options: RunOptions = RunOptions(),
    *,
    paths: bool = False,
) -> Plan:
    """The arguments of ``run`` except the prompts, checked; ``paths`` records a checkpoint's full path."""
    model = as_hooked(model)
    chosen = hooks.chosen_layers(model, options.layers)
    return Plan(
        model, checks.with_baseline(conditions), checks.with_names(analyses), chosen, options, paths
    )


def run_random(
    model: Any,
    prompts: Prompt | str | Tensor | Seq[Prompt | str],
    conditions: Mapping[str, Condition] | None = None,
    analyses: Seq[Analysis] | Analysis | None = None,
    *,
    draws: int = 20,
    kind: Kind = "initialised",
    seed: int = 0,
    **options: Any,
) -> list[Result]:
    """Repeat ``run`` on several models with random weights, for ``result.compare(…, random=…)``.

    One random model is held at a time, in addition to the given one; each run costs as much as the original run.

    Args:
        model: As for ``run``; "shuffled" uses its weights, and both kinds use its configuration and tokenizer.
        prompts: As in the original run.
        conditions: As in the original run.
        analyses: As in the original run.
        draws: The number of random models, at least 3. With 20, one head alone can have q_random < 0.05; with 3, only
            several heads together can (7 of 32), as ``table.attrs["resolution_random"]`` says.
        kind: "initialised" or "shuffled"; see ``random_weights``.
        seed: As in the original run, for the conditions' draws; draw i has the weights of seed + i.
        **options: Other options of ``run``, such as ``layers``.

    Raises:
        OptionError: There are fewer than 3 draws, or there is no such kind.
        MechattnError: The model's weights cannot be redrawn, or ``run`` raises an error.

    Source:
        arXiv:2512.18792.
    """
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < FEWEST_DRAWS:
        raise OptionError(
            f"draws={draws!r}: give a whole number of random models, at least {FEWEST_DRAWS}; heads are compared with "
            f"their spread"
        )
    check_draw(kind, seed)
    model = as_hooked(model)
    return [
        run(
            random_weights(model, kind, seed + i),
            prompts,
            conditions,
            analyses,
            seed=seed,
            **options,
        )
        for i in range(draws)
    ]


# Scores, masked scores, pattern and the working copies of a reduction are in memory at the same time, in float32.
_SQUARES = 6
_LARGEST_BATCH = 64
_CPU = ("not enough memory", "can't allocate memory", "cannot allocate memory", "out of memory")
_FULLEST = 0.75  # a batch is not padded beyond its shortest prompt / 0.75
Fitting = TypeVar("Fitting")


@dataclass(frozen=True)
class Cost:
    """The memory of a row of a batch, in bytes; it depends only on the row's length, so a plan is reproducible."""

    heads: int  # attention heads per layer
    width: int  # numbers in memory at the same time for each position: residual stream, MLP, projections
    square: (
        bool  # whether a layer's whole pattern is in memory (hooks), or blocks of rows (streaming)
    )

    def of(self, length: int) -> int:
        """Bytes for one sequence."""
        attention = self.heads * length * (length * _SQUARES if self.square else BLOCK * 2)
        return 4 * (attention + length * self.width)


def batch_plan(
    lengths: Seq[Seq[int]], cost: Cost, memory: str, sides: Seq[str] = ()
) -> list[list[int]]:
    """Group prompts of similar length so that one layer of a batch fits the budget."""
    budget = memory_bytes(memory)
    batches: list[list[int]] = []
    shortest = 0
    side = list(sides) or [""] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda i: (side[i], max(lengths[i]), i)):
        longest = max(lengths[index])
        rows = (len(batches[-1]) + 1 if batches else 1) * len(lengths[index])
        full = rows * cost.of(longest) > budget or rows > _LARGEST_BATCH
        crosses = bool(batches) and side[batches[-1][0]] != side[index]
        if not batches or full or crosses or shortest < _FULLEST * longest:
            batches.append([])
            shortest = longest
        batches[-1].append(index)
    return batches


def in_halves(
    indices: Seq[int], measure: Callable[[Seq[int]], Fitting]
) -> tuple[list[Fitting], list[int]]:
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
