"""Where a result comes from: enough to reproduce it, or to see why two results differ.

:func:`identity` describes what determines a number, the same in every process; a :class:`StoredCondition` is a
condition of a result as data, so that figures need not parse text.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime, timezone
from enum import Enum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.errors import OptionError
from mechattn.markup import without_secrets

if TYPE_CHECKING:
    from mechattn.results.result import Result

Provenance = Mapping[str, Any]

_PACKAGES = ("mechattn", "transformer-lens", "transformers", "torch")
_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(...),
    range,
    slice,
    Enum,
    os.PathLike,
    np.generic,
)
_WRITE_REPR = ("dataclasses", "reprlib")  # the modules that generate a dataclass's __repr__
_NOTHING: Mapping[str, Any] = dict(
    kind="", options={}, masked=False, unshifted=False, interventions=(), written=""
)


def versions() -> dict[str, str]:
    """The versions of the software that computed the numbers.

    A loaded module says its own version: that of the metadata may be of another build, such as
    2.13.0 where 2.13.0+cpu runs, or of another copy on the path.
    """
    versions_by_package = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        module = sys.modules.get(package)
        loaded_version = getattr(module, "__version__", None)
        try:
            versions_by_package[package] = str(loaded_version or version(package))
        except PackageNotFoundError:
            versions_by_package[package] = "not installed as a package"
    return versions_by_package


def name_of(place: str) -> str:
    """The publishable part of a place: the last part of a path, since the rest may reveal a user name."""
    if "://" in place:
        return without_secrets(place)
    if stored := re.search(
        r"models--(\w[\w.-]*?)--([\w.-]+)[/\\]snapshots", place
    ):  # the hub's cache
        return f"{stored[1]}/{stored[2]}"
    parts = [part for part in re.split(r"[/\\]", place) if part]
    is_path = place.startswith(("/", "\\", "~", ".")) or place[1:2] == ":" or len(parts) > 2
    if not is_path and (len(parts) < 2 or not os.path.exists(place)):
        return place
    return parts[-1] if parts and set(parts[-1]) != {"."} else Path(place).resolve().name


def file_names(models: Iterable[str]) -> dict[str, str]:
    """A name for the files of each model, in place of "{model}": "toy:llama" gives "toy-llama", "/a/b/" gives "b"."""
    names: dict[str, str] = {}
    for model in models:
        last_part = model.rstrip("/").rsplit("/", 1)[-1]
        name = "".join(c if c.isalnum() or c in "._-" else "-" for c in last_part)
        for other_model, other_name in names.items():
            if other_name.casefold() == name.casefold() and other_model != model:
                raise OptionError(
                    f"the models {other_model!r} and {model!r} would both write to files named "
                    f"{name!r}: run them separately, or give their folders different names"
                )
        names[model] = name
    return names


def command_of(words: Seq[str], paths: bool = False) -> str:
    """The command line, with file names only unless ``paths`` is set, and never with a password."""
    said = ["mechattn"]
    for word in words:
        option, is_set, value = word.partition("=")
        short = f"{option}={name_of(value)}" if is_set and option.startswith("-") else name_of(word)
        said.append(without_secrets(word) if paths else short)
    return " ".join(said)


def digest(parts: Iterable[object]) -> str:
    """A short hash of the parts, in order."""
    return hashlib.sha256(json.dumps([repr(part) for part in parts]).encode()).hexdigest()[:16]


def set_hash(parts: Iterable[object]) -> str:
    """A hash of a set of parts that ignores order, so the hashes of two halves add up to that of the whole.

    ``Σ hash(part) mod 2^64``, with repeated parts counted; it is no protection against forgery.
    """
    each = (
        hashlib.sha256(repr(part).encode("utf-8", "backslashreplace")).digest()[:8]
        for part in parts
    )
    return f"{sum(int.from_bytes(one, 'big') for one in each) % 2**64:016x}"


def added_hash(one: str, other: str) -> str:
    """The :func:`set_hash` of both sets together."""
    return f"{(int(one, 16) + int(other, 16)) % 2**64:016x}"


def now() -> str:
    """The time, in UTC, to the second."""
    return datetime.now(timezone.utc).replace(microsecond=0).isoformat()


@dataclass(frozen=True)
class StoredCondition:
    """A condition of a result."""

    kind: str  # the class of what is inserted, or "Baseline"; if it is not mechattn's, a hash of its source follows
    options: Mapping[str, Any]
    masked: bool  # original tokens don't see the inserted ones
    unshifted: bool  # original tokens keep their positions
    interventions: tuple[Mapping[str, Any], ...]  # the kind and the options of each
    written: str  # all of this as text

    @property
    def inserts_only(self) -> bool:
        """Whether it only inserts tokens."""
        return self.kind not in ("", "Baseline") and not (
            self.masked or self.unshifted or self.interventions
        )


def stored_condition(result: Result, name: str) -> StoredCondition:
    """A condition of a result, from its provenance."""
    about = result.provenance.get("conditions", {}).get(name) or _NOTHING
    return StoredCondition(**{**about, "interventions": tuple(about["interventions"])})


def matched_control(result: Result, condition: str) -> str | None:
    """The condition that inserts as many tokens of a random sentence at the same place; None if there is none."""

    def is_sentence(name: str) -> bool:
        about = stored_condition(result, name)
        return about.inserts_only and about.kind == "RandomSentence"

    origin = result["sequences"].origin
    others = [name for name in result.conditions if name != condition and is_sentence(name)]
    alike = [
        n
        for n in others
        if (origin.sel(condition=n).values == origin.sel(condition=condition).values).all()
    ]
    return alike[0] if alike and not is_sentence(condition) else None


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
        made = [identity(one, within) for one in value]
        if isinstance(value, Set):
            return f"{{{', '.join(sorted(made))}}}"
        return (
            f"[{', '.join(made)}]"
            if isinstance(value, list)
            else f"({', '.join(made)}{',' * (len(made) == 1)})"
        )
    if inspect.isroutine(value):
        return _function(value, within)
    if isinstance(value, type):
        return _named(value)
    if not hasattr(value, "__array__"):
        return _object(value, within)
    plain = (
        value.detach().cpu() if hasattr(value, "detach") else value
    )  # an array of numpy or torch
    values = np.asarray(plain.double() if hasattr(plain, "double") else plain)
    content = hashlib.sha256(
        values.tobytes() if values.dtype != object else repr(values.tolist()).encode()
    )
    kind, dtype = type(value).__name__, getattr(plain, "dtype", values.dtype)
    return f"{kind}({dtype}, {values.shape}, {content.hexdigest()[:12]})"


def kind_of(value: Any) -> str:
    """The name of an object's class, with a hash of its source if it is not mechattn's."""
    kind: Any = type(value)
    return _named(kind)


def is_ours(kind: Any) -> bool:
    """Whether a class or function is mechattn's."""
    return str(getattr(kind, "__module__", "")).partition(".")[0] == "mechattn"


