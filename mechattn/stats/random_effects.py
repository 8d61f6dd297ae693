"""Random conditions, prompts and models: crossed means, and heads beside random ones."""

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
    """Estimate ``d[unit, condition, cell] = mean + unit + condition + rest``, with random units and
    conditions.

    Variances by analysis of variance (as REML gives them where none is 0), ``var(mean) = σ²_unit /
    units + σ²_condition / conditions + σ²_rest / (units · conditions)``, degrees of freedom by
    Satterthwaite.

    Source: Clark 1973 (the language-as-fixed-effect fallacy); Satterthwaite 1946.
    """
    units, conditions = d.shape[:2]
    cells = units * conditions

    # Mean squares of the analysis of variance.
    mean = d.mean((0, 1))
    unit_effects = d.mean(1) - mean
    condition_effects = d.mean(0) - mean
    residuals = d - mean - unit_effects[:, None] - condition_effects[None]
    df_unit = units - 1
    df_condition = conditions - 1
    df_rest = df_unit * df_condition
    ms_unit = conditions * (unit_effects**2).sum(0) / df_unit
    ms_condition = units * (condition_effects**2).sum(0) / df_condition
    ms_rest = (residuals**2).sum((0, 1)) / df_rest

    unit_variance = np.maximum(0.0, (ms_unit - ms_rest) / conditions)
    condition_variance = np.maximum(0.0, (ms_condition - ms_rest) / units)
    variance = unit_variance / units + condition_variance / conditions + ms_rest / cells
    new_variance = variance + unit_variance + condition_variance + ms_rest

    # Satterthwaite's degrees of freedom: of the mean, and of a new condition in a new unit.
    doubt = ms_unit**2 / df_unit + ms_condition**2 / df_condition + ms_rest**2 / df_rest
    new_unit = (units + 1) / cells * (ms_rest + conditions * unit_variance)
    new_condition = (conditions + 1) / cells * (ms_rest + units * condition_variance)
    new_rest = (cells - units - conditions - 1) / cells * ms_rest
    new_doubt = new_unit**2 / df_unit + new_condition**2 / df_condition + new_rest**2 / df_rest
    with np.errstate(invalid="ignore", divide="ignore"):
        df = np.clip((variance * cells) ** 2 / doubt, 1, df_rest)
        new_df = new_variance**2 / new_doubt
        p = 2 * stats.t.sf(abs(mean) / np.sqrt(variance), df)

    p_without_variance = np.where(mean == 0, 1.0, 0.0)
    quantile = (1 + level) / 2
    half = stats.t.ppf(quantile, np.nan_to_num(df, nan=1.0)) * np.sqrt(variance)
    new_half = stats.t.ppf(quantile, np.nan_to_num(new_df, nan=1.0)) * np.sqrt(new_variance)
    return Crossed(
        mean=mean,
        low=mean - half,
        high=mean + half,
        p=np.where(variance > 0, p, p_without_variance),
        condition_sd=np.sqrt(condition_variance),
        unit_sd=np.sqrt(unit_variance),
        rest_sd=np.sqrt(ms_rest),
        new_low=mean - new_half,
        new_high=mean + new_half,
    )


class AgainstDraws(NamedTuple):
    """The comparison of each cell with random models, as arrays in the shape of the cells."""

    mean: np.ndarray  # over the heads of the same layer in all draws
    low: np.ndarray  # the prediction interval for a head of another draw
    high: np.ndarray
    p: np.ndarray  # two-sided, by the rank among random heads; NaN if there are none
    compared: int  # heads of random models; ``1 / (compared + 1)`` is the smallest p


def against_draws(
    found: np.ndarray,
    draws: np.ndarray,
    head: int | None,
    level: float = 0.95,
    rounding: np.ndarray | float = 0.0,
) -> AgainstDraws:
    """Test whether a model's heads could come from another random model.

    ``z = |found − mean| / s`` with mean and standard deviation over the heads of the layer in all
    draws; ``p = (1 + #{z of random heads ≥ z}) / (1 + random heads)``

    Each draw in turn stands in for the model: its z use the mean and s of the other draws, so they
    include the variation between draws. The z of all layers are ranked together.
    """
    if len(draws) < FEWEST_DRAWS:
        raise OptionError(f"there are {len(draws)} random models; give at least {FEWEST_DRAWS}")
    axes: tuple[int, ...] = (0,)
    if head is not None:
        axes = (0, head + 1)
    rounding = np.broadcast_to(rounding, found.shape)

    z_of_draws = []
    for index, draw in enumerate(draws):
        z = _z(draw, np.delete(draws, index, axis=0), axes, rounding)
        z_of_draws.append(z[np.isfinite(z)])
    random_z = np.sort(np.concatenate(z_of_draws))
    compared = len(random_z)

    z = _z(found, draws, axes, rounding)
    nearer = np.searchsorted(random_z, z * (1 - 1e-12))  # equal z count as at least as far
    p = (1 + compared - nearer) / (1 + compared)

    rank = int(np.ceil(level * (compared + 1) - 1e-9))
    far = np.inf
    if 0 < rank <= compared:
        far = random_z[rank - 1]
    mean, deviation = _moments(draws, axes)
    with np.errstate(invalid="ignore"):
        half = np.maximum(far * deviation, rounding)
    p = np.where(np.isfinite(z), p, np.nan)
    return AgainstDraws(mean, mean - half, mean + half, p, compared)


def _z(
    values: np.ndarray, draws: np.ndarray, axes: tuple[int, ...], rounding: np.ndarray
) -> np.ndarray:
    """The distance of values from the mean of the draws, in standard deviations."""
    mean, deviation = _moments(draws, axes)
    distance = abs(values - mean)
    distance = np.where(distance <= rounding, 0.0, distance)
    smallest = np.maximum(rounding, np.finfo(float).tiny)
    return distance / np.maximum(deviation, smallest)


def _moments(draws: np.ndarray, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The mean and standard deviation over draws and heads, in the shape of the cells; NaN with
    fewer than 2 values.
    """
    finite = np.isfinite(draws)
    n = finite.sum(axes, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(finite, draws, 0.0).sum(axes, keepdims=True) / n
        squares = np.where(finite, draws - mean, 0.0) ** 2
        deviation = np.sqrt(squares.sum(axes, keepdims=True) / (n - 1))
    deviation = np.where(n > 1, deviation, np.nan)
    shape = draws.shape[1:]
    return np.broadcast_to(mean[0], shape), np.broadcast_to(deviation[0], shape)
