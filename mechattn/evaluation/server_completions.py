"""Completions of token ids, or of texts that give them, from a server: several requests at a time,
replies checked."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from mechattn.errors import PromptError, ServerError
from mechattn.evaluation.server import Garbled, Refused, Server, client, exchanged
from mechattn.model.checkpoint import UnloadedModel
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.token_sequences import Sequence

Named = TypeVar("Named")
_RETRIES = 8  # after 408, 429, 5xx, time-outs and lost connections
_GARBLED = 4  # retries after incomplete replies
_FIRST_GARBLED_WAIT = 0.5  # seconds, doubled each time
_HELLO = 10.0  # seconds in which a server must respond at first
_LONGEST_LIST = 2**22  # bytes of a list of models
# vLLM and SGLang take missing options from the checkpoint's generation_config.json, so every option
# is sent.
_PLAIN = {"top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "logprobs": 1}
_BESIDE_OPENAI = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True}
_BYTES = 2**16
_BYTES_A_TOKEN = 2**10  # vLLM writes about 180: text, id, log-probability, alternatives
# In its text again, at most: a byte that is no character is read as the three of "�".
_TOKENS_A_TOKEN = 3
_UNLIKELY = 1e6  # nats
# llama.cpp answers in a form of its own where "/v1" is left out.
_NO_CHOICES = 'it has no choices; is the address right, such as "http://host:8000/v1"?'


@dataclass(frozen=True)
class Asked:
    """A requested completion of token ids, or of a text.

    ``read`` is the number of tokens that the server must read; None if that is not known.
    """

    prompt: tuple[int, ...] | str
    read: int | None
    new_tokens: int
    reader: UnloadedModel
    temperature: float = 0.0
    seed: int | None = None
    prompt_logprobs: bool = False

    @property
    def most(self) -> int:
        """The largest reply, in bytes."""
        read = len(self.prompt) if self.read is None else self.read
        return _BYTES + _BYTES_A_TOKEN * (read + self.new_tokens)

    def body(self) -> dict[str, Any]:
        """What is sent, in addition to the model's name."""
        body: dict[str, Any] = {"prompt": self.prompt}
        body["max_tokens"] = self.new_tokens
        body["temperature"] = self.temperature
        body |= _PLAIN
        if self.temperature and self.seed is not None:
            body["seed"] = self.seed
        if isinstance(self.prompt, str):
            return body
        body["prompt"] = list(self.prompt)
        body |= _BESIDE_OPENAI
        body["stop_token_ids"] = sorted(self.reader.end)
        if self.prompt_logprobs:
            body["prompt_logprobs"] = 0  # of the prompt's tokens, not of alternatives
        return body


@dataclass(frozen=True)
class Reply:
    """A server's completion, with what the server tells of its tokens."""

    text: str
    tokens: tuple[int, ...]
    tells_ids: bool
    logprobs: tuple[float, ...] | None
    stopped: bool
    counted: bool
    read: int | None
    prompt_logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Connection:
    """An open connection: a client of httpx2, the portal to its thread, and what the server says of
    its model."""

    server: Server
    client: Any
    portal: Any
    model: str
    longest: int | None
    at_once: int

    def replies(self, asked: Iterable[tuple[Named, Asked]]) -> Iterator[tuple[Named, Reply]]:
        """Each reply in the order of arrival; if a request fails, its error after the others in
        progress."""
        waiting = iter(asked)
        running = dict[Future, Named]()
        failure: Exception | None = None
        while True:
            if failure is None:
                for name, request in islice(waiting, self.at_once - len(running)):
                    future = self.portal.start_task_soon(self._reply, request)
                    running[future] = name
            if not running:
                break
            # Requests in progress when one fails may fail just as slowly.
            seconds = None if failure is None else self.server.timeout
            finished, _ = wait(running, seconds, FIRST_COMPLETED)
            if not finished:
                break
            for future in finished:
                name = running.pop(future)
                error = future.exception()
                if error is None:
                    yield name, future.result()
                elif isinstance(error, Exception):
                    failure = failure or error
        if failure is not None:
            raise failure

    def all(self, asked: Seq[Asked]) -> list[Reply]:
        """The replies, in the order in which they were asked for."""
        replies = dict(self.replies(enumerate(asked)))
        return [replies[number] for number in range(len(asked))]

    async def _reply(self, asked: Asked) -> Reply:
        from anyio import sleep

        body = {"model": self.model, **asked.body()}
        for attempt in range(_GARBLED + 1):
            try:
                data = await exchanged(
                    self.client,
                    self.server,
                    "/completions",
                    body,
                    asked.most,
                    self.server.timeout,
                    _RETRIES,
                )
                return reply_of(data, asked, self.model, self.server)
            except Garbled as error:
                reason = self.server.without_key(str(error))
                if reason == _NO_CHOICES:  # that is whole, and would be the same again
                    break
            if attempt < _GARBLED:
                await sleep(_FIRST_GARBLED_WAIT * 2**attempt)
        raise ServerError(
            f"the server at {self.server.address} gives no readable answer ({reason}), "
            f"{attempt + 1} times in a row"
        )


