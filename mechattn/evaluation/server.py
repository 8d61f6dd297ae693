"""Servers that generate answers, and their completions.

Requests go through the client of the package openai, several at a time. Replies are limited in size
and checked. No file, log or error shows the key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.pool import ThreadPool
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    AliasPath,
    BaseModel,
    Field,
    FiniteFloat,
    HttpUrl,
    ValidationError,
)

from mechattn.errors import OptionError, ServerError
from mechattn.model.unloaded import UnloadedModel

_SHORTEST_HIDDEN = 8  # characters; a shorter key may occur in an answer by chance
_RETRIES = 8  # after 408, 409, 429, 5xx, time-outs and lost connections
_FIRST_REPLY_SECONDS = 10.0  # for the list of models; a wrong address is then soon noticed
_LONGEST_REASON = 300  # characters
# The bytes of the largest reply, and further ones for each token. vLLM writes about 180 for each:
# text, id, log-probability and alternatives.
_REPLY_BYTES = 2**16
_BYTES_A_TOKEN = 2**10
# Every option is sent, since vLLM and SGLang take missing ones from the checkpoint's
# generation_config.json.
_OPTIONS = {"top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "logprobs": 1}
# Options that are not in OpenAI's protocol; servers that take token ids have them.
_FURTHER_OPTIONS = {
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "return_token_ids": True,
}
_SENT_HEADERS = {"host", "connection", "content-length", "content-type", "accept", "user-agent"}
Name = TypeVar("Name")
# What a value of ``Server`` should be, if it cannot be used.
_ADVICE = {
    "address": 'give an address such as "http://host:8000/v1"',
    "model": "give the name of the model on the server",
    "timeout": "give a number of seconds",
    "verify": "give True or False",
}
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


@dataclass(frozen=True)
class Server:
    """A server with OpenAI's endpoint for completions, such as vLLM, for ``evaluate(server=…)``.

    Args:
        address: The server's address, such as "http://host:8000/v1".
        model: The name of the model on the server; by default the only one that it lists.
        key: The name of the environment variable with the server's key; None without a key.
        timeout: The number of seconds that an answer may take before it is requested again.
        verify: Whether to refuse a server whose answers differ from the model's. With False, the
            comparison is only recorded.

    Raises:
        OptionError: A value cannot be used, there is no such environment variable, or openai is not
            installed.
    """

    address: str
    model: str | None = None
    key: str | None = None
    timeout: int | float = 600.0
    verify: bool = True

    def __post_init__(self) -> None:
        if find_spec("openai") is None:
            raise OptionError(
                'requests to a server need the package openai: pip install "mechattn[server]"'
            )

        # Not repeated in a message, since it may contain a key.
        if re.search("[@?#]", str(self.address)):
            raise OptionError(
                "the address of the server contains a user, a password or a query: give only the "
                "address, put the key into an environment variable, and name the variable: "
                'key="SERVER_KEY"'
            )

        try:
            _CheckedOptions.model_validate(vars(self))
        except ValidationError as error:
            name = str(error.errors()[0]["loc"][0])
            value = getattr(self, name)
            raise OptionError(f"{name}={value!r}: {_ADVICE[name]}") from None

        if self.key is not None and not re.fullmatch("[!-~]+", self.secret):
            # The argument may be the key itself, so the message does not repeat it.
            raise OptionError(
                "key is not the name of an environment variable with a key in it, printable ASCII"
                ' without spaces: export SERVER_KEY=…, then key="SERVER_KEY"'
            )

    @property
    def secret(self) -> str:
        """The key itself, read from the environment; empty if there is none."""
        if self.key is None:
            return ""
        return os.environ.get(str(self.key), "").strip()

    def without_key(self, text: str) -> str:
        """A text of the server with its key replaced by "…", in case the server repeats it.

        A key of fewer than eight characters stays, as it may occur by chance.
        """
        if len(self.secret) < _SHORTEST_HIDDEN:
            return text
        return text.replace(self.secret, "…")

    def error(self, complaint: str) -> ServerError:
        """An error about this server, which is the subject of the complaint."""
        return ServerError(f"the server at {self.address} {self.without_key(complaint)}")


class _CheckedOptions(BaseModel, strict=True):
    """The values that :class:`Server` accepts, except for its key."""

    # HttpUrl by itself accepts an address with spaces around it, and "http:host".
    address: Annotated[str, Field(pattern=r"(?i)^https?://\S+$"), AfterValidator(HttpUrl)]
    model: str | None
    timeout: Annotated[FiniteFloat, Field(gt=0)]
    verify: bool


@dataclass(frozen=True)
class CompletionRequest:
    """A requested completion.

    Args:
        prompt: Token ids, or a text.
        length: The number of tokens that the server must read; None if it is not known.
        new_tokens: The longest completion, in tokens.
        temperature: 0 takes the likeliest token.
        seed: The seed of the server's draws.
        asks_prompt_logprobs: Whether to request the log-probabilities of the prompt's tokens too,
            which is only possible for token ids.
    """

    prompt: list[int] | str
    length: int | None
    new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    asks_prompt_logprobs: bool = False


def _reported(name: str, *place: str | int) -> Any:
    """A field that a server may report at this place in its reply."""
    return Field(None, validation_alias=AliasPath(name, *place))


class _Token(BaseModel, strict=True):
    """A token's log-probability, in nats."""

    logprob: FiniteFloat
    id: TokenId | None = None


