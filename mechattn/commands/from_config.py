"""Builds conditions and analyses from the kinds and options that a config file gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import product
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mechattn import conditions as public_conditions
from mechattn.analysis import ANALYSES as KINDS
from mechattn.analysis.analysis import Analysis
from mechattn.errors import OptionError
from mechattn.interventions.ablation import AttentionKnockout, HeadAblation
from mechattn.interventions.arm import ARM
from mechattn.prompts import conditions as kinds
from mechattn.prompts import fillers
from mechattn.prompts.sweeps import sweep
from mechattn.toml_sections import AnalysisSection, Condition, all_words, near, no_such_key

# Those that mechattn.conditions exports, but for the base class of insertions.
CONDITIONS = {
    name: kind
    for name, kind in vars(public_conditions).items()
    if hasattr(kind, "apply") and kind is not public_conditions.Insertion
}
ANALYSES = {kind.__name__: kind for kind in KINDS}
INTERVENTIONS = {kind.__name__: kind for kind in (ARM, AttentionKnockout, HeadAblation)}


def made_conditions(
    sections: Mapping[str, Condition], tokenizer: Callable[[], Any] | None = None
) -> dict[str, kinds.Condition]:
    """Build the conditions of a file; a sweep gives several, named after their values."""
    counts = _counts(sections, tokenizer) if tokenizer else {}
    conditions: dict[str, kinds.Condition] = {}
    for name, section in sections.items():
        kinds.check_name(name)
        variants = _variants(section, counts.get(name), f"conditions.{name}")
        for values, condition in variants.items():
            conditions[f"{name}, {values}" if values else name] = condition
    return conditions


def _counts(sections: Mapping[str, Condition], tokenizer: Callable[[], Any]) -> dict[str, int]:
    """The number of tokens of the sections that give none.

    A text has the nearest number to the default that it reaches, a control that of the first text.
    """
    without_count = {
        name: section for name, section in sections.items() if "count" not in section.options
    }
    default = kinds.MeaninglessTokens()
    counts: dict[str, int] = {}
    for name, section in without_count.items():
        text = section.options.get("text", default.text)
        separator = section.options.get("separator", default.separator)
        own_line = section.options.get("own_line") is True
        if section.kind != "MeaninglessTokens" or not text:
            continue
        if isinstance(text, str) and isinstance(separator, str):
            counts[name] = fillers.nearest_count(
                tokenizer(), text, separator, default.count, own_line
            )
    if counts:
        first_count = next(iter(counts.values()))
        for name, section in without_count.items():
            if "count" in _option_names(CONDITIONS[section.kind]):
                counts.setdefault(name, first_count)
    return counts


def _variants(section: Condition, count: int | None, where: str) -> dict[str, kinds.Condition]:
    """The conditions of one section by swept values; a single one named "" without a sweep."""
    options = section.options if count is None else {"count": count, **section.options}
    swept = {key: value for key, value in options.items() if isinstance(value, list)}
    if "count" in swept:
        swept["count"] = [number for number in swept["count"] if number != 0]  # 0: the baseline
    for key, values in swept.items():
        if not values:
            raise OptionError(f"{where}.{key} = []: give at least one value")
    for combination in product(*swept.values()):
        of_these_values = options | dict(zip(swept, combination, strict=True))
        condition = _built(
            CONDITIONS, section.kind, of_these_values, where, list(Condition.model_fields)
        )
    if section.kind == "Baseline" and section.intervention is None:
        raise OptionError(f'{where}: the "Baseline" is always run; give this one an intervention')
    if section.masked:
        condition = condition.masked()
    if section.unshifted:
        condition = condition.unshifted()
    if intervention := section.intervention:
        where = f"{where}.intervention"
        condition = condition.under(
            _built(INTERVENTIONS, intervention.kind, intervention.options, where)
        )
    return sweep(condition, **swept) if swept else {"": condition}


def made_analyses(sections: Sequence[AnalysisSection]) -> list[Analysis]:
    """Build the analyses of a file."""
    return [
        _built(ANALYSES, section.kind, section.options, f"analyses[{index}]")
        for index, section in enumerate(sections)
    ]


def _built(
    classes: Mapping[str, Any],
    kind: str,
    options: Mapping[str, Any],
    where: str,
    other_keys: Sequence[str] = (),
) -> Any:
    """Build a dataclass of a given kind from its options, after checking their names and types."""
    if kind not in classes:
        choices = ", ".join(classes)
        raise OptionError(f"{where}.kind = {kind!r}: choose one of {choices}{near(kind, classes)}")
    option_names = _option_names(classes[kind])
    for name in options:
        if name not in option_names:
            words = no_such_key(name, [*option_names, *other_keys])
            raise OptionError(f"{where}.{name}: {words}")
    try:
        # Through JSON, where strict pydantic still accepts a list for a tuple.
        content = json.dumps(options, default=str)
        return TypeAdapter(classes[kind]).validate_json(content, strict=True)
    except ValidationError as error:
        raise OptionError(all_words(error, Condition, f"{where}.")) from None


def _option_names(condition_or_analysis: Any) -> list[str]:
    """The options of a class; its other fields are filled in before a run."""
    return [field.name for field in fields(condition_or_analysis) if field.repr]
