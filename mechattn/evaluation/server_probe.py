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

import torch

from mechattn.errors import ModelError, warn
from mechattn.evaluation.generate import Sampling, answers, native_of
from mechattn.evaluation.generating_rows import Question, Request
from mechattn.evaluation.server import Completion, CompletionRequest, Connection
from mechattn.model.checkpoint import UnloadedModel
from mechattn.model.hooked import alone, device_of
from mechattn.model.weights import weights_hash
from mechattn.prompts.token_sequences import TokenSequence
from mechattn.results.provenance import name_of
from mechattn.stats.intervals import wilson_interval

ANSWERS = 16
TOKENS = 32
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

    pairs = zip(counts, local_counts, strict=True)
    added = [count - local_count for count, local_count in pairs if count is not None]  # for mypy
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
class References:
    """The answers with which a server's are compared.

    Args:
        source: Whose answers they are, in words.
        answers: An answer to each question.
        least: The share of the server's answers that must be alike.
    """

    source: str
    answers: Mapping[Question, Reference]
    least: float


@dataclass(frozen=True)
class Probe:
    """Questions to a server, as it gets them; the answers with which its own are compared; and what
    is recorded."""

    connection: Connection
    requests: Mapping[Question, CompletionRequest]
    references: References
    about: dict[str, Any]

    def again(self) -> str | None:
        """Ask the questions again, and compare; why the server is refused, if so."""
        return self.compare(dict(self.connection.completions(self.requests.items())))

    def compare(self, completions: Mapping[Question, Completion]) -> str | None:
        """Record how far a server's answers are the references; why it is refused, if so."""
        figures = self.figures(completions)
        self.about["rounds"].append(figures)
        return self.refusal(figures)

    def figures(self, completions: Mapping[Question, Completion]) -> dict[str, float]:
        """The share of answers that are alike, with its interval, and the mean difference of
        log-probabilities in nats, if there are any to compare."""
        alike = 0
        differences = []
        for question, reference in self.references.answers.items():
            completion = completions[question]
            alike += reference.agrees(completion.text)
            pairs = zip(reference.prompt_logprobs, completion.prompt_logprobs, strict=False)
            differences += [abs(own - theirs) for own, theirs in pairs]

        low, high = wilson_interval(alike, len(completions))
        figures = {"alike": alike / len(completions), "alike_low": low, "alike_high": high}
        if differences:
            figures["logprob_difference"] = sum(differences) / len(differences)
        return figures

    def refusal(self, figures: Mapping[str, float]) -> str | None:
        """Why a server is refused, if so: fewer answers are alike, or log-probabilities are too far
        apart."""
        references = self.references
        difference = figures.get("logprob_difference")
        is_near = difference is None or difference <= LARGEST_LOGPROB_DIFFERENCE
        is_alike = figures["alike"] >= references.least
        if (is_near and is_alike) or not self.connection.server.verify:
            return None

        share, low, high = (100 * figures[name] for name in ("alike", "alike_low", "alike_high"))
        reason = (
            f"against {references.source}: {share:.0f} % [{low:.0f}, {high:.0f}] of"
            f" {len(references.answers)} greedy answers are alike (at least"
            f" {100 * references.least:.0f} %)"
        )
        if difference is None:
            return reason
        return (
            f"{reason}, log-probabilities are {difference:.3f} nats apart (at most"
            f" {LARGEST_LOGPROB_DIFFERENCE})"
        )


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
    first_answers = {
        (prompt, name): Reference(*answer)  # a text, and log-probabilities unless it is an old file
        for prompt, name, *answer in earlier.get("texts", ())
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

    references = _local_answers(connection.reader, sequences, questions, new_tokens)
    # Without the weights here, the first answers of a run have nothing to be compared with.
    has_references = references is not None or is_resumed
    if references is None:
        _warn_of_other_weights(connection)
        source = "its answers when this run began"
        references = References(source, first_answers, LEAST_ALIKE_ITSELF)

    sends_text = isinstance(requests[questions[0]].prompt, str)
    about = {
        "model": name_of(connection.model),
        "sent": "text" if sends_text else "token ids",
        "counted": all(completion.prompt_tokens is not None for completion in completions.values()),
        # What a run is resumed with: later probes have the same questions.
        "texts": [
            [*question, answer.text, answer.prompt_logprobs]
            for question, answer in first_answers.items()
        ],
        "against": references.source,
        "rounds": list(earlier.get("rounds", ())),
    }
    probe = Probe(connection, requests, references, about)
    if has_references:
        _check_is_model(probe, completions)
    if sampling.temperature > 0:
        _check_samples(connection, requests, completions)
    return probe


def _check_is_model(probe: Probe, completions: Mapping[Question, Completion]) -> None:
    """Refuse a server whose first answers are not the model's."""
    reason = probe.compare(completions)
    if reason is not None:
        raise probe.connection.server.error(
            f"is not the model, {reason}. Is it quantised, another revision, or does it change the"
            " prompt? With verify=False its answers are accepted, and these figures are recorded"
        )


def _local_answers(
    reader: UnloadedModel,
    sequences: Mapping[Question, TokenSequence],
    questions: Sequence[Question],
    new_tokens: int,
) -> References | None:
    """The answers of the model here; None where its weights are not loaded or it cannot
    generate."""
    if reader.loaded is None:
        return None
    try:
        native = native_of(reader.loaded)
    except ModelError:
        return None

    requests = [Request(prompt, sequences[prompt, name], 0, name) for prompt, name in questions]
    greedy = answers(native, requests, new_tokens, reader.end)
    references = {}
    for request, answer in zip(requests, greedy, strict=True):
        prompt_ids = request.sequence.tokens.tolist()
        references[request.question] = reference_of(
            native, reader.tokenizer, prompt_ids, list(answer.tokens)
        )

    dtype = str(next(native.parameters()).dtype).removeprefix("torch.")
    source = f"the model here ({dtype}, weights {weights_hash(reader.loaded)})"
    return References(source, references, ALIKE)


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
