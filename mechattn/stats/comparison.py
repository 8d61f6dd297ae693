"""Paired comparison of a positive quantity between two conditions, against the uniform null."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

from mechattn.errors import OptionError
from mechattn.stats.intervals import Interval, t_interval
from mechattn.stats.paired import RESAMPLES, enough, sign_flip, without_rounding
from mechattn.stats.units import Units


@dataclass(frozen=True)
class Verdict:
    """The change of a quantity between two conditions, over prompts and over all layers and heads.

    ``change`` and ``null`` are relative changes (−0.2 is a fifth less); the null is the change of a head with uniform
    attention. ``beyond`` marks the heads that fall further than the null (Benjamini-Hochberg, q < 0.05). ``n`` counts
    the units named by ``unit``: prompts, or groups of prompts.
    """

    change: Interval
    null: Interval
    beyond: np.ndarray
    above: np.ndarray
    n: int
    unit: str = "prompts"

    def __repr__(self) -> str:
        """The figures, and the numbers of heads in place of a mark for each."""
        change, null = (", ".join(f"{100 * float(end):.1f}" for end in of) for of in (self.change, self.null))
        return (
            f"Verdict(change and ends of its interval: {change} %; under uniform attention: {null} %; "
            f"{int(self.beyond.sum())} of {self.beyond.size} heads beyond the null, {int(self.above.sum())} above; "
            f"{self.n} {self.unit})"
        )


def relative_change(values: np.ndarray, baseline: np.ndarray, units: Units | None = None) -> Interval:
    """Geometric-mean relative change over prompts (first axis) with a 95 % t interval of the log-ratio.

    ``exp(mean log(value / baseline)) − 1``; the mean over groups of each group's mean, where units are groups.
    """
    ratio = np.log(values / baseline)
    return Interval(*(np.expm1(end) for end in t_interval(ratio if units is None else units.means(ratio))))


def against_null(
    values: np.ndarray,
    baseline: np.ndarray,
    null_values: np.ndarray,
    null_baseline: np.ndarray,
    q: float = 0.05,
    units: Units | None = None,
) -> Verdict:
    """Compare ``values`` with ``baseline``, both [prompt, layer, head], and the change with that of uniform attention.

    For each head the sign-flip test of ``compare``, of the log-ratio minus the null's log-ratio; q-values over all
    heads. The overall change is that of the mean over layers and heads of each prompt. ``units`` are the prompts, or
    the groups that they are of; then everything is of the groups' means.
    """
    units = units or Units(len(values))
    ratio = without_rounding(units.means(np.log(values / baseline) - np.log(null_values / null_baseline)))
    if not np.isfinite(ratio).all():
        raise OptionError("a log-ratio is not finite: the quantity is zero or absent in some prompt, layer and head")
    difference = ratio.mean(axis=0)
    each = ratio.reshape(len(ratio), -1)
    p = sign_flip(each, enough(RESAMPLES, each.shape[1]), np.random.default_rng(0))
    significant = (stats.false_discovery_control(p) < q).reshape(difference.shape)
    flat = (values.mean(axis=(1, 2)), baseline.mean(axis=(1, 2)))
    null = (null_values.mean(axis=(1, 2)), null_baseline.mean(axis=(1, 2)))
    return Verdict(
        change=relative_change(*flat, units),
        null=relative_change(*null, units),
        beyond=significant & (difference < 0),
        above=significant & (difference > 0),
        n=units.n,
        unit=units.unit,
    )
