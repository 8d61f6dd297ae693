"""Where a result comes from: enough to reproduce it, or to see why two results differ.

:func:`identity` describes what determines a number, the same in every process; a
:class:`StoredCondition` is a condition of a result as data, so that figures need not parse text.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import datetime, timezone
from enum import Enum
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.errors import OptionError, without_secrets

if TYPE_CHECKING:
    from mechattn.results.result import Result

Provenance = Mapping[str, Any]

PACKAGES = ("mechattn", "transformer-lens", "transformers", "torch")

# Types whose repr says all there is.
PLAIN_TYPES = (
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

# The modules that generate a dataclass's __repr__: dataclasses wraps it in a function of its own
# (until Python 3.12) or of reprlib's, so that the function's globals tell it from a written one.
GENERATORS_OF_REPR = ("dataclasses", "reprlib")


def versions() -> dict[str, str]:
    """The versions of the software that computed the numbers.

    A loaded module says its own version: that of the metadata may be of another build, such as
    2.13.0 where 2.13.0+cpu runs, or of another copy on the path.
    """
    versions_by_package = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        module = sys.modules.get(package)
        loaded_version = getattr(module, "__version__", None)
        try:
            versions_by_package[package] = str(loaded_version or version(package))
        except PackageNotFoundError:
            versions_by_package[package] = "not installed as a package"
    return versions_by_package


def name_of(path: str) -> str:
    """The publishable part of a model's or a file's name: of a path, its last part, since the rest
    may reveal a user name; of an address, all but passwords; a name on the hub as it is."""
    if "://" in path:
        return without_secrets(path)
    in_hub_cache = re.search(r"models--(\w[\w.-]*?)--([\w.-]+)[/\\]snapshots", path)
    if in_hub_cache:
        owner, name = in_hub_cache.groups()
        return f"{owner}/{name}"

    folders = [folder for folder in re.split(r"[/\\]", path) if folder]
    has_drive = path[1:2] == ":"
    is_path = path.startswith(("/", "\\", "~", ".")) or has_drive or len(folders) > 2
    may_be_hub_name = len(folders) < 2 or not os.path.exists(path)
    if not is_path and may_be_hub_name:
        return path
    if not folders or set(folders[-1]) == {"."}:
        return Path(path).resolve().name
    return folders[-1]


def file_names(models: Iterable[str]) -> dict[str, str]:
    """A name for the files of each model, in place of "{model}": "toy:llama" gives "toy-llama",
    "/a/b/" gives "b"."""
    names: dict[str, str] = {}
    for model in models:
        last_part = model.rstrip("/").rsplit("/", 1)[-1]
        name = re.sub(r"[^\w.-]", "-", last_part)
        same_name = [other for other in names if names[other].casefold() == name.casefold()]
        if same_name and model not in names:
            raise OptionError(
                f"the models {same_name[0]!r} and {model!r} would both write to files named"
                f" {name!r}: run them separately, or give their folders different names"
            )
        names[model] = name
    return names


def command_of(words: Sequence[str], paths: bool = False) -> str:
    """The command line, with file names only unless ``paths`` is set, and never with a password."""
    command = ["mechattn"]
    for word in words:
        option, equals, value = word.partition("=")
        if paths:
            command.append(without_secrets(word))
        elif equals and option.startswith("-"):
            command.append(f"{option}={name_of(value)}")
        else:
            command.append(name_of(word))
    return " ".join(command)


def digest(values: Iterable[object]) -> str:
    """A short hash of some values, in order."""
    return _hex_digest(json.dumps([repr(value) for value in values]).encode(), digits=16)


def set_hash(values: Iterable[object]) -> str:
    """A hash of some values in any order; those of two halves add up to that of the whole.

    ``Σ hash(value) mod 2^64``, with repeated values counted; it is no protection against forgery.
    """
    total = 0
    for value in values:
        content = repr(value).encode("utf-8", "backslashreplace")
        total += int(_hex_digest(content, digits=16), 16)
    return f"{total % 2**64:016x}"


def added_hash(ours: str, theirs: str) -> str:
    """The :func:`set_hash` of both sets together."""
    return f"{(int(ours, 16) + int(theirs, 16)) % 2**64:016x}"


def now() -> str:
    """The time, in UTC, to the second."""
    return datetime.now(timezone.utc).replace(microsecond=0).isoformat()


@dataclass(frozen=True)
class StoredCondition:
    """A condition of a result; by default one of which nothing is known."""

    # The class, such as "RandomSentence" or "Baseline"; if it is not mechattn's, a hash of its
    # source follows.
    kind: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    masked: bool = False  # original tokens don't see the inserted ones
    unshifted: bool = False  # original tokens keep their positions
    interventions: tuple[Mapping[str, Any], ...] = ()  # the kind and the options of each
    written: str = ""  # all of this as text

    @property
    def inserts_only(self) -> bool:
        """Whether it only inserts tokens."""
        return self.kind not in ("", "Baseline") and not (
            self.masked or self.unshifted or self.interventions
        )


def stored_condition(result: Result, name: str) -> StoredCondition:
    """A condition of a result, from its provenance; JSON has a list of its interventions."""
    entry = result.provenance.get("conditions", {}).get(name, {})
    return replace(StoredCondition(**entry), interventions=tuple(entry.get("interventions", ())))


def matched_control(result: Result, condition: str) -> str | None:
    """The condition that inserts as many tokens of a random sentence at the same place; None if
    there is none."""

    def is_sentence(name: str) -> bool:
        stored = stored_condition(result, name)
        return stored.inserts_only and stored.kind == "RandomSentence"

    if is_sentence(condition):
        return None
    origins = result["sequences"].origin
    for name in filter(is_sentence, result.conditions):
        if (origins.sel(condition=name).values == origins.sel(condition=condition).values).all():
            return name
    return None


def identity(value: Any, within: tuple[int, ...] = ()) -> str:
    """An analysis, a condition or an intervention as text: its class and fields, as in ``repr``.

    Args:
        value: What is to be written.
        within: The ids of the objects that contain it; one of them in itself is "…".
    """
    if isinstance(value, PLAIN_TYPES):
        return repr(value)
    if id(value) in within:
        return "…"
    inner = partial(identity, within=(*within, id(value)))

    if isinstance(value, Mapping):
        items = [f"{inner(key)}: {inner(item)}" for key, item in value.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(inner, value)))}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(inner, value))}]"
    if isinstance(value, tuple):
        comma = "," if len(value) == 1 else ""
        return f"({', '.join(map(inner, value))}{comma})"
    if hasattr(value, "__array__") and not isinstance(value, type):
        return _array_identity(value)
    if isinstance(value, partial):
        return f"partial({inner(value.func)}, {inner(value.args)}, {inner(value.keywords)})"
    if inspect.isfunction(value) or inspect.ismethod(value):
        function = getattr(value, "__func__", value)
        return f"{_name_and_source(function)}({', '.join(map(inner, _captured(value)))})"
    if isinstance(value, type) or inspect.isroutine(value):
        return _name_and_source(value)
    if _writes_itself(value):
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
    attributes = [f"{name}={inner(getattr(value, name))}" for name in _attributes_of(value)]
    return f"{kind_of(value)}({', '.join(attributes)})"


def _array_identity(array: Any) -> str:
    """An array of numpy or torch by its type, shape and a hash of its numbers."""
    numbers = array
    if hasattr(array, "detach"):
        numbers = array.detach().cpu()
        if not numbers.is_complex():
            numbers = numbers.double()  # as numpy has no bfloat16
    values = np.asarray(numbers)
    content = values.tobytes()
    if values.dtype == object:  # whose bytes are addresses
        content = repr(values.tolist()).encode()

    dtype = getattr(array, "dtype", values.dtype)
    return f"{type(array).__name__}({dtype}, {values.shape}, {_hex_digest(content)})"


def kind_of(value: Any) -> str:
    """The name of an object's class, with a hash of its source if it is not mechattn's."""
    kind: Any = type(value)
    return _name_and_source(kind)


def is_ours(kind: Any) -> bool:
    """Whether a class or function is mechattn's."""
    return str(getattr(kind, "__module__", "")).partition(".")[0] == "mechattn"


