"""Tables of heads: those with the largest values of a quantity, and which kind of sink each has."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import product
from typing import Any, Literal

import numpy as np
import pandas as pd
import xarray as xr

from mechattn.axes import BASELINE, by_head
from mechattn.contrast import quantities
from mechattn.contrast.table import check_select
from mechattn.errors import OptionError
from mechattn.results.result import Result, part_of, units_of
from mechattn.stats.intervals import FEWEST, shrunken, t_interval
from mechattn.stats.units import Unit, halves_of

KINDS = ("nop", "broadcast", "neither", "no sink")
VALUE_BELOW = (0.1, 0.2, 0.3, 0.5)
RANK_BELOW = (1.25, 1.5, 2.0, 3.0)


def ranked_heads(
    result: Result, quantity: str | None, top: int | None, *, condition: str, segment: str,
    select: Literal["half"] | None, unit: Unit, level: float,
) -> pd.DataFrame:  # fmt: skip
    """See :meth:`mechattn.results.result.Result.heads`, which explains the arguments."""
    if top is not None and (isinstance(top, bool) or not isinstance(top, int) or top < 1):
        raise OptionError(f"top={top!r}: give a number of heads, at least 1, or None for all")
    check_select(select)
    if quantity is None and not (there := quantities.head_quantities(result)):
        raise OptionError("this result has no number for each head; name a quantity of another run")
    quantity = there[0] if quantity is None else quantity
    prompts = result["sequences"].sizes["prompt"]
    units = units_of(result, prompts, unit)
    units.refuse_below(FEWEST if select is None else 2 * FEWEST)
    finding, shown = (np.arange(units.n),) * 2 if select is None else halves_of(units.n)
    parts, known = [], ""
    for some in quantities.layer_blocks(result, quantity, segment):
        values, null = quantities.values_of(
            part_of(result, "layer", some), condition, quantity, segment
        )
        if more := sorted(map(str, set(values.dims) ^ {"prompt", "layer", "head"})):
            raise OptionError(
                f"{quantity!r} does not have one number per head ({', '.join(more)}), so it cannot rank heads"
            )
        quantities.check_present(
            values, quantity, segment, (result, condition), [(result, condition)]
        )
        each = units.means(values.values.reshape(prompts, -1))
        layer, head = np.unravel_index(np.arange(each.shape[1]), values.shape[1:])
        columns = {"layer": values.layer.values[layer], "head": values["head"].values[head]}
        columns |= dict(zip((quantity, "low", "high"), t_interval(each[shown], level), strict=True))
        columns |= {"uniform": np.full(each.shape[1], np.nan), "n": len(each[shown])}
        if null is not None:
            uniform = null.broadcast_like(values).transpose(*values.dims)
            known = f", beside {quantities.NULLS['uniform']}"
            columns["uniform"] = units.means(uniform.values)[shown].mean(0).reshape(-1)
        columns |= {"error": each[shown].std(0, ddof=1) / np.sqrt(len(each[shown]))}
        columns |= {"finding": each[finding].mean(0), "there": ~np.isnan(each[0])}
        parts.append(pd.DataFrame(columns))
    table = pd.concat(parts, ignore_index=True)
    if not table.there.any():
        raise quantities.absent(
            prompts, quantity, segment, (result, condition), [(result, condition)]
        )
    if select is None:  # the other half needs no shrinking
        table.insert(3, "shrunken", shrunken(table[quantity].to_numpy(), table.error.to_numpy()))
    order = np.argsort(-np.nan_to_num(table.finding.to_numpy(), nan=-np.inf), kind="stable")
    made = table.iloc[order[table.there.to_numpy()[order]][:top]].drop(
        columns=["error", "finding", "there"]
    )
    made = by_head(made.reset_index(drop=True))
    how = (
        "on one half of the prompts, shown on the other"
        if select
        else "on the prompts that are shown"
    )
    made.attrs = {
        "condition": condition,
        "segment": segment,
        "of": len(table),
        "ranked": how + known,
    }
    made.attrs |= {"unit": units.unit, "level": level}
    return made


def sink_kinds(
    result: Result,
    condition: str = BASELINE,
    *,
    value_below: float = 0.3,
    rank_below: float = 2.0,
    rate_above: float = 0.5,
) -> pd.DataFrame:
    """Classify the sink of each head, from a run with ``ma.analyses.AttentionSinks()``.

    A head has a sink if, in more than ``rate_above`` of the prompts, some key's mean attention is above the analysis's
    threshold. "nop": the values of its strongest key are small, ``‖v_sink‖ / mean ‖v‖ < value_below``, so attending
    there adds little. "broadcast": the values are not small, but the head's output has a low effective rank (exp of the
    entropy of the shares of its singular values), ``rank < rank_below``, so it adds much the same to every token.
    Otherwise "neither". The thresholds are conventions: :func:`sweep_sink_kinds` counts heads of each kind by others.

    Args:
        result: A run with ``AttentionSinks``.
        condition: The condition.
        value_below: The threshold of the ratio of norms.
        rank_below: The threshold of the effective rank, at least 1.
        rate_above: The threshold of the share of prompts.

    Returns:
        One row per head: layer, head, ``sink_rate``, ``position`` (the most common position of the strongest key; −1
        for none), ``value_ratio`` and ``output_rank`` (medians over the prompts with a sink), ``massive_overlap``
        (the share of those prompts in which the strongest key is also the place of the layer's largest massive
        activation; NaN if no prompt has one), ``kind``.

    Source: The two kinds are those of arXiv:2606.08105 (known from its abstract only; the thresholds are ours).

    Raises:
        OptionError: The run had no ``AttentionSinks``, there is no such condition, or a threshold is out of range.
    """
    most = {"value_below": (0, np.inf), "rank_below": (1, np.inf), "rate_above": (0, 1)}
    given = {"value_below": value_below, "rank_below": rank_below, "rate_above": rate_above}
    for name, value in given.items():
        least, largest = most[name]
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not least <= value <= largest
        ):
            upper = f" to {largest:g}" if np.isfinite(largest) else " or more"
            raise OptionError(f"{name}={value!r}: give a number, {least:g}{upper}")
    if "attention_sinks" not in result.datasets:
        raise OptionError(
            "this run did not measure sinks: add ma.analyses.AttentionSinks() to its analyses"
        )
    quantities.check_condition(result, condition)
    data = result["attention_sinks"].sel(condition=condition)
    rows = []
    for layer, head in product(data.layer.values, data["head"].values):
        about = {"layer": int(layer), "head": int(head)} | _sink_of(
            data.sel(layer=layer, head=head)
        )
        if not about["sink_rate"] > rate_above:
            kind = "no sink"
        elif about["value_ratio"] < value_below:
            kind = "nop"
        else:
            kind = "broadcast" if about["output_rank"] < rank_below else "neither"
        rows.append(about | {"kind": kind})
    made = by_head(pd.DataFrame(rows))
    made.attrs = {"condition": condition, **given, "n": data.sizes["prompt"]}
    return made


def sweep_sink_kinds(
    result: Result,
    condition: str = BASELINE,
    *,
    value_below: Seq[float] = VALUE_BELOW,
    rank_below: Seq[float] = RANK_BELOW,
    rate_above: float = 0.5,
) -> pd.DataFrame:
    """Count the heads with each kind of sink for every pair of thresholds; see :func:`sink_kinds`."""
    rows = []
    for value, rank in product(value_below, rank_below):
        table = sink_kinds(
            result, condition, value_below=value, rank_below=rank, rate_above=rate_above
        )
        counts = {kind: int((table.kind == kind).sum()) for kind in KINDS}
        rows.append({"value_below": value, "rank_below": rank, **counts})
    return pd.DataFrame(rows)


def _sink_of(data: xr.Dataset) -> dict[str, Any]:
    has = data.sinks.values > 0
    found = data.isel(prompt=has)
    where, massive = found.strongest_position.values, found.massive_count.values > 0
    same = where[massive] == found.massive_position.values[massive]
    positions, counts = np.unique(where, return_counts=True)
    return {
        "sink_rate": float(has.mean()),
        "position": int(positions[counts.argmax()]) if has.any() else -1,
        "value_ratio": float(found.strongest_value_ratio.median(skipna=False))
        if has.any()
        else float("nan"),
        "output_rank": float(found.output_rank.median(skipna=False)) if has.any() else float("nan"),
        "massive_overlap": float(same.mean()) if massive.any() else float("nan"),
    }
