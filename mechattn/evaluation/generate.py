"""Generates answers with a key-value cache, on the model without hooks that shares the parameters.

A batch stays full: where an answer ends, its row is taken out and the next prompt's is put in its
place, so that no row waits for the longest answer (continuous batching).
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechattn.axes import BASELINE
from mechattn.errors import ModelError, OptionError, check_counts
from mechattn.evaluation.generating_rows import GeneratingRow, GeneratingRows, PaddedPrompts
from mechattn.functional.activations import keyed_uniform, token_keys
from mechattn.interventions.intervention import Target, read_first
from mechattn.model.architectures import PARTICULARS, Particulars
from mechattn.model.hooked import HookedModel, alone, facts_of
from mechattn.model.hooks import keeping_one
from mechattn.model.several_devices import device_of
from mechattn.prompts.prompt import MOST
from mechattn.prompts.token_sequences import PADDING, TokenSequence


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled: how long and how many they are, their temperature and seed."""

    new_tokens: int
    samples: int
    temperature: float
    seed: int


def checked_sampling(
    new_tokens: int, samples: int, temperature: float | None, seed: int
) -> Sampling:
    """How answers are sampled, checked; the default temperature depends on the number of
    samples.

    Args:
        new_tokens: The longest answer, in tokens.
        samples: The number of answers to each question.
        temperature: 0 takes the likeliest token; by default 0 for one sample and 1 for several.
        seed: The seed of the draws.

    Raises:
        OptionError: A number is not allowed, or several answers would be the same.
    """
    check_counts(new_tokens=new_tokens, samples=samples)
    if samples > MOST:
        raise OptionError(f"samples={samples}: give at most {MOST:,} answers to a question")
    if temperature is None:
        temperature = 1.0
        if samples == 1:
            temperature = 0.0

    if not 0 <= temperature < float("inf"):
        raise OptionError(
            f"temperature={temperature!r}: give 0 for the likeliest token, or a number above 0"
        )

    if temperature == 0 and samples > 1:
        raise OptionError(
            f"samples={samples} with temperature=0 gives the same answer {samples} times; give a "
            "temperature above 0"
        )

    return Sampling(new_tokens, samples, float(temperature), seed)


@dataclass(frozen=True)
class Request:
    """A requested answer.

    Args:
        prompt: The prompt's id.
        sequence: The sequence to read.
        sample: Which of several answers.
        condition: The name of the condition.
        solution: The reference.
    """

    prompt: str
    sequence: TokenSequence
    sample: int
    condition: str = BASELINE
    solution: str = ""


@dataclass(frozen=True)
class Answer:
    """A generated answer without its end token; ``finished``: the model ended it before the
    limit."""

    tokens: tuple[int, ...]
    finished: bool
    logprob: float


def native_of(model: HookedModel) -> Any:
    """The model without hooks, which shares the parameters.

    Raises:
        ModelError: There is none, or it has no key-value cache.
    """
    facts = facts_of(model)
    if facts is None or facts.native is None:
        reason = "it has not gone through load_model"
        if facts is not None:
            reason = facts.why_not_native
        raise ModelError(
            f"{model.cfg.model_name} cannot generate here: it has no twin without hooks ({reason})"
        )

    if "past_key_values" not in inspect.signature(facts.native.forward).parameters:
        raise ModelError(
            f"{model.cfg.model_name} cannot generate here: it takes no past_key_values but has"
            " another cache, like Mamba and RWKV, so each token would be read without the earlier"
            " ones"
        )

    return facts.native


def answers(
    model: Any,
    requests: Sequence[Request],
    new_tokens: int,
    end: frozenset[int],
    temperature: float = 0.0,
    seed: int = 0,
) -> list[Answer]:
    """Generate one answer for each sequence, all at the same time.

    Args:
        model: The model without hooks.
        requests: What is asked for.
        new_tokens: The longest answer, in tokens.
        end: The tokens that end an answer.
        temperature: 0 takes the likeliest token.
        seed: The seed of the draws.

    Returns:
        The answers in the order of the requests.
    """
    generation = Generation(model, requests, len(requests), new_tokens, end, temperature, seed)
    answers_by_number: dict[int, Answer] = {}
    while generation.is_open:
        answers_by_number |= generation.advance()

    return [answers_by_number[number] for number in range(len(requests))]


