"""Does a server run the model that was asked for? Texts tell its tokenizer, a few greedy answers
the rest.

Answers and log-probabilities are compared with those of the local model, where its weights are
loaded, and otherwise with the server's own first answers, which tells no more than that it stays
the same.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from mechattn.errors import ModelError, warn
from mechattn.evaluation.generate import Sampling, answers, dtype_name, native_of
from mechattn.evaluation.generating_rows import Question, Request
from mechattn.evaluation.server import Completion, CompletionRequest, Connection
from mechattn.model.hooked import alone, device_of
from mechattn.model.unloaded import UnloadedModel
from mechattn.model.weights import weights_hash
from mechattn.results.provenance import name_of
from mechattn.stats.intervals import wilson_interval

ANSWERS = 16  # at most, of the run's questions
TOKENS = 32  # of each answer, at most
# The least share of answers that are the local model's: on the toys bfloat16 has 1, and noise of
# 30 % of the weights' spread 0.75 at most.
ALIKE = 0.9
# The same against the server's own first answers.
LEAST_ALIKE_ITSELF = 0.6
# The largest mean difference of log-probabilities in nats: on the toys bfloat16 gives 0.005, 8 bits
# 0.016, 4 bits 0.35.
LARGEST_LOGPROB_DIFFERENCE = 0.05
_TIE = 0.5  # nats between the two likeliest tokens: rounding may exchange them
_HOT = 2.0  # a temperature at which no two answers are equal
_HALF_CHARACTER = "\ufffd"  # at the end of a text whose last token is a part of a character

# Words, code, digits and letters of which each tokenizer makes other numbers of tokens.
_TEXTS = [
    "The quick brown fox jumps over 13 lazy dogs, and internationalisation follows.",
    "def area(radius):\n    return 3.14159 * radius**2  # \\pi r^{2}",
    "Zürich, naïve café, 東京, 12,345.67 €; Größenordnung, непонятно.",
]
_MOST_ADDED = 3  # tokens that a server may put around a text, such as a BOS

# Of each question that a server gets, its token ids, or a text that gives the same ids.
Sent = Mapping[Question, list[int] | str]
Requests = Mapping[Question, CompletionRequest]
Completions = Mapping[Question, Completion]


def check_tokenizer(connection: Connection) -> None:
    """Compare how many tokens the server and the local tokenizer read of three texts.

    Raises:
        ServerError: The numbers are those of another tokenizer.
    """
    requests = {text: CompletionRequest(text, None, new_tokens=1) for text in _TEXTS}
    completions = dict(connection.completions(requests))
    counts = [completions[text].prompt_tokens for text in _TEXTS]
    if not connection.server.verify or None in counts:
        return

    reader = connection.reader
    texts_ids = reader.tokenizer(_TEXTS, add_special_tokens=False)["input_ids"]
    local_counts = [len(ids) for ids in texts_ids]
    added = np.array(counts) - local_counts
    if added.min() < 0 or added.max() > _MOST_ADDED:
        name = reader.cfg.model_name
        raise connection.server.error(
            f"has another tokenizer, so it is another model: it reads three texts as {counts}"
            f" tokens, and {name} as {local_counts}. Serve {name}, or name the model that is served"
        )


@dataclass(frozen=True)
class Reference:
    """An answer with which a server's is compared.

    Args:
        text: The answer.
        prompt_logprobs: The log-probability of each of the prompt's tokens after the first.
        gaps: Of the local model's answer, how much likelier each token was than the second
            likeliest, in nats, by the text before it; empty for a server's answer.
    """

    text: str
    prompt_logprobs: Sequence[float] = ()
    gaps: Mapping[str, float] = field(default_factory=dict)

    def agrees(self, text: str) -> bool:
        """Whether another answer is this one; where the local model is undecided, either is
        right."""
        text = text.rstrip(_HALF_CHARACTER)
        if text == self.text.rstrip(_HALF_CHARACTER):
            return True

        # The first token that differs is forgiven where another one was about as likely.
        gaps = [gap for beginning, gap in self.gaps.items() if text.startswith(beginning)]
        return bool(gaps) and gaps[-1] < _TIE


@dataclass(frozen=True)
class Probe:
    """Questions to a server, and the answers with which its own are compared.

    Args:
        requests: The questions.
        references: An answer to each.
        least: The share of the server's answers that must be alike.
        about: What is recorded: "against", whose answers the references are, in words; "rounds",
            the figures of each comparison so far; and facts about the server.
    """

    requests: Requests
    references: Mapping[Question, Reference]
    least: float
    about: Mapping[str, Any]

    def compared(self, completions: Completions) -> Probe:
        """The probe after a further round: how far these answers are the references.

        A round has "alike", the share of answers that are alike, with its interval from "alike_low"
        to "alike_high"; and "logprob_difference", the mean difference of log-probabilities in nats,
        if there are any to compare.

        Args:
            completions: The server's answers to all questions.
        """
        alike_count = 0
        differences = []
        for question, reference in self.references.items():
            completion = completions[question]
            alike_count += reference.agrees(completion.text)
            # A server that reports no log-probabilities has nothing to compare.
            pairs = zip(reference.prompt_logprobs, completion.prompt_logprobs, strict=False)
            differences += [abs(own - served) for own, served in pairs]

        count = len(self.references)
        low, high = wilson_interval(alike_count, count)
        figures = {"alike": alike_count / count, "alike_low": low, "alike_high": high}
        if differences:
            figures["logprob_difference"] = sum(differences) / len(differences)
        return replace(self, about={**self.about, "rounds": [*self.about["rounds"], figures]})

    @property
    def is_passed(self) -> bool:
        """Whether the server is the model by the last round."""
        figures = self.about["rounds"][-1]
        is_near = figures.get("logprob_difference", 0.0) <= LARGEST_LOGPROB_DIFFERENCE
        return is_near and figures["alike"] >= self.least

    @property
    def comparison(self) -> str:
        """The last round in words."""
        figures = self.about["rounds"][-1]
        low = 100 * figures["alike_low"]
        high = 100 * figures["alike_high"]
        words = (
            f"against {self.about['against']}: {100 * figures['alike']:.0f} % [{low:.0f},"
            f" {high:.0f}] of {len(self.references)} greedy answers are alike (at least"
            f" {100 * self.least:.0f} %)"
        )
        if "logprob_difference" in figures:
            words += (
                f", log-probabilities are {figures['logprob_difference']:.3f} nats apart (at most"
                f" {LARGEST_LOGPROB_DIFFERENCE})"
            )
        return words


def start_probe(
    connection: Connection,
    questions: Mapping[Question, Request],
    sent: Sent,
    sampling: Sampling,
    earlier: Mapping[str, Any],
) -> Probe:
    """Ask a server the first questions, and compare its answers with the model's.

    Args:
        connection: The connection.
        questions: All questions of the run.
        sent: What the server gets.
        sampling: That of the run; its seed draws the questions.
        earlier: The record of the run's probe, if the run is resumed; empty otherwise.

    Raises:
        ServerError: It is not the model, or no longer that of the run that is resumed.
    """
    # A run that is resumed has the questions of its first probe.
    first_answers = _stored_answers(earlier, sent)
    is_resumed = bool(first_answers)
    asked = list(first_answers)
    if not is_resumed:
        asked = random.Random(sampling.seed).sample([*sent], min(ANSWERS, len(sent)))

    lengths = {question: len(questions[question].sequence) for question in asked}
    new_tokens = min(TOKENS, connection.longest - max(lengths.values()))
    requests = {
        question: CompletionRequest(sent[question], length, new_tokens, asks_prompt_logprobs=True)
        for question, length in lengths.items()
    }
    completions = dict(connection.completions(requests))
    if not is_resumed:
        first_answers = {
            question: Reference(completions[question].text, completions[question].prompt_logprobs)
            for question in asked
        }

    native = _native_of_loaded(connection.reader)
    if native is None:
        _warn_of_other_weights(connection)
        references = first_answers
        source = "its answers when this run began"
        least = LEAST_ALIKE_ITSELF
    else:
        asked_here = [questions[question] for question in asked]
        references = _local_answers(native, connection.reader, asked_here, new_tokens)
        weights = weights_hash(connection.reader.loaded)
        source = f"the model here ({dtype_name(native)}, weights {weights})"
        least = ALIKE

    about = _about(connection, requests, completions, first_answers)
    about["against"] = source
    about["rounds"] = earlier.get("rounds", [])
    probe = Probe(requests, references, least, about)

    # Without the weights here, the first answers of a run have nothing to be compared with.
    if native is not None or is_resumed:
        probe = probe.compared(completions)
        _check_is_model(connection, probe)
    if sampling.temperature > 0:
        _check_samples(connection, requests, completions)
    return probe


def _about(
    connection: Connection,
    requests: Requests,
    completions: Completions,
    first_answers: Mapping[Question, Reference],
) -> dict[str, Any]:
    """What is recorded of a server, and with which answers a run is resumed."""
    sent = "token ids"
    if any(isinstance(request.prompt, str) for request in requests.values()):
        sent = "text"
    texts = []
    for question, answer in first_answers.items():
        texts.append([*question, answer.text, answer.prompt_logprobs])
    return {
        "model": name_of(connection.model),
        "sent": sent,
        "counted": all(completion.prompt_tokens is not None for completion in completions.values()),
        "texts": texts,
    }


def _check_is_model(connection: Connection, probe: Probe) -> None:
    """Refuse a server whose first answers are not those of the model."""
    if connection.server.verify and not probe.is_passed:
        raise connection.server.error(
            f"is not the model, {probe.comparison}. Is it quantised, another revision, or does it"
            " change the prompt? With verify=False its answers are accepted, and these figures are"
            " recorded"
        )


def _stored_answers(earlier: Mapping[str, Any], sent: Sent) -> dict[Question, Reference]:
    """The first answers of a run that is resumed, to the questions that it still has."""
    answers_by_question = {}
    for prompt, name, text, prompt_logprobs in earlier.get("texts", ()):
        if (prompt, name) in sent:
            answers_by_question[prompt, name] = Reference(text, prompt_logprobs)
    return answers_by_question


def _native_of_loaded(reader: UnloadedModel) -> Any:
    """The model here without hooks; None where its weights are not loaded or it cannot
    generate."""
    if reader.loaded is None:
        return None
    try:
        return native_of(reader.loaded)
    except ModelError:
        return None


def _local_answers(
    native: Any, reader: UnloadedModel, requests: Sequence[Request], new_tokens: int
) -> dict[Question, Reference]:
    """The greedy answers of the model here to some questions."""
    greedy = answers(native, requests, new_tokens, reader.end)
    references = {}
    for request, answer in zip(requests, greedy, strict=True):
        prompt_ids = request.sequence.tokens.tolist()
        references[request.question] = reference_of(
            native, reader.tokenizer, prompt_ids, list(answer.tokens)
        )
    return references


def _warn_of_other_weights(connection: Connection) -> None:
    """Say what cannot be told without the weights."""
    if connection.server.verify:
        warn(
            f"the server at {connection.server.address} has the tokenizer of"
            f" {connection.reader.cfg.model_name}. Without the weights here nothing more can be"
            " told than whether it stays the same: a fine-tuned, quantised or differently sized"
            " model with this tokenizer would not be noticed. To compare the model itself, give"
            " evaluate a loaded one, ma.load_model(…), or a config weights = true in"
            " [evaluation.server]"
        )


def _check_samples(connection: Connection, requests: Requests, greedy: Completions) -> None:
    """Refuse a server that gives greedy answers at any temperature."""
    hot_requests = {
        question: replace(request, temperature=_HOT) for question, request in requests.items()
    }
    hot = dict(connection.completions(hot_requests))
    if all(completion.text == greedy[question].text for question, completion in hot.items()):
        raise connection.server.error(
            f"does not sample: {len(hot)} answers at temperature {_HOT:g} are the greedy ones."
            " `transformers serve` samples only if generation_config.json of the checkpoint says"
            " do_sample = true"
        )


@alone
@torch.no_grad()
def reference_of(native: Any, tokenizer: Any, prompt: list[int], answer: list[int]) -> Reference:
    """The local model's answer, with its log-probabilities in one pass.

    Args:
        native: The model without hooks.
        tokenizer: Its tokenizer.
        prompt: The token ids of the prompt.
        answer: Those of its answer, which it has generated greedily.
    """
    tokens = torch.tensor([prompt + answer], device=device_of(native))
    logits = native(input_ids=tokens).logits[0]
    logprobs = logits.double().log_softmax(-1)
    token_logprobs = logprobs[:-1].gather(-1, tokens[0, 1:, None])[:, 0]

    # From the prompt's last token on, which predicts the answer's first.
    split = len(prompt) - 1
    likeliest = logprobs[split:].topk(2).values
    gaps = likeliest[:, 0] - likeliest[:, 1]

    starts = [answer[:length] for length in range(len(answer) + 1)]
    texts = tokenizer.batch_decode(starts, skip_special_tokens=True)
    texts = [text.rstrip(_HALF_CHARACTER) for text in texts]
    gap_after = dict(zip(texts, gaps.tolist(), strict=True))
    return Reference(texts[-1], token_logprobs[:split].tolist(), gap_after)
