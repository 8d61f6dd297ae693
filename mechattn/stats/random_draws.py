"""Compares a model's heads with those of several models with random weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

from mechattn.errors import OptionError

FEWEST_DRAWS = 3  # each is left out in turn, and two more give a spread between models


@dataclass(frozen=True)
class AgainstDraws:
    """The comparison of each cell with random models, as arrays in the shape of the cells.

    Args:
        mean: The mean over the heads of the same layer in all draws.
        low: Lower end of the prediction interval for a head of another draw.
        high: Upper end.
        p: Two-sided p, from the rank of the cell among heads of random models; NaN if there is nothing to compare with.
        compared: The number of heads of random models; ``1 / (compared + 1)`` is the smallest p.
    """

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    p: np.ndarray
    compared: int


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
    return AgainstDraws(mean, mean - half, mean + half, np.where(np.isfinite(z), p, np.nan), len(random))


def false_discovery(p: np.ndarray) -> np.ndarray:
    """Benjamini-Hochberg over all p that are not NaN."""
    q, known = np.full(p.shape, np.nan), ~np.isnan(p)
    if known.any():
        q[known] = stats.false_discovery_control(p[known])
    return q


def _z(values: np.ndarray, draws: np.ndarray, over: tuple[int, ...], rounding: np.ndarray) -> np.ndarray:
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
