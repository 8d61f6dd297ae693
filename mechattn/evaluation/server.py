"""A server that generates answers: its address, and its key, which no file, log or error shows."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.util import find_spec

from pydantic import HttpUrl, TypeAdapter, ValidationError

from mechattn.errors import OptionError, ServerError

_SHORT = 8  # characters: a shorter key may stand in an answer by chance


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

        if re.search("[@?#]", str(self.address)):
            raise OptionError(
                "the address of the server contains a user, a password or a query: give only the "
                "address, put the key into an environment variable, and name the variable: "
                'key="SERVER_KEY"'
            )

        try:
            TypeAdapter(HttpUrl).validate_python(self.address)
        except ValidationError:
            raise OptionError(
                f'address={self.address!r}: give an address such as "http://host:8000/v1"'
            ) from None

        if self.model == "":
            raise OptionError("model='': give the model's name on the server")
        is_number = isinstance(self.timeout, (int, float))
        if not is_number or not 0 < self.timeout < float("inf"):
            raise OptionError(f"timeout={self.timeout!r}: give a number of seconds")
        if self.key is not None and not re.fullmatch("[!-~]+", self.secret):
            # The argument is not repeated: it may be the key itself.
            raise OptionError(
                "key is not the name of an environment variable with a key in it, printable ASCII"
                ' without spaces: export SERVER_KEY=…, then key="SERVER_KEY"'
            )

    @property
    def secret(self) -> str:
        """The key itself, which stays in the environment; empty if there is none."""
        return os.environ.get(str(self.key), "").strip()

    def without_key(self, text: str) -> str:
        """What a server says, with the key removed in case it is repeated there."""
        if len(self.secret) < _SHORT:
            return text
        return text.replace(self.secret, "…")

    def error(self, complaint: str) -> ServerError:
        """An error about this server."""
        return ServerError(f"the server at {self.address} {self.without_key(complaint)}")
