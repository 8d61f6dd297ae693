"""Does a server run the model that was asked for? Texts tell its tokenizer, a few greedy answers
the rest.

Answers and log-probabilities are compared with those of the local model, where its weights are
loaded, and otherwise with a second run of the server itself, which tells no more than that it stays
the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch

from mechattn.errors import ModelError, ServerError, warn
from mechattn.evaluation.generate import Request, answers, native_of
from mechattn.evaluation.progress import AnswerBar
from mechattn.evaluation.server_completions import Asked, Connection, Reply
from mechattn.model.checkpoint import UnloadedModel
from mechattn.model.hooked import alone
from mechattn.model.several_devices import device_of
from mechattn.model.weights import weights_hash
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.token_sequences import Sequence
from mechattn.results.provenance import name_of
from mechattn.stats.intervals import wilson_interval

T = TypeVar("T")
# The largest probe, and the share of a run's tokens that all probes together may cost.
ANSWERS = 16
TOKENS = 32
SHARE = 0.1
_FEWEST_ANSWERS = 2
_FEWEST_TOKENS = 4
# The least share of answers that are the local model's: on the toys bfloat16 has 1, and noise of
# 30 % of the weights' spread 0.75 at most.
ALIKE = 0.9
# The same against the server itself, at first, and how many fewer may be alike later.
ITSELF = 0.6
WORSE = 0.2
# The largest mean difference of log-probabilities in nats: on the toys bfloat16 gives 0.005, 8 bits
# 0.016, 4 bits 0.35.
LOGPROB = 0.05
_TIE = 0.5  # nats between the two likeliest tokens: rounding may exchange them
_EVERY = 256  # answers, within which a server is probed once
_MOST_PLACES = 8  # of probes within a run
_HOT = 2.0  # a temperature at which no two answers are equal

# Words, code, digits and letters of which each tokenizer makes other numbers of tokens.
_TEXTS = (
    "The quick brown fox jumps over 13 lazy dogs, and internationalisation follows.",
    "def area(radius):\n    return 3.14159 * radius**2  # \\pi r^{2}",
    "Zürich, naïve café, 東京, 12,345.67 €; Größenordnung, непонятно.",
)
_MOST_ADDED = 3  # tokens that a server may put around a text, such as a BOS
_UNEVEN = 1  # tokens by which these may differ from text to text


class NotTheModel(ServerError):
    """A probe finds another model, or one that does not sample."""


def check_tokenizer(connection: Connection, model: UnloadedModel) -> list[int] | None:
    """How many tokens the server reads beyond the local tokenizer's, for each of three texts.

    None from a server that doesn't count what it reads.

    Raises:
        ServerError: The numbers are those of another tokenizer.
    """
    requests = [Asked(text, None, 1, model) for text in _TEXTS]
    beyond = []
    local_counts = []
    for text, reply in zip(_TEXTS, connection.all(requests), strict=True):
        if reply.read is None:
            return None
        local_counts.append(len(model.tokenizer(text, add_special_tokens=False)["input_ids"]))
        beyond.append(reply.read - local_counts[-1])
    is_same = min(beyond) >= 0 and max(beyond) <= _MOST_ADDED
    is_same &= max(beyond) - min(beyond) <= _UNEVEN
    if connection.server.verify and not is_same:
        counts = [count + more for count, more in zip(local_counts, beyond, strict=True)]
        raise ServerError(
            f"the server at {connection.server.address} has another tokenizer, so it is another "
            f"model: it reads three texts as {counts} tokens, and {model.cfg.model_name} as "
            f"{local_counts}. Serve {model.cfg.model_name}, or name the model that is served"
        )
    return beyond


@dataclass(frozen=True)
class ProbeSize:
    """How many greedy answers of how many tokens are asked for in each round."""

    answers: int
    tokens: int


def probe_size(answer_count: int, new_tokens: int, rounds: int) -> ProbeSize:
    """The largest probe whose rounds cost at most a tenth of the tokens that the run may generate.

    Twice as many tokens as answers. A run of a few tokens gets the smallest probe.
    """
    tokens_a_round = int(SHARE * answer_count * new_tokens / rounds)
    tokens = min(TOKENS, max(_FEWEST_TOKENS, math.isqrt(2 * tokens_a_round)))
    return ProbeSize(min(ANSWERS, max(_FEWEST_ANSWERS, tokens_a_round // tokens)), tokens)


def probe_rounds(answer_count: int, seed: int, has_weights: bool, temperature: float) -> int:
    """How often the probe's questions are asked in a run."""
    rounds = 1 + len(stretches(range(answer_count), seed))
    if not has_weights:
        rounds += 1  # at first twice, as it is compared with itself
    if temperature > 0:
        rounds += 2  # whether it samples
    return rounds


