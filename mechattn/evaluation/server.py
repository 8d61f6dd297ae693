"""A server that generates answers: its address and key, which no file, log or error shows; and requests over HTTP."""

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
_WAITS = (
    0.5,
    8.0,
    60.0,
)  # seconds: the first, which doubles; the longest; and the longest for which a server may ask
_LONGEST_REASON = 300  # characters
_HINTS = {
    401: '. It needs a key: put it into an environment variable, and name the variable: key="SERVER_KEY"',
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
        verify: Refuse a server whose answers differ from the model's; with False, the comparison is only recorded.

    Raises:
        OptionError: A value cannot be used, there is no such environment variable, or httpx2 is not installed.
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
        seconds = self.timeout
        if (
            isinstance(seconds, bool)
            or not isinstance(seconds, (int, float))
            or not 0 < seconds < float("inf")
        ):
            raise OptionError(f"timeout={seconds!r}: give a number of seconds")
        if find_spec("httpx2") is None or find_spec("anyio") is None:
            raise OptionError(
                'requests to a server need the package httpx2: pip install "mechattn[server]"'
            )
        _check_key(self.key)
        object.__setattr__(self, "address", self.address.rstrip("/"))

    @property
    def secret(self) -> str | None:
        """The key itself, which stays in the environment."""
        return os.environ.get(self.key, "").strip() or None if self.key else None

    def without_key(self, text: str) -> str:
        """A server's message, with the key removed in case it is repeated there."""
        return text.replace(self.secret, "…") if self.secret else text

    def check_hides_key(self, reply: str) -> None:
        """Refuse a reply that repeats the key, before any of it is shown or stored."""
        key = self.secret
        if key and len(key) >= _SHORT and (key in reply or json.dumps(key)[1:-1] in reply):
            raise ServerError(
                f"the server at {self.address} repeats the key in its reply, which is therefore not kept"
            )


class Garbled(Exception):
    """An incomplete reply; it is requested again."""


class Refused(ServerError):
    """The server answers with an error, whose HTTP status this is."""

    status = 0


def client(server: Server) -> Any:
    """A client of httpx2 that sends the key and nothing of the environment, and wants plain replies."""
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
            f"a proxy or certificates of the environment cannot be used ({type(error).__name__}): correct HTTP_PROXY, "
            "HTTPS_PROXY, ALL_PROXY or SSL_CERT_FILE, or name the server's host in NO_PROXY"
        ) from None


def _proxy(server: Server) -> str | None:
    """The environment's proxy for a server, with a warning; none for this machine itself."""
    at, proxies = urlsplit(server.address), getproxies()
    host, proxy = str(at.hostname), proxies.get(at.scheme) or proxies.get("all")
    try:
        here = ip_address(host).is_loopback or ip_address(host).is_unspecified
    except ValueError:
        here = host == "localhost" or host.endswith(".localhost")
    if here or not proxy or proxy_bypass(at.netloc):
        return None
    reads = ", which can read prompts and key" if at.scheme == "http" else ""
    warn(
        f"requests to {server.address} go through the environment's proxy {proxy.rpartition('@')[2]}{reads}"
    )
    return proxy if "://" in proxy else f"http://{proxy}"


async def exchanged(
    client: Any, server: Server, path: str, body: Any, most: int, seconds: float, retries: int
) -> Any:
    """The JSON that a server replies, within limits of bytes and seconds; asked again if busy, slow or cut off."""
    from anyio import fail_after, sleep
    from httpx2 import InvalidURL, RequestError

    for attempt in range(retries + 1):
        wait = min(_WAITS[0] * 2**attempt, _WAITS[1]) * random.uniform(0.75, 1)
        try:
            with fail_after(seconds):
                status, headers, content = await _once(client, server, path, body, most)
        except TimeoutError:
            reason = f"gives no answer within {seconds:g} s (timeout); send fewer requests at a time (batch=…), "
            failed = ServerError(f"the server at {server.address} {reason}or allow more time")
        except (RequestError, InvalidURL) as error:
            cause = server.without_key(f"{type(error).__name__}: {error}")[:_LONGEST_REASON]
            reason = f"cannot be reached, or closed the connection ({cause})"
            failed = ServerError(f"the server at {server.address} {reason}")
        else:
            if status == 200:
                return _parsed(content, server)
            said = (
                f"go to {headers['location']}"
                if "location" in headers
                else content.decode("utf-8", "replace")
            )
            said = " ".join(server.without_key(said).split())[:_LONGEST_REASON] + _HINTS.get(
                status, ""
            )
            failed = refused = Refused(f"the server at {server.address} answers {status}: {said}")
            refused.status = status
            if status not in (408, 429) and status < 500:
                break
            with suppress(KeyError, ValueError):  # absent, or a date
                asked = float(headers["retry-after"])
                wait = asked if 0 < asked <= _WAITS[2] else wait
        if attempt < retries:
            await sleep(wait)
    raise failed


async def _once(
    client: Any, server: Server, path: str, body: Any, most: int
) -> tuple[int, Mapping[str, str], bytes]:
    """A reply's status, headers and content, which is read piece by piece."""
    sent = (
        {}
        if body is None
        else {"content": json.dumps(body), "headers": {"Content-Type": "application/json"}}
    )
    async with client.stream(
        "GET" if body is None else "POST", server.address + path, **sent
    ) as reply:
        if reply.headers.get("Content-Encoding", "identity") != "identity":
            raise ServerError(
                f"the server at {server.address} compresses its replies, although it is asked not to"
            )
        content = bytearray()
        async for piece in reply.aiter_raw():
            content += piece
            if len(content) > most:
                raise ServerError(
                    f"the server at {server.address} replies with more than {most:,} bytes, too many"
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


def _check_address(address: str) -> None:
    try:
        parts = urlsplit(address)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except (ValueError, TypeError, AttributeError):
        known = False
    if not known:
        raise OptionError(f'address={address!r}: give an address such as "http://host:8000/v1"')
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise OptionError(
            "the address of the server contains a user, a password or a query: give only the address, put the key into "
            'an environment variable, and name the variable: key="SERVER_KEY"'
        )


def _check_key(name: str | None) -> None:
    """Refuse a name without a usable key; messages don't repeat the argument if it may be the key itself."""
    if name is None:
        return
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise OptionError(
            "key must be the name of an environment variable that holds the key, and this is not a valid "
            'name: export SERVER_KEY=…, then key="SERVER_KEY"'
        )
    if not os.environ.get(name, "").strip():
        hint = (
            "export it" if len(name) < 24 else "if this is the key itself, put it into a variable"
        )
        shown = name if len(name) < 24 else f"{name[:4]}…"
        raise OptionError(
            f"key={shown!r}: there is no such environment variable, or it is empty; {hint}"
        )
    if not re.fullmatch(r"[!-~]+", os.environ[name].strip()):
        raise OptionError(
            f"key={name!r}: the key in this environment variable holds a space, a line break or a character "
            "outside ASCII, which no header can carry; export the key alone"
        )
