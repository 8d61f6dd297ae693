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


def now() -> str:
    """The time, in UTC, to the second."""
    return datetime.now(timezone.utc).replace(microsecond=0).isoformat()
