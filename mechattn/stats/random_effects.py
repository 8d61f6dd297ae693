"""Conditions, prompts and models as random samples: crossed means, and heads beside those of random models."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import stats

from mechattn.errors import OptionError

FEWEST_DRAWS = 3  # each is left out in turn, and two more give a spread between models


class Crossed(NamedTuple):
    """Estimates for each cell of prompts crossed with conditions."""

    mean: np.ndarray
    low: np.ndarray  # the interval for other units and other conditions
    high: np.ndarray
    p: np.ndarray  # two-sided, that the mean is 0
    condition_sd: np.ndarray  # between conditions
    unit_sd: np.ndarray
    rest_sd: np.ndarray  # what remains
    new_low: np.ndarray  # the prediction interval for a new condition in a new unit
    new_high: np.ndarray


def crossed(d: np.ndarray, level: float = 0.95) -> Crossed:
    """Estimate ``d[unit, condition, cell] = mean + unit + condition + rest``, with random units and conditions.

    Variances by analysis of variance (as REML gives them where none is 0), ``var(mean) = σ²_unit / units +
    σ²_condition / conditions + σ²_rest / (units · conditions)``, degrees of freedom by Satterthwaite.

    Source: Clark 1973 (the language-as-fixed-effect fallacy); Satterthwaite 1946.
    """
    units, conditions = d.shape[:2]
    mean = d.mean((0, 1))
    of_unit, of_condition = d.mean(1) - mean, d.mean(0) - mean
    rest = d - mean - of_unit[:, None] - of_condition[None]
    freedom = units - 1, conditions - 1, (units - 1) * (conditions - 1)
    squares = (
        conditions * (of_unit**2).sum(0),
        units * (of_condition**2).sum(0),
        (rest**2).sum((0, 1)),
    )
    ms_unit, ms_condition, ms_rest = (
        square / df for square, df in zip(squares, freedom, strict=True)
    )
    unit = np.maximum(0.0, (ms_unit - ms_rest) / conditions)
    condition = np.maximum(0.0, (ms_condition - ms_rest) / units)
    variance = unit / units + condition / conditions + ms_rest / (units * conditions)
    doubt = ms_unit**2 / freedom[0] + ms_condition**2 / freedom[1] + ms_rest**2 / freedom[2]
    expected = variance + unit + condition + ms_rest  # of a new condition in a new unit
    both = units * conditions
    parts = (
        (units + 1) / both * (ms_rest + conditions * unit),
        (conditions + 1) / both * (ms_rest + units * condition),
        (both - units - conditions - 1) / both * ms_rest,
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        df = np.clip((variance * both) ** 2 / doubt, 1, freedom[2])
        p = 2 * stats.t.sf(abs(mean) / np.sqrt(variance), df)
        new_df = expected**2 / sum(part**2 / df for part, df in zip(parts, freedom, strict=True))
    half = stats.t.ppf((1 + level) / 2, np.nan_to_num(df, nan=1.0)) * np.sqrt(variance)
    new = stats.t.ppf((1 + level) / 2, np.nan_to_num(new_df, nan=1.0)) * np.sqrt(expected)
    p = np.where(variance > 0, p, np.where(mean == 0, 1.0, 0.0))
    return Crossed(
        mean,
        mean - half,
        mean + half,
        p,
        np.sqrt(condition),
        np.sqrt(unit),
        np.sqrt(ms_rest),
        mean - new,
        mean + new,
    )


class AgainstDraws(NamedTuple):
    """The comparison of each cell with random models, as arrays in the shape of the cells."""

    mean: np.ndarray  # over the heads of the same layer in all draws
    low: np.ndarray  # the prediction interval for a head of another draw
    high: np.ndarray
    p: np.ndarray  # two-sided, by the rank among heads of random models; NaN if there is nothing to compare with
    compared: int  # heads of random models; ``1 / (compared + 1)`` is the smallest p


def against_draws(
    found: np.ndarray,
    draws: np.ndarray,
    head: int | None,
    level: float = 0.95,
    rounding: np.ndarray | float = 0.0,
) -> AgainstDraws:
    """Test whether a model's heads could come from another random model.

    ``z = |found − mean| / s`` with mean and standard deviation over the heads of the layer in all draws;
    ``p = (1 + #{z of random heads ≥ z}) / (1 + random heads)``

    Each draw in turn stands in for the model: its z use the mean and s of the other draws, so they include the
    variation between draws. The z of all layers are ranked together.
    """
    if len(draws) < FEWEST_DRAWS:
        raise OptionError(f"there are {len(draws)} random models; give at least {FEWEST_DRAWS}")
    over = (0,) if head is None else (0, head + 1)
    rounding = np.broadcast_to(rounding, found.shape)
    others = [_z(draws[i], np.delete(draws, i, axis=0), over, rounding) for i in range(len(draws))]
    random = np.sort(np.concatenate([z[np.isfinite(z)] for z in others]))
    mean, s = _moments(draws, over)
    z = _z(found, draws, over, rounding)
    p = (1 + len(random) - np.searchsorted(random, z * (1 - 1e-12))) / (1 + len(random))
    rank = int(np.ceil(level * (len(random) + 1) - 1e-9))
    far = random[rank - 1] if 0 < rank <= len(random) else np.inf
    with np.errstate(invalid="ignore"):
        half = np.maximum(far * s, rounding)
    return AgainstDraws(
        mean, mean - half, mean + half, np.where(np.isfinite(z), p, np.nan), len(random)
    )


def _z(
    values: np.ndarray, draws: np.ndarray, over: tuple[int, ...], rounding: np.ndarray
) -> np.ndarray:
    """The distance of values from the mean of the draws, in standard deviations."""
    mean, s = _moments(draws, over)
    away = abs(values - mean)
    away = np.where(away <= rounding, 0.0, away)
    return away / np.maximum(s, np.maximum(rounding, np.finfo(float).tiny))


def _moments(draws: np.ndarray, over: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The mean and standard deviation over draws and heads, in the shape of the cells; NaN with fewer than 2 values."""
    there = np.isfinite(draws)
    n = there.sum(over, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(there, draws, 0.0).sum(over, keepdims=True) / n
        s = np.sqrt((np.where(there, draws - mean, 0.0) ** 2).sum(over, keepdims=True) / (n - 1))
    shape = draws.shape[1:]
    return np.broadcast_to(mean[0], shape), np.broadcast_to(np.where(n > 1, s, np.nan)[0], shape)
