"""The arguments of ``ma.judge``: register, models, problems and output."""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mechattn.claims.register import Register, RunSection
from mechattn.errors import OptionError
from mechattn.prompts.datasets import GENERATED, RECALL, REPEATED, load_prompts
from mechattn.prompts.prompt import MOST, Prompt
from mechattn.prompts.repeated import LONGEST, SHORTEST, repeated_random
from mechattn.stats.intervals import FEWEST

_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_SAMPLED = 0.4  # of the problems


@dataclass(frozen=True)
class Settings:
    """The arguments of ``ma.judge``, checked."""

    register: Register
    models: tuple[str, ...]
    out: Path
    source: Mapping[str, Any] = field(default_factory=dict)  # the arguments of ``load_prompts``
    limit: int = 32
    problems: int = 100
    samples: int = 4
    new_tokens: int = 90
    without: tuple[str, ...] = ()  # runs of the register
    seed: int = 0
    dtype: str = "auto"
    device: str | None = None

    def __post_init__(self) -> None:
        if not self.models:
            raise OptionError("give at least one model")
        if len(set(self.models)) < len(self.models):
            raise OptionError(f"models={list(self.models)}: a model is given twice; give each once")
        least = {"limit": FEWEST, "problems": 2 * FEWEST, "samples": 2, "new_tokens": 1}
        for name, fewest in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not fewest <= value <= MOST:
                raise OptionError(f"{name}={value!r}: give a whole number from {fewest} to {MOST:,}")
        for name in self.without:
            if name not in self.register.runs:
                raise OptionError(f"without={name!r}: there is no such run; there is {', '.join(self.register.runs)}")

    @property
    def runs(self) -> dict[str, RunSection]:
        """What is run, in the order of the register."""
        return {name: run for name, run in self.register.runs.items() if name not in self.without}

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The problems, the same for all models.

        Raises:
            PromptError: There are none.
        """
        source = dict(self.source)
        if source.get("system") is None and source["source"] not in (GENERATED, RECALL):
            source["system"] = self.register.about.system or None
        return load_prompts(limit=max(self.limit, self.problems), seed=self.seed, **source)

    def count(self, run: RunSection) -> int:
        """Of how many prompts a run is: those that there are, where more are asked for."""
        count = self.problems if run.answers else self.limit
        count = min(count, len(self.prompts)) if run.prompts == "problems" else count
        return max(2, round(_SAMPLED * count)) if run.sampled else count

    def prompts_of(self, run: RunSection, model: Any) -> list[Prompt]:
        """The prompts of a run: the first problems, or those that the register generates."""
        if run.prompts == "problems":
            return self.prompts[: self.count(run)]
        if run.prompts == REPEATED:  # as long as the model takes
            longest = min(LONGEST, (model.cfg.n_ctx - 1) // 2)
            return repeated_random(model, self.count(run), span=(min(SHORTEST, longest // 2), longest), seed=self.seed)
        return load_prompts(run.prompts, limit=self.count(run), seed=self.seed, model=model)

    def decides(self) -> dict[str, Any]:
        """What decides the numbers, beside the model: a folder holds the run of one such set."""
        names = ("limit", "problems", "samples", "new_tokens", "seed", "dtype")
        about = {"models": list(self.models), **{name: getattr(self, name) for name in names}}
        return {**about, **self.source, "without": list(self.without), "register": self.register.digest}


def seconds(budget: str | float | None) -> float | None:
    """A budget in seconds: "30min", "2h", "90s", a number of seconds, or None.

    Raises:
        OptionError: It is no length of time.
    """
    if budget is None:
        return None
    if isinstance(budget, (int, float)) and not isinstance(budget, bool):
        found, unit = float(budget), 1
    else:
        read = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h|d)\s*", str(budget))
        if not read:
            raise OptionError(f'budget={budget!r}: give a length of time such as "30min", "2h" or "90s"')
        found, unit = float(read[1]), _SECONDS[read[2]]
    if not 0 < found < float("inf"):
        raise OptionError(f"budget={budget!r}: give a time above 0")
    return found * unit


def named(models: Seq[str] | str | None) -> tuple[str, ...]:
    """The models that are asked for; the toys where none is."""
    from mechattn.model.toys import toy_names

    if models is None or not models:
        return tuple(sorted(toy_names(), key=lambda name: name != "toy:llama"))
    return (models,) if isinstance(models, str) else tuple(map(str, models))
