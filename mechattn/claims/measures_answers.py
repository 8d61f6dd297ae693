"""Measures of answers: differences of accuracy on the same problems."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import Field

from mechattn.axes import BASELINE
from mechattn.claims.measures import measure
from mechattn.claims.rules import Estimate, NotApplicable, estimated
from mechattn.evaluation.answer_units import units_of
from mechattn.evaluation.evaluation import Evaluation
from mechattn.stats.accuracy import detectable_difference, pass_at_k
from mechattn.stats.intervals import wilson_interval

Tries = Annotated[int, Field(ge=1, le=1000)]


def accuracy_range(evaluation: Evaluation, condition: str, to: str = BASELINE, k: int = 1) -> tuple[float, float]:
    """A model at 99 % cannot gain more than a point."""
    _check(evaluation, to)
    n = evaluation.samples
    level = float(pass_at_k(evaluation.right(to).sum(1), n, min(k, n)).mean())
    return -level, 1 - level


@measure("answers", "points", accuracy_range)
def accuracy_apart(evaluation: Evaluation, condition: str, to: str = BASELINE) -> Estimate:
    """Share of problems solved less that under another condition (Newcombe's interval, McNemar's test)."""
    _check(evaluation, condition, to)
    made = evaluation.compare(condition, to)
    value, low, high, detectable, p = (float(made[name]) for name in ("difference", "low", "high", "detectable", "p"))
    n, exact = int(made["n"]), p if units_of(evaluation, "auto").of is None else None
    levels = (float(evaluation.right(to).mean()), float(evaluation.right(condition).mean()))
    return Estimate(value, low, high, n, detectable, exact, levels, detectable_difference(n, 0.0))


@measure("answers", "points", accuracy_range)
def pass_apart(evaluation: Evaluation, condition: str, to: str = BASELINE, k: Tries = 3) -> Estimate:
    """pass@k less that under another condition."""
    _check(evaluation, condition, to)
    if evaluation.samples < k:
        raise NotApplicable(f"{evaluation.samples} answers to each problem were drawn, and pass@{k} takes {k} or more")
    each = [pass_at_k(evaluation.right(name).sum(1), evaluation.samples, k) for name in (condition, to)]
    values = units_of(evaluation, "auto").means(each[0] - each[1])
    alike = float(wilson_interval(0, len(values))[1])
    made = estimated(values, least=alike if np.ptp(values) == 0 else 0.0)  # no spread is no certainty
    return replace(made, levels=(float(each[1].mean()), float(each[0].mean())), floor=alike)


def _check(evaluation: Evaluation, *names: str) -> None:
    for name in names:
        if name not in evaluation.conditions:
            raise NotApplicable(f"no problem was answered under {name!r}")
