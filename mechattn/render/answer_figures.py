"""Attention and answers: attention while right and wrong answers are written; attention and accuracy over a dose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from mechattn.errors import OptionError
from mechattn.render import draw
from mechattn.render.accuracy_figures import accuracy_sweep
from mechattn.render.change_figures import sweep
from mechattn.render.declared import figure as declare
from mechattn.render.plain_names import with_plain_names
from mechattn.render.theme import THIRD, WITH, WITHOUT, model_caption, quantity_words
from mechattn.render.words import said as said_by
from mechattn.render.words import says

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from mechattn.evaluation.while_answering import WhileAnswering
    from mechattn.results.result import Result
    from mechattn.stats.trend import Trend


@declare("evaluation")
def while_answering(measured: WhileAnswering, to: str = "question") -> go.Figure:
    """Plot the attention of right and of wrong answers to a segment by condition, with 95 % intervals over answers.

    Filled marks are right answers, open marks wrong ones. The line at each mark is uniform attention, which falls with
    length. The right panel compares pairs of answers of about the same length, minus the null.

    Args:
        measured: The result of ``ma.while_answering``.
        to: The segment of the keys.
    """
    table = measured.table(to).dropna(subset=["right", "wrong"], how="all").reset_index(drop=True)
    if table.empty:
        raise OptionError(f"no condition has a {to} segment, or no answer was written")
    titles = [f"attention to the {to} (%)", "right minus wrong, beyond uniform (points)"]
    figure = draw.panels(titles, shared_yaxes=True, column_widths=[0.6, 0.4])
    places = np.arange(len(table))
    for said, symbol, colour, away in (("right", "circle", THIRD, -0.12), ("wrong", "circle-open", WITH, 0.12)):
        *shown, null = (100 * table[f"{said}{end}"] for end in ("", "_low", "_high", "_uniform"))
        draw.points(
            figure, places + away, shown, f"{said} answers", colour, column=1, sideways=True, meta=["n", "tokens"],
            marker=dict(symbol=symbol, size=10, line_width=2), customdata=table[[f"{said}_n", f"{said}_tokens"]].values,
            hovertemplate="%{x:.1f} %<br>%{customdata[0]} answers of %{customdata[1]:.0f} tokens<extra></extra>",
        )  # fmt: skip
        figure.add_scatter(
            x=null, y=places + away, mode="markers", name=f"uniform, {said}",
            marker=dict(symbol="line-ns-open", color=colour, size=12, line_width=1.5),
            hovertemplate="uniform attention: %{x:.1f} %<extra></extra>", row=1, col=1,
        )  # fmt: skip
    beyond = [100 * table[name] for name in ("beyond", "beyond_low", "beyond_high")]
    draw.points(
        figure, places, beyond, "pairs", WITHOUT, column=2, sideways=True, marker=dict(size=9), meta=["pairs", "p"],
        customdata=table[["pairs", "p"]].values,
        hovertemplate="%{x:+.2f} points<br>%{customdata[0]} pairs, p = %{customdata[1]:.2g}<extra></extra>",
    )  # fmt: skip
    figure.add_vline(0, line=dict(width=1, color="#444"), row=1, col=2)
    labels = [f"{row.condition}<br>{row.right_n} right, {row.wrong_n} wrong" for row in table.itertuples()]
    figure.update_yaxes(tickvals=list(places), ticktext=labels, autorange="reversed", row=1, col=1)
    note = "bars: 95 % over answers, and over pairs of the same length; upright lines: uniform attention"
    draw.title(figure, f"{measured.about}: attention of {measured.queries}", note, 260 + 60 * len(table), top=150)
    return says(with_plain_names(figure), _said(table))


def _said(table: pd.DataFrame) -> str:
    """The result of the pairs, condition by condition."""
    parts = []
    for row in table.itertuples():
        if np.isnan(row.beyond):
            parts.append(f"{row.condition}: {row.pairs} pairs, too few to compare")
        else:
            parts.append(
                f"{row.condition}: {100 * row.beyond:+.2f} points [{100 * row.beyond_low:+.2f}, "
                f"{100 * row.beyond_high:+.2f}] in {row.pairs} pairs, p = {row.p:.2g}"
            )
    return f"Right minus wrong, beyond uniform attention. {'; '.join(parts)}."


@declare("evaluation")
def dose_curves(
    accuracy: pd.DataFrame,
    result: Result,
    option: str = "count",
    quantity: str = "received",
    segment: str = "question",
    *,
    layer: int | None = None,
    trends: Mapping[str, Trend] | None = None,
) -> go.Figure:
    """Plot right answers over a swept option, and below them the change of attention, on a shared axis.

    Above: accuracy with 95 % intervals over problems. Below: the change of a quantity from the baseline with 95 %
    intervals over prompts, dotted: that of uniform attention.

    Args:
        accuracy: The table of ``Evaluation.accuracy()``, with conditions from ``ma.sweep``.
        result: A run of the same conditions.
        option: The swept option.
        quantity: A positive quantity of the result.
        segment: The segment of the quantity.
        layer: One layer; the mean over all by default.
        trends: Results of ``ma.trend`` by their description; stated in the caption.

    Raises:
        OptionError: No condition is named after the option, or the evaluation and the result have different conditions.
    """
    ours, theirs = ({n for n in names if f"{option}=" in n} for names in (accuracy.condition, result.conditions))
    if ours != theirs:
        apart = sorted(ours ^ theirs)[0]
        raise OptionError(f"{apart!r} was {'run' if apart in theirs else 'evaluated'} but not the other; give both")
    titles = ["right answers (%)", f"{quantity_words(quantity, segment)}, change (%)"]
    figure = draw.panels(titles, 2, shared_xaxes=True, vertical_spacing=0.12)
    upper = accuracy_sweep({"right answers": accuracy}, option)
    lower = sweep(result, option, quantity, segment, layer)
    for row, drawn in ((1, upper), (2, lower)):
        for trace in drawn.data:
            figure.add_trace(trace, row=row, col=1)
    draw.zero(figure, row=2, col=1)
    figure.update_xaxes(title_text=lower.layout.xaxis.title.text, row=2, col=1)
    figure.update_yaxes(rangemode="tozero", row=1, col=1)
    note = "bars: 95 %, over problems above, over prompts below; dotted: uniform attention"
    draw.title(figure, f"{model_caption(result)}: answers and attention by {option}", note, 640, top=150)
    said = [
        f"{what}: ρ = {t.rho:+.2f} [{t.low:+.2f}, {t.high:+.2f}], p = {t.p:.2g}" for what, t in (trends or {}).items()
    ]
    return says(with_plain_names(figure), f"Trends within prompts. {'; '.join(said)}." if said else "", said_by(lower))
