"""Mediation: the share of a condition's change in accuracy that single paths produce."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from mechattn.axes import BASELINE
from mechattn.evaluation.answer_units import units_of
from mechattn.stats.paired import paired
from mechattn.stats.units import Unit

if TYPE_CHECKING:
    import pandas as pd

    from mechattn.evaluation.evaluation import Evaluation


def mediation(
    evaluation: Evaluation,
    total: str,
    through: Mapping[str, str],
    resamples: int,
    seed: int,
    level: float,
    unit: Unit,
) -> pd.DataFrame:
    """See :meth:`mechattn.evaluation.evaluation.Evaluation.mediation`, which explains the arguments."""
    import pandas as pd

    units = units_of(evaluation, unit)
    base, whole = (units.means(evaluation.right(name).mean(1)) for name in (BASELINE, total))
    draws = np.random.default_rng(seed).integers(0, len(base), (resamples, len(base)))
    all_of_it = (whole - base)[draws].mean(1)
    whole_change = paired(whole - base)
    divided = not whole_change.low <= 0 <= whole_change.high
    rows = []
    for path, name in through.items():
        part = units.means(evaluation.right(name).mean(1)) - base
        share = low = high = float("nan")
        if divided:
            share = float(part.mean() / whole_change.difference)
            drawn = part[draws].mean(1)[all_of_it != 0] / all_of_it[all_of_it != 0]
            low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
        change = paired(part)
        rows.append(
            {
                "path": path,
                "condition": name,
                "change": float(change.difference),
                "change_low": float(change.low),
                "change_high": float(change.high),
                "share": share,
                "low": float(low),
                "high": float(high),
            }
        )
    made = pd.DataFrame(rows)
    ends = {"low": float(whole_change.low), "high": float(whole_change.high)}
    made.attrs = {"total": float(whole_change.difference), **ends, "of": total, "n": len(base), "unit": units.unit}
    return made