@dataclass
class Generation:
    """Answers that are being generated, some of them at a time.

    Args:
        model: The model without hooks.
        requests: What is asked for; answers are numbered as these are.
        rows_at_once: How many sequences are in a batch.
        new_tokens: The longest answer, in tokens.
        end: The tokens that end an answer.
        temperature: 0 takes the likeliest token.
        seed: The seed of the draws.
        count_tokens: Called with the number of new tokens after each step.
    """

    model: Any
    requests: Sequence[Request]
    rows_at_once: int
    new_tokens: int
    end: frozenset[int]
    temperature: float = 0.0
    seed: int = 0
    count_tokens: Callable[[int], None] | None = None
    rows: GeneratingRows = field(init=False)
    waiting: deque[int] = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = deque(range(len(self.requests)))
        self.rows = GeneratingRows(self.model, device_of(self.model))

    @property
    def is_open(self) -> bool:
        """Whether answers are still to come."""
        return bool(self.waiting or self.rows.open_count)

    def advance(self) -> dict[int, Answer]:
        """Generate until at least one answer has ended; the answers that have, by number."""
        return _advanced(self.model, self)

    def read_next_prompts(self) -> None:
        """Put the next prompts in the place of the rows that have ended."""
        self.rows.drop_ended()
        if self.rows.count and not self.rows.can_change:
            return  # the rest of the batch has to end first

        free = self.rows_at_once - self.rows.count
        count = min(free, len(self.waiting))
        numbers = [self.waiting.popleft() for _ in range(count)]
        if not numbers:
            return

        requests = [self.requests[number] for number in numbers]
        prompts = PaddedPrompts([request.sequence for request in requests], self.rows.device)
        cache = self.rows.new_cache()
        with acting_on_prompts(self.model, requests, prompts):
            output = self.model(
                **prompts.inputs,
                past_key_values=cache,
                use_cache=True,
                **self.only_last_logits,
            )

        new_rows = [GeneratingRow(number, self.requests[number].sequence) for number in numbers]
        self.rows.add(new_rows, prompts, cache)
        self.write(new_rows, output.logits[:, -1].float())

    def write(self, rows: Sequence[GeneratingRow], logits: Float[Tensor, "row token"]) -> None:
        """Choose the next token of each row."""
        tokens = self.chosen(rows, logits)
        logprobs = logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)

        written = 0
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            if row.is_ended:
                continue
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.is_ended = token in self.end or len(row.tokens) == self.new_tokens
            written += 1

        if self.count_tokens is not None:
            self.count_tokens(written)

    def chosen(
        self, rows: Sequence[GeneratingRow], logits: Float[Tensor, "row token"]
    ) -> Int[Tensor, " row"]:
        """The likeliest tokens, or those at a keyed random point of the distribution."""
        if self.temperature == 0:
            return logits.argmax(-1)

        # Keyed by prompt, sample and position, so that batches do not change the draws.
        keys = []
        for row in rows:
            request = self.requests[row.number]
            position = torch.tensor([[len(row.sequence) + len(row.tokens)]], device=logits.device)
            keys.append(token_keys(self.seed, [request.prompt], position, request.sample, "answer"))

        # A uniform point below the last cumulative probability, which rounding may leave below 1.
        cumulative = (logits.double() / self.temperature).softmax(-1).cumsum(-1)
        point = keyed_uniform(torch.cat(keys), 1)[:, 0].double() * cumulative[:, -1:]
        last_token = logits.shape[-1] - 1
        return torch.searchsorted(cumulative, point).clamp(max=last_token)[:, 0]

    @property
    def only_last_logits(self) -> dict[str, Any]:
        """The option that keeps the logits of the last position alone, where a model has it."""
        return keeping_one(self.model.config.get_text_config(decoder=True))

    def ended(self) -> dict[int, Answer]:
        """The answers that have ended and are not handed over yet."""
        answers_by_number = {}
        for row in self.rows.rows:
            if row.is_ended and not row.is_handed_over:
                logprobs = torch.tensor(row.logprobs, dtype=torch.float64)
                answers_by_number[row.number] = until_end(row.tokens, logprobs, self.end)
                row.is_handed_over = True

        return answers_by_number


