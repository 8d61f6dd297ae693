"""Metrics of the reference answer, from the logits of a run that reads it (teacher forcing)."""

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

Logits = Float[Tensor, "row answer d_vocab"]  # before each token of the answer
Answer = Int[Tensor, " answer"]  # its tokens
Values = Float[Tensor, " row"]  # of a metric
MetricName = Literal["logprob", "logit_diff", "logit_margin", "kl"]
Metric = MetricName | Callable[[Logits, Answer], Values]
# From a run's logits, the answer and the baseline's logits to one number per row.
Measure = Callable[[Logits, Answer, Logits], Values]

METRIC_WORDS: Mapping[str, str] = {
    "logprob": "log-probability of the reference answer, in nats",
    "logit_diff": (
        "logit of the answer minus that of the other answer, at the first token in which they"
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
    """Log-probability of the reference answer, ``Σ_t log p(answer_t | all before)``, in nats."""
    logprobs = logits.log_softmax(-1)
    return logprobs[:, torch.arange(len(answer)), answer].sum(-1)


def answer_margin(logits: Logits, answer: Answer) -> Values:
    """Margin of the reference answer, ``mean_t (logit[answer_t] − max over all other tokens)``, in
    logits.

    Above 0 if greedy decoding would give the answer; with several tokens their mean may be above 0
    without.
    """
    index = torch.arange(len(answer))
    without_answer = logits.clone()
    without_answer[:, index, answer] = -torch.inf
    margins = logits[:, index, answer] - without_answer.amax(-1)
    return margins.mean(-1)


def answer_difference(
    logits: Logits,
    answer: Answer,
    other_tokens: Int[Tensor, " other"],
) -> Values:
    """Logit difference of two answers, ``logit[answer_t] − logit[other_t]`` at the first t where
    they differ, in logits.

    Args:
        logits: Logits before each token of the answer.
        answer: The tokens of the reference answer.
        other_tokens: The tokens of the other answer, at least one of which differs.
    """
    shorter = min(len(answer), len(other_tokens))
    differs = answer[:shorter] != other_tokens[:shorter].to(answer.device)
    first = int(differs.nonzero()[0])
    return logits[:, first, answer[first]] - logits[:, first, other_tokens[first]]


def divergence(logits: Logits, baseline: Logits) -> Values:
    """KL divergence from the baseline, ``mean_t Σ_w p_baseline(w) · log (p_baseline(w) / p(w))``,
    in nats.
    """
    expected = baseline.log_softmax(-1)
    log_ratio = expected - logits.log_softmax(-1)
    token_divergence = (expected.exp() * log_ratio).sum(-1)
    return token_divergence.mean(-1)


def chosen_metric(metric: Metric | None, prompts: Sequence[Prompt]) -> Metric:
    """The metric; by default "logit_diff" where every prompt has another answer, else "logprob".

    Raises:
        OptionError: There is no such metric.
    """
    if metric is None:
        if all(prompt.other_answer for prompt in prompts):
            return "logit_diff"
        return "logprob"

    if not callable(metric):
        check_choice(MetricName, metric=metric)
    return metric


def metric_words(metric: Metric) -> str:
    """What a metric measures; of a function its name."""
    if callable(metric):
        return getattr(metric, "__name__", "a function")
    return METRIC_WORDS[metric]


def measures_of(metric: Metric, prompts: Sequence[Prompt], model: Any) -> list[Measure]:
    """The function that measures each prompt.

    Raises:
        PromptError: "logit_diff" is asked of a prompt that cannot have it.
    """
    if callable(metric):
        return [of_answer(metric)] * len(prompts)
    if metric == "logprob":
        return [of_answer(answer_logprob)] * len(prompts)
    if metric == "logit_margin":
        return [of_answer(answer_margin)] * len(prompts)
    if metric == "kl":
        return [lambda logits, answer, baseline: divergence(logits, baseline)] * len(prompts)

    measures = []
    for prompt in prompts:
        other_tokens = other_answer_tokens(prompt, model)
        measures.append(of_answer(partial(answer_difference, other_tokens=other_tokens)))
    return measures


def of_answer(metric: Callable[[Logits, Answer], Values]) -> Measure:
    """The measure of a metric that does not compare with the baseline."""
    return lambda logits, answer, baseline: metric(logits, answer)


def other_answer_tokens(prompt: Prompt, model: Any) -> Int[Tensor, " other"]:
    """The tokens of a prompt's other answer, as the model would read it.

    Raises:
        PromptError: It has no other answer, or no logits distinguish it from the reference answer.
    """
    if not prompt.other_answer:
        raise PromptError(
            f'{prompt.where} has no other answer, which metric="logit_diff" needs: '
            "load_prompts(…, other_answer=<field>) or Prompt(…, other_answer=…)"
        )
    if isinstance(prompt.other_answer, str):
        with_other = replace(prompt, answer=prompt.other_answer, answer_tokens=())
    else:
        with_other = replace(prompt, answer_tokens=prompt.other_answer)

    answer = _answer_tokens(prompt, model)
    other_tokens = _answer_tokens(with_other, model)
    shorter = min(len(answer), len(other_tokens))
    if answer[:shorter].equal(other_tokens[:shorter]):
        raise PromptError(
            f"both answers of {prompt.where} are the same tokens up to the end of the shorter, so"
            ' no logits tell them apart: begin each with its blank (" he", not "he"), or give other'
            " answers"
        )
    return other_tokens


def _answer_tokens(prompt: Prompt, model: Any) -> Answer:
    """The tokens of a prompt's answer, as the model reads it."""
    sequence = tokenize(prompt, model)
    return sequence.tokens[sequence.of_segment("answer")]