@contextmanager
def connected(server: Server, at_once: int) -> Iterator[Connection]:
    """A connection inside a ``with`` block; requests in progress are dropped if the block
    raises."""
    from anyio.from_thread import start_blocking_portal

    http_client = client(server)
    with start_blocking_portal() as portal, _no_key_in_log(server):
        try:
            limits = portal.call(_models, http_client, server)
            if server.model is None and len(limits) != 1:
                names = ", ".join(repr(name[:200]) for name in islice(limits, 10))
                listed = "it lists none"
                if limits:
                    listed = f"it has {names}"
                raise ServerError(
                    f"which model of the server at {server.address}? {listed}: give model=…"
                )
            model = server.model or next(iter(limits))
            yield Connection(server, http_client, portal, model, limits.get(model), at_once)
        finally:
            portal.call(http_client.aclose)


@contextmanager
def _no_key_in_log(server: Server) -> Iterator[None]:
    """Keeps the key out of the log of headers that a server sends."""

    def hides_key(record: logging.LogRecord) -> bool:
        return not server.secret or server.secret not in record.getMessage()

    log = logging.getLogger("httpcore2.http11")
    log.addFilter(hides_key)
    try:
        yield
    finally:
        log.removeFilter(hides_key)


async def _models(client: Any, server: Server) -> dict[str, int | None]:
    """The models that a server lists, and how many tokens each takes.

    None from a server without a list: `transformers serve` lists its cache, and fails if there is
    none.
    """
    seconds = min(_HELLO, server.timeout)
    limits: dict[str, int | None] = {}
    try:
        listed = await exchanged(client, server, "/models", None, _LONGEST_LIST, seconds, 1)
        for entry in listed["data"]:
            name = entry["id"]
            limit = entry.get("max_model_len")
            if not isinstance(name, str):
                continue
            limits[name] = None
            if type(limit) is int and limit > 0:
                limits[name] = limit
    except Refused as error:
        if error.status < 400 or error.status in (401, 403):
            raise
        return {}
    except (Garbled, KeyError, TypeError, AttributeError):
        return {}
    return limits


