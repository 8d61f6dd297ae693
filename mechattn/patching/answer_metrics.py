"""Metrics of the reference answer, from logits of a run that reads it (teacher forcing)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechattn.errors import PromptError, check_choice
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.tokenization import tokenize

Logits = Float[Tensor, "row answer d_vocab"]  # those that predict each token of the answer
Answer = Int[Tensor, " answer"]  # the tokens of the answer
Values = Float[Tensor, " row"]  # the value of a metric in each row
MetricName = Literal["logprob", "logit_diff", "logit_margin", "kl"]
Metric = MetricName | Callable[[Logits, Answer], Values]
# A function of logits, the answer and the baseline's logits that returns one number per row.
Measure = Callable[[Logits, Answer, Logits], Values]

METRIC_WORDS: Mapping[str, str] = {
    "logprob": "log-probability of the reference answer, in nats",
    "logit_diff": (
        "logit of the answer minus that of the other answer, at the first token at which they"
        " differ"
    ),
    "logit_margin": (
        "logit of the reference answer's token above the best other, mean over its tokens"
    ),
    "kl": (
        "KL divergence from the baseline's next-token distribution, mean over the answer, in nats"
    ),
}


def answer_logprob(logits: Logits, answer: Answer) -> Values:
    """Log-probability of the reference answer, ``Σ_t log p(answer_t | all earlier tokens)``, in
    nats.
    """
    logprobs = logits.log_softmax(-1)
    return logprobs[:, torch.arange(len(answer)), answer].sum(-1)


def answer_margin(logits: Logits, answer: Answer) -> Values:
    """Margin of the reference answer, ``mean_t (logit[answer_t] − max of the other logits)``, in
    logits.

    The margin is positive if greedy decoding gives the answer. The converse holds only for an
    answer of a single token.
    """
    t = torch.arange(len(answer))
    other_logits = logits.clone()
    other_logits[:, t, answer] = -torch.inf
    margins = logits[:, t, answer] - other_logits.amax(-1)
    return margins.mean(-1)


def answer_difference(
    logits: Logits,
    answer: Answer,
    other_tokens: Int[Tensor, " other"],
) -> Values:
    """Logit difference of two answers, ``logit[answer_t] − logit[other_t]`` at the first t at which
    they differ, in logits.

    Args:
        logits: The logits that predict each token of the answer.
        answer: The tokens of the reference answer.
        other_tokens: The tokens of the other answer. They must differ from those of the reference
            answer before the shorter of the two ends.
    """
    t = first_difference(answer, other_tokens.to(answer.device))
    return logits[:, t, answer[t]] - logits[:, t, other_tokens[t]]


def first_difference(tokens: Int[Tensor, " pos"], other_tokens: Int[Tensor, " other"]) -> int:
    """The first position at which two sequences of tokens differ.

    If one sequence is the beginning of the other, it is the length of the shorter.
    """
    shorter_length = min(len(tokens), len(other_tokens))
    agrees = tokens[:shorter_length] == other_tokens[:shorter_length]
    return int(agrees.long().cumprod(0).sum())  # the number of tokens before it


def divergence(logits: Logits, baseline: Logits) -> Values:
    """KL divergence from the baseline, ``mean_t Σ_w p_baseline(w) · log (p_baseline(w) / p(w))``,
    in nats.
    """
    baseline_logprobs = baseline.log_softmax(-1)
    log_ratio = baseline_logprobs - logits.log_softmax(-1)
    token_divergence = (baseline_logprobs.exp() * log_ratio).sum(-1)
    return token_divergence.mean(-1)


def chosen_metric(metric: Metric | None, prompts: Sequence[Prompt]) -> Metric:
    """The given metric, or the default: "logit_diff" if every prompt has another answer, and
    "logprob" otherwise.

    Raises:
        OptionError: The metric is not a function or one of the known names.
    """
    if metric is None:
        if all(prompt.other_answer for prompt in prompts):
            return "logit_diff"
        return "logprob"

    if not callable(metric):
        check_choice(MetricName, metric=metric)
    return metric


def measures_of(metric: Metric, prompts: Sequence[Prompt], model: Any) -> list[Measure]:
    """The function that computes the metric of each prompt.

    Raises:
        PromptError: The metric is "logit_diff", and a prompt has no other answer or one that no
            logits distinguish from the reference answer.
    """
    if metric == "logit_diff":
        measures = []
        for prompt in prompts:
            other_tokens = other_answer_tokens(prompt, model)
            measures.append(of_answer(partial(answer_difference, other_tokens=other_tokens)))
        return measures

    if metric == "kl":
        return [lambda logits, answer, baseline: divergence(logits, baseline)] * len(prompts)
    functions = {"logprob": answer_logprob, "logit_margin": answer_margin}
    function = metric if callable(metric) else functions[metric]
    return [of_answer(function)] * len(prompts)


def of_answer(metric: Callable[[Logits, Answer], Values]) -> Measure:
    """Turn a metric that does not need the baseline into a measure, which ignores it."""
    return lambda logits, answer, baseline: metric(logits, answer)


def other_answer_tokens(prompt: Prompt, model: Any) -> Int[Tensor, " other"]:
    """The tokens of a prompt's other answer, as the model would read it.

    Raises:
        PromptError: The prompt has no other answer, or one whose tokens equal those of the
            reference answer until the shorter of the two ends.
    """
    if not prompt.other_answer:
        raise PromptError(
            f'{prompt.where} has no other answer, which metric="logit_diff" needs: '
            "load_prompts(…, other_answer=<field>) or Prompt(…, other_answer=…)"
        )
    if isinstance(prompt.other_answer, str):
        other_prompt = replace(prompt, answer=prompt.other_answer, answer_tokens=())
    else:
        other_prompt = replace(prompt, answer_tokens=prompt.other_answer)

    answer = _answer_tokens(prompt, model)
    other_tokens = _answer_tokens(other_prompt, model)
    if first_difference(answer, other_tokens) == min(len(answer), len(other_tokens)):
        raise PromptError(
            f"both answers of {prompt.where} are the same tokens up to the end of the shorter, so"
            ' no logits distinguish them: begin each with its space (" he", not "he"), or give'
            " other answers"
        )
    return other_tokens


def _answer_tokens(prompt: Prompt, model: Any) -> Answer:
    """The tokens of a prompt's answer, as the model reads it."""
    sequence = tokenize(prompt, model)
    return sequence.tokens[sequence.of_segment("answer")]
