"""Does a server run the model that was asked for? Texts tell its tokenizer, a few greedy answers
the rest.

Answers and log-probabilities are compared with those of the local model, where its weights are
loaded, and otherwise with the server's own first answers, which tells no more than that it stays
the same.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mechattn.errors import ModelError, warn
from mechattn.evaluation.generate import Sampling, answers, dtype_of, native_of
from mechattn.evaluation.generating_rows import Question, Request
from mechattn.evaluation.server import Completion, CompletionRequest, Connection
from mechattn.model.hooked import alone, device_of
from mechattn.model.unloaded import UnloadedModel
from mechattn.model.weights import weights_hash
from mechattn.prompts.token_sequences import TokenSequence
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

# Words, code, digits and letters of which each tokenizer makes other numbers of tokens.
_TEXTS = [
    "The quick brown fox jumps over 13 lazy dogs, and internationalisation follows.",
    "def area(radius):\n    return 3.14159 * radius**2  # \\pi r^{2}",
    "Zürich, naïve café, 東京, 12,345.67 €; Größenordnung, непонятно.",
]
_MOST_ADDED = 3  # tokens that a server may put around a text, such as a BOS


def check_tokenizer(connection: Connection) -> None:
    """Compare how many tokens the server and the local tokenizer read of three texts.

    Raises:
        ServerError: The numbers are those of another tokenizer.
    """
    reader = connection.reader
    texts_ids = reader.tokenizer(_TEXTS, add_special_tokens=False)["input_ids"]
    local_counts = [len(ids) for ids in texts_ids]

    requests = [(text, CompletionRequest(text, None, 1)) for text in _TEXTS]
    completions = dict(connection.completions(requests))
    counts = [completions[text].prompt_tokens for text in _TEXTS]
    if not connection.server.verify or None in counts:
        return

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
        steps: Of the local model's answer, the text after each token.
        gaps: How much likelier each token was than the second likeliest, in nats.
    """

    text: str
    prompt_logprobs: Sequence[float] = ()
    steps: Sequence[str] = ()
    gaps: Sequence[float] = ()

    def agrees(self, text: str) -> bool:
        """Whether another answer is this one; where the local model is undecided, either is
        right."""
        text = text.rstrip("�")  # which is half a character
        if text == self.text.rstrip("�"):
            return True

        # The first token that differs is forgiven where another one was about as likely.
        equal_steps = sum(text.startswith(step) for step in self.steps)
        return equal_steps > 0 and self.gaps[equal_steps - 1] < _TIE


@dataclass(frozen=True)
class Probe:
    """Questions to a server, and the answers with which its own are compared.

    Args:
        connection: The connection.
        requests: The questions, as the server gets them.
        references: An answer to each.
        source: Whose answers these are, in words.
        least: The share of the server's answers that must be alike.
        about: What is recorded.
    """

    connection: Connection
    requests: Mapping[Question, CompletionRequest]
    references: Mapping[Question, Reference]
    source: str
    least: float
    about: dict[str, Any]

    def again(self) -> str | None:
        """Ask the questions again, and compare; why the server is refused, if so."""
        return self.compare(dict(self.connection.completions(self.requests.items())))

    def compare(self, completions: Mapping[Question, Completion]) -> str | None:
        """Record how far a server's answers are the references; why it is refused, if so.

        Recorded are the share of answers that are alike, with its interval, and the mean difference
        of log-probabilities in nats, if there are any to compare.
        """
        alike_count = 0
        differences = []
        for question, reference in self.references.items():
            completion = completions[question]
            alike_count += reference.agrees(completion.text)
            pairs = zip(reference.prompt_logprobs, completion.prompt_logprobs, strict=False)
            differences += [abs(own - theirs) for own, theirs in pairs]

        count = len(self.references)
        alike = alike_count / count
        low, high = wilson_interval(alike_count, count)
        figures = {"alike": alike, "alike_low": low, "alike_high": high}
        is_model = alike >= self.least
        reason = (
            f"against {self.source}: {100 * alike:.0f} % [{100 * low:.0f}, {100 * high:.0f}] of"
            f" {count} greedy answers are alike (at least {100 * self.least:.0f} %)"
        )
        if differences:
            difference = sum(differences) / len(differences)
            figures["logprob_difference"] = difference
            is_model = is_model and difference <= LARGEST_LOGPROB_DIFFERENCE
            reason += (
                f", log-probabilities are {difference:.3f} nats apart (at most"
                f" {LARGEST_LOGPROB_DIFFERENCE})"
            )

        self.about["rounds"].append(figures)
        if is_model or not self.connection.server.verify:
            return None
        return reason


