"""The map of changes by layer and head, relative to the null."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechattn.axes import BASELINE
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.quantities import Null
from mechattn.errors import OptionError
from mechattn.render import draw
from mechattn.render.figure_declaration import figure as declare
from mechattn.render.words import (
    NULL_NAMES,
    count_words,
    model_caption,
    percent,
    quantity_words,
    says,
)
from mechattn.results.result import Result
from mechattn.stats.paired import ROUNDING


@declare(compares=True, report=[{}])
def change_map(
    result: Result,
    condition: str | None = None,
    quantity: str = "received",
    segment: str = "question",
    *,
    to: str = BASELINE,
    null: Null | None = None,
) -> go.Figure:
    """Map the change of a quantity relative to its null by layer and head; dots mark q < 0.05.

    Orange means that it rose more, or fell less, than under the null; blue that it fell further, or
    rose less. Where no null is known, or it predicts no change from ``to``, the map shows the
    change itself, and the title says so. q is Benjamini-Hochberg over the map.

    Args:
        result: A result.
        condition: The condition; the first that isn't the baseline by default.
        quantity: The quantity, as for ``result.compare``.
        segment: The segment that it is about.
        to: The condition to compare with, such as a random sentence of as many tokens.
        null: As for :class:`mechattn.Contrast`: by default dilution, or uniform attention where
            that is not known.
    """
    condition = result.condition(condition)
    contrast = Contrast(result, condition, to, quantity, segment, null=null)
    table = contrast.table()
    if table.duplicated(["layer", "head"]).any():
        raise OptionError(f"{quantity!r} has more than one number per head, but a map needs one")
    has_null = bool(table.null.notna().any())
    predicts_change = has_null and table.attrs["null"] != "no difference"
    if to != BASELINE:
        predicts_change = predicts_change and bool((table.null.abs() > ROUNDING).any())
    null_name = NULL_NAMES[contrast.null_used]
    column = "beyond" if predicts_change else "difference"
    shown_words = f"relative to {null_name}" if predicts_change else "change"

    columns = {
        "shown": column,
        "change": "difference",
        "q": f"q_{column}",
        "low": f"{column}_low",
        "high": f"{column}_high",
    }
    hover = f"{shown_words} %{{z:.3f}} [%{{customdata[2]:.3f}}, %{{customdata[3]:.3f}}]"
    hover += "<br>change %{customdata[0]:.3f}<br>q = %{customdata[1]:.2g}"
    bar_words = f"change of {quantity_words(quantity, segment)}"
    if predicts_change:
        bar_words += f" beyond {null_name}"
    bar_words += f" ({table.scale.iloc[0]})"
    figure = draw.head_map(table, columns, shown_words, bar_words, hover)

    versus = "" if to == BASELINE else f" relative to “{to}”"
    small_print = _map_small_print(result, condition, table, column, versus)
    what_changed = f"change{versus}"
    if predicts_change:
        what_changed += f", {shown_words}" if versus else f" {shown_words}"
    heading = f"{model_caption(result)}: {quantity_words(quantity, segment)}, {what_changed}"
    draw.title(figure, heading, small_print, draw.map_height(table), top=110)
    return says(figure, _map_words(table, column, null_name, versus))


def _map_small_print(
    result: Result, condition: str, table: pd.DataFrame, column: str, versus: str
) -> str:
    """How many heads are significant, of how many prompts, and against what."""
    count = count_words(result)
    if "resampled" in table.attrs:
        count += f", tested by {table.attrs['resampled']}"
    significant = int((table[f"q_{column}"] < 0.05).sum())
    against = table.attrs["null"]
    if column == "beyond":
        against = f"against {against}"
    elif table.null.notna().any():
        against += " predicts no difference"
    phrases = [
        f"“{condition}”{versus}",
        f"{significant} of {len(table)} heads at q < 0.05",
        f"n = {count}",
        against,
    ]
    smallest_q = table.attrs["smallest_q"]
    if smallest_q >= 0.05:
        phrases.append(f"too few prompts for any head to reach it (q ≥ {smallest_q:.2g})")
    if table.attrs["left_out"]:
        phrases.append(f"{len(table.attrs['left_out'])} heads left out (no ratio)")
    return "; ".join(phrases)


def _map_words(table: pd.DataFrame, column: str, null_name: str, versus: str) -> str:
    """The number of significant heads, and the head furthest from the null (without it: most
    changed).
    """
    largest = table.iloc[int(np.nanargmax(table[column].abs()))]
    is_ratio = table.scale.iloc[0] == "log-ratio"
    if is_ratio:
        names = ("change", "change_low", "change_high", "change_null")
        change, low, high, null_change = (percent(largest[name]) for name in names)
    else:
        names = ("difference", "difference_low", "difference_high", "null")
        change, low, high, null_change = (
            f"{largest[name]:+.3f}".replace("-", "−") for name in names
        )
    head = f"L{largest.layer:.0f}H{largest['head']:.0f}: {change} [{low}, {high}]"
    picked = ""
    if len(table) > 1:
        picked = (
            f"; it was selected as the largest of {len(table)}, so its interval is too optimistic "
            '(select="half" avoids this)'
        )
    significant = int((table[f"q_{column}"] < 0.05).sum())
    count = f"{significant} of {len(table)} heads"
    if column == "beyond":
        times = f" ({np.exp(largest.beyond):.2f} × {null_name})" if is_ratio else ""
        return (
            f"{count} differ from {null_name} at q < 0.05. The largest difference is in {head}, "
            f"under {null_name} {null_change}{times}{picked}."
        )
    null = "" if versus else f"; {table.attrs['null']}"
    return f"{count} changed{versus} at q < 0.05{null}. The largest change is in {head}{picked}."
