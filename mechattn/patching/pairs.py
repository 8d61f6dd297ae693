"""The two runs of each prompt: which is patched, from which, at which tokens, and what is measured;
and what cannot be patched, told before the first forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    check_variants,
    condition_sequences,
    with_baseline,
)
from mechattn.errors import (
    ModelError,
    OptionError,
    PromptError,
    PromptTooLong,
    check_choice,
    memory_bytes,
    warn,
)
from mechattn.functional.attention import in_working_dtype
from mechattn.model.hooked import HookedModel, original_of
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
from mechattn.patching.patched_runs import SharedTokens, logits_of
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt, as_prompts
from mechattn.prompts.token_sequences import TokenSequence
from mechattn.results import provenance
from mechattn.stats.units import Units

# The effects of a prompt [*axes], those of each control, and the whole effect.
PromptEffects = dict[str, np.ndarray | float]
_SHORTER = (
    "fewer prompts take less, and so do ma.patch(…, controls=()) and, without at=…, attribution"
)

Direction = Literal["denoising", "noising"]


@dataclass(frozen=True, eq=False)
class Pair:
    """A prompt's two sequences; ``origins`` are the original tokens that both have."""

    id: str
    base: TokenSequence
    source: TokenSequence
    origins: SharedTokens
    measure: Measured
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
        values = pair.measure(
            in_working_dtype(logits), pair.answer.to(logits.device), in_working_dtype(baseline)
        )
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
        sequences = condition_sequences(named, self.prompts, self.model, self.seed)
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


def check_gradients(model: HookedModel, metric: Any, direction: str) -> None:
    """Refuse to attribute where there are no gradients, or where all are 0."""
    if getattr(original_of(model), "is_quantized", False):
        raise ModelError(
            f"the weights of {model.cfg.model_name} are quantised and have no gradients: load"
            " it dequantised, or name heads (ma.patch(…, at=…)), which are patched without any"
        )
    if metric == "kl" and direction == "noising":
        raise OptionError(
            'metric="kl" is smallest in the baseline, which direction="noising" patches, so every'
            " gradient is 0: name heads, which are patched without gradients, or choose"
            ' direction="denoising" or another metric'
        )


def check_sequences(
    model: HookedModel, prompts: Sequence[Prompt], sequences: list[dict[str, TokenSequence]]
) -> None:
    """Refuse prompts without an answer, conditions that change more than tokens, and sequences too
    long for the model.
    """
    longest = model.cfg.n_ctx
    predicted_by_inserted = 0  # prompts in which an inserted token predicts the answer's first
    for prompt, by_condition in zip(prompts, sequences, strict=True):
        changed = by_condition["condition"]
        if not changed.inserted.any() and not changed.counterpart:
            raise OptionError(
                f"the condition inserts nothing into prompt {prompt.id}, so both runs are the same"
            )
        if changed.cut_edges is not None or changed.interventions:
            raise OptionError(
                "the condition hides tokens or acts inside the model; patching compares two runs"
                " that differ only in their tokens"
            )
        answer_places = changed.of_segment("answer").nonzero()
        if not len(answer_places):
            raise PromptError(
                f"{prompt.where} has no reference answer for the model to read: use load_prompts(…,"
                " with_answer=True), or Prompt(…, answer=…)"
            )
        if len(changed) > longest:
            raise PromptTooLong(
                f"{prompt.where} has {len(changed):,} tokens with the condition;"
                f" {model.cfg.model_name} takes {longest:,}"
            )
        check_side(prompt, by_condition, model)
        predicted_by_inserted += int(changed.inserted[answer_places[0] - 1])
    check_variants(model, sequences)

    if predicted_by_inserted:
        warn(
            f"in {predicted_by_inserted} of {len(prompts)} prompts the token right before the"
            " answer is an inserted one, which has no counterpart in the baseline: nothing is"
            " patched there, so the answer's first token is not restored. Insert elsewhere, or"
            " begin the answer with a token that the model is sure of"
        )


def warn_of_junctions(
    model: HookedModel, prompts: Sequence[Prompt], baselines: Sequence[TokenSequence]
) -> None:
    """Warn where the answer does not follow the question as a text would: a blank is missing, or a
    line break comes before one. Says what the model would write there.
    """
    suspicious = [index for index, prompt in enumerate(prompts) if _is_odd_junction(prompt)]
    if not suspicious:
        return

    prompt = prompts[suspicious[0]]
    logits = logits_of(model, [baselines[suspicious[0]]])
    likeliest = int(logits[0, 0].argmax())
    separator = ""
    advice = f"write answer={' ' + prompt.answer!r}"
    if prompt.template == "plain":
        separator = "\n"
        advice = 'template="plain" puts a line break there; template="joined" adds nothing'
    junction = f"{prompt.question[-20:]}{separator}{prompt.answer[:20]}"
    warn(
        f"in {len(suspicious)} of {len(prompts)} prompts the answer hardly follows the question: "
        f"prompt {prompt.id} reads {junction!r}, where the model would write "
        f"{model.tokenizer.decode([likeliest])!r}; {advice}"
    )


def _is_odd_junction(prompt: Prompt) -> bool:
    if not prompt.answer or not prompt.question:
        return False
    goes_on = prompt.question[-1].isalpha() and prompt.answer[0].isalpha()
    if prompt.template == "joined":
        return goes_on
    # A line break is meant after a question, not within the sentence that a pair completes.
    is_broken = prompt.answer[0] == " " or (goes_on and bool(prompt.other_answer))
    return prompt.template == "plain" and is_broken


def check_metric(values: Any, rows: int, gradients: bool) -> None:
    """Refuse the values of a custom metric if they are not one number per row, or lack a gradient
    that is needed.
    """
    if not isinstance(values, Tensor) or tuple(values.shape) != (rows,):
        shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise OptionError(
            f"the metric gives {shape} for {rows} rows; give one number per row: a function of"
            " logits [row answer d_vocab] and answer [answer] that returns a tensor [row]"
        )
    if not bool(values.isfinite().all()):
        raise OptionError("the metric gives NaN or infinity, so no effect can be computed")
    if gradients and not values.requires_grad:
        raise OptionError(
            "the metric has no gradient with respect to the logits (like an argmax), so heads"
            " cannot be attributed: name heads, which are patched without gradients"
        )
