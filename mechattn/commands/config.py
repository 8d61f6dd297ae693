"""Builds and checks the conditions, analyses and figures of a config file before the run."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mechattn import render
from mechattn.analysis.analysis import Analysis
from mechattn.analysis.registry import ANALYSES as KINDS
from mechattn.axes import BASELINE
from mechattn.commands.config_file import Condition, Config, Figure, all_words, near, no_such_key, read_sections
from mechattn.errors import OptionError
from mechattn.interventions.ablation import HeadAblation
from mechattn.interventions.arm import ARM
from mechattn.interventions.knockout import Knockout
from mechattn.prompts import conditions as kinds
from mechattn.prompts import fillers
from mechattn.prompts.sweeps import sweep
from mechattn.results.file_names import file_names as file_names

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
        kinds.Counting,
        kinds.RepeatQuestion,
    )
}
ANALYSES = {kind.__name__: kind for kind in KINDS}
INTERVENTIONS = {kind.__name__: kind for kind in (ARM, Knockout, HeadAblation)}
FIGURES: dict[str, Callable] = {  # every function of mechattn.render that draws results
    name: draw
    for name, draw in vars(render).items()
    if inspect.isfunction(draw)
    and next(iter(inspect.signature(draw).parameters)) in ("result", "results")
    and inspect.signature(draw).return_annotation == "go.Figure"
}
_SHOWS = {
    "scale_by_layer": "AffineShift",
    "shift_rank": "AffineShift",
    "activation_histogram": "MlpActivations",
    "activation_metrics": "MlpActivations",
    "near_zero_by_class": "MlpActivations",
    "agreement": "MlpActivations",
}
_READINGS = {"mixed": "HeadUpdates", "top_target": "TopTargetUpdates"}


def read_config(path: str | Path) -> Config:
    """Read a TOML file.

    Raises:
        OptionError: The file doesn't exist, is not TOML, or has an unknown key, a missing key or a value of the wrong
            type.
    """
    config = read_sections(path)
    try:
        made_conditions(config)
        made_analyses(config)
        _check_figures(config)
        file_names(config.models)
    except RecursionError:
        raise OptionError(f"{path} is nested too deeply") from None
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from None
    if len(config.models) > 1 and "{model}" not in config.output.result:
        raise OptionError(
            f'{path}: {len(config.models)} models need "{{model}}" in output.result, to give each its own result'
        )
    if config.evaluation and len(config.models) > 1 and "{model}" not in config.evaluation.out:
        raise OptionError(
            f'{path}: {len(config.models)} models need "{{model}}" in evaluation.out, to give each its own file'
        )
    return config


def made_conditions(config: Config, tokenizer: Callable[[], Any] | None = None) -> dict[str, kinds.Condition]:
    """Build the conditions of a config; a sweep gives several, named after their values.

    Args:
        config: The config, for its sections [conditions.NAME].
        tokenizer: A function that returns the model's tokenizer, to choose a reachable count if none is given.
    """
    counts = _default_counts(config, tokenizer) if tokenizer else {}
    made: dict[str, kinds.Condition] = {}
    for name, section in config.conditions.items():
        kinds.check_name(name)
        varied = _varied(section, counts.get(name), f"conditions.{name}")
        made |= {", ".join(filter(None, (name, of))): one for of, one in varied.items()}
    return made


def _default_counts(config: Config, tokenizer: Callable[[], Any]) -> dict[str, int]:
    """The token count of each section without one: what its text can reach; a control takes the first condition's."""
    open_ones = {name: section for name, section in config.conditions.items() if "count" not in section.options}
    found: dict[str, int] = {}
    for name, section in open_ones.items():
        if section.kind == "MeaninglessTokens":
            default = kinds.MeaninglessTokens()
            text, separator = (section.options.get(key, getattr(default, key)) for key in ("text", "separator"))
            if isinstance(text, str) and text and isinstance(separator, str):
                found[name] = fillers.nearest_count(tokenizer(), text, separator, default.count)
    counted = [name for name, section in open_ones.items() if "count" in _keys(CONDITIONS[section.kind])]
    return dict.fromkeys(counted, next(iter(found.values()))) | found if found else {}


