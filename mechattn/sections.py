"""Sections of TOML files, read and checked before torch is imported, so that errors appear immediately."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from mechattn.errors import OptionError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_LONGEST = 2**20  # bytes of a file
_SHOWN = 40  # letters of a value in a message


class Section(BaseModel):
    """A section whose keys are all declared."""

    model_config = ConfigDict(extra="forbid", strict=True)  # true is not a number, and 3 is not text


class OpenSection(BaseModel):
    """A section with a kind; its other keys are the options of that kind."""

    model_config = ConfigDict(extra="allow", strict=True)

    @property
    def options(self) -> dict[str, Any]:
        """The keys that are not declared."""
        return dict(self.model_extra or {})


class InterventionSection(OpenSection):
    """An intervention: its kind and its options."""

    kind: str = "ARM"


class Condition(OpenSection):
    """A condition: its kind, options and interventions. A list of values for an option makes a sweep."""

    kind: str = "MeaninglessTokens"
    masked: bool = False
    unshifted: bool = False
    intervention: InterventionSection | None = None


class AnalysisSection(OpenSection):
    """An analysis: its kind and its options."""

    kind: str = "ReceivedAttention"


def toml_values(path: str | Path, what: str = "config file") -> dict[str, Any]:
    """Read a TOML file without checking its contents."""
    if not os.path.isfile(path):  # gives False for a name that is too long, where Path raises
        raise OptionError(f"there is no {what} at {path}")
    if os.path.getsize(path) > _LONGEST:
        raise OptionError(f"{path} is larger than {_LONGEST // 2**20} MiB, so it is not a {what}")
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror or error}") from None
    except RecursionError:
        raise OptionError(f"{path} is nested too deeply") from None
    except ValueError as error:  # not TOML, not UTF-8, or a number with thousands of digits
        raise OptionError(f"{path} is not TOML: {error}") from None


def no_such_key(name: str, known: Iterable[str]) -> str:
    """The message for an unknown key: the known keys, and the one that may be meant."""
    return f"there is no such key here{near(name, known)}; the keys are {', '.join(known)}"


def near(word: str, known: Iterable[str]) -> str:
    """The known word most similar to another, as a question; empty if none is similar."""
    holding = [one for one in known if len(word) > 2 and word.casefold() in one.casefold()]
    found = difflib.get_close_matches(word, list(known), 1) or holding[:1]
    return f" (did you mean {found[0]!r}?)" if found else ""


def all_words(error: ValidationError, root: type[BaseModel], where: str = "") -> str:
    """Rephrase pydantic's errors for the user."""
    return "; ".join(f"{where}{'.'.join(map(str, e['loc']))}: {_words(e, root)}" for e in error.errors())


def _words(error: Any, root: Any) -> str:
    if error["type"] == "extra_forbidden":
        *section, name = error["loc"]
        return no_such_key(str(name), list(_section_at(root, section).model_fields))
    if error["type"] in ("missing", "value_error"):
        return "is missing" if error["type"] == "missing" else str(error["msg"]).removeprefix("Value error, ")
    return f"{error['msg']}, not {str(error['input'])[:_SHOWN]!r}"


def _section_at(root: Any, place: Iterable[Any]) -> Any:
    """The class of the section at a place of a file; numbers and names in lists and tables are passed over."""
    for name in place:
        fields = {field.alias or key: field.annotation for key, field in root.model_fields.items()}
        of = fields.get(name, root)
        while not isinstance(of, type) or not issubclass(of, BaseModel):
            of = next(arg for arg in get_args(of)[::-1] if arg is not type(None))
        root = of
    return root