def _function(function: Any, within: tuple[int, ...]) -> str:
    """A function, with everything it captures: its object, its defaults, its closure."""
    inner = getattr(function, "__func__", function)
    around = [cell.cell_contents for cell in getattr(inner, "__closure__", None) or ()]
    held = [
        getattr(function, "__self__", None),
        *(getattr(inner, "__defaults__", None) or ()),
        *around,
    ]
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


@cache
def _named(kind: Any) -> str:
    """The name of a class or function, with a hash of its source if it is not mechattn's."""
    name = getattr(kind, "__qualname__", type(kind).__qualname__)
    parts = kind.__mro__ if isinstance(kind, type) else (kind,)
    foreign = [part for part in parts if not is_ours(part) and part.__module__ != "builtins"]
    made = hashlib.sha256(
        "".join(map(_source, foreign)).encode("utf-8", "backslashreplace")
    ).hexdigest()
    return f"{name}[source {made[:12]}]" if foreign else name


def _source(kind: Any) -> str:
    """The source; for a class in a notebook, its functions; the name if there is neither."""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        inner = vars(kind).values() if isinstance(kind, type) else ()
        return "".join(
            [
                str(getattr(kind, "__qualname__", "")),
                *map(_source, filter(inspect.isfunction, inner)),
            ]
        )
