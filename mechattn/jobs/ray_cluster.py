"""A Ray cluster on this machine only: it listens on the loopback address and requires a token.

Anyone who can reach a Ray cluster can run code in it, and by default it listens on every interface.
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
# Where clusters of several machines are unsupported, Ray stays on the loopback address; this requests it everywhere.
_ONE_MACHINE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def start_alone(options: Mapping[str, Any]) -> Any:
    """Start a cluster that no other machine can reach, and return Ray."""
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
            "it was stopped: install the version that mechattn requires, or start one yourself and give its address"
        )
    return ray


def _token() -> dict[str, str]:
    """A token for this cluster only, unless the user has configured tokens."""
    mode = {} if "RAY_AUTH_MODE" in os.environ or "ray" in sys.modules else {"RAY_AUTH_MODE": "token"}
    has = any(os.environ.get(name) for name in _TOKENS) or (Path.home() / ".ray" / "auth_token").exists()
    return mode if has else mode | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}


@contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, which the cluster's processes inherit, within a ``with`` block."""
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
    """Do the same for a Ray that was imported earlier and has already read its environment."""
    constants = ray._private.ray_constants
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before
