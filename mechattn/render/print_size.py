"""Figures for a paper as PDF, SVG or PNG, in its column width and font size; and their numbers as a
table.
"""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from queue import Empty, Queue
from textwrap import wrap
from threading import Thread
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechattn.errors import OptionError, OutputError
from mechattn.render.draw import FONT
from mechattn.render.words import said

Column = Literal["single", "double"]
_MILLIMETRES = {"single": 85, "double": 170}  # the columns of most journals
_PAGE = 235  # millimetres: the height of the text on a page
_PIXELS = 96  # pixels per inch, as in SVG and PDF
_POINTS = 8
_SIZE = _POINTS * _PIXELS / 72  # of letters, in pixels
_LINE = 1.45 * _SIZE
# The size of a title's letters, of the text's; plotly draws its small print at 0.7 of that.
_TITLE = 1.2
_ROW = 19.0  # of a legend, in pixels: plotly gives none less
_LETTER = 0.58  # the mean width of a letter, of its height
_FORMATS = (".pdf", ".svg", ".png")
_LONGEST = 36  # letters of a name below an axis
_PATIENCE = 100  # seconds; kaleido's own limit for a figure is 90


def for_paper(figure: go.Figure, column: Column = "double", *, title: bool = False) -> go.Figure:
    """Copy a figure in the format of a paper: 85 or 170 mm wide, 8-point text, panels below each
    other in 85 mm.

    Args:
        figure: A figure of ``mechattn.render``, which is not changed.
        column: "single" or "double".
        title: Whether to keep the title, which a caption usually replaces.

    Raises:
        OptionError: There is no such column, or the panels below each other are taller than a page.
    """
    if column not in _MILLIMETRES:
        raise OptionError(f"column={column!r}: choose {' or '.join(map(repr, _MILLIMETRES))}")
    paper = go.Figure(figure)
    width = _MILLIMETRES[column] / 25.4 * _PIXELS
    heading = _heading(figure, width, title)
    paper.layout.sliders = None
    # One legend above the panels, since the place of one between rows is that of the screen's rows.
    paper.update_traces(legend=None, selector=lambda trace: trace.type != "heatmap")
    paper.layout.legend2 = None
    paper.update_annotations(font_size=_SIZE)
    paper.update_shapes(opacity=1)  # the template of print fades shapes
    axis = dict(title_standoff=4, title_font_size=_SIZE, tickfont_size=0.9 * _SIZE)
    paper.update_xaxes(**axis)
    paper.update_yaxes(**axis)
    bar = dict(thickness=9, title_font_size=_SIZE, tickfont_size=0.9 * _SIZE)
    paper.update_traces(colorbar=bar | {"nticks": 5}, selector=dict(type="heatmap"))
    paper.update_traces(marker_colorbar=bar, selector=dict(type="scattergl"))
    _lay_out(paper, width, heading, column == "single")
    # A title stands in for the caption, so it does not count.
    millimetres = (paper.layout.height - _LINE * len(heading)) / _PIXELS * 25.4
    if millimetres > _PAGE:
        raise OptionError(
            f"{len(_panels(paper))} panels below each other are {millimetres:.0f} mm tall, but a"
            f" page has {_PAGE}: draw fewer, or use column='double'"
        )
    return paper


def caption(figure: go.Figure) -> str:
    """The title of a figure, its small print and its sentence, as plain text for the caption in a
    paper.

    Args:
        figure: A figure of ``mechattn.render``, before :func:`for_paper`.
    """
    title = "; ".join(line for line in _title(figure) if line)
    sentences = [_plain(title), said(figure)]
    cleaned = [" ".join(sentence.split()) for sentence in sentences if sentence]
    return " ".join(sentence.removesuffix(".") + "." for sentence in cleaned)


def _title(figure: go.Figure) -> tuple[str, str]:
    """The title, and its small print."""
    heading, _, note = str(figure.layout.title.text or "").partition("<br><sup>")
    return heading.replace("<br>", " "), note.removesuffix("</sup>").replace("<br>", " ")


def _plain(text: str) -> str:
    """The text without markup."""
    return unescape(re.sub("<[^>]*>", " ", text))