def reply_of(data: Any, asked: Asked, model: str, server: Server) -> Reply:
    """Read a reply.

    Raises:
        Garbled: It is incomplete.
        ServerError: It is another model's, or too long, or the model has not read what was sent.
    """
    choice = _choice(data)
    _check_model(data.get("model"), model, server)
    usage = _section(data, "usage")
    is_counted = _check_read(
        usage.get("prompt_tokens"), choice.get("prompt_token_ids"), asked, server
    )
    logprobs = _section(choice, "logprobs")
    token_logprobs = logprobs.get("token_logprobs")
    content = logprobs.get("content")
    if isinstance(content, list) and all(isinstance(entry, dict) for entry in content):
        # as llama.cpp tells them
        token_logprobs = [entry.get("logprob") for entry in content]
    ids = _ids(choice.get("token_ids"), asked)
    if ids is None:
        tokens = asked.reader.tokenizer(choice["text"], add_special_tokens=False)["input_ids"]
    else:
        tokens = ids
        if server.key is not None:  # the text itself has been checked
            server.check_hides_key(asked.reader.tokenizer.decode(list(ids)))

    counts = [usage.get("completion_tokens"), len(tokens) // _TOKENS_A_TOKEN, len(ids or ())]
    count = max(count for count in counts if type(count) is int)
    if count > asked.new_tokens:
        raise ServerError(
            f"the server at {server.address} has generated {count:,} tokens where "
            f"{asked.new_tokens:,} were allowed"
        )
    return Reply(
        text=choice["text"],
        tokens=tuple(tokens),
        tells_ids=ids is not None,
        logprobs=_numbers(token_logprobs),
        stopped=choice["finish_reason"] == "stop",
        counted=is_counted,
        read=usage["prompt_tokens"] if type(usage.get("prompt_tokens")) is int else None,
        prompt_logprobs=_of_prompt(choice.get("prompt_logprobs"), asked),
    )


def _choice(data: Any) -> dict[str, Any]:
    """The one completion of a reply."""
    choices = data.get("choices") if isinstance(data, dict) else None
    if not isinstance(choices, list):
        raise Garbled(_NO_CHOICES)
    if len(choices) != 1 or not isinstance(choices[0], dict):
        raise Garbled(f"it has {len(choices)} choices, but one was requested")
    choice: dict[str, Any] = choices[0]
    reason = choice.get("finish_reason")
    if not isinstance(choice.get("text"), str) or reason not in ("stop", "length"):
        raise Garbled(f"it was not finished: finish_reason is {str(reason)[:40]!r}")
    return choice


def _section(data: dict[str, Any], name: str) -> dict[str, Any]:
    """A part of a reply; empty where the server leaves it out or sends something else."""
    section = data.get(name)
    if isinstance(section, dict):
        return section
    return {}


def _check_model(name: Any, model: str, server: Server) -> None:
    """Refuse another model's reply; a server may add a revision to the name."""
    if not isinstance(name, str) or name == model or name.startswith(f"{model}@"):
        return
    other = server.without_key(name)[:200]
    raise ServerError(
        f"the server at {server.address} answers as {other!r}, but {model!r} was asked for. If that"
        f" is the model, give its name: model={other!r}"
    )


def _check_read(reported: Any, reported_ids: Any, asked: Asked, server: Server) -> bool:
    """Whether the server says what it has read.

    Raises:
        ServerError: It has read other tokens than were sent, or doesn't say.
    """
    says_count = type(reported) is int
    ids = None
    if not isinstance(asked.prompt, str):
        ids = _ids(reported_ids, asked)
    if says_count and asked.read is not None and reported != asked.read:
        raise ServerError(
            f"the server at {server.address} has read {reported} tokens of a prompt that has "
            f"{asked.read}: it adds a BOS token or a template, cuts prompts short, or has another "
            "tokenizer, so its answers are not to this prompt"
        )
    if ids is not None and ids != asked.prompt:
        raise ServerError(
            f"the server at {server.address} has read other tokens than those of the prompt"
        )
    says_something = says_count or ids is not None
    if not says_something and asked.read is not None and server.verify:
        raise ServerError(
            f"the server at {server.address} says neither how many tokens it has read"
            " (usage.prompt_tokens) nor which, so a prompt that it changes or cuts short would not"
            " be noticed. With verify=False its answers are accepted, and that nothing was counted"
            " is recorded with them"
        )
    return says_something


def _of_prompt(entries: Any, asked: Asked) -> tuple[float, ...] | None:
    """Parse vLLM's format: for each token except the first, {"its id": {"logprob": …}}."""
    if not isinstance(entries, list) or isinstance(asked.prompt, str):
        return None
    if len(entries) != asked.read:
        return None
    logprobs = []
    try:
        for entry, token in zip(entries[1:], asked.prompt[1:], strict=True):
            logprobs.append(entry[str(token)]["logprob"])
    except (KeyError, TypeError):
        return None
    return _numbers(logprobs)


def _ids(entries: Any, asked: Asked) -> tuple[int, ...] | None:
    """Token ids, if there are some; they must be of the model's vocabulary."""
    if entries is None:
        return None
    size = asked.reader.cfg.d_vocab
    if asked.reader.loaded is None:
        size *= 2  # a model may have more ids than its tokenizer
    is_list_of_ids = isinstance(entries, list) and all(
        type(token) is int and 0 <= token < size for token in entries
    )
    if not is_list_of_ids:
        raise Garbled(f"its token ids are not whole numbers below {size:,}")
    return tuple(entries)


def _numbers(entries: Any) -> tuple[float, ...] | None:
    """Log-probabilities, if all of them are numbers that one can have."""
    if not isinstance(entries, list) or not entries:
        return None
    for entry in entries:
        if type(entry) not in (int, float) or not abs(entry) < _UNLIKELY:
            return None
    return tuple(map(float, entries))


def text_of(tokenizer: Any, ids: Seq[int]) -> str | None:
    """The text from which a tokenizer makes exactly these ids, including its BOS token, if any."""
    ids = list(ids)
    candidates = [ids]
    if ids[:1] == [getattr(tokenizer, "bos_token_id", None)]:
        candidates.insert(0, ids[1:])  # where the tokenizer adds it
    for candidate in candidates:
        text = _decoded(tokenizer, candidate)
        if list(tokenizer(text)["input_ids"]) == ids:
            return text
    return None


def texts_of(
    tokenizer: Any, prompts: Seq[Prompt], sequences: Seq[Mapping[str, Sequence]], address: str
) -> dict[tuple[str, str], str]:
    """The text of each prompt under each condition.

    Raises:
        PromptError: A text would be read as different tokens.
    """
    texts: dict[tuple[str, str], str] = {}
    refused: list[tuple[Prompt, str, list[int]]] = []
    for prompt, by_name in zip(prompts, sequences, strict=True):
        for name, sequence in by_name.items():
            ids = sequence.tokens.tolist()
            text = text_of(tokenizer, ids)
            if text is None:
                refused.append((prompt, name, ids))
            else:
                texts[prompt.id, name] = text
    if refused:
        prompt, name, ids = refused[0]
        names = sorted({name for _, name, _ in refused})
        raise PromptError(
            f'the server at {address} takes only text, and prompt {prompt.id} ("{prompt.excerpt}") '
            f'with the condition "{name}" would be read as other tokens: '
            f"{_first_difference(tokenizer, ids)}. So would {len(refused)} of "
            f"{len(refused) + len(texts)} in all, under {', '.join(map(repr, names))}. Omit"
            " them, or "
            "serve the model with an engine that takes token ids, such as vLLM or SGLang"
        )
    return texts


def _first_difference(tokenizer: Any, ids: list[int]) -> str:
    """The first place where the text's tokens differ from the intended ones.

    A BOS is left out of the text only where the tokenizer puts one there itself.
    """
    bos = getattr(tokenizer, "bos_token_id", None)
    adds_bos = list(tokenizer("")["input_ids"])[:1] == [bos] != [None]
    sent = ids
    if adds_bos and ids[:1] == [bos]:
        sent = ids[1:]
    read = list(tokenizer(_decoded(tokenizer, sent))["input_ids"])
    position = 0
    while position < min(len(ids), len(read)) and ids[position] == read[position]:
        position += 1
    intended_token = _shown_token(tokenizer, ids, position)
    return (
        f"at position {position} {intended_token} becomes {_shown_token(tokenizer, read, position)}"
    )


def _shown_token(tokenizer: Any, ids: list[int], position: int) -> str:
    if position >= len(ids):
        return "the end"
    token = ids[position]
    return f"{_decoded(tokenizer, [token])!r} ({token})"


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
