"""Figures of received attention by position, and of changes by head."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from mechattn.axes import BASELINE, head_named
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.means import (
    Positions,
    at_positions,
    choose_heads,
    uniform_at_positions,
)
from mechattn.contrast.quantities import check_layer
from mechattn.contrast.table import Ranking, Selection
from mechattn.errors import OptionError
from mechattn.render import draw
from mechattn.render.draw import SHADE, THIRD, WITH, WITHOUT
from mechattn.render.figure_declaration import check_heads, listed_or_chosen
from mechattn.render.figure_declaration import figure as declare
from mechattn.render.words import (
    band_words,
    change_words,
    count_words,
    mean_words,
    model_caption,
    percent,
    quantity_words,
    says,
)  # fmt: skip
from mechattn.results.result import Result, units_of
from mechattn.stats.intervals import FEWEST
from mechattn.stats.paired import ROUNDING

NAME = "received_attention"


@declare(NAME, report=[{}])
def received_attention(
    result: Result,
    layer: int | Seq[int] | None,
    heads: Seq[int | str] | None = None,
    condition: str | None = None,
    *,
    top: int | None = None,
    by: Ranking = "difference",
    one_based: bool = False,
) -> go.Figure:
    """Plot received attention of some heads without (blue) and with (orange) the inserted tokens.

    The top row shows the original tokens, aligned; the bottom row the whole sequence with the inserted span shaded.
    Dotted lines are uniform attention, since part of the fall is there by definition. A result with only the baseline
    gives one row with its null. Lines are means over prompts and bands pointwise 95 % t intervals, which end at 0. A
    key is hidden if fewer than half of the prompts, or fewer than 10 of them (all, below 10 prompts), have it.

    Args:
        result: A result with received attention.
        layer: The layer, from 0; a list such as [0, 1, 2] shows the same heads of each; None is for heads of any.
        heads: The heads, from 0, or by name, such as "L1H2".
        top: In place of heads: how many to choose by the largest change (in the baseline: the largest distance from
            uniform attention) on one half of the prompts, of each layer or, with None, of all; as
            ``result.compare(…, select="half", top=…)`` does. The figure then shows the other half; the run must have
            used ``positions="prompts"``.
        by: With ``top``: "beyond" chooses by the distance of the change from that of the null.
        condition: The condition in orange; by default the first that isn't the baseline, where there is one.
        one_based: Count layers and heads from 1 in the titles, as the paper does.

    Raises:
        OptionError: There is no such layer, head or condition, or heads cannot be chosen.
    """
    dataset, condition = result[NAME], result.shown_condition(condition)
    alone = condition == BASELINE
    layers: list[Any] = (
        list(layer) if isinstance(layer, (list, tuple, range, np.ndarray)) else [layer]
    )
    shown, how = np.arange(dataset.sizes["prompt"]), "chosen by hand"
    for one in layers:
        if one is not None:
            check_layer(one, dataset)
    listed, top = listed_or_chosen(heads, top)
    Selection(
        "half" if top else None, top, by if top or by != "difference" else None
    )  # refuses what compare refuses
    if top is not None:
        units = units_of(result, len(shown))
        units.refuse_below(2 * FEWEST, " for two halves", instead="")
        chosen, shown = units.halves()
        largest = "changes" if by == "difference" else "changes relative to the null"
        if alone:
            largest = "distances from uniform attention"
        how = f"with the largest {largest} in the other half of the prompts"
    of_layers: dict[int, list[int]] = {}
    for one in layers or [layer]:
        some = (
            _listed(listed, one, dataset)
            if top is None
            else choose_heads(result, one, top, condition, chosen, by)
        )
        for at, head in some:
            of_layers.setdefault(at, []).append(head)
    base = _Line(
        "received_by_origin", BASELINE, "baseline" if alone else f"without {condition}", WITHOUT
    )
    aligned = _Line("received_by_origin", condition, f"with {condition}", WITH)
    rows = [[base]] if alone else [[base, aligned], [aligned._replace(quantity="received")]]
    panels = [
        _Panel(result, one, head, f"Layer {one + one_based} head {head + one_based}", shown)
        for one, some in of_layers.items()
        for head in some
    ]
    figure = _by_position(panels, rows)
    span = _inserted_span(result, condition)
    _shade(figure, span, condition, 2, "all")
    where = "" if span or alone else "; inserted at positions that differ between prompts"
    over = f"mean over {len(shown)} prompts, pointwise 95 % bands{band_words(result)}"
    over += f"; dotted: uniform attention; heads {how}{where}"
    over += "; each panel has its own vertical scale" * (len(panels) > 1)
    draw.title(
        figure, f"{model_caption(result)}: received attention", over, 400 if alone else 640, 125
    )
    return says(
        figure, *(_in_words(result, condition, *of, shown, one_based) for of in of_layers.items())
    )


def _listed(heads: Seq[int | str], layer: int | None, dataset: xr.Dataset) -> list[tuple[int, int]]:
    """The listed heads with their layers; of any layer, they have to be named."""
    if layer is not None:
        return [(layer, head) for head in check_heads(heads, dataset.sizes["head"], layer)]
    named = list(filter(None, map(head_named, heads)))
    if len(named) < len(heads) or not named:
        raise OptionError(
            f'heads={list(heads)}: without a layer, give names, such as ["L0H3", "L1H2"]'
        )
    for at in {at for at, _ in named}:
        check_layer(at, dataset)
        check_heads([head for of, head in named if of == at], dataset.sizes["head"])
    return named


def _in_words(
    result: Result,
    condition: str,
    layer: int,
    heads: Seq[int],
    prompts: np.ndarray,
    one_based: bool,
) -> str:
    """The sentence on a layer; empty if there is no change to report."""
    listed = ", ".join(str(head + one_based) for head in heads)
    which = f"layer {layer + one_based} {f'heads {listed} (mean)' if len(heads) > 1 else f'head {listed}'}"
    of = f"Attention received by the question's tokens in {which}"
    if condition == BASELINE:
        at = (
            result[NAME]
            .sel(condition=BASELINE, layer=layer, segment="question")
            .isel(prompt=prompts)
        )
        mean = mean_words(result, at.received_by_segment.sel(head=list(heads)))
        uniform = float(at.received_by_segment_uniform.mean())
        return f"{of}: {mean}, {len(prompts)} prompts; uniform attention would give {uniform:.3g}."
    change = change_words(result, condition, layer=layer, heads=heads, prompts=prompts)
    return f"{of} with “{condition}”: {change}, {len(prompts)} prompts." if change else ""


def _inserted_span(result: Result, condition: str) -> tuple[int, int] | None:
    """The first and last inserted position, if these are the same in all prompts."""
    inserted = result["sequences"].origin.sel(condition=condition).values == -1
    if not inserted.any() or (inserted != inserted[0]).any():
        return None
    where = np.flatnonzero(inserted[0])
    return int(where[0]), int(where[-1])


def _shade(
    figure: go.Figure, span: tuple[int, int] | None, words: str, row: int, column: int | str
) -> None:
    """Shade inserted positions, if all prompts have them at the same place."""
    if span is None:
        return
    figure.add_vrect(
        span[0] - 0.5, span[1] + 0.5, row=row, col=column, fillcolor=SHADE, line_width=0, layer="below",
        annotation_text=words, annotation_position="top", annotation_font_size=11,
    )  # fmt: skip


class _Panel(NamedTuple):
    result: Result
    layer: int
    head: int
    title: str
    prompts: np.ndarray  # those that are shown


class _Line(NamedTuple):
    quantity: str
    condition: str
    label: str
    colour: str


@declare(NAME, compares=True)
def received_by_model(
    results: Seq[Result] | Result,
    layer: int = 0,
    heads: Seq[int] | int | None = None,
    conditions: tuple[str, str] = ("slash", "sentence"),
    *,
    one_based: bool = False,
) -> go.Figure:
    """Plot received attention by position of the sequence under two conditions, for one head per model.

    Dotted lines are uniform attention, blue if it is the same under both. Inserted spans are shaded.

    Args:
        results: One result per model.
        layer: The layer, from 0.
        heads: The head of each model, from 0; or one number for all. By default the one that changes most under the
            first condition, chosen on one half of each model's prompts; the figure then shows the other half.
        conditions: The two conditions, the first in orange and the second in green.
        one_based: Count layers and heads from 1 in the titles, as the paper does.

    Raises:
        OptionError: There is no such layer, head or condition, the numbers of heads and models differ, or a head cannot
            be chosen.
    """
    results = [results] if isinstance(results, Result) else list(results)
    if heads is not None:
        heads = [heads] * len(results) if isinstance(heads, int) else list(heads)
        if len(heads) != len(results):
            raise OptionError(
                f"heads={heads} for {len(results)} models: give one head per model, or one for all"
            )
    panels = []
    for number, result in enumerate(results):
        check_layer(layer, result[NAME])
        prompts = np.arange(result[NAME].sizes["prompt"])
        if heads is None:
            choosing, prompts = units_of(result, len(prompts)).halves()
            chosen = choose_heads(result, layer, 1, conditions[0], choosing, "difference")
            head = chosen[0][1]
        else:
            (head,) = check_heads([heads[number]], result[NAME].sizes["head"], layer)
        where = f"{model_caption(result)}<br>layer {layer + one_based} head {head + one_based}"
        panels.append(_Panel(result, layer, head, where, prompts))
    lines = [
        _Line("received", name, name, colour)
        for name, colour in zip(conditions, (WITH, THIRD), strict=False)
    ]
    figure = _by_position(panels, [lines])
    for column, result in enumerate(results, 1):
        for span in {_inserted_span(result, name) for name in conditions}:
            _shade(figure, span, "inserted", 1, column)
    counts = ", ".join(sorted({str(len(panel.prompts)) for panel in panels}))
    about = f"mean over {counts} prompts, bands: pointwise 95 % intervals{band_words(results[0])}; dotted: uniform"
    if heads is None:
        about += "; the head with the largest change in the other half of the prompts"
    draw.title(figure, f"{' and '.join(conditions)}: received attention", about, 450, 150)
    sentences = []
    for panel in panels:
        for name in conditions:
            change = change_words(panel.result, name, layer, [panel.head], panel.prompts)
            where = panel.title.replace("<br>", ", ")
            if change:
                sentences.append(f"{where}, “{name}”: {change}.")
    return says(figure, "Change of the attention received by the question's tokens.", *sentences)


def _by_position(panels: list[_Panel], rows: list[list[_Line]]) -> go.Figure:
    """A column for each head, with rows of lines over positions, their bands and uniform attention."""
    titles = [panel.title for panel in panels] + [""] * len(panels) * (len(rows) - 1)
    figure = draw.panels(titles, len(rows), vertical_spacing=0.16, horizontal_spacing=0.06)
    in_legend: set[str] = set()
    for column, panel in enumerate(panels, 1):
        for row, lines in enumerate(rows, 1):
            positions = _lines_of_panel(figure, panel, lines, column, row, in_legend)
            _cut_first_token(figure, positions, lines, column, row)
    for row, lines in enumerate(rows, 1):
        whole = lines[0].quantity == "received"
        figure.update_xaxes(
            title_text="position in the sequence" if whole else "original token position", row=row
        )
    figure.update_yaxes(title_text="attention received<br>(probability)", col=1)
    return figure.update_layout(hovermode="x unified")


def _lines_of_panel(
    figure: go.Figure,
    panel: _Panel,
    lines: list[_Line],
    column: int,
    row: int,
    in_legend: set[str],
) -> list[Positions]:
    """Draw the lines of one panel with their bands, and what uniform attention would give."""
    dataset = panel.result[NAME]
    positions = []
    nulls = []
    for quantity, condition, label, colour in lines:
        if condition != BASELINE:
            panel.result.condition(condition)  # refuses a name that the result does not have
        place: dict[str, object] = {"condition": condition, "layer": panel.layer}
        means = at_positions(dataset, quantity, place | {"head": panel.head}, panel.prompts)
        where = {"column": column, "row": row}
        draw.line_and_band(figure, means, label, colour, legend=label not in in_legend, **where)
        in_legend.add(label)
        null = uniform_at_positions(dataset, quantity, place, panel.prompts)[means.at]
        positions.append(means)
        nulls.append((means.at, null, f"uniform, {label}", colour))

    first_at, first_null, *_ = nulls[0]
    same_null = all(
        len(null) == len(first_null) and np.allclose(null, first_null) for _, null, *_ in nulls
    )
    if len(nulls) > 1 and same_null:  # one line would hide the others
        nulls = [(first_at, first_null, "uniform attention", WITHOUT)]
    for at, null, label, colour in nulls:
        style = {
            "legendgroup": label,
            "hovertemplate": "%{y:.4f}",
            "showlegend": label not in in_legend,
        }
        draw.dotted(figure, at, null, label, colour, column=column, row=row, **style)
        in_legend.add(label)
    return positions


def _cut_first_token(
    figure: go.Figure, positions: list[Positions], lines: list[_Line], column: int, row: int
) -> None:
    """End the vertical axis at the largest value but the first token's, and write that one beside its place.

    The first token is the sink of most models: it gets a hundred times what any other gets.
    """
    after_first = []
    first_values = []
    for means, line in zip(positions, lines, strict=True):
        upper = np.where(np.isfinite(means.high), means.high, means.mean)
        is_first = means.at == 0
        after_first += upper[~is_first].tolist()
        first_values += [(float(value), line) for value in means.mean[is_first]]
    top = 1.08 * max(after_first, default=0.0)
    if top <= 0:
        return
    figure.update_yaxes(range=[0, top], row=row, col=column)
    beyond = [(value, line) for value, line in first_values if value > top]
    if beyond:
        values = ", ".join(f"{value:.2g} {line.label}" for value, line in beyond)
        figure.add_annotation(
            x=0, y=top, text=f"↑ first token: {values}", xanchor="left", yanchor="top", showarrow=False,
            font_size=11, row=row, col=column,
        )  # fmt: skip


@declare(compares=True, report=[{}])
def change_map(
    result: Result,
    condition: str | None = None,
    quantity: str = "received",
    segment: str = "question",
    *,
    to: str = BASELINE,
) -> go.Figure:
    """Map the change of a quantity relative to uniform attention by layer and head; dots mark q < 0.05.

    Orange means that it rose more, or fell less, than under uniform attention; blue that it fell further, or rose less.
    Where uniform attention is not known, or predicts no change from ``to``, the map shows the change itself, and the
    title says so. q is Benjamini-Hochberg over the map.

    Args:
        result: A result.
        condition: The condition; the first that isn't the baseline by default.
        quantity: The quantity, as for ``result.compare``.
        segment: The segment that it is about.
        to: The condition to compare with, such as a random sentence of as many tokens.
    """
    condition = result.condition(condition)
    table = Contrast(result, condition, to, quantity, segment, null="uniform").table()
    if table.duplicated(["layer", "head"]).any():
        raise OptionError(f"{quantity!r} has more than one number per head, but a map needs one")
    known = bool(table.null.notna().any()) and table.attrs["null"] != "no difference"
    known &= to == BASELINE or bool((table.null.abs() > ROUNDING).any())
    column, what = (
        ("beyond", "relative to uniform attention") if known else ("difference", "change")
    )
    low, high, q = f"{column}_low", f"{column}_high", table[f"q_{column}"]
    columns = {
        "shown": column,
        "change": "difference",
        "q": f"q_{column}",
        "low": low,
        "high": high,
    }
    hover = f"{what} %{{z:.3f}} [%{{customdata[2]:.3f}}, %{{customdata[3]:.3f}}]"
    hover += "<br>change %{customdata[0]:.3f}<br>q = %{customdata[1]:.2g}"
    bar = f"change of {quantity_words(quantity, segment)}{' beyond uniform attention' * known} ({table.scale.iloc[0]})"
    figure = draw.head_map(table, columns, what, bar, hover)
    resampled = table.attrs.get("resampled")
    n = f"{count_words(result)}{f', tested by {resampled}' if resampled else ''}"
    versus = f" relative to “{to}”" * (to != BASELINE)
    note = (
        f"“{condition}”{versus}; {int((q < 0.05).sum())} of {len(table)} heads at q < 0.05; n = {n}; "
        f"{'against ' * known}{table.attrs['null']}"
    )
    note += " predicts no difference" * (not known and bool(table.null.notna().any()))
    if table.attrs["smallest_q"] >= 0.05:
        note += f"; too few prompts for any head to reach it (q ≥ {table.attrs['smallest_q']:.2g})"
    if table.attrs["left_out"]:
        note += f"; {len(table.attrs['left_out'])} heads left out (no ratio)"
    relative = ", ".join(filter(None, [f"change{versus}", what if known else ""]))
    relative = relative if versus else relative.replace(", ", " ")
    heading = f"{model_caption(result)}: {quantity_words(quantity, segment)}, {relative}"
    draw.title(figure, heading, note, draw.map_height(table), top=110)
    return says(figure, _map_words(table, column, versus))


def _map_words(table: pd.DataFrame, column: str, versus: str) -> str:
    """The number of significant heads, and the head furthest from uniform attention (without it: most changed)."""
    far = table.iloc[int(np.nanargmax(table[column].abs()))]
    sure = f"{int((table[f'q_{column}'] < 0.05).sum())} of {len(table)} heads"
    if table.scale.iloc[0] == "log-ratio":
        value, low, high, null = map(
            percent, (far.change, far.change_low, far.change_high, far.change_null)
        )
    else:
        parts = (far.difference, far.difference_low, far.difference_high, far.null)
        value, low, high, null = (f"{part:+.3f}".replace("-", "−") for part in parts)
    head = f"L{far.layer:.0f}H{far['head']:.0f}: {value} [{low}, {high}]"
    picked = (
        f"; it was selected as the largest of {len(table)}, so its interval is too optimistic "
        '(select="half" avoids this)'
    ) * (len(table) > 1)  # fmt: skip
    if column == "beyond":
        times = (
            f" ({np.exp(far.beyond):.2f} × uniform)" if table.scale.iloc[0] == "log-ratio" else ""
        )
        found = (
            f"{sure} differ from uniform attention at q < 0.05. The largest difference is in {head}"
        )
        return f"{found}, under uniform attention {null}{times}{picked}."
    null = "" if versus else f"; {table.attrs['null']}"
    return f"{sure} changed{versus} at q < 0.05{null}. The largest change is in {head}{picked}."
