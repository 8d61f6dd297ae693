"""The two sequences of each prompt, the metric that compares their runs, and patching requests.

Sequences that cannot be patched are refused before any forward pass of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import Any, Literal

import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from mechattn.axes import BASELINE
from mechattn.engine.request_checks import (
    check_side,
    check_size,
    check_variants,
    condition_sequences,
    with_baseline,
)
from mechattn.errors import (
    ModelError,
    OptionError,
    PromptError,
    check_choice,
    check_counts,
    memory_bytes,
    warn,
)
from mechattn.functional.attention import in_working_dtype
from mechattn.model.hooked import HookedModel, original_of
from mechattn.model.load import load_model
from mechattn.patching.answer_metrics import (
    METRIC_WORDS,
    Logits,
    Measure,
    Metric,
    chosen_metric,
    measures_of,
)
from mechattn.patching.effects import Patching, only_rises
from mechattn.patching.patched_runs import SharedTokens, answer_positions, logits_of
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt, as_prompts
from mechattn.prompts.token_sequences import TokenSequence
from mechattn.results import provenance
from mechattn.stats.units import Units

Direction = Literal["denoising", "noising"]
# The variables of ``Patching.effects`` for one prompt, by name: the effects [*axes], those of each
# control, the whole effect, and where it is needed the metric of the base run.
PromptEffects = Mapping[str, np.ndarray | float]
_OTHER = "other version"  # the name of the condition; the other name is that of the baseline


@dataclass(frozen=True, eq=False)
class Pair:
    """The two sequences of a prompt, and how their runs are compared.

    Args:
        id: The id of the prompt.
        base: The sequence that is patched.
        source: The sequence from whose run activations are taken.
        origins: The original tokens that both sequences have, in ascending order.
        measure: The metric.
        denoising: Whether the source is the baseline; otherwise the base is.
        seed: The seed of the prompt's random steps.
    """

    id: str
    base: TokenSequence
    source: TokenSequence
    origins: SharedTokens
    measure: Measure
    denoising: bool
    seed: int = 0

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
class UnpatchedLogits:
    """The logits of a pair's two unpatched runs, from which all effects are measured."""

    pair: Pair
    base_logits: Logits
    source_logits: Logits

    def measure(self, logits: Logits) -> Float[Tensor, " row"]:
        """The metric of each row, which "kl" computes relative to the baseline.

        Raises:
            OptionError: A metric of the user's own does not return one finite number per row, or
                lacks a gradient that is needed.
        """
        pair = self.pair
        baseline_logits = self.source_logits if pair.denoising else self.base_logits
        values = pair.measure(
            in_working_dtype(logits),
            pair.answer.to(logits.device),
            in_working_dtype(baseline_logits),
        )
        _check_metric(values, len(logits), logits.requires_grad)
        return values

    @cached_property
    def base_metric(self) -> float:
        """The metric of the base run."""
        return float(self.measure(self.base_logits))

    @property
    def whole(self) -> float:
        """The whole effect: the metric of the source run minus that of the base run."""
        return float(self.measure(self.source_logits)) - self.base_metric

    def effects(self, logits: Logits) -> Float[np.ndarray, " row"]:
        """The metric of each row minus that of the base run, in float64."""
        return self.measure(logits).double().cpu().numpy() - self.base_metric


