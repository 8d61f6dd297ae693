"""Columns that options add to a table of heads: beside the same run on random weights, and within a
margin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from scipy import stats

from mechattn.axes import PADDING
from mechattn.contrast.differences import layers_of
from mechattn.contrast.question import Question
from mechattn.errors import OptionError
from mechattn.results.provenance import stored_condition
from mechattn.results.result import Result
from mechattn.stats.intervals import t_quantile
from mechattn.stats.paired import false_discovery
from mechattn.stats.random_effects import FEWEST_DRAWS, against_draws
from mechattn.stats.units import Units, random_words

# Beside random weights.


def check_random(random: Any, contrast: Question) -> None:
    """Refuse results that are too few, not from random models, or from a different run.

    Args:
        random: What the user gave.
        contrast: The comparison of the trained model.

    Raises:
        OptionError: With what is wrong, and how to run random models.
    """
    is_sequence = isinstance(random, (list, tuple))
    if not is_sequence or not all(isinstance(draw, Result) for draw in random):
        raise OptionError(
            "random=…: give a list of results, as ma.run_random(model, prompts, conditions) returns"
        )
    if len(random) < FEWEST_DRAWS:
        raise OptionError(
            f"random holds {len(random)} results; give at least {FEWEST_DRAWS}: run_random(…,"
            " draws=3)"
        )
    if contrast.other is not None:
        raise OptionError(
            "random=… belongs to one model; compare two conditions of one result, without other=…"
        )

    conditions = (contrast.condition, contrast.to)
    for number, draw in enumerate(random):
        difference = _difference_of_runs(draw, contrast.result, conditions)
        if difference is not None:
            raise OptionError(
                f"random[{number}] {difference}: run ma.run_random with the model, prompts,"
                " conditions, analyses and seed of the result"
            )

    # Weights without a stored hash are taken to be different, as each then has its own number.
    runs = [contrast.result, *random]
    hashes = set()
    for number, run in enumerate(runs):
        hashes.add(run.provenance["model"].get("weights_hash", number))
    if len(hashes) < len(runs):
        raise OptionError(
            "random holds the same weights twice, or those of the result; draw each with another"
            " seed, as run_random does"
        )


def with_random(
    table: pd.DataFrame,
    random: Sequence[Result],
    contrast: Question,
    units: Units,
    unit_indices: np.ndarray,
) -> pd.DataFrame:
    """Return the table with the columns null_random, random_low, random_high, p_random and
    q_random.

    ``p_random`` ranks a head's mean difference among those of random heads
    (:func:`mechattn.stats.random_effects.against_draws`); ``q_random`` is Benjamini-Hochberg over
    the larger of it and the p of the table, of all heads.

    Args:
        table: A table of some cells, in any order.
        random: The results of random models.
        contrast: The comparison.
        units: The units of all prompts.
        unit_indices: Those that the table reports.
    """
    # The mean difference of each cell in the model, and in each random one. Its null is not used;
    # the uniform one is never refused.
    means, rounding = _mean_differences(contrast, units, unit_indices)
    draws = []
    for draw in random:
        of_draw = replace(contrast, result=draw, scale=table.attrs["scale"], null="uniform")
        draw_means, _ = _mean_differences(of_draw, units, unit_indices)
        draws.append(draw_means.reindex_like(means).values)

    head_axis = None
    if "head" in means.dims:
        head_axis = means.dims.index("head")
    beside = against_draws(
        means.values, np.stack(draws), head_axis, table.attrs["level"], rounding.values
    )

    columns = pd.DataFrame(
        {
            "null_random": beside.mean.ravel(),
            "random_low": beside.low.ravel(),
            "random_high": beside.high.ravel(),
            "p_random": beside.p.ravel(),
        },
        index=means.to_series().index,
    )
    extended = table.join(columns, on=list(means.dims))

    # Of cells that the other half of the prompts did not select, p is 1.
    p_of_units = table[f"p_{table.attrs['tested']}"]
    p_of_rows = np.maximum(p_of_units, extended.p_random)
    not_selected = columns.p_random.count() - extended.p_random.count()
    p_both = np.append(p_of_rows, np.ones(not_selected))
    extended["q_random"] = false_discovery(p_both)[: len(table)]

    kinds = {draw.provenance["model"]["random_weights"]["kind"] for draw in random}
    kind_words = " and ".join(sorted(kinds))
    tests = int(np.isfinite(p_both).sum())
    extended.attrs = table.attrs | {
        "null_random": (
            f"random weights ({kind_words}): {len(random)} draws, {beside.compared} heads compared"
        ),
        "smallest_p_random": 1 / (beside.compared + 1),
        "tests_random": tests,
        "resolution_random": random_words(len(random), tests, beside.compared),
    }
    return extended


def _mean_differences(
    contrast: Question, units: Units, unit_indices: np.ndarray
) -> tuple[xr.DataArray, xr.DataArray]:
    """The mean difference of each cell over some units, and how large a one counts as none
    [*cells].
    """
    means = []
    rounding = []
    for block in layers_of(contrast):
        unit_differences = units.means(block.difference.values)[unit_indices]
        mean = block.difference[0].copy(data=unit_differences.mean(0))
        means.append(mean)
        rounding.append(mean.copy(data=block.rounding(units, unit_indices)))
    if len(means) == 1:  # so is a quantity without layers
        return means[0], rounding[0]
    return xr.concat(means, "layer"), xr.concat(rounding, "layer")


def _difference_of_runs(draw: Result, result: Result, conditions: Sequence[str]) -> str | None:
    """How the run of a random model differs from that of the result, in words that continue its
    name; None if it does not.
    """
    model = draw.provenance["model"]
    if model.get("random_weights") is None:
        return f"comes from {model['name']}, whose weights are not random"
    for detail in ("architecture", "layers", "heads", "parameters"):
        if model.get(detail) != result.provenance["model"].get(detail):
            return f"comes from a model with other {detail}"
    if draw.provenance["prompts"]["hash"] != result.provenance["prompts"]["hash"]:
        return "has other prompts"

    for name in conditions:
        if name not in draw.conditions:
            return f"has no condition {name!r}"
        if stored_condition(draw, name) != stored_condition(result, name):
            return f"has a different condition named {name!r}"
        if _tokens(draw, name) != _tokens(result, name):
            return f"read other tokens with {name!r}, so its seed or tokenizer differs"
    return None


def _tokens(result: Result, condition: str) -> list[list[int]]:
    """The tokens of each prompt, without padding, which depends on the other conditions of a
    run.
    """
    rows = result["sequences"].tokens.sel(condition=condition).values
    return [row[row != PADDING].tolist() for row in rows]


# Within a margin.


def with_equivalence(table: pd.DataFrame, margin: float) -> pd.DataFrame:
    """Add q_same: whether the tested difference d lies within ± margin, by two one-sided t tests
    (Schuirmann 1987).

    ``p = max(P(T > (d + bound) / error), P(T < (d − bound) / error))`` with n − 1 degrees of
    freedom. The bounds of a log-ratio are ``±log(1 + margin)``, so that a change and its reverse
    count alike, as is usual for ratios: 5 % allows −4.8 % to +5 %.
    """
    check_margin(margin)
    bound = margin
    if table.attrs["scale"] == "log-ratio":
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
    p_without_error = np.where(abs(difference) < bound, 0.0, 1.0)
    p = np.where(error > 0, p, p_without_error)
    with_q = table.assign(q_same=false_discovery(p))
    with_q.attrs = table.attrs | {"margin": margin}
    return with_q


def check_margin(margin: Any) -> None:
    """Refuse a margin that is not a positive number."""
    is_number = isinstance(margin, (int, float)) and not isinstance(margin, bool)
    if not is_number or not 0 < margin < np.inf:
        raise OptionError(
            f"margin={margin!r}: give the largest change that counts as none, such as 0.02 (2 %)"
        )