def _varied(section: Condition, count: int | None, where: str) -> dict[str, kinds.Condition]:
    """The conditions of one section, by swept values; a single one named "" without a sweep."""
    options = section.options if count is None else {"count": count, **section.options}
    swept = {key: value for key, value in options.items() if isinstance(value, list)}
    if "count" in swept:
        swept["count"] = [some for some in swept["count"] if some != 0]  # that is the baseline
    if empty := [key for key, value in swept.items() if not value]:
        raise OptionError(f"{where}.{empty[0]} = []: give at least one value")
    fixed = {key: value for key, value in options.items() if key not in swept}
    for values in product(*swept.values()):
        made = _made(CONDITIONS, section.kind, fixed | dict(zip(swept, values, strict=True)), where, Condition)
    if section.kind == "Baseline" and section.intervention is None:
        raise OptionError(f'{where}: the "Baseline" is always run; give this one an intervention')
    made = made.masked() if section.masked else made
    made = made.unshifted() if section.unshifted else made
    if acts := section.intervention:
        made = made.under(_made(INTERVENTIONS, acts.kind, acts.options, f"{where}.intervention"))
    return sweep(made, **swept) if swept else {"": made}


def made_analyses(config: Config) -> list[Analysis]:
    """Build the analyses of a config."""
    return [_made(ANALYSES, s.kind, s.options, f"analyses[{i}]") for i, s in enumerate(config.analyses)]


def _made(
    known: Mapping[str, Any], kind: str, options: Mapping[str, Any], where: str, section: type[Condition] | None = None
) -> Any:
    """Build a dataclass of a given kind from its options, after checking their names and types."""
    cls = known.get(kind)
    if cls is None:
        raise OptionError(f"{where}.kind = {kind!r}: choose one of {', '.join(known)}{near(kind, known)}")
    have = _keys(cls)
    for name in options:
        if name not in have:
            also = [] if section is None else list(section.model_fields)
            raise OptionError(f"{where}.{name}: {no_such_key(name, [*have, *also])}")
    try:
        # Through JSON, where strict pydantic still accepts a list for a tuple.
        return TypeAdapter(cls).validate_json(json.dumps(options, default=str), strict=True)
    except ValidationError as error:
        raise OptionError(all_words(error, f"{where}.")) from None


def _keys(cls: Any) -> list[str]:
    """The options of a kind; its other fields are filled in before a run."""
    return [field.name for field in fields(cls) if field.repr]


def shown_options(figure: Figure) -> dict[str, Any]:
    """The options of a figure, including defaults."""
    takes = inspect.signature(FIGURES[figure.kind]).parameters.values()
    return {p.name: p.default for p in takes if p.default is not inspect.Parameter.empty} | figure.options


def _check_figures(config: Config) -> None:
    """Check that each figure is known, gets valid options, and shows conditions and analyses of the run."""
    conditions, analyses = made_conditions(config), {section.kind for section in config.analyses}
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
                raise OptionError(
                    f"{where}: there is no condition {name!r}; the conditions are {', '.join(conditions)}"
                )
        needed = _analyses_for(figure, shown, where)
        if not set(needed) & analyses:
            raise OptionError(f"{where}: {figure.kind} shows {needed[0]}, which is not among the analyses")


def _check_names(figure: Figure, where: str) -> None:
    """Check the kind of a figure and the names of its options."""
    if figure.kind not in FIGURES:
        raise OptionError(
            f"{where}.kind = {figure.kind!r}: choose one of {', '.join(FIGURES)}{near(figure.kind, FIGURES)}"
        )
    takes = inspect.signature(FIGURES[figure.kind]).parameters
    for name in figure.options:
        if name not in takes or name in ("result", "results"):
            raise OptionError(f"{where}.{name}: {no_such_key(name, list(takes)[1:])}")
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
    """The quantity names that ``result.compare`` accepts."""
    return {name.removesuffix("_by_segment") for name in analysis.quantities}
