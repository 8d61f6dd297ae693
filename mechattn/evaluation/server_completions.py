"""Completions of token ids, or of texts that give them, from a server: several requests at a time, replies checked."""

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
# vLLM and SGLang take missing options from the checkpoint's generation_config.json, so every option is sent.
_PLAIN = {"top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "logprobs": 1}
_BESIDE_OPENAI = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True}
_BYTES, _BYTES_A_TOKEN = (
    2**16,
    2**10,
)  # vLLM writes about 180 bytes a token: text, id, log-probability, alternatives
_TOKENS_A_TOKEN = (
    3  # in its text again, at most: a byte that is no character is read as the three of "�"
)
_UNLIKELY = 1e6  # nats


@dataclass(frozen=True)
class Asked:
    """A requested completion of token ids, or of a text that gives them; ``read`` is their number."""

    prompt: tuple[int, ...] | str
    read: int
    new_tokens: int
    reader: UnloadedModel
    temperature: float = 0.0
    seed: int | None = None
    prompt_logprobs: bool = False

    @property
    def most(self) -> int:
        """The largest reply, in bytes."""
        return _BYTES + _BYTES_A_TOKEN * (self.read + self.new_tokens)

    def body(self) -> dict[str, Any]:
        """What is sent, in addition to the model's name."""
        made = {"max_tokens": self.new_tokens, "temperature": self.temperature, **_PLAIN}
        if self.temperature and self.seed is not None:
            made["seed"] = self.seed
        if isinstance(self.prompt, str):
            return {"prompt": self.prompt, **made}
        beside = {**_BESIDE_OPENAI, "stop_token_ids": sorted(self.reader.end)}
        beside |= {"prompt_logprobs": 0} if self.prompt_logprobs else {}  # not of alternatives
        return {"prompt": list(self.prompt), **made, **beside}


@dataclass(frozen=True)
class Reply:
    """A server's completion, with what the server tells of its tokens."""

    text: str
    tokens: tuple[int, ...]
    tells_ids: bool
    logprobs: tuple[float, ...] | None
    stopped: bool
    counted: bool
    prompt_logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Connection:
    """An open connection: a client of httpx2, the portal to its thread, and what the server says of its model."""

    server: Server
    client: Any
    portal: Any
    model: str
    longest: int | None
    at_once: int

    def replies(self, asked: Iterable[tuple[Named, Asked]]) -> Iterator[tuple[Named, Reply]]:
        """Each reply in the order of arrival; if a request fails, its error after the others in progress."""
        left, running = iter(asked), dict[Future, Named]()
        failed: Exception | None = None
        while True:
            for name, one in islice(left, 0 if failed else self.at_once - len(running)):
                running[self.portal.start_task_soon(self._reply, one)] = name
            if not running:
                break
            done, _ = wait(
                running, None if failed is None else self.server.timeout, FIRST_COMPLETED
            )
            if not done:  # requests in progress when one fails may fail just as slowly
                break
            for future in done:
                name, error = running.pop(future), future.exception()
                if error is None:
                    yield name, future.result()
                elif isinstance(error, Exception):
                    failed = failed or error
        if failed is not None:
            raise failed

    def all(self, asked: Seq[Asked]) -> list[Reply]:
        """The replies, in the order in which they were asked for."""
        found = dict(self.replies(enumerate(asked)))
        return [found[i] for i in range(len(asked))]

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
            if attempt < _GARBLED:
                await sleep(_FIRST_GARBLED_WAIT * 2**attempt)
        raise ServerError(
            f"the server at {self.server.address} gives no readable answer ({reason}), {_GARBLED + 1} times in a row"
        )


@contextmanager
def connected(server: Server, at_once: int) -> Iterator[Connection]:
    """A connection inside a ``with`` block; requests in progress are dropped if the block raises."""
    from anyio.from_thread import start_blocking_portal

    made, log = (
        client(server),
        logging.getLogger("httpcore2.http11"),
    )  # where headers that a server sends are logged
    hides = lambda record: not server.secret or server.secret not in record.getMessage()  # noqa: E731
    log.addFilter(hides)
    with start_blocking_portal() as portal:
        try:
            there = portal.call(_models, made, server)
            if server.model is None and len(there) != 1:
                names = ", ".join(repr(name[:200]) for name in islice(there, 10))
                some = f"it has {names}" if there else "it lists none"
                raise ServerError(
                    f"which model of the server at {server.address}? {some}: give model=…"
                )
            model = server.model or next(iter(there))
            yield Connection(server, made, portal, model, there.get(model), at_once)
        finally:
            portal.call(made.aclose)
            log.removeFilter(hides)


