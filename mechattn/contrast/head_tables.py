"""Tables of heads: those with the largest values of a quantity, and which kind of sink each has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, Literal

import numpy as np
import pandas as pd
import xarray as xr

from mechattn.axes import BASELINE, by_head
from mechattn.contrast import quantities
from mechattn.contrast.table import check_select
from mechattn.errors import OptionError, check_counts
from mechattn.results.result import Result, part_of, units_of
from mechattn.stats.intervals import FEWEST, shrunken, t_interval
from mechattn.stats.units import Unit, halves_of

KINDS = ("nop", "broadcast", "neither", "no sink")
VALUE_BELOW = (0.1, 0.2, 0.3, 0.5)
RANK_BELOW = (1.25, 1.5, 2.0, 3.0)


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
    check_select(select)
    if quantity is None:
        names = quantities.head_quantities(result)
        if not names:
            raise OptionError(
                "this result has no number for each head; name a quantity of another run"
            )
        quantity = names[0]

    prompts = result["sequences"].sizes["prompt"]
    units = units_of(result, prompts, unit)
    units.refuse_below(FEWEST if select is None else 2 * FEWEST)
    ranking_units = np.arange(units.n)
    reported_units = ranking_units
    if select is not None:
        ranking_units, reported_units = halves_of(units.n)

    blocks = []
    sides = [(result, condition)]
    beside_null = ""
    for block in quantities.layer_blocks(result, quantity, segment):
        layers = part_of(result, "layer", block)
        values, null = quantities.values_of(layers, condition, quantity, segment)
        further = sorted(map(str, set(values.dims) ^ {"prompt", "layer", "head"}))
        if further:
            raise OptionError(
                f"{quantity!r} does not have one number per head ({', '.join(further)}), so it"
                " cannot rank heads"
            )
        quantities.check_present(values, quantity, segment, sides[0], sides)
        of_units = units.means(values.values.reshape(prompts, -1))
        reported = of_units[reported_units]
        mean, low, high = t_interval(reported, level)
        layer, head = np.unravel_index(np.arange(of_units.shape[1]), values.shape[1:])
        uniform = np.full(of_units.shape[1], np.nan)
        if null is not None:
            beside_null = f", beside {quantities.NULLS['uniform']}"
            of_null = null.broadcast_like(values).transpose(*values.dims)
            uniform = units.means(of_null.values)[reported_units].mean(0).reshape(-1)
        columns = {
            "layer": values.layer.values[layer],
            "head": values["head"].values[head],
            quantity: mean,
            "low": low,
            "high": high,
            "uniform": uniform,
            "n": len(reported),
            "error": reported.std(0, ddof=1) / np.sqrt(len(reported)),
            "ranked_by": of_units[ranking_units].mean(0),
            "present": ~np.isnan(of_units[0]),
        }
        blocks.append(pd.DataFrame(columns))
    table = pd.concat(blocks, ignore_index=True)
    if not table.present.any():
        raise quantities.absent(prompts, quantity, segment, sides[0], sides)

    ranked_on = "on one half of the prompts, shown on the other"
    if select is None:  # the other half needs no shrinking
        ranked_on = "on the prompts that are shown"
        table.insert(3, "shrunken", shrunken(table[quantity].to_numpy(), table.error.to_numpy()))
    ranked = table[table.present].sort_values("ranked_by", ascending=False, kind="stable")
    ranked = ranked[:top].drop(columns=["error", "ranked_by", "present"])
    ranked = by_head(ranked.reset_index(drop=True))
    ranked.attrs = {
        "condition": condition,
        "segment": segment,
        "of": len(table),
        "ranked": ranked_on + beside_null,
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

    A head has a sink if, in more than ``rate_above`` of the prompts, some key's mean attention is
    above the analysis's threshold. "nop": the values of its strongest key are small,
    ``‖v_sink‖ / mean ‖v‖ < value_below``, so attending there adds little. "broadcast": the values
    are not small, but the head's output has a low effective rank (exp of the entropy of the shares
    of its singular values), ``rank < rank_below``, so it adds much the same to every token.
    Otherwise "neither". The thresholds are conventions: :func:`sweep_sink_kinds` counts heads of
    each kind by others.

    Args:
        result: A run with ``AttentionSinks``.
        condition: The condition.
        value_below: The threshold of the ratio of norms.
        rank_below: The threshold of the effective rank, at least 1.
        rate_above: The threshold of the share of prompts.

    Returns:
        One row per head: layer, head, ``sink_rate``, ``position`` (the most common position of the
        strongest key; −1 for none), ``value_ratio`` and ``output_rank`` (medians over the prompts
        with a sink), ``massive_overlap`` (the share of those prompts in which the strongest key is
        also the place of the layer's largest massive activation; NaN if no prompt has one),
        ``kind``.

    Source: The two kinds are those of arXiv:2606.08105 (known from its abstract only; the
    thresholds are ours).

    Raises:
        OptionError: The run had no ``AttentionSinks``, there is no such condition, or a threshold
            is out of range.
    """
    thresholds = {
        "value_below": value_below,
        "rank_below": rank_below,
        "rate_above": rate_above,
    }
    _check_threshold("value_below", value_below, 0, np.inf)
    _check_threshold("rank_below", rank_below, 1, np.inf)
    _check_threshold("rate_above", rate_above, 0, 1)
    if "attention_sinks" not in result.datasets:
        raise OptionError(
            "this run did not measure sinks: add ma.analyses.AttentionSinks() to its analyses"
        )
    quantities.check_condition(result, condition)
    sinks = result["attention_sinks"].sel(condition=condition)
    rows = []
    for layer, head in product(sinks.layer.values, sinks["head"].values):
        row: dict[str, Any] = {"layer": int(layer), "head": int(head)}
        row |= _sink_of(sinks.sel(layer=layer, head=head))
        row["kind"] = "neither"
        if not row["sink_rate"] > rate_above:
            row["kind"] = "no sink"
        elif row["value_ratio"] < value_below:
            row["kind"] = "nop"
        elif row["output_rank"] < rank_below:
            row["kind"] = "broadcast"
        rows.append(row)
    table = by_head(pd.DataFrame(rows))
    table.attrs = {"condition": condition, **thresholds, "n": sinks.sizes["prompt"]}
    return table


