"""Answers from a server, which is compared with the model or itself by a few greedy ones before, in and after a run."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from tqdm.auto import tqdm

from mechattn.errors import ModelError, OptionError, PromptTooLong, ServerError
from mechattn.evaluation.generate import Answer, Request, Sampling, answers, native_of, until_end
from mechattn.evaluation.server import Refused, Server
from mechattn.evaluation.server_completions import Asked, Connection, Reply, connected, texts_of
from mechattn.model.checkpoint import UnloadedModel
from mechattn.model.hooked import alone
from mechattn.model.several_devices import device_of
from mechattn.model.weights import weights_hash
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.token_sequences import Sequence
from mechattn.results.provenance import name_of
from mechattn.stats.intervals import wilson_interval

Todo = tuple[Prompt, str, Request]  # a prompt, the name of a condition, and the sequence
Key = tuple[str, str, int]  # a prompt's id, the name of a condition, and the number of the sample
T = TypeVar("T")
ANSWERS, TOKENS = 16, 32
ALIKE = 0.9  # the least share of answers that are the local model's: on the toys bfloat16 has 1, 30 % noise .75 at most
ITSELF, WORSE = (
    0.6,
    0.2,
)  # the same against the server itself, at first; and how many fewer are alike later
LOGPROB = 0.05  # the largest mean difference in nats; on the toys bfloat16 gives 0.005, 8 bits 0.016, 4 bits 0.35
_TIE = 0.5  # nats between the two likeliest tokens: rounding may exchange them
_EVERY, _MOST = 256, 8  # one probe within so many answers, and the most of them in a run
_HOT = 2.0  # a temperature at which no two answers are equal


class Exchanged(ServerError):
    """A server no longer serves the model; these are the answers since it last did."""

    since: Seq[Key] = ()


@dataclass(frozen=True)
class Served:
    """A model on a server, probed; the texts of prompts and conditions for a server that takes text only."""

    connection: Connection
    model: UnloadedModel
    texts: Mapping[tuple[str, str], str] | None
    probe: Probe
    sampling: Sampling

    def answered(self, todo: Seq[Todo]) -> Iterator[list[tuple[Todo, Answer, str]]]:
        """Each answer with its text, in the order of arrival; within and after them the server is probed again."""
        began, written = time.monotonic(), 0
        with tqdm(desc="answers", total=len(todo), unit="answer", delay=2) as bar:
            for some in stretches(todo, self.sampling.seed):
                for one, answer, text in self._answered(some):
                    written += len(answer.tokens)
                    rate = f"{written / max(time.monotonic() - began, 1e-3):,.0f} tokens/s"
                    bar.set_postfix_str(rate, refresh=False)
                    bar.update()
                    yield [(one, answer, text)]
                if why := self.probe.again(len(some)):
                    error = Exchanged(
                        f"the server at {self.connection.server.address} no longer serves the model, {why}. Its "
                        f"{len(some)} answers since it last did are dropped; serve the model, and call evaluate again "
                        "with the same arguments"
                    )
                    error.since = [_key(one) for one in some]
                    raise error

    def _answered(self, todo: Seq[Todo]) -> Iterator[tuple[Todo, Answer, str]]:
        """The answers between two probes."""
        new_tokens = self.sampling.new_tokens
        asked = ((one, self._asked(one, new_tokens)) for one in todo)
        doubtful: dict[Key, tuple[Answer, str]] = {}
        for one, reply in self.connection.replies(asked):
            logprobs, text = (
                torch.tensor(reply.logprobs or [torch.nan], dtype=torch.float64),
                reply.text,
            )
            answer = Answer(reply.tokens, reply.stopped, float(logprobs.mean()))
            if reply.tells_ids:
                answer = until_end(list(reply.tokens), logprobs, self.model.end)
                text = self.model.tokenizer.decode(list(answer.tokens), skip_special_tokens=True)
                answer = replace(answer, finished=answer.finished or reply.stopped)
            # the last allowed token may have ended the answer, although the server says "length"
            if not reply.tells_ids and not reply.stopped and len(answer.tokens) < new_tokens:
                doubtful[_key(one)] = answer, text
            else:
                yield one, answer, text
        more = ((one, self._asked(one, new_tokens + 1)) for one in todo if _key(one) in doubtful)
        for one, reply in self.connection.replies(more):
            answer, text = doubtful[_key(one)]
            yield one, replace(answer, finished=reply.stopped and reply.text == text), text

    def _asked(self, one: Todo, new_tokens: int) -> Asked:
        prompt, name, wanted = one
        ids = tuple(wanted.sequence.tokens.tolist())
        room = min(self.model.cfg.n_ctx, self.connection.longest or self.model.cfg.n_ctx) - len(ids)
        # The same under each condition, as without a server; 31 bits, which every server takes.
        key = f"{self.sampling.seed} {wanted.sample} {prompt.id}".encode(
            "utf-8", "backslashreplace"
        )
        seed = int.from_bytes(hashlib.sha256(key).digest()[:4], "big") >> 1
        sent = ids if self.texts is None else self.texts[prompt.id, name]
        return Asked(
            sent, len(ids), min(new_tokens, room), self.model, self.sampling.temperature, seed
        )


@contextmanager
def served(
    server: Server,
    model: UnloadedModel,
    prompts: Seq[Prompt],
    sequences: Seq[Mapping[str, Sequence]],
    sampling: Sampling,
    at_once: int,
    before: Mapping[str, Any] | None,
) -> Iterator[Served]:
    """A connection to a server that serves the model, as it did ``before`` if a run is resumed."""
    with connected(server, at_once) as connection:
        if connection.longest is not None:
            check_room(
                prompts,
                sequences,
                sampling.new_tokens,
                connection.longest,
                f"the server at {server.address}",
            )
        ids = tuple(next(iter(sequences[0].values())).tokens.tolist())
        texts: dict[tuple[str, str], str] | None = None
        try:
            connection.all([Asked(ids, len(ids), 1, model)])
        except Refused as error:  # it takes no token ids
            if error.status not in (400, 422):
                raise
            texts = texts_of(model.tokenizer, prompts, sequences, server.address)
        some = some_of(prompts, sequences, sampling.seed)
        probe = probed(connection, model, some, texts, sampling.temperature, before)
        yield Served(connection, model, texts, probe, sampling)


def check_servable(sequences: Seq[Mapping[str, Sequence]]) -> None:
    """Refuse conditions that act inside the model, which a server does not allow."""
    for made in sequences:
        for name, sequence in made.items():
            if sequence.interventions:
                acts = type(sequence.interventions[0]).__name__
                why = f"intervenes ({acts}), which needs hooks inside the model"
            elif sequence.edge_mask is not None:
                why = "hides tokens from others (.masked() or Knockout), and a server takes no mask"
            elif sequence.keeps_positions:
                why = "keeps positions (.unshifted()), and a server counts them itself"
            else:
                continue
            raise OptionError(
                f"{name!r} {why}: a server takes tokens and nothing else. Omit the condition, or evaluate it here, "
                f"without server=…"
            )


def check_room(
    prompts: Seq[Prompt],
    sequences: Seq[Mapping[str, Sequence]],
    new_tokens: int,
    longest: int,
    who: str,
) -> None:
    """Refuse prompts that are too long with their answers."""
    for prompt, made in zip(prompts, sequences, strict=True):
        for name, sequence in made.items():
            if len(sequence) + new_tokens > longest:
                raise PromptTooLong(
                    f'prompt {prompt.id} ("{prompt.excerpt}") has {len(sequence):,} tokens with the condition "{name}" '
                    f"and {new_tokens} new ones are allowed; {who} takes {longest:,}"
                )


def _key(one: Todo) -> Key:
    return one[0].id, one[1], one[2].sample


@dataclass(frozen=True)
class Known:
    """An answer with which a server's is compared; of the local model also the text and the gap after each token."""

    text: str
    logprobs: tuple[float, ...] | None
    prompt_logprobs: tuple[float, ...] | None
    steps: tuple[str, ...] = ()
    gaps: tuple[float, ...] = ()

    def agrees(self, text: str) -> bool:
        """Whether another answer is this one; where the local model is undecided, either token is right."""
        mine, text = self.text.rstrip("�"), text.rstrip("�")  # which is half a character
        if text == mine or not self.steps:
            return text == mine
        apart = next(
            (i for i, step in enumerate(self.steps) if not text.startswith(step)), len(self.steps)
        )
        return self.gaps[apart - 1] < _TIE


