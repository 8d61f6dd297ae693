"""Does a server run the model that was asked for? Texts tell its tokenizer, a few greedy answers
the rest.

Answers and log-probabilities are compared with those of the local model, where its weights are
loaded, and otherwise with a second run of the server itself, which tells no more than that it stays
the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from mechattn.errors import ModelError, ServerError
from mechattn.evaluation.generate import Request, answers, native_of
from mechattn.evaluation.progress import AnswerBar
from mechattn.evaluation.server_completions import Completion, CompletionRequest, Connection
from mechattn.model.checkpoint import UnloadedModel
from mechattn.model.hooked import alone
from mechattn.model.several_devices import device_of
from mechattn.model.weights import weights_hash
from mechattn.results.provenance import name_of
from mechattn.stats.intervals import wilson_interval

T = TypeVar("T")
Question = tuple[str, str]  # a prompt's id and the name of a condition
# The largest probe, and the share of a run's tokens that all probes together may cost.
ANSWERS = 16
TOKENS = 32
SHARE = 0.1
_FEWEST_ANSWERS = 2
_FEWEST_TOKENS = 4
# The least share of answers that are the local model's: on the toys bfloat16 has 1, and noise of
# 30 % of the weights' spread 0.75 at most.
ALIKE = 0.9
# The same against the server itself at first, and how many fewer may be alike later.
ITSELF = 0.6
WORSE = 0.2
# The largest mean difference of log-probabilities in nats: on the toys bfloat16 gives 0.005, 8 bits
# 0.016, 4 bits 0.35.
LOGPROB = 0.05
_TIE = 0.5  # nats between the two likeliest tokens: rounding may exchange them
_EVERY = 256  # answers, after which a server is probed again
_HOT = 2.0  # a temperature at which no two answers are equal

# Words, code, digits and letters of which each tokenizer makes other numbers of tokens.
_TEXTS = [
    "The quick brown fox jumps over 13 lazy dogs, and internationalisation follows.",
    "def area(radius):\n    return 3.14159 * radius**2  # \\pi r^{2}",
    "Zürich, naïve café, 東京, 12,345.67 €; Größenordnung, непонятно.",
]
_MOST_ADDED = 3  # tokens that a server may put around a text, such as a BOS
_UNEVEN = 1  # tokens by which these may differ from text to text


class NotTheModel(ServerError):
    """A probe finds another model, or one that does not sample."""


def check_tokenizer(connection: Connection) -> None:
    """Compare how many tokens the server and the local tokenizer read of three texts.

    Raises:
        ServerError: The numbers are those of another tokenizer.
    """
    reader = connection.reader
    completions = _asked(connection, [CompletionRequest(text, None, 1) for text in _TEXTS])
    counts = [completion.read for completion in completions if completion.read is not None]
    if not connection.server.verify or not counts:
        return
    texts_ids = reader.tokenizer(_TEXTS, add_special_tokens=False)["input_ids"]
    local_counts = [len(ids) for ids in texts_ids]
    added = [count - local for count, local in zip(counts, local_counts, strict=True)]
    if min(added) < 0 or max(added) > min(_MOST_ADDED, min(added) + _UNEVEN):
        raise connection.server.error(
            f"has another tokenizer, so it is another model: it reads three texts as {counts}"
            f" tokens, and {reader.cfg.model_name} as {local_counts}. Serve"
            f" {reader.cfg.model_name}, or name the model that is served"
        )


def probe_size(answer_count: int, new_tokens: int) -> tuple[int, int]:
    """How many answers of how many tokens a round asks for: all rounds of the largest probe cost at
    most a tenth of the tokens that the run may generate.

    Twice as many tokens as answers. A run of a few tokens gets the smallest probe.
    """
    # At first up to three: the answers, the same again, and whether the server samples.
    rounds = 3 + len(stretches(range(answer_count)))
    tokens_a_round = int(SHARE * answer_count * new_tokens / rounds)
    tokens = min(TOKENS, max(_FEWEST_TOKENS, math.isqrt(2 * tokens_a_round)))
    return min(ANSWERS, max(_FEWEST_ANSWERS, tokens_a_round // tokens)), tokens


def stretches(todo: Sequence[T]) -> list[Sequence[T]]:
    """What is asked for between two probes."""
    return [todo[start : start + _EVERY] for start in range(0, len(todo), _EVERY)]


@dataclass(frozen=True)
class Reference:
    """An answer with which a server's is compared.

    Args:
        text: The answer.
        logprobs: The log-probability of each of its tokens.
        prompt_logprobs: The same of the prompt's tokens after the first.
        steps: Of the local model's answer, the text after each token.
        gaps: How much likelier each token was than the second likeliest, in nats.
    """

    text: str
    logprobs: Sequence[float]
    prompt_logprobs: Sequence[float]
    steps: Sequence[str] = ()
    gaps: Sequence[float] = ()

    def agrees(self, text: str) -> bool:
        """Whether another answer is this one; where the local model is undecided, either is
        right."""
        text = text.rstrip("�")  # which is half a character
        if text == self.text.rstrip("�"):
            return True
        equal_steps = sum(text.startswith(step) for step in self.steps)
        return equal_steps > 0 and self.gaps[equal_steps - 1] < _TIE

    def differences(self, completion: Completion) -> list[float]:
        """How far log-probabilities of the prompt, or else of the same answer, are apart.

        Those of prompts tell more: greedy answers are certain whatever the weights' precision.
        """
        pairs = zip(self.prompt_logprobs, completion.prompt_logprobs, strict=False)
        if not completion.prompt_logprobs and completion.text == self.text:
            pairs = zip(self.logprobs, completion.logprobs, strict=False)
        return [abs(own - theirs) for own, theirs in pairs]


@dataclass(frozen=True)
class Probe:
    """Questions to a server, the answers with which its own are compared, and the findings."""

    connection: Connection
    requests: Sequence[CompletionRequest]
    references: Sequence[Reference]
    about: dict[str, Any]

    def compared(self, completions: Sequence[Completion], least: float) -> str | None:
        """Compare answers with the references, and record the figures; why the server is refused,
        if so: fewer answers are alike, or log-probabilities are too far apart."""
        alike = 0
        differences = []
        for reference, completion in zip(self.references, completions, strict=True):
            alike += reference.agrees(completion.text)
            differences += reference.differences(completion)
        low, high = wilson_interval(alike, len(completions))
        share = alike / len(completions)
        figures = {"alike": share, "alike_low": low, "alike_high": high}
        difference = 0.0
        if differences:
            difference = sum(differences) / len(differences)
            figures["logprob_difference"] = difference
        self.about["rounds"].append(figures)
        is_good = share >= least and difference <= LOGPROB
        if is_good or not self.connection.server.verify:
            return None
        return (
            f"against {self.about['against']}: {100 * share:.0f} % [{100 * low:.0f},"
            f" {100 * high:.0f}] of {len(completions)} greedy answers are alike, log-probabilities"
            f" are {difference:.3f} nats apart (at least {100 * least:.0f} %, at most"
            f" {LOGPROB} nats)"
        )

    def again(self) -> str | None:
        """Ask again after some answers; why the server is refused, if so."""
        least = self.about["rounds"][0]["alike"] - WORSE
        if self.has_weights:
            least = ALIKE
        return self.compared(_asked(self.connection, self.requests), least)

    @property
    def has_weights(self) -> bool:
        """Whether the references are the local model's, and not the server's own."""
        return bool(self.references[0].steps)


def _asked(connection: Connection, requests: Sequence[CompletionRequest]) -> list[Completion]:
    """The completions in the order of the requests, with a bar."""
    completions = {}
    with AnswerBar(len(requests), title="comparing the server with the model") as bar:
        for number, completion in connection.completions(enumerate(requests)):
            completions[number] = completion
            bar.add_answer()
    return [completions[number] for number in range(len(requests))]


def probed(
    connection: Connection,
    questions: Mapping[Question, Request],
    sent: Mapping[Question, list[int] | str],
    tokens: int,
    temperature: float,
    first_texts: Sequence[str],
) -> Probe:
    """Ask a server some questions.

    Args:
        connection: The connection.
        questions: The request of each question to the local model.
        sent: What the server gets in its place.
        tokens: The length of the answers, where there is room.
        temperature: That of the run.
        first_texts: The server's answers when the run began, if it is resumed.

    Raises:
        NotTheModel: It is not, or no longer the model of the run that is resumed.
    """
    lengths = [len(request.sequence) for request in questions.values()]
    new_tokens = min(tokens, connection.longest - max(lengths))
    requests = [
        CompletionRequest(sent[question], length, new_tokens, prompt_logprobs=0)
        for question, length in zip(questions, lengths, strict=True)
    ]
    completions = _asked(connection, requests)
    texts = [completion.text for completion in completions]
    about: dict[str, Any] = {
        "model": name_of(connection.model),
        "sent": {str: "text", list: "token ids"}[type(requests[0].prompt)],
        "counted": all(completion.read is not None for completion in completions),
        "texts": [[*question, text] for question, text in zip(questions, texts, strict=True)],
        "tokens": tokens,
        "rounds": [],
    }
    native = _native(connection.reader)
    if native is not None:
        least = ALIKE
        dtype = str(next(native.parameters()).dtype).removeprefix("torch.")
        weights = weights_hash(connection.reader.loaded)
        about["against"] = f"the model here ({dtype}, weights {weights})"
        references = _local_references(native, connection.reader, questions, new_tokens)
    else:
        least = ITSELF
        about["against"] = "its answers when this run began"
        references = [
            Reference(text, completion.logprobs, completion.prompt_logprobs)
            for text, completion in zip(first_texts or texts, completions, strict=True)
        ]
        if not first_texts:
            about["against"] = "a second run of itself"
            completions = _asked(connection, requests)

    probe = Probe(connection, requests, references, about)
    reason = probe.compared(completions, least)
    address = connection.server.address
    if reason is not None:
        raise NotTheModel(
            f"the server at {address} is not the model, {reason}. Is it quantised, another"
            " revision, or does it change the prompt? With verify=False its answers are accepted,"
            " and these figures are recorded"
        )
    if temperature > 0:
        hot_requests = [replace(request, temperature=_HOT) for request in requests]
        hot_texts = [completion.text for completion in _asked(connection, hot_requests)]
        if hot_texts == texts:
            raise NotTheModel(
                f"the server at {address} does not sample: {len(texts)} answers at temperature"
                f" {_HOT:g} are the greedy ones. `transformers serve` samples only if"
                " generation_config.json of the checkpoint says do_sample = true"
            )
    return probe


def _native(model: UnloadedModel) -> Any | None:
    """The local model without hooks, if it is loaded and can generate."""
    if model.loaded is None:
        return None
    try:
        return native_of(model.loaded)
    except ModelError:
        return None


def _local_references(
    native: Any, model: UnloadedModel, questions: Mapping[Question, Request], new_tokens: int
) -> list[Reference]:
    """The local model's answers."""
    references = []
    requests = list(questions.values())
    local_answers = answers(native, requests, new_tokens, model.end)
    for request, answer in zip(requests, local_answers, strict=True):
        prompt_ids = request.sequence.tokens.tolist()
        references.append(reference_of(native, model.tokenizer, prompt_ids, list(answer.tokens)))
    return references


@alone
@torch.no_grad()
def reference_of(native: Any, tokenizer: Any, prompt: list[int], answer: list[int]) -> Reference:
    """The local model's answer, with its log-probabilities in one pass."""
    tokens = torch.tensor([prompt + answer], device=device_of(native))
    logprobs = native(input_ids=tokens).logits[0].double().log_softmax(-1)
    of_tokens = logprobs[:-1].gather(-1, tokens[0, 1:, None])[:, 0].tolist()
    split = len(prompt) - 1
    gaps = -logprobs[split:].topk(2).values.diff()[:, 0]
    starts = [answer[:length] for length in range(len(answer) + 1)]
    steps = [step.rstrip("�") for step in tokenizer.batch_decode(starts, skip_special_tokens=True)]
    return Reference(steps[-1], of_tokens[split:], of_tokens[:split], steps, gaps.tolist())
