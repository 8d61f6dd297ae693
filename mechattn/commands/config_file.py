"""The sections and keys of a config file, read before torch is imported so that errors appear immediately."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic import Field as PydanticField

from mechattn.errors import OptionError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_LONGEST = 2**20  # bytes of a config

_Int = Annotated[int, PydanticField(ge=-(2**63), lt=2**63)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)  # true is not a number, and 3 is not text


class _Open(BaseModel):
    """A section with a kind; its other keys are the options of that kind."""

    model_config = ConfigDict(extra="allow", strict=True)

    @property
    def options(self) -> dict[str, Any]:
        """The keys that are not declared."""
        return dict(self.model_extra or {})


class Prompts(_Section):
    """The arguments of ``load_prompts``."""

    source: str
    limit: _Int | None = None
    field: str = "question"
    answer_field: str = "answer"
    group_field: str | None = None
    system: str | None = None
    template: Literal["plain", "chat"] = "plain"
    with_answer: bool = False
    split: str = "test"
    subset: str | None = None
    seed: _Int = 0


class InterventionSection(_Open):
    """An intervention: its kind and its options."""

    kind: str = "ARM"


class Condition(_Open):
    """A condition: its kind, options and interventions. A list of values for an option makes a sweep."""

    kind: str = "MeaninglessTokens"
    masked: bool = False
    unshifted: bool = False
    intervention: InterventionSection | None = None


class AnalysisSection(_Open):
    """An analysis: its kind and its options."""

    kind: str = "ReceivedAttention"


class Figure(_Open):
    """A figure of the page: its kind and its options."""

    kind: str


class Output(_Section):
    """The paths of the result and its page (relative to the working directory), and what the first figure shows."""

    result: str
    page: str | None = None
    layer: int | None = None
    heads: list[int] | int | None = None
    choose: int = PydanticField(3, ge=1)


class EvaluationSection(_Section):
    """The arguments of ``evaluate``, and the file for the answers, with "{model}" in its name for several models."""

    out: str
    new_tokens: _Int = 256
    samples: _Int = 1
    temperature: float | None = None
    grader: Literal["auto", "number", "math"] = "auto"
    batch: _Int = 32
    server: str | None = None
    served_model: str | None = None
    server_key: str | None = None
    server_timeout: float = 600.0


class Config(_Section):
    """A whole run; each of several models gives its own result, with "{model}" in its path.

    ``chunk``: the number of prompts computed and stored together. ``threads``: torch threads in each worker.
    ``device``: a torch device, such as "cuda:1". ``executor``, ``address``, ``workers``: where to compute, which
    changes no number. ``large``, ``values``: as for ``Job``. ``paths``: record full paths of checkpoints and configs,
    not only their names.
    """

    model: str | list[str]
    prompts: Prompts
    output: Output
    conditions: dict[str, Condition] = {"slash": Condition()}
    analyses: list[AnalysisSection] = [AnalysisSection()]
    figures: list[Figure] | None = None
    layers: list[int] | None = None
    seed: _Int = 0
    device: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    memory: str = "2GiB"
    engine: Literal["auto", "streaming", "fused", "hooks"] = "auto"
    verify: bool = True
    chunk: int = PydanticField(64, ge=1, lt=2**63)
    threads: _Int | None = PydanticField(None, ge=1)
    executor: Literal["local", "ray"] = "local"
    address: str | None = None
    workers: _Int | None = PydanticField(None, ge=1)
    large: bool | None = None
    values: Literal["float32", "float16"] = "float32"
    paths: bool = False
    evaluation: EvaluationSection | None = None

    @property
    def models(self) -> list[str]:
        """The models, at least one."""
        return [self.model] if isinstance(self.model, str) else self.model


def read_sections(path: str | Path) -> Config:
    """Read and check a TOML file as far as possible without a model or the analyses.

    Raises:
        OptionError: The file doesn't exist, is not TOML, or has an unknown key, a missing key or a value of the wrong
            type.
    """
    try:
        config = Config.model_validate(_values(path))
    except RecursionError:
        raise OptionError(f"{path} is nested too deeply") from None
    except ValidationError as error:
        raise OptionError(f"{path}: {all_words(error)}") from None
    if not config.models:
        raise OptionError(f"{path}: model = [] is empty; give at least one model")
    return config


def _values(path: str | Path) -> dict[str, Any]:
    """Read a TOML file without checking its contents."""
    if not os.path.isfile(path):  # gives False for a name that is too long, where Path raises
        raise OptionError(f"there is no config file at {path}")
    if os.path.getsize(path) > _LONGEST:
        raise OptionError(f"{path} is larger than {_LONGEST // 2**20} MiB, so it is not a config file")
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


def all_words(error: ValidationError, where: str = "") -> str:
    """Rephrase pydantic's errors for the user."""
    return "; ".join(f"{where}{'.'.join(map(str, e['loc']))}: {_words(e)}" for e in error.errors())


def _words(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        *section, name = error["loc"]
        known: dict[tuple, type[BaseModel]] = {(): Config, ("prompts",): Prompts, ("output",): Output}
        known[("evaluation",)] = EvaluationSection
        return no_such_key(str(name), list(known[tuple(section)].model_fields))
    return "is missing" if error["type"] == "missing" else str(error["msg"]).removeprefix("Value error, ")
