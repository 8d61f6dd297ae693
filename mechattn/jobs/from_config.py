"""Builds conditions and analyses from the kinds and options that a config file gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import fields
from itertools import product
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mechattn.analysis import ANALYSES as KINDS
from mechattn.analysis.analysis import Analysis
from mechattn.errors import OptionError
from mechattn.interventions.ablation import HeadAblation, Knockout
from mechattn.interventions.arm import ARM
from mechattn.prompts import conditions as kinds
from mechattn.prompts import fillers
from mechattn.prompts.counterparts import Counterpart
from mechattn.prompts.sweeps import sweep
from mechattn.toml_sections import AnalysisSection, Condition, all_words, near, no_such_key

_CONDITIONS = (
    kinds.Baseline, kinds.MeaninglessTokens, kinds.Text, kinds.RepeatedWord, kinds.RandomTokens, kinds.RandomSentence,
    kinds.ShuffledSentence, kinds.Counting, kinds.RepeatQuestion, Counterpart,
)  # fmt: skip
CONDITIONS = {kind.__name__: kind for kind in _CONDITIONS}
ANALYSES = {kind.__name__: kind for kind in KINDS}
INTERVENTIONS = {kind.__name__: kind for kind in (ARM, Knockout, HeadAblation)}


def made_conditions(
    sections: Mapping[str, Condition], tokenizer: Callable[[], Any] | None = None
) -> dict[str, kinds.Condition]:
    """Build the conditions of a file; a sweep gives several, named after their values."""
    # Of each section without a count: what its text can reach; a control takes the first condition's.
    open_ones = {
        name: section
        for name, section in sections.items()
        if "count" not in section.options and tokenizer
    }
    found: dict[str, int] = {}
    for name, section in open_ones.items():
        if tokenizer and section.kind == "MeaninglessTokens":
            default = kinds.MeaninglessTokens()
            text, separator = (
                section.options.get(key, getattr(default, key)) for key in ("text", "separator")
            )
            if isinstance(text, str) and text and isinstance(separator, str):
                found[name] = fillers.nearest_count(tokenizer(), text, separator, default.count)
    counted = [
        name
        for name, section in open_ones.items()
        if found and "count" in _keys(CONDITIONS[section.kind])
    ]
    counts = dict.fromkeys(counted, next(iter(found.values()), 0)) | found
    made: dict[str, kinds.Condition] = {}
    for name, section in sections.items():
        kinds.check_name(name)
        varied = _varied(section, counts.get(name), f"conditions.{name}")
        made |= {", ".join(filter(None, (name, of))): one for of, one in varied.items()}
    return made


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
        made = _made(
            CONDITIONS,
            section.kind,
            fixed | dict(zip(swept, values, strict=True)),
            where,
            Condition,
        )
    if section.kind == "Baseline" and section.intervention is None:
        raise OptionError(f'{where}: the "Baseline" is always run; give this one an intervention')
    made = made.masked() if section.masked else made
    made = made.unshifted() if section.unshifted else made
    if acts := section.intervention:
        made = made.under(_made(INTERVENTIONS, acts.kind, acts.options, f"{where}.intervention"))
    return sweep(made, **swept) if swept else {"": made}


def made_analyses(sections: Seq[AnalysisSection]) -> list[Analysis]:
    """Build the analyses of a file."""
    return [_made(ANALYSES, s.kind, s.options, f"analyses[{i}]") for i, s in enumerate(sections)]


def _made(
    known: Mapping[str, Any],
    kind: str,
    options: Mapping[str, Any],
    where: str,
    section: type[Condition] | None = None,
) -> Any:
    """Build a dataclass of a given kind from its options, after checking their names and types."""
    cls = known.get(kind)
    if cls is None:
        raise OptionError(
            f"{where}.kind = {kind!r}: choose one of {', '.join(known)}{near(kind, known)}"
        )
    have = _keys(cls)
    for name in options:
        if name not in have:
            also = [] if section is None else list(section.model_fields)
            raise OptionError(f"{where}.{name}: {no_such_key(name, [*have, *also])}")
    try:
        # Through JSON, where strict pydantic still accepts a list for a tuple.
        return TypeAdapter(cls).validate_json(json.dumps(options, default=str), strict=True)
    except ValidationError as error:
        raise OptionError(all_words(error, Condition, f"{where}.")) from None


def _keys(cls: Any) -> list[str]:
    """The options of a kind; its other fields are filled in before a run."""
    return [field.name for field in fields(cls) if field.repr]
