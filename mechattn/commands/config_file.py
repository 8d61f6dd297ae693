"""The sections and keys of a config file, read before torch is imported so that errors appear immediately."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field as PydanticField
from pydantic import ValidationError

from mechattn.errors import OptionError
from mechattn.sections import AnalysisSection, Condition, OpenSection, Section, all_words, toml_values

_Int = Annotated[int, PydanticField(ge=-(2**63), lt=2**63)]


class Prompts(Section):
    """The arguments of ``load_prompts``."""

    source: str
    limit: _Int | None = None
    field: str = "question"
    system: str | None = None
    template: Literal["plain", "chat", "joined"] = "plain"
    with_answer: bool = False
    split: str = "test"
    seed: _Int = 0
    answer: str = "answer"
    group: str | None = None
    counterpart: str | None = None
    other_answer: str | None = None


class Figure(OpenSection):
    """A figure of the page: its kind and its options."""

    kind: str


class Output(Section):
    """The paths of the result and its page (relative to the working directory), and what the first figure shows."""

    result: str
    page: str | None = None
    layer: int | None = None
    heads: list[int] | int | None = None
    choose: int = PydanticField(3, ge=1)


class ServerSection(Section):
    """The arguments of ``Server``."""

    address: str
    model: str | None = None
    key: str | None = None
    timeout: float = 600.0
    verify: bool = True


class EvaluationSection(Section):
    """The arguments of ``evaluate``, and the file for the answers, with "{model}" in its name for several models."""

    out: str
    new_tokens: _Int = 256
    samples: _Int = 1
    temperature: float | None = None
    grader: Literal["auto", "number", "math"] = "auto"
    batch: _Int = 32
    server: ServerSection | None = None


class Config(Section):
    """A whole run; each of several models gives its own result, with "{model}" in its path."""

    model: str | list[str]
    prompts: Prompts
    output: Output
    conditions: dict[str, Condition] = PydanticField({"slash": Condition()})
    analyses: list[AnalysisSection] = PydanticField([AnalysisSection()])
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
    values: Literal["float32", "float16"] = "float32"
    paths: bool = False
    evaluation: EvaluationSection | None = None

    @property
    def models(self) -> list[str]:
        """The models, at least one."""
        return [self.model] if isinstance(self.model, str) else self.model


def read_sections(path: str | Path) -> Config:
    """Read and check a TOML file as far as possible without a model or the analyses."""
    return checked(toml_values(path), f"{path}: ")


def checked(values: dict[str, Any], where: str = "") -> Config:
    """The config with these values."""
    try:
        config = Config.model_validate(values)
    except RecursionError:
        raise OptionError(f"{where.removesuffix(': ')} is nested too deeply") from None
    except ValidationError as error:
        raise OptionError(f"{where}{all_words(error, Config)}") from None
    if not config.models:
        raise OptionError(f"{where}model = [] is empty; give at least one model")
    return config
