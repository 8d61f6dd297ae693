"""Runs a model on prompts under conditions: checks, calibrates analyses, and measures batches."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from tqdm.auto import tqdm

from mechattn.analysis.analysis import Analysis, Calibrates
from mechattn.axes import BASELINE
from mechattn.engine import request_checks as checks
from mechattn.engine.batches import batch_plan, in_halves, measure_batch, row_bytes
from mechattn.engine.description import condition_data, model_data, sequences_dataset
from mechattn.engine.engines import ChosenEngine, Engine, chosen_engine
from mechattn.engine.labelled_datasets import Collector, Keep
from mechattn.engine.pending_sums import LayerValues
from mechattn.engine.request_checks import (
    Analyses,
    AnyPrompts,
    ByCondition,
    ChosenLayers,
    Conditions,
)
from mechattn.errors import check_choice, check_counts, memory_bytes, warn
from mechattn.model import hooks
from mechattn.model.hooked import HookedModel, alone
from mechattn.model.load import load_model
from mechattn.model.random_weights import Kind, check_draw, random_weights
from mechattn.model.scores import BlindScores, blind_scores
from mechattn.prompts.prompt import Prompt, as_prompts, likeness_of
from mechattn.prompts.token_sequences import Batch, pad_right
from mechattn.results import provenance
from mechattn.results.result import MEMORY, Result
from mechattn.stats.random_effects import FEWEST_DRAWS

PromptSequences = Sequence[ByCondition]  # an entry for each prompt


@dataclass(frozen=True)
class RunOptions:
    """The options of :func:`mechattn.run` as one object, for a :class:`mechattn.Job`.

    Raises:
        OptionError: An option cannot be used with any model.
    """

    layers: ChosenLayers = None
    seed: int = 0
    keep: Keep = "moments"
    memory: str = MEMORY
    engine: Engine = "auto"

    def __post_init__(self) -> None:
        memory_bytes(self.memory)
        check_counts(0, seed=self.seed)
        check_choice(Keep, keep=self.keep)
        check_choice(Engine, engine=self.engine)


@alone
def run(
    model: Any,
    prompts: AnyPrompts,
    conditions: Conditions | None = None,
    analyses: Analyses = None,
    *,
    layers: ChosenLayers = None,
    seed: int = 0,
    keep: Keep = "moments",
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
        keep: "moments" keeps mean, variance and n over prompts for each position; "prompts"
            also keeps each prompt's values.
        memory: The memory budget for one layer of one batch, such as "2GiB".
        engine: "streaming" computes attention in blocks of query rows and stores no [query, key]
            matrix. "fused" takes sums over queries from two calls of a fused kernel, for analyses
            that need no rows; if no analysis reads attention, it streams. "hooks" reduces each
            layer's pattern from TransformerLens's hooks. "auto" streams, or on a GPU uses the fused
            kernel for analyses that need no rows; if that does not give the model's own numbers, it
            uses the hooks.

    Returns:
        A result with one dataset per analysis, and "sequences", the tokens that the model read.

    Raises:
        MechattnError: An argument cannot be used, which is found before the first batch; or a batch
            has invalid attention (NaN, a wrong mask) or does not fit in memory.
    """
    plan = make_plan(model, conditions, analyses, RunOptions(layers, seed, keep, memory, engine))
    prompts = as_prompts(prompts)
    sequences = plan.sequences(prompts)
    return plan.calibrated(prompts).result(prompts, sequences, range(len(prompts)))


