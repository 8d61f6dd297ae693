"""The two runs of each prompt: which is patched, from which, at which tokens, and what is
measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from mechattn.axes import BASELINE
from mechattn.engine.request_checks import made_sequences, with_baseline
from mechattn.errors import check_choice, warn
from mechattn.model.head_parts import wide
from mechattn.model.hooked import HookedModel
from mechattn.model.load import load_model
from mechattn.patching.answer_metrics import (
    Logits,
    Measured,
    Metric,
    chosen_metric,
    measured_by,
    metric_words,
)
from mechattn.patching.effects import Patching
from mechattn.patching.patched_runs import SharedTokens
from mechattn.patching.refusals import (
    Direction,
    check_metric,
    check_sequences,
    warn_of_junctions,
)
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt, as_prompts
from mechattn.prompts.token_sequences import TokenSequence
from mechattn.results import provenance
from mechattn.results.result import memory_bytes
from mechattn.stats.units import Units

# The effects of a prompt [*axes], those of each control, and the whole effect.
PromptEffects = dict[str, np.ndarray | float]
_SHORTER = (
    "fewer prompts take less, and so do ma.patch(…, controls=()) and, without at=…, attribution"
)


@dataclass(frozen=True, eq=False)
class Pair:
    """A prompt's two sequences; ``origins`` are the original tokens that both have."""

    id: str
    base: TokenSequence
    source: TokenSequence
    origins: SharedTokens
    measured: Measured
    denoising: bool
    seed: int = 0  # of its random steps

    @property
    def length(self) -> int:
        """The number of tokens of the longer sequence."""
        return max(len(self.base), len(self.source))

    @property
    def baseline(self) -> TokenSequence:
        """The sequence without the condition."""
        return self.source if self.denoising else self.base

    @property
    def answer(self) -> Int[Tensor, " answer"]:
        """The tokens of the answer."""
        return self.base.tokens[self.base.of_segment("answer")]


@dataclass(frozen=True, eq=False)
class Unpatched:
    """The logits of a pair's two unpatched runs, from which every effect is counted."""

    pair: Pair
    base: Logits
    source: Logits

    def measure(self, logits: Logits) -> Float[Tensor, " row"]:
        """The metric of each row, checked; "kl" compares it with the baseline."""
        pair = self.pair
        baseline = self.source if pair.denoising else self.base
        values = pair.measured(wide(logits), pair.answer.to(logits.device), wide(baseline))
        check_metric(values, len(logits), logits.requires_grad)
        return values

    @cached_property
    def before(self) -> float:
        """The metric of the base run."""
        return float(self.measure(self.base))

    @property
    def whole(self) -> float:
        """The whole effect: the metric of the source run minus that of the base run."""
        return float(self.measure(self.source)) - self.before

    def effects(self, logits: Logits) -> Float[np.ndarray, " row"]:
        """The metric of each row minus that of the base run, in float64."""
        return self.measure(logits).double().cpu().numpy() - self.before


@dataclass(frozen=True)
class PatchingRequest:
    """What ``patch``, ``edges``, ``paths`` and ``circuit`` are all asked."""

    model: HookedModel
    prompts: Sequence[Prompt]
    condition: Condition
    metric: Metric
    direction: Direction
    memory: int  # bytes
    seed: int

    @cached_property
    def pairs(self) -> list[Pair]:
        """The two sequences of each prompt.

        Raises:
            MechattnError: They cannot be patched.
        """
        named = with_baseline({"condition": self.condition})
        sequences = made_sequences(named, self.prompts, self.model, self.seed)
        check_sequences(self.model, self.prompts, sequences)
        measures = measured_by(self.metric, self.prompts, self.model)

        pairs = []
        denoising = self.direction == "denoising"
        for index, (prompt, by_condition) in enumerate(zip(self.prompts, sequences, strict=True)):
            changed = by_condition["condition"]
            base = by_condition[BASELINE]
            source = changed
            if denoising:
                base, source = source, base
            shared = changed.origin[changed.origin >= 0].sort().values
            seed = self.seed + index
            pairs.append(Pair(prompt.id, base, source, shared, measures[index], denoising, seed))
        warn_of_junctions(self.model, self.prompts, [pair.baseline for pair in pairs])
        return pairs

    @property
    def units(self) -> Units:
        """The units of replication; a prompt without a group is its own."""
        return Units.grouped([prompt.group or f"\0{prompt.id}" for prompt in self.prompts])

    def patched(
        self,
        pairs: Sequence[Pair],
        effects_of: Callable[[Pair], PromptEffects],
        axes: Mapping[str, Sequence[Any]],
        method: str,
        **about: Any,
    ) -> Patching:
        """The effects of each pair, patched one by one."""
        batches = [[pair] for pair in pairs]

        def effects_of_batch(batch: Sequence[Pair]) -> list[PromptEffects]:
            return [effects_of(pair) for pair in batch]

        return self.patched_in_batches(batches, effects_of_batch, axes, method, **about)

    def patched_in_batches(
        self,
        batches: Sequence[Sequence[Pair]],
        effects_of: Callable[[Sequence[Pair]], Sequence[PromptEffects]],
        axes: Mapping[str, Sequence[Any]],
        method: str,
        **about: Any,
    ) -> Patching:
        """The effects of each pair [*axes] and its whole effect, by prompt, with what was patched
        as data."""
        total = len(self.prompts)
        by_id: dict[str, PromptEffects] = {}
        start = perf_counter()
        with tqdm(total=total, desc="patching", unit="prompt", delay=2) as progress:
            for batch in batches:
                is_first = not by_id
                for pair, effects in zip(batch, effects_of(batch), strict=True):
                    by_id[pair.id] = effects
                progress.update(len(batch))

                minutes = (perf_counter() - start) / 60 * total / len(by_id)
                if is_first and minutes > 1:
                    warn(f"about {minutes:.0f} min for {total} prompts; {_SHORTER}")

        ids = [prompt.id for prompt in self.prompts]
        coords = {"prompt": ids, **axes}
        variables = {}
        for name in by_id[ids[0]]:
            values = np.stack([by_id[id][name] for id in ids])
            variables[name] = (tuple(coords)[: values.ndim], values)
        record = {
            "model": provenance.name_of(str(self.model.cfg.model_name)),
            "prompts": provenance.digest(self.prompts),
            "condition": provenance.identity(self.condition),
            "metric": metric_words(self.metric),
            "direction": self.direction,
            "seed": self.seed,
            "versions": provenance.versions(),
            "method": method,
        }
        return Patching(xr.Dataset(variables, coords), self.units, record | about)


def request_of(
    model: Any,
    prompts: Any,
    condition: Condition,
    metric: Metric | None,
    direction: Direction,
    memory: str,
    seed: int,
) -> PatchingRequest:
    """The request with its model loaded, and with "logit_diff" as the metric where every prompt has
    another answer."""
    budget = memory_bytes(memory)
    check_choice(Direction, direction=direction)
    prompts = as_prompts(prompts)
    metric = chosen_metric(metric, prompts)
    metric_words(metric)  # refuses what is no metric
    return PatchingRequest(load_model(model), prompts, condition, metric, direction, budget, seed)
