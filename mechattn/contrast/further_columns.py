"""Columns that options add to a table of heads: a comparison with the same run on random weights,
and a test of whether changes are within a margin.
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
        random: The value that the user gave.
        contrast: The question about the trained model.

    Raises:
        OptionError: The results cannot be used; the error says why and what to do.
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

    # Weights without a stored hash count as different.
    hashes = [run.provenance["model"].get("weights_hash") for run in (contrast.result, *random)]
    stored_hashes = [weights_hash for weights_hash in hashes if weights_hash is not None]
    if len(set(stored_hashes)) < len(stored_hashes):
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
    """The table with the columns null_random, random_low, random_high, p_random and q_random.

    ``p_random`` ranks a head's mean difference among those of random heads
    (:func:`mechattn.stats.random_effects.against_draws`). ``q_random`` is Benjamini-Hochberg over
    the larger of ``p_random`` and the p that the table tests, of all heads.

    Args:
        table: A table of some or all cells, in any order.
        random: The results of random models.
        contrast: The question that the table answers.
        units: The units of all prompts.
        unit_indices: The units that the table reports.
    """
    # The mean differences in the model and in each random model. Nulls are not used here, and the
    # uniform one is never refused.
    means, rounding = _mean_differences(contrast, units, unit_indices)
    draws = []
    for draw in random:
        draw_contrast = replace(contrast, result=draw, scale=table.attrs["scale"], null="uniform")
        draw_means, _ = _mean_differences(draw_contrast, units, unit_indices)
        draws.append(draw_means.reindex_like(means).values)

    head_axis = None
    if "head" in means.dims:
        head_axis = means.dims.index("head")
    comparison = against_draws(
        means.values, np.stack(draws), head_axis, table.attrs["level"], rounding.values
    )

    columns = pd.DataFrame(
        {
            "null_random": comparison.mean.ravel(),
            "random_low": comparison.low.ravel(),
            "random_high": comparison.high.ravel(),
            "p_random": comparison.p.ravel(),
        },
        index=means.to_series().index,
    )
    extended_table = table.join(columns, on=list(means.dims))

    # Both tests must reject. p is 1 in cells that the selecting half of the prompts left out.
    p_of_units = table[f"p_{table.attrs['tested']}"]
    p_of_rows = np.maximum(p_of_units, extended_table.p_random)
    unselected_count = columns.p_random.count() - extended_table.p_random.count()
    p_of_cells = np.append(p_of_rows, np.ones(unselected_count))
    extended_table["q_random"] = false_discovery(p_of_cells)[: len(table)]

    kinds = {draw.provenance["model"]["random_weights"]["kind"] for draw in random}
    kind_words = " and ".join(sorted(kinds))
    tests = int(np.isfinite(p_of_cells).sum())
    extended_table.attrs = table.attrs | {
        "null_random": (
            f"random weights ({kind_words}): {len(random)} draws,"
            f" {comparison.compared} heads compared"
        ),
        "smallest_p_random": 1 / (comparison.compared + 1),
        "tests_random": tests,
        "resolution_random": random_words(len(random), tests, comparison.compared),
    }
    return extended_table


# Within a margin.


def with_equivalence(table: pd.DataFrame, margin: float) -> pd.DataFrame:
    """The table with the column q_same, the q of two one-sided t tests that the tested difference
    lies within ± margin.

    ``p = max(P(T > (difference + bound) / error), P(T < (difference − bound) / error))`` with n − 1
    degrees of freedom. The bounds of a log-ratio are ``±log(1 + margin)``, so that a change and its
    reverse count alike, as is usual for ratios: 5 % allows −4.8 % to +5 %.

    Raises:
        OptionError: The margin is not a positive number.

    Source: Schuirmann 1987.
    """
    check_margin(margin)
    bound = margin
    if table.attrs["scale"] == "log-ratio":
        bound = np.log1p(margin)

    # The standard error, from the t interval.
    tested_column = table.attrs["tested"]
    low = table[f"{tested_column}_low"]
    high = table[f"{tested_column}_high"]
    freedom = table.n - 1
    error = (high - low) / 2 / t_quantile(table.attrs["level"], freedom)

    # One test at each end; both must reject.
    difference = table[tested_column]
    p_above_lower_bound = stats.t.sf((difference + bound) / error, freedom)
    p_below_upper_bound = stats.t.cdf((difference - bound) / error, freedom)
    p_of_both = np.maximum(p_above_lower_bound, p_below_upper_bound)
    p_without_error = np.where(abs(difference) < bound, 0.0, 1.0)
    p = np.where(error > 0, p_of_both, p_without_error)
    extended_table = table.assign(q_same=false_discovery(p))
    extended_table.attrs = table.attrs | {"margin": margin}
    return extended_table


def check_margin(margin: Any) -> None:
    """Refuse a margin that is not a positive number."""
    is_number = isinstance(margin, (int, float)) and not isinstance(margin, bool)
    if not is_number or not 0 < margin < np.inf:
        raise OptionError(
            f"margin={margin!r}: give the largest change that counts as none, such as 0.02 (2 %)"
        )


def _difference_of_runs(draw: Result, result: Result, conditions: Sequence[str]) -> str | None:
    """How the run of a random model differs from that of the result, in words that follow its
    name; None if it does not differ.
    """
    model = draw.provenance["model"]
    if model.get("random_weights") is None:
        return f"comes from {model['name']}, whose weights are not random"
    for detail in ("architecture", "layers", "heads", "parameters"):
        if model.get(detail) != result.provenance["model"].get(detail):
            return f"comes from a model with different {detail}"
    if draw.provenance["prompts"]["hash"] != result.provenance["prompts"]["hash"]:
        return "has different prompts"

    for name in conditions:
        if name not in draw.conditions:
            return f"has no condition {name!r}"
        if stored_condition(draw, name) != stored_condition(result, name):
            return f"has a different condition named {name!r}"
        if _tokens(draw, name) != _tokens(result, name):
            return f"read different tokens with {name!r}, so its seed or tokenizer differs"
    return None


def _mean_differences(
    contrast: Question, units: Units, unit_indices: np.ndarray
) -> tuple[xr.DataArray, xr.DataArray]:
    """The mean difference of each cell over some units, and the largest one that counts as 0
    [*cells].
    """
    means = []
    rounding = []
    for block in layers_of(contrast):
        unit_differences = units.means(block.difference.values)[unit_indices]
        mean = block.difference[0].copy(data=unit_differences.mean(0))
        means.append(mean)
        rounding.append(mean.copy(data=block.rounding(units, unit_indices)))
    if len(means) == 1:  # a quantity without layers cannot be concatenated along them
        return means[0], rounding[0]
    return xr.concat(means, "layer"), xr.concat(rounding, "layer")


def _tokens(result: Result, condition: str) -> list[list[int]]:
    """The tokens of each prompt.

    They are without padding, which depends on the other conditions of a run.
    """
    rows = result["sequences"].tokens.sel(condition=condition).values
    return [row[row != PADDING].tolist() for row in rows]
