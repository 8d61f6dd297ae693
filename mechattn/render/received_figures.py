"""Figures of received attention by position: without and with inserted tokens, across models, across layers."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mechattn.axes import BASELINE
from mechattn.contrast.means import at_positions, choose_heads, uniform_at_positions
from mechattn.contrast.quantities import check_layer
from mechattn.errors import OptionError
from mechattn.render import draw
from mechattn.render.declared import check_heads, listed_or_chosen
from mechattn.render.declared import figure as declare
from mechattn.render.draw import SHADE, THIRD, WITH, WITHOUT
from mechattn.render.words import (
    band_words,
    change_words,
    mean_words,
    model_caption,
    says,
)
from mechattn.results.result import Result, units_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

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
            draw.line_and_band(figure, found, label, colour, column=column, row=row, legend=legend)
            null = uniform_at_positions(dataset, quantity, at, shown)[found.at]
            style = dict(legendgroup=f"uniform, {label}", hovertemplate="%{y:.4f}", showlegend=legend)
            draw.dotted(figure, found.at, null, f"uniform, {label}", colour, column=column, row=row, **style)
    if span is not None:
        figure.add_vrect(
            span[0] - 0.5, span[1] + 0.5, row=2, col="all", fillcolor=SHADE, line_width=0, layer="below",
            annotation_text=condition, annotation_position="top", annotation_font_size=11,
        )  # fmt: skip
    figure.update_xaxes(title_text="original token position", row=1)
    figure.update_xaxes(title_text="position in the sequence", row=2)
    over = f"mean over {len(shown)} prompts, pointwise 95 % bands{band_words(result)}"
    over += f"; dotted: uniform attention; heads {how}{where}"
    _finish(figure, f"{model_caption(result)}: received attention", over, 400 if alone else 640, 125)
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


def _inserted_span(result: Result, condition: str) -> tuple[int, int] | None:
    """The first and last inserted position, if these are the same in all prompts."""
    origin = result["sequences"].origin.sel(condition=condition).values
    inserted = origin == -1
    if not inserted.any() or (inserted != inserted[0]).any():
        return None
    where = np.flatnonzero(inserted[0])
    return int(where[0]), int(where[-1])


class _Panel(NamedTuple):
    result: Result
    layer: int
    head: int
    title: str


@declare(NAME, compares=True)
def meaningless_and_sentence(
    results: Seq[Result] | Result,
    layer: int = 0,
    heads: Seq[int] | int = 0,
    conditions: tuple[str, str] = ("slash", "sentence"),
    *,
    one_based: bool = False,
) -> go.Figure:
    """Plot received attention by position of the sequence under two conditions, for one head per model.

    Args:
        results: One result per model.
        layer: The layer, from 0.
        heads: The head of each model, from 0; or one number for all.
        conditions: The two conditions, the first in blue and the second in orange.
        one_based: Count layers and heads from 1 in the titles, as the paper does.

    Raises:
        OptionError: There is no such layer, head or condition, or the numbers of heads and models differ.
    """
    results = [results] if isinstance(results, Result) else list(results)
    chosen = [heads] * len(results) if isinstance(heads, int) else list(heads)
    if len(chosen) != len(results):
        raise OptionError(f"heads={chosen} for {len(results)} models: give one head per model, or one for all")
    panels = [
        _Panel(r, layer, head, f"{model_caption(r)}<br>layer {layer + one_based} head {head + one_based}")
        for r, head in zip(results, chosen, strict=True)
    ]
    figure = _lines(panels, "received", list(conditions), (WITHOUT, THIRD))
    figure.update_xaxes(title_text="position in the sequence")
    over = _prompts(results)
    words = " and ".join(conditions)
    about = f"mean over {over} prompts, bands: pointwise 95 % intervals{band_words(results[0])}"
    _finish(figure, f"{words}: received attention", about, 450, 150)
    said = [
        f"{model_caption(panel.result)}, layer {panel.layer + one_based} head {panel.head + one_based}, "
        f"“{name}”: {change}."
        for panel in panels
        for name in conditions
        if (change := change_words(panel.result, name, layer=panel.layer, heads=[panel.head]))
    ]
    return says(figure, "Change of the attention received by the question's tokens.", *said)


@declare(NAME)
def across_layers(
    result: Result,
    layers: Seq[int] = (0, 1, 2),
    head: int = 0,
    condition: str | None = None,
    *,
    one_based: bool = False,
) -> go.Figure:
    """Plot received attention of the original tokens without (blue) and with (orange) insertion, by layer for one head.

    Args:
        result: A result.
        layers: The layers, from 0.
        head: The head, from 0.
        condition: The condition in orange; by default the first that isn't the baseline, if there is one.
        one_based: Count layers and heads from 1 in the titles, as the paper does.

    Raises:
        OptionError: There is no such layer, head or condition.
    """
    condition = result.shown_condition(condition)
    panels = [_Panel(result, n, head, f"Layer {n + one_based} head {head + one_based}") for n in layers]
    figure = _lines(panels, "received_by_origin", list(dict.fromkeys((BASELINE, condition))), (WITHOUT, WITH))
    figure.update_xaxes(title_text="original token position")
    about = f"mean over {_prompts([result])} prompts, bands: pointwise 95 % intervals{band_words(result)}"
    _finish(figure, f"{model_caption(result)}: received attention by layer", about, 450, 150)
    said = [
        f"layer {n + one_based}: {change}"
        for n in layers
        if (change := change_words(result, condition, layer=n, heads=[head]))
    ]
    words = f"Head {head + one_based}, the question's tokens with “{condition}”: {'; '.join(said)}."
    return says(figure, words if said else "")  # with only the baseline, nothing has changed


def _lines(panels: list[_Panel], quantity: str, conditions: list[str], colours: Seq[str]) -> go.Figure:
    """Panels side by side, each with a line and its band for each condition."""
    figure = draw.panels([panel.title for panel in panels], horizontal_spacing=0.07)
    for column, panel in enumerate(panels, 1):
        dataset = panel.result[NAME]
        check_layer(panel.layer, dataset)
        check_heads([panel.head], dataset.sizes["head"])
        prompts = np.arange(dataset.sizes["prompt"])
        for name, colour in zip(conditions, colours, strict=False):
            if name != BASELINE:
                panel.result.condition(name)
            at = {"condition": name, "layer": panel.layer, "head": panel.head}
            found = at_positions(dataset, quantity, at, prompts)
            draw.line_and_band(figure, found, name, colour, column=column, legend=column == 1)
    return figure


def _prompts(results: Seq[Result]) -> str:
    return ", ".join(sorted({str(result["sequences"].sizes["prompt"]) for result in results}))


def _finish(figure: go.Figure, heading: str, note: str, height: int, top: int) -> None:
    figure.update_yaxes(title_text="average attention weight<br>(probability)", col=1)
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(hovermode="x unified")
    draw.title(figure, heading, note, height, top)
