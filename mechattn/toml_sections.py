"""The sections and keys of TOML files. They are read and checked before torch is imported, so that
errors appear immediately."""

from __future__ import annotations

import difflib
import os
import re
import reprlib
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic import Field as PydanticField

from mechattn.errors import OptionError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_LARGEST_FILE = 2**20  # bytes; a config takes a few kB, so a larger file is something else
_LONGEST_VALUE = 40  # characters of a value that a message quotes
# If a value may be of several types, pydantic adds one of them to the keys of an error: a simple
# type after them, or that of a table or list before the keys within it.
_SIMPLE_TYPE = re.compile(r"int|str")
_TYPE_OF_ITEMS = re.compile(r"(dict|list|tuple|json-or-python)\[.*")
_Int = Annotated[int, PydanticField(ge=-(2**63), lt=2**63)]  # the integers of TOML
TemplateWord = Literal["auto", "plain", "chat", "joined"]


class Section(BaseModel):
    """A section whose keys are all declared."""

    # Strict: true is not a number, and 3 is not text.
    model_config = ConfigDict(extra="forbid", strict=True)


class OpenSection(BaseModel):
    """A section with a kind. Its keys that are not declared are the options of that kind."""

    model_config = ConfigDict(extra="allow", strict=True)

    @property
    def options(self) -> dict[str, Any]:
        """The keys that are not declared."""
        return dict(self.model_extra or {})


class InterventionSection(OpenSection):
    """An intervention: its kind and its options."""

    kind: str = "ARM"


class ConditionSection(OpenSection):
    """A condition: its kind, its options and an intervention. A list of values for an option makes
    a sweep."""

    kind: str = "MeaninglessTokens"
    masked: bool = False
    unshifted: bool = False
    intervention: InterventionSection | None = None


class AnalysisSection(OpenSection):
    """An analysis: its kind and its options."""

    kind: str = "ReceivedAttention"


class PromptsSection(Section):
    """The arguments of ``load_prompts``, whose template may also be "auto"."""

    source: str
    limit: _Int | None = None
    field: str = "question"
    system: str | None = None
    # "auto" is the chat template if the model's tokenizer has one, otherwise "plain".
    template: TemplateWord = "auto"
    with_answer: bool = False
    split: str = "test"
    seed: _Int = 0
    answer: str | None = None
    group: str | None = None
    counterpart: str | None = None
    other_answer: str | None = None


class FigureSection(OpenSection):
    """A figure of the page: its kind and its options."""

    kind: str


class OutputSection(Section):
    """The paths of the result and its page, relative to the working directory, and the layer and
    heads that the first lines of the page are about."""

    result: str
    page: str | None = None
    layer: int | None = None
    heads: list[int] | int | None = None
    top: int = PydanticField(3, ge=1)


class ServerSection(Section):
    """The arguments of ``Server``. With ``weights``, the model is loaded too, and compared with the
    server."""

    address: str
    model: str | None = None
    key: str | None = None
    timeout: float = 600.0
    verify: bool = True
    weights: bool = False


class EvaluationSection(Section):
    """The arguments of ``evaluate``, and the file for the answers, whose name needs "{model}" if
    there are several models."""

    out: str
    new_tokens: _Int = 256
    samples: _Int = 1
    temperature: float | None = None
    grader: Literal["auto", "number", "math"] = "auto"
    batch: _Int = 32
    server: ServerSection | None = None


class Config(Section):
    """A whole run. Each model gives a result of its own, so with several models the path of the
    result needs "{model}"."""

    model: str | list[str]
    prompts: PromptsSection
    output: OutputSection | None = None  # the command evaluate does not need it
    conditions: dict[str, ConditionSection] = PydanticField({"slash": ConditionSection()})
    analyses: list[AnalysisSection] = PydanticField([AnalysisSection()])
    figures: list[FigureSection] | None = None
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
    values: Literal["float32", "float16"] = "float32"
    paths: bool = False
    evaluation: EvaluationSection | None = None

    @property
    def models(self) -> list[str]:
        """The models as a list, also if there is only one."""
        if isinstance(self.model, str):
            return [self.model]
        return self.model


def read_sections(path: str | Path) -> Config:
    """Read a TOML file, and check its keys and the types of its values without torch.

    Raises:
        OptionError: The file cannot be read, or a key or value in it is refused.
    """
    return config_from_values(toml_values(path), f"{path}: ")


