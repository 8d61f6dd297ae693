"""Where a result comes from: enough to make it again, or to see why two results differ."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

Provenance = Mapping[str, Any]

_PACKAGES = ("mechattn", "transformer-lens", "transformers", "torch")


def versions() -> dict[str, str]:
    """The versions of what computed the numbers."""
    found = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a package"
    return found


def digest(parts: Iterable[object]) -> str:
    """A short hash of the parts, in their order."""
    return hashlib.sha256(json.dumps([repr(part) for part in parts]).encode()).hexdigest()[:16]


def set_hash(parts: Iterable[object]) -> str:
    """A hash of a set of parts that no order changes, so that the hashes of two halves add up to that of the whole.

    ``Σ hash(part) mod 2^64``, with repeated parts counted: it tells sets apart, not forgers.
    """
    each = (hashlib.sha256(repr(part).encode("utf-8", "backslashreplace")).digest()[:8] for part in parts)
    return f"{sum(int.from_bytes(one, 'big') for one in each) % 2**64:016x}"


def added_hash(one: str, other: str) -> str:
    """The :func:`set_hash` of both sets together."""
    return f"{(int(one, 16) + int(other, 16)) % 2**64:016x}"


def now() -> str:
    """The time, in UTC, to the second."""
    return datetime.now(timezone.utc).replace(microsecond=0).isoformat()
