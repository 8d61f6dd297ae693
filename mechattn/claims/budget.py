"""Times each model before a run, where a time is given, and refuses what would take longer."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import Any

from mechattn.claims.evidence import Work
from mechattn.engine.run import run
from mechattn.errors import OptionError
from mechattn.evaluation.evaluate import evaluate
from mechattn.jobs.kinds import made_analyses

_TRIED, _ANSWERED, _WORDS = 2, 8, 16  # prompts, problems, and tokens of each answer


def check_budget(works: Seq[Work], budget: float | None) -> None:
    """Refuse a call that takes longer than a budget; how much is measured never depends on the machine.

    Raises:
        OptionError: What each run takes, and which ones would fit.
    """
    if budget is None:
        return
    costs: dict[str, float] = {}
    for work in works:
        for name in work.settings.runs:
            costs[name] = costs.get(name, 0.0) + _seconds(work, name)
        work.__dict__.pop("model", None)
        gc.collect()  # hooked models hold themselves
    total = sum(costs.values())
    if total <= budget:
        return
    within = accumulate(costs.values())
    out = [name for name, until in zip(costs, within, strict=True) if until > budget]
    each = ", ".join(f"{name} {_words(cost)}" for name, cost in costs.items())
    raise OptionError(
        f"a budget of {_words(budget)} is too small: this takes about {_words(total)} ({each}). Within it, "
        f"{', '.join(out)} would have to be left out: give without={out} (--without {','.join(out)}), fewer prompts "
        "(--limit, --problems), or more time"
    )


def _seconds(work: Work, name: str) -> float:
    """About how long a run takes; 0 where the model cannot make it."""
    settings, section = work.settings, work.settings.runs[name]
    prompts, conditions = settings.prompts_of(section, work.model), work.conditions_of(section)
    if section.answers:
        new, some = min(_WORDS, settings.new_tokens), prompts[:_ANSWERED]
        took = timed(lambda: evaluate(work.model, some, new_tokens=new, progress=False)) * settings.new_tokens / new
        return took / len(some) * len(prompts) * (1 + len(conditions)) * (settings.samples if section.sampled else 1)
    if work.missing(name):
        return 0.0
    options: dict[str, Any] = {"layers": section.layers, "positions": section.positions, "progress": False}

    def tried() -> None:
        run(work.model, prompts[:_TRIED], conditions, made_analyses(section.analyses), **options)

    first, again = timed(tried), timed(tried)  # what is done once, such as thresholds, is done once a model
    return (max(first - again, 0.0) + again / _TRIED * len(prompts)) * (1 + section.draws)


def timed(call: Callable[[], Any]) -> float:
    """Seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _words(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{max(1, round(seconds))} s"