class Completion(BaseModel, strict=True):
    """A server's completion. Fields that the server does not report are None.

    Attributes:
        text: The text.
        finish_reason: "stop" if the model ended it, and "length" if it was cut off at the limit.
        prompt_tokens: The number of tokens that the server read.
        ids: The completion's token ids.
        logprobs: The log-probability of each of its tokens, in nats.
        content: Both of these as llama.cpp reports them.
        prompt_entries: The prompt's log-probabilities as vLLM reports them: None for the first
            token, and then {"its id": {"logprob": …}} for each.
    """

    text: str = Field(validation_alias=AliasPath("choices", 0, "text"))
    finish_reason: Literal["stop", "length"] = Field(
        validation_alias=AliasPath("choices", 0, "finish_reason")
    )
    prompt_tokens: int | None = _reported("usage", "prompt_tokens")
    ids: list[TokenId] | None = _reported("choices", 0, "token_ids")
    logprobs: list[FiniteFloat | None] | None = _reported(
        "choices", 0, "logprobs", "token_logprobs"
    )
    content: list[_Token] | None = _reported("choices", 0, "logprobs", "content")
    prompt_entries: list[dict[str, _Token] | None] | None = _reported(
        "choices", 0, "prompt_logprobs"
    )

    def model_post_init(self, context: Any) -> None:
        """Take ``logprobs`` and ``ids`` from ``content`` if the server reports it."""
        if not self.content:
            return
        self.logprobs = [token.logprob for token in self.content]
        ids = [token.id for token in self.content if token.id is not None]
        if ids:  # some servers report only log-probabilities
            self.ids = ids

    @property
    def prompt_logprobs(self) -> list[float]:
        """The log-probability of each token of the prompt after the first, to four decimals."""
        logprobs = []
        for entry in self.prompt_entries or ():
            if entry:  # the first token has none
                token = next(iter(entry.values()))  # the prompt's own; alternatives may follow
                logprobs.append(round(token.logprob, 4))
        return logprobs


