"""Prompts crossed with conditions that are both samples: the mean, and what to expect of a new one of each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import stats


class Crossed(NamedTuple):
    """Estimates for each cell.

    Args:
        mean: The mean over units and conditions.
        low: Lower end of its interval, for other units and other conditions.
        high: Upper end.
        p: Two-sided p that it is 0.
        condition_sd: The standard deviation between conditions.
        unit_sd: The standard deviation between units.
        rest_sd: The standard deviation of what remains.
        new_low: Lower end of the prediction interval for a new condition in a new unit.
        new_high: Upper end.
    """

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    p: np.ndarray
    condition_sd: np.ndarray
    unit_sd: np.ndarray
    rest_sd: np.ndarray
    new_low: np.ndarray
    new_high: np.ndarray


def crossed(d: np.ndarray, level: float = 0.95) -> Crossed:
    """Estimate ``d[unit, condition, cell] = mean + unit + condition + rest``, with random units and conditions.

    Variances by analysis of variance (as REML gives them where none is 0), ``var(mean) = σ²_unit / units +
    σ²_condition / conditions + σ²_rest / (units · conditions)``, degrees of freedom by Satterthwaite.

    Source:
        Clark 1973 (the language-as-fixed-effect fallacy); Satterthwaite 1946.
    """
    units, conditions = d.shape[:2]
    mean = d.mean((0, 1))
    of_unit, of_condition = d.mean(1) - mean, d.mean(0) - mean
    rest = d - mean - of_unit[:, None] - of_condition[None]
    freedom = units - 1, conditions - 1, (units - 1) * (conditions - 1)
    squares = conditions * (of_unit**2).sum(0), units * (of_condition**2).sum(0), (rest**2).sum((0, 1))
    ms_unit, ms_condition, ms_rest = (square / df for square, df in zip(squares, freedom, strict=True))
    unit = np.maximum(0.0, (ms_unit - ms_rest) / conditions)
    condition = np.maximum(0.0, (ms_condition - ms_rest) / units)
    variance = unit / units + condition / conditions + ms_rest / (units * conditions)
    doubt = ms_unit**2 / freedom[0] + ms_condition**2 / freedom[1] + ms_rest**2 / freedom[2]
    with np.errstate(invalid="ignore", divide="ignore"):
        df = np.clip((variance * units * conditions) ** 2 / doubt, 1, freedom[2])
        p = 2 * stats.t.sf(abs(mean) / np.sqrt(variance), df)
    half = stats.t.ppf((1 + level) / 2, np.nan_to_num(df, nan=1.0)) * np.sqrt(variance)
    expected = variance + unit + condition + ms_rest  # of a new condition in a new unit
    both = units * conditions
    parts = (
        (units + 1) / both * (ms_rest + conditions * unit),
        (conditions + 1) / both * (ms_rest + units * condition),
        (both - units - conditions - 1) / both * ms_rest,
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        new_df = expected**2 / sum(part**2 / df for part, df in zip(parts, freedom, strict=True))
    new = stats.t.ppf((1 + level) / 2, np.nan_to_num(new_df, nan=1.0)) * np.sqrt(expected)
    p = np.where(variance > 0, p, np.where(mean == 0, 1.0, 0.0))
    return Crossed(
        mean, mean - half, mean + half, p, np.sqrt(condition), np.sqrt(unit), np.sqrt(ms_rest), mean - new, mean + new
    )
