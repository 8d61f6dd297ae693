"""What a register is judged on: how much of what, and its conditions for one model."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from mechattn.claims.register import Arm, Register
from mechattn.errors import ConditionError, OptionError
from mechattn.jobs.kinds import made_conditions
from mechattn.prompts.conditions import Condition, MeaninglessTokens, Variant
from mechattn.prompts.fillers import nearest_count
from mechattn.prompts.prompt import MOST, Template
from mechattn.results.provenance import name_of
from mechattn.sections import Condition as ConditionSection
from mechattn.sections import InterventionSection
from mechattn.stats.intervals import FEWEST


@dataclass(frozen=True, kw_only=True)
class ClaimSettings:
    """What decides the numbers of ``ma.judge``, beside the register and the models.

    Args:
        prompts: "word-problems", a .jsonl file, or a hub dataset, with solutions.
        field: The field of a file or dataset with the question.
        answer_field: The field with the solution.
        group_field: The field with what problems share, as for ``load_prompts``.
        system: The text before each question; by default that of the register, before questions of a file or dataset.
        template: "plain" or "chat".
        limit: The number of prompts that analyses measure.
        problems: The number of problems to answer.
        samples: The number of sampled answers to each of two fifths of these problems.
        new_tokens: The longest answer, in tokens.
        without: Runs of the register to leave out, such as "samples".
        seed: The seed of all draws, those of random weights too.
        dtype: "auto", "float32", "bfloat16" or "float16".
        device: The torch device.
        command: The command line, for the record.

    Raises:
        OptionError: A number is no whole one, or too small.
    """

    prompts: str = "word-problems"
    field: str = "question"
    answer_field: str = "answer"
    group_field: str | None = None
    system: str | None = None
    template: Template = "plain"
    limit: int = 32
    problems: int = 100
    samples: int = 4
    new_tokens: int = 90
    without: Seq[str] = ()
    seed: int = 0
    dtype: str = "auto"
    device: str | None = None
    command: str = ""

    def __post_init__(self) -> None:
        least = {"limit": FEWEST, "problems": 2 * FEWEST, "samples": 2, "new_tokens": 1}
        for name, fewest in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not fewest <= value <= MOST:
                raise OptionError(f"{name}={value!r}: give a whole number from {fewest} to {MOST:,}")
        object.__setattr__(self, "without", (self.without,) if isinstance(self.without, str) else tuple(self.without))

    def decides(self) -> dict[str, Any]:
        """What decides the numbers: a folder holds the run of one such set."""
        return {name: value for name, value in asdict(self).items() if name not in ("device", "command")}


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