@dataclass(frozen=True)
class Probe:
    """Questions to a server, their known answers, and the findings."""

    connection: Connection
    asked: Seq[Asked]
    known: Seq[Known]
    about: dict[str, Any]

    def compared(self, replies: Seq[Reply]) -> dict[str, Any]:
        """Compare answers with the known ones."""
        pairs = list(zip(self.known, replies, strict=True))
        same = sum(known.agrees(reply.text) for known, reply in pairs)
        low, high = wilson_interval(same, len(pairs))
        figures = {"alike": same / len(pairs), "alike_low": low, "alike_high": high}
        for of, told in (
            ("prompts", [(known.prompt_logprobs, reply.prompt_logprobs) for known, reply in pairs]),
            (
                "answers",
                [
                    (known.logprobs, reply.logprobs)
                    for known, reply in pairs
                    if known.text == reply.text
                ],
            ),
        ):
            far = [
                abs(a - b)
                for mine, theirs in told
                if mine and theirs
                for a, b in zip(mine, theirs, strict=False)
            ]
            if far:
                return {**figures, "logprob_difference": sum(far) / len(far), "logprobs_of": of}
        return {**figures, "logprob_difference": None, "logprobs_of": None}

    def doubt(self, figures: Mapping[str, Any], least: float = ITSELF) -> str | None:
        """Why a server with these figures is refused, if it is; ``least`` is against the server itself."""
        least = ALIKE if self.known[0].steps else least
        far = figures["logprob_difference"] or 0.0
        if not self.connection.server.verify or (figures["alike"] >= least and far <= LOGPROB):
            return None
        alike, low, high = (
            round(100 * figures[name]) for name in ("alike", "alike_low", "alike_high")
        )
        logprobs = (
            f", log-probabilities of {figures['logprobs_of']} are {far:.3f} nats apart"
            if far
            else ""
        )
        return (
            f"against {self.about['against']}: {alike} % [{low}, {high}] of {len(self.asked)} greedy answers are alike"
            f"{logprobs} (at least {100 * least:.0f} %, at most {LOGPROB} nats)"
        )

    def again(self, since: int) -> str | None:
        """Ask again after some answers, and record the figures; why the server is now refused, if it is."""
        figures = self.compared(self.connection.all(self.asked))
        self.about["again"].append({"since": since, **figures})
        return self.doubt(figures, self.about["alike"] - WORSE)


