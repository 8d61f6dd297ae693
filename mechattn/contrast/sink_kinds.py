"""Classifies each head's sink: one that lets the head do nothing, or one that adds the same to every token."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.axes import BASELINE
from mechattn.errors import OptionError

if TYPE_CHECKING:
    import pandas as pd

    from mechattn.results.result import Result

KINDS = ("nop", "broadcast", "neither", "no sink")
_READ = ("sinks", "strongest_position", "strongest_value_ratio", "output_rank", "massive_position", "massive_count")
VALUE_BELOW = (0.1, 0.2, 0.3, 0.5)
RANK_BELOW = (1.25, 1.5, 2.0, 3.0)


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
    Otherwise "neither". The thresholds are conventions: :func:`sweep_sink_kinds` shows how many heads are of each kind
    under others.

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

    Source:
        The two kinds are those of arXiv:2606.08105 (known from its abstract only; the thresholds are ours).

    Raises:
        OptionError: The run had no ``AttentionSinks``, there is no such condition, or a threshold is out of range.
    """
    import pandas as pd

    for name, value, least, most in (
        ("value_below", value_below, 0, np.inf), ("rank_below", rank_below, 1, np.inf), ("rate_above", rate_above, 0, 1)
    ):  # fmt: skip
        _check_threshold(name, value, least, most)
    read = _read(result, condition)
    rows = [
        {**about, "kind": _kind(about, value_below, rank_below, rate_above)}
        for about in (_about(read, layer, head) for layer in read["layer"] for head in read["head"])
    ]
    made = pd.DataFrame(rows)
    made.attrs = {
        "condition": condition,
        "value_below": value_below,
        "rank_below": rank_below,
        "rate_above": rate_above,
        "n": len(read["sinks"]),
    }
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
    import pandas as pd

    rows = []
    for value, rank in product(value_below, rank_below):
        table = sink_kinds(result, condition, value_below=value, rank_below=rank, rate_above=rate_above)
        counts = {kind: int((table.kind == kind).sum()) for kind in KINDS}
        rows.append({"value_below": value, "rank_below": rank, **counts})
    return pd.DataFrame(rows)


def _check_threshold(name: str, value: Any, least: float, most: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not least <= value <= most:
        upper = f" to {most:g}" if np.isfinite(most) else " or more"
        raise OptionError(f"{name}={value!r}: give a number, {least:g}{upper}")


def _read(result: Result, condition: str) -> dict[str, np.ndarray]:
    """The variables needed from the run, each [prompt layer head] or [prompt layer]."""
    if "attention_sinks" not in result.datasets:
        raise OptionError("this run did not measure sinks: add ma.analyses.AttentionSinks() to its analyses")
    if condition not in result.conditions:
        have = ", ".join(map(repr, result.conditions))
        raise OptionError(f"there is no condition {condition!r}; the result has {have}")
    data = result["attention_sinks"].sel(condition=condition)
    if "strongest_value_ratio" not in data:
        raise OptionError("this run is from an older version, which did not store strongest_value_ratio: run it again")
    found = {name: data[name].transpose("prompt", "layer", ...).values for name in _READ}
    return found | {"layer": data["layer"].values, "head": data["head"].values}


def _about(read: dict[str, np.ndarray], layer: int, head: int) -> dict[str, Any]:
    """Summarise a head's sink over prompts."""
    at = int(np.flatnonzero(read["layer"] == layer)[0]), int(np.flatnonzero(read["head"] == head)[0])
    has = read["sinks"][:, at[0], at[1]] > 0
    where = read["strongest_position"][has, at[0], at[1]]
    massive = read["massive_count"][has, at[0]] > 0
    same = where[massive] == read["massive_position"][has, at[0]][massive]
    positions, counts = np.unique(where, return_counts=True)
    return {
        "layer": int(layer),
        "head": int(head),
        "sink_rate": float(has.mean()),
        "position": int(positions[counts.argmax()]) if has.any() else -1,
        "value_ratio": _median(read["strongest_value_ratio"][has, at[0], at[1]]),
        "output_rank": _median(read["output_rank"][has, at[0], at[1]]),
        "massive_overlap": float(same.mean()) if massive.any() else float("nan"),
    }


def _median(values: np.ndarray) -> float:
    return float(np.median(values)) if len(values) else float("nan")


def _kind(about: dict[str, Any], value_below: float, rank_below: float, rate_above: float) -> str:
    if not about["sink_rate"] > rate_above:
        return "no sink"
    if about["value_ratio"] < value_below:
        return "nop"
    return "broadcast" if about["output_rank"] < rank_below else "neither"