@dataclass(frozen=True)
class Plan:
    """The arguments of ``run``, checked as far as possible without prompts."""

    model: HookedModel
    conditions: Conditions
    analyses: Sequence[Analysis]
    layers: list[int]
    options: RunOptions
    paths: bool  # whether the full path of a checkpoint is recorded

    def sequences(self, prompts: Sequence[Prompt]) -> PromptSequences:
        """The sequence of every prompt under every condition, checked."""
        sequences = checks.checked_sequences(
            self.conditions, prompts, self.model, self.options.seed, self.analyses
        )
        for prompt, prompt_sequences in zip(prompts, sequences, strict=True):
            checks.check_insertions_are_read(prompt, prompt_sequences)
        return sequences

    def calibrated(self, prompts: Sequence[Prompt]) -> Run:
        """Calibrate the analyses on the model and choose the engine.

        Args:
            prompts: All prompts of the whole run.
        """
        likeness = likeness_of(prompts)
        likenesses = []
        if likeness:
            likenesses.append({"prompts": len(prompts), "words": likeness})
            warn(
                f"{likeness}. Use more varied prompts, or give their groups: Prompt(group=…),"
                " load_prompts(group=…)"
            )

        analyses = []
        for analysis in self.analyses:
            if isinstance(analysis, Calibrates):
                analysis = analysis.calibrated(self.model, self.layers, prompts)
            analyses.append(analysis)

        engine = chosen_engine(self.model, self.options.engine, analyses, self.layers)
        return Run(replace(self, analyses=analyses), engine, blind_scores(self.model), likenesses)


@dataclass(frozen=True)
class Run:
    """A plan with calibrated analyses and a chosen engine, which can measure any prompts."""

    plan: Plan
    engine: ChosenEngine
    blind: BlindScores
    # Has an entry if the prompts of the whole run repeat each other: their number ("prompts") and a
    # sentence ("words"). A merge of several runs has the entries of all.
    likenesses: Sequence[Mapping[str, Any]]

    def result(
        self, prompts: Sequence[Prompt], sequences: PromptSequences, places: Sequence[int]
    ) -> Result:
        """Run the model on some prompts.

        Args:
            prompts: The prompts.
            sequences: What ``Plan.sequences`` returns for these prompts.
            places: The index of each prompt in the whole run.
        """
        start_time = time.monotonic()
        collectors = self._collectors(prompts, sequences)
        measure = partial(self._measured, prompts, sequences)

        halved_groups = []
        # A run of less than 2 s has no bar. With leave=None, the bar of one of several chunks
        # disappears at its end.
        groups = self._prompt_groups(sequences)
        for indices in tqdm(groups, desc="prompts", unit="batch", delay=2, leave=None):
            batches_and_values, too_large_groups = in_halves(indices, measure)
            for too_large in too_large_groups:
                first_id = prompts[too_large[0]].id
                halved_groups.append({"prompts": len(too_large), "first": first_id})
            for batch, values in batches_and_values:
                for collector, layer_values in zip(collectors, values, strict=True):
                    collector.add(batch, layer_values)

        datasets = {collector.analysis.name: collector.dataset() for collector in collectors}
        datasets["sequences"] = sequences_dataset(self.plan.model, prompts, sequences, places)
        entries = self._provenance(prompts, sequences[0])
        seconds = round(time.monotonic() - start_time, 3)
        return Result(datasets, {**entries, "halved": halved_groups, "seconds": seconds})

    def _collectors(self, prompts: Sequence[Prompt], sequences: PromptSequences) -> list[Collector]:
        """An empty collector for each analysis."""
        plan = self.plan
        coords: dict[str, list] = {
            "prompt": [prompt.id for prompt in prompts],
            "condition": list(plan.conditions),
            "layer": plan.layers,
        }
        widths = {
            "key": max(map(_longest, sequences)),
            "original_key": max(len(by_condition[BASELINE]) for by_condition in sequences),
        }
        return [
            Collector(analysis, coords, widths, plan.options.keep) for analysis in plan.analyses
        ]

    def _prompt_groups(self, sequences: PromptSequences) -> list[list[int]]:
        """The indices of the prompts that are to be measured in one batch."""
        plan = self.plan
        holds_pattern = self.engine.name == "hooks"
        return batch_plan(
            lengths=[_longest(by_condition) for by_condition in sequences],
            condition_count=len(plan.conditions),
            bytes_of_row=partial(row_bytes, plan.model.cfg, holds_pattern=holds_pattern),
            memory=plan.options.memory,
            sides=checks.sides_of(plan.model, sequences),
        )

    def _measured(
        self, prompts: Sequence[Prompt], sequences: PromptSequences, indices: Sequence[int]
    ) -> tuple[Batch, list[LayerValues]]:
        """The batch of the prompts at these indices under all conditions, and its values."""
        plan = self.plan
        # Any token can be the padding, since no token sees what comes after it.
        padding_id = getattr(plan.model.tokenizer, "pad_token_id", None) or 0
        rows = [(index, name) for index in indices for name in sequences[index]]
        batch = pad_right([sequences[index][name] for index, name in rows], rows, padding_id)
        values = measure_batch(
            plan.model,
            batch,
            self.engine.forward,
            windows={layer: hooks.attention_window(plan.model, layer) for layer in plan.layers},
            analyses=plan.analyses,
            prompt_ids=[prompt.id for prompt in prompts],
            blind=self.blind,
        )
        return batch, values

    def _provenance(
        self, prompts: Sequence[Prompt], first_sequences: ByCondition
    ) -> dict[str, Any]:
        """The provenance: model, prompts, options, engine, versions and time."""
        plan = self.plan
        prompts_entry: dict[str, Any] = {
            "count": len(prompts),
            "hash": provenance.set_hash(prompts),
            "template": prompts[0].template,
        }
        if self.likenesses:
            prompts_entry["alike"] = self.likenesses

        conditions = {
            name: condition_data(condition, first_sequences[name])
            for name, condition in plan.conditions.items()
        }
        return {
            "model": model_data(plan.model, plan.paths),
            "prompts": prompts_entry,
            "conditions": conditions,
            "analyses": {analysis.name: dict(analysis.options) for analysis in plan.analyses},
            "measured_layers": plan.layers,
            "threads": torch.get_num_threads(),
            "versions": provenance.versions(),
            "time": provenance.now(),
            "engine": self.engine.name,
            "engine_reason": self.engine.reason,
            "seed": plan.options.seed,
            "memory": plan.options.memory,
            "keep": plan.options.keep,
        }