@dataclass(frozen=True)
class Connection:
    """A connection to a server.

    Args:
        server: The server.
        client: The client of the package openai.
        reader: The model here, of which only the tokenizer is needed.
        model: The name of the model on the server.
        n_ctx: The largest number of tokens of a prompt and its answer.
        at_once: The number of requests at a time.
    """

    server: Server
    client: Any
    reader: UnloadedModel
    model: str
    n_ctx: int
    at_once: int

    def completions(
        self, requests: Mapping[Name, CompletionRequest]
    ) -> Iterator[tuple[Name, Completion]]:
        """Request completions, several at a time.

        Args:
            requests: The requests by name.

        Yields:
            The name of a request and its completion, in the order of arrival.

        Raises:
            ServerError: A request failed. No further one is then sent, and the error is raised
                after the completions in progress.
        """
        failures: list[Exception] = []

        def completed(name: Name) -> tuple[Name, Completion] | None:
            if failures:  # nothing more is sent
                return None
            try:
                return name, self.completion(requests[name])
            except Exception as error:
                failures.append(error)
                return None

        # The pool's threads are daemons, so after Ctrl-C Python does not wait for a slow server.
        with ThreadPool(self.at_once) as pool:
            for outcome in pool.imap_unordered(completed, requests):
                if outcome is not None:
                    yield outcome

        if failures:
            raise failures[0]

    def completion(self, request: CompletionRequest) -> Completion:
        """Request one completion, and check it.

        Raises:
            ServerError: The server cannot be reached, refuses the request, sends no completion, or
                has read another prompt.
        """
        body: dict[str, Any] = {
            **_OPTIONS,
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.new_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
        }
        if not isinstance(request.prompt, str):
            body |= _FURTHER_OPTIONS
            body["stop_token_ids"] = sorted(self.reader.end)
            if request.asks_prompt_logprobs:
                body["prompt_logprobs"] = 0  # no alternatives to the prompt's own tokens

        content = _replied(self.server, self.client.post, "/completions", body=body)
        try:
            completion = Completion.model_validate_json(content)
        except ValidationError:
            reply = content.decode()[:_LONGEST_REASON]
            raise self.server.error(
                f"gives no finished completion but {reply}; is the address right, such as"
                ' "http://host:8000/v1"?'
            ) from None

        self._check_what_was_read(completion, request)
        return completion

    def _check_what_was_read(self, completion: Completion, request: CompletionRequest) -> None:
        """Refuse the completion of a prompt other than the one that was sent.

        Raises:
            ServerError: The number of tokens differs, or is not reported although answers are to be
                verified.
        """
        count = completion.prompt_tokens
        if request.length is None or count == request.length:
            return
        if count is not None:
            raise self.server.error(
                f"has read {count} tokens of a prompt that has {request.length}: it adds a BOS"
                " token or a template, cuts prompts short, or has another tokenizer, so its answers"
                " are not to this prompt"
            )
        if self.server.verify:
            raise self.server.error(
                "does not say how many tokens it has read (usage.prompt_tokens), so a prompt that"
                " it changes or cuts short would not be noticed. With verify=False its answers are"
                " accepted, with a record that tokens were not counted"
            )


@contextmanager
def connected(
    server: Server, reader: UnloadedModel, at_once: int, most_tokens: int
) -> Iterator[Connection]:
    """A connection to a server inside a ``with`` block.

    Args:
        server: The server.
        reader: The model here, of which only the tokenizer is needed.
        at_once: The number of requests at a time.
        most_tokens: The largest number of tokens in a reply, which may repeat the prompt.

    Raises:
        ServerError: The server cannot be reached, or lists several models and none is named.
    """
    with _client(server, _REPLY_BYTES + _BYTES_A_TOKEN * most_tokens) as client:
        limits = _listed_limits(client, server)
        model = server.model
        if model is None:
            if len(limits) != 1:
                names = ", ".join(map(repr, limits)) or "no models"
                raise server.error(f"lists {names[:_LONGEST_REASON]}: give model=…")
            (model,) = limits
        n_ctx = reader.cfg.n_ctx
        listed_limit = limits.get(model)
        if listed_limit is not None:
            n_ctx = min(n_ctx, listed_limit)
        yield Connection(server, client, reader, model, n_ctx, at_once)


