"""Checks that a server runs the requested model, by its tokenizer and by some greedy answers.

Answers and log-probabilities are compared with those of the local model if its weights are loaded.
Otherwise they are compared with the server's own first answers, which only shows that the server
has not changed since.
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

MOST_QUESTIONS = 16  # of those of the run, drawn at random
MOST_ANSWER_TOKENS = 32
# The least fraction of answers that agree with the local model's. On the toys it is 1 in bfloat16,
# and at most 0.75 with noise of 30 % of the weights' spread.
LEAST_ALIKE_TO_MODEL = 0.9
# The same for the server's own first answers. It is lower, since without the local model's logits
# tokens that rounding exchanged are not known.
LEAST_ALIKE_TO_ITSELF = 0.6
# The largest mean difference of log-probabilities in nats. On the toys it is 0.005 in bfloat16,
# 0.016 in 8 bits and 0.35 in 4 bits.
LARGEST_LOGPROB_DIFFERENCE = 0.05
_TIE = 0.5  # nats; rounding may exchange two tokens whose log-probabilities are nearer than this
_HOT = 2.0  # a temperature at which hardly any answer equals the greedy one
_HALF_CHARACTER = "\ufffd"  # the end of a text whose last token is only a part of a character

# Words, code, digits and letters, of which different tokenizers make different numbers of tokens.
_TEXTS = [
    "The quick brown fox jumps over 13 lazy dogs, and internationalisation follows.",
    "def area(radius):\n    return 3.14159 * radius**2  # \\pi r^{2}",
    "Zürich, naïve café, 東京, 12,345.67 €; Größenordnung, непонятно.",
]
_MOST_ADDED = 3  # tokens that a server may put around a text, such as a BOS

# The token ids of each question that a server gets, or a text that gives the same ids.
SentPrompts = Mapping[Question, list[int] | str]
Requests = Mapping[Question, CompletionRequest]
Completions = Mapping[Question, Completion]


def check_tokenizer(connection: Connection) -> None:
    """Compare how many tokens the server and the local tokenizer make of three texts.

    Nothing is compared if the server is not to be verified, or does not report the numbers.

    Raises:
        ServerError: The server has another tokenizer.
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
    """An answer with which that of a server is compared.

    Args:
        text: The answer.
        prompt_logprobs: The log-probability of each of the prompt's tokens after the first.
        gaps: How many nats the likeliest token of the local model lay above the second likeliest
            at each step, by the text so far; empty for an answer of the server.
    """

    text: str
    prompt_logprobs: Sequence[float] = ()
    gaps: Mapping[str, float] = field(default_factory=dict)

    def agrees(self, text: str) -> bool:
        """Whether another answer is the same, or begins to differ where rounding may decide."""
        text = text.rstrip(_HALF_CHARACTER)
        if text == self.text.rstrip(_HALF_CHARACTER):
            return True

        # The first token after the longest common beginning, which comes last here, may differ if
        # another one was about as likely. What follows it is not compared.
        gaps = [gap for beginning, gap in self.gaps.items() if text.startswith(beginning)]
        return bool(gaps) and gaps[-1] < _TIE


