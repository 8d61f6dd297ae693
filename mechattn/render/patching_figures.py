"""Figures of patching: maps of effects, and effects beside their controls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechattn.errors import OptionError
from mechattn.render import draw
from mechattn.render.draw import GREY, THIRD, WITH
from mechattn.render.figure_declaration import declare
from mechattn.render.words import in_digits, interval_of, number_words, says
from mechattn.results.result import head_name

if TYPE_CHECKING:
    from mechattn.patching.effects import Patching

# What the hover text of a map adds to the effect if the table has the column, as plotly templates
# with the column's number in customdata.
_HOVER_ADDITIONS = {
    "share": "; %{{customdata[{number}]:.1%}} of the whole effect",
    "random": "<br>random direction %{{customdata[{number}]:.3g}}",
    "other_prompt": "<br>from another prompt %{{customdata[{number}]:.3g}}",
}
_CONTROL_MARK: dict[str, Any] = dict(size=7, line_width=1.6)


@declare("patching")
def patching_map(patching: Patching) -> go.Figure:
    """Map mean patching effects by layer and head, or layer and segment; dots mark q < 0.05
    (over the map) and at least a twentieth of the largest.

    Orange means that the answer's metric rose, blue that it fell. Rows and columns are the layers
    and heads that were patched; a cell that was not patched is empty.

    Args:
        patching: The result of ``patch``.

    Raises:
        OptionError: The effects are not by layer and one more label, such as head or segment.
    """
    if patching.labels[0] != "layer" or len(patching.labels) != 2:
        raise OptionError(
            "a map needs effects by layer and one more label, such as head; these are by"
            f" {', '.join(patching.labels)}"
        )

    x_column = patching.labels[1]
    table = patching.table()
    if table.share.isna().any():  # the whole effect may be 0
        table = table.drop(columns="share")
    q_column = f"q_{table.attrs['tested']}"
    hover_columns = {"low": "effect_low", "high": "effect_high", "q": q_column}
    hover = (
        "effect %{z:.3g} [%{customdata[0]:.3g}, %{customdata[1]:.3g}]<br>q = %{customdata[2]:.2g}"
    )
    for column, template in _HOVER_ADDITIONS.items():
        if column in table:
            hover += template.format(number=len(hover_columns))
            hover_columns[column] = column

    figure = draw.head_map(
        table,
        value_column="effect",
        q_column=q_column,
        hover_columns=hover_columns,
        hover=hover,
        name="effect",
        bar_words=_effect_on(patching),
        x_column=x_column,
    )
    # On an axis of numbers, cells would fill the gaps of layers and heads that were not patched.
    figure.update_layout(xaxis_type="category", yaxis_type="category")
    small_print = f"{patching.about['metric']}; {_run_words(patching)}"
    heading = f"{patching.about['model']}: patching effect by {x_column}"
    draw.title_above_legend(figure, heading, small_print, draw.map_height(table), margin_top=110)

    significant = int((table[q_column] < 0.05).sum())
    return says(
        figure,
        f"{significant} of {len(table)} cells at q < 0.05. Largest:"
        f" {_largest_words(patching, table)}; it was selected as the largest, so its interval is"
        ' too optimistic (table(select="half") avoids this).',
    )


@declare("patching")
def patching_effects(
    patching: Patching, top: int | None = 12, select: Literal["half"] | None = None
) -> go.Figure:
    """Plot patching effects as points with 95 % intervals beside their controls.

    Filled points differ from 0 and from each control that was measured (all q < 0.05, and an
    interval without 0). Controls are drawn a little lower. An effect from another prompt that is
    far off is drawn at the edge, with its number.

    Args:
        patching: The result of ``patch``.
        top: The number of rows, the largest effects first; None for all, in the order of the table
            if ``select`` is None.
        select: "half" ranks the rows on one half of the prompts and draws the other half.

    Raises:
        OptionError: There are too few prompts, or an option is not allowed.
    """
    table = patching.table(top, select).iloc[::-1]
    cells = table[patching.labels].to_dict("records")
    labels = [_cell_words(cell) for cell in cells]
    rows = np.arange(len(table))

    # q_effect is NaN if effects cannot be below 0; ``max`` then skips it.
    q = table.filter(regex="^q_").max(axis=1)
    has_interval_without_0 = table.effect_low * table.effect_high > 0  # the ends have one sign
    differs = (q < 0.05) & has_interval_without_0
    from_words = "from 0"
    if patching.controls:
        from_words = "from 0 and from each control"

    figure = draw.panels()
    for mask, fill, name in (
        (differs, WITH, f"effect: differs {from_words} (q < 0.05)"),
        (~differs, "white", "effect: does not differ"),
    ):
        draw.points(
            figure,
            rows[mask],
            interval_of(table[mask], "effect"),
            name,
            WITH,
            sideways=True,
            marker=dict(color=fill, line=dict(color=WITH, width=1.6), size=8),
            customdata=q[mask],
            hovertemplate="%{y}: %{x:+.3g}, q = %{customdata:.2g}",
        )
    low, high = _control_points(figure, table, rows - 0.36)
    draw.rule(figure, x=0)

    small_print = f"{_run_words(patching)}; q over {table.attrs['family']}; bars: 95 % intervals"
    heading = f"{patching.about['model']}: patching effects"
    height = 190 + 30 * len(table)
    draw.title_above_legend(figure, heading, small_print, height, margin_top=120)

    room = 0.05 * (high - low)
    figure.update_xaxes(title_text=_effect_on(patching), range=[low - room, high + room])
    # Below the lowest row there is room for its controls.
    figure.update_yaxes(draw.named_ticks(labels), zeroline=False, range=[-0.8, len(table) - 0.4])

    sentence = f"{int(differs.sum())} of {len(table)} rows differ {from_words} (q < 0.05)"
    if table.attrs["skewed"]:
        sentence += f"; {table.attrs['skewed']}"
    return says(figure, f"{sentence}.")


def _effect_on(patching: Patching) -> str:
    """The title of an axis or colour bar of effects, with the metric that they change."""
    return f"effect ({patching.about['metric']})"


def _run_words(patching: Patching) -> str:
    """How the effects were measured, and the whole effect."""
    about = patching.about
    return (
        f"{about['direction']}, {patching.method_words}; n = {patching.units.words};"
        f" whole effect {number_words(patching.whole)}"
    )


def _largest_words(patching: Patching, table: pd.DataFrame) -> str:
    """The cell with the largest effect, with its interval and its share of the whole effect."""
    row_number = np.nanargmax(table.effect.abs())
    largest = table.iloc[row_number]
    # A row of the whole table would turn the numbers of layers and heads into floats.
    cell = table[patching.labels].iloc[row_number].to_dict()
    words = f"{_cell_words(cell)}, {number_words(interval_of(largest, 'effect'))}"
    if "share" in table:
        words += f", {largest.share:.0%} of the whole effect"
    return words


def _cell_words(cell: dict[str, Any]) -> str:
    """A cell in words: "L1H2", "layer 1" or the name of a set, then its segment or position.

    Args:
        cell: The labels of the cell, by their dimensions.
    """
    other_labels = dict(cell)
    words = []
    if "layer" in other_labels:
        layer = other_labels.pop("layer")
        head = other_labels.pop("head", None)
        layer_words = f"layer {layer}"
        if head is not None:
            layer_words = head_name(layer, head)
        words.append(layer_words)

    words += map(str, other_labels.values())
    return ", ".join(words)


def _control_points(figure: go.Figure, table: pd.DataFrame, y: np.ndarray) -> tuple[float, float]:
    """Draw the controls of each row that were measured.

    Args:
        figure: The figure.
        table: The effects, one per row.
        y: The height at which the controls of each row are drawn.

    Returns:
        The smallest and the largest number that is drawn, 0 and the intervals of effects included.
    """
    interval_ends = table[["effect_low", "effect_high"]].values
    low = interval_ends.min(initial=0.0)
    high = interval_ends.max(initial=0.0)
    if "random" in table:
        low = min(low, table.random.min())
        high = max(high, table.random.max())
        figure.add_scatter(
            x=table.random,
            y=y,
            name="random direction of the same norm",
            mode="markers",
            marker=_CONTROL_MARK | dict(symbol="x-thin-open", color=GREY),
        )

    if "other_prompt" in table and table.other_prompt.notna().any():
        # The effect from another prompt may be a hundred times as large, and would hide all others.
        room = 0.5 * (high - low)
        clipped = table.other_prompt.clip(low - room, high + room)
        _other_prompts(figure, table.other_prompt, clipped, y)
        low = min(low, clipped.min())
        high = max(high, clipped.max())

    return low, high


def _other_prompts(
    figure: go.Figure, effects: pd.Series, clipped: pd.Series, y: np.ndarray
) -> None:
    """Draw the effects from another prompt. One that was clipped is marked, with its number."""
    is_left = effects < clipped
    is_right = effects > clipped
    numbers = effects.map(lambda effect: in_digits(effect, ".3g"))
    symbols = np.select(
        [is_left, is_right],
        ["triangle-left-open", "triangle-right-open"],
        "diamond-open",
    )
    figure.add_scatter(
        x=clipped,
        y=y,
        name="from another prompt",
        mode="markers+text",
        text=np.where(is_left | is_right, numbers, ""),
        textposition=np.where(is_right, "middle left", "middle right"),
        marker=_CONTROL_MARK | dict(symbol=symbols, color=THIRD),
        customdata=effects,
        meta=["x"],
        hovertemplate="%{y}: %{customdata:+.3g}",
    )
