"""A server that generates answers: its address and key, which no file, log or error shows; and
requests over HTTP."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from mechattn.errors import OptionError, ServerError, warn

_SHORT = 8  # characters: a shorter key may stand in an answer by chance
# Seconds before a request is sent again.
_FIRST_WAIT = 0.5  # doubled each time
_LONGEST_WAIT = 8.0
_LONGEST_WAIT_ASKED = 60.0  # that a server may ask for
_LONGEST_REASON = 300  # characters
_SHORTEST_KEY = 24  # characters: what is as long may be the key, and not its name
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
class Server:
    """A server with OpenAI's endpoint for completions, such as vLLM, for ``evaluate(server=…)``.

    Args:
        address: Its address, such as "http://host:8000/v1".
        model: The name of the model there; by default the only one that it lists.
        key: The name of the environment variable with the server's key; none by default.
        timeout: Seconds that an answer may take before it is requested again.
        verify: Refuse a server whose answers differ from the model's; with False, the comparison is
            only recorded.

    Raises:
        OptionError: A value cannot be used, there is no such environment variable, or httpx2 is not
            installed.
    """

    address: str
    model: str | None = None
    key: str | None = None
    timeout: int | float = 600.0
    verify: bool = True

    def __post_init__(self) -> None:
        _check_address(self.address)
        if self.model is not None and (not isinstance(self.model, str) or not self.model.strip()):
            raise OptionError(f"model={self.model!r}: give the model's name on the server")
        _check_timeout(self.timeout)
        if find_spec("httpx2") is None or find_spec("anyio") is None:
            raise OptionError(
                'requests to a server need the package httpx2: pip install "mechattn[server]"'
            )
        _check_key(self.key)
        object.__setattr__(self, "address", self.address.rstrip("/"))

    @property
    def secret(self) -> str | None:
        """The key itself, which stays in the environment."""
        if not self.key:
            return None
        return os.environ.get(self.key, "").strip() or None

    def without_key(self, text: str) -> str:
        """A server's message, with the key removed in case it is repeated there."""
        if not self.secret:
            return text
        return text.replace(self.secret, "…")

    def check_hides_key(self, reply: str) -> None:
        """Refuse a reply that repeats the key, before any of it is shown or stored."""
        key = self.secret
        if key and len(key) >= _SHORT and (key in reply or json.dumps(key)[1:-1] in reply):
            raise ServerError(
                f"the server at {self.address} repeats the key in its reply, which is therefore not"
                " kept"
            )


class Garbled(Exception):
    """An incomplete reply; it is requested again."""


class Refused(ServerError):
    """The server answers with an error, whose HTTP status this is."""

    status = 0


def client(server: Server) -> Any:
    """A client of httpx2 that sends the key and nothing of the environment, and wants plain
    replies."""
    import httpx2

    try:
        return httpx2.AsyncClient(
            headers={
                "Authorization": f"Bearer {server.secret or 'none'}",
                "Accept-Encoding": "identity",
            },
            verify=httpx2.create_ssl_context(),  # SSL_CERT_FILE too
            proxy=_proxy(server),
            trust_env=False,
            timeout=None,  # which would be that of each read
            limits=httpx2.Limits(),
        )
    except (ImportError, ValueError, OSError, httpx2.InvalidURL) as error:
        raise ServerError(
            f"a proxy or certificates of the environment cannot be used ({type(error).__name__}):"
            " correct HTTP_PROXY, HTTPS_PROXY, ALL_PROXY or SSL_CERT_FILE, or name the server's"
            " host in NO_PROXY"
        ) from None


def _proxy(server: Server) -> str | None:
    """The environment's proxy for a server, with a warning; none for this machine itself."""
    address = urlsplit(server.address)
    host = str(address.hostname)
    proxies = getproxies()
    proxy = proxies.get(address.scheme) or proxies.get("all")
    if not proxy or _is_local(host) or proxy_bypass(address.netloc):
        return None
    warning = (
        f"requests to {server.address} go through the environment's proxy "
        f"{proxy.rpartition('@')[2]}"
    )
    if address.scheme == "http":
        warning += ", which can read prompts and key"
    warn(warning)
    if "://" in proxy:
        return proxy
    return f"http://{proxy}"


