"""Which segments pay for the attention that inserted tokens take, and by which cause: means over
prompts, with intervals.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import xarray as xr

from mechattn.axes import BASELINE
from mechattn.contrast.means import mean_over_prompts
from mechattn.contrast.quantities import check_layer, labels_where
from mechattn.results.result import Result
from mechattn.stats.intervals import Interval

NAME = "attention_budget"
POINTS = 100  # attention is stated in points of 100
CAUSES = ("distance", "mass", "hidden states")
# In the order of a stack: the question is at the bottom, where its change is easiest to see.
PAYERS = ("question", "inserted", "system", "template", "first", "answer", "changed")


def budget_table(
    result: Result, condition: str | None = None, layer: int | None = None
) -> pd.DataFrame:
    """How much of the question's attention each segment (payer) gets, and how that changes by each
    cause, in points of 100.

    Each number is a mean over heads, layers and the queries of the question, then over prompts,
    with a 95 % t interval over prompts. A segment that a prompt does not have counts as 0 in it.

    Args:
        result: A result with ``ma.analyses.AttentionBudget()``.
        condition: The condition; by default the first one other than the baseline.
        layer: One layer; by default all.

    Returns:
        A row for each payer, with ``baseline``, ``value`` and ``change``, a column for each known
        cause, and the ends of their intervals, such as ``change_low`` and ``mass_high``. The ends
        are NaN with fewer than three prompts or groups.

    Raises:
        OptionError: The budget was not measured, or there is no such condition or layer.
    """
    dataset = result[NAME]
    condition = result.condition(condition)
    if layer is not None:
        check_layer(layer, dataset)
        dataset = dataset.sel(layer=[layer])

    in_condition = dataset.sel(condition=condition)
    columns = {
        "baseline": dataset.attention.sel(condition=BASELINE),
        "value": in_condition.attention,
        "change": in_condition.change,
    }
    for cause in known_causes(result, condition):
        columns[cause] = in_condition.by_cause.sel(cause=cause)

    shown_payers = payers(result)
    table: dict[str, object] = {"payer": shown_payers}
    for name, values in columns.items():
        payer_values = _absent_as_zero(values).sel(segment=shown_payers)
        interval = mean_over_prompts(result, payer_values, ["layer", "head"])
        table[name] = POINTS * interval.estimate
        table[f"{name}_low"] = POINTS * interval.low
        table[f"{name}_high"] = POINTS * interval.high
    return pd.DataFrame(table)


def payers_and_causes(
    result: Result, condition: str | None = None, layer: int | None = None
) -> pd.DataFrame:
    """See :meth:`mechattn.Result.attention_budget`."""
    condition = result.condition(condition)
    by_payer = budget_table(result, condition, layer)
    column_of_cause = {"all": "change"}
    for cause in known_causes(result, condition):
        column_of_cause[cause] = cause

    rows = []
    for payer_row in by_payer.to_dict("records"):
        for cause, column in column_of_cause.items():
            row = {
                "payer": payer_row["payer"],
                "cause": cause,
                "change": payer_row[column],
                "change_low": payer_row[f"{column}_low"],
                "change_high": payer_row[f"{column}_high"],
            }
            rows.append(row)

    table = pd.DataFrame(rows)
    table.attrs = {
        "condition": condition,
        "layer": "all" if layer is None else layer,
        "units": "points of 100",
        "one_cause": str(result[NAME].attrs.get("one_cause", "")),
    }
    return table


def payer_by_layer(result: Result, values: xr.DataArray, payer: str) -> Interval:
    """A payer's mean over heads and prompts in each layer, in points of 100, with 95 % t intervals
    over prompts [layer].
    """
    payer_values = _absent_as_zero(values).sel(segment=payer)
    mean, low, high = mean_over_prompts(result, payer_values, ["head"])
    return Interval(POINTS * mean, POINTS * low, POINTS * high)


def payers(result: Result) -> list[str]:
    """The segments with tokens in any prompt and condition, in the order of a stack."""
    segments = labels_where(result[NAME].attention.notnull(), "segment")
    return [name for name in PAYERS if name in segments]


def known_causes(result: Result, condition: str) -> list[str]:
    """The causes for which a condition's changes are known.

    There are none if the engine did not provide queries and keys.
    """
    by_cause = result[NAME].by_cause.sel(condition=condition, segment="question")
    known = labels_where(by_cause.notnull(), "cause")
    return [cause for cause in CAUSES if cause in known]


def busiest_layer(result: Result, condition: str) -> int:
    """The layer in which the question's attention moves most, by the sum of the payers' absolute
    mean changes.
    """
    changes = result[NAME].change.sel(condition=condition)
    amounts = [abs(payer_by_layer(result, changes, payer).estimate) for payer in payers(result)]
    total_amounts = np.sum(amounts, axis=0)
    return int(changes.layer.values[total_amounts.argmax()])


def _absent_as_zero(values: xr.DataArray) -> xr.DataArray:
    """The values, with 0 for a segment that a measured prompt does not have, so that the attention
    of all payers adds up to 1.
    """
    is_measured = values.sel(segment="question", drop=True).notnull()
    return values.fillna(0).where(is_measured)
