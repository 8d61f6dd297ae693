"""A connection to a server: several completions at a time, each requested again if its reply is incomplete."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from mechattn.errors import ServerError
from mechattn.evaluation.served.reply import Asked, Reply, reply_of
from mechattn.evaluation.served.server import Server
from mechattn.evaluation.served.wire import Garbled, Refused, client, exchanged

Named = TypeVar("Named")
_RETRIES = 8  # after 408, 429, 5xx, time-outs and lost connections
_GARBLED = 4  # retries after incomplete replies
_FIRST_GARBLED_WAIT = 0.5  # seconds, doubled each time
_HELLO = 10.0  # seconds in which a server must respond at first
_LONGEST_LIST = 2**22  # bytes of a list of models


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
                    self.client, self.server, "/completions", body, asked.most, self.server.timeout, _RETRIES
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

    made, log = client(server), logging.getLogger("httpcore2.http11")  # where headers that a server sends are logged
    hides = lambda record: not server.key or server.key not in record.getMessage()  # noqa: E731
    log.addFilter(hides)
    with start_blocking_portal() as portal:
        try:
            there = portal.call(_models, made, server)
            model = server.model or _only(there, server)
            yield Connection(server, made, portal, model, there.get(model), at_once)
        finally:
            portal.call(made.aclose)
            log.removeFilter(hides)


async def _models(client: Any, server: Server) -> dict[str, int | None]:
    """The models that a server lists, and how many tokens each takes; none from a server without a list."""
    try:
        listed = await exchanged(client, server, "/models", None, _LONGEST_LIST, min(_HELLO, server.timeout), 1)
        limits = {one["id"]: one.get("max_model_len") for one in listed["data"] if isinstance(one["id"], str)}
        return {name: limit if type(limit) is int and limit > 0 else None for name, limit in limits.items()}
    except Refused as error:
        if error.status < 400 or error.status in (401, 403):
            raise
        return {}  # `transformers serve` lists its cache, and fails if there is none
    except (Garbled, KeyError, TypeError, AttributeError):
        return {}


def _only(there: dict[str, int | None], server: Server) -> str:
    if len(there) != 1:
        some = f"it has {', '.join(repr(name[:200]) for name in islice(there, 10))}" if there else "it lists none"
        raise ServerError(f"which model of the server at {server.address}? {some}: give served_model=…")
    return next(iter(there))
