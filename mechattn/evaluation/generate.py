"""Generates answers with a key-value cache, on the model without hooks that shares the parameters.

A batch stays full: when an answer ends, the next prompt takes its row, so no row waits for the
longest answer (continuous batching).
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from mechattn.engine.request_checks import sides_of
from mechattn.errors import ModelError, OptionError, check_counts
from mechattn.evaluation.generating_rows import (
    GeneratingRow,
    GeneratingRows,
    PaddedPrompts,
    Request,
    acting_on_answers,
    acting_on_prompts,
)
from mechattn.functional.activations import keyed_uniform, token_keys
from mechattn.model.hooked import (
    HookedModel,
    facts_of,
    holding,
    measuring,
)
from mechattn.model.hooks import last_logits_only
from mechattn.model.unloaded import end_tokens
from mechattn.prompts.prompt import LARGEST_COUNT


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled.

    Args:
        new_tokens: The longest answer, in tokens.
        samples: The number of answers to each question.
        temperature: 0 takes the likeliest token.
        seed: The seed of the draws.

    Raises:
        OptionError: A number is not allowed, or there are several samples at temperature 0.
    """

    new_tokens: int
    samples: int
    temperature: float
    seed: int

    def __post_init__(self) -> None:
        check_counts(new_tokens=self.new_tokens)
        check_counts(most=LARGEST_COUNT, samples=self.samples)
        is_number = isinstance(self.temperature, Real)
        if not is_number or not 0 <= self.temperature < float("inf"):
            raise OptionError(
                f"temperature={self.temperature!r}: give 0 for the likeliest token, or a number"
                " above 0"
            )
        if self.temperature == 0 and self.samples > 1:
            raise OptionError(
                f"samples={self.samples} with temperature=0 gives the same answer {self.samples}"
                " times; give a temperature above 0"
            )


@dataclass(frozen=True)
class Answer:
    """A generated answer.

    Args:
        tokens: The answer's tokens, without the end token.
        finished: Whether the model ended the answer before the limit.
        logprob: The mean log-probability of its tokens and its end token, in nats.
    """

    tokens: tuple[int, ...]
    finished: bool
    logprob: float


def native_of(model: HookedModel) -> Any:
    """The model without hooks, which shares its parameters with the hooked model.

    Raises:
        ModelError: There is none, or it has no key-value cache.
    """
    facts = facts_of(model)
    if facts is None or facts.native is None:
        reason = "it has not gone through load_model" if facts is None else facts.why_not_native
        raise ModelError(
            f"{model.cfg.model_name} cannot generate here: it has no twin without hooks ({reason})"
        )

    if "past_key_values" not in inspect.signature(facts.native.forward).parameters:
        raise ModelError(
            f"{model.cfg.model_name} cannot generate here: it has another cache than"
            " past_key_values, like Mamba and RWKV, so each token would be read without the earlier"
            " ones"
        )

    return facts.native


def dtype_name(model: Any) -> str:
    """The dtype of a model's parameters, such as "float32"."""
    return str(next(model.parameters()).dtype).removeprefix("torch.")


def local_answers(
    model: HookedModel,
    requests: Sequence[Request],
    sampling: Sampling,
    batch: int,
    kept_count: int,
) -> Generator[tuple[Request, Answer, str], None, None]:
    """Generate answers with the model here.

    Args:
        model: The hooked model, whose twin without hooks generates.
        requests: The requested answers.
        sampling: How answers are sampled.
        batch: The number of sequences in a batch.
        kept_count: The number of answers kept from earlier runs, for the progress bar.

    Yields:
        A request, its answer and the answer's text, as soon as the answer ends.

    Raises:
        ModelError: The model cannot generate.
    """
    native = native_of(model)
    end_ids = end_tokens(getattr(native, "generation_config", None), model.tokenizer)

    shortest_first = sorted(requests, key=lambda request: len(request.sequence))
    with AnswerBar(len(requests), kept_count) as bar:
        for group in _with_equal_factors(model, shortest_first):
            generation = Generation(
                native,
                group,
                batch,
                sampling.new_tokens,
                end_ids,
                temperature=sampling.temperature,
                seed=sampling.seed,
                count_tokens=bar.add_tokens,
            )
            while generation.is_open:
                for number, answer in generation.advance().items():
                    text = model.tokenizer.decode(answer.tokens, skip_special_tokens=True)
                    bar.update()
                    yield group[number], answer, text


