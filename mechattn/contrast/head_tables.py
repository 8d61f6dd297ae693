"""Tables of heads: those with the largest values of a quantity, and the kind of sink of each."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pandas as pd
import xarray as xr
from scipy import stats

from mechattn.axes import BASELINE
from mechattn.contrast import quantities
from mechattn.errors import OptionError, check_choice, check_counts
from mechattn.results.result import Result, by_head, part_of, units_of
from mechattn.stats.intervals import FEWEST, shrunken, t_interval
from mechattn.stats.units import Unit, Units, halves_of

# The quantities of AttentionSinks on which the kind of a sink depends.
_SINK_QUANTITIES = [
    "sinks",
    "strongest_position",
    "strongest_value_ratio",
    "output_rank",
    "massive_count",
    "massive_position",
]


def ranked_heads(
    result: Result,
    quantity: str | None,
    top: int | None,
    *,
    condition: str,
    segment: str,
    select: Literal["half"] | None,
    unit: Unit,
    level: float,
) -> pd.DataFrame:
    """See :meth:`mechattn.results.result.Result.heads`, which explains the arguments."""
    if top is not None:
        check_counts(top=top)
    check_choice(("half", None), select=select)
    if quantity is None:
        names = quantities.head_quantities(result)
        if not names:
            raise OptionError("this result has no quantity with one number for each head")
        quantity = names[0]
    units = units_of(result, unit)

    # Heads are ranked on one half of the units and reported on the other, or all on all units.
    if select is None:
        units.refuse_below(FEWEST)
        ranking_units = np.arange(units.n)
        reported_units = np.arange(units.n)
    else:
        units.refuse_below(2 * FEWEST)
        ranking_units, reported_units = halves_of(units.n)

    blocks = []
    for layers in quantities.layer_blocks(result, quantity, segment):
        block_result = part_of(result, "layer", layers)
        values, null = quantities.values_of(block_result, condition, quantity, segment)
        quantities.check_one_number(values, quantity)
        quantities.check_present(values, quantity, segment, (result, condition))
        block = _head_means(values, null, quantity, units, reported_units, level)
        block["ranked_by"] = _unit_values(values, units)[ranking_units].mean(0)
        blocks.append(block)
    table = pd.concat(blocks, ignore_index=True)
    if table.ranked_by.isna().all():
        raise quantities.absent_error(units.prompts, quantity, segment, (result, condition))

    if select is None:  # heads that are ranked on other units need no correction
        shrunken_means = shrunken(table[quantity].to_numpy(), table.error.to_numpy())
        after_mean = table.columns.get_loc(quantity) + 1
        table.insert(after_mean, "shrunken", shrunken_means)
    largest_first = table.sort_values("ranked_by", ascending=False, kind="stable")
    top_rows = largest_first.dropna(subset="ranked_by")[:top].reset_index(drop=True)
    ranked = by_head(top_rows.drop(columns=["error", "ranked_by"]))
    has_null = bool(table.uniform.notna().any())
    ranked.attrs = {
        "condition": condition,
        "segment": segment,
        "of": len(table),
        "ranked": _ranked_words(select, has_null),
        "unit": units.unit,
        "level": level,
    }
    return ranked


def sink_kinds(
    result: Result,
    condition: str = BASELINE,
    *,
    value_below: float = 0.3,
    rank_below: float = 2.0,
    rate_above: float = 0.5,
) -> pd.DataFrame:
    """Classify the sink of each head, from a run with ``ma.analyses.AttentionSinks()``.

    A head has a sink if some key's mean attention is above the analysis's threshold in more than
    ``rate_above`` of the prompts. Its kind is the first of these that applies:

    - "no sink": it has no sink.
    - "nop": the value vector of its strongest key is small, ``‖v_sink‖ / mean ‖v‖ < value_below``,
      so that attending there adds little.
    - "broadcast": its output has a low effective rank (exp of the entropy of the shares of its
      singular values), ``rank < rank_below``, so that it adds much the same to every token.
    - "neither": none of these.

    The thresholds are conventions: also look at the number of heads of each kind under other ones.

    Args:
        result: A run with ``AttentionSinks``.
        condition: The condition.
        value_below: The threshold of the ratio of norms.
        rank_below: The threshold of the effective rank, at least 1.
        rate_above: The threshold of the share of prompts.

    Returns:
        A row for each head: layer, head; ``sink_rate``, the share of prompts with a sink;
        ``position``, the most common position of the strongest key (−1 if no prompt has a sink);
        ``value_ratio`` and ``output_rank``, medians over the prompts with a sink;
        ``massive_overlap``, the share of the prompts with a sink and a massive activation in which
        the strongest key is at the position of the layer's largest one (NaN if there are no such
        prompts); and ``kind``.

    Source: The two kinds are those of arXiv:2606.08105 (known from its abstract only; the
    thresholds are ours).

    Raises:
        OptionError: The run had no ``AttentionSinks``, there is no such condition, or a threshold
            is out of range.
    """
    thresholds = {"value_below": value_below, "rank_below": rank_below, "rate_above": rate_above}
    if not (value_below >= 0 and rank_below >= 1 and 0 <= rate_above <= 1):
        raise OptionError(
            f"thresholds={thresholds}: give value_below from 0, rank_below from 1, and rate_above"
            " from 0 to 1"
        )
    if "attention_sinks" not in result.datasets:
        raise OptionError(
            "this run did not measure sinks: add ma.analyses.AttentionSinks() to its analyses"
        )
    quantities.check_condition(result, condition)

    # A row for each layer, head and prompt.
    dataset = result["attention_sinks"].sel(condition=condition)
    prompt_rows = dataset[_SINK_QUANTITIES].to_dataframe().reset_index()
    prompt_rows["has_sink"] = prompt_rows.sinks > 0
    is_massive = prompt_rows.strongest_position == prompt_rows.massive_position
    has_massive = prompt_rows.massive_count > 0
    prompt_rows["overlaps"] = is_massive.astype(np.float64).where(has_massive)

    # A row for each layer and head.
    with_sink = prompt_rows[prompt_rows.has_sink].groupby(["layer", "head"])
    columns = {
        "sink_rate": prompt_rows.groupby(["layer", "head"]).has_sink.mean(),
        "position": with_sink.strongest_position.agg(_most_common),
        "value_ratio": with_sink.strongest_value_ratio.agg(_median),
        "output_rank": with_sink.output_rank.agg(_median),
        "massive_overlap": with_sink.overlaps.mean(),
    }
    table = pd.DataFrame(columns).reset_index()
    table["position"] = table.position.fillna(-1).astype(int)

    # The kinds in reverse order, as a head has the first one that applies.
    table["kind"] = "neither"
    table.loc[table.output_rank < rank_below, "kind"] = "broadcast"
    table.loc[table.value_ratio < value_below, "kind"] = "nop"
    table.loc[table.sink_rate <= rate_above, "kind"] = "no sink"
    labelled_table = by_head(table)
    labelled_table.attrs = {
        "condition": condition,
        **thresholds,
        "n": dataset.sizes["prompt"],
    }
    return labelled_table


def _head_means(
    values: xr.DataArray,
    null: xr.DataArray | None,
    quantity: str,
    units: Units,
    reported_units: np.ndarray,
    level: float,
) -> pd.DataFrame:
    """A row for each head of some layers: its mean with interval and standard error, and the mean
    of its null.

    Args:
        values: The values of these layers [prompt, layer, head].
        null: The values under uniform attention, which broadcast with ``values``; None if there are
            none.
        quantity: The name of the column of means.
        units: The units of the prompts.
        reported_units: The units that count.
        level: The level of the intervals.
    """
    unit_values = _unit_values(values, units)[reported_units]
    uniform = np.nan
    if null is not None:
        uniform = _unit_values(null.broadcast_like(values), units)[reported_units].mean(0)

    mean, low, high = t_interval(unit_values, level)
    layer_indices, head_indices = np.indices(values.shape[1:]).reshape(2, -1)
    columns = {
        "layer": values.layer.values[layer_indices],
        "head": values["head"].values[head_indices],
        quantity: mean,
        "low": low,
        "high": high,
        "uniform": uniform,
        "n": len(reported_units),
        "error": stats.sem(unit_values),
    }
    return pd.DataFrame(columns)


def _unit_values(values: xr.DataArray, units: Units) -> np.ndarray:
    """The mean of each unit's prompts [unit, layer × head]."""
    prompt_values = values.transpose("prompt", "layer", "head").values
    return units.means(prompt_values.reshape(len(prompt_values), -1))


def _ranked_words(select: Literal["half"] | None, has_null: bool) -> str:
    """The prompts on which heads were ranked, and the null that is shown beside them, in words."""
    ranked_words = "on the prompts that are shown"
    if select == "half":
        ranked_words = "on one half of the prompts, shown on the other"
    if has_null:
        ranked_words += f", beside {quantities.NULLS['uniform']}"
    return ranked_words


def _most_common(positions: pd.Series) -> int:
    """The most common position; of equally common ones the smallest."""
    return int(positions.mode().iloc[0])


def _median(values: pd.Series) -> float:
    """The median, which is NaN if any value is."""
    return float(values.median(skipna=False))
