"""The arguments of ``ma.paper``: models, problems, time limit and output."""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mechattn.claims.register import VERSION, digest
from mechattn.errors import OptionError
from mechattn.stats.intervals import FEWEST

_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class Settings:
    """The arguments of ``ma.paper``, checked.

    Args:
        models: Names or directories.
        out: The folder.
        prompts: Where prompts come from.
        field: Of a file or data set.
        limit: Prompts whose attention is measured, at most.
        problems: Problems that are answered, at most; the first of them several times.
        samples: Sampled answers to each of a part of them.
        new_tokens: Of an answer.
        budget: Seconds, or None for as long as it takes.
        seed: Of all draws.
        dtype: Of the weights.
        device: Of torch.
    """

    models: tuple[str, ...]
    out: Path
    prompts: str = "word-problems"
    field: str = "question"
    limit: int = 32
    problems: int = 100
    samples: int = 4
    new_tokens: int = 90
    budget: float | None = None
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
            if isinstance(value, bool) or not isinstance(value, int) or value < fewest:
                raise OptionError(f"{name}={value!r}: give a whole number, at least {fewest}")

    def decides(self) -> dict[str, Any]:
        """What decides how much is run of what: a plan that was made for the same is gone on with."""
        names = ("prompts", "field", "limit", "problems", "samples", "new_tokens", "budget", "seed", "dtype")
        about = {name: getattr(self, name) for name in names}
        return {"models": list(self.models), **about, "register": VERSION, "digest": digest()}


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
