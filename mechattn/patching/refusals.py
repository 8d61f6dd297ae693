"""What cannot be patched, told before the first forward pass; and a metric's values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from mechattn.engine.request_checks import check_side, check_variants
from mechattn.errors import ModelError, OptionError, PromptError, PromptTooLong, warn
from mechattn.model.hooked import HookedModel, original_of
from mechattn.patching.patched_runs import logits_of
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.token_sequences import TokenSequence

Direction = Literal["denoising", "noising"]


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
        if changed.edge_mask is not None or changed.interventions:
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
            f"in {predicted_by_inserted} of {len(prompts)} prompts the token right before the answer"
            " is an inserted one, which has no counterpart in the baseline: nothing is patched there,"
            " so the answer's first token is not restored. Insert elsewhere, or begin the answer with"
            " a token that the model is sure of"
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
