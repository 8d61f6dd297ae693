"""The two runs of each prompt: which is patched, from which, at which tokens, and what is
measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from mechattn.axes import BASELINE
from mechattn.engine.request_checks import made_sequences, with_baseline
from mechattn.errors import check_choice
from mechattn.model.head_parts import wide
from mechattn.model.hooked import HookedModel
from mechattn.patching.answer_metrics import Logits, Measured, Metric, measured_by, metric_of
from mechattn.patching.patched_runs import Run, Z
from mechattn.patching.refusals import (
    Direction,
    check_metric,
    check_sequences,
    warn_of_junctions,
)
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.token_sequences import TokenSequence
from mechattn.results import provenance
from mechattn.stats.units import Units


@dataclass(frozen=True)
class Pair:
    """A prompt's two sequences; ``origins`` are the original tokens that both have."""

    id: str
    base: TokenSequence
    source: TokenSequence
    origins: Int[Tensor, " shared"]
    measured: Measured
    denoising: bool

    @property
    def length(self) -> int:
        """The number of tokens of the longer sequence."""
        return max(len(self.base), len(self.source))

    @property
    def answer(self) -> Int[Tensor, " answer"]:
        """The tokens of the answer."""
        return self.base.tokens[self.base.of_segment("answer")]

    def measure(self, logits: Logits, baseline: Logits) -> Float[Tensor, " row"]:
        """The metric of each row, checked; ``base`` are the baseline's logits."""
        values = self.measured(wide(logits), self.answer.to(logits.device), wide(baseline))
        check_metric(values, len(logits), logits.requires_grad)
        return values


@dataclass(frozen=True)
class PairRuns:
    """Both runs of a pair, unpatched; another prompt's source run, and gradients of the metric with
    respect to the base run's outputs, by layer, where they are needed.
    """

    pair: Pair
    base: Run
    source: Run
    partner: Run | None = None
    gradients: Mapping[int, Z] = field(default_factory=dict)

    def measure(self, logits: Logits) -> Float[Tensor, " row"]:
        """The metric of each row; some compare it with the baseline."""
        baseline = self.source if self.pair.denoising else self.base
        return self.pair.measure(logits, baseline.logits)

    @cached_property
    def before(self) -> float:
        """The metric of the base run."""
        return float(self.measure(self.base.logits))

    def effect(self, logits: Logits) -> float:
        """The metric of these logits minus that of the base run; the whole effect with those of the
        source run.
        """
        return float(self.measure(logits)) - self.before


def pairs_of(
    model: HookedModel,
    prompts: Sequence[Prompt],
    condition: Condition,
    metric: Metric,
    direction: Direction,
    seed: int,
) -> tuple[list[Pair], list[Mapping[str, TokenSequence]]]:
    """The pairs of all prompts, and their sequences under "condition" and the baseline.

    Raises:
        MechattnError: They cannot be patched.
    """
    check_choice(Direction, direction=direction)
    metric_of(metric)
    sequences = made_sequences(with_baseline({"condition": condition}), prompts, model, seed)
    check_sequences(model, prompts, sequences)
    warn_of_junctions(model, prompts, [by_condition[BASELINE] for by_condition in sequences])
    denoising = direction == "denoising"
    metrics = measured_by(metric, prompts, model)
    pairs = []
    for prompt, by_condition, measured in zip(prompts, sequences, metrics, strict=True):
        changed = by_condition["condition"]
        baseline = by_condition[BASELINE]
        if denoising:
            base = changed
            source = baseline
        else:
            base = baseline
            source = changed
        shared = changed.origin[changed.origin >= 0].sort().values
        pairs.append(Pair(prompt.id, base, source, shared, measured, denoising))
    return pairs, list(sequences)


def about_of(
    model: HookedModel,
    prompts: Sequence[Prompt],
    condition: Condition,
    metric: Metric,
    direction: Direction,
    seed: int,
) -> dict[str, Any]:
    """What was patched, as data."""
    return {
        "model": provenance.name_of(str(model.cfg.model_name)),
        "prompts": provenance.digest(prompts),
        "condition": provenance.identity(condition),
        "metric": metric_of(metric)[1],
        "direction": direction,
        "seed": seed,
        "versions": provenance.versions(),
    }


def units_of(prompts: Sequence[Prompt]) -> Units:
    """The units of replication; a prompt without a group is its own."""
    return Units.grouped([prompt.group or f"\0{prompt.id}" for prompt in prompts])
