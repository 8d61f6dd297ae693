"""The attention budget: what the question attends to in each layer, and why its attention to itself
changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from textwrap import wrap
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechattn.axes import BASELINE
from mechattn.contrast.budget_table import (
    NAME,
    budget_table,
    busiest_layer,
    by_layer,
    known_causes,
    payers,
)
from mechattn.render import draw
from mechattn.render.draw import WITH, WITHOUT
from mechattn.render.figure_declaration import PageTable, PageWords, declare
from mechattn.render.words import (
    count_words,
    interval_of,
    model_caption,
    number_words,
    says,
)
from mechattn.results.result import Result
from mechattn.stats.intervals import Interval

PAYER_COLOURS = {
    "question": WITHOUT,
    "inserted": WITH,
    "system": "#cc79a7",
    "template": "#888",
    "first": "#444",
    "answer": "#7d5ba6",
    "changed": "#94a323",
}
CAUSE_COLOURS = {"distance": "#56b4e9", "mass": "#e69f00", "hidden states": "#7a5c00"}
PAYER_WORDS = {
    "first": "first token",
    "template": "prompt template",
    "system": "system text",
    "inserted": "inserted tokens",
    "question": "the question itself",
    "answer": "answer",
    "changed": "changed tokens",
}
CAUSE_WORDS = {
    "distance": "distance",
    "mass": "attention taken",
    "hidden states": "hidden states",
}
# What distinguishes conditions where colours say who receives attention, or why.
_SYMBOLS = (
    "circle",
    "diamond-open",
    "square",
    "triangle-up-open",
    "cross",
    "x-open",
    "star",
    "pentagon-open",
)
_TITLE_LETTERS = 70  # that fit above all panels of a row
_HOVER = "%{y:.2f} [%{customdata[0]:.2f}, %{customdata[1]:.2f}]<extra></extra>"
_LOWER_LEGEND = "legend2"  # of the panels below
_OWN_ATTENTION = {
    "more": "more to itself than without insertion",
    "less": "less to itself than without insertion",
    "similar": "about as much to itself as without insertion",
    "unknown": "to itself as follows, compared with no insertion",  # fewer than three prompts
}
_SENTENCES = {
    "taken": (
        "With “{condition}”, the inserted tokens take {inserted} of 100 points of the question's"
        " attention, averaged over all layers and heads ({most} in layer {layer})."
    ),
    "paid": "The change of its attention to what stands before it: {changes}.",
    "causes": (
        "The question's attention to itself changes by {question} points, by cause: {causes}."
    ),
    "not_inserted": (
        "With “{condition}”, the question's attention changes, averaged over all layers and heads,"
        " by: {changes}."
    ),
}


def _with_table(words: PageWords, result: Result, options: Mapping[str, Any]) -> PageWords:
    """What a page says beside the figure, with a table of the conditions, if any are shown."""
    table = page_table(result, options.get("conditions"))
    return replace(words, table=table) if table.rows else words


@declare(NAME, report=[{}], page_words=_with_table)
def attention_budget(result: Result, conditions: Sequence[str] | None = None) -> go.Figure:
    """Plot what the question attends to by layer, and the change of its attention to itself by
    cause.

    Above: the attention of the question's queries in points of 100, stacked by what receives it.
    Below on the left: how much each of these gains or loses over all layers. Below the conditions:
    how the question's attention to its own tokens changes in each layer, and how much of that is
    due to the greater distance to what stands before the inserted tokens, to the attention that
    these take, and to changed hidden states, in this order. Means over heads and prompts; intervals
    are 95 % t intervals over prompts.

    Args:
        result: A result with ``ma.analyses.AttentionBudget()``.
        conditions: Names of conditions; all by default.

    Raises:
        OptionError: The budget was not measured, or there is no such condition.
    """
    dataset = result[NAME]
    names = result.conditions[1:] if conditions is None else list(conditions)
    changed = [result.condition(name) for name in names]

    figure = _panels(changed)
    for column, condition in enumerate([BASELINE, *changed], 1):
        _stack(figure, result, condition, column)
    figure.update_xaxes(title_text="layer", title_standoff=4, **draw.steps(dataset.sizes["layer"]))
    figure.update_yaxes(title_text="question's attention<br>(points of 100)", row=1, col=1)
    figure.update_yaxes(range=[0, 100], row=1)
    height = 400
    if changed:
        _changes(figure, result, changed)
        height = 720

    note = f"mean over heads and {count_words(result)}; error bars: 95 % intervals over prompts"
    one_cause = str(dataset.attrs.get("one_cause", ""))
    if one_cause:
        note += f"; distance and hidden states are one cause, since {one_cause}"
    heading = f"{model_caption(result)}: what the question attends to"
    draw.title_above_legend(figure, heading, note, height, 140)

    # Below the lower panels, with room for several rows in a narrow notebook.
    lower_legend = dict(orientation="h", y=0, yref="container", yanchor="bottom")
    figure.update_layout(
        barmode="relative",
        bargap=0.06,
        legend_traceorder="normal",
        legend2=lower_legend,
        margin_b=120,
    )
    sentences = []
    for condition in changed:
        sentences += budget_sentences(result, condition)
    return says(figure, *sentences)


def _panels(changed: Sequence[str]) -> go.Figure:
    """A panel for the baseline and each condition; below them those of the changes, if any."""
    titles = ["without (baseline)", *(f"with {name}" for name in changed)]
    columns = len(titles)
    if changed:
        titles += ["mean over layers", *(f"question to itself, {name}" for name in changed)]

    letters = _TITLE_LETTERS // columns
    return draw.panels(
        ["<br>".join(wrap(title, letters)) for title in titles],
        rows=len(titles) // columns,
        cols=columns,
        vertical_spacing=0.24,
        horizontal_spacing=0.055,
    )


def _stack(figure: go.Figure, result: Result, condition: str, column: int) -> None:
    """What the question attends to in each layer, one bar a layer."""
    attention = result[NAME].attention.sel(condition=condition)
    for payer in payers(result):
        words = PAYER_WORDS[payer]
        _bars(
            figure,
            by_layer(result, attention, payer),
            attention.layer.values,
            name=words,
            legendgroup=payer,
            marker=dict(color=PAYER_COLOURS[payer], line_width=0),
            hovertemplate=f"layer %{{x}}, {words}: {_HOVER}",
            row=1,
            col=column,
        )


def _bars(figure: go.Figure, interval: Interval, layers: np.ndarray, **style: Any) -> None:
    """A bar for each layer; its interval is shown on hover."""
    figure.add_bar(
        x=layers,
        y=np.nan_to_num(interval.estimate),
        customdata=np.stack([interval.low, interval.high], -1),
        meta=["low", "high"],
        **style,
    )


def _changes(figure: go.Figure, result: Result, conditions: Sequence[str]) -> None:
    """The lower row: the change by payer over all layers, and the causes for each condition."""
    _changes_by_payer(figure, result, conditions)
    for column, condition in enumerate(conditions, 2):
        _causes(figure, result, condition, column)

    # The panels of causes have one range, so that conditions can be compared. Where an axis refers to
    # another, plotly's name for "yaxis7" is "y7".
    first_axis = figure.get_subplot(2, 2).yaxis.plotly_name.replace("axis", "")
    for column in range(3, len(conditions) + 2):
        figure.update_yaxes(matches=first_axis, row=2, col=column)


def _changes_by_payer(figure: go.Figure, result: Result, conditions: Sequence[str]) -> None:
    """The change of what each payer gets over all layers, one mark for each condition."""
    apart = 0.8 / len(conditions)
    middle = (len(conditions) - 1) / 2
    for number, (condition, symbol) in enumerate(zip(conditions, cycle(_SYMBOLS))):
        table = budget_table(result, condition)
        draw.points(
            figure,
            np.arange(len(table)) + apart * (middle - number),
            interval_of(table, "change"),
            condition,
            "#444",
            row=2,
            sideways=True,  # so that the payers' names stand beside each other at any width
            legend=_LOWER_LEGEND,
            marker=dict(size=8, symbol=symbol),
            customdata=table.payer,
            meta=["payer"],
            hovertemplate="%{customdata}: %{x:.2f}<extra></extra>",
        )

    draw.rule(figure, x=0, row=2)

    names = [PAYER_WORDS[payer] for payer in payers(result)]
    figure.update_yaxes(draw.named_ticks(names), row=2, col=1)
    # Not an axis of layers, as all others are.
    figure.update_xaxes(title_text="change (points)", tick0=None, dtick=None, row=2, col=1)


def _causes(figure: go.Figure, result: Result, condition: str, column: int) -> None:
    """The question's change in each layer: a bar for each cause, and a line for their sum."""
    dataset = result[NAME].sel(condition=condition)
    layers = dataset.layer.values
    words = _cause_words(result)
    for cause in known_causes(result, condition):
        _bars(
            figure,
            by_layer(result, dataset.by_cause.sel(cause=cause), "question"),
            layers,
            name=words[cause],
            legend=_LOWER_LEGEND,
            legendgroup=cause,
            marker=dict(color=CAUSE_COLOURS[cause], line_width=0, opacity=0.75),
            hovertemplate=f"layer %{{x}}, {words[cause]}: {_HOVER}",
            row=2,
            col=column,
        )

    draw.points(
        figure,
        layers,
        by_layer(result, dataset.change, "question"),
        "all causes",
        "#000000",
        column=column,
        row=2,
        mode="markers+lines",
        line=dict(width=1),
        marker=dict(size=4),
        legendgroup="total",
        legend=_LOWER_LEGEND,
        hovertemplate="layer %{x}, all causes: %{y:.2f}<extra></extra>",
    )
    draw.rule(figure, y=0, column=column, row=2)


