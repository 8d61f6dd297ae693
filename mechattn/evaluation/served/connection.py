"""A connection to a server: several completions at a time, with retries if the server is busy, slow or cut off."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from mechattn.errors import ServerError
from mechattn.evaluation.served.reply import Asked, Garbled, Reply, reply_of
from mechattn.evaluation.served.server import Server

Named = TypeVar("Named")
_RETRIES = 8  # after 429, 5xx, time-outs and lost connections: 0.5, 1, 2, 4, 8, 8 … seconds, or as the server asks
_GARBLED = 4  # retries after incomplete replies
_FIRST_GARBLED_WAIT = 0.5  # seconds, doubled each time
_HELLO = 10.0  # seconds in which a server must respond at first
_LONGEST_REASON = 300  # characters


class Refused(ServerError):
    """The server answers with an error; ``status`` is its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Connection:
    """An open connection.

    Args:
        server: The server.
        client: The client of the package openai.
        portal: An anyio portal to the thread in which the client runs.
        model: The model's name on the server.
        longest: The longest sequence, prompt and answer together, if the server says so.
    """

    server: Server
    client: Any
    portal: Any
    model: str
    longest: int | None

    def replies(self, asked: Iterable[tuple[Named, Asked]], at_once: int) -> Iterator[tuple[Named, Reply]]:
        """Each reply in the order of arrival, with a bound on the requests in progress.

        Raises:
            ServerError: A request failed; raised after the others in progress have finished.
        """
        left, running = iter(asked), dict[Future, Named]()
        failed: Exception | None = None
        while True:
            for name, one in islice(left, 0 if failed else at_once - len(running)):
                running[self.portal.start_task_soon(self._reply, one)] = name
            if not running:
                break
            done, _ = wait(running, None if failed is None else self.server.timeout, FIRST_COMPLETED)
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

    def reply(self, asked: Asked) -> Reply:
        """Request one reply."""
        return next(reply for _, reply in self.replies([(None, asked)], 1))

    async def _reply(self, asked: Asked) -> Reply:
        from anyio import sleep

        for attempt in range(_GARBLED + 1):
            try:
                return reply_of(await self._sent(asked), asked, self.model, self.server.address)
            except Garbled as error:
                reason = str(error)
            if attempt < _GARBLED:
                await sleep(_FIRST_GARBLED_WAIT * 2**attempt)
        raise ServerError(
            f"the server at {self.server.address} gives no readable answer ({reason}), {_GARBLED + 1} times in a row"
        )

    async def _sent(self, asked: Asked) -> Any:
        with _in_our_words(self.server):
            raw = await self.client.completions.with_raw_response.create(model=self.model, **asked.body())
            content = raw.http_response.content
        try:
            return json.loads(content)
        except ValueError:
            raise Garbled("its JSON is incomplete or invalid") from None


@contextmanager
def connected(server: Server) -> Iterator[Connection]:
    """A connection inside a ``with`` block; requests in progress are dropped if the block raises.

    Raises:
        ServerError: The server cannot be reached, or does not have the model.
    """
    from anyio.from_thread import start_blocking_portal

    with start_blocking_portal() as portal:
        client = portal.call(_client, server, server.timeout, _RETRIES)
        try:
            there = portal.call(_models, server)
            model = server.model or _only(there, server)
            longest = there.get(model)
            yield Connection(server, client, portal, model, longest)
        finally:
            portal.call(client.close)


async def _client(server: Server, timeout: int | float, retries: int) -> Any:
    from openai import AsyncOpenAI

    made = AsyncOpenAI(base_url=server.address, api_key=server.key or "none", timeout=timeout, max_retries=retries)
    made.organization = made.project = None  # from the environment, for an account with OpenAI: not for this server
    return made


async def _models(server: Server) -> dict[str, int | None]:
    """The models that a server lists, and how many tokens each takes; none from a server without a list."""
    hello = await _client(server, min(_HELLO, server.timeout), 1)
    try:
        with _in_our_words(server):
            raw = await hello.models.with_raw_response.list()
        listed = json.loads(raw.http_response.content)["data"]
        return {one["id"]: one.get("max_model_len") for one in listed}
    except Refused as error:
        if error.status in (401, 403):
            raise
        return {}  # `transformers serve` lists its cache, and fails if there is none
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    finally:
        await hello.close()


def _only(there: dict[str, int | None], server: Server) -> str:
    if len(there) != 1:
        some = f"it has {', '.join(map(repr, islice(there, 10)))}" if there else "it lists none"
        raise ServerError(f"which model of the server at {server.address}? {some}: give served_model=…")
    return next(iter(there))


@contextmanager
def _in_our_words(server: Server) -> Iterator[None]:
    """The client's error as one of ours, without the request, which contains the key."""
    from openai import APIConnectionError, APIStatusError, APITimeoutError

    try:
        yield
    except APIStatusError as error:
        said = " ".join(server.without_key(error.response.text).split())[:_LONGEST_REASON]
        words = f"the server at {server.address} answers {error.status_code}: {said}{_hint(error.status_code)}"
        raise Refused(words, error.status_code) from None
    except APITimeoutError:
        raise ServerError(
            f"the server at {server.address} gives no answer within {server.timeout:g} s (server_timeout); send fewer "
            f"requests at a time (batch=…), or allow more time"
        ) from None
    except APIConnectionError as error:
        cause = server.without_key(f"{type(error.__cause__).__name__}: {error.__cause__}")[:_LONGEST_REASON]
        raise ServerError(
            f"the server at {server.address} cannot be reached, or closed the connection ({cause})"
        ) from None


def _hint(status: int) -> str:
    hints = {
        401: ". It needs a key: put the key into an environment variable, and name the variable: "
        'server_key="SERVER_KEY"',
        404: '. Is the address right ("http://host:8000/v1"), and does it have the served_model?',
    }
    return hints.get(status, "")