def start_probe(
    connection: Connection,
    sequences: Mapping[Question, TokenSequence],
    sent: Mapping[Question, CompletionRequest],
    sampling: Sampling,
    earlier: Mapping[str, Any],
) -> Probe:
    """Ask a server the first questions, and compare its answers with the model's.

    Args:
        connection: The connection.
        sequences: All questions of the run.
        sent: Those that the server gets, as it gets them.
        sampling: That of the run; its seed draws the questions.
        earlier: What the file says about the probe of the run, if it is resumed.

    Raises:
        ServerError: It is not the model, or no longer that of the run that is resumed.
    """
    # A run that is resumed has the questions of its first probe.
    first_answers = {
        (prompt, name): Reference(text, prompt_logprobs)
        for prompt, name, text, prompt_logprobs in earlier.get("texts", ())
        if (prompt, name) in sent
    }
    is_resumed = bool(first_answers)
    questions = list(first_answers)
    if not is_resumed:
        generator = random.Random(sampling.seed)
        questions = generator.sample([*sent], min(ANSWERS, len(sent)))

    longest_prompt = max(len(sequences[question]) for question in questions)
    new_tokens = min(TOKENS, connection.longest - longest_prompt)
    requests = {
        question: replace(sent[question], new_tokens=new_tokens, prompt_logprobs=0)
        for question in questions
    }
    completions = dict(connection.completions(requests.items()))
    if not is_resumed:
        first_answers = {
            question: Reference(completions[question].text, completions[question].prompt_logprobs)
            for question in questions
        }

    native = _native_of_loaded(connection.reader)
    if native is None:
        _warn_of_other_weights(connection)
        references = first_answers
        source = "its answers when this run began"
        least = LEAST_ALIKE_ITSELF
    else:
        asked = {question: sequences[question] for question in questions}
        references = _local_answers(native, connection.reader, asked, new_tokens)
        weights = weights_hash(connection.reader.loaded)
        source = f"the model here ({dtype_of(native)}, weights {weights})"
        least = ALIKE

    about = _about(connection, requests, completions, first_answers)
    about["against"] = source
    about["rounds"] = list(earlier.get("rounds", ()))
    probe = Probe(connection, requests, references, source, least, about)
    reason = None
    # Without the weights here, the first answers of a run have nothing to be compared with.
    if native is not None or is_resumed:
        reason = probe.compare(completions)
    if reason is not None:
        raise connection.server.error(
            f"is not the model, {reason}. Is it quantised, another revision, or does it change the"
            " prompt? With verify=False its answers are accepted, and these figures are recorded"
        )
    if sampling.temperature > 0:
        _check_samples(connection, requests, completions)
    return probe


def _about(
    connection: Connection,
    requests: Mapping[Question, CompletionRequest],
    completions: Mapping[Question, Completion],
    first_answers: Mapping[Question, Reference],
) -> dict[str, Any]:
    """What is recorded of a server, and with which answers a run is resumed."""
    sent = "token ids"
    first_request = next(iter(requests.values()))
    if isinstance(first_request.prompt, str):
        sent = "text"
    return {
        "model": name_of(connection.model),
        "sent": sent,
        "counted": all(completion.prompt_tokens is not None for completion in completions.values()),
        "texts": [
            [*question, answer.text, answer.prompt_logprobs]
            for question, answer in first_answers.items()
        ],
    }


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
    native: Any,
    reader: UnloadedModel,
    sequences: Mapping[Question, TokenSequence],
    new_tokens: int,
) -> dict[Question, Reference]:
    """The greedy answers of the model here to some questions."""
    requests = [
        Request(prompt, sequence, 0, name) for (prompt, name), sequence in sequences.items()
    ]
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


def _check_samples(
    connection: Connection,
    asked: Mapping[Question, CompletionRequest],
    greedy: Mapping[Question, Completion],
) -> None:
    """Refuse a server that gives greedy answers at any temperature."""
    hot_requests = [
        (question, replace(request, temperature=_HOT)) for question, request in asked.items()
    ]
    hot = dict(connection.completions(hot_requests))
    if all(hot[question].text == greedy[question].text for question in asked):
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
    steps = [text.rstrip("�") for text in texts]
    return Reference(steps[-1], token_logprobs[:split].tolist(), steps, gaps.tolist())