def _cause_words(result: Result) -> dict[str, str]:
    """The causes in words; where positions cannot be moved, distance is one with hidden states."""
    if result[NAME].attrs.get("one_cause"):
        return CAUSE_WORDS | {"hidden states": "distance and hidden states"}
    return CAUSE_WORDS


def page_table(result: Result, conditions: Sequence[str] | None = None) -> PageTable:
    """The budget as a table of words, in points of 100: a row for each condition and payer, a
    column for each cause.

    Args:
        result: A result with the budget.
        conditions: The conditions; all but the baseline by default.
    """
    names = result.conditions[1:] if conditions is None else conditions
    words = _cause_words(result)
    known: set[str] = set()
    for condition in names:
        known.update(known_causes(result, condition))
    causes = [cause for cause in words if cause in known]
    columns = ["condition", "payer", "without", "with", "change (points of 100)"]
    columns += [f"by {words[cause]}" for cause in causes]

    rows = []
    for condition in names:
        for _, budget in budget_table(result, condition).iterrows():
            row = [
                condition,
                PAYER_WORDS[budget.payer],
                _point_words(budget, "baseline", ".1f"),
                _point_words(budget, "value", ".1f"),
            ]
            for change in ("change", *causes):
                row.append(_point_words(budget, change) if change in budget else "–")
            rows.append(row)

    return PageTable("As a table: who pays, and why", columns, rows)