@dataclass(frozen=True)
class PatchingRequest:
    """The arguments that ``patch``, ``edges``, ``paths`` and ``circuit`` share, checked."""

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
            MechattnError: A prompt or the condition cannot be used for patching.
        """
        conditions = with_baseline({_OTHER: self.condition})
        sequences = condition_sequences(conditions, self.prompts, self.model, self.seed)
        _check_sequences(self.model, self.prompts, sequences)
        measures = measures_of(self.metric, self.prompts, self.model)

        pairs = []
        denoising = self.direction == "denoising"
        for index, prompt in enumerate(self.prompts):
            baseline = sequences[index][BASELINE]
            other_version = sequences[index][_OTHER]
            # The baseline has all original tokens, so both share those of the other version.
            origins = other_version.origin[other_version.origin >= 0].sort().values
            base, source = baseline, other_version
            if denoising:
                base, source = other_version, baseline
            pair = Pair(
                id=prompt.id,
                base=base,
                source=source,
                origins=origins,
                measure=measures[index],
                denoising=denoising,
                seed=self.seed + index,
            )
            pairs.append(pair)
        warn_of_junctions(self.model, self.prompts, [pair.baseline for pair in pairs])
        return pairs

    @property
    def shortest(self) -> TokenSequence:
        """The shortest base sequence."""
        return min((pair.base for pair in self.pairs), key=len)

    @property
    def units(self) -> Units:
        """The units of replication: groups of prompts, or single prompts if there are no groups."""
        # ``as_prompts`` makes sure that either all prompts have a group, or none has.
        return Units.grouped([prompt.group or prompt.id for prompt in self.prompts])

    def of_prompts(self, indices: Iterable[int]) -> PatchingRequest:
        """The same request for some of the prompts, given by their indices."""
        return replace(self, prompts=[self.prompts[index] for index in indices])

    def check_gradients(self) -> None:
        """Refuse to attribute if there are no gradients, or if all gradients are 0.

        Raises:
            ModelError: The weights are quantised.
            OptionError: The metric is "kl" and the direction is "noising".
        """
        if getattr(original_of(self.model), "is_quantized", False):
            raise ModelError(
                f"the weights of {self.model.cfg.model_name} are quantised and have no gradients:"
                ' load it dequantised, or patch heads with method="exact", which needs no gradients'
            )
        if only_rises(self.metric, self.direction):
            raise OptionError(
                'metric="kl" is smallest in the baseline, which direction="noising" patches, so'
                ' every gradient is 0: patch heads with method="exact", which needs no gradients,'
                ' or choose direction="denoising" or another metric'
            )

    def run_patching(
        self,
        batches: Iterable[Mapping[str, PromptEffects]],
        axes: Mapping[str, Sequence[Any]],
        **about: Any,
    ) -> Patching:
        """Collect the effects of all pairs in a ``Patching``, and show the progress.

        Args:
            batches: The effects of each batch of pairs, by the id of the prompt. They are measured
                while this iterates over them.
            axes: The labels of each axis after that of prompts.
            about: Entries of ``Patching.about`` that are added to those of this request, or replace
                them. ``method``, how effects are measured, is required.
        """
        prompt_count = len(self.prompts)
        effects_by_id: dict[str, PromptEffects] = {}
        start = perf_counter()
        with tqdm(total=prompt_count, desc="patching", unit="prompt", delay=2) as progress:
            for batch_index, batch in enumerate(batches):
                effects_by_id |= batch
                progress.update(len(batch))
                if batch_index > 0:
                    continue

                seconds_per_prompt = (perf_counter() - start) / len(batch)
                minutes = seconds_per_prompt * prompt_count / 60
                if minutes > 1:
                    warn(
                        f"about {minutes:.0f} min for {prompt_count} prompts; fewer prompts take"
                        ' less time, and in ma.patch controls=() or method="attribution" does too'
                    )

        coords = {"prompt": [prompt.id for prompt in self.prompts], **axes}
        effects_by_prompt = [effects_by_id[prompt.id] for prompt in self.prompts]
        dims = tuple(coords)
        variables = {}
        for name in effects_by_prompt[0]:
            values = np.stack([effects[name] for effects in effects_by_prompt])
            variables[name] = (dims[: values.ndim], values)  # "whole" has the axis of prompts only
        return Patching(xr.Dataset(variables, coords), self.units, self._about | about)

    @property
    def _about(self) -> dict[str, Any]:
        """The request, as data."""
        if callable(self.metric):
            metric_name = "own function"
            metric_words = getattr(self.metric, "__name__", "a function")
        else:
            metric_name = self.metric
            metric_words = METRIC_WORDS[self.metric]
        return {
            "model": provenance.name_of(str(self.model.cfg.model_name)),
            "prompts": provenance.digest(self.prompts),
            "condition": provenance.identity(self.condition),
            "metric": metric_words,
            "metric_name": metric_name,
            "direction": self.direction,
            "seed": self.seed,
            "versions": provenance.versions(),
        }


def request_of(
    model: Any,
    prompts: Any,
    condition: Condition,
    metric: Metric | None,
    direction: Direction,
    memory: str,
    seed: int,
) -> PatchingRequest:
    """Check the arguments of a public function, load its model, and choose its metric.

    Raises:
        MechattnError: An argument is not allowed, or the model cannot be loaded.
    """
    budget = memory_bytes(memory)
    check_choice(Direction, direction=direction)
    check_counts(0, seed=seed)
    prompts = as_prompts(prompts)
    metric = chosen_metric(metric, prompts)
    return PatchingRequest(load_model(model), prompts, condition, metric, direction, budget, seed)


def warn_of_junctions(
    model: HookedModel, prompts: Sequence[Prompt], baselines: Sequence[TokenSequence]
) -> None:
    """Warn if an answer does not follow its question as in natural text.

    A space may be missing between them, or the template may put a line break there. The warning
    names the first such prompt and the token that the model would write.
    """
    odd_indices = [index for index, prompt in enumerate(prompts) if _is_odd_junction(prompt)]
    if not odd_indices:
        return

    first_index = odd_indices[0]
    prompt = prompts[first_index]
    logits = logits_of(model, [baselines[first_index]])
    likeliest_token = int(logits[0, 0].argmax())
    if prompt.template == "plain":
        separator = "\n"
        advice = 'template="plain" puts a line break there; template="joined" adds nothing'
    else:
        separator = ""
        spaced_answer = f" {prompt.answer}"
        advice = f"write answer={spaced_answer!r}"
    junction = f"{prompt.question[-20:]}{separator}{prompt.answer[:20]}"
    warn(
        f"in {len(odd_indices)} of {len(prompts)} prompts the answer hardly follows the question: "
        f"prompt {prompt.id} reads {junction!r}, where the model would write "
        f"{model.tokenizer.decode([likeliest_token])!r}; {advice}"
    )


def _check_metric(values: Any, rows: int, needs_gradient: bool) -> None:
    """Refuse the values of a custom metric unless they are one finite number per row, with a
    gradient if one is needed.
    """
    is_tensor = isinstance(values, Tensor)
    if not is_tensor or values.shape != (rows,):
        value_words = str(list(values.shape)) if is_tensor else type(values).__name__
        raise OptionError(
            f"the metric gives {value_words} for {rows} rows; give one number per row: a function"
            " of logits [row answer d_vocab] and answer [answer] that returns a tensor [row]"
        )
    if not bool(values.isfinite().all()):
        raise OptionError("the metric gives NaN or infinity, so no effect can be computed")
    if needs_gradient and not values.requires_grad:
        raise OptionError(
            "the metric has no gradient with respect to the logits (like an argmax), so heads"
            ' cannot be attributed: patch them with method="exact", which needs no gradients'
        )


def _check_sequences(
    model: HookedModel, prompts: Sequence[Prompt], sequences: list[dict[str, TokenSequence]]
) -> None:
    """Refuse prompts without an answer, conditions that change nothing or more than tokens, and
    sequences that the model cannot read. Warn if an inserted token predicts the answer.
    """
    predicted_by_inserted = 0  # prompts in which an inserted token predicts the first answer token
    for prompt, by_condition in zip(prompts, sequences, strict=True):
        other_version = by_condition[_OTHER]
        if not other_version.inserted.any() and not other_version.counterpart:
            raise OptionError(
                f"the condition inserts nothing into prompt {prompt.id}, so both runs are the same"
            )
        if other_version.cut_edges is not None or other_version.interventions:
            raise OptionError(
                "the condition hides tokens or acts inside the model, but patching compares two"
                " runs that differ only in their tokens"
            )
        positions = answer_positions(other_version)
        if len(positions) == 0:
            raise PromptError(
                f"{prompt.where} has no reference answer for the model to read: use load_prompts(…,"
                " with_answer=True), or Prompt(…, answer=…)"
            )
        for name, sequence in by_condition.items():
            check_size(prompt, name, sequence, model)
        check_side(prompt, by_condition, model)
        predicted_by_inserted += int(other_version.inserted[positions[0] - 1])
    check_variants(model, sequences)

    if predicted_by_inserted:
        warn(
            f"in {predicted_by_inserted} of {len(prompts)} prompts the token right before the"
            " answer is an inserted one, which has no counterpart in the baseline: nothing is"
            " patched there, so the answer's first token is not restored. Insert elsewhere, or"
            " begin the answer with a token that the model is sure of"
        )


def _is_odd_junction(prompt: Prompt) -> bool:
    """Whether question and answer do not join as in natural text."""
    if not prompt.answer or not prompt.question:
        return False
    letters_meet = prompt.question[-1].isalpha() and prompt.answer[0].isalpha()
    if prompt.template == "joined":
        return letters_meet
    # The template's line break should not precede a space. It is fine after a question, but not
    # inside a sentence that the answer completes, as in prompts with another answer.
    breaks_sentence = letters_meet and bool(prompt.other_answer)
    return prompt.template == "plain" and (prompt.answer[0] == " " or breaks_sentence)
