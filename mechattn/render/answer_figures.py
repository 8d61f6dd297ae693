"""Figures of answers: accuracy by condition, option or number of samples, and attention during
right and wrong answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, cycle
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechattn.axes import BASELINE
from mechattn.errors import OptionError
from mechattn.prompts.sweeps import swept_conditions
from mechattn.render import draw
from mechattn.render.change_figures import changes, option_words, swept_lines
from mechattn.render.draw import COLOURS, THIRD, WITH, WITHOUT
from mechattn.render.figure_declaration import declare
from mechattn.render.words import (
    interval_of,
    model_caption,
    number_words,
    quantity_words,
    says,
    sentence_of,
)
from mechattn.results.result import Result
from mechattn.stats.intervals import Interval

if TYPE_CHECKING:
    from mechattn.evaluation.while_answering import WhileAnswering

_HOVER = "%{customdata}: %{y:.1f} %<extra></extra>"


@declare("evaluation")
def accuracy(tables: Mapping[str, pd.DataFrame], over: str = "") -> go.Figure:
    """Plot accuracy with 95 % intervals, one colour per model: by condition, or over the values of
    a swept option.

    By condition, dotted lines mark the baselines. Over an option, each combination of other options
    gives a line with a colour of its own.

    Args:
        tables: The table of ``Evaluation.accuracy()`` for each model, by its name in the figure.
            With ``over``, its conditions must come from ``ma.sweep``.
        over: The swept option on the horizontal axis, such as "count"; by default the conditions
            are there.

    Raises:
        OptionError: There are no tables, or no condition is named after the option.
    """
    conditions = _conditions(tables)
    figure = draw.panels()
    if over:
        _accuracy_over_option(figure, tables, conditions, over)
    else:
        _accuracy_by_condition(figure, tables, conditions)

    figure.update_yaxes(title_text="right answers (%)", rangemode="tozero")
    small_print = f"n = {_count_words(tables.values())}; bars: 95 % intervals"
    draw.title(figure, f"accuracy by {over or 'condition'}", small_print, 460)
    return figure


@declare("evaluation")
def by_samples(tables: Mapping[str, pd.DataFrame], model: str = "") -> go.Figure:
    """Plot pass@k over k, with one colour per condition and one panel per table.

    Args:
        tables: The table of ``Evaluation.pass_at_k([1, 2, …])`` for each panel, by its title.
        model: The model's name in the title.

    Raises:
        OptionError: There are no tables.
    """
    conditions = _conditions(tables)
    figure = draw.panels(list(tables), shared_yaxes=True, horizontal_spacing=0.05)
    for column, table in enumerate(tables.values(), 1):
        answer_counts = sorted(set(table.k))
        series = []
        for condition in conditions:
            rows = table[table.condition == condition]
            series.append((condition, _percents(rows, "k", answer_counts, "estimate")))

        draw.side_by_side(
            figure,
            [str(k) for k in answer_counts],
            series,
            COLOURS,
            column=column,
            spacing=0.1,
            mode="lines+markers",
            hovertemplate="k = %{customdata}: %{y:.1f} %",
        )

    figure.update_xaxes(title_text="answers to each question (k)")
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title_text="probability of a right answer (%)", col=1)

    heading = " and ".join(tables)
    if model:
        heading = f"{model}: {heading}"
    draw.title(figure, heading, "bars: 95 % intervals over problems", 460)
    return figure


@declare("evaluation")
def while_answering(measured: WhileAnswering, to: str = "question") -> go.Figure:
    """Plot the attention of right and of wrong answers to a segment by condition, with 95 %
    intervals over answers.

    Filled marks are right answers, open marks wrong ones. The upright line at each mark is uniform
    attention, which falls with length. The right panel shows right minus wrong in pairs of answers
    of about the same length, beyond the same difference of uniform attention.

    Args:
        measured: The result of ``ma.while_answering``.
        to: The segment of the keys.

    Raises:
        OptionError: There is no such segment, or no condition has answers that attend to it.
    """
    table = measured.table(to)
    table = table.dropna(subset=["right", "wrong"], how="all").reset_index(drop=True)
    if table.empty:
        raise OptionError(f"no condition has a {to} segment, or no answer was written")

    titles = [f"attention to the {to} (%)", "right minus wrong,<br>beyond uniform (points)"]
    figure = draw.panels(titles, shared_yaxes=True, column_widths=[0.6, 0.4])
    _answer_marks(figure, table, "right", "circle", THIRD, -0.12)
    _answer_marks(figure, table, "wrong", "circle-open", WITH, 0.12)
    _pair_marks(figure, table)

    labels = [
        f"{row.condition}<br>{row.right_n} right, {row.wrong_n} wrong" for row in table.itertuples()
    ]
    figure.update_yaxes(draw.named_ticks(labels), autorange="reversed", row=1, col=1)

    heading = f"{measured.model_name}: attention of {measured.queries}"
    small_print = (
        "bars: 95 % over answers, and over pairs of about the same length; upright lines: uniform"
        " attention"
    )
    draw.title_above_legend(figure, heading, small_print, 260 + 60 * len(table), margin_top=150)
    return says(figure, _pair_words(table))


@declare("evaluation")
def dose_curves(
    answers: pd.DataFrame,
    result: Result,
    over: str = "count",
    quantity: str = "received",
    segment: str = "question",
    *,
    layer: int | None = None,
) -> go.Figure:
    """Plot right answers over a swept option, and below them the change of attention, on a shared
    axis.

    Above: accuracy with 95 % intervals over problems. Below: the change of a quantity from the
    baseline with 95 % intervals over prompts. The dotted line is the change under the null, which
    is dilution or uniform attention.

    Args:
        answers: The table of ``Evaluation.accuracy()``, with conditions from ``ma.sweep``.
        result: A run of the same conditions.
        over: The swept option.
        quantity: A positive quantity of the result.
        segment: The segment of the quantity.
        layer: One layer; the mean over all by default.

    Raises:
        OptionError: No condition is named after the option, or the evaluation and the result have
            different conditions.
    """
    evaluated_names = {condition.name for condition in swept_conditions(answers.condition, over)}
    run_names = {condition.name for condition in swept_conditions(result.conditions, over)}
    if evaluated_names != run_names:
        name = min(evaluated_names ^ run_names)
        fault = "run but not evaluated" if name in run_names else "evaluated but not run"
        raise OptionError(f"{name!r} was {fault}; evaluate and run the same conditions")

    titles = ["right answers (%)", f"{quantity_words(quantity, segment)}, change (%)"]
    figure = draw.panels(titles, rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.12)
    accuracy_figure = accuracy({"right answers": answers}, over)
    change_figure = changes(result, quantity=quantity, segment=segment, layer=layer, over=over)

    figure.add_traces(accuracy_figure.data, rows=1, cols=1)
    figure.add_traces(change_figure.data, rows=2, cols=1)
    draw.rule(figure, y=0, row=2, column=1)
    figure.update_xaxes(title_text=option_words(over), row=2, col=1)
    figure.update_yaxes(rangemode="tozero", row=1, col=1)

    small_print = "bars: 95 %, over problems above, over prompts below"
    if any(trace.line.dash == "dot" for trace in change_figure.data):
        small_print += "; dotted: the null"

    heading = f"{model_caption(result)}: answers and attention by {over}"
    draw.title_above_legend(figure, heading, small_print, 640, margin_top=150)
    return says(figure, sentence_of(change_figure))


def _conditions(tables: Mapping[str, pd.DataFrame]) -> list[str]:
    """The conditions of all tables, in the order of their first appearance.

    Raises:
        OptionError: There are no tables, or they have no names.
    """
    if not isinstance(tables, Mapping) or not tables:
        raise OptionError(
            "there are no tables by name; give at least one, such as {model: evaluation.accuracy()}"
        )

    conditions = chain.from_iterable(table.condition for table in tables.values())
    return list(dict.fromkeys(conditions))


def _accuracy_over_option(
    figure: go.Figure, tables: Mapping[str, pd.DataFrame], conditions: Sequence[str], over: str
) -> None:
    """Draw a line for each model and combination of other options, over the values of an option."""
    colours = cycle(COLOURS)
    for model, table in tables.items():
        for line in swept_lines(conditions, over, "accuracy"):
            names = list(line.conditions)
            x = list(line.x)
            if over == "count":  # the baseline is at 0 tokens
                names = [BASELINE, *names]
                x = [0.0, *x]

            draw.points(
                figure,
                x,
                _percents(table, "condition", names, "accuracy"),
                f"{model}{line.suffix}",
                next(colours),
                mode="lines+markers",
                customdata=names,
                hovertemplate=_HOVER,
            )
    figure.update_xaxes(title_text=option_words(over))


def _accuracy_by_condition(
    figure: go.Figure, tables: Mapping[str, pd.DataFrame], conditions: Sequence[str]
) -> None:
    """Draw a point for each model and condition, and a dotted line at the model's baseline."""
    series = [
        (model, _percents(table, "condition", conditions, "accuracy"))
        for model, table in tables.items()
    ]
    draw.side_by_side(figure, conditions, series, COLOURS, hovertemplate=_HOVER)
    for table, colour in zip(tables.values(), cycle(COLOURS)):
        baselines = table.accuracy[table.condition == BASELINE]
        for baseline_accuracy in baselines.dropna():  # at most one
            draw.rule(figure, y=100 * baseline_accuracy, colour=colour, dash="dot")


