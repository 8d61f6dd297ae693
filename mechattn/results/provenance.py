"""Where a result comes from: enough to reproduce it, or to see why two results differ.

:func:`identity` describes an object that determines numbers, with the same text in every process. A
:class:`StoredCondition` is a condition of a result as data, so that figures need not parse text.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields, is_dataclass
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

# Types whose repr says everything about their values.
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

# The modules that generate the __repr__ of a dataclass, as dataclasses wraps it in a function of
# its own (until Python 3.12) or of reprlib. The globals of a __repr__ that a person wrote are of
# another module.
GENERATORS_OF_REPR = ("dataclasses", "reprlib")


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that compute the numbers.

    The version of a loaded module comes from the module itself. The metadata may belong to another
    build (2.13.0 instead of 2.13.0+cpu) or to another copy on the path.
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
    """The part of the name of a model or file that may be published.

    A name on the hub stays as it is. Of a path, and of any text with more than two parts between
    slashes, only the last part is left, since the rest may reveal a user name (or the name on the
    hub, if the path is in its cache). An address loses its passwords.
    """
    if "://" in path:
        return without_secrets(path)
    cache_match = re.search(r"models--(\w[\w.-]*)[/\\]snapshots", path)
    if cache_match:
        return cache_match[1].replace("--", "/")

    names = [name for name in re.split(r"[/\\]", path) if name]
    has_drive = path[1:2] == ":"
    # A name on the hub is "name" or "owner/name".
    is_path = path.startswith(("/", "\\", "~", ".")) or has_drive or len(names) > 2
    may_be_hub_name = len(names) < 2 or not os.path.exists(path)
    if not is_path and may_be_hub_name:
        return path
    if not names or set(names[-1]) == {"."}:  # "/", "." or "..", which may be the root
        return Path(path).resolve().name or path
    return names[-1]


def file_names(models: Iterable[str]) -> dict[str, str]:
    """For each model, the name that replaces "{model}" in the names of its files: "toy-llama" for
    "toy:llama", "b" for "/a/b/".

    Raises:
        OptionError: Two models would get the same name.
    """
    name_by_model: dict[str, str] = {}
    for model in dict.fromkeys(models):
        last_part = model.rstrip("/").rsplit("/", 1)[-1]
        name = re.sub(r"[^\w.-]", "-", last_part)
        for earlier_model, earlier_name in name_by_model.items():
            if earlier_name.casefold() == name.casefold():
                raise OptionError(
                    f"the models {earlier_model!r} and {model!r} would both write to files named"
                    f" {name!r}: run them separately, or give their folders different names"
                )
        name_by_model[model] = name
    return name_by_model


def command_of(words: Sequence[str], paths: bool = False) -> str:
    """The command line without passwords. Unless ``paths`` is set, every word that may be a path is
    reduced as by :func:`name_of`; "1/2/3 apples" becomes "3 apples"."""
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
    """A short hash of some values and their order."""
    return _hex_digest(json.dumps([repr(value) for value in values]).encode(), digits=16)


def set_hash(values: Iterable[object]) -> str:
    """A hash of some values that does not depend on their order, ``Σ hash(value) mod 2^64``.

    Repeated values count. The hashes of two halves add up to that of the whole, see
    :func:`added_hash`. It does not protect against forgery.
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
    """The current time in UTC, to the second."""
    return datetime.now(timezone.utc).replace(microsecond=0).isoformat()


@dataclass(frozen=True)
class StoredCondition:
    """A condition of a result, as its provenance describes it; by default, nothing is known."""

    # The name of the class, such as "RandomSentence" or "Baseline", followed by a hash of its
    # source if it is not mechattn's.
    kind: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    masked: bool = False  # original tokens don't see the inserted ones
    unshifted: bool = False  # original tokens keep their positions
    interventions: Sequence[Mapping[str, Any]] = ()  # the kind and the options of each
    written: str = ""  # the whole condition as text

    @property
    def inserts_only(self) -> bool:
        """Whether the condition inserts tokens and does nothing else."""
        return self.kind not in ("", "Baseline") and not (
            self.masked or self.unshifted or self.interventions
        )


def stored_condition(result: Result, name: str) -> StoredCondition:
    """A condition of a result, from its provenance; one that is not there has the defaults."""
    return StoredCondition(**result.provenance.get("conditions", {}).get(name, {}))


