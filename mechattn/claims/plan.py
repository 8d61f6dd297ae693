"""The plan of a run: stages, numbers of prompts and times within a budget; stored so that a run can resume."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mechattn.claims.claim import Needs
from mechattn.claims.probe import Cost
from mechattn.claims.protocol import PROTOCOL
from mechattn.claims.register import CLAIMS
from mechattn.claims.settings import Settings
from mechattn.errors import OptionError, OutputError
from mechattn.results.provenance import name_of
from mechattn.results.whole import write_whole

WORDS: Mapping[Needs, str] = {
    "attention": "attention and first MLP, and the same with random weights",
    "answers": "answers: none, “/”, sentence, ARM and its control",
    "length": "answers by the number of tokens",
    "place": "answers by the place",
    "samples": "sampled answers: none, “/” and ARM",
}
_CONDITIONS = {"answers": 6, "length": len(PROTOCOL.lengths), "place": len(PROTOCOL.places), "samples": 3}
_LEAST = {"attention": 8, "answers": 20, "length": 20, "place": 20, "samples": 8}
_SAMPLED = 0.4  # of the problems


@dataclass(frozen=True)
class Stage:
    """One line of the plan.

    Args:
        model: The model.
        of: What is run.
        count: Of how many prompts or problems; 0 where it is left out.
        seconds: About how long it takes; where it is left out, how long it would at least.
    """

    model: str
    of: Needs
    count: int
    seconds: float

    @property
    def claims(self) -> list[str]:
        """The claims that it decides."""
        of = ("attention", "activations") if self.of == "attention" else (self.of,)
        return [claim.key for claim in CLAIMS if claim.needs in of]


@dataclass(frozen=True)
class Plan:
    """All stages of all models.

    Args:
        stages: In the order of their priority, model by model.
        costs: What each model costs.
        budget: Seconds, or None.
    """

    stages: tuple[Stage, ...]
    costs: Mapping[str, Cost]
    budget: float | None

    @property
    def seconds(self) -> float:
        """About how long all of it takes."""
        return sum(stage.seconds for stage in self.stages if stage.count)

    def count(self, model: str, of: Needs) -> int:
        """Of how many prompts or problems a stage is."""
        return next(stage.count for stage in self.stages if (stage.model, stage.of) == (model, of))

    def __str__(self) -> str:
        lines = ["| model | what | of | about | claims |", "|---|---|---|---|---|"]
        for stage in self.stages:
            of = str(stage.count) if stage.count else "left out"
            about = words(stage.seconds) if stage.count else f"would take {words(stage.seconds)} at least"
            lines.append(f"| {name_of(stage.model)} | {WORDS[stage.of]} | {of} | {about} | {len(stage.claims)} |")
        within = "" if self.budget is None else f", within {words(self.budget)}"
        return "\n".join([*lines, "", f"About {words(self.seconds)} in all{within}."])


def planned(settings: Settings, costs: Mapping[str, Cost]) -> Plan:
    """How much of what fits the budget, an equal share for each model.

    Stages are taken in at their least size by priority, and what is left makes all of them larger alike.

    Raises:
        OptionError: Not even the first stage of each fits.
    """
    share = None if settings.budget is None else settings.budget / len(settings.models)
    stages = [stage for name in settings.models for stage in _of_model(settings, name, costs[name], share)]
    return Plan(tuple(stages), dict(costs), settings.budget)


def _of_model(settings: Settings, model: str, cost: Cost, share: float | None) -> list[Stage]:
    problems = settings.problems
    most = {"attention": settings.limit, "answers": problems, "length": problems, "place": problems}
    most["samples"] = max(2, round(_SAMPLED * problems))
    least = {of: min(most[of], _LEAST[of]) for of in WORDS}

    def seconds(of: Needs, count: int) -> float:
        if of == "attention":
            return (cost.load + cost.prompt * count) * (1 + PROTOCOL.draws)
        return cost.answer * count * _CONDITIONS[of] * (settings.samples if of == "samples" else 1)

    if share is None:
        return [Stage(model, of, most[of], seconds(of, most[of])) for of in WORDS]
    refuse_small(settings, seconds("attention", least["attention"]), model)
    taken: list[Needs] = []
    for of in WORDS:
        if sum(seconds(one, least[one]) for one in (*taken, of)) <= share:
            taken.append(of)
    fixed, full = (sum(seconds(of, size[of]) for of in taken) for size in (least, most))
    part = 1.0 if full <= share else (share - fixed) / (full - fixed)
    count = {of: int(least[of] + part * (most[of] - least[of])) for of in taken}
    return [Stage(model, of, count.get(of, 0), seconds(of, count.get(of, least[of]))) for of in WORDS]


def refuse_small(settings: Settings, needed: float, model: str) -> None:
    """Refuse a budget of which one model's share does not hold its first stage.

    Raises:
        OptionError: What it would take.
    """
    if settings.budget is None or needed <= settings.budget / len(settings.models):
        return
    models = len(settings.models)
    shared = "" if models == 1 else f", and {models} models share it"
    raise OptionError(
        f"a budget of {words(settings.budget)} is too small: {model} needs at least {words(needed)} for "
        f"{min(settings.limit, _LEAST['attention'])} prompts, including three runs with random weights{shared}. Give "
        f"{words(needed * models)} or more"
    )


def least_passes(settings: Settings) -> int:
    """Sequences that the first stage of a model reads at least: three conditions, four times."""
    return min(settings.limit, _LEAST["attention"]) * 3 * (1 + PROTOCOL.draws)


def words(seconds: float) -> str:
    """A length of time, as one says it."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(1, round(seconds))} s"


def kept_plan(path: Path, settings: Settings) -> Plan | None:
    """The plan that an earlier call made for the same arguments; None where there is none.

    Raises:
        OutputError: It is of other arguments, or no plan.
    """
    if not path.exists():
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        costs = {name: Cost(**cost) for name, cost in stored["costs"].items()}
        plan = Plan(tuple(Stage(**stage) for stage in stored["stages"]), costs, stored["budget"])
        asked = stored["for"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise OutputError(f"{path} is not a plan ({error}); give another folder, or fresh=True (--fresh)") from None
    now = json.loads(json.dumps(settings.decides()))
    if asked != now:
        differs = ", ".join(name for name in now if asked.get(name) != now[name])
        raise OutputError(
            f"{path.parent} holds a run with other arguments ({differs} differs): give another folder, or start again "
            f"there with fresh=True (--fresh)"
        )
    return plan


def keep_plan(path: Path, settings: Settings, plan: Plan) -> None:
    """Store it, so that a killed run and every shard have the same."""
    stages: Seq[dict[str, Any]] = [asdict(stage) for stage in plan.stages]
    costs = {name: asdict(cost) for name, cost in plan.costs.items()}
    content = {"for": settings.decides(), "budget": plan.budget, "stages": stages, "costs": costs}
    write_whole(path, lambda new: new.write_text(json.dumps(content, indent=1), encoding="utf-8"))