def _percents(
    table: pd.DataFrame, label_column: str, labels: Sequence[object], estimate_column: str
) -> list[pd.Series]:
    """An estimate and the ends of its interval, in percent, one row for each label.

    Args:
        table: The table, with columns "low" and "high".
        label_column: The column that holds the labels.
        labels: The labels, such as names of conditions; those that the table lacks give NaN.
        estimate_column: The column of the estimate.
    """
    rows = table.set_index(label_column).reindex(labels)
    return [100 * rows[column] for column in (estimate_column, "low", "high")]


def _count_words(tables: Iterable[pd.DataFrame]) -> str:
    """The numbers of problems, or of groups of problems, behind the tables."""
    count_phrases = []
    for table in tables:
        unit = table.attrs.get("unit", "prompts")
        if unit == "prompts":
            unit = "problems"
        count_phrases.append(f"{table.n.iloc[0]} {unit}")
    return " or ".join(dict.fromkeys(count_phrases))


def _answer_marks(
    figure: go.Figure, table: pd.DataFrame, correctness: str, symbol: str, colour: str, shift: float
) -> None:
    """Draw the attention of right or of wrong answers with its interval, and uniform attention."""
    rows = np.arange(len(table)) + shift
    draw.points(
        figure,
        rows,
        100 * np.array(interval_of(table, correctness)),
        f"{correctness} answers",
        colour,
        sideways=True,
        meta=["n", "tokens"],
        marker=dict(symbol=symbol, size=10, line_width=2),
        customdata=table[[f"{correctness}_n", f"{correctness}_tokens"]].values,
        hovertemplate=(
            "%{x:.1f} %<br>%{customdata[0]} answers of %{customdata[1]:.0f} tokens<extra></extra>"
        ),
    )
    figure.add_scatter(
        x=100 * table[f"{correctness}_uniform"],
        y=rows,
        mode="markers",
        name=f"uniform, {correctness}",
        marker=dict(symbol="line-ns-open", color=colour, size=12, line_width=1.5),
        hovertemplate="uniform attention: %{x:.1f} %<extra></extra>",
        row=1,
        col=1,
    )