def config_from_values(values: dict[str, Any], where: str = "") -> Config:
    """The config with these values. ``where`` is the beginning of the message.

    Raises:
        OptionError: A key or value is refused.
    """
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise OptionError(f"{where}{validation_words(error, Config)}") from None
    if not config.models:
        raise OptionError(f"{where}model = [] is empty; give at least one model")
    return config


def toml_values(path: str | Path, what: str = "config file") -> dict[str, Any]:
    """Read a TOML file without checking its contents.

    Args:
        path: The file.
        what: What messages call it.

    Raises:
        OptionError: There is no such file, or it is too large, unreadable or not TOML.
    """
    if not os.path.isfile(path):  # unlike Path.is_file, it raises no error for a name too long
        raise OptionError(f"there is no {what} at {path}")
    if os.path.getsize(path) > _LARGEST_FILE:
        raise OptionError(
            f"{path} is larger than {_LARGEST_FILE // 2**20} MiB, so it is not a {what}"
        )
    try:
        # utf-8-sig: some editors begin a file with a byte order mark, which is not TOML.
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror or error}") from None
    except RecursionError:
        raise OptionError(f"{path} is nested too deeply") from None
    except ValueError as error:  # not TOML, not UTF-8, or a number with thousands of digits
        raise OptionError(f"{path} is not TOML: {error}") from None


def validation_words(error: ValidationError, root: type[BaseModel], where: str = "") -> str:
    """Word pydantic's errors for the user.

    Args:
        error: The errors.
        root: The class of the section that was read.
        where: The beginning of every sentence; the keys within the section follow.
    """
    sentences = []
    for problem in error.errors():
        keys = [str(key) for key in problem["loc"]]
        if keys and problem["type"] != "extra_forbidden":
            if _SIMPLE_TYPE.fullmatch(keys[-1]):
                keys.pop()
            keys = [key for key in keys if not _TYPE_OF_ITEMS.fullmatch(key)]
        sentences.append(f"{where}{'.'.join(keys)}: {_problem_words(problem, root)}")
    return "; ".join(sentences)


def no_such_key(name: str, known: Collection[str]) -> str:
    """The message for an unknown key, with the known keys and the one that may be meant."""
    return f"there is no such key here{_did_you_mean(name, known)}; the keys are {', '.join(known)}"


def check_known(where: str, name: str, known: Collection[str]) -> None:
    """Check that a name is known. ``where`` is the key in the file that has it as its value.

    Raises:
        OptionError: The name is not known; the message lists those that are.
    """
    if name not in known:
        question = _did_you_mean(name, known)
        raise OptionError(f"{where} = {name!r}: choose one of {', '.join(known)}{question}")


def _did_you_mean(word: str, known: Collection[str]) -> str:
    """A question whether the most similar known word is meant; "" if none is similar."""
    similar = difflib.get_close_matches(word, known, 1)
    if len(word) > 2:
        similar += [name for name in known if word.casefold() in name.casefold()]
    if not similar:
        return ""
    return f" (did you mean {similar[0]!r}?)"


def _problem_words(problem: Any, root: Any) -> str:
    """One of the problems in a ``ValidationError``, in words for the user."""
    if problem["type"] == "extra_forbidden":
        *keys, unknown_key = problem["loc"]
        section = _section_at(root, keys)
        return no_such_key(str(unknown_key), section.model_fields)
    if problem["type"] == "missing":
        return "is missing"
    if problem["type"] == "value_error":
        return str(problem["msg"]).removeprefix("Value error, ")
    value = problem["input"]
    if not isinstance(value, str):
        value = reprlib.repr(value)  # unlike str, it does not follow a value of any depth
    return f"{problem['msg']}, not {value[:_LONGEST_VALUE]!r}"


def _section_at(section: Any, keys: Iterable[Any]) -> Any:
    """The class of the section to which keys lead from another section. Indices of lists and names
    in tables are skipped, because they are not fields."""
    for key in keys:
        if key not in section.model_fields:
            continue
        section = section.model_fields[key].annotation
        # Unwraps list[Section], dict[str, Section] and Section | None.
        while types := [arg for arg in get_args(section) if arg is not type(None)]:
            section = types[-1]
    return section