def matched_control(result: Result, condition: str) -> str | None:
    """The condition that inserts a random sentence of the same length at the same place; None if
    there is none, or ``condition`` is such a control itself."""

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
    """Describe an object, such as a condition, as text: its class and fields, as in ``repr``.

    Classes and functions that are not mechattn's get a hash of their source, arrays a hash of their
    numbers. Addresses in memory are left out.

    Args:
        value: The object.
        within: The ids of the objects that contain it. An object that contains itself is "…" there.
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
        return _array_identity(value, inner)
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


def kind_of(value: Any) -> str:
    """The name of an object's class, with a hash of its source if it is not mechattn's."""
    class_of_value: Any = type(value)
    return _name_and_source(class_of_value)


def is_calibrated(option: Field[Any]) -> bool:
    """Whether calibration fills in a field of an analysis, so that it is not an option."""
    return "calibrated" in option.metadata


def is_ours(definition: Any) -> bool:
    """Whether a class or function is defined in mechattn."""
    return str(getattr(definition, "__module__", "")).partition(".")[0] == "mechattn"


def _array_identity(array: Any, inner: Callable[[Any], str]) -> str:
    """An array of numpy or torch, or a table of pandas, as text: its type, dtype, shape and a hash
    of its numbers and labels. ``inner`` describes labels and objects."""
    numbers = array
    if hasattr(array, "detach"):
        numbers = array.detach().cpu()
        if not numbers.is_complex():
            numbers = numbers.double()  # numpy has no bfloat16
    values = np.asarray(numbers)
    content = values.tobytes()
    if values.dtype == object:  # the bytes of objects are addresses
        content = inner(values.tolist()).encode()
    for labels in getattr(array, "axes", ()):  # of the rows and columns of a table
        content += inner(labels).encode()

    dtype = getattr(array, "dtype", values.dtype)
    return f"{type(array).__name__}({dtype}, {values.shape}, {_hex_digest(content)})"


def _captured(function: Any) -> list[Any]:
    """The values that a function carries: its closure, its defaults, and the object of a method."""
    values: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # the variable has no value yet
            values.append(cell)
    values += function.__defaults__ or ()
    values += (function.__kwdefaults__ or {}).items()
    if inspect.ismethod(function):
        values.append(function.__self__)
    return values


def _writes_itself(value: Any) -> bool:
    """Whether the repr of an object describes it: a dataclass of ours with a written repr, whose
    text contains a hash of its content, or an object without attributes, such as a torch.dtype."""
    class_of_value: Any = type(value)
    if is_ours(class_of_value) and is_dataclass(value):
        return class_of_value.__repr__.__globals__["__name__"] not in GENERATORS_OF_REPR
    return class_of_value.__repr__ is not object.__repr__ and not _attributes_of(value)


def _attributes_of(value: Any) -> list[str]:
    """The names of the fields of a dataclass, or of the attributes of any other object. Of our own
    dataclasses, fields that decide no numbers are left out."""
    class_of_value: Any = type(value)
    if is_dataclass(value):
        names = []
        for option in fields(value):
            decides_numbers = option.metadata.get("in_identity", True)
            if not is_ours(class_of_value) or (decides_numbers and not is_calibrated(option)):
                names.append(option.name)
        return names
    names = list(getattr(value, "__dict__", ()))
    for parent in class_of_value.__mro__:
        slots = vars(parent).get("__slots__", ())
        if isinstance(slots, str):  # a class with a single slot may write it without a tuple
            slots = (slots,)
        names += [name for name in slots if hasattr(value, name)]
    return names


@cache
def _name_and_source(definition: Any) -> str:
    """The name of a class or function, with a hash of its source if it is not mechattn's."""
    name = getattr(definition, "__qualname__", type(definition).__qualname__)
    source = ""
    for parent in getattr(definition, "__mro__", (definition,)):
        # A method of a built-in type has no module.
        module = getattr(parent, "__module__", "builtins")
        if module not in ("builtins", "abc") and not is_ours(parent):
            source += _source(parent)
    if not source:
        return name
    return f"{name}[source {_hex_digest(source.encode('utf-8', 'backslashreplace'))}]"


def _source(definition: Any) -> str:
    """The source of a class or function.

    If the source of a function is not known, its bytecode is used, and likewise for a lambda, which
    may share its line with others. If that of a class is not known, as in a notebook, those of its
    functions are used.
    """
    if getattr(definition, "__name__", "") != "<lambda>":
        with suppress(OSError, TypeError):
            return inspect.getsource(definition)
    if inspect.isfunction(definition):
        return _code_text(definition.__code__)

    parts = [str(getattr(definition, "__qualname__", ""))]
    if isinstance(definition, type):
        parts += map(_source, filter(inspect.isfunction, vars(definition).values()))
    return "".join(parts)


def _code_text(code: CodeType) -> str:
    """The bytecode, names and constants of a function as text. Functions within it are written the
    same way, because their repr contains addresses."""
    constants = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            constants.append(_code_text(constant))
        else:
            constants.append(identity(constant))
    return repr([code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants])


def _hex_digest(content: bytes, digits: int = 12) -> str:
    return hashlib.sha256(content).hexdigest()[:digits]
