"""The heads of a model as a plain table, for a browser that runs no scripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mechattn.axes import BASELINE, head_name
from mechattn.pages.embedded import unpacked
from mechattn.render.words import percent

HEADS = 300  # rows at most: 50 kB
NumberFormat = Callable[[float], str]


@dataclass(frozen=True)
class PlainTable:
    """What the rows are, the words above the columns, and a row for each head."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def plain_tables(models: Sequence[Mapping[str, Any]]) -> list[PlainTable]:
    """What the map of each model shows first, furthest heads first; none without heads."""
    return [_table(model) for model in models if model["quantities"]]


def _table(model: Mapping[str, Any]) -> PlainTable:
    """The first quantity of a model: in the baseline and in a condition, and the change."""
    quantity = model["quantities"][0]
    values = quantity["values"]
    changes = quantity["changes"]
    compared = [name for name in model["conditions"] if name in changes]
    condition = compared[0] if compared else next(iter(values))

    columns = {}
    for name in (BASELINE, condition):
        if name in values:
            columns[name] = _texts(_of_heads(model, values[name]["mean"]), _number)
    ranking = _of_heads(model, values[condition]["mean"])
    ranking_words = condition
    if compared:
        change = changes[condition]
        ranking = _of_heads(model, change["difference"])
        ranking_words = "change"
        format_change = _relative if change["scale"] == "log-ratio" else _signed
        half = _of_heads(model, change["half"])
        q = _of_heads(model, change["q_difference"])
        columns["change"] = _texts(ranking, format_change, half)
        columns["q, against no change"] = _texts(q, "{:.2g}".format)

    heads = [head_name(layer, head) for layer in model["layers"] for head in range(model["heads"])]
    distance = np.nan_to_num(abs(ranking), nan=-1.0)
    order = np.argsort(-distance, kind="stable")[:HEADS]
    rows = [(heads[index], *(texts[index] for texts in columns.values())) for index in order]

    count_words = f"{len(heads)} heads"
    if len(rows) < len(heads):
        count_words = f"the first {len(rows)} of {count_words}"
    caption = (
        f"{model['name']}: {quantity['words']}, condition “{condition}”, {count_words}, ranked by "
        f"“{ranking_words}”"
    )
    return PlainTable(caption, ["head", *columns], rows)


def _of_heads(model: Mapping[str, Any], array: dict[str, Any] | None) -> np.ndarray:
    """A number for each head; one number of a layer is that of all its heads."""
    shape = (len(model["layers"]), model["heads"])
    values = np.array(np.nan) if array is None else unpacked(array)
    return np.broadcast_to(values, shape).ravel()


def _texts(
    values: np.ndarray, format_number: NumberFormat, half: np.ndarray | None = None
) -> list[str]:
    """Numbers as text, with the ends of their intervals."""
    if half is None:
        half = np.full(values.shape, np.nan)
    texts = []
    for value, half_width in zip(values.tolist(), half.tolist(), strict=True):
        text = "–" if np.isnan(value) else format_number(value)
        if not np.isnan(value) and not np.isnan(half_width):
            low = format_number(value - half_width)
            high = format_number(value + half_width)
            text += f" [{low}, {high}]"
        texts.append(text)
    return texts


def _number(value: float) -> str:
    return f"{value:.3g}".replace("-", "−")


def _signed(value: float) -> str:
    return f"{value:+.3g}".replace("-", "−")


def _relative(value: float) -> str:
    return percent(np.expm1(value))