def budget_sentences(result: Result, condition: str) -> list[str]:
    """The budget of a condition in words, the most important first: what the inserted tokens take,
    who pays, and why the question's attention to itself changes.
    """
    table = budget_table(result, condition).set_index("payer")
    question = table.loc["question"]
    takes = "inserted" in table.index and table.change["inserted"] > 0

    # The question's own change has a sentence of its own beside what the inserted tokens take.
    left_out = ("inserted", "question") if takes else ("inserted",)
    changes = [
        f"{PAYER_WORDS[payer]} {_point_words(table.loc[payer], 'change')}"
        for payer in reversed(table.index)
        if payer not in left_out
    ]
    change_words = ", ".join(changes)

    if takes:
        layer = busiest_layer(result, condition)
        layer_budget = budget_table(result, condition, layer).set_index("payer")
        sentences = [
            _SENTENCES["taken"].format(
                condition=condition,
                inserted=_point_words(table.loc["inserted"], "value", ".1f"),
                most=f"{layer_budget.value['inserted']:.1f}",
                layer=layer,
            ),
            _SENTENCES["paid"].format(changes=change_words),
        ]
    else:
        sentences = [_SENTENCES["not_inserted"].format(condition=condition, changes=change_words)]

    cause_words = _cause_words(result)
    causes = [
        f"{cause_words[cause]} {_point_words(question, cause)}"
        for cause in known_causes(result, condition)
    ]
    if causes:
        total = _point_words(question, "change")
        sentences.append(_SENTENCES["causes"].format(question=total, causes=", ".join(causes)))

    return sentences


def own_attention_words(result: Result, condition: str) -> str:
    """Whether the question attends less to itself than without insertion: the change in points over
    all layers, and in the layer where it is largest."""
    layers = result[NAME].layer.values
    changes = result[NAME].change.sel(condition=condition)
    layer_changes = by_layer(result, changes, "question").estimate
    layer = layers[np.abs(layer_changes).argmax()]

    change = budget_table(result, condition).set_index("payer").loc["question"]
    layer_budget = budget_table(result, condition, layer).set_index("payer").loc["question"]

    amount = "similar"
    if np.isnan(change.change_low):
        amount = "unknown"
    elif change.change_low > 0:
        amount = "more"
    elif change.change_high < 0:
        amount = "less"

    return (
        f"{_OWN_ATTENTION[amount]}: {_point_words(change, 'change')} of 100 points over all layers,"
        f" and {_point_words(layer_budget, 'change')} in layer {layer}, the largest change of"
        f" {len(layers)} layers"
    )


def _point_words(budget: pd.Series, name: str, form: str = "+.1f") -> str:
    """A number of points with its interval, which fewer than three prompts lack; with its sign by
    default, as most are changes."""
    return number_words(interval_of(budget, name), form)
