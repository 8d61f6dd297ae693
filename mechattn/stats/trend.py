"""Page's test for a trend over doses within units, by ranks and permutations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

from mechattn.errors import OptionError
from mechattn.stats.intervals import FEWEST, t_interval


@dataclass(frozen=True)
class Trend:
    """The trend of values [unit, dose] over doses.

    Args:
        rho: Mean over units of Spearman's correlation between value and dose; 1 if every unit rises
            at each step.
        low: Lower end of its 95 % t interval.
        high: Upper end.
        p: Two-sided p for exchangeability of each unit's values over doses, by Page's test with
            permutations.
        n: The number of units.
        doses: The number of doses.
    """

    rho: float
    low: float
    high: float
    p: float
    n: int
    doses: int


def trend(values: np.ndarray, resamples: int = 9999, seed: int = 0) -> Trend:
    """Page's test for an ordered alternative, two-sided.

    ``L = Σ_units Σ_j j · rank_j`` increases with the mean of Spearman's ρ over units, which is
    reported. Its distribution comes from permutations of each unit's values; all permutations if
    there are few enough.

    Source: E. B. Page, "Ordered hypotheses for multiple treatments", 1963.
    """
    values = np.asarray(values, dtype=np.float64)
    large_enough = values.ndim == 2 and values.shape[1] >= 3 and len(values) >= FEWEST
    if not large_enough or not np.isfinite(values).all():
        raise OptionError(
            f"values {list(values.shape)}: a trend needs at least three doses and {FEWEST} units, "
            "and a number for each"
        )
    ranks = stats.rankdata(values, axis=1)
    doses = np.arange(1.0, values.shape[1] + 1)

    def statistic(*by_dose: np.ndarray, axis: int = -1) -> np.ndarray:
        return sum(dose * rank.sum(axis=axis) for dose, rank in zip(doses, by_dose, strict=True))

    test = stats.permutation_test(
        tuple(ranks.T),
        statistic,
        permutation_type="samples",
        n_resamples=resamples,
        vectorized=True,
        rng=np.random.default_rng(seed),
        batch=1000,
    )
    rho = _spearman(ranks, doses)
    interval = t_interval(rho[:, None])
    return Trend(
        rho=float(rho.mean()),
        low=float(np.clip(interval.low[0], -1, 1)),
        high=float(np.clip(interval.high[0], -1, 1)),
        p=float(test.pvalue),
        n=len(values),
        doses=values.shape[1],
    )


def _spearman(ranks: np.ndarray, doses: np.ndarray) -> np.ndarray:
    """Spearman's ρ of each unit; 0 if all of its values are equal."""
    rank_deviations = ranks - ranks.mean(1, keepdims=True)
    dose_deviations = doses - doses.mean()
    spread = np.sqrt((rank_deviations**2).sum(1) * (dose_deviations**2).sum())
    covariance = rank_deviations @ dose_deviations
    return np.divide(covariance, spread, out=np.zeros(len(ranks)), where=spread > 0)
