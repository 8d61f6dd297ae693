"""A Ray cluster of this machine alone: it listens on the loopback address, and takes work from who knows its token.

Whoever reaches a cluster of Ray can run code in it. Started without further words it listens on every interface.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mechattn.errors import OptionError

_LOOPBACK = ("127.0.0.1", "::1")
# Where clusters of several machines are not supported, Ray keeps to the loopback address; this says so of any system.
_ONE_MACHINE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def start_alone(options: Mapping[str, Any]) -> Any:
    """Start a cluster that no other machine can reach, and return Ray.

    Raises:
        OptionError: It cannot be started, or this version of Ray lets other machines reach it.
    """
    with _set(_ONE_MACHINE | _token()):
        import ray

        with _one_machine(ray):
            try:
                ray.init(address="local", include_dashboard=False, **options)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise OptionError(f"no Ray cluster can be started here: {str(error).splitlines()[0]}") from error
    address = ray.util.get_node_ip_address()
    if address not in _LOOPBACK:
        ray.shutdown()
        raise OptionError(
            f"this version of Ray ({ray.__version__}) starts a cluster that other machines can reach, at {address}, so "
            "it was stopped: install the version that mechattn asks for, or start one yourself and give its address"
        )
    return ray


def _token() -> dict[str, str]:
    """A token for this cluster alone, where the user has said nothing about tokens.

    A Ray that was imported before has read whether it takes tokens; from 2.60 on it does by itself.
    """
    mode = {} if "RAY_AUTH_MODE" in os.environ or "ray" in sys.modules else {"RAY_AUTH_MODE": "token"}
    has = any(os.environ.get(name) for name in _TOKENS) or (Path.home() / ".ray" / "auth_token").exists()
    return mode if has else mode | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}


@contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    """Environment variables, which the processes of the cluster inherit, for the length of a ``with``."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _one_machine(ray: Any) -> Iterator[None]:
    """The same for a Ray that was imported before, and has read its environment."""
    constants = ray._private.ray_constants
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before
