"""The address of a server, the model's name there, and its key, which no file, log or error shows."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from urllib.parse import urlsplit

from mechattn.errors import OptionError, ServerError

_SHORT = 8  # characters: a shorter key may stand in an answer by chance


@dataclass(frozen=True)
class Server:
    """A server with an endpoint for completions: its address, the model there (None: the only one), and the key."""

    address: str
    model: str | None
    timeout: int | float
    verify: bool
    key: str | None = field(default=None, repr=False)

    def without_key(self, text: str) -> str:
        """A server's message, with the key removed in case it is repeated there."""
        return text.replace(self.key, "…") if self.key else text

    def check_hides_key(self, reply: str) -> None:
        """Refuse a reply that repeats the key, before any of it is shown or stored."""
        if self.key and len(self.key) >= _SHORT and (self.key in reply or json.dumps(self.key)[1:-1] in reply):
            raise ServerError(f"the server at {self.address} repeats the key in its reply, which is therefore not kept")


def server_given(
    address: str | None, model: str | None, key_name: str | None, timeout: int | float, verify: bool
) -> Server | None:
    """The server that the arguments of ``evaluate`` name; None if they name none."""
    if address is None:
        for name, value in (("served_model", model), ("server_key", key_name)):
            if value is not None:
                raise OptionError(f'{name} needs a server: give server="http://host:8000/v1" too')
        return None
    _check_address(address)
    if model is not None and (not isinstance(model, str) or not model.strip()):
        raise OptionError(f"served_model={model!r}: give the model's name on the server")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
        raise OptionError(f"server_timeout={timeout!r}: give a number of seconds")
    if find_spec("httpx2") is None or find_spec("anyio") is None:
        raise OptionError('requests to a server need the package httpx2: pip install "mechattn[server]"')
    return Server(address.rstrip("/"), model, float(timeout), bool(verify), _key(key_name))


def _check_address(address: str) -> None:
    try:
        parts = urlsplit(address)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except (ValueError, TypeError, AttributeError):
        known = False
    if not known:
        raise OptionError(f'server={address!r}: give an address such as "http://host:8000/v1"')
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise OptionError(
            "the address of the server contains a user, a password or a query: give only the address, put the key into "
            'an environment variable, and name the variable: server_key="SERVER_KEY"'
        )


def _key(name: str | None) -> str | None:
    """The key in an environment variable; messages don't repeat the argument if it may be the key itself."""
    if name is None:
        return None
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise OptionError(
            "server_key must be the name of an environment variable that holds the key, and this is not a valid "
            'name: export SERVER_KEY=…, then server_key="SERVER_KEY"'
        )
    if not os.environ.get(name, "").strip():
        hint = "export it" if len(name) < 24 else "if this is the key itself, put it into a variable"
        shown = name if len(name) < 24 else f"{name[:4]}…"
        raise OptionError(f"server_key={shown!r}: there is no such environment variable, or it is empty; {hint}")
    key = os.environ[name].strip()
    if not re.fullmatch(r"[!-~]+", key):
        raise OptionError(
            f"server_key={name!r}: the key in this environment variable holds a space, a line break or a character "
            "outside ASCII, which no header can carry; export the key alone"
        )
    return key
