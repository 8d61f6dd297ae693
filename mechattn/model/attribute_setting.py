"""Sets an attribute of a module inside a ``with`` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def attribute_set(thing: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute on the object itself; a bridge would forward a plain assignment to the module that it wraps."""
    missing = object()
    before = vars(thing).get(name, missing)
    object.__setattr__(thing, name, value)
    try:
        yield
    finally:
        if before is missing:
            object.__delattr__(thing, name)
        else:
            object.__setattr__(thing, name, before)