def _client(server: Server, largest_reply: int) -> Any:
    """A client of the package openai that sends nothing from the environment except the key.

    It follows no redirects, and refuses replies with more than ``largest_reply`` bytes.
    """
    import httpx2
    import openai

    def send_only_ours(request: httpx2.Request) -> None:
        # Other headers are for OpenAI, such as OPENAI_CUSTOM_HEADERS, or describe this machine.
        for name in set(request.headers) - _SENT_HEADERS:
            del request.headers[name]
        request.headers["Authorization"] = f"Bearer {server.secret or 'none'}"
        request.headers["Accept-Encoding"] = "identity"

    def read_bounded(response: httpx2.Response) -> None:
        stream: Any = response.stream
        content = bytearray()
        for piece in stream:
            content += piece
            if len(content) > largest_reply:
                # The client neither retries after an error of its own package, nor reports it as a
                # lost connection (openai/_base_client.py, SyncAPIClient.request).
                raise openai.OpenAIError(f"its reply has more than {largest_reply:,} bytes")
        stream.close()
        text = server.without_key(content.decode("utf-8", "replace"))
        response.stream = httpx2.ByteStream(text.encode())
        # A compressed reply is not decompressed, since it might then be too large.
        response.headers.pop("Content-Encoding", None)

    is_local = urlsplit(server.address).hostname in ("localhost", "127.0.0.1", "::1")
    http_client = openai.DefaultHttpxClient(
        trust_env=not is_local,  # proxies, which a local server is not behind
        verify=httpx2.create_ssl_context(),  # heeds SSL_CERT_FILE in any case
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


def _replied(server: Server, send: Callable[..., Any], path: str, **options: Any) -> bytes:
    """The bytes that a server replies at a path.

    Raises:
        ServerError: The server refuses, cannot be reached, or does not reply in time.
    """
    import httpx2
    import openai

    try:
        return bytes(send(path, cast_to=httpx2.Response, **options).content)
    except openai.APIStatusError as error:
        status = error.status_code
        reason = " ".join(error.response.text.split())[:_LONGEST_REASON]
        refusal = server.error(
            f'answers {status}: {reason}. Check its address (such as "http://host:8000/v1"), the'
            " name of the model, and its key, which is read from an environment variable that you"
            ' name (key="SERVER_KEY")'
        )
        refusal.status = status
        raise refusal from None
    except openai.OpenAIError as error:
        cause = str(error.__cause__ or error)[:_LONGEST_REASON]
        raise server.error(
            f"cannot be reached, closed the connection or gives no answer that can be read in time"
            f" ({cause}). Send fewer requests at a time (batch=…), or allow more than"
            f" timeout={server.timeout:g} seconds"
        ) from None


def _listed_limits(client: Any, server: Server) -> dict[str, int | None]:
    """The number of tokens that each model on a server takes, by name; None if it does not say.

    It is empty for a server without a list. `transformers serve`, for example, lists its cache, and
    fails if there is none.

    Raises:
        ServerError: The server cannot be reached, or refuses the key.
    """
    client = client.with_options(timeout=min(_FIRST_REPLY_SECONDS, server.timeout), max_retries=1)
    try:
        content = _replied(server, client.get, "/models")
        models = _ListedModels.model_validate_json(content).data
    except ServerError as error:
        # Without a status the server was not reached. One below 400 is a redirect, which is not
        # followed, and 401 and 403 refuse the key. Any other concerns only the list.
        if error.status is None or error.status < 400 or error.status in (401, 403):
            raise
        return {}
    except ValidationError:
        return {}

    return {model.id: model.max_model_len for model in models}


class _ListedModel(BaseModel):
    """A model on a server, and the number of tokens that it takes, if the server says so."""

    id: str
    max_model_len: int | None = None


class _ListedModels(BaseModel):
    """A server's list of models."""

    data: list[_ListedModel]
