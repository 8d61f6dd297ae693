"""A run as a file: model, prompts, conditions, analyses, figures and output in TOML, checked before the work."""

from __future__ import annotations

import difflib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic import Field as PydanticField

from mechattn import render
from mechattn.analysis.analysis import Analysis
from mechattn.analysis.registry import ANALYSES as KINDS
from mechattn.axes import BASELINE
from mechattn.errors import OptionError
from mechattn.interventions.ablation import HeadAblation
from mechattn.interventions.arm import ARM
from mechattn.interventions.knockout import Knockout
from mechattn.prompts import conditions as kinds

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONDITIONS = {
    kind.__name__: kind
    for kind in (
        kinds.Baseline,
        kinds.MeaninglessTokens,
        kinds.Text,
        kinds.RepeatedWord,
        kinds.RandomTokens,
        kinds.RandomSentence,
        kinds.ShuffledSentence,
    )
}
ANALYSES = {kind.__name__: kind for kind in KINDS}
INTERVENTIONS = {kind.__name__: kind for kind in (ARM, Knockout, HeadAblation)}
FIGURES: dict[str, Callable] = {
    figure.__name__: figure
    for figure in (
        render.received_attention,
        render.across_layers,
        render.change_map,
        render.scale_by_layer,
        render.shift_rank,
        render.sweep,
        render.two_by_two,
        render.meaningless_and_sentence,
        render.activation_histogram,
        render.activation_metrics,
        render.near_zero_by_class,
        render.agreement,
        render.heads_by_layer,
        render.by_layer,
        render.update_histogram,
        render.update_map,
        render.update_by_position,
    )
}
_SHOWS = {
    "scale_by_layer": "AffineShift",
    "shift_rank": "AffineShift",
    "activation_histogram": "MlpActivations",
    "activation_metrics": "MlpActivations",
    "near_zero_by_class": "MlpActivations",
    "agreement": "MlpActivations",
}
_LONGEST = 2**20  # bytes of a config
_READINGS = {"mixed": "HeadUpdates", "top_target": "TopTargetUpdates"}


_Int = Annotated[int, PydanticField(ge=-(2**63), lt=2**63)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)  # true is no number, and 3 no text


class _Open(BaseModel):
    """A section of a kind, whose other keys are the options of that kind."""

    model_config = ConfigDict(extra="allow", strict=True)

    @property
    def options(self) -> dict[str, Any]:
        """The keys that aren't declared."""
        return dict(self.model_extra or {})


class Prompts(_Section):
    """The arguments of ``load_prompts``."""

    source: str
    limit: _Int | None = None
    field: str = "question"
    answer_field: str = "answer"
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
    """A condition: its kind, its options, and what is done to the model. An option with a list of values is swept."""

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
    """Where the result and its page go, and what the first figure shows; relative to where the command runs."""

    result: str
    page: str | None = None
    layer: int | None = None
    heads: list[int] | int = 3


class EvaluationSection(_Section):
    """The arguments of ``evaluate``, and the file that answers go to; "{model}" in it for several models."""

    out: str
    new_tokens: _Int = 256
    samples: _Int = 1
    temperature: float | None = None
    grader: Literal["auto", "number", "math"] = "auto"
    batch: _Int = 32


