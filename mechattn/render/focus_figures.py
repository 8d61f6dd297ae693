"""The figure of heads' updates by how much the query attends to the first token."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechattn.analysis.updates import BEFORE_NORM
from mechattn.axes import BASELINE
from mechattn.contrast import focus_and_impact as impact
from mechattn.render import draw
from mechattn.render.draw import WITH, WITHOUT
from mechattn.render.figure_declaration import declare
from mechattn.render.words import count_words, model_caption, number_words, says
from mechattn.results.result import Result
from mechattn.stats.intervals import Interval

# Ranges of the attention to the first token: above, up to, and their words in a sentence.
_RANGES = (
    (0.0, impact.STRONGEST_ABOVE, "at most half"),
    (impact.STRONGEST_ABOVE, 1.0, "more than half"),
    (impact.NEARLY_ALL, 1.0, f"more than {impact.NEARLY_ALL:.2f}"),
)
_CLAIM = "“when attention focuses on the first token, that head has no impact”"
_HOVER = (
    "attention to the first token %{customdata[0]}: mean %{y:.2f} [%{customdata[1]:.2f}, "
    "%{customdata[2]:.2f}], median %{customdata[3]:.2f}, quartiles %{customdata[4]:.2f} and "
    "%{customdata[5]:.2f}<extra></extra>"
)


@declare("head_updates")
def focus_and_impact(
    result: Result, condition: str = BASELINE, segment: str = "question"
) -> go.Figure:
    """Plot the size of heads' updates by how much attention the query gives to the first token.

    Each group of layers has a panel. Above is the size of updates divided by the mean of their
    layer (1 at the line): the median over queries and heads with a band between the quartiles, and
    the mean with its 95 % interval over prompts. A head without impact would be at 0. Below is the
    share of queries in each bin.

    Args:
        result: A result with ``AttentionFocus(per_query=True)`` and
            ``HeadUpdates(per_query=True)``, measured in one run with ``keep="prompts"``.
        condition: The condition.
        segment: The segment of the queries.

    Raises:
        OptionError: Focus and updates were not measured for each query and kept for each prompt, or
            there is no such condition or segment.

    Source:
        The claim in the title is that of R. Claus, "Attention Focus Plots".
    """
    table = impact.focus_and_impact(result, condition, segment)
    titles = table.layers.unique().tolist()
    figure = draw.panels(
        titles,
        rows=2,
        row_heights=[0.76, 0.24],
        vertical_spacing=0.05,
        horizontal_spacing=0.04,
        shared_xaxes=True,
        shared_yaxes=True,
    )

    colour = WITHOUT if condition == BASELINE else WITH
    for column, title in enumerate(titles, 1):
        rows = table[table.layers == title]
        _impact(figure, rows, colour, column)
        draw.rule(figure, y=1, column=column)
        draw.rule(figure, y=0, dash="dot", width=1.5, column=column)
        _share_of_queries(figure, rows, column)

    figure.update_yaxes(title_text="update / mean<br>of the layer", row=1, col=1)
    figure.update_yaxes(title_text="% of<br>queries", row=2, col=1)
    figure.update_yaxes(rangemode="tozero")
    middle = (len(titles) + 1) // 2
    figure.update_xaxes(title_text="attention of the query to the first token", row=2, col=middle)
    small_print = (
        f"the claim: {_CLAIM} (dotted). {condition}, {segment} queries, n = {count_words(result)}; "
        "line and band: median and quartiles; points: means, 95 % intervals"
    )
    if f"magnitude{BEFORE_NORM}" in result["head_updates"]:
        small_print += "; after the norm that follows attention"
    heading = f"{model_caption(result)}: what heads write where they look at the first token"
    draw.title_above_legend(figure, heading, small_print, 580, margin_top=110)
    figure.update_layout(showlegend=False, bargap=0.15)
    return says(figure, _measured_answer(result, condition, segment))


def _impact(figure: go.Figure, rows: pd.DataFrame, colour: str, column: int) -> None:
    """Draw the median with its quartiles and the mean with its interval, for bins with queries."""
    has_queries = (rows.queries > 0).to_numpy()
    x = np.flatnonzero(has_queries)
    bins = rows[has_queries]
    bin_words = np.array(_bin_words(bins), dtype=object)
    draw.line_and_band(
        figure,
        x,
        Interval(bins["median"], bins.quartile_low.to_numpy(), bins.quartile_high.to_numpy()),
        None,
        colour,
        column=column,
        hoverinfo="skip",
    )

    hover_columns = ["low", "high", "median", "quartile_low", "quartile_high"]
    hover_numbers = bins[hover_columns].to_numpy(dtype=object)
    draw.points(
        figure,
        x,
        Interval(bins["mean"], bins.low, bins.high),
        "mean",
        colour,
        column,
        customdata=np.column_stack([bin_words, hover_numbers]),
        meta=["bin", *hover_columns],
        hovertemplate=_HOVER,
    )


def _bin_words(rows: pd.DataFrame) -> list[str]:
    """The attention of each bin, such as "0.5–0.9"."""
    bounds = zip(rows.above, rows.up_to, strict=True)
    return [f"{above:g}–{up_to:g}" for above, up_to in bounds]


def _share_of_queries(figure: go.Figure, rows: pd.DataFrame, column: int) -> None:
    """Draw the share of queries in each bin of attention as a bar."""
    bin_words = _bin_words(rows)
    figure.add_bar(
        x=np.arange(len(rows)),
        y=100 * rows.share,
        marker_color=draw.GREY,
        customdata=np.column_stack([bin_words, rows.queries]),
        meta=["bin", "queries"],
        hovertemplate="%{customdata[0]}: %{customdata[1]:,} queries, %{y:.1f} %<extra></extra>",
        row=2,
        col=column,
    )
    figure.update_xaxes(draw.named_ticks(bin_words), tickangle=-90, row=2, col=column)


def _measured_answer(result: Result, condition: str, segment: str) -> str:
    """What this result shows about the claim, in words."""
    phrases = []
    for above, up_to, range_words in _RANGES:
        update_size, share = impact.impact_within(result, above, up_to, condition, segment)
        if np.isnan(update_size.estimate):
            phrases.append(f"nowhere {range_words}")
            continue
        share_words = f"{100 * share:.3g}\u00a0% of the queries"
        phrases.append(f"{number_words(update_size)} where it holds {range_words} ({share_words})")

    layer_words = "all layers"
    if result["head_updates"].layer.max() >= impact.EARLY_LAYERS:
        layer_words = f"layers from {impact.EARLY_LAYERS} on"
    return (
        f"Updates over the mean of their layer, by the attention that {segment} queries give to the"
        f" first token ({layer_words}): {'; '.join(phrases)}. No impact would be 0."
    )
