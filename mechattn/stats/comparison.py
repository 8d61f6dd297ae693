"""Paired comparison of a positive quantity between two conditions, relative to the uniform null."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mechattn.stats.intervals import Interval, t_interval
from mechattn.stats.units import Units

Block = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # values and baseline, then both under the null


@dataclass(frozen=True)
class Verdict:
    """The change of a quantity between two conditions, over prompts and over all layers and heads.

    ``change`` and ``null`` are relative changes (−0.2 is a fifth less); the null is the change of a head with uniform
    attention. ``beyond`` marks the heads whose change is below the null's, ``above`` those above it (q < 0.05, by
    Benjamini-Hochberg). ``n`` counts the units named by ``unit``: prompts, or groups of prompts.
    """

    change: Interval
    null: Interval
    beyond: np.ndarray
    above: np.ndarray
    n: int
    unit: str = "prompts"

    def __repr__(self) -> str:
        """The changes and counts of heads, without the mask of each head."""
        change, null = (", ".join(f"{100 * float(end):.1f}" for end in of) for of in (self.change, self.null))
        return (
            f"Verdict(change and ends of its interval: {change} %; under uniform attention: {null} %; "
            f"{int(self.beyond.sum())} of {self.beyond.size} heads beyond the null, {int(self.above.sum())} above; "
            f"{self.n} {self.unit})"
        )


def relative_change(values: np.ndarray, baseline: np.ndarray, units: Units | None = None) -> Interval:
    """Geometric-mean relative change over prompts (first axis) with a 95 % t interval of the log-ratio.

    ``exp(mean log(value / baseline)) − 1``; if units are groups, the mean over groups of each group's mean.
    """
    ratio = np.log(values / baseline)
    return Interval(*(np.expm1(end) for end in t_interval(ratio if units is None else units.means(ratio))))
