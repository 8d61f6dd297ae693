"""Changes beside a margin: which are too small to matter, and which are large enough to mark."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import stats

from mechattn.errors import OptionError
from mechattn.stats.intervals import t_quantile
from mechattn.stats.paired import false_discovery

LARGER_THAN = {"log-ratio": 0.05, "difference": 0.005}  # 5 %, and half a point of 100


def with_equivalence(table: pd.DataFrame, margin: float) -> pd.DataFrame:
    """Add q_same: whether the tested difference lies within ± margin, by two one-sided t tests
    (Schuirmann 1987).

    The bounds of a log-ratio are ``±log(1 + margin)``, so that a change and its reverse count
    alike, as is usual for ratios: 5 % allows −4.8 % to +5 %.
    """
    check_margin(margin)
    bound = margin
    if len(table) and table.scale.iloc[0] == "log-ratio":
        bound = np.log1p(margin)

    # The standard error, from the t interval.
    name = table.attrs["tested"]
    low = table[f"{name}_low"]
    high = table[f"{name}_high"]
    freedom = table.n - 1
    error = (high - low) / 2 / t_quantile(table.attrs["level"], freedom)

    # One test at each end; both must reject.
    difference = table[name]
    p_above_lower_bound = stats.t.sf((difference + bound) / error, freedom)
    p_below_upper_bound = stats.t.cdf((difference - bound) / error, freedom)
    p = np.maximum(p_above_lower_bound, p_below_upper_bound)
    without_error = np.where(abs(difference) < bound, 0.0, 1.0)
    p = np.where(error > 0, p, without_error)
    with_q = table.assign(q_same=false_discovery(p))
    with_q.attrs = table.attrs | {"margin": margin}
    return with_q


def marked(table: pd.DataFrame, margin: float | None = None) -> np.ndarray:
    """Which rows of a table change by more than a margin, and not by chance: what a map of heads
    marks.

    With hundreds of heads and tens of prompts even a change of 0.5 % passes q < 0.05, so
    significance alone marks all.

    Args:
        table: A table from ``Result.compare``.
        margin: The largest change that is not worth a mark, in the unit of ``change`` (0.05 is 5
            %), or of ``difference`` for a quantity that is compared by differences. By default
            0.05, or 0.005: half a point of 100 of the attention.

    Returns:
        A mask of rows: ``q_difference < 0.05`` and ``|change| > margin``.

    Raises:
        OptionError: The margin is not a positive number.
    """
    effect = "difference"
    scale = "difference"
    if "change" in table:
        effect = "change"
        scale = "log-ratio"
    if margin is None:
        margin = LARGER_THAN[scale]
    check_margin(margin)
    is_large = table[effect].abs() > margin
    return np.asarray(is_large & (table.q_difference < 0.05))


def check_margin(margin: object) -> None:
    """Refuse a margin that is not a positive number."""
    if not isinstance(margin, (int, float)) or not 0 < margin < np.inf:
        raise OptionError(
            f"margin={margin!r}: give the largest change that counts as none, such as 0.02 (2 %)"
        )
