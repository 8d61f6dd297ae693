"""Paired comparison of a positive quantity between two conditions, relative to the uniform null."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from scipy import stats

from mechattn.errors import OptionError
from mechattn.stats.bags import Bags
from mechattn.stats.intervals import Interval, t_interval
from mechattn.stats.paired import RESAMPLES, drawn_signs, enough, flipped, without_rounding
from mechattn.stats.units import Units

Block = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # values and baseline, then both under the null


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


def against_null(
    values: np.ndarray,
    baseline: np.ndarray,
    null_values: np.ndarray,
    null_baseline: np.ndarray,
    q: float = 0.05,
    units: Units | None = None,
) -> Verdict:
    """Compare ``values`` with ``baseline`` [prompt, layer, head], and the change with that under uniform attention.

    Each head gets the sign-flip test of ``compare``, applied to the log-ratio minus the null's log-ratio; q-values are
    over all heads. The overall change is that of each prompt's mean over layers and heads. ``units`` are prompts or
    groups of prompts; with groups, everything uses the groups' means.
    """
    means = [
        np.asarray(part.sum(axis=(1, 2)) / part[0].size) for part in (values, baseline, null_values, null_baseline)
    ]
    units = units or Units(len(values))
    return against_null_in_blocks([(values, baseline, null_values, null_baseline)], means, units, q)


def against_null_in_blocks(
    blocks: Iterable[Block], means: Seq[np.ndarray], units: Units, q: float = 0.05, seed: int = 0
) -> Verdict:
    """As :func:`against_null`, for blocks of layers; ``means`` over layers and heads [prompt], one for each array."""
    bags = Bags.drawn(units.n, seed)
    dtype = np.float64 if bags is None else np.float32
    differences, tested = [], []
    for values, baseline, null_values, null_baseline in blocks:
        ratio = without_rounding(units.means(np.log(values / baseline) - np.log(null_values / null_baseline)))
        if not np.isfinite(ratio).all():
            raise OptionError(
                "a log-ratio is not finite: the quantity is zero or missing in some prompt, layer and head"
            )
        differences.append(ratio.mean(axis=0))
        each = ratio.reshape(len(ratio), -1)
        tested.append(each if bags is None else bags.means(each))
    difference, all_of = np.concatenate(differences), np.concatenate(tested, axis=1)
    signs = drawn_signs(len(all_of), enough(RESAMPLES, difference.size), np.random.default_rng(seed))
    p = flipped(all_of, signs, dtype)
    significant = (stats.false_discovery_control(p) < q).reshape(difference.shape)
    return Verdict(
        change=relative_change(means[0], means[1], units),
        null=relative_change(means[2], means[3], units),
        beyond=significant & (difference < 0),
        above=significant & (difference > 0),
        n=units.n,
        unit=units.unit,
    )