def make_plan(
    model: Any,
    conditions: Conditions | None = None,
    analyses: Analyses = None,
    options: RunOptions = RunOptions(),
    *,
    paths: bool = False,
) -> Plan:
    """Check the arguments of ``run`` except the prompts.

    Args:
        model: As for ``run``.
        conditions: As for ``run``.
        analyses: As for ``run``.
        options: The other options of ``run``.
        paths: Whether the full path of a checkpoint is recorded.
    """
    model = load_model(model)
    return Plan(
        model,
        checks.with_baseline(conditions),
        checks.checked_analyses(analyses),
        hooks.chosen_layers(model, options.layers),
        options,
        paths,
    )


def run_random(
    model: Any,
    prompts: AnyPrompts,
    conditions: Conditions | None = None,
    analyses: Analyses = None,
    *,
    draws: int = 20,
    kind: Kind = "initialised",
    seed: int = 0,
    **options: Any,
) -> list[Result]:
    """Repeat ``run`` on several models with random weights, for ``result.compare(…, random=…)``.

    One random model is held at a time, in addition to the given model. Each run costs as much as
    the original run.

    Args:
        model: As for ``run``. Both kinds use its configuration and tokenizer; "shuffled" also uses
            its weights.
        prompts: As in the original run.
        conditions: As in the original run.
        analyses: As in the original run.
        draws: The number of random models, at least 3. With 20, one head alone can have q_random <
            0.05; with 3, only several heads together can (7 of 32), as
            ``table.attrs["resolution_random"]`` says.
        kind: "initialised" or "shuffled"; see ``random_weights``.
        seed: The seed of the original run. The weights of draw i, from 0, have the seed
            ``seed + i``.
        **options: Other options of ``run``, such as ``layers``.

    Raises:
        OptionError: There are fewer than 3 draws, or there is no such kind.
        MechattnError: The model's weights cannot be redrawn, or ``run`` raises an error.

    Source:
        arXiv:2512.18792.
    """
    check_counts(FEWEST_DRAWS, draws=draws)  # fewer have no spread to compare heads with
    check_draw(kind, seed)
    model = load_model(model)
    results = []
    for draw in range(draws):
        random_model = random_weights(model, kind, seed + draw)
        result = run(random_model, prompts, conditions, analyses, seed=seed, **options)
        results.append(result)

        # A hooked model refers to itself: without a collection, two would be in memory.
        del random_model
        gc.collect()
    return results


def _longest(sequences: ByCondition) -> int:
    """The length of a prompt's longest sequence."""
    return max(map(len, sequences.values()))
