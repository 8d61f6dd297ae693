"""Compares a model's heads with those of several models with random weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

from mechattn.errors import OptionError

FEWEST_DRAWS = 3  # each is left out in turn, and two more give a spread between models


@dataclass(frozen=True)
class AgainstDraws:
    """One number a cell, of the shape of what was found.

    Args:
        mean: Over the heads of the same layer in all draws.
        low: Lower end of where a head of one more draw would lie.
        high: Upper end.
        p: Two-sided rank of the cell among heads of random models; NaN where there is nothing to compare.
        compared: How many heads of random models there are; ``1 / (compared + 1)`` is the smallest p.
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
    """Whether a model's heads could be those of one more random model.

    ``z = |found − mean| / s`` with mean and standard deviation over the heads of the layer in all draws;
    ``p = (1 + #{z of random heads ≥ z}) / (1 + random heads)``

    Each draw in turn stands for the model: its z are made with the others' mean and s, so that what differs from draw
    to draw is among what a random model does. All layers' z are ranked together.

    Args:
        found: The model's numbers [*cells].
        draws: Those of the random models [draw, *cells].
        head: Which of the cells' dimensions holds heads that can be exchanged; None where none does.
        level: Of the range from low to high; it holds the cells with p > 1 − level.
        rounding: A distance from the mean counts as 0 where it is no larger.

    Raises:
        OptionError: Fewer than 3 draws.
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
    """Benjamini-Hochberg over the p that are there."""
    q, known = np.full(p.shape, np.nan), ~np.isnan(p)
    if known.any():
        q[known] = stats.false_discovery_control(p[known])
    return q


def _z(values: np.ndarray, draws: np.ndarray, over: tuple[int, ...], rounding: np.ndarray) -> np.ndarray:
    """How many standard deviations values lie from the mean of the draws."""
    mean, s = _moments(draws, over)
    away = abs(values - mean)
    away = np.where(away <= rounding, 0.0, away)
    return away / np.maximum(s, np.maximum(rounding, np.finfo(float).tiny))


def _moments(draws: np.ndarray, over: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation over draws and heads, of the shape of the cells; NaN where fewer than 2 are there."""
    there = np.isfinite(draws)
    n = there.sum(over, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(there, draws, 0.0).sum(over, keepdims=True) / n
        s = np.sqrt((np.where(there, draws - mean, 0.0) ** 2).sum(over, keepdims=True) / (n - 1))
    shape = draws.shape[1:]
    return np.broadcast_to(mean[0], shape), np.broadcast_to(np.where(n > 1, s, np.nan)[0], shape)