@dataclass(frozen=True)
class Probe:
    """Questions to a server, and the answers with which its own are compared.

    Args:
        connection: The connection to the server.
        requests: The requests, by question.
        references: The reference for each answer, by question.
        least_alike: The least fraction of the server's answers that must agree.
        record: What provenance has of the probe: "against", whose answers the references are, in
            words; "rounds", the figures of each comparison so far; and facts about the server.
    """

    connection: Connection
    requests: Requests
    references: Mapping[Question, Reference]
    least_alike: float
    record: dict[str, Any]

    def compare(self, completions: Completions) -> None:
        """Compare the server's answers to all questions, and record the figures of this round.

        The figures are "alike", the fraction of answers that agree, with its interval from
        "alike_low" to "alike_high"; and "logprob_difference", the mean absolute difference of
        log-probabilities in nats, if there are any to compare.

        Raises:
            ServerError: The answers are not those of the model, and the server is to be verified.
        """
        alike_count = 0
        differences = []
        for question, reference in self.references.items():
            completion = completions[question]
            alike_count += reference.agrees(completion.text)
            # Without log-probabilities from the server, there are no pairs.
            pairs = zip(reference.prompt_logprobs, completion.prompt_logprobs, strict=False)
            differences += [abs(expected - served) for expected, served in pairs]

        count = len(self.references)
        alike = alike_count / count
        low, high = wilson_interval(alike_count, count)
        figures = {"alike": alike, "alike_low": low, "alike_high": high}
        is_passed = alike >= self.least_alike
        words = (
            f"{100 * alike:.0f} % [{100 * low:.0f}, {100 * high:.0f}] of {count} greedy answers are"
            f" alike (at least {100 * self.least_alike:.0f} %)"
        )
        if differences:
            difference = sum(differences) / len(differences)
            figures["logprob_difference"] = difference
            is_passed = is_passed and difference <= LARGEST_LOGPROB_DIFFERENCE
            words += (
                f", log-probabilities are {difference:.3f} nats apart (at most"
                f" {LARGEST_LOGPROB_DIFFERENCE})"
            )

        self.record["rounds"].append(figures)
        server = self.connection.server
        if server.verify and not is_passed:
            raise server.error(
                f"does not run the model, against {self.record['against']}: {words}. Is it"
                " quantised, another revision, or does it change the prompt? Its answers since the"
                " last comparison, if any, are dropped; serve the model, and call evaluate again"
                " with the same arguments. With verify=False its answers are accepted, and these"
                " figures are recorded"
            )


def start_probe(
    connection: Connection,
    questions: Mapping[Question, Request],
    sent_prompts: SentPrompts,
    sampling: Sampling,
    stored_record: Mapping[str, Any],
) -> Probe:
    """Send some questions to a server, and compare its answers with the model's.

    Args:
        connection: The connection.
        questions: All questions of the run.
        sent_prompts: The prompts as the server gets them.
        sampling: How the run samples answers; its seed draws the questions of the probe.
        stored_record: The record of the run's probe if the run is resumed; empty otherwise.

    Raises:
        ServerError: The server fails, does not run the model, no longer runs that of the run that
            is resumed, or does not sample.
    """
    # A run that is resumed keeps the questions of its first probe.
    first_references = _stored_references(stored_record, sent_prompts)
    is_resumed = len(first_references) > 0
    probe_questions = list(first_references)
    if not is_resumed:
        question_count = min(MOST_QUESTIONS, len(sent_prompts))
        generator = random.Random(sampling.seed)
        probe_questions = generator.sample(list(sent_prompts), question_count)

    probe_requests = [questions[question] for question in probe_questions]
    longest = max(len(request.sequence) for request in probe_requests)
    new_tokens = min(MOST_ANSWER_TOKENS, connection.n_ctx - longest)
    completion_requests = {
        request.question: CompletionRequest(
            sent_prompts[request.question],
            len(request.sequence),
            new_tokens,
            asks_prompt_logprobs=True,
        )
        for request in probe_requests
    }
    completions = dict(connection.completions(completion_requests))
    if not is_resumed:
        for question in probe_questions:
            completion = completions[question]
            first_references[question] = Reference(completion.text, completion.prompt_logprobs)

    record = _record(connection, completion_requests, completions, first_references)
    record["rounds"] = [*stored_record.get("rounds", ())]
    local_model = _local_model(connection.reader)
    if local_model is None:
        _warn_of_other_weights(connection)
        record["against"] = "its answers when this run began"
        probe = Probe(
            connection, completion_requests, first_references, LEAST_ALIKE_TO_ITSELF, record
        )
    else:
        weights = weights_hash(connection.reader.loaded)
        record["against"] = f"the model here ({dtype_name(local_model)}, weights {weights})"
        references = _local_references(local_model, connection.reader, probe_requests, new_tokens)
        probe = Probe(connection, completion_requests, references, LEAST_ALIKE_TO_MODEL, record)

    # Without the weights here, there is nothing to compare the first answers of a run with.
    if local_model is not None or is_resumed:
        probe.compare(completions)

    if sampling.temperature > 0:
        _check_samples(connection, completion_requests, completions)
    return probe