def _heading(figure: go.Figure, width: float, title: bool) -> list[str]:
    """The lines of the title, or of its small print alone where that is a slider's caption."""
    heading, note = _title(figure)
    if title:
        lines = _lines(heading, width / _TITLE)
        lines += [f"<sup>{line}</sup>" for line in _lines(note, width / _TITLE / 0.7)]
        return lines
    if figure.layout.sliders:
        return _lines(note.partition(";")[0], width)
    return []


def _lines(text: str, width: float) -> list[str]:
    """The text in lines that fit, besides those that it has."""
    letters = max(8, int(width / (_LETTER * _SIZE)))
    lines = []
    for line in text.split("<br>"):
        lines += wrap(line, letters, break_long_words=False)
    return lines


def _lay_out(figure: go.Figure, width: float, heading: list[str], single: bool) -> None:
    """Set size, margins and legend; the figure grows by its legend and titles, so the panels keep
    their height.
    """
    name_letters = (width - 55) / (_LETTER * _SIZE)
    for trace in figure.data:
        trace.name = trace.name and _cut(trace.name, name_letters)
    legend_rows = _legend_rows(figure, width)
    panels = _panels(figure)
    is_stacked = single and len({panel.x.domain for panel in panels}) > 1
    for panel in panels:
        panel_width = _across(panel.x, width, is_stacked)
        for note in panel.titles:
            note.text = "<br>".join(_lines(note.text, panel_width))
    if is_stacked:
        tall, above = _stacked(panels)
    else:
        tall = max(155.0, 0.72 * (figure.layout.height or 450) - 75)
        above = _titles_above(panels)

    axes = [(panel.x, panel.y) for panel in panels] or [(figure.layout.xaxis, figure.layout.yaxis)]
    for x, y in axes:
        high = tall
        if y.domain:
            high *= y.domain[1] - y.domain[0]
        x.title.text = "<br>".join(_lines(x.title.text or "", _across(x, width, is_stacked)))
        y.title.text = "<br>".join(_lines(y.title.text or "", high))

    title_height = 0.0
    if heading:
        title_height = _LINE * len(heading) + 10
    top = _ROW * legend_rows + title_height + 0.6 * _SIZE
    below = 38 + _names_below(figure, width)
    height = top + above + tall + below
    legend = dict(
        orientation="h",
        x=1,
        xanchor="right",
        xref="paper",
        y=1 - title_height / height,
        yref="container",
        yanchor="top",
        font_size=_SIZE,
        tracegroupgap=0,
    )
    title = dict(
        text="<br>".join(heading),
        x=0.01,
        y=1 - 14 / height,
        yanchor="top",
        font_size=_TITLE * _SIZE,
    )
    figure.update_layout(
        template="simple_white",
        width=width,
        height=height,
        autosize=False,
        font=dict(family=FONT, size=_SIZE),
        margin=dict(l=50, r=10, t=top + above, b=below),
        legend=legend,
        title=title,
    )


def _names_below(figure: go.Figure, width: float) -> float:
    """Turn the names below a figure of one panel if they do not fit beside each other; the height
    that this needs.
    """
    names: list[str] = []
    for trace in figure.data:
        if trace.x is not None:
            names += [name for name in trace.x if isinstance(name, str)]
    names = list(dict.fromkeys(names))
    if not names:
        return 0
    ticks = [_cut(name, _LONGEST) for name in names]
    longest = _LETTER * 0.9 * _SIZE * max(map(len, ticks))
    if longest < (width - 70) / len(names):
        return 0
    figure.update_xaxes(tickangle=-45, tickvals=names, ticktext=ticks)
    return 0.7 * longest - 8