def _is_local(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


async def exchanged(
    client: Any, server: Server, path: str, body: Any, most: int, seconds: float, retries: int
) -> Any:
    """The JSON that a server replies, within limits of bytes and seconds.

    It is asked again if it is busy, slow or cut off.
    """
    from anyio import fail_after, sleep
    from httpx2 import InvalidURL, RequestError

    failed: ServerError
    for attempt in range(retries + 1):
        wait = min(_FIRST_WAIT * 2**attempt, _LONGEST_WAIT) * random.uniform(0.75, 1)
        try:
            with fail_after(seconds):
                status, headers, content = await _once(client, server, path, body, most)
        except TimeoutError:
            failed = ServerError(
                f"the server at {server.address} gives no answer within {seconds:g} s (timeout); "
                "send fewer requests at a time (batch=…), or allow more time"
            )
        except (RequestError, InvalidURL) as error:
            cause = server.without_key(f"{type(error).__name__}: {error}")[:_LONGEST_REASON]
            failed = ServerError(
                f"the server at {server.address} cannot be reached, or closed the connection "
                f"({cause})"
            )
        else:
            if status == 200:
                return _parsed(content, server)
            failed = _refused(server, status, headers, content)
            is_temporary = status in (408, 429) or status >= 500
            if not is_temporary:
                break
            with suppress(KeyError, ValueError):  # absent, or a date
                asked_wait = float(headers["retry-after"])
                if 0 < asked_wait <= _LONGEST_WAIT_ASKED:
                    wait = asked_wait
        if attempt < retries:
            await sleep(wait)
    raise failed


def _refused(server: Server, status: int, headers: Mapping[str, str], content: bytes) -> Refused:
    """The error for a reply that is none, with the server's words."""
    reason = content.decode("utf-8", "replace")
    if "location" in headers:
        reason = f"go to {headers['location']}"
    reason = " ".join(server.without_key(reason).split())[:_LONGEST_REASON]
    hint = _HINTS.get(status, "")
    refused = Refused(f"the server at {server.address} answers {status}: {reason}{hint}")
    refused.status = status
    return refused


async def _once(
    client: Any, server: Server, path: str, body: Any, most: int
) -> tuple[int, Mapping[str, str], bytes]:
    """A reply's status, headers and content, which is read piece by piece."""
    method = "GET"
    request: dict[str, Any] = {}
    if body is not None:
        method = "POST"
        request["content"] = json.dumps(body)
        request["headers"] = {"Content-Type": "application/json"}
    async with client.stream(method, server.address + path, **request) as reply:
        if reply.headers.get("Content-Encoding", "identity") != "identity":
            raise ServerError(
                f"the server at {server.address} compresses its replies, although it is asked"
                " not to"
            )
        content = bytearray()
        async for piece in reply.aiter_raw():
            content += piece
            if len(content) > most:
                raise ServerError(
                    f"the server at {server.address} replies with more than {most:,} bytes, too"
                    " many"
                )
        return reply.status_code, reply.headers, bytes(content)


def _parsed(content: bytes, server: Server) -> Any:
    """The JSON of a reply; its texts can be written, and none holds the key."""
    try:
        data = json.loads(content)
        text = json.dumps(data, ensure_ascii=False)
        text.encode()
    except (ValueError, RecursionError):
        raise Garbled("its JSON is incomplete or invalid") from None
    server.check_hides_key(text)
    return data


def _check_timeout(seconds: Any) -> None:
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds < float("inf"):
        raise OptionError(f"timeout={seconds!r}: give a number of seconds")


def _check_address(address: str) -> None:
    try:
        parts = urlsplit(address)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, TypeError, AttributeError):
        is_usable = False
    if not is_usable:
        raise OptionError(f'address={address!r}: give an address such as "http://host:8000/v1"')
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise OptionError(
            "the address of the server contains a user, a password or a query: give only the "
            "address, put the key into an environment variable, and name the variable: "
            'key="SERVER_KEY"'
        )


def _check_key(name: str | None) -> None:
    """Refuse a name without a usable key; messages don't repeat the argument if it may be the key
    itself."""
    if name is None:
        return
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise OptionError(
            "key must be the name of an environment variable that holds the key, and this is not a"
            ' valid name: export SERVER_KEY=…, then key="SERVER_KEY"'
        )
    if not os.environ.get(name, "").strip():
        if len(name) < _SHORTEST_KEY:
            raise OptionError(
                f"key={name!r}: there is no such environment variable, or it is empty; export it"
            )
        raise OptionError(
            f"key={name[:4] + '…'!r}: there is no such environment variable, or it is empty; if"
            " this is the key itself, put it into a variable"
        )
    if not re.fullmatch(r"[!-~]+", os.environ[name].strip()):
        raise OptionError(
            f"key={name!r}: the key in this environment variable holds a space, a line break or a "
            "character outside ASCII, which no header can carry; export the key alone"
        )
