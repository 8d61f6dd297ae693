"""A run as a file: model, prompts, conditions, analyses and output in TOML, checked before the work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from mechattn.errors import OptionError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Prompts(_Section):
    """The arguments of ``load_prompts``."""

    source: str
    limit: int | None = None
    field: str = "question"
    answer_field: str = "answer"
    system: str | None = None
    template: Literal["plain", "chat"] = "plain"
    with_answer: bool = False
    split: str = "test"
    subset: str | None = None
    seed: int = 0


class Condition(_Section):
    """The arguments of ``MeaninglessTokens``."""

    kind: Literal["MeaninglessTokens"] = "MeaninglessTokens"
    text: str = "/"
    count: int = 55
    place: Literal["before_question", "start", "before_answer", "random"] = "before_question"
    separator: str = " "


class Analysis(_Section):
    """The arguments of ``ReceivedAttention``."""

    kind: Literal["ReceivedAttention"] = "ReceivedAttention"
    queries: Literal["original", "all", "question", "answer"] = "original"
    include_self: bool = False
    skip_first: bool = False


class Output(_Section):
    """Where the result and its page go, and what the figure shows; paths are relative to where the command runs."""

    result: str
    page: str | None = None
    layer: int | None = None
    heads: list[int] | int = 3


class Config(_Section):
    """A whole run."""

    model: str
    prompts: Prompts
    output: Output
    conditions: dict[str, Condition] = {"slash": Condition()}
    analyses: list[Analysis] = [Analysis()]
    layers: list[int] | None = None
    seed: int = 0
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    memory: str = "2GiB"
    engine: Literal["auto", "streaming", "hooks"] = "auto"
    verify: bool = True


def read_config(path: str | Path) -> Config:
    """Read a TOML file.

    Raises:
        OptionError: No such file, not TOML, an unknown key, a missing one, or one of the wrong kind.
    """
    path = Path(path)
    if not path.is_file():
        raise OptionError(f"there is no config file at {path}")
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} is not TOML: {error}") from None
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {_words(e)}" for e in error.errors())
        raise OptionError(f"{path}: {wrong}") from None


def _words(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return "there is no such key here"
    return "is missing" if error["type"] == "missing" else error["msg"]