def stretches(todo: Seq[T], seed: int) -> list[Seq[T]]:
    """What is asked for between two probes: the ends are drawn by seed, one in each part of the run."""
    parts, draw = min(_MOST, -(-len(todo) // _EVERY)), random.Random(f"{seed} probe")
    ends = [
        draw.randrange(*part) for part in pairwise(i * len(todo) // parts for i in range(parts + 1))
    ]
    return [todo[slice(*some)] for some in pairwise([0, *ends, len(todo)])]


def probed(
    connection: Connection,
    model: UnloadedModel,
    some: Seq[tuple[str, str, Sequence]],
    texts: Mapping[tuple[str, str], str] | None,
    temperature: float,
    before: Mapping[str, Any] | None,
) -> Probe:
    """Ask a server some questions; refuse it if it is not the model, or no longer that of the run that is resumed."""
    longest = min(model.cfg.n_ctx, connection.longest or model.cfg.n_ctx)
    asked = []
    for prompt, name, sequence in some:
        sent, length = (
            tuple(sequence.tokens.tolist()) if texts is None else texts[prompt, name],
            len(sequence),
        )
        asked.append(
            Asked(sent, length, min(TOKENS, longest - length), model, prompt_logprobs=True)
        )
    first = connection.all(asked)
    known, against = _here(model, some, asked)
    found: dict[str, Any] = {
        "model": name_of(connection.model),
        "sent": "token ids" if texts is None else "text",
    }
    found |= {
        "answers": len(some),
        "against": against,
        "counted": all(reply.counted for reply in first),
    }
    found |= {"texts": [reply.text for reply in first], "again": []}
    known = known or [Known(reply.text, reply.logprobs, reply.prompt_logprobs) for reply in first]
    probe = Probe(connection, asked, known, found)
    figures = probe.compared(first if known[0].steps else connection.all(asked))
    found |= figures
    _check(probe, before)
    if temperature > 0:
        found["same_seed"] = _same_seed(connection, asked, found["texts"])
    if before is None:
        return probe
    return replace(
        probe, about={**before, "again": [*before.get("again", []), {"since": 0, **figures}]}
    )


def _check(probe: Probe, before: Mapping[str, Any] | None) -> None:
    """Refuse a server whose answers are not the model's, or no longer those of the run that is resumed."""
    server, found = probe.connection.server, probe.about
    if why := probe.doubt(found):
        raise ServerError(
            f"the server at {server.address} is not the model, {why}. Is it quantised, another revision, or does it "
            "change the prompt? With verify=False its answers are accepted, and these figures are recorded"
        )
    same = [a == b for a, b in zip(found["texts"], (before or found)["texts"], strict=False)]
    if server.verify and sum(same) < ITSELF * len(same):
        raise ServerError(
            f"the server at {server.address} gives other answers than when this run began ({sum(same)} of {len(same)} "
            "are the same), so it now serves another model. Serve the first one, or use a new file"
        )


def some_of(
    prompts: Seq[Prompt], sequences: Seq[Mapping[str, Sequence]], seed: int
) -> list[tuple[str, str, Sequence]]:
    """The sequences for a probe: prompts in an order drawn by seed, with each condition in turn."""
    names, order = list(sequences[0]), list(range(len(prompts)))
    random.Random(seed).shuffle(order)
    pairs = [
        (at, names[(i + turn) % len(names)])
        for turn in range(len(names))
        for i, at in enumerate(order)
    ]
    return [(prompts[at].id, name, sequences[at][name]) for at, name in pairs[:ANSWERS]]


def _here(
    model: UnloadedModel, some: Seq[tuple[str, str, Sequence]], asked: Seq[Asked]
) -> tuple[list[Known], str]:
    """The local model's answers, if it is loaded, and a description of what the server is compared with."""
    try:
        native = None if model.loaded is None else native_of(model.loaded)
    except ModelError:
        native = None
    if native is None:
        return [], "a second run of itself"
    made = answers(
        native, [Request(prompt, sequence, 0) for prompt, _, sequence in some], TOKENS, model.end
    )
    known = [
        _known(
            native, model.tokenizer, sequence.tokens.tolist(), list(answer.tokens[: one.new_tokens])
        )
        for (_, _, sequence), answer, one in zip(some, made, asked, strict=True)
    ]
    dtype = str(next(native.parameters()).dtype).removeprefix("torch.")
    return known, f"the model here ({dtype}, weights {weights_hash(model.loaded)})"


@alone
@torch.no_grad()
def _known(native: Any, tokenizer: Any, prompt: list[int], answer: list[int]) -> Known:
    """The local model's answer, with its log-probabilities in one pass."""
    tokens = torch.tensor([prompt + answer], device=device_of(native))
    likely = native(input_ids=tokens).logits[0].double().log_softmax(-1)
    told = tuple(likely[:-1].gather(-1, tokens[0, 1:, None])[:, 0].tolist())
    split = len(prompt) - 1
    gaps = tuple((-likely[split:].topk(2).values.diff()[:, 0]).tolist())
    steps = [tokenizer.decode(answer[:i], skip_special_tokens=True) for i in range(len(answer) + 1)]
    return Known(
        steps[-1], told[split:], told[:split], tuple(step.rstrip("�") for step in steps), gaps
    )


def _same_seed(connection: Connection, asked: Seq[Asked], greedy: Seq[str]) -> float:
    """The fraction of answers that the same seed repeats; refuses a server that does not sample."""
    hot = [replace(one, temperature=_HOT, seed=seed) for seed, one in enumerate(asked)]
    first, second = ([reply.text for reply in connection.all(hot)] for _ in range(2))
    if first == list(greedy):
        raise ServerError(
            f"the server at {connection.server.address} does not sample: {len(hot)} answers at temperature {_HOT:g} "
            "are the greedy ones. `transformers serve` samples only if generation_config.json of the checkpoint says "
            "do_sample = true"
        )
    return sum(a == b for a, b in zip(first, second, strict=True)) / len(hot)