def stretches(todo: Seq[T], seed: int) -> list[Seq[T]]:
    """What is asked for between two probes: the ends are drawn, one in each part of the run."""
    part_count = min(_MOST_PLACES, -(-len(todo) // _EVERY))
    draw = random.Random(f"{seed} probe")
    limits = [part * len(todo) // part_count for part in range(part_count + 1)]
    ends = [draw.randrange(start, end) for start, end in pairwise(limits)]
    return [todo[start:end] for start, end in pairwise([0, *ends, len(todo)])]


@dataclass(frozen=True)
class Known:
    """An answer with which a server's is compared.

    Args:
        text: The answer.
        logprobs: The log-probability of each of its tokens.
        prompt_logprobs: The same of the prompt's tokens after the first.
        steps: Of the local model's answer, the text after each token.
        gaps: How much likelier each token was than the second likeliest, in nats.
    """

    text: str
    logprobs: tuple[float, ...] | None
    prompt_logprobs: tuple[float, ...] | None
    steps: tuple[str, ...] = ()
    gaps: tuple[float, ...] = ()

    def agrees(self, text: str) -> bool:
        """Whether another answer is this one; where the local model is undecided, either is
        right."""
        own_text = self.text.rstrip("�")  # which is half a character
        text = text.rstrip("�")
        if text == own_text or not self.steps:
            return text == own_text
        step = 0
        while step < len(self.steps) and text.startswith(self.steps[step]):
            step += 1
        return self.gaps[step - 1] < _TIE


@dataclass(frozen=True)
class Probe:
    """Questions to a server, their known answers, and the findings."""

    connection: Connection
    requests: Seq[Asked]
    known: Seq[Known]
    about: dict[str, Any]

    @property
    def has_weights(self) -> bool:
        """Whether the known answers are the local model's, and not the server's own."""
        return bool(self.known[0].steps)

    def compared(self, replies: Seq[Reply]) -> dict[str, Any]:
        """Compare answers with the known ones."""
        pairs = list(zip(self.known, replies, strict=True))
        alike = sum(known.agrees(reply.text) for known, reply in pairs)
        low, high = wilson_interval(alike, len(pairs))
        figures: dict[str, Any] = {
            "alike": alike / len(pairs),
            "alike_low": low,
            "alike_high": high,
            "logprob_difference": None,
            "logprobs_of": None,
        }
        # Those of the prompts tell more: greedy answers are certain whatever the weights'
        # precision.
        logprobs = {
            "prompts": [(known.prompt_logprobs, reply.prompt_logprobs) for known, reply in pairs],
            "answers": [
                (known.logprobs, reply.logprobs)
                for known, reply in pairs
                if known.text == reply.text
            ],
        }
        for name, told in logprobs.items():
            differences = _differences(told)
            if differences:
                figures["logprob_difference"] = sum(differences) / len(differences)
                figures["logprobs_of"] = name
                break
        return figures

    def doubt(self, figures: Mapping[str, Any], least: float = ITSELF) -> str | None:
        """Why a server with these figures is refused, if it is.

        Args:
            figures: As from ``compared``.
            least: The least share of answers that are alike, against the server itself.
        """
        if self.has_weights:
            least = ALIKE
        difference = figures["logprob_difference"] or 0.0
        is_good = figures["alike"] >= least and difference <= LOGPROB
        if is_good or not self.connection.server.verify:
            return None
        alike = round(100 * figures["alike"])
        low = round(100 * figures["alike_low"])
        high = round(100 * figures["alike_high"])
        logprobs = ""
        if difference:
            logprobs = (
                f", log-probabilities of {figures['logprobs_of']} are {difference:.3f} nats apart"
            )
        return (
            f"against {self.about['against']}: {alike} % [{low}, {high}] of {len(self.requests)} "
            f"greedy answers are alike{logprobs} (at least {100 * least:.0f} %, at most {LOGPROB} "
            "nats)"
        )

    def again(self, since: int) -> str | None:
        """Ask again after some answers, and record the figures; why the server is refused, if
        so."""
        figures = self.compared(_replies(self.connection, self.requests))
        self.about["again"].append({"since": since, **figures})
        return self.doubt(figures, self.about["alike"] - WORSE)


def _differences(
    pairs: Seq[tuple[tuple[float, ...] | None, tuple[float, ...] | None]],
) -> list[float]:
    """How far log-probabilities are apart, where both sides tell them."""
    differences = []
    for own, theirs in pairs:
        if own and theirs:
            differences += [abs(a - b) for a, b in zip(own, theirs, strict=False)]
    return differences


def _replies(connection: Connection, requests: Seq[Asked]) -> list[Reply]:
    """The replies in the order of the requests, with a bar."""
    with AnswerBar(len(requests), "comparing the server with the model") as bar:
        replies = {}
        for number, reply in connection.replies(enumerate(requests)):
            replies[number] = reply
            bar.add_tokens(len(reply.tokens))
            bar.add_answer()
    return [replies[number] for number in range(len(requests))]


def probed(
    connection: Connection,
    model: UnloadedModel,
    questions: Seq[tuple[str, str, Sequence]],
    texts: Mapping[tuple[str, str], str] | None,
    size: ProbeSize,
    temperature: float,
    before: Mapping[str, Any] | None,
) -> Probe:
    """Ask a server some questions.

    Args:
        connection: The connection.
        model: The local model, or its tokenizer.
        questions: Prompts, conditions and sequences, as from ``questions_for``.
        texts: The texts to send in place of token ids, by prompt and condition.
        size: The size of the probe.
        temperature: That of the run.
        before: What was found when the run began, if it is resumed.

    Raises:
        NotTheModel: It is not, or no longer the model of the run that is resumed.
    """
    longest = min(model.cfg.n_ctx, connection.longest or model.cfg.n_ctx)
    requests = []
    for prompt, name, sequence in questions:
        sent: tuple[int, ...] | str = tuple(sequence.tokens.tolist())
        if texts is not None:
            sent = texts[prompt, name]
        new_tokens = min(size.tokens, longest - len(sequence))
        requests.append(Asked(sent, len(sequence), new_tokens, model, prompt_logprobs=True))

    replies = _replies(connection, requests)
    native = _native(model)
    about: dict[str, Any] = {
        "model": name_of(connection.model),
        "sent": "token ids" if texts is None else "text",
        "answers": len(questions),
        "tokens": size.tokens,
        "against": "a second run of itself",
        "counted": all(reply.counted for reply in replies),
        "questions": [[prompt, name] for prompt, name, _ in questions],
        "texts": [reply.text for reply in replies],
        "again": [],
    }
    if native is None:
        known = [Known(reply.text, reply.logprobs, reply.prompt_logprobs) for reply in replies]
        probe = Probe(connection, requests, known, about)
        figures = probe.compared(_replies(connection, requests))
    else:
        dtype = str(next(native.parameters()).dtype).removeprefix("torch.")
        about["against"] = f"the model here ({dtype}, weights {weights_hash(model.loaded)})"
        known = _known_answers(native, model, questions, requests)
        probe = Probe(connection, requests, known, about)
        figures = probe.compared(replies)
    about |= figures
    _check(probe, before)
    if temperature > 0:
        about["same_seed"] = _same_seed(connection, requests, about["texts"])
    if before is None:
        return probe
    again = [*before.get("again", []), {"since": 0, **figures}]
    return replace(probe, about={**before, "again": again})


def tell_limits(connection: Connection, model: UnloadedModel) -> None:
    """Say what a comparison without the local weights cannot tell."""
    if connection.server.verify:
        warn(
            f"the server at {connection.server.address} has the tokenizer of "
            f"{model.cfg.model_name} and repeats its own answers. Without the weights here nothing "
            "more can be told: a fine-tuned, quantised or differently sized model with this "
            "tokenizer would not be noticed. To compare the model itself, give evaluate a loaded "
            "one: ma.load_model(…)"
        )


def _check(probe: Probe, before: Mapping[str, Any] | None) -> None:
    """Refuse a server whose answers are not the model's, or not those of the run that is
    resumed."""
    server = probe.connection.server
    reason = probe.doubt(probe.about)
    if reason is not None:
        raise NotTheModel(
            f"the server at {server.address} is not the model, {reason}. Is it quantised, another"
            " revision, or does it change the prompt? With verify=False its answers are accepted,"
            " and these figures are recorded"
        )
    if before is None or not server.verify:
        return
    first_texts = _texts_by_question(before)
    pairs = [
        (text, first_texts[question])
        for question, text in _texts_by_question(probe.about).items()
        if question in first_texts
    ]
    same = sum(_same_start(text, first_text) for text, first_text in pairs)
    if same < ITSELF * len(pairs):
        raise NotTheModel(
            f"the server at {server.address} gives other answers than when this run began ({same}"
            f" of {len(pairs)} are the same), so it now serves another model. Serve the first one,"
            " or use a new file"
        )


def _texts_by_question(about: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    questions = [(prompt, name) for prompt, name in about["questions"]]
    return dict(zip(questions, about["texts"], strict=True))


def _same_start(text: str, other: str) -> bool:
    """Whether two answers are the same as far as both go: a longer run has longer probes."""
    shorter, longer = sorted((text, other), key=len)
    return longer.startswith(shorter) and bool(shorter) == bool(longer)


def questions_for(
    prompts: Seq[Prompt],
    sequences: Seq[Mapping[str, Sequence]],
    seed: int,
    count: int,
    before: Mapping[str, Any] | None,
) -> list[tuple[str, str, Sequence]]:
    """``count`` sequences for a probe, those first that were asked when the run began.

    Prompts are in an order drawn by seed, with each condition in turn.
    """
    names = list(sequences[0])
    order = list(range(len(prompts)))
    random.Random(seed).shuffle(order)
    questions = []
    for turn in range(len(names)):
        for number, place in enumerate(order):
            name = names[(number + turn) % len(names)]
            questions.append((prompts[place].id, name, sequences[place][name]))
    if before is not None:
        first_questions = set(_texts_by_question(before))
        questions.sort(key=lambda question: question[:2] not in first_questions)
    return questions[:count]


def _native(model: UnloadedModel) -> Any | None:
    """The local model without hooks, if it is loaded and can generate."""
    if model.loaded is None:
        return None
    try:
        return native_of(model.loaded)
    except ModelError:
        return None


def _known_answers(
    native: Any,
    model: UnloadedModel,
    questions: Seq[tuple[str, str, Sequence]],
    requests: Seq[Asked],
) -> list[Known]:
    """The local model's answers."""
    local_requests = [Request(prompt, sequence, 0) for prompt, _, sequence in questions]
    longest = max(request.new_tokens for request in requests)
    local_answers = answers(native, local_requests, longest, model.end)
    known = []
    for request, local_request, answer in zip(requests, local_requests, local_answers, strict=True):
        prompt_ids = local_request.sequence.tokens.tolist()
        answer_ids = list(answer.tokens[: request.new_tokens])
        known.append(_known(native, model.tokenizer, prompt_ids, answer_ids))
    return known


@alone
@torch.no_grad()
def _known(native: Any, tokenizer: Any, prompt: list[int], answer: list[int]) -> Known:
    """The local model's answer, with its log-probabilities in one pass."""
    tokens = torch.tensor([prompt + answer], device=device_of(native))
    logprobs = native(input_ids=tokens).logits[0].double().log_softmax(-1)
    of_tokens = logprobs[:-1].gather(-1, tokens[0, 1:, None])[:, 0].tolist()
    split = len(prompt) - 1
    gaps = -logprobs[split:].topk(2).values.diff()[:, 0]
    steps = []
    for length in range(len(answer) + 1):
        steps.append(str(tokenizer.decode(answer[:length], skip_special_tokens=True)))
    return Known(
        text=steps[-1],
        logprobs=tuple(of_tokens[split:]),
        prompt_logprobs=tuple(of_tokens[:split]),
        steps=tuple(step.rstrip("�") for step in steps),
        gaps=tuple(gaps.tolist()),
    )


def _same_seed(connection: Connection, requests: Seq[Asked], greedy: Seq[str]) -> float:
    """The share of answers that the same seed repeats; refuses a server that does not sample."""
    hot = [replace(request, temperature=_HOT, seed=seed) for seed, request in enumerate(requests)]
    first = [reply.text for reply in _replies(connection, hot)]
    second = [reply.text for reply in _replies(connection, hot)]
    if first == list(greedy):
        raise NotTheModel(
            f"the server at {connection.server.address} does not sample: {len(hot)} answers at "
            f"temperature {_HOT:g} are the greedy ones. `transformers serve` samples only if "
            "generation_config.json of the checkpoint says do_sample = true"
        )
    return sum(a == b for a, b in zip(first, second, strict=True)) / len(hot)
