"""Random conditions, prompts and models: crossed means, and heads beside random ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import stats

from mechattn.stats.intervals import t_quantile
from mechattn.stats.paired import without_rounding

FEWEST_DRAWS = 3  # random models: each is left out in turn, and two others must remain
# The smallest divisor of a distance: no z is infinite, even if random heads do not vary at all.
_TINY = np.sqrt(np.finfo(float).tiny)


class Crossed(NamedTuple):
    """Estimates of each cell, from units crossed with conditions."""

    mean: np.ndarray
    low: np.ndarray  # the interval for other units and other conditions
    high: np.ndarray
    p: np.ndarray  # two-sided, for a mean of 0
    condition_sd: np.ndarray  # the standard deviation between conditions
    unit_sd: np.ndarray  # the standard deviation between units
    rest_sd: np.ndarray  # the standard deviation of the rest
    new_low: np.ndarray  # the prediction interval for a new condition in a new unit
    new_high: np.ndarray


def crossed(d: np.ndarray, level: float = 0.95) -> Crossed:
    """Estimate ``d[unit, condition, cell] = mean + unit + condition + rest``, with random units and
    conditions.

    The variances are those of an analysis of variance (and of REML, if none is 0):
    ``var(mean) = σ²_unit / units + σ²_condition / conditions + σ²_rest / (units · conditions)``.
    The degrees of freedom are Satterthwaite's.

    Args:
        d: One number for each prompt or group, condition and cell [unit, condition, cell].
        level: The level of the intervals.

    Returns:
        Estimates of each cell, in the unit of ``d``. If nothing varies in a cell, its intervals
        have no width, and p is 1 for a mean of 0 and otherwise 0. A cell with NaN in ``d`` has NaN.

    Source: Clark 1973 (the language-as-fixed-effect fallacy); Satterthwaite 1946.
    """
    units, conditions = d.shape[:2]
    pairs = units * conditions  # of a unit and a condition
    rest_df = (units - 1) * (conditions - 1)
    df = np.array([units - 1, conditions - 1, rest_df])[:, None]  # [source, 1]
    mean = d.mean((0, 1))

    # The variances that the mean squares imply; a negative estimate counts as 0.
    mean_squares = _mean_squares(d)
    unit_squares, condition_squares, rest_squares = mean_squares
    unit_variance = np.maximum(0.0, (unit_squares - rest_squares) / conditions)
    condition_variance = np.maximum(0.0, (condition_squares - rest_squares) / units)

    # The variance of the mean, and the prediction variance of a new condition in a new unit, which
    # is ``variance + σ²_unit + σ²_condition + σ²_rest``. The latter is a sum of multiples of the
    # three mean squares, as Satterthwaite's formula needs independent parts.
    variance = unit_variance / units + condition_variance / conditions + rest_squares / pairs
    new_from_units = (units + 1) / pairs * (rest_squares + conditions * unit_variance)
    new_from_conditions = (conditions + 1) / pairs * (rest_squares + units * condition_variance)
    new_from_rest = (pairs - units - conditions - 1) / pairs * rest_squares
    new_parts = np.stack([new_from_units, new_from_conditions, new_from_rest])
    new_variance = new_parts.sum(0)

    # Satterthwaite's degrees of freedom of both; 0 / 0 in cells that do not vary at all.
    with np.errstate(invalid="ignore", divide="ignore"):
        satterthwaite_df = (variance * pairs) ** 2 / (mean_squares**2 / df).sum(0)
        mean_df = np.clip(satterthwaite_df, 1, rest_df)
        new_df = new_variance**2 / (new_parts**2 / df).sum(0)
        p = 2 * stats.t.sf(abs(mean) / np.sqrt(variance), mean_df)
    p_without_variance = np.where(mean == 0, 1.0, 0.0)

    half_width = _half_width(variance, mean_df, level)
    new_half_width = _half_width(new_variance, new_df, level)
    return Crossed(
        mean=mean,
        low=mean - half_width,
        high=mean + half_width,
        p=np.where(variance == 0, p_without_variance, p),
        condition_sd=np.sqrt(condition_variance),
        unit_sd=np.sqrt(unit_variance),
        rest_sd=np.sqrt(rest_squares),
        new_low=mean - new_half_width,
        new_high=mean + new_half_width,
    )


class AgainstDraws(NamedTuple):
    """The comparison of each cell with random models, as arrays in the shape of the cells."""

    mean: np.ndarray  # over the heads of the same layer in all draws
    low: np.ndarray  # the prediction interval for a head of another draw
    high: np.ndarray
    p: np.ndarray  # two-sided, by the rank among random heads
    compared: int  # the number of random heads; ``1 / (compared + 1)`` is the smallest p


def against_draws(
    values: np.ndarray,
    draws: np.ndarray,
    head_axis: int | None,
    level: float = 0.95,
    rounding: np.ndarray | float = 0.0,
) -> AgainstDraws:
    """Test whether a model's heads could be those of one more random model.

    ``z = |value − mean| / s`` with the mean and the standard deviation s over the heads of the
    layer in all draws, and ``p = (1 + #{z of random heads ≥ z}) / (1 + random heads)``. The
    prediction interval is ``mean ± s · z`` with the z of rank ``⌈level · (random heads + 1)⌉``
    among random heads, from the smallest (the rank of split conformal prediction). It is infinite
    if there are fewer random heads than this rank: below 19 at a level of 0.95.

    The z of a random head uses the mean and s of the other draws, so that it includes the variation
    between draws. The random heads of all layers are ranked together.

    Args:
        values: The values of the model [*cells].
        draws: The values of at least 3 random models [draw, *cells].
        head_axis: The axis of the cells that counts heads; None if no axis does.
        level: The level of the prediction interval.
        rounding: The largest difference that counts as 0 [*cells].

    Returns:
        The comparison of each cell. p is NaN in a cell without a value, and in a layer whose random
        heads have no values.
    """
    # The heads of a layer are exchangeable in random models, so their moments are taken together.
    axes: tuple[int, ...] = (0,)
    if head_axis is not None:
        axes = (0, head_axis + 1)

    smallest_deviation = np.maximum(rounding, _TINY)

    def z_of(heads: np.ndarray, mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
        """The distance from the mean in standard deviations, which are at least ``rounding``."""
        distance = without_rounding(abs(heads - mean), rounding)
        return distance / np.maximum(deviation, smallest_deviation)

    # The z of random heads: each draw in turn stands in for the model.
    z_of_draws = []
    for index, draw in enumerate(draws):
        other_draws = np.delete(draws, index, axis=0)
        other_mean, other_deviation = _mean_and_deviation(other_draws, axes)
        z_of_draw = z_of(draw, other_mean, other_deviation)
        z_of_draws.append(z_of_draw[np.isfinite(z_of_draw)])
    random_z = np.sort(np.concatenate(z_of_draws))
    compared = len(random_z)

    # The number of random heads that are at least as far off as each head of the model.
    mean, deviation = _mean_and_deviation(draws, axes)
    z = z_of(values, mean, deviation)
    # A z that differs by rounding is as far.
    further_count = compared - np.searchsorted(random_z, z * (1 - 1e-12))
    p = np.where(np.isfinite(z), (1 + further_count) / (1 + compared), np.nan)

    rank = int(np.ceil(level * (compared + 1) - 1e-9))  # 0.95 · 20 may be just above 19
    furthest_z = np.inf
    if rank <= compared:
        furthest_z = random_z[rank - 1]
    # An infinite z times a deviation of 0 gives NaN.
    with np.errstate(invalid="ignore"):
        half_width = np.maximum(furthest_z * deviation, rounding)
    return AgainstDraws(mean, mean - half_width, mean + half_width, p, compared)


def _mean_squares(d: np.ndarray) -> np.ndarray:
    """The mean squares of units, conditions and the rest, in this order [source, cell]."""
    units, conditions = d.shape[:2]
    unit_means = d.mean(1)
    condition_means = d.mean(0)
    residuals = d - unit_means[:, None] - condition_means + d.mean((0, 1))

    unit_squares = conditions * unit_means.var(0, ddof=1)
    condition_squares = units * condition_means.var(0, ddof=1)
    rest_squares = (residuals**2).sum((0, 1)) / ((units - 1) * (conditions - 1))
    return np.stack([unit_squares, condition_squares, rest_squares])


def _half_width(variance: np.ndarray, df: np.ndarray, level: float) -> np.ndarray:
    """``t((1 + level) / 2, df) √variance``; 0 where nothing varies."""
    # The degrees of freedom are NaN where nothing varies; any number then gives 0.
    known_df = np.nan_to_num(df, nan=1.0)
    return t_quantile(level, known_df) * np.sqrt(variance)


def _mean_and_deviation(draws: np.ndarray, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The mean and standard deviation over draws and heads, in the shape of the cells.

    The mean of no values is NaN, and so is the standard deviation of fewer than two.
    """
    known_draws = np.ma.masked_invalid(draws)
    mean = known_draws.mean(axes, keepdims=True).filled(np.nan)[0]
    deviation = known_draws.std(axes, ddof=1, keepdims=True).filled(np.nan)[0]
    cells = draws.shape[1:]
    return np.broadcast_to(mean, cells), np.broadcast_to(deviation, cells)
