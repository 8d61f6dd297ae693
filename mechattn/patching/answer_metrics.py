"""Metrics of the reference answer, from the logits of a run that reads it (teacher forcing)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechattn.errors import OptionError

Logits = Float[Tensor, "row answer d_vocab"]
Named = Literal["logprob", "margin", "kl"]
Metric = Named | Callable[[Logits, Int[Tensor, " answer"]], Float[Tensor, " row"]]
# Logits before each token of the answer, the answer, and the baseline's logits there; returns one number per row.
Measured = Callable[[Logits, Int[Tensor, " answer"], Logits], Float[Tensor, " row"]]

WORDS: Mapping[str, str] = {
    "logprob": "log-probability of the reference answer, in nats",
    "margin": "logit of the reference answer's token above the best other, mean over its tokens",
    "kl": "KL divergence from the baseline's next-token distribution, mean over the answer, in nats",
}


def answer_logprob(logits: Logits, answer: Int[Tensor, " answer"], baseline: Logits) -> Float[Tensor, " row"]:
    """Log-probability of the reference answer, ``Σ_t log p(answer_t | all before)``, in nats."""
    taken = answer.expand(len(logits), -1)[..., None]
    return logits.log_softmax(-1).gather(-1, taken)[..., 0].sum(-1)


def answer_margin(logits: Logits, answer: Int[Tensor, " answer"], baseline: Logits) -> Float[Tensor, " row"]:
    """Margin of the reference answer, ``mean_t (logit[answer_t] − max over all other tokens)``, in logits.

    Above 0 if greedy decoding would give the answer.
    """
    taken = answer.expand(len(logits), -1)[..., None]
    others = logits.scatter(-1, taken, -torch.inf).amax(-1)
    return (logits.gather(-1, taken)[..., 0] - others).mean(-1)


def divergence(logits: Logits, answer: Int[Tensor, " answer"], baseline: Logits) -> Float[Tensor, " row"]:
    """KL divergence from the baseline, ``mean_t Σ_w p_baseline(w) · log (p_baseline(w) / p(w))``, in nats."""
    expected = baseline.log_softmax(-1)
    return (expected.exp() * (expected - logits.log_softmax(-1))).sum(-1).mean(-1)


_NAMED: Mapping[str, Measured] = {"logprob": answer_logprob, "margin": answer_margin, "kl": divergence}


def metric_of(metric: Metric) -> tuple[Measured, str]:
    """The function of a metric, and its description."""
    if callable(metric):
        own = metric
        return lambda logits, answer, baseline: own(logits, answer), getattr(metric, "__name__", "a function")
    if metric not in get_args(Named):
        known = ", ".join(map(repr, get_args(Named)))
        raise OptionError(f"metric={metric!r}: choose one of {known}, or give a function of logits and answer")
    return _NAMED[metric], WORDS[metric]
