"""The conditions of a register for one model: as many tokens as its tokenizer makes, and its own ARM."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from mechattn.claims.register import Arm, Register
from mechattn.errors import ConditionError
from mechattn.jobs.kinds import made_conditions
from mechattn.prompts.conditions import Condition, MeaninglessTokens, Variant
from mechattn.prompts.fillers import nearest_count
from mechattn.results.provenance import name_of
from mechattn.sections import Condition as ConditionSection
from mechattn.sections import InterventionSection


@dataclass(frozen=True)
class Conditions:
    """What is run of a model."""

    made: Mapping[str, Condition]
    deviations: tuple[str, ...] = ()  # how they differ from what the register asks for, in sentences


def conditions_for(register: Register, model: str, architecture: str, tokenizer: Any) -> Conditions:
    """The conditions of a register, for a model of an architecture such as "Qwen2ForCausalLM"."""
    arm, said = _arm(register.arms, model, architecture)
    sections = {name: _with_arm(section, arm) for name, section in register.conditions.items()}
    made: dict[str, Any] = made_conditions(sections)
    deviations = [said] if said and any(section.intervention for section in sections.values()) else []
    try:
        fitted = {name: _fitted(one, tokenizer) for name, one in made.items()}
    except ConditionError as error:
        raise ConditionError(f"{model}: {error}") from None
    filler = next((one for one in fitted.values() if isinstance(one, MeaninglessTokens)), None)
    for name, one in fitted.items():
        if filler and hasattr(one, "count") and "count" not in sections[name].options:
            fitted[name] = replace(one, count=filler.count)
    deviations += [
        f"{name}: {one.count} “{one.text}” tokens"
        + f" in place of {asked.count}" * (one.count != asked.count)
        + (f", {'with' if one.separator else 'without'} spaces between them.")
        for name, one in fitted.items()
        if isinstance(asked := made[name], MeaninglessTokens) and one != asked
    ]
    return Conditions(fitted, tuple(deviations))


def _arm(arms: list[Arm], model: str, architecture: str) -> tuple[Arm | None, str]:
    """That of the model by its name, else of its family (what stands before "For"), else of all others."""
    name, family = name_of(model).rpartition("/")[2], architecture.partition("For")[0]
    for arm in arms:
        if arm.model and arm.model.casefold() == name.casefold():
            return arm, ""
    for arm in arms:
        if arm.architecture and arm.architecture.partition("For")[0] == family:
            return arm, f"ARM as for {family} (c = {arm.c:g}, p1 = {arm.p1:g}): the register has no values for {name}."
    rest = next((arm for arm in arms if not arm.model and not arm.architecture), None)
    return rest, f"ARM in the form {rest.form!r}: the register has no values for {family}." if rest else ""


def _with_arm(section: ConditionSection, arm: Arm | None) -> ConditionSection:
    acts = section.intervention
    if acts is None or acts.kind != "ARM" or arm is None or {"c", "p1", "form"} & set(acts.options):
        return section
    own = {"form": arm.form, "c": arm.c, "p1": arm.p1, **acts.options}
    return section.model_copy(update={"intervention": InterventionSection(kind="ARM", **own)})


def _fitted(asked: Any, tokenizer: Any) -> Any:
    """Filler in the number asked for with its separator, else without one, else the nearest number with it."""
    if isinstance(asked, Variant):
        return replace(asked, condition=_fitted(asked.condition, tokenizer))
    if not isinstance(asked, MeaninglessTokens):
        return asked
    counts: dict[str, int] = {}
    for by in dict.fromkeys((asked.separator, "")):
        with suppress(ConditionError):
            counts[by] = nearest_count(tokenizer, asked.text, by, asked.count)
    by = next((by for by, count in counts.items() if count == asked.count), asked.separator)
    if by not in counts:
        raise ConditionError(f"no whole number of {asked.text!r} gives about {asked.count} tokens with this tokenizer")
    return replace(asked, count=counts[by], separator=by)