@alone
@torch.no_grad()
def _advanced(model: Any, generation: Generation) -> dict[int, Answer]:
    """Generate until at least one answer has ended, alone on the model; see ``advance``."""
    generation.read_next_prompts()
    ended = generation.ended()
    if ended:  # with its first token
        return ended

    rows = generation.rows
    requests = [generation.requests[row.number] for row in rows.rows]
    with acting_on_answers(model, requests, rows):
        while not ended:
            logits = rows.read_last_tokens(generation.only_last_logits)
            generation.write(rows.rows, logits)
            ended = generation.ended()

    return ended


def until_end(tokens: list[int], logprobs: Float[Tensor, " token"], end: frozenset[int]) -> Answer:
    """The answer up to the first end token, whose log-probability counts too.

    Args:
        tokens: The generated tokens.
        logprobs: The log-probability of each, in nats.
        end: The tokens that end an answer.
    """
    for place, token in enumerate(tokens):
        if token in end:
            return Answer(tuple(tokens[:place]), True, float(logprobs[: place + 1].mean()))
    return Answer(tuple(tokens), False, float(logprobs[: len(tokens)].mean()))


@contextmanager
def acting_on_prompts(
    model: Any, requests: Sequence[Request], prompts: PaddedPrompts
) -> Iterator[None]:
    """The interventions of some prompts, each acting on its rows."""

    def target(rows: Int[Tensor, " row"], ids: tuple[str, ...]) -> Target:
        return Target(rows, ids, prompts.origin[rows], prompts.segments[rows])

    with _acting(model, requests, prompts.tokens.device, target):
        interventions = [
            intervention for request in requests for intervention in request.sequence.interventions
        ]
        if read_first(interventions):
            model(
                **prompts.inputs,
                use_cache=False,
                **keeping_one(model.config.get_text_config(decoder=True)),
            )
        yield


@contextmanager
def acting_on_answers(
    model: Any, requests: Sequence[Request], rows: GeneratingRows
) -> Iterator[None]:
    """The interventions of some prompts, each acting on the tokens that are generated after it.

    They have no segment. One that reads first has learned from the prompt and acts on it alone.
    """

    def target(places: Int[Tensor, " row"], ids: tuple[str, ...]) -> Target:
        origin = rows.origin[places]
        return Target(places, ids, origin, torch.full_like(origin, PADDING))

    with _acting(model, requests, rows.device, target):
        yield


@contextmanager
def _acting(
    model: Any,
    requests: Sequence[Request],
    device: torch.device,
    target: Callable[[Int[Tensor, " row"], tuple[str, ...]], Target],
) -> Iterator[None]:
    """The interventions of sequences, in the order of each, acting on all rows that have them."""
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, request in enumerate(requests):
        identities = tuple(id(intervention) for intervention in request.sequence.interventions)
        rows_of.setdefault(identities, []).append(row)

    with ExitStack() as stack:
        for row_list in rows_of.values():
            rows = torch.tensor(row_list, device=device)
            ids = tuple(requests[row].prompt for row in row_list)
            for intervention in requests[row_list[0]].sequence.interventions:
                stack.enter_context(intervention.acting(model, partial(target, rows, ids)))
        yield


def refuse_what_cannot_generate(model: Any, sequence: TokenSequence, name: str) -> None:
    """Refuse edges that are cut in some layers only, or in a model that takes no mask of edges."""
    if sequence.edge_mask is None:
        return

    if sequence.edge_mask.layers is not None:
        raise OptionError(
            f"{name!r} cuts edges in some layers only, which works in run but not in evaluate"
        )

    config = getattr(model.config, "text_config", model.config)
    kind = getattr(config, "model_type", "")
    if not PARTICULARS.get(kind, Particulars()).masks_edges:
        reason = "has ALiBi"
    elif "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        reason = "has layers with windows, whose cache is cut short"
    else:
        return

    raise OptionError(
        f"{name!r} cuts edges, and a {kind} model {reason}: generation with cut edges is not "
        "supported here. Omit the condition"
    )