async def _models(client: Any, server: Server) -> dict[str, int | None]:
    """The models that a server lists, and how many tokens each takes; none from a server without a list."""
    try:
        listed = await exchanged(
            client, server, "/models", None, _LONGEST_LIST, min(_HELLO, server.timeout), 1
        )
        limits = {
            one["id"]: one.get("max_model_len")
            for one in listed["data"]
            if isinstance(one["id"], str)
        }
        return {
            name: limit if type(limit) is int and limit > 0 else None
            for name, limit in limits.items()
        }
    except Refused as error:
        if error.status < 400 or error.status in (401, 403):
            raise
        return {}  # `transformers serve` lists its cache, and fails if there is none
    except (Garbled, KeyError, TypeError, AttributeError):
        return {}


def reply_of(data: Any, asked: Asked, model: str, server: Server) -> Reply:
    """Read a reply; refused if it is another model's, or too long, or if the model has not read what was sent."""
    if not isinstance(data, dict) or not isinstance(data.get("choices"), list):
        raise Garbled("it has no choices")
    if len(data["choices"]) != 1 or not isinstance(data["choices"][0], dict):
        raise Garbled(f"it has {len(data['choices'])} choices, but one was requested")
    choice = data["choices"][0]
    if not isinstance(choice.get("text"), str) or choice.get("finish_reason") not in (
        "stop",
        "length",
    ):
        raise Garbled(
            f"it was not finished: finish_reason is {str(choice.get('finish_reason'))[:40]!r}"
        )
    said = data.get("model")
    if (
        isinstance(said, str) and said != model and not said.startswith(f"{model}@")
    ):  # and a revision
        other = server.without_key(said)[:200]
        raise ServerError(
            f"the server at {server.address} answers as {other!r}, but {model!r} was asked for. If that is the "
            f"model, give its name: model={other!r}"
        )
    usage = data["usage"] if isinstance(data.get("usage"), dict) else {}
    counted = _check_read(usage.get("prompt_tokens"), choice.get("prompt_token_ids"), asked, server)
    ids = _ids(choice.get("token_ids"), asked)
    if ids is not None and server.key is not None:  # its text has been checked
        server.check_hides_key(asked.reader.tokenizer.decode(list(ids)))
    tokens = (
        asked.reader.tokenizer(choice["text"], add_special_tokens=False)["input_ids"]
        if ids is None
        else ids
    )
    counts = [usage.get("completion_tokens"), len(tokens) // _TOKENS_A_TOKEN, len(ids or ())]
    if (most := max(count for count in counts if type(count) is int)) > asked.new_tokens:
        raise ServerError(
            f"the server at {server.address} has generated {most:,} tokens where {asked.new_tokens:,} were allowed"
        )
    logprobs = choice["logprobs"] if isinstance(choice.get("logprobs"), dict) else {}
    numbers, of_prompt = (
        _numbers(logprobs.get("token_logprobs")),
        _of_prompt(choice.get("prompt_logprobs"), asked),
    )
    stopped = choice["finish_reason"] == "stop"
    return Reply(
        choice["text"], tuple(tokens), ids is not None, numbers, stopped, counted, of_prompt
    )


def _check_read(said: Any, ids: Any, asked: Asked, server: Server) -> bool:
    """Whether the server says what it has read; refuses other tokens than were sent, and a server that doesn't say."""
    count, read = (
        said if type(said) is int else None,
        None if isinstance(asked.prompt, str) else _ids(ids, asked),
    )
    if count is not None and count != asked.read:
        raise ServerError(
            f"the server at {server.address} has read {count} tokens of a prompt that has {asked.read}: it adds a BOS "
            "token or a template, cuts prompts short, or has another tokenizer, so its answers are not to this prompt"
        )
    if read is not None and read != asked.prompt:
        raise ServerError(
            f"the server at {server.address} has read other tokens than those of the prompt"
        )
    if count is None and read is None and server.verify:
        raise ServerError(
            f"the server at {server.address} says neither how many tokens it has read (usage.prompt_tokens) nor which, "
            "so a prompt that it changes or cuts short would not be noticed. With verify=False its answers are "
            "accepted, and that nothing was counted is recorded with them"
        )
    return count is not None or read is not None


def _of_prompt(given: Any, asked: Asked) -> tuple[float, ...] | None:
    """Parse vLLM's format: for each token except the first, {"its id": {"logprob": …}}."""
    if not isinstance(given, list) or isinstance(asked.prompt, str) or len(given) != asked.read:
        return None
    try:
        return _numbers(
            [
                one[str(token)]["logprob"]
                for one, token in zip(given[1:], asked.prompt[1:], strict=True)
            ]
        )
    except (KeyError, TypeError):
        return None


def _ids(given: Any, asked: Asked) -> tuple[int, ...] | None:
    """Token ids, if there are some; they must be of the model's vocabulary."""
    size = asked.reader.cfg.d_vocab * (
        1 if asked.reader.loaded else 2
    )  # a model may have more ids than its tokenizer
    if given is not None and not (
        isinstance(given, list) and all(type(i) is int and 0 <= i < size for i in given)
    ):
        raise Garbled(f"its token ids are not whole numbers below {size:,}")
    return None if given is None else tuple(given)


def _numbers(given: Any) -> tuple[float, ...] | None:
    if not isinstance(given, list) or not all(
        type(one) in (int, float) and abs(one) < _UNLIKELY for one in given
    ):
        return None
    return tuple(map(float, given)) or None


def text_of(tokenizer: Any, ids: Seq[int]) -> str | None:
    """The text from which a tokenizer makes exactly these ids, including its BOS token; None if there is none."""
    ids = list(ids)
    without = [ids[1:]] if ids[:1] == [getattr(tokenizer, "bos_token_id", None)] else []
    for some in (*without, ids):
        text = _decoded(tokenizer, some)
        if list(tokenizer(text)["input_ids"]) == ids:
            return text
    return None


def texts_of(
    tokenizer: Any, prompts: Seq[Prompt], sequences: Seq[Mapping[str, Sequence]], address: str
) -> dict[tuple[str, str], str]:
    """The text of each prompt under each condition; refused if one would be read as different tokens."""
    made: dict[tuple[str, str], str] = {}
    refused: list[tuple[Prompt, str, list[int]]] = []
    for prompt, by_name in zip(prompts, sequences, strict=True):
        for name, sequence in by_name.items():
            ids = sequence.tokens.tolist()
            text = text_of(tokenizer, ids)
            if text is None:
                refused.append((prompt, name, ids))
            else:
                made[prompt.id, name] = text
    if refused:
        prompt, name, ids = refused[0]
        others = sorted({name for _, name, _ in refused})
        raise PromptError(
            f'the server at {address} takes only text, and prompt {prompt.id} ("{prompt.excerpt}") with the condition '
            f'"{name}" would be read as other tokens: {_first_difference(tokenizer, ids)}. So would {len(refused)} of '
            f"{len(refused) + len(made)} in all, under {', '.join(map(repr, others))}. Omit them, or serve the model "
            f"with an engine that takes token ids, such as vLLM or SGLang"
        )
    return made


def _first_difference(tokenizer: Any, ids: list[int]) -> str:
    """The first place where the text's tokens differ from the intended ones."""
    bos = getattr(tokenizer, "bos_token_id", None)
    got = list(tokenizer(_decoded(tokenizer, ids[1:] if ids[:1] == [bos] else ids))["input_ids"])
    at = next(
        (i for i, (a, b) in enumerate(zip(ids, got, strict=False)) if a != b),
        min(len(ids), len(got)),
    )
    tokens = [some[at] if at < len(some) else None for some in (ids, got)]
    shown = ["the end" if id is None else f"{_decoded(tokenizer, [id])!r} ({id})" for id in tokens]
    return f"at position {at} {shown[0]} becomes {shown[1]}"


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