class Config(_Section):
    """A whole run; several models give a result each, with "{model}" in its place.

    ``chunk``: prompts that are computed, and kept, together. ``threads``: of torch, in each worker. ``executor``,
    ``address``, ``workers``: where it is computed, which changes no number. ``paths``: whether the result and the page
    say where checkpoints and configs lie, and not their names alone.
    """

    model: str | list[str]
    prompts: Prompts
    output: Output
    conditions: dict[str, Condition] = {"slash": Condition()}
    analyses: list[AnalysisSection] = [AnalysisSection()]
    figures: list[Figure] | None = None
    layers: list[int] | None = None
    seed: _Int = 0
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    memory: str = "2GiB"
    engine: Literal["auto", "streaming", "hooks"] = "auto"
    verify: bool = True
    chunk: int = PydanticField(64, ge=1, lt=2**63)
    threads: _Int | None = PydanticField(None, ge=1)
    executor: Literal["local", "ray"] = "local"
    address: str | None = None
    workers: _Int | None = PydanticField(None, ge=1)
    paths: bool = False
    evaluation: EvaluationSection | None = None

    @property
    def models(self) -> list[str]:
        """The models, one at least."""
        return [self.model] if isinstance(self.model, str) else self.model

    def made_conditions(self) -> dict[str, kinds.Condition]:
        """The conditions; a swept one gives several, named after their values."""
        made: dict[str, kinds.Condition] = {}
        for name, section in self.conditions.items():
            kinds.check_name(name)
            where = f"conditions.{name}"
            swept = {key: value for key, value in section.options.items() if isinstance(value, list)}
            if "count" in swept:
                swept["count"] = [count for count in swept["count"] if count != 0]  # the baseline
            if empty := [key for key, value in swept.items() if not value]:
                raise OptionError(f"{where}.{empty[0]} = []: give at least one value")
            fixed = {key: value for key, value in section.options.items() if key not in swept}
            for values in product(*swept.values()):
                some = _made(CONDITIONS, section.kind, fixed | dict(zip(swept, values, strict=True)), where)
            if section.kind == "Baseline" and section.intervention is None:
                raise OptionError(f'{where}: a "Baseline" is always run; give this one an intervention')
            some = some.masked() if section.masked else some
            some = some.unshifted() if section.unshifted else some
            if acts := section.intervention:
                some = some.under(_made(INTERVENTIONS, acts.kind, acts.options, f"{where}.intervention"))
            varied = kinds.sweep(some, **swept) if swept else {"": some}
            made |= {", ".join(filter(None, (name, values))): condition for values, condition in varied.items()}
        return made

    def made_analyses(self) -> list[Analysis]:
        """The analyses."""
        return [_made(ANALYSES, s.kind, s.options, f"analyses[{i}]") for i, s in enumerate(self.analyses)]


def read_config(path: str | Path) -> Config:
    """Read a TOML file.

    Raises:
        OptionError: No such file, not TOML, an unknown key, a missing one, or one of the wrong kind.
    """
    values = _values(path)
    try:
        config = Config.model_validate(values)
        config.made_conditions()
        config.made_analyses()
        _check_figures(config)
        file_names(config.models)
    except RecursionError:
        raise OptionError(f"{path} is nested too deeply") from None
    except ValidationError as error:
        raise OptionError(f"{path}: {_all_words(error)}") from None
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from None
    if not config.models:
        raise OptionError(f"{path}: model = [] names no model")
    if len(config.models) > 1 and "{model}" not in config.output.result:
        raise OptionError(f'{path}: {len(config.models)} models need "{{model}}" in output.result, for a result each')
    if config.evaluation and len(config.models) > 1 and "{model}" not in config.evaluation.out:
        raise OptionError(f'{path}: {len(config.models)} models need "{{model}}" in evaluation.out, for a file each')
    return config


def file_names(models: Iterable[str]) -> dict[str, str]:
    """A name for the files of each model, in place of "{model}": "toy:llama" gives "toy-llama", "/a/b/" gives "b".

    Raises:
        OptionError: Two models would write to the same file.
    """
    found: dict[str, str] = {}
    for model in models:
        last = model.rstrip("/").rsplit("/", 1)[-1]
        name = "".join(c if c.isalnum() or c in "._-" else "-" for c in last)
        for other, taken in found.items():
            if taken.casefold() == name.casefold() and other != model:
                raise OptionError(
                    f"the models {other!r} and {model!r} would both write to files named {name!r}: run them apart, or "
                    "give their folders names of their own"
                )
        found[model] = name
    return found


def _values(path: str | Path) -> dict[str, Any]:
    """What a TOML file says, whatever it holds."""
    if not os.path.isfile(path):  # of a name that is too long it says no, and Path raises
        raise OptionError(f"there is no config file at {path}")
    if os.path.getsize(path) > _LONGEST:
        raise OptionError(f"{path} is larger than {_LONGEST // 2**20} MiB, so it is no config")
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror or error}") from None
    except RecursionError:
        raise OptionError(f"{path} is nested too deeply") from None
    except ValueError as error:  # not TOML, not UTF-8, or a number of thousands of digits
        raise OptionError(f"{path} is not TOML: {error}") from None


def _made(known: Mapping[str, Any], kind: str, options: Mapping[str, Any], where: str) -> Any:
    """A dataclass of a kind from its options, its types checked."""
    cls = known.get(kind)
    if cls is None:
        raise OptionError(f"{where}.kind = {kind!r}: there is {', '.join(known)}{_near(kind, known)}")
    have = [field.name for field in fields(cls) if field.repr]  # the others are filled in before a run
    for name in options:
        if name not in have:
            raise OptionError(f"{where}.{name}: there is no such key here{_near(name, have)}")
    try:
        # By way of JSON, where pydantic can be strict and still take a list for a tuple.
        return TypeAdapter(cls).validate_json(json.dumps(options, default=str), strict=True)
    except ValidationError as error:
        raise OptionError(_all_words(error, f"{where}.")) from None