@alone
@torch.no_grad()
def reference_of(native: Any, tokenizer: Any, prompt: list[int], answer: list[int]) -> Reference:
    """The reference from a greedy answer of the local model, which reads it in one pass.

    Args:
        native: The model without hooks.
        tokenizer: The model's tokenizer.
        prompt: The token ids of the prompt.
        answer: The token ids of the answer.
    """
    tokens = torch.tensor([prompt + answer], device=device_of(native))
    logits = native(input_ids=tokens).logits[0]
    logprobs = logits.double().log_softmax(-1)
    token_logprobs = logprobs[:-1].gather(-1, tokens[0, 1:, None])[:, 0]

    # The prompt's last token predicts the answer's first, so the gaps begin there.
    split = len(prompt) - 1
    likeliest = logprobs[split:].topk(2).values
    gaps = likeliest[:, 0] - likeliest[:, 1]

    beginnings = [answer[:length] for length in range(len(answer) + 1)]
    texts = tokenizer.batch_decode(beginnings, skip_special_tokens=True)
    texts = [text.rstrip(_HALF_CHARACTER) for text in texts]
    gap_after = dict(zip(texts, gaps.tolist(), strict=True))
    return Reference(texts[-1], token_logprobs[:split].tolist(), gap_after)


def _stored_references(
    stored_record: Mapping[str, Any], sent_prompts: SentPrompts
) -> dict[Question, Reference]:
    """The server's first answers from a record, to those of its questions that are sent again."""
    references = {}
    for prompt, name, text, prompt_logprobs in stored_record.get("texts", ()):
        question = Question(prompt, name)
        if question in sent_prompts:
            references[question] = Reference(text, prompt_logprobs)
    return references


def _record(
    connection: Connection,
    requests: Requests,
    completions: Completions,
    first_references: Mapping[Question, Reference],
) -> dict[str, Any]:
    """The facts about a server in the record of its probe, with its first answers."""
    are_texts = any(isinstance(request.prompt, str) for request in requests.values())
    return {
        "model": name_of(connection.model),
        "sent": "text" if are_texts else "token ids",
        "counted": all(completion.prompt_tokens is not None for completion in completions.values()),
        "texts": [
            [*question, reference.text, reference.prompt_logprobs]
            for question, reference in first_references.items()
        ],
    }


def _local_model(reader: UnloadedModel) -> Any:
    """The model here without hooks; None if its weights are not loaded or it cannot generate."""
    if reader.loaded is None:
        return None
    try:
        return native_of(reader.loaded)
    except ModelError:
        return None


def _warn_of_other_weights(connection: Connection) -> None:
    """Warn that without the weights only a change of the server can be noticed."""
    if connection.server.verify:
        warn(
            f"the server at {connection.server.address} has the tokenizer of"
            f" {connection.reader.cfg.model_name}. Without the weights here it can only be checked"
            " whether the server changes: a fine-tuned, quantised or differently sized model with"
            " this tokenizer would not be noticed. To compare the model itself, give evaluate a"
            " loaded one, ma.load_model(…), or write weights = true in [evaluation.server] of a"
            " config"
        )


def _local_references(
    native: Any, reader: UnloadedModel, requests: Sequence[Request], new_tokens: int
) -> dict[Question, Reference]:
    """The references from the greedy answers of the model here, by question."""
    greedy_answers = answers(native, requests, new_tokens, reader.end)
    references = {}
    for request, answer in zip(requests, greedy_answers, strict=True):
        prompt_ids = request.sequence.tokens.tolist()
        references[request.question] = reference_of(
            native, reader.tokenizer, prompt_ids, list(answer.tokens)
        )
    return references


def _check_samples(
    connection: Connection, requests: Requests, greedy_completions: Completions
) -> None:
    """Refuse a server that gives greedy answers at any temperature.

    Raises:
        ServerError: It is such a server.
    """
    hot_requests = {
        question: replace(request, temperature=_HOT) for question, request in requests.items()
    }
    sampled = dict(connection.completions(hot_requests))
    if all(sampled[question].text == greedy_completions[question].text for question in requests):
        raise connection.server.error(
            f"does not sample: {len(sampled)} answers at temperature {_HOT:g} are the greedy ones."
            " `transformers serve` samples only if generation_config.json of the checkpoint says"
            " do_sample = true"
        )
