"""Does a server run the model that was asked for? Texts tell its tokenizer, a few greedy answers
the rest.

Answers and log-probabilities are compared with those of the local model, where its weights are
loaded, and otherwise with the server's own first answers, which tells no more than that it stays the
same.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mechattn.errors import ModelError, warn
from mechattn.evaluation.generate import Request, Sampling, answers, native_of
from mechattn.evaluation.server_completions import Completion, CompletionRequest, Connection
from mechattn.model.checkpoint import UnloadedModel
from mechattn.model.hooked import alone
from mechattn.model.several_devices import device_of
from mechattn.model.weights import weights_hash
from mechattn.results.provenance import name_of
from mechattn.stats.intervals import wilson_interval

Question = tuple[str, str]  # a prompt's id and the name of a condition
ANSWERS = 16
TOKENS = 32
# The least share of answers that are the local model's: on the toys bfloat16 has 1, and noise of
# 30 % of the weights' spread 0.75 at most.
ALIKE = 0.9
# The same against the server's own first answers.
ITSELF = 0.6
# The largest mean difference of log-probabilities in nats: on the toys bfloat16 gives 0.005, 8 bits
# 0.016, 4 bits 0.35.
LOGPROB = 0.05
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
    counts = [completions[text].read for text in _TEXTS]
    if not connection.server.verify or None in counts:
        return

    added = [(count or 0) - local for count, local in zip(counts, local_counts, strict=True)]
    if min(added) < 0 or max(added) > _MOST_ADDED:
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
    prompt_logprobs: Sequence[float]
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
    """Questions to a server, the answers with which its own are compared, and the figures.

    Args:
        connection: The connection to the server.
        requests: The questions as the server gets them.
        references: The answers with which its own are compared.
        least: The share of its answers that must be alike.
        about: What is recorded of the probe.
    """

    connection: Connection
    requests: Mapping[Question, CompletionRequest]
    references: Mapping[Question, Reference]
    least: float
    about: dict[str, Any]

    def again(self) -> str | None:
        """Ask the questions again; why the server is refused, if so."""
        return self.compared(dict(self.connection.completions(self.requests.items())))

    def compared(self, completions: Mapping[Question, Completion]) -> str | None:
        """Compare answers with the references, and record the figures; why the server is refused,
        if so: fewer answers are alike, or log-probabilities are too far apart.

        Args:
            completions: The server's answer to each question.
        """
        count = len(completions)
        alike = 0
        differences = []
        for question, reference in self.references.items():
            completion = completions[question]
            alike += reference.agrees(completion.text)
            pairs = zip(reference.prompt_logprobs, completion.prompt_logprobs, strict=False)
            differences += [abs(own - theirs) for own, theirs in pairs]

        low, high = wilson_interval(alike, count)
        figures = {"alike": alike / count, "alike_low": low, "alike_high": high}
        difference = 0.0
        if differences:
            difference = sum(differences) / len(differences)
            figures["logprob_difference"] = difference
        self.about["rounds"].append(figures)

        is_good = alike >= self.least * count and difference <= LOGPROB
        if is_good or not self.connection.server.verify:
            return None
        return (
            f"against {self.about['against']}: {100 * alike / count:.0f} % [{100 * low:.0f},"
            f" {100 * high:.0f}] of {count} greedy answers are alike, log-probabilities are"
            f" {difference:.3f} nats apart (at least {100 * self.least:.0f} %, at most {LOGPROB}"
            " nats)"
        )


def begun(
    connection: Connection,
    requests: Mapping[Question, Request],
    sent: Mapping[Question, CompletionRequest],
    sampling: Sampling,
    before: Mapping[str, Any],
) -> Probe:
    """Ask a server the first questions, and compare its answers with the model's.

    Args:
        connection: The connection.
        requests: What is asked for.
        sent: What the server gets in its place.
        sampling: That of the run; its seed draws the questions.
        before: What the file says about earlier probes, if the run is resumed.

    Raises:
        ServerError: It is not the model, or no longer that of the run that is resumed.
    """
    first_texts = {(prompt, name): text for prompt, name, text in before.get("texts", ())}
    questions = [question for question in first_texts if question in requests]
    is_resumed = bool(questions)
    if not is_resumed:
        drawn = random.Random(sampling.seed)
        count = min(ANSWERS, len(requests))
        questions = drawn.sample([*requests], count)

    longest = max(len(requests[question].sequence) for question in questions)
    new_tokens = min(TOKENS, connection.longest - longest)
    asked = {
        question: replace(sent[question], new_tokens=new_tokens, prompt_logprobs=0)
        for question in questions
    }
    completions = dict(connection.completions(asked.items()))

    # What a run is resumed with: later probes have the same questions.
    texts = [[*question, completions[question].text] for question in questions]
    about = {
        "model": name_of(connection.model),
        "sent": {str: "text", list: "token ids"}[type(asked[questions[0]].prompt)],
        "counted": all(completion.read is not None for completion in completions.values()),
        "texts": before["texts"] if is_resumed else texts,
        "against": "its answers when this run began",
        "rounds": list(before.get("rounds", ())),
    }

    native = _native(connection.reader)
    if native is None:
        least = ITSELF
        references = {}
        for question, completion in completions.items():
            first_text = first_texts.get(question, completion.text)
            references[question] = Reference(first_text, completion.prompt_logprobs)
        _warn_of_other_weights(connection)
    else:
        least = ALIKE
        dtype = str(next(native.parameters()).dtype).removeprefix("torch.")
        weights = weights_hash(connection.reader.loaded)
        about["against"] = f"the model here ({dtype}, weights {weights})"
        local_requests = {question: requests[question] for question in questions}
        references = _local_references(native, connection.reader, local_requests, new_tokens)

    # Without a local model, the first answers of a run have nothing to be compared with.
    probe = Probe(connection, asked, references, least, about)
    if native is not None or is_resumed:
        reason = probe.compared(completions)
        if reason is not None:
            raise connection.server.error(
                f"is not the model, {reason}. Is it quantised, another revision, or does it change"
                " the prompt? With verify=False its answers are accepted, and these figures are"
                " recorded"
            )

    if sampling.temperature > 0:
        _check_samples(connection, asked, completions)
    return probe


def _native(model: UnloadedModel) -> Any | None:
    """The local model without hooks, if it is loaded and can generate."""
    if model.loaded is None:
        return None
    try:
        return native_of(model.loaded)
    except ModelError:
        return None


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


def _local_references(
    native: Any, reader: UnloadedModel, requests: Mapping[Question, Request], new_tokens: int
) -> dict[Question, Reference]:
    """The local model's answers."""
    local_answers = answers(native, list(requests.values()), new_tokens, reader.end)
    references = {}
    for (question, request), answer in zip(requests.items(), local_answers, strict=True):
        prompt_ids = request.sequence.tokens.tolist()
        references[question] = reference_of(
            native, reader.tokenizer, prompt_ids, list(answer.tokens)
        )
    return references


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
    of_tokens = logprobs[:-1].gather(-1, tokens[0, 1:, None])[:, 0]

    # From the prompt's last token on, which predicts the answer's first.
    split = len(prompt) - 1
    gaps = -logprobs[split:].topk(2).values.diff()[:, 0]

    starts = [answer[:length] for length in range(len(answer) + 1)]
    texts = tokenizer.batch_decode(starts, skip_special_tokens=True)
    steps = [text.rstrip("�") for text in texts]
    return Reference(steps[-1], of_tokens[:split].tolist(), steps, gaps.tolist())