def shown_options(figure: Figure) -> dict[str, Any]:
    """The options of a figure, with the defaults of those that aren't given."""
    takes = inspect.signature(FIGURES[figure.kind]).parameters.values()
    return {p.name: p.default for p in takes if p.default is not inspect.Parameter.empty} | figure.options


def _check_figures(config: Config) -> None:
    """Each figure is known, takes the options it is given, and shows conditions and analyses that will be there."""
    conditions, analyses = config.made_conditions(), {section.kind for section in config.analyses}
    for i, figure in enumerate(config.figures or []):
        where = f"figures[{i}]"
        _check_names(figure, where)
        shown = shown_options(figure)
        for name in ("layers", "conditions"):
            if not isinstance(shown.get(name, []) or [], (list, tuple)):
                raise OptionError(f"{where}.{name} = {shown[name]!r}: give a list")
        for name in ("layer", "head"):
            if not isinstance(shown.get(name, 0) or 0, int):
                raise OptionError(f"{where}.{name} = {shown[name]!r}: give one number")
        for name in ("condition", "reading"):
            if not isinstance(shown.get(name) or "", str):
                raise OptionError(f"{where}.{name} = {shown[name]!r}: give one name")
        if not all(isinstance(name, str) for name in shown.get("conditions") or []):
            raise OptionError(f"{where}.conditions = {shown['conditions']!r}: give names")
        for name in filter(None, [shown.get("condition"), *(shown.get("conditions") or [])]):
            if name not in conditions and name != BASELINE:
                raise OptionError(f"{where}: there is no condition {name!r}; there is {', '.join(conditions)}")
        needed = _analyses_for(figure, shown, where)
        if not set(needed) & analyses:
            raise OptionError(f"{where}: {figure.kind} shows {needed[0]}, which is not among the analyses")


def _check_names(figure: Figure, where: str) -> None:
    """The kind of a figure and the names of its options."""
    if figure.kind not in FIGURES:
        raise OptionError(f"{where}.kind = {figure.kind!r}: there is {', '.join(FIGURES)}{_near(figure.kind, FIGURES)}")
    takes = inspect.signature(FIGURES[figure.kind]).parameters
    for name in figure.options:
        if name not in takes or name in ("result", "results"):
            raise OptionError(f"{where}.{name}: there is no such key here{_near(name, list(takes))}")
    needed = [p.name for p in list(takes.values())[1:] if p.default is inspect.Parameter.empty]
    if missing := [name for name in needed if name not in figure.options]:
        raise OptionError(f"{where}: {figure.kind} needs {', '.join(missing)}")


def _analyses_for(figure: Figure, shown: Mapping[str, Any], where: str) -> list[str]:
    """The analyses of which a figure needs one."""
    if "reading" in shown:
        if not isinstance(shown["reading"], str) or shown["reading"] not in _READINGS:
            raise OptionError(f"{where}.reading = {shown['reading']!r}: choose one of {', '.join(_READINGS)}")
        return [_READINGS[shown["reading"]]]
    if "quantity" not in shown:
        return [_SHOWS.get(figure.kind, "ReceivedAttention")]
    of = [kind for kind, cls in ANALYSES.items() if str(shown["quantity"]) in _quantities(cls())]
    if not of:
        raise OptionError(f"{where}.quantity = {shown['quantity']!r}: no analysis measures it")
    return of


def _quantities(analysis: Analysis) -> set[str]:
    """The names that ``result.compare`` takes."""
    return {name.removesuffix("_by_segment") for name in analysis.quantities}


def _near(word: str, known: Any) -> str:
    near = difflib.get_close_matches(word, list(known), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _all_words(error: ValidationError, where: str = "") -> str:
    return "; ".join(f"{where}{'.'.join(map(str, e['loc']))}: {_words(e)}" for e in error.errors())


def _words(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        *section, name = error["loc"]
        known: dict[tuple, type[BaseModel]] = {(): Config, ("prompts",): Prompts, ("output",): Output}
        known[("evaluation",)] = EvaluationSection
        near = _near(str(name), known[tuple(section)].model_fields) if tuple(section) in known else ""
        return f"there is no such key here{near}"
    return "is missing" if error["type"] == "missing" else str(error["msg"]).removeprefix("Value error, ")
