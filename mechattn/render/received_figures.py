"""Figures of received attention with and without inserted tokens, by original token and over the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np

from mechattn.axes import BASELINE
from mechattn.contrast.means import Positions, at_positions, choose_heads, uniform_at_positions
from mechattn.contrast.quantities import check_layer
from mechattn.errors import OptionError
from mechattn.render import draw
from mechattn.render.declared import figure as declare
from mechattn.render.theme import SHADE, WITH, WITHOUT, faint, headed, model_caption
from mechattn.render.words import change_words, count_words, mean_words, percent, percent_words, says
from mechattn.results.result import Result
from mechattn.results.result_units import units_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from mechattn.stats.comparison import Verdict

NAME = "received_attention"


@declare(NAME, report=[{}])
def received_attention(
    result: Result,
    layer: int,
    heads: Seq[int] | None = None,
    condition: str | None = None,
    *,
    choose: int | None = None,
    one_based: bool = False,
) -> go.Figure:
    """Plot received attention of some heads without (blue) and with (orange) the inserted tokens.

    The top row shows the original tokens, aligned; the bottom row the whole sequence with the inserted span shaded.
    Dotted lines are uniform attention, since part of the fall is there by definition. A result with only the baseline
    gives one row with its null. Lines are means over prompts and bands pointwise 95 % t intervals. A key is hidden if
    fewer than half of the prompts, or fewer than 10 of them (all, below 10 prompts), have it.

    Args:
        result: A result with received attention.
        layer: The layer, from 0.
        heads: The heads, from 0.
        choose: In place of heads: the number of heads to choose by the largest change (in the baseline: the largest
            distance) from the null on one half of the prompts. The figure then shows the other half; the run must have
            used ``positions="prompts"``.
        condition: The condition in orange; by default the first that isn't the baseline, where there is one.
        one_based: Count layers and heads from 1 in the titles, as the paper does.

    Raises:
        OptionError: There is no such layer, head or condition, or heads cannot be chosen.
    """
    dataset = result[NAME]
    condition = result.shown_condition(condition)
    check_layer(layer, dataset)
    heads, choose = listed_or_chosen(heads, choose)
    shown, how = np.arange(dataset.sizes["prompt"]), "chosen by hand"
    if choose is not None:
        chosen, shown = units_of(result, len(shown)).halves()
        heads, how = choose_heads(result, layer, choose, condition, chosen), "chosen on the other half of the prompts"
    check_heads(heads, dataset.sizes["head"])
    alone = condition == BASELINE
    rows = [(1, "received_by_origin", BASELINE)]
    rows += [] if alone else [(1, "received_by_origin", condition), (2, "received", condition)]
    titles = [f"Layer {layer + one_based} head {head + one_based}" for head in heads]
    titles += [] if alone else [""] * len(heads)
    figure = draw.panels(titles, rows[-1][0], vertical_spacing=0.16, horizontal_spacing=0.06)
    span = _inserted_span(result, condition)
    where = "" if span or alone else "; inserted at positions that differ between prompts"
    for column, head in enumerate(heads, 1):
        for row, quantity, name in rows:
            label = "baseline" if alone else f"{'w/o' if name == BASELINE else 'w/'} {condition}"
            colour, legend = WITHOUT if name == BASELINE else WITH, (row, column) == (1, 1)
            at: dict[str, object] = {"condition": name, "layer": layer}
            found = at_positions(dataset, quantity, at | {"head": head}, shown)
            line_and_band(figure, found, label, colour, row, column, legend)
            null = uniform_at_positions(dataset, quantity, at, shown)[found.at]
            style = dict(legendgroup=f"uniform, {label}", hovertemplate="%{y:.4f}", showlegend=legend)
            draw.dotted(figure, found.at, null, f"uniform, {label}", colour, column=column, row=row, **style)
    _label(figure, len(heads), rows[-1][0], span, condition)
    over = f"mean over {len(shown)} prompts, pointwise 95 % bands{band_words(result)}"
    over += f"; dotted: uniform attention; heads {how}{where}"
    figure.update_layout(title_text=f"{model_caption(result)}: received attention<br><sup>{over}</sup>")
    return says(figure, _in_words(result, condition, layer, heads, shown, one_based))


def _in_words(result: Result, condition: str, layer: int, heads: Seq[int], prompts: np.ndarray, one_based: bool) -> str:
    """The sentence under the figure; empty if there is no change to report."""
    which = f"layer {layer + one_based} heads {', '.join(str(head + one_based) for head in heads)}"
    of = f"Attention received by the question's tokens in {which}"
    if condition == BASELINE:
        at = result[NAME].sel(condition=BASELINE, layer=layer, segment="question").isel(prompt=prompts)
        mean = mean_words(result, at.received_by_segment.sel(head=list(heads)))
        uniform = float(at.received_by_segment_uniform.mean())
        return f"{of}: {mean}, {len(prompts)} prompts; uniform attention would give {uniform:.3g}."
    change = change_words(result, condition, layer=layer, heads=heads, prompts=prompts)
    return f"{of} with “{condition}”: {change}, {len(prompts)} prompts." if change else ""


def _label(figure: go.Figure, columns: int, rows: int, span: tuple[int, int] | None, words: str) -> None:
    """Set axes and legend, and shade the inserted span."""
    for column in range(1, columns + 1):
        if span is not None:
            figure.add_vrect(
                span[0] - 0.5, span[1] + 0.5, row=2, col=column, fillcolor=SHADE, line_width=0, layer="below",
                annotation_text=words, annotation_position="top", annotation_font_size=11,
            )  # fmt: skip
        figure.update_xaxes(title_text="original token position", row=1, col=column)
        if rows > 1:
            figure.update_xaxes(title_text="position in the sequence", row=2, col=column)
    figure.update_yaxes(title_text="average attention weight<br>(probability)", col=1)
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(**headed(125, 640 if rows > 1 else 400), hovermode="x unified")


def verdict_words(
    result: Result, condition: str | None = None, segment: str = "question", control: str | None = None
) -> str:
    """State the change of a segment's received attention and its uniform null in one sentence.

    Args:
        result: A result with received attention.
        condition: The condition; the first that isn't the baseline by default.
        segment: The segment that receives attention.
        control: A condition to compare with, such as a random sentence of equal length.

    Raises:
        OptionError: There is no such condition or segment, or there are fewer than 3 prompts.
    """
    condition = result.condition(condition)
    of_control = None if control is None else result.verdict(control, segment)
    verdict = result.verdict(condition, segment)
    return stated(result, condition, verdict, segment, control, of_control)


def stated(
    result: Result, condition: str, verdict: Verdict, segment: str, control: str | None, of_control: Verdict | None
) -> str:
    """The sentence of a verdict, beside that of a control."""
    beside, sizes = "", result[NAME].sizes
    if of_control is not None:
        beside = f", {percent_words(of_control.change)} with the matched control “{control}”"
    beyond, above = int(verdict.beyond.sum()), int(verdict.above.sum())
    return (
        f"{segment.capitalize()} attention {percent_words(verdict.change)} with “{condition}”{beside}; under uniform "
        f"attention {percent(verdict.null.estimate)}. Mean over {sizes['layer']} layers × {sizes['head']} heads, "
        f"{count_words(result)}; {beyond} of {verdict.beyond.size} heads are below the uniform null, {above} above it "
        "(q < 0.05)."
    )


def listed_or_chosen(heads: Seq[int] | None, choose: int | None) -> tuple[list[int], int | None]:
    """The named heads, or the number of heads to choose."""
    if (heads is None) == (choose is None):
        raise OptionError(f"heads={heads!r}, choose={choose!r}: give one of the two, such as heads=[0, 3] or choose=3")
    if choose is not None:
        if isinstance(choose, bool) or not isinstance(choose, int) or choose < 1:
            raise OptionError(f"choose={choose!r}: give a number of heads, at least 1")
        return [], choose
    if not isinstance(heads, (list, tuple, range, np.ndarray)):
        raise OptionError(f"heads={heads!r}: give a list, such as [0, 3], or choose=… for a number of heads")
    return list(heads), None


def check_heads(heads: Seq[int], count: int) -> None:
    """Refuse heads that a layer doesn't have."""
    for head in heads:
        if isinstance(head, bool) or not isinstance(head, (int, np.integer)):
            raise OptionError(f"heads holds {head!r}; give whole numbers, from 0, such as heads=[0, 3]")
        if not 0 <= head < count:
            raise OptionError(f"head {head} is out of range: heads are 0 to {count - 1}")
    if not len(heads):
        raise OptionError("heads=[] is empty; give at least one head")
    if len(set(heads)) < len(heads):
        raise OptionError(f"heads={list(heads)} names a head twice")