def _captured(function: Any) -> list[Any]:
    """What a function carries with it: its object, its defaults, its closure."""
    captured = [cell.cell_contents for cell in function.__closure__ or ()]
    captured += function.__defaults__ or ()
    captured += (function.__kwdefaults__ or {}).items()
    if inspect.ismethod(function):
        captured.append(function.__self__)
    return captured


def _attributes_of(value: Any) -> list[str]:
    """The names of the fields of a dataclass (only those that its repr shows, if it is ours), or of
    all attributes of any other object."""
    kind: Any = type(value)
    if is_dataclass(value):
        return [field.name for field in fields(value) if field.repr or not is_ours(kind)]
    slots = [name for parent in kind.__mro__ for name in vars(parent).get("__slots__", ())]
    return [*getattr(value, "__dict__", ()), *(name for name in slots if hasattr(value, name))]


def _writes_itself(value: Any) -> bool:
    """Whether an object's own words say what it is: those of ours contain a hash of their content,
    and what has no attributes, such as a torch.dtype, has nothing else."""
    kind: Any = type(value)
    if is_ours(kind) and is_dataclass(value):
        return kind.__repr__.__globals__["__name__"] not in GENERATORS_OF_REPR
    return kind.__repr__ is not object.__repr__ and not _attributes_of(value)


@cache
def _name_and_source(kind: Any) -> str:
    """The name of a class or function, with a hash of its source if it is not mechattn's."""
    name = getattr(kind, "__qualname__", type(kind).__qualname__)
    source = ""
    for parent in getattr(kind, "__mro__", (kind,)):
        # A method of a built-in type has no module.
        module = getattr(parent, "__module__", "builtins")
        if module not in ("builtins", "abc") and not is_ours(parent):
            source += _source(parent)
    if not source:
        return name
    return f"{name}[source {_hex_digest(source.encode('utf-8', 'backslashreplace'))}]"


def _source(kind: Any) -> str:
    """The source of a class or function; of a class in a notebook, that of its functions.

    What Python runs stands in for it where a function's is not known, and for that of a lambda,
    which may share its line with others.
    """
    if getattr(kind, "__name__", "") != "<lambda>":
        with suppress(OSError, TypeError):
            return inspect.getsource(kind)
    if inspect.isfunction(kind):
        return _code_text(kind.__code__)

    parts = [str(getattr(kind, "__qualname__", ""))]
    if isinstance(kind, type):
        parts += map(_source, filter(inspect.isfunction, vars(kind).values()))
    return "".join(parts)


def _code_text(code: CodeType) -> str:
    """What a compiled function does, with that of the functions in it, in place of their
    addresses."""
    constants = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            constants.append(_code_text(constant))
        else:
            constants.append(identity(constant))
    return repr([code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants])


def _hex_digest(content: bytes, digits: int = 12) -> str:
    return hashlib.sha256(content).hexdigest()[:digits]