def _check_threshold(name: str, value: object, least: float, most: float) -> None:
    """Refuse a threshold that is no number, or out of its range."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:  # type: ignore[operator]
        upper = f" to {most:g}" if np.isfinite(most) else " or more"
        raise OptionError(f"{name}={value!r}: give a number, {least:g}{upper}")


def sweep_sink_kinds(
    result: Result,
    condition: str = BASELINE,
    *,
    value_below: Sequence[float] = VALUE_BELOW,
    rank_below: Sequence[float] = RANK_BELOW,
    rate_above: float = 0.5,
) -> pd.DataFrame:
    """Count the heads with each kind of sink for every pair of thresholds; see
    :func:`sink_kinds`."""
    rows = []
    for value, rank in product(value_below, rank_below):
        table = sink_kinds(
            result, condition, value_below=value, rank_below=rank, rate_above=rate_above
        )
        counts = {kind: int((table.kind == kind).sum()) for kind in KINDS}
        rows.append({"value_below": value, "rank_below": rank, **counts})
    return pd.DataFrame(rows)


def _sink_of(head: xr.Dataset) -> dict[str, Any]:
    """The sink of a head over the prompts that have one."""
    has_sink = head.sinks.values > 0
    row: dict[str, Any] = {
        "sink_rate": float(has_sink.mean()),
        "position": -1,
        "value_ratio": float("nan"),
        "output_rank": float("nan"),
        "massive_overlap": float("nan"),
    }
    if not has_sink.any():
        return row

    with_sink = head.isel(prompt=has_sink)
    strongest = with_sink.strongest_position.values
    positions, counts = np.unique(strongest, return_counts=True)
    row["position"] = int(positions[counts.argmax()])
    row["value_ratio"] = float(with_sink.strongest_value_ratio.median(skipna=False))
    row["output_rank"] = float(with_sink.output_rank.median(skipna=False))
    has_massive = with_sink.massive_count.values > 0
    if has_massive.any():
        massive = with_sink.massive_position.values[has_massive]
        row["massive_overlap"] = float((strongest[has_massive] == massive).mean())
    return row
