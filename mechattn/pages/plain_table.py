"""The heads of a model as a plain table, for a browser that runs no scripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from mechattn.axes import BASELINE, head_name
from mechattn.pages.embedded import unpacked
from mechattn.render.words import percent

HEADS = 300  # rows at most: 50 kB
Written = Callable[[float], str]


@dataclass(frozen=True)
class PlainTable:
    """What the rows are, the words above the columns, and a row for each head."""

    caption: str
    columns: Seq[str]
    rows: Seq[Seq[str]]


def plain_tables(models: Seq[Mapping[str, Any]]) -> list[PlainTable]:
    """The numbers that the map of each model shows first, furthest heads first; none where no head was measured."""
    return [_table(model) for model in models if model["quantities"]]


def _table(model: Mapping[str, Any]) -> PlainTable:
    quantity = model["quantities"][0]
    condition = next((name for name in model["conditions"] if name in quantity["changes"]), None)
    shown = condition or next(iter(quantity["values"]))
    columns = {}
    for name in dict.fromkeys([BASELINE, shown]):
        if name in quantity["values"]:
            columns[name] = _written(_of_heads(model, quantity["values"][name]["mean"]), _number)
    by, by_words = _of_heads(model, quantity["values"][shown]["mean"]), shown
    if condition is not None:
        changed, by, by_words = _changes(model, quantity["changes"][condition])
        columns |= changed
    heads = [head_name(layer, head) for layer in model["layers"] for head in range(model["heads"])]
    order = np.argsort(-np.nan_to_num(abs(by), nan=-1.0), kind="stable")[:HEADS]
    rows = [(heads[i], *(column[i] for column in columns.values())) for i in order]
    number = (
        f"{len(heads)} heads"
        if len(rows) == len(heads)
        else f"the first {len(rows)} of {len(heads)} heads"
    )
    caption = f"{model['name']}: {quantity['words']}, condition “{shown}”, {number}, ranked by “{by_words}”"
    return PlainTable(caption, ["head", *columns], rows)


def _changes(
    model: Mapping[str, Any], change: Mapping[str, Any]
) -> tuple[dict[str, list[str]], np.ndarray, str]:
    """The columns of a change, as in the page's own table, and what they are ranked by, with its name."""
    difference = _of_heads(model, change["difference"])
    half = _of_heads(model, change["half"])
    amount = _relative if change["scale"] == "log-ratio" else _signed
    columns = {
        "change": _written(difference, amount, half),
        "q, against no change": _written(_of_heads(model, change["q_difference"]), "{:.2g}".format),
    }
    return columns, difference, "change"


def _of_heads(model: Mapping[str, Any], array: dict[str, Any] | None) -> np.ndarray:
    """A number for each head; one number of a layer is that of all its heads."""
    shape = (len(model["layers"]), model["heads"])
    return np.broadcast_to(np.nan if array is None else unpacked(array), shape).ravel()


def _written(values: np.ndarray, how: Written, half: np.ndarray | None = None) -> list[str]:
    """Numbers as text, with the ends of their intervals."""
    halves = np.full(values.shape, np.nan) if half is None else half
    made = []
    for value, width in zip(values.tolist(), halves.tolist(), strict=True):
        low, high = (how(value + sign * width) for sign in (-1, 1))
        ends = "" if np.isnan(width) else f" [{low}, {high}]"
        made.append("–" if np.isnan(value) else how(value) + ends)
    return made


def _number(value: float) -> str:
    return f"{value:.3g}".replace("-", "−")


def _signed(value: float) -> str:
    return f"{value:+.3g}".replace("-", "−")


def _relative(value: float) -> str:
    return percent(np.expm1(value))
