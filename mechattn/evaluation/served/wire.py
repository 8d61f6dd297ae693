"""One exchange with a server over HTTP: with its address alone, and bounded in time and size."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from mechattn.errors import ServerError, warn
from mechattn.evaluation.served.server import Server

_WAITS = 0.5, 8.0, 60.0  # seconds: the first, which doubles; the longest; and the longest for which a server may ask
_LONGEST_REASON = 300  # characters
_HINTS = {
    401: '. It needs a key: put it into an environment variable, and name the variable: server_key="SERVER_KEY"',
    404: '. Is the address right ("http://host:8000/v1"), and does it have the served_model?',
    **dict.fromkeys(range(300, 400), ". Prompts and key go only to the address that you give: give the other one"),
}


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
            headers={"Authorization": f"Bearer {server.key or 'none'}", "Accept-Encoding": "identity"},
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
    warn(f"requests to {server.address} go through the environment's proxy {proxy.rpartition('@')[2]}{reads}")
    return proxy if "://" in proxy else f"http://{proxy}"


async def exchanged(client: Any, server: Server, path: str, body: Any, most: int, seconds: float, retries: int) -> Any:
    """The JSON that a server replies, within limits of bytes and seconds; asked again if busy, slow or cut off."""
    from anyio import fail_after, sleep
    from httpx2 import InvalidURL, RequestError

    for attempt in range(retries + 1):
        wait = min(_WAITS[0] * 2**attempt, _WAITS[1]) * random.uniform(0.75, 1)
        try:
            with fail_after(seconds):
                status, headers, content = await _once(client, server, path, body, most)
        except TimeoutError:
            reason = f"gives no answer within {seconds:g} s (server_timeout); send fewer requests at a time (batch=…), "
            failed = ServerError(f"the server at {server.address} {reason}or allow more time")
        except (RequestError, InvalidURL) as error:
            cause = server.without_key(f"{type(error).__name__}: {error}")[:_LONGEST_REASON]
            reason = f"cannot be reached, or closed the connection ({cause})"
            failed = ServerError(f"the server at {server.address} {reason}")
        else:
            if status == 200:
                return _parsed(content, server)
            said = f"go to {headers['location']}" if "location" in headers else content.decode("utf-8", "replace")
            said = " ".join(server.without_key(said).split())[:_LONGEST_REASON] + _HINTS.get(status, "")
            failed = refused = Refused(f"the server at {server.address} answers {status}: {said}")
            refused.status = status
            if status not in (408, 429) and status < 500:
                break
            wait = _asked_wait(headers) or wait
        if attempt < retries:
            await sleep(wait)
    raise failed


async def _once(client: Any, server: Server, path: str, body: Any, most: int) -> tuple[int, Mapping[str, str], bytes]:
    """A reply's status, headers and content, which is read piece by piece."""
    sent = {} if body is None else {"content": json.dumps(body), "headers": {"Content-Type": "application/json"}}
    async with client.stream("GET" if body is None else "POST", server.address + path, **sent) as reply:
        if reply.headers.get("Content-Encoding", "identity") != "identity":
            raise ServerError(f"the server at {server.address} compresses its replies, although it is asked not to")
        content = bytearray()
        async for piece in reply.aiter_raw():
            content += piece
            if len(content) > most:
                raise ServerError(f"the server at {server.address} replies with more than {most:,} bytes, too many")
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


def _asked_wait(headers: Mapping[str, str]) -> float | None:
    """The seconds after which a busy server wants to be asked again, if it says so."""
    try:
        seconds = float(headers["retry-after"])
    except (KeyError, ValueError):  # absent, or a date
        return None
    return seconds if 0 < seconds <= _WAITS[2] else None
