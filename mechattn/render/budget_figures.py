"""The figure of the attention budget: what the question attends to in each layer, and why its
attention to itself changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
    known_causes,
    payer_by_layer,
    payers,
)
from mechattn.render import draw
from mechattn.render.draw import WITH, WITHOUT
from mechattn.render.figure_declaration import (
    PageTable,
    PageWords,
    declare,
    listed_conditions,
)
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
# Symbols of conditions, since colours stand for payers and causes.
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
_TITLE_LETTERS = 70  # the number of letters that fit above all panels of a row
_HOVER = "%{y:.2f} [%{customdata[0]:.2f}, %{customdata[1]:.2f}]<extra></extra>"
_LOWER_LEGEND = "legend2"  # the legend of the lower panels
_OWN_ATTENTION = {
    "more": "more to itself than without insertion",
    "less": "less to itself than without insertion",
    "similar": "about as much to itself as without insertion",
    "unknown": "to itself as follows, compared with no insertion",  # fewer than three prompts
}
_SENTENCES = {
    "taken": (
        "With “{condition}”, the inserted tokens take {inserted} of 100 points of the question's"
        " attention, averaged over all layers and heads ({in_layer} in layer {layer}, where"
        " attention moves most)."
    ),
    "paid": "The change of its attention to the tokens before it: {changes}.",
    "causes": (
        "The question's attention to itself changes by {question} points, by cause: {causes}."
    ),
    "no_causes": "The question's attention to itself changes by {question} points.",
    "not_inserted": (
        "With “{condition}”, the question's attention changes, averaged over all layers and heads,"
        " by: {changes}."
    ),
}


def _with_table(words: PageWords, result: Result, options: Mapping[str, Any]) -> PageWords:
    """The words of a page beside the figure, with a table if there are conditions to show."""
    changed_conditions = _changed_conditions(result, options.get("conditions"))
    if not changed_conditions:
        return words
    return replace(words, table=page_table(result, changed_conditions))


@declare(NAME, report=[{}], add_words=_with_table)
def attention_budget(result: Result, conditions: Sequence[str] | None = None) -> go.Figure:
    """Plot what the question attends to by layer, and the change of its attention to itself by
    cause.

    Above: the attention of the question's queries in points of 100, stacked by the segment that
    receives it. Below on the left: how much each segment gains or loses over all layers. Below each
    condition: how the question's attention to its own tokens changes in each layer, and how much of
    this is due to three causes in turn: the greater distance to the tokens before the inserted
    ones, the attention that the inserted tokens take, and changed hidden states. Values are means
    over heads and prompts, with 95 % t intervals over prompts.

    Args:
        result: A result with ``ma.analyses.AttentionBudget()``.
        conditions: The conditions besides the baseline; all by default.

    Raises:
        OptionError: The budget was not measured, or there is no such condition.
    """
    dataset = result[NAME]
    changed_conditions = _changed_conditions(result, conditions)

    figure = _panels(changed_conditions)
    for column, condition in enumerate([BASELINE, *changed_conditions], 1):
        _stack(figure, result, condition, column)
    figure.update_xaxes(
        title_text="layer", title_standoff=4, **draw.numbered_ticks(dataset.sizes["layer"])
    )
    figure.update_yaxes(title_text="question's attention<br>(points of 100)", row=1, col=1)
    figure.update_yaxes(range=[0, 100], row=1)
    height = 400  # with one row of panels
    if changed_conditions:
        _changes(figure, result, changed_conditions)
        height = 720  # with two

    small_print = (
        f"mean over heads and {count_words(result)}; error bars: 95 % intervals over prompts"
    )
    one_cause = str(dataset.attrs.get("one_cause", ""))
    if one_cause:
        small_print += f"; distance and hidden states are one cause, since {one_cause}"
    heading = f"{model_caption(result)}: what the question attends to"
    draw.title_above_legend(figure, heading, small_print, height, margin_top=140)

    # The second legend is below the panels, with room for several rows in a narrow notebook.
    lower_legend = dict(orientation="h", y=0, yref="container", yanchor="bottom")
    figure.update_layout(
        barmode="relative",
        bargap=0.06,
        legend_traceorder="normal",
        legend2=lower_legend,
        margin_b=120,
    )
    sentences = []
    for condition in changed_conditions:
        sentences += budget_sentences(result, condition)
    return says(figure, *sentences)


def page_table(result: Result, conditions: Sequence[str]) -> PageTable:
    """The budget as a table of words, in points of 100.

    Args:
        result: A result with the budget.
        conditions: Conditions other than the baseline.

    Returns:
        A row for each condition and payer; a column for each cause that is known in any of them.
    """
    cause_words = _cause_words(result)
    causes_of_any: set[str] = set()
    for condition in conditions:
        causes_of_any.update(known_causes(result, condition))
    causes = [cause for cause in cause_words if cause in causes_of_any]
    header = ["condition", "payer", "without", "with", "change (points of 100)"]
    header += [f"by {cause_words[cause]}" for cause in causes]

    rows = []
    for condition in conditions:
        for _, budget in budget_table(result, condition).iterrows():
            cells = [
                condition,
                PAYER_WORDS[budget.payer],
                _point_words(budget, "baseline", ".1f"),
                _point_words(budget, "value", ".1f"),
            ]
            for column in ("change", *causes):
                # A cause may be known in other conditions only.
                cells.append(_point_words(budget, column) if column in budget else "–")
            rows.append(cells)

    return PageTable("As a table: who pays, and why", header, rows)


def budget_sentences(result: Result, condition: str) -> list[str]:
    """The budget of a condition in words.

    The sentences say what the inserted tokens take, with the layer in which attention moves most,
    then who pays, then how the question's attention to itself changes, and by which causes if these
    are known. If nothing is inserted, one sentence gives all changes instead of the first two.
    """
    table = budget_table(result, condition).set_index("payer")
    own_budget = table.loc["question"]
    has_insertion = "inserted" in table.index and table.change["inserted"] > 0

    # With an insertion, the question's own change has a sentence of its own.
    left_out = ("inserted", "question") if has_insertion else ("inserted",)
    payer_changes = [
        f"{PAYER_WORDS[payer]} {_point_words(table.loc[payer], 'change')}"
        for payer in reversed(table.index)
        if payer not in left_out
    ]
    change_words = ", ".join(payer_changes)

    if has_insertion:
        layer = busiest_layer(result, condition)
        layer_budget = budget_table(result, condition, layer).set_index("payer")
        sentences = [
            _SENTENCES["taken"].format(
                condition=condition,
                inserted=_point_words(table.loc["inserted"], "value", ".1f"),
                in_layer=f"{layer_budget.value['inserted']:.1f}",
                layer=layer,
            ),
            _SENTENCES["paid"].format(changes=change_words),
        ]
    else:
        sentences = [_SENTENCES["not_inserted"].format(condition=condition, changes=change_words)]

    cause_words = _cause_words(result)
    cause_changes = [
        f"{cause_words[cause]} {_point_words(own_budget, cause)}"
        for cause in known_causes(result, condition)
    ]
    own_change = _point_words(own_budget, "change")
    if cause_changes:
        causes = ", ".join(cause_changes)
        sentences.append(_SENTENCES["causes"].format(question=own_change, causes=causes))
    elif has_insertion:
        sentences.append(_SENTENCES["no_causes"].format(question=own_change))

    return sentences


def own_attention_words(result: Result, condition: str) -> str:
    """How the question's attention to itself changes, as the end of the sentence "The question
    attends …".

    It says whether the attention rises or falls over all layers, by how many points, and by how
    many in the layer with the largest change.
    """
    layers = result[NAME].layer.values
    changes = result[NAME].change.sel(condition=condition)
    layer_changes = payer_by_layer(result, changes, "question").estimate
    layer = layers[np.abs(layer_changes).argmax()]

    budget = budget_table(result, condition).set_index("payer").loc["question"]
    layer_budget = budget_table(result, condition, layer).set_index("payer").loc["question"]

    if np.isnan(budget.change_low):
        direction = "unknown"
    elif budget.change_low > 0:
        direction = "more"
    elif budget.change_high < 0:
        direction = "less"
    else:
        direction = "similar"

    return (
        f"{_OWN_ATTENTION[direction]}: {_point_words(budget, 'change')} of 100 points over all"
        f" layers, and {_point_words(layer_budget, 'change')} in layer {layer}, the largest change"
        f" of {len(layers)} layers"
    )


def _changed_conditions(result: Result, conditions: Sequence[str] | None) -> list[str]:
    """The listed conditions without the baseline, which is always shown; by default all."""
    return [name for name in listed_conditions(result, conditions) if name != BASELINE]


def _panels(conditions: Sequence[str]) -> go.Figure:
    """Empty panels: one for the baseline and each condition, and below them the changes."""
    titles = ["without (baseline)", *(f"with {name}" for name in conditions)]
    columns = len(titles)
    if conditions:
        titles += ["mean over layers", *(f"question to itself, {name}" for name in conditions)]

    letters = _TITLE_LETTERS // columns
    return draw.panels(
        ["<br>".join(wrap(title, letters)) for title in titles],
        rows=len(titles) // columns,
        cols=columns,
        vertical_spacing=0.24,
        horizontal_spacing=0.055,
    )


def _stack(figure: go.Figure, result: Result, condition: str, column: int) -> None:
    """Draw what the question attends to in a condition, as one stacked bar per layer."""
    attention = result[NAME].attention.sel(condition=condition)
    for payer in payers(result):
        words = PAYER_WORDS[payer]
        _bars(
            figure,
            payer_by_layer(result, attention, payer),
            attention.layer.values,
            name=words,
            legendgroup=payer,
            marker=dict(color=PAYER_COLOURS[payer], line_width=0),
            hovertemplate=f"layer %{{x}}, {words}: {_HOVER}",
            row=1,
            col=column,
        )


def _bars(figure: go.Figure, interval: Interval, layers: np.ndarray, **style: Any) -> None:
    """Draw one bar per layer; its interval is shown on hover."""
    figure.add_bar(
        x=layers,
        y=interval.estimate,
        customdata=np.stack([interval.low, interval.high], -1),
        meta=["low", "high"],
        **style,
    )


def _changes(figure: go.Figure, result: Result, conditions: Sequence[str]) -> None:
    """Draw the lower row: the change of what each payer gets over all layers, one mark per
    condition, and the causes for each condition."""
    spacing = 0.8 / len(conditions)  # payers are 1 apart
    middle_index = (len(conditions) - 1) / 2
    for index, condition in enumerate(conditions):
        table = budget_table(result, condition)
        draw.points(
            figure,
            np.arange(len(table)) + spacing * (middle_index - index),
            interval_of(table, "change"),
            condition,
            "#444",
            row=2,
            sideways=True,  # the payers' names, one above the other, fit at any width
            legend=_LOWER_LEGEND,
            marker=dict(size=8, symbol=_SYMBOLS[index % len(_SYMBOLS)]),
            customdata=table.payer,
            meta=["payer"],
            hovertemplate="%{customdata}: %{x:.2f}<extra></extra>",
        )

    draw.rule(figure, x=0, row=2)

    names = [PAYER_WORDS[payer] for payer in payers(result)]
    figure.update_yaxes(draw.named_ticks(names), row=2, col=1)
    # This is the only axis without layers, so it does not have their ticks.
    figure.update_xaxes(title_text="change (points)", tick0=None, dtick=None, row=2, col=1)

    for column, condition in enumerate(conditions, 2):
        _causes(figure, result, condition, column)

    # The panels of causes have one range, so that conditions can be compared. Plotly refers to
    # "yaxis7" as "y7".
    first_axis = figure.get_subplot(2, 2).yaxis.plotly_name.replace("axis", "")
    for column in range(3, len(conditions) + 2):
        figure.update_yaxes(matches=first_axis, row=2, col=column)


def _causes(figure: go.Figure, result: Result, condition: str, column: int) -> None:
    """Draw the change of the question's attention to itself in each layer: a bar for each cause,
    and a line for their sum."""
    dataset = result[NAME].sel(condition=condition)
    layers = dataset.layer.values
    cause_words = _cause_words(result)
    for cause in known_causes(result, condition):
        words = cause_words[cause]
        _bars(
            figure,
            payer_by_layer(result, dataset.by_cause.sel(cause=cause), "question"),
            layers,
            name=words,
            legend=_LOWER_LEGEND,
            legendgroup=cause,
            marker=dict(color=CAUSE_COLOURS[cause], line_width=0, opacity=0.75),
            hovertemplate=f"layer %{{x}}, {words}: {_HOVER}",
            row=2,
            col=column,
        )

    draw.points(
        figure,
        layers,
        payer_by_layer(result, dataset.change, "question"),
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
    """The words for each cause. Hidden states include distance if positions cannot be moved."""
    if result[NAME].attrs.get("one_cause"):
        return CAUSE_WORDS | {"hidden states": "distance and hidden states"}
    return CAUSE_WORDS


def _point_words(budget: pd.Series, name: str, form: str = "+.1f") -> str:
    """A number of points with its interval, if there are at least three prompts.

    By default it has a sign, since most are changes.
    """
    return number_words(interval_of(budget, name), form)
