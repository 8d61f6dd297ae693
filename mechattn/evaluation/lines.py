"""The file format of an evaluation: JSON lines, the first with the provenance."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def as_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """One JSON object per line."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def replaceable(path: Path) -> bool:
    """Whether the path is free, or holds an evaluation, judged by its first line."""
    if not path.exists():
        return True
    try:
        if not path.is_file():
            return False
        with open(path, "rb") as stored:
            first = stored.readline()
        return not first or set(json.loads(first)) == {"provenance"}
    except (OSError, ValueError, TypeError, RecursionError):
        return False
