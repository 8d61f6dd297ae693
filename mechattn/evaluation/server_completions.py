"""Completions from a server, by the client of the package openai: several requests at a time,
replies bounded and checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any, TypeVar
from urllib.parse import urlsplit

from mechattn.errors import ServerError
from mechattn.evaluation.server import Server
from mechattn.model.checkpoint import UnloadedModel

Name = TypeVar("Name")
_RETRIES = 8  # after 408, 409, 429, 5xx, time-outs and lost connections
_HELLO = 10.0  # seconds in which a server must respond at first
_LONGEST_REASON = 300  # characters
_BYTES = 2**16
_BYTES_A_TOKEN = 2**10  # vLLM writes about 180: text, id, log-probability, alternatives
# vLLM and SGLang take missing options from the checkpoint's generation_config.json, so every option
# is sent.
_PLAIN = {"top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "logprobs": 1}
_BESIDE_OPENAI = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True}
_SENT_HEADERS = {"host", "connection", "content-length", "content-type", "accept", "user-agent"}
_HINTS = {
    401: (
        ". It needs a key: put it into an environment variable, and name the variable:"
        ' key="SERVER_KEY"'
    ),
    404: '. Is the address right ("http://host:8000/v1"), and does it have the model?',
    **dict.fromkeys(
        range(300, 400),
        ". Prompts and key go only to the address that you give: give the other one",
    ),
}


@dataclass(frozen=True)
class CompletionRequest:
    """A requested completion of token ids, or of a text.

    ``length`` is the number of tokens that the server must read; None if that is not known.
    ``prompt_logprobs`` of 0 asks for the log-probabilities of the prompt, without alternatives.
    """

    prompt: list[int] | str
    length: int | None
    new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    prompt_logprobs: int | None = None


@dataclass(frozen=True)
class Completion:
    """A server's completion; what a server does not tell is None or empty.

    ``stopped``: the model ended it; ``read``: the number of tokens of the prompt.
    """

    text: str
    stopped: bool
    read: int | None
    ids: list[int] | None
    logprobs: list[float]
    prompt_logprobs: list[float]


@dataclass(frozen=True)
class Connection:
    """A client of openai, and what the server says of its model.

    ``longest`` is the number of tokens that a prompt may have with its answer.
    """

    server: Server
    client: Any
    reader: UnloadedModel
    model: str
    longest: int
    at_once: int

    def completions(
        self, requests: Iterable[tuple[Name, CompletionRequest]]
    ) -> Iterator[tuple[Name, Completion]]:
        """Each completion in the order of arrival; if a request fails, its error after the others
        in progress."""
        failures: list[Exception] = []

        def finished(item: tuple[Name, CompletionRequest]) -> tuple[Name, Completion] | None:
            name, request = item
            if failures:
                return None
            try:
                return name, self.completion(request)
            except Exception as error:
                failures.append(error)
                return None

        # Its threads are daemons: after Ctrl-C nobody waits for a slow server.
        with ThreadPool(self.at_once) as pool:
            for outcome in pool.imap_unordered(finished, requests):
                if outcome is not None:
                    yield outcome
        if failures:
            raise failures[0]

    def completion(self, request: CompletionRequest) -> Completion:
        """One completion, read and checked."""
        body: dict[str, Any] = {
            **_PLAIN,
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.new_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
        }
        if not isinstance(request.prompt, str):
            body |= _BESIDE_OPENAI
            body["stop_token_ids"] = sorted(self.reader.end)
            body["prompt_logprobs"] = request.prompt_logprobs
        reply = _replied(self.server, partial(self.client.post, "/completions", body=body))
        return _read(reply, request, self)


@contextmanager
def connected(
    server: Server, reader: UnloadedModel, at_once: int, tokens: int
) -> Iterator[Connection]:
    """A connection inside a ``with`` block, whose replies hold at most this number of tokens."""
    with _client(server, _BYTES + _BYTES_A_TOKEN * tokens) as client:
        limits = _models(client, server)
        if server.model is None and len(limits) != 1:
            names = ", ".join(map(repr, limits))[:_LONGEST_REASON]
            raise server.error(f"has more models than one, or lists none ({names}): give model=…")
        model = server.model or next(iter(limits))
        longest = reader.cfg.n_ctx
        if isinstance(limits.get(model), int):
            longest = min(longest, limits[model])
        yield Connection(server, client, reader, model, longest, at_once)


def _client(server: Server, most: int) -> Any:
    """A client that sends nothing of the environment but the key, follows no redirect, and reads
    no more bytes of a reply."""
    import httpx2
    import openai

    def send_only_ours(request: httpx2.Request) -> None:
        # Others are for OpenAI, such as OPENAI_CUSTOM_HEADERS, or describe this machine.
        for name in set(request.headers) - _SENT_HEADERS:
            del request.headers[name]
        request.headers["Authorization"] = f"Bearer {server.secret or 'none'}"
        request.headers["Accept-Encoding"] = "identity"

    def read_bounded(response: httpx2.Response) -> None:
        stream: Any = response.stream
        content = bytearray()
        for piece in stream:
            content += piece
            if len(content) > most:
                # An error of the client's own is neither retried nor taken for a lost connection.
                raise openai.OpenAIError(f"replies with more than {most:,} bytes, too many")
        stream.close()
        text = server.without_key(content.decode("utf-8", "replace"))
        response.stream = httpx2.ByteStream(text.encode())
        response.headers.pop("Content-Encoding", None)  # few bytes may be many decompressed ones

    is_here = urlsplit(server.address).hostname in ("localhost", "127.0.0.1", "::1")
    http_client = openai.DefaultHttpxClient(
        trust_env=not is_here,  # its proxies
        verify=httpx2.create_ssl_context(),  # with SSL_CERT_FILE in any case
        follow_redirects=False,
        event_hooks={"request": [send_only_ours], "response": [read_bounded]},
    )
    return openai.OpenAI(
        base_url=server.address,
        api_key="none",  # each request gets the key above
        timeout=server.timeout,
        max_retries=_RETRIES,
        http_client=http_client,
    )


def _replied(server: Server, ask: Callable[..., Any]) -> Any:
    """The JSON that a server replies; errors of the client in words."""
    import httpx2
    import openai

    try:
        content = ask(cast_to=httpx2.Response).content
        return json.loads(content)
    except openai.APIConnectionError as error:
        cause = f"{type(error.__cause__).__name__}: {error.__cause__}"[:_LONGEST_REASON]
        raise server.error(
            f"cannot be reached, closed the connection or gives no answer in time ({cause}). Send"
            f" fewer requests at a time (batch=…), or allow more than timeout={server.timeout:g}"
            " seconds"
        ) from None
    except openai.APIStatusError as error:
        reason = error.response.headers.get("location") or error.response.text
        reason = " ".join(reason.split())[:_LONGEST_REASON]
        status = error.status_code
        refusal = server.error(f"answers {status}: {reason}{_HINTS.get(status, '')}")
        refusal.status = status
        raise refusal from None
    except openai.OpenAIError as error:
        raise server.error(str(error)) from None
    except (ValueError, RecursionError):
        raise _unreadable(server, content.decode()) from None


def _unreadable(server: Server, reply: Any) -> ServerError:
    return server.error(
        f"gives no finished completion but {str(reply)[:_LONGEST_REASON]}; is the address right,"
        ' such as "http://host:8000/v1"?'
    )


def _models(client: Any, server: Server) -> dict[str, Any]:
    """The models that a server lists, and how many tokens each takes.

    None from a server without a list: `transformers serve` lists its cache, and fails if there is
    none.
    """
    client = client.with_options(timeout=min(_HELLO, server.timeout), max_retries=1)
    try:
        listed = _replied(server, partial(client.get, "/models"))
        return {str(entry["id"]): entry.get("max_model_len") for entry in listed["data"]}
    except ServerError as error:
        if error.status < 400 or error.status in (401, 403):
            raise
    except (KeyError, TypeError, AttributeError):
        pass
    return {}


def _read(reply: Any, request: CompletionRequest, connection: Connection) -> Completion:
    """Read a reply.

    Raises:
        ServerError: It is no completion, or another model's, or the model has not read what was
            sent.
    """
    server = connection.server
    try:
        completion = _parsed(reply, request.prompt[1:])
        connection.reader.tokenizer.decode(completion.ids or [])  # fails if they are none
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise _unreadable(server, reply) from None

    model = str(reply.get("model") or connection.model)
    if not f"{model}@".startswith(f"{connection.model}@"):  # a revision may follow the name
        raise server.error(
            f"answers as {model[:200]!r}, but {connection.model!r} was asked for. If that is the"
            f" model, give its name: model={model[:200]!r}"
        )
    if request.length is None:
        return completion
    if completion.read is None and server.verify:
        raise server.error(
            "does not say how many tokens it has read (usage.prompt_tokens), so a prompt that it"
            " changes or cuts short would not be noticed. With verify=False its answers are"
            " accepted, and that nothing was counted is recorded with them"
        )
    if completion.read not in (None, request.length):
        raise server.error(
            f"has read {completion.read} tokens of a prompt that has {request.length}: it adds a BOS token or"
            " a template, cuts prompts short, or has another tokenizer, so its answers are not to"
            " this prompt"
        )
    return completion


def _parsed(reply: Any, tokens: list[int] | str) -> Completion:
    """The parts of a reply; ``tokens`` are those of the prompt after the first."""
    (choice,) = reply["choices"]
    choice["text"].encode()  # fails if it is none that can be written
    read = (reply.get("usage") or {}).get("prompt_tokens")
    if read is not None:
        read = int(read)
    ids = choice.get("token_ids")
    logprobs = choice.get("logprobs") or {}
    token_logprobs = logprobs.get("token_logprobs") or ()
    if "content" in logprobs:  # as llama.cpp tells both
        ids = [entry["id"] for entry in logprobs["content"]]
        token_logprobs = [entry["logprob"] for entry in logprobs["content"]]
    # As vLLM tells them: None for the first token, then {"its id": {"logprob": …}}.
    entries = (choice.get("prompt_logprobs") or [None])[1:]
    prompt_logprobs = [
        float(entry[str(token)]["logprob"]) for entry, token in zip(entries, tokens, strict=False)
    ]
    return Completion(
        text=choice["text"],
        stopped={"stop": True, "length": False}[choice["finish_reason"]],
        read=read,
        ids=ids,
        logprobs=[float(logprob) for logprob in token_logprobs if logprob is not None],
        prompt_logprobs=prompt_logprobs,
    )