class AnswerBar(tqdm):
    """A progress bar that counts answers and tokens, and is drawn from the first token on.

    Args:
        answer_count: The number of answers to be generated.
        kept_count: The number of answers kept from earlier runs.
    """

    def __init__(self, answer_count: int, kept_count: int) -> None:
        # With miniters=0 it is also drawn when there are new tokens but no further answer.
        super().__init__(
            desc="answers",
            initial=kept_count,
            total=kept_count + answer_count,
            unit="answer",
            miniters=0,
            mininterval=1.0,
        )
        self.token_count = 0

    def add_tokens(self, count: int) -> None:
        """Count new tokens, and show their number and rate."""
        self.token_count += count
        seconds = max(self.format_dict["elapsed"], 1e-3)  # never 0
        text = f"{self.token_count:,} tokens, {self.token_count / seconds:,.0f} tokens/s"
        self.set_postfix_str(text, refresh=False)
        self.update(0)  # draws the bar if it was drawn long enough ago


def answers(
    model: Any,
    requests: Sequence[Request],
    new_tokens: int,
    end_ids: frozenset[int],
    temperature: float = 0.0,
) -> list[Answer]:
    """Generate one answer to each request, all in one batch.

    Args:
        model: The model without hooks.
        requests: The requested answers.
        new_tokens: The longest answer, in tokens.
        end_ids: The tokens that end an answer.
        temperature: 0 takes the likeliest token.

    Returns:
        The answers in the order of the requests.
    """
    generation = Generation(model, requests, len(requests), new_tokens, end_ids, temperature)
    answers_by_number: dict[int, Answer] = {}
    while generation.is_open:
        answers_by_number |= generation.advance()

    return [answers_by_number[number] for number in range(len(requests))]