def _cut(text: str, letters: float) -> str:
    """The text with as many letters as fit: the first and the last, as names often differ in
    either.
    """
    if len(text) <= letters:
        return text
    half = int(letters - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def _across(axis: Any, width: float, is_stacked: bool) -> float:
    """The width of a panel, in pixels."""
    if is_stacked or not axis.domain:
        return width - 70
    return (width - 70) * (axis.domain[1] - axis.domain[0])


class _Panel(NamedTuple):
    """The axes of a panel, and the titles over it."""

    x: Any
    y: Any
    titles: list[Any]


def _panels(figure: go.Figure) -> list[_Panel]:
    """The panels from left to right, and in a column from top to bottom."""
    notes = [note for note in figure.layout.annotations if note.xref == note.yref == "paper"]
    panels = []
    for x in figure.select_xaxes():
        if not x.domain or not x.anchor:
            continue
        y = figure.layout[f"yaxis{x.anchor[1:]}"]
        titles = []
        for note in notes:
            is_over = x.domain[0] < note.x < x.domain[1]
            if is_over and abs(note.y - y.domain[1]) < 1e-6:
                titles.append(note)
        panels.append(_Panel(x, y, titles))
    return sorted(panels, key=lambda panel: (panel.x.domain[0], -panel.y.domain[0]))


def _titles_above(panels: list[_Panel]) -> float:
    """The height of the titles over the uppermost panels."""
    lines = [0]
    for panel in panels:
        if panel.y.domain[1] > 0.99:
            lines += [note.text.count("<br>") + 1 for note in panel.titles]
    return _LINE * max(lines)


def _stacked(panels: list[_Panel]) -> tuple[float, float]:
    """Put the panels below each other, each with its own labels; their height together, and that of
    the first title.
    """
    # The leftmost of a row has the row's labels.
    first_of_row = {panel.y.domain: panel.y for panel in reversed(panels)}
    labels = [30.0 * len(panel.y.ticktext or ()) for panel in panels]
    high = max(min(190.0, max(85.0, 430 / len(panels))), *labels)
    above = []
    below = []
    for panel in panels:
        title_lines = sum(note.text.count("<br>") + 1 for note in panel.titles)
        tick_lines = max((text.count("<br>") for text in panel.x.ticktext or ()), default=0) + 1
        if panel.x.title.text:
            tick_lines += 1
        above.append(_LINE * title_lines)
        below.append(_LINE * tick_lines + 8)

    total = high * len(panels) + sum(above[1:]) + sum(below[:-1])
    top = total
    for number, panel in enumerate(panels):
        labelled = first_of_row[panel.y.domain]
        panel.y.update(
            title_text=panel.y.title.text or labelled.title.text,
            tickvals=labelled.tickvals,
            ticktext=labelled.ticktext,
            showticklabels=True,
        )
        if number > 0:
            top -= above[number]
        panel.x.domain = (0, 1)
        panel.y.domain = (max(0.0, (top - high) / total), top / total)
        for note in panel.titles:
            note.update(x=0.5, y=top / total)
        top -= high + below[number]
    return total, above[0]


def _legend_rows(figure: go.Figure, width: float) -> int:
    """The number of rows of a legend: plotly gives each entry the width of the longest."""
    has_several = sum(trace.name is not None for trace in figure.data) > 1
    names = set()
    for trace in figure.data:
        is_listed = trace.showlegend or (trace.showlegend is None and has_several)
        if trace.name and is_listed and trace.type != "heatmap":
            names.add(str(trace.name))
    if not names or figure.layout.showlegend is False:
        return 0
    entry_width = _LETTER * _SIZE * max(map(len, names)) + 46  # the line sample and the gap
    entries_in_row = max(1, int((width - 10) // entry_width))
    return -(-len(names) // entries_in_row)


TABLE_COLUMNS = ["panel", "series", "x_is", "x", "y_is", "y", "z_is", "z", "low", "high"]


def figure_table(figure: go.Figure) -> pd.DataFrame:
    """The numbers that a figure draws: panel, series, x_is, x, y_is, y, z_is, z (of maps), low and
    high (of intervals).

    ``x_is`` … are the words of the axes. A place that has words beside its axis is named by these.

    Args:
        figure: A figure of ``mechattn.render``.
    """
    titles = {}
    for panel in _panels(figure):
        titles[panel.x.anchor, panel.y.anchor] = " ".join(note.text for note in panel.titles)
    tables = []
    for trace in figure.data:
        is_band = trace.to_plotly_json().get("fill") == "toself"
        is_hidden = trace.name in (None, "faded") or is_band
        if is_hidden or not pd.notna(np.atleast_1d(np.asarray(trace.x))).any():
            continue
        columns = {"panel": titles.get((trace.yaxis, trace.xaxis), ""), "series": trace.name}
        columns |= _trace_columns(figure, trace)
        tables.append(pd.DataFrame(columns))
    table = pd.concat(tables, ignore_index=True).reindex(columns=TABLE_COLUMNS)
    table = table.dropna(axis=1, how="all")
    return table.map(lambda cell: _plain(cell) if isinstance(cell, str) else cell)


def _trace_columns(figure: go.Figure, trace: Any) -> dict[str, Any]:
    """The numbers of a trace with the words of their axes, and the ends of their intervals."""
    is_map = trace.type == "heatmap"
    values = {"x": np.asarray(trace.x), "y": np.asarray(trace.y)}
    columns: dict[str, Any] = {}
    if is_map:
        x, y = np.meshgrid(values["x"], values["y"])
        values = {"x": x.ravel(), "y": y.ravel()}
        columns["z_is"] = trace.colorbar.title.text
        columns["z"] = np.asarray(trace.z, dtype=np.float64).ravel()
    for kind, numbers in values.items():
        axis_number = (trace[f"{kind}axis"] or kind)[1:]
        axis = figure.layout[f"{kind}axis{axis_number}"]
        bars = trace.to_plotly_json().get(f"error_{kind}")
        if bars:
            columns["low"] = numbers - np.asarray(bars["arrayminus"])
            columns["high"] = numbers + np.asarray(bars["array"])
        columns[f"{kind}_is"] = axis.title.text
        columns[kind] = _in_words(numbers, axis)
    if isinstance(trace.meta, (list, tuple)) and not is_map:
        # The ends of a band, or a number that is drawn at the edge.
        hover_numbers = np.asarray(trace.customdata).reshape(len(values["x"]), -1)
        for name, numbers in zip(trace.meta, hover_numbers.T):
            if name in ("x", "low", "high"):
                columns[name] = numbers
    return columns


def _in_words(numbers: np.ndarray, axis: Any) -> np.ndarray:
    """Places on an axis as the words beside it, where it has words."""
    if axis.ticktext is None or not len(axis.ticktext):
        return numbers
    words = np.array(axis.ticktext, dtype=object)
    if list(axis.tickvals) != list(range(len(words))):
        return numbers
    indices = np.rint(numbers.astype(np.float64)).astype(int)
    return words[indices.clip(0, len(words) - 1)]


def write_image(
    figure: go.Figure, path: str | Path, column: Column = "double", *, title: bool = False
) -> Path:
    """Write a figure for a paper as PDF, SVG or PNG (300 dots per inch).

    Args:
        figure: A figure of ``mechattn.render``.
        path: A file that ends with .pdf, .svg or .png.
        column: "single" (85 mm) or "double" (170 mm).
        title: Whether to keep the title.

    Raises:
        OptionError: The path has another file extension.
        OutputError: Kaleido or Chromium is not installed or does not respond, or the file cannot be
            written.
    """
    path = Path(path)
    if path.suffix not in _FORMATS:
        raise OptionError(f'"{path.name}" should end with {", ".join(_FORMATS)}')
    paper = for_paper(figure, column, title=title)
    try:
        import kaleido  # noqa: F401
    except ImportError:
        raise OutputError('static figures need kaleido: pip install "mechattn[images]"') from None
    from choreographer.errors import ChromeNotFoundError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drawn(paper, path)
    except (ChromeNotFoundError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "Chrome" not in str(error):
            raise
        raise OutputError(
            "static figures need Chromium, which was not found: apt install chromium (Debian,"
            " Ubuntu), brew install chromium (macOS), or plotly_get_chrome; set BROWSER_PATH if it"
            " is installed elsewhere"
        ) from None
    except OSError as error:
        raise OutputError(f"cannot write to {path}: {error.strerror or error}") from None
    return path


def _drawn(figure: go.Figure, path: Path) -> None:
    """Draw with a time limit and two attempts, because kaleido sometimes waits forever for a
    Chromium that is gone.
    """
    scale = 300 / _PIXELS if path.suffix == ".png" else 1
    for _ in range(2):
        ended: Queue[Exception | None] = Queue()
        # A daemon, like kaleido's own threads, so it does not keep Python from exiting.
        Thread(target=_attempt, args=(figure, path, scale, ended), daemon=True).start()
        try:
            error = ended.get(timeout=_PATIENCE)
        except Empty:
            continue
        if error is not None:
            raise error
        return
    raise OutputError(
        f"Chromium has not drawn {path} within {2 * _PATIENCE} s, in two attempts: try again"
    )


def _attempt(figure: go.Figure, path: Path, scale: float, ended: Queue[Exception | None]) -> None:
    """Draw, and report the end, with the error if it failed, which is raised again in the caller's
    thread.
    """
    try:
        figure.write_image(path, scale=scale)
        ended.put(None)
    except Exception as failed:
        ended.put(failed)