def line_and_band(
    figure: go.Figure, found: Positions, name: str, colour: str, row: int, column: int, legend: bool
) -> None:
    """The mean over prompts and its band."""
    common = dict(legendgroup=name, mode="lines", x=found.at, row=row, col=column)
    edges = dict(line=dict(width=0), hoverinfo="skip", showlegend=False)
    if np.isfinite(found.low).any():
        figure.add_scatter(y=found.low, name=f"{name}, low", **common, **edges)
        filled = dict(fill="tonexty", fillcolor=faint(colour))
        figure.add_scatter(y=found.high, name=f"{name}, high", **common, **edges, **filled)
    figure.add_scatter(
        y=found.mean, name=name, showlegend=legend, line=dict(color=colour, width=1.6), customdata=found.n, meta=["n"],
        hovertemplate="%{y:.4f} (n = %{customdata})", **common,
    )  # fmt: skip


def band_words(result: Result) -> str:
    """A note on the bands at positions: they are from moments over prompts, which ignore groups."""
    alone = units_of(result, result["sequences"].sizes["prompt"]).of is None
    return "" if alone else ", which treat prompts as independent"


def _inserted_span(result: Result, condition: str) -> tuple[int, int] | None:
    """The first and last inserted position, if these are the same in all prompts."""
    origin = result["sequences"].origin.sel(condition=condition).values
    inserted = origin == -1
    if not inserted.any() or (inserted != inserted[0]).any():
        return None
    where = np.flatnonzero(inserted[0])
    return int(where[0]), int(where[-1])
