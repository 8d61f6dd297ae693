"""Figures of received attention by position, of changes by head, condition or swept option, and of patching."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mechattn.axes import BASELINE
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.means import at_positions, choose_heads, uniform_at_positions
from mechattn.contrast.quantities import check_layer
from mechattn.errors import OptionError
from mechattn.render import draw
from mechattn.render.declared import check_heads, listed_or_chosen
from mechattn.render.declared import figure as declare
from mechattn.render.draw import OTHERS, SHADE, THIRD, WITH, WITHOUT
from mechattn.render.words import (
    band_words,
    beside_null,
    change_words,
    count_words,
    mean_words,
    model_caption,
    percent,
    quantity_words,
    says,
)  # fmt: skip
from mechattn.results.result import Result, units_of

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from mechattn.patching.effects import Patching

NAME = "received_attention"


@declare(NAME, report=[{}])
def received_attention(
    result: Result,
    layer: int | Seq[int],
    heads: Seq[int] | None = None,
    condition: str | None = None,
    *,
    choose: int | None = None,
    one_based: bool = False,
) -> go.Figure:
    """Plot received attention of some heads without (blue) and with (orange) the inserted tokens.

    The top row shows the original tokens, aligned; the bottom row the whole sequence with the inserted span shaded.
    Dotted lines are uniform attention, since part of the fall is there by definition. Bands end at 0, which no
    probability is below. A result with only the baseline
    gives one row with its null. Lines are means over prompts and bands pointwise 95 % t intervals. A key is hidden if
    fewer than half of the prompts, or fewer than 10 of them (all, below 10 prompts), have it.

    Args:
        result: A result with received attention.
        layer: The layer, from 0; several as a list, such as [0, 1, 2], which show the same heads of each.
        heads: The heads, from 0.
        choose: In place of heads: the number of heads to choose by the largest change (in the baseline: the largest
            distance) from the null on one half of the prompts. The figure then shows the other half; the run must have
            used ``positions="prompts"``.
        condition: The condition in orange; by default the first that isn't the baseline, where there is one.
        one_based: Count layers and heads from 1 in the titles, as the paper does.

    Raises:
        OptionError: There is no such layer, head or condition, or heads cannot be chosen.
    """
    dataset, condition = result[NAME], result.shown_condition(condition)
    layers: list[Any] = list(layer) if isinstance(layer, (list, tuple, range, np.ndarray)) else [layer]
    for one in layers or [layer]:
        check_layer(one, dataset)
    listed, choose = listed_or_chosen(heads, choose)
    shown, how = np.arange(dataset.sizes["prompt"]), "chosen by hand"
    of_layers = dict.fromkeys(layers, listed)
    if choose is not None:
        chosen, shown = units_of(result, len(shown)).halves()
        of_layers = {one: choose_heads(result, one, choose, condition, chosen) for one in layers}
        how = "chosen on the other half of the prompts"
    for some in of_layers.values():
        check_heads(some, dataset.sizes["head"])
    alone = condition == BASELINE
    base = _Line("received_by_origin", BASELINE, "baseline" if alone else f"without {condition}", WITHOUT)
    aligned = _Line("received_by_origin", condition, f"with {condition}", WITH)
    rows = [[base]] if alone else [[base, aligned], [aligned._replace(quantity="received")]]
    panels = [
        _Panel(result, one, head, f"Layer {one + one_based} head {head + one_based}")
        for one, some in of_layers.items()
        for head in some
    ]
    figure = _by_position(panels, rows, shown)
    span = _inserted_span(result, condition)
    if span is not None:
        figure.add_vrect(
            span[0] - 0.5, span[1] + 0.5, row=2, col="all", fillcolor=SHADE, line_width=0, layer="below",
            annotation_text=condition, annotation_position="top", annotation_font_size=11,
        )  # fmt: skip
    where = "" if span or alone else "; inserted at positions that differ between prompts"
    over = f"mean over {len(shown)} prompts, pointwise 95 % bands{band_words(result)}"
    over += f"; dotted: uniform attention; heads {how}{where}"
    draw.title(figure, f"{model_caption(result)}: received attention", over, 400 if alone else 640, 125)
    return says(figure, *(_in_words(result, condition, *of, shown, one_based) for of in of_layers.items()))


def _in_words(result: Result, condition: str, layer: int, heads: Seq[int], prompts: np.ndarray, one_based: bool) -> str:
    """The sentence on a layer; empty if there is no change to report."""
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
    inserted = result["sequences"].origin.sel(condition=condition).values == -1
    if not inserted.any() or (inserted != inserted[0]).any():
        return None
    where = np.flatnonzero(inserted[0])
    return int(where[0]), int(where[-1])


class _Panel(NamedTuple):
    result: Result
    layer: int
    head: int
    title: str


class _Line(NamedTuple):
    quantity: str
    condition: str
    label: str
    colour: str


@declare(NAME, compares=True)
def received_by_model(
    results: Seq[Result] | Result,
    layer: int = 0,
    heads: Seq[int] | int = 0,
    conditions: tuple[str, str] = ("slash", "sentence"),
    *,
    one_based: bool = False,
) -> go.Figure:
    """Plot received attention by position of the sequence under two conditions, for one head per model.

    Dotted lines are uniform attention.

    Args:
        results: One result per model.
        layer: The layer, from 0.
        heads: The head of each model, from 0; or one number for all.
        conditions: The two conditions, the first in blue and the second in green.
        one_based: Count layers and heads from 1 in the titles, as the paper does.

    Raises:
        OptionError: There is no such layer, head or condition, or the numbers of heads and models differ.
    """
    results = [results] if isinstance(results, Result) else list(results)
    chosen = [heads] * len(results) if isinstance(heads, int) else list(heads)
    if len(chosen) != len(results):
        raise OptionError(f"heads={chosen} for {len(results)} models: give one head per model, or one for all")
    panels = []
    for result, head in zip(results, chosen, strict=True):
        check_layer(layer, result[NAME])
        check_heads([head], result[NAME].sizes["head"])
        where = f"{model_caption(result)}<br>layer {layer + one_based} head {head + one_based}"
        panels.append(_Panel(result, layer, head, where))
    colours = zip(conditions, (WITHOUT, THIRD), strict=False)
    figure = _by_position(panels, [[_Line("received", name, name, colour) for name, colour in colours]])
    counts = ", ".join(sorted({str(result["sequences"].sizes["prompt"]) for result in results}))
    about = f"mean over {counts} prompts, bands: pointwise 95 % intervals{band_words(results[0])}; dotted: uniform"
    draw.title(figure, f"{' and '.join(conditions)}: received attention", about, 450, 150)
    said = [
        f"{panel.title.replace('<br>', ', ')}, “{name}”: {change}."
        for panel in panels
        for name in conditions
        if (change := change_words(panel.result, name, layer=layer, heads=[panel.head]))
    ]
    return says(figure, "Change of the attention received by the question's tokens.", *said)


def _by_position(panels: list[_Panel], rows: list[list[_Line]], shown: np.ndarray | None = None) -> go.Figure:
    """A column for each head, with rows of lines over positions, their bands and uniform attention."""
    titles = [panel.title for panel in panels] + [""] * len(panels) * (len(rows) - 1)
    figure = draw.panels(titles, len(rows), vertical_spacing=0.16, horizontal_spacing=0.06)
    for column, panel in enumerate(panels, 1):
        dataset = panel.result[NAME]
        prompts = np.arange(dataset.sizes["prompt"]) if shown is None else shown
        for row, (quantity, name, label, colour) in ((row, line) for row, of in enumerate(rows, 1) for line in of):
            if name != BASELINE:
                panel.result.condition(name)
            at: dict[str, object] = {"condition": name, "layer": panel.layer}
            found, legend = at_positions(dataset, quantity, at | {"head": panel.head}, prompts), (row, column) == (1, 1)
            draw.line_and_band(figure, found, label, colour, column=column, row=row, legend=legend)
            null = uniform_at_positions(dataset, quantity, at, prompts)[found.at]
            style = dict(legendgroup=f"uniform, {label}", hovertemplate="%{y:.4f}", showlegend=legend)
            draw.dotted(figure, found.at, null, f"uniform, {label}", colour, column=column, row=row, **style)
    for row, of in enumerate(rows, 1):
        whole = of[0].quantity == "received"
        figure.update_xaxes(title_text="position in the sequence" if whole else "original token position", row=row)
    figure.update_yaxes(title_text="attention received<br>(probability)", col=1)
    figure.update_yaxes(rangemode="tozero")
    return figure.update_layout(hovermode="x unified")


@declare(compares=True, report=[{}])
def change_map(
    result: Result, condition: str | None = None, quantity: str = "received", segment: str = "question"
) -> go.Figure:
    """Map the change of a quantity relative to uniform attention by layer and head; dots mark q < 0.05.

    Orange means that it rose more, or fell less, than under uniform attention; blue that it fell further, or rose less.
    Where uniform attention is not known the map shows the change itself, and the title says so. q is
    Benjamini-Hochberg over the map.

    Args:
        result: A result.
        condition: The condition; the first that isn't the baseline by default.
        quantity: The quantity, as for ``result.compare``.
        segment: The segment that it is about.
    """
    condition = result.condition(condition)
    table = Contrast(result, condition, quantity=quantity, segment=segment).table()
    if set(table) & {"segment", "to_segment"}:
        raise OptionError(f"{quantity!r} has more than one number per head, but a map needs one")
    known = bool(table.null.notna().any()) and table.attrs["null"] != "no difference"
    column, what = ("beyond", "relative to uniform attention") if known else ("difference", "change")
    low, high = (f"{column}_{end}".removeprefix("difference_") for end in ("low", "high"))
    columns = {"shown": column, "change": "difference", "q": "q", "low": low, "high": high}
    hover = f"{what} %{{z:.3f}} [%{{customdata[2]:.3f}}, %{{customdata[3]:.3f}}]"
    hover += "<br>change %{customdata[0]:.3f}<br>q = %{customdata[1]:.2g}"
    figure = draw.head_map(table, columns, what, f"{table.scale.iloc[0]}{'<br>less uniform' * known}", hover)
    unit, resampled = table.attrs["unit"], table.attrs.get("resampled")
    n = f"{table.n.iloc[0]}{'' if unit == 'prompts' else f' {unit}'}{f', tested by {resampled}' if resampled else ''}"
    note = (
        f"{condition}; {int((table.q < 0.05).sum())} of {len(table)} heads at q < 0.05; n = {n}; "
        f"{'against ' * bool(table.null.notna().any())}{table.attrs['null']}"
    )
    if table.attrs["smallest_q"] >= 0.05:
        note += f"; too few prompts for any head to reach it (q ≥ {table.attrs['smallest_q']:.2g})"
    if table.attrs["left_out"]:
        note += f"; {len(table.attrs['left_out'])} heads left out (no ratio)"
    relative = f"change {what}" if known else what
    heading = f"{model_caption(result)}: {quantity_words(quantity, segment)}, {relative}"
    draw.title(figure, heading, note, _map_height(table), top=110)
    return says(figure, _map_words(table, column))


def _map_words(table: pd.DataFrame, column: str) -> str:
    """The number of significant heads, and the head furthest from uniform attention (without it: most changed)."""
    far = table.loc[table[column].abs().idxmax()]
    sure = f"{int((table.q < 0.05).sum())} of {len(table)} heads"
    if table.scale.iloc[0] == "log-ratio":
        value, low, high, null = (percent(np.expm1(part)) for part in (far.difference, far.low, far.high, far.null))
    else:
        parts = (far.difference, far.low, far.high, far.null)
        value, low, high, null = (f"{part:+.3f}".replace("-", "−") for part in parts)
    head = f"L{far.layer:.0f}H{far['head']:.0f}: {value} [{low}, {high}]"
    picked = (
        f"it was selected as the largest of {len(table)}, so its interval is too optimistic "
        '(select="half" avoids this).'
    )
    if column == "beyond":
        times = f" ({np.exp(far.beyond):.2f} × uniform)" if table.scale.iloc[0] == "log-ratio" else ""
        found = f"{sure} differ from uniform attention at q < 0.05. The largest difference is in {head}"
        return f"{found}, under uniform attention {null}{times}; {picked}"
    return f"{sure} changed at q < 0.05; {table.attrs['null']}. The largest change is in {head}; {picked}"


@declare("patching")
def patching_map(patching: Patching) -> go.Figure:
    """Map mean patching effects by layer and head, or layer and segment; dots mark q < 0.05 (over the map).

    Orange means that the answer's metric rose, blue that it fell. Heads that were not requested are empty.

    Args:
        patching: The result of ``patch``.

    Raises:
        OptionError: The effects are not of heads, or of layers by segment.
    """
    if patching.labels[0] != "layer" or len(patching.labels) != 2:
        raise OptionError(f"a map needs heads or layers in rows and columns; these are by {patching.labels}")
    across, table = patching.labels[1], patching.table()
    known = bool(table.share.notna().all())
    hover = "effect %{z:.3g} [%{customdata[0]:.3g}, %{customdata[1]:.3g}]<br>q = %{customdata[2]:.2g}"
    hover += "; %{customdata[3]:.1%} of the whole effect" * known + "<br>random direction %{customdata[4]:.3g}"
    columns = {name: name for name in ("effect", "low", "high", "q", "share", "random")}
    figure = draw.head_map(table, columns, "effect", "effect", hover, across)
    about, (whole, low, high) = patching.about, patching.whole
    note = (
        f"{about['metric']}; {about['direction']}, {about['method']}; n = {patching.units.words}; whole effect "
        f"{whole:+.3g} [{low:+.3g}, {high:+.3g}]"
    )
    heading = f"{about['model']}: patching effect by {across}"
    draw.title(figure, heading, note, _map_height(table), top=110)
    largest = table.effect.abs().idxmax()
    top = table.loc[largest]
    return says(
        figure,
        f"{int((table.q < 0.05).sum())} of {len(table)} {across}s at q < 0.05. Largest: layer {top.layer:.0f} {across} "
        f"{table[across][largest]}, {top.effect:+.3g} [{top.low:+.3g}, {top.high:+.3g}]"
        + f", {top.share:.0%} of the whole effect" * known
        + '; it was selected as the largest, so its interval is too optimistic (table(select="half") avoids this).',
    )


def _map_height(table: pd.DataFrame) -> int:
    return max(320, 160 + 24 * table.layer.nunique())


@declare(compares=True, report=[{}])
def changes(
    result: Result,
    conditions: Seq[str] | None = None,
    quantity: str = "received",
    segment: str = "question",
    layer: int | None = None,
    *,
    over: str = "",
) -> go.Figure:
    """Plot the change of a quantity by condition, or over the values of a swept option, with 95 % intervals and nulls.

    Of a condition and its variants: as inserted, tokens receive attention and move the others apart; masked, they only
    move them apart; unshifted, they only receive attention.

    Args:
        result: A result; with ``over`` one whose conditions come from ``ma.sweep``.
        conditions: Names of conditions, in the order shown; all but the baseline by default.
        quantity: A positive quantity.
        segment: The segment that it is about.
        layer: One layer; the mean over all by default.
        over: The swept option on the horizontal axis, such as "count"; each combination of other options gives a line.

    Raises:
        OptionError: There is no such condition, or none that is named after the option.
    """
    names = list((result.conditions[1:] or [result.condition()]) if conditions is None else conditions)
    lines = _swept(names, over) if over else {"": {name: name for name in names}}
    figure, said, mode = draw.panels(), [], "lines+markers" if over else "markers"
    for (words, named), colour in zip(lines.items(), cycle((WITH, *OTHERS)), strict=False):
        found = [Contrast(result, n, quantity=quantity, segment=segment).overall(layer) for n in named.values()]
        numeric = bool(over) and all(value.lstrip("-").isdigit() for value in named)
        x = [0, *map(int, named)] if numeric else list(named)
        start = [(0.0, 0.0, 0.0)] * numeric  # nothing inserted, so nothing changed
        ends = 100 * np.array([*start, *(change for change, _ in found)], dtype=np.float64).T
        label = words or (quantity if over else "measured")
        draw.points(figure, x, ends, label, colour, mode=mode, hovertemplate="%{x}: %{y:.1f} %<extra></extra>")
        nulls = [null for _, null in found if null is not None]
        if len(nulls) == len(found):
            y = [0.0] * numeric + [100 * float(null.estimate) for null in nulls]
            null_name = "uniform attention" + (f", {words}" if words and len(lines) > 1 else "")
            if over:
                draw.dotted(figure, x, y, null_name, colour, mode=mode)
            else:
                marker = dict(symbol="line-ew", size=26, line=dict(width=2, color=WITHOUT))
                figure.add_scatter(x=x, y=y, mode=mode, name=null_name, marker=marker)
        shown = list(zip(named.values(), found, strict=True))[-1 if over else 0 :]  # of a sweep the last
        said.append("; ".join(f"{name}: {beside_null(*change)}" for name, change in shown) + ".")
    where = "mean over layers and heads" if layer is None else f"mean over the heads of layer {layer}"
    note = f"{where}; n = {count_words(result)}; bars: 95 % t intervals of the log-ratio of each prompt's mean"
    what = f"{quantity_words(quantity, segment)}{f', by {over}' * bool(over)}"
    draw.rule(figure, y=0)
    draw.title(figure, f"{model_caption(result)}: change of {what}", note, 440)
    figure.update_yaxes(title_text="change from the baseline (%)")
    figure.update_xaxes(title_text="inserted tokens" if over == "count" else over or None)
    return says(figure, *said)


def _swept(names: Seq[str], option: str) -> dict[str, dict[str, str]]:
    """The conditions of a sweep by the value of the option, for each combination of the others."""
    lines: dict[str, dict[str, str]] = {}
    for name in names:
        parts = name.split(", ")
        swept = [part for part in parts if part.startswith(f"{option}=")]
        if swept:
            others = ", ".join(part for part in parts if part not in swept)
            lines.setdefault(others, {})[swept[0].removeprefix(f"{option}=")] = name
    if not lines:
        raise OptionError(f"no condition of this result is named {option}=…; run it with conditions=ma.sweep(…)")
    return lines