@dataclass
class Generation:
    """Answers that are being generated, in a batch that stays full.

    Args:
        model: The model without hooks.
        requests: The requested answers, which are numbered by their indices.
        rows_at_once: The number of sequences in a batch.
        new_tokens: The longest answer, in tokens.
        end_ids: The tokens that end an answer.
        temperature: 0 takes the likeliest token.
        seed: The seed of the draws.
        count_tokens: Called with the number of new tokens after each step.
    """

    model: Any
    requests: Sequence[Request]
    rows_at_once: int
    new_tokens: int
    end_ids: frozenset[int]
    temperature: float = 0.0
    seed: int = 0
    count_tokens: Callable[[int], None] | None = None
    batch: GeneratingRows = field(init=False)
    waiting_numbers: deque[int] = field(init=False)  # of the requests that have not been read

    def __post_init__(self) -> None:
        self.waiting_numbers = deque(range(len(self.requests)))
        self.batch = GeneratingRows(self.model)

    @property
    def is_open(self) -> bool:
        """Whether any answer has not ended."""
        return len(self.waiting_numbers) + self.batch.open_count > 0

    def advance(self) -> dict[int, Answer]:
        """Generate until at least one answer ends, and return those that end, by number."""
        with holding(self.model), measuring(self.model), torch.no_grad():
            ended_answers = self.read_next_prompts()
            if ended_answers:  # with their first token
                return ended_answers

            with acting_on_answers(self.batch):
                while not ended_answers:
                    logits = self.batch.read_last_tokens()
                    ended_answers = self.write(self.batch.rows, logits)
            return ended_answers

    def read_next_prompts(self) -> dict[int, Answer]:
        """Replace the rows that have ended by the next prompts, and write their first tokens.

        Returns:
            The answers that end with their first token, by number.
        """
        self.batch.drop_ended()
        if self.batch.rows and not self.batch.are_exchangeable:
            return {}  # all answers in the batch must end first

        free_count = self.rows_at_once - len(self.batch.rows)
        count = min(free_count, len(self.waiting_numbers))
        numbers = [self.waiting_numbers.popleft() for _ in range(count)]
        if not numbers:
            return {}

        new_rows = [GeneratingRow(number, self.requests[number]) for number in numbers]
        requests = [row.request for row in new_rows]
        prompts = PaddedPrompts([request.sequence for request in requests], self.batch.device)
        cache = self.batch.new_cache()
        with acting_on_prompts(self.model, requests, prompts):
            output = self.model(
                **prompts.inputs,
                past_key_values=cache,
                use_cache=True,
                **last_logits_only(self.model),
            )

        self.batch.add(new_rows, prompts, cache)
        return self.write(new_rows, output.logits[:, -1].float())

    def write(
        self, rows: Sequence[GeneratingRow], logits: Float[Tensor, "row token"]
    ) -> dict[int, Answer]:
        """Write the next token of each row whose answer has not ended.

        Returns:
            The answers that end with it, by number.
        """
        tokens = self.next_tokens(rows, logits)
        logprobs = logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)

        ended_answers = {}
        written_count = 0
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            if row.is_ended:
                continue
            row.tokens.append(token)
            row.logprobs.append(logprob)
            written_count += 1
            if token in self.end_ids or len(row.tokens) == self.new_tokens:
                row.is_ended = True
                ended_answers[row.number] = until_end(row.tokens, row.logprobs, self.end_ids)

        if self.count_tokens is not None:
            self.count_tokens(written_count)
        return ended_answers

    def next_tokens(
        self, rows: Sequence[GeneratingRow], logits: Float[Tensor, "row token"]
    ) -> Int[Tensor, " row"]:
        """The next token of each row: the likeliest, or one drawn at a temperature above 0."""
        if self.temperature == 0:
            return logits.argmax(-1)

        # Draws are keyed by prompt, sample and position, so batches do not change them. The sample
        # takes the place of a layer, since a token of an answer is drawn once for all layers.
        keys = []
        for row in rows:
            next_position = torch.tensor([[row.length + 1]], device=logits.device)
            request = row.request
            keys.append(
                token_keys(self.seed, [request.prompt], next_position, request.sample, "answer")
            )

        # The point is uniform from 0 to the last cumulative probability, which rounding may leave
        # below 1. The first token whose cumulative probability is larger has a probability above 0.
        cumulative = (logits.double() / self.temperature).softmax(-1).cumsum(-1)
        point = keyed_uniform(torch.cat(keys), 1)[:, 0].double() * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, point, right=True)[:, 0]
        # No cumulative probability is larger if the logits are NaN.
        return tokens.clamp(max=logits.shape[-1] - 1)


def until_end(tokens: list[int], logprobs: list[float], end_ids: frozenset[int]) -> Answer:
    """The answer up to the first end token, whose log-probability is part of the mean.

    Args:
        tokens: The generated tokens.
        logprobs: The log-probability of each token, in nats.
        end_ids: The tokens that end an answer.
    """
    for index, token in enumerate(tokens):
        if token in end_ids:
            return Answer(tuple(tokens[:index]), True, mean_logprob(logprobs[: index + 1]))
    return Answer(tuple(tokens), False, mean_logprob(logprobs))


def mean_logprob(logprobs: list[float]) -> float:
    """The mean of log-probabilities; NaN if there are none."""
    return float(torch.tensor(logprobs, dtype=torch.float64).mean())


def _with_equal_factors(model: HookedModel, requests: list[Request]) -> list[list[Request]]:
    """The requests in groups that the model reads with the same factors of RoPE.

    LongRoPE uses other factors beyond a length, and chooses them for a whole batch. For other
    models there is one group.
    """
    sides = sides_of(model, [{request.condition: request.sequence} for request in requests])
    groups: dict[str | None, list[Request]] = {}
    for request, side in zip(requests, sides, strict=True):
        groups.setdefault(side, []).append(request)
    return list(groups.values())
