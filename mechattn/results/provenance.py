"""Where a result comes from: enough to reproduce it, or to see why two results differ."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mechattn.shown import without_secrets

Provenance = Mapping[str, Any]

_PACKAGES = ("mechattn", "transformer-lens", "transformers", "torch")


def versions() -> dict[str, str]:
    """The versions of the software that computed the numbers."""
    found = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a package"
    return found


def name_of(place: str) -> str:
    """The publishable part of a place: the last part of a path, since the rest may reveal a user name."""
    if "://" in place:
        return without_secrets(place)
    if stored := re.search(r"models--(\w[\w.-]*?)--([\w.-]+)[/\\]snapshots", place):  # the hub's cache
        return f"{stored[1]}/{stored[2]}"
    parts = [part for part in re.split(r"[/\\]", place) if part]
    is_path = place.startswith(("/", "\\", "~", ".")) or place[1:2] == ":" or len(parts) > 2
    if not is_path and (len(parts) < 2 or not os.path.exists(place)):
        return place
    return parts[-1] if parts and set(parts[-1]) != {"."} else Path(place).resolve().name


def command_of(words: Seq[str], paths: bool = False) -> str:
    """The command line, with file names only unless ``paths`` is set, and never with a password."""
    return " ".join(["mechattn", *(without_secrets(word) if paths else _word(word) for word in words)])


def _word(word: str) -> str:
    option, is_set, value = word.partition("=")
    return f"{option}={name_of(value)}" if is_set and option.startswith("-") else name_of(word)


def digest(parts: Iterable[object]) -> str:
    """A short hash of the parts, in order."""
    return hashlib.sha256(json.dumps([repr(part) for part in parts]).encode()).hexdigest()[:16]


def set_hash(parts: Iterable[object]) -> str:
    """A hash of a set of parts that ignores order, so the hashes of two halves add up to that of the whole.

    ``Σ hash(part) mod 2^64``, with repeated parts counted; it is no protection against forgery.
    """
    each = (hashlib.sha256(repr(part).encode("utf-8", "backslashreplace")).digest()[:8] for part in parts)
    return f"{sum(int.from_bytes(one, 'big') for one in each) % 2**64:016x}"


def added_hash(one: str, other: str) -> str:
    """The :func:`set_hash` of both sets together."""
    return f"{(int(one, 16) + int(other, 16)) % 2**64:016x}"


def now() -> str:
    """The time, in UTC, to the second."""
    return datetime.now(timezone.utc).replace(microsecond=0).isoformat()
