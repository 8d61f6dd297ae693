"""A description of what determines a number, the same in every process: no memory addresses."""

from __future__ import annotations

import hashlib
import inspect
import os
import re
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

import numpy as np

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), range, slice, Enum, os.PathLike, np.generic)


def identity(value: Any, within: tuple[int, ...] = ()) -> str:
    """An analysis, a condition or an intervention as text: its class and fields, as in ``repr``."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if id(value) in within:
        return "…"
    within = (*within, id(value))
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{identity(k, within)}: {identity(v, within)}' for k, v in value.items())}}}"
    if isinstance(value, (tuple, list, Set)):
        return _several(value, within)
    if isinstance(value, type) or inspect.isroutine(value):
        return _function(value, within) if inspect.isroutine(value) else _named(value)
    if hasattr(value, "__array__"):
        return f"{type(value).__name__}({_numbers(value)})"
    return _object(value, within)


def kind_of(value: Any) -> str:
    """The name of an object's class, with a hash of its source if it is not mechattn's."""
    kind: Any = type(value)
    return _named(kind)


def _several(values: Any, within: tuple[int, ...]) -> str:
    made = [identity(value, within) for value in values]
    if isinstance(values, Set):
        return f"{{{', '.join(sorted(made))}}}"
    if isinstance(values, list):
        return f"[{', '.join(made)}]"
    return f"({', '.join(made)}{',' * (len(made) == 1)})"


def _function(function: Any, within: tuple[int, ...]) -> str:
    """A function, with everything it captures: its object, its defaults, its closure."""
    inner = getattr(function, "__func__", function)
    around = [cell.cell_contents for cell in getattr(inner, "__closure__", None) or ()]
    held = [getattr(function, "__self__", None), *(getattr(inner, "__defaults__", None) or ()), *around]
    held = [one for one in held if one is not None and not inspect.ismodule(one)]
    return f"{_named(inner)}({', '.join(identity(one, within) for one in held)})"


def _object(value: Any, within: tuple[int, ...]) -> str:
    """A dataclass by its fields (only the given ones, if it is ours), any other object by all its attributes."""
    kind: Any = type(value)
    names: list[str] = []
    if is_dataclass(value):
        if is_ours(kind) and kind.__repr__.__globals__["__name__"] not in _WRITE_REPR:
            return repr(value)  # it has its own repr, which contains a hash of its content
        names = [field.name for field in fields(value) if field.repr or not is_ours(kind)]
    else:
        slots = [name for part in kind.__mro__ for name in vars(part).get("__slots__", ())]
        names = [*getattr(value, "__dict__", ()), *(name for name in slots if hasattr(value, name))]
    if not names and kind.__repr__ is not object.__repr__:
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
    return f"{_named(kind)}({', '.join(f'{name}={identity(getattr(value, name), within)}' for name in names)})"


_WRITE_REPR = ("dataclasses", "reprlib")  # the modules that generate a dataclass's __repr__


@cache
def _named(kind: Any) -> str:
    """The name of a class or function, with a hash of its source if it is not mechattn's."""
    name = getattr(kind, "__qualname__", type(kind).__qualname__)
    parts = kind.__mro__ if isinstance(kind, type) else (kind,)
    foreign = [part for part in parts if not is_ours(part) and part.__module__ != "builtins"]
    made = hashlib.sha256("".join(map(_source, foreign)).encode("utf-8", "backslashreplace")).hexdigest()
    return f"{name}[source {made[:12]}]" if foreign else name


def _source(kind: Any) -> str:
    """The source; for a class in a notebook, its functions; the name if there is neither."""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        inner = vars(kind).values() if isinstance(kind, type) else ()
        return "".join([str(getattr(kind, "__qualname__", "")), *map(_source, filter(inspect.isfunction, inner))])


def is_ours(kind: Any) -> bool:
    """Whether a class or function is mechattn's."""
    return str(getattr(kind, "__module__", "")).partition(".")[0] == "mechattn"


def _numbers(array: Any) -> str:
    """The dtype, the shape and a hash of a numpy or torch array."""
    plain = array.detach().cpu() if hasattr(array, "detach") else array
    values = np.asarray(plain.double() if hasattr(plain, "double") else plain)
    content = values.tobytes() if values.dtype != object else repr(values.tolist()).encode()
    return f"{getattr(plain, 'dtype', values.dtype)}, {values.shape}, {hashlib.sha256(content).hexdigest()[:12]}"
