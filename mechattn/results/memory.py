"""The memory that a table or a figure may take, as a text such as "2GiB"."""

from __future__ import annotations

import re

from mechattn.errors import OptionError

MEMORY = "2GiB"  # by default
_BUDGETS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def memory_bytes(memory: str) -> int:
    """The number of bytes of a budget such as "2GiB"."""
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d+)?)\s*(KiB|MiB|GiB)\s*", str(memory), re.IGNORECASE)
    if not match or not float(match[1]):
        raise OptionError(f'memory={memory!r}: write it like "2GiB" or "500MiB"')
    return int(float(match[1]) * _BUDGETS[match[2].upper()])
