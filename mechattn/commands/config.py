"""Builds and checks the conditions, analyses and figures of a config file before the run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mechattn.analysis.analysis import Analysis
from mechattn.axes import BASELINE
from mechattn.commands.config_file import Config, Figure, read_sections
from mechattn.errors import OptionError
from mechattn.jobs.kinds import ANALYSES, made_analyses, made_conditions
from mechattn.render.declared import FIGURES as DECLARED
from mechattn.sections import near, no_such_key
from mechattn.store.file_names import file_names as file_names

FIGURES: dict[str, Callable] = {name: one.draw for name, one in DECLARED.items() if one.draws_results}


def read_config(path: str | Path) -> Config:
    """Read a TOML file."""
    config = read_sections(path)
    try:
        made_conditions(config.conditions)
        made_analyses(config.analyses)
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


def shown_options(figure: Figure) -> dict[str, Any]:
    """The options of a figure, including defaults."""
    takes = DECLARED[figure.kind].takes
    return {name: default for name, default in takes.items() if default is not inspect.Parameter.empty} | figure.options


def _check_figures(config: Config) -> None:
    """Check that each figure is known, gets valid options, and shows conditions and analyses of the run."""
    conditions, analyses = made_conditions(config.conditions), {section.kind for section in config.analyses}
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
            if not isinstance(shown.get(name), str | None):
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
    takes = DECLARED[figure.kind].takes
    for name in figure.options:
        if name not in takes:
            raise OptionError(f"{where}.{name}: {no_such_key(name, list(takes))}")
    needed = [name for name, default in takes.items() if default is inspect.Parameter.empty]
    if missing := [name for name in needed if name not in figure.options]:
        raise OptionError(f"{where}: {figure.kind} needs {', '.join(missing)}")


def _analyses_for(figure: Figure, shown: Mapping[str, Any], where: str) -> list[str]:
    """The analyses of which a figure needs one."""
    one = DECLARED[figure.kind]
    if isinstance(one.needs, Mapping) and shown["reading"] not in one.needs:
        raise OptionError(f"{where}.reading = {shown['reading']!r}: choose one of {', '.join(one.needs)}")
    if one.needs:
        return [kind for kind, make in ANALYSES.items() if make().name == one.analysis(shown)]
    of = [kind for kind, cls in ANALYSES.items() if str(shown["quantity"]) in _quantities(cls())]
    if not of:
        raise OptionError(f"{where}.quantity = {shown['quantity']!r}: no analysis measures it")
    return of


def _quantities(analysis: Analysis) -> set[str]:
    """The quantity names that ``result.compare`` accepts."""
    return {name.removesuffix("_by_segment") for name in analysis.quantities}