def _pair_marks(figure: go.Figure, table: pd.DataFrame) -> None:
    """Draw right minus wrong in pairs of about the same length, in the right panel."""
    draw.points(
        figure,
        np.arange(len(table)),
        100 * np.array(interval_of(table, "beyond")),
        "pairs",
        WITHOUT,
        column=2,
        sideways=True,
        marker=dict(size=9),
        meta=["pairs", "p_beyond"],
        customdata=table[["pairs", "p_beyond"]].values,
        hovertemplate=(
            "%{x:+.2f} points<br>%{customdata[0]} pairs, p = %{customdata[1]:.2g}<extra></extra>"
        ),
    )
    draw.rule(figure, x=0, colour="#444", column=2)


def _pair_words(table: pd.DataFrame) -> str:
    """The difference of the pairs in words, condition by condition."""
    phrases = []
    for _, row in table.iterrows():
        if np.isnan(row.beyond):
            phrases.append(f"{row.condition}: {row.pairs} pairs, too few to compare")
            continue
        estimate_and_ends = 100 * np.array(interval_of(row, "beyond"))
        point_words = number_words(Interval(*estimate_and_ends), "+.2f")
        phrases.append(
            f"{row.condition}: {point_words} points in {row.pairs} pairs, p = {row.p_beyond:.2g}"
        )
    return f"Right minus wrong, beyond uniform attention. {'; '.join(phrases)}."
