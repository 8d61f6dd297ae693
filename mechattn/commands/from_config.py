"""Builds conditions and analyses from the kinds and options that a config file gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from inspect import signature
from itertools import product
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from mechattn import analysis
from mechattn import conditions as public_conditions
from mechattn.analysis.analysis import Analysis
from mechattn.errors import OptionError
from mechattn.interventions.ablation import AttentionKnockout, HeadAblation
from mechattn.interventions.arm import ARM
from mechattn.prompts import conditions as prompt_conditions
from mechattn.prompts import fillers
from mechattn.prompts.sweeps import sweep
from mechattn.results.provenance import is_calibrated
from mechattn.toml_sections import (
    AnalysisSection,
    ConditionSection,
    check_known,
    no_such_key,
    validation_words,
)

# The classes that mechattn.conditions exports, without Insertion, the base class of insertions.
CONDITIONS = {
    name: kind
    for name, kind in vars(public_conditions).items()
    if hasattr(kind, "apply") and kind is not public_conditions.Insertion
}
ANALYSES = {kind.__name__: kind for kind in analysis.ANALYSES}
INTERVENTIONS = {kind.__name__: kind for kind in (ARM, AttentionKnockout, HeadAblation)}


def build_conditions(
    sections: Mapping[str, ConditionSection], tokenizer: Any | None = None
) -> dict[str, prompt_conditions.Condition]:
    """Build the conditions of a file. A sweep gives several, which are named after their values.

    Args:
        sections: The sections by the names of the conditions.
        tokenizer: The tokenizer that decides how many tokens a condition without ``count`` inserts.
            Without a tokenizer it is the default number, which is enough to check a file.

    Returns:
        The conditions by name, such as "slash" or "slash, count=5".

    Raises:
        OptionError: A name, kind or option is not allowed, or two conditions have the same name.
        ConditionError: The tokenizer cannot make about the default number of tokens from a text.
    """
    counts = {} if tokenizer is None else _counts(sections, tokenizer)
    conditions: dict[str, prompt_conditions.Condition] = {}
    for name, section in sections.items():
        prompt_conditions.check_name(name)
        variants = _variants(name, section, counts.get(name))
        for repeated_name in variants.keys() & conditions.keys():
            raise OptionError(
                f"conditions.{name}: there already is a condition {repeated_name!r}; give this one"
                " another name"
            )
        conditions |= variants

    return conditions


def build_analyses(sections: Sequence[AnalysisSection]) -> list[Analysis]:
    """Build the analyses of a file.

    Raises:
        OptionError: A kind or an option is not allowed.
    """
    analyses = []
    for index, section in enumerate(sections):
        where = f"analyses[{index}]"
        analysis_class = known_kind(ANALYSES, section.kind, where)
        analyses.append(_build(analysis_class, section.options, where))
    return analyses


def known_kind(kinds_by_name: Mapping[str, Any], kind: str, where: str) -> Any:
    """The class or figure of a kind; ``where`` is the section of the file for messages.

    Raises:
        OptionError: There is no such kind.
    """
    check_known(f"{where}.kind", kind, kinds_by_name)
    return kinds_by_name[kind]


def checked_options(
    build: Callable, options: Mapping[str, Any], where: str, other_keys: Iterable[str] = ()
) -> dict[str, Any]:
    """Check the names and types of the options of a class or figure, and add its defaults.

    Args:
        build: The class or figure.
        options: The options that the file gives.
        where: The section of the file for messages.
        other_keys: Further keys of the section, which a message may suggest.

    Returns:
        All options of the class or figure, by name.

    Raises:
        OptionError: There is no such option, or a value has the wrong type.
    """
    model = _options_model(build)
    for name in options:
        if name not in model.model_fields:
            message = no_such_key(name, [*model.model_fields, *other_keys])
            raise OptionError(f"{where}.{name}: {message}")

    # Checked as JSON, because strict pydantic accepts a list for a tuple only there. A date of TOML
    # becomes a table, so that it is not accepted as a text.
    options_text = json.dumps(options, default=lambda date: {"date": str(date)})
    try:
        return dict(model.model_validate_json(options_text))
    except ValidationError as error:
        raise OptionError(validation_words(error, model, f"{where}.")) from None


def _counts(sections: Mapping[str, ConditionSection], tokenizer: Any) -> dict[str, int]:
    """The number of tokens for each section that gives none.

    A meaningless text gets the number nearest to the default that its repetitions can make. Other
    conditions, such as controls, get the number of the first such text, unless the ``count`` of
    their kind is None by default.
    """
    without_count = {
        name: section for name, section in sections.items() if "count" not in section.options
    }
    default = prompt_conditions.MeaninglessTokens()

    counts: dict[str, int] = {}
    for name, section in without_count.items():
        text = section.options.get("text", default.text)
        separator = section.options.get("separator", default.separator)
        own_line = section.options.get("own_line") is True

        # An empty text or an option of another type is refused when its condition is built.
        are_texts = isinstance(text, str) and isinstance(separator, str)
        if section.kind == "MeaninglessTokens" and are_texts and text != "":
            counts[name] = fillers.nearest_count(
                tokenizer, text, separator, default.count, own_line
            )

    if not counts:
        return {}
    first_count = next(iter(counts.values()))
    for name, section in without_count.items():
        condition_class = known_kind(CONDITIONS, section.kind, f"conditions.{name}")
        count_field = _options_model(condition_class).model_fields.get("count")
        if count_field is not None and count_field.default is not None:
            counts.setdefault(name, first_count)
    return counts


def _variants(
    name: str, section: ConditionSection, count: int | None
) -> dict[str, prompt_conditions.Condition]:
    """The conditions of one section by their full names, such as "slash, count=5"."""
    where = f"conditions.{name}"
    options = dict(section.options)
    if count is not None:
        options["count"] = count

    condition_class = known_kind(CONDITIONS, section.kind, where)
    known_options = _options_model(condition_class).model_fields
    counts = options.get("count")
    if isinstance(counts, list) and "count" in known_options:
        # 0 tokens are the baseline, which is always run.
        options["count"] = [number for number in counts if number != 0]
        if not options["count"]:
            raise OptionError(
                f"{where}.count = {counts}: give at least one value, beside 0 (the baseline)"
            )

    value_lists = {}
    for option, value in options.items():
        if option in known_options and _may_be_sequence(known_options[option].annotation):
            continue  # a list is a single value of this option, such as the versions of Counterpart
        # An empty list is not swept, so that it is refused as a value.
        if isinstance(value, list) and value:
            value_lists[option] = value

    variants = []
    for values in product(*value_lists.values()):  # all are built, so that every value is checked
        variant_options = options | dict(zip(value_lists, values, strict=True))
        variants.append(
            _build(condition_class, variant_options, where, ConditionSection.model_fields)
        )

    if section.kind == "Baseline" and section.intervention is None:
        raise OptionError(f'{where}: the "Baseline" is always run; give this one an intervention')

    condition = _with_section_options(variants[0], section, where)
    if not value_lists:
        return {name: condition}
    # Any variant will do, as sweep replaces its swept options.
    swept_conditions = sweep(condition, **value_lists)
    return {f"{name}, {label}": variant for label, variant in swept_conditions.items()}


def _with_section_options(condition: Any, section: ConditionSection, where: str) -> Any:
    """The condition, masked, unshifted or under an intervention if its section says so."""
    for option in ("masked", "unshifted"):
        if getattr(section, option):
            if not hasattr(condition, option):
                raise OptionError(
                    f"{where}: {option} = true is for conditions that insert tokens, and"
                    f" {section.kind} inserts none"
                )
            condition = getattr(condition, option)()

    if section.intervention:
        where = f"{where}.intervention"
        intervention_class = known_kind(INTERVENTIONS, section.intervention.kind, where)
        intervention = _build(intervention_class, section.intervention.options, where)
        condition = condition.under(intervention)
    return condition


def _build(
    build_class: Callable,
    options: Mapping[str, Any],
    where: str,
    other_keys: Iterable[str] = (),
) -> Any:
    """Build a condition, analysis or intervention.

    Args:
        build_class: The class.
        options: The options that the file gives.
        where: The section of the file for messages, such as "conditions.slash".
        other_keys: Further keys of the section, which a message may suggest.
    """
    all_options = checked_options(build_class, options, where, other_keys)
    given_options = {name: all_options[name] for name in options}  # without defaults
    return build_class(**given_options)


def _may_be_sequence(annotation: Any) -> bool:
    """Whether a type, or one of the types of a union, is a sequence such as ``tuple[int, ...]``."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return any(map(_may_be_sequence, get_args(annotation)))
    return isinstance(origin, type) and issubclass(origin, Sequence)


@cache
def _options_model(build: Callable) -> type[BaseModel]:
    """A pydantic model of the options of a class or figure, from its signature."""
    hints = get_type_hints(build)
    options = {}
    for name, parameter in signature(build).parameters.items():
        if name in ("self", "result", "results"):  # what a figure draws is not an option
            continue
        default = parameter.default
        if default is parameter.empty:
            default = ...  # pydantic's mark of a required field
        options[name] = (hints[name], default)

    if is_dataclass(build):
        for field in fields(build):
            if is_calibrated(field):  # filled in before a run, and so not an option
                options.pop(field.name, None)

    config = ConfigDict(strict=True, arbitrary_types_allowed=True)
    return create_model(build.__name__, __config__=config, **options)  # type: ignore[call-overload]
