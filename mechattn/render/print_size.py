"""Figures for a paper as PDF, SVG or PNG, in its column width and font size; and their numbers as a table."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from queue import Empty, Queue
from textwrap import wrap
from threading import Thread
from typing import Any, Literal

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
_TITLE = (
    1.2  # the size of a title's letters, of the text's; plotly draws its small print at 0.7 of that
)
_ROW = 19.0  # of a legend, in pixels: plotly gives none less
_LETTER = 0.58  # the mean width of a letter, of its height
_FORMATS = (".pdf", ".svg", ".png")
_LONGEST = 36  # letters of a name below an axis
_PATIENCE = 100  # seconds; kaleido's own limit for a figure is 90


def for_paper(figure: go.Figure, column: Column = "double", *, title: bool = False) -> go.Figure:
    """Copy a figure in the format of a paper: 85 or 170 mm wide, 8-point text, panels below each other in 85 mm.

    Args:
        figure: A figure of ``mechattn.render``, which is not changed.
        column: "single" or "double".
        title: Whether to keep the title, which a caption usually replaces.

    Raises:
        OptionError: There is no such column, or the panels below each other are taller than a page.
    """
    if column not in _MILLIMETRES:
        raise OptionError(f"column={column!r}: choose {' or '.join(map(repr, _MILLIMETRES))}")
    made, width = go.Figure(figure), _MILLIMETRES[column] / 25.4 * _PIXELS
    heading = _heading(figure, width, title)
    made.layout.sliders = None
    # One legend above the panels, since the place of one between rows is that of the screen's rows.
    made.update_traces(legend=None, selector=lambda trace: trace.type != "heatmap")
    made.layout.legend2 = None
    made.update_annotations(font_size=_SIZE).update_shapes(
        opacity=1
    )  # the template of print fades shapes
    axis = dict(title_standoff=4, title_font_size=_SIZE, tickfont_size=0.9 * _SIZE)
    made.update_xaxes(**axis).update_yaxes(**axis)
    bar = dict(thickness=9, title_font_size=_SIZE, tickfont_size=0.9 * _SIZE)
    made.update_traces(colorbar=bar | {"nticks": 5}, selector=dict(type="heatmap"))
    made.update_traces(marker_colorbar=bar, selector=dict(type="scattergl"))
    _lay_out(made, width, heading, column == "single")
    tall = (
        (made.layout.height - _LINE * len(heading)) / _PIXELS * 25.4
    )  # a title stands in for the caption
    if tall > _PAGE:
        raise OptionError(
            f"{len(_panels(made))} panels below each other are {tall:.0f} mm tall, but a page has {_PAGE}: draw fewer, "
            "or use column='double'"
        )
    return made


def caption(figure: go.Figure) -> str:
    """The title of a figure, its small print and its sentence, as plain text for the caption in a paper.

    Args:
        figure: A figure of ``mechattn.render``, before :func:`for_paper`.
    """
    parts = [_plain("; ".join(filter(None, _title(figure)))), said(figure)]
    return " ".join(" ".join(part.split()).removesuffix(".") + "." for part in parts if part)


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
        return _lines(heading, width / _TITLE) + [
            f"<sup>{line}</sup>" for line in _lines(note, width / _TITLE / 0.7)
        ]
    return _lines(note.partition(";")[0], width) if figure.layout.sliders else []


def _lines(text: str, width: float) -> list[str]:
    """The text in lines that fit, besides those that it has."""
    most = max(8, int(width / (_LETTER * _SIZE)))
    return [
        line for part in text.split("<br>") for line in wrap(part, most, break_long_words=False)
    ]


def _lay_out(made: go.Figure, width: float, heading: list[str], single: bool) -> None:
    """Set size, margins and legend; the figure grows by its legend and titles, so the panels keep their height."""
    for trace in made.data:
        trace.name = trace.name and _cut(trace.name, (width - 55) / (_LETTER * _SIZE))
    rows, panels = _legend_rows(made, width), _panels(made)
    screen = made.layout.height or 450
    stacked = single and len({x.domain for x, _, _ in panels}) > 1
    for x, _, notes in panels:
        for note in notes:
            note.text = "<br>".join(_lines(note.text, _across(x, width, stacked)))
    tall, above = (
        _stacked(panels) if stacked else (max(155.0, 0.72 * screen - 75), _titles_above(panels))
    )
    for x, y in [(x, y) for x, y, _ in panels] or [(made.layout.xaxis, made.layout.yaxis)]:
        high = tall * ((y.domain[1] - y.domain[0]) if y.domain else 1)
        for axis, long in ((x, _across(x, width, stacked)), (y, high)):
            axis.title.text = "<br>".join(_lines(axis.title.text or "", long))
    titled = _LINE * len(heading) + 10 * bool(heading)
    top, below = _ROW * rows + titled + 0.6 * _SIZE, 38 + _names_below(made, width)
    height = top + above + tall + below
    legend = dict(
        orientation="h", x=1, xanchor="right", y=1 - titled / height, yref="container", yanchor="top",
        xref="paper", font_size=_SIZE, tracegroupgap=0,
    )  # fmt: skip
    made.update_layout(
        template="simple_white", width=width, height=height, autosize=False, font=dict(family=FONT, size=_SIZE),
        margin=dict(l=50, r=10, t=top + above, b=below), legend=legend,
        title=dict(text="<br>".join(heading), x=0.01, y=1 - 14 / height, yanchor="top", font_size=_TITLE * _SIZE),
    )  # fmt: skip


def _names_below(made: go.Figure, width: float) -> float:
    """Turn the names below a figure of one panel if they do not fit beside each other; the height that this needs."""
    drawn = (name for trace in made.data for name in (() if trace.x is None else trace.x))
    names = list(dict.fromkeys(name for name in drawn if isinstance(name, str)))
    shown = [_cut(name, _LONGEST) for name in names]
    longest = _LETTER * 0.9 * _SIZE * max(map(len, shown), default=0)
    if not names or longest < (width - 70) / len(names):
        return 0
    made.update_xaxes(tickangle=-45, tickvals=names, ticktext=shown)
    return 0.7 * longest - 8


def _cut(text: str, most: float) -> str:
    """The text with as many letters as fit: the first and the last, as names often differ in either."""
    half = int(most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def _across(axis: Any, width: float, stacked: bool) -> float:
    return (width - 70) * (1 if stacked or not axis.domain else axis.domain[1] - axis.domain[0])


def _panels(figure: go.Figure) -> list[tuple[Any, Any, list[Any]]]:
    """The axes of each panel and the titles over it, from left to right, and in a column from top to bottom."""
    axes = [
        (x, figure.layout[f"yaxis{x.anchor[1:]}"])
        for x in figure.select_xaxes()
        if x.domain and x.anchor
    ]
    notes = [note for note in figure.layout.annotations if note.xref == note.yref == "paper"]

    def over(x: Any, y: Any) -> list[Any]:
        return [
            n for n in notes if x.domain[0] < n.x < x.domain[1] and abs(n.y - y.domain[1]) < 1e-6
        ]

    return sorted(
        ((x, y, over(x, y)) for x, y in axes), key=lambda of: (of[0].domain[0], -of[1].domain[0])
    )


def _titles_above(panels: list[tuple[Any, Any, list[Any]]]) -> float:
    """The height of the titles over the uppermost panels."""
    lines = [
        note.text.count("<br>") + 1
        for _, y, notes in panels
        if y.domain[1] > 0.99
        for note in notes
    ]
    return _LINE * max(lines, default=0)


def _stacked(panels: list[tuple[Any, Any, list[Any]]]) -> tuple[float, float]:
    """Put the panels below each other, each with its own labels; their height together, and that of the first title."""
    first = {
        y.domain: y for _, y, _ in reversed(panels)
    }  # the leftmost of a row has the row's labels
    high = max(
        min(190.0, max(85.0, 430 / len(panels))),
        *(30.0 * len(y.ticktext or ()) for _, y, _ in panels),
    )
    above = [_LINE * sum(note.text.count("<br>") + 1 for note in notes) for *_, notes in panels]
    below = [
        _LINE * (max((t.count("<br>") for t in x.ticktext or ()), default=0) + 1)
        + 8
        + _LINE * bool(x.title.text)
        for x, _, _ in panels
    ]
    total = high * len(panels) + sum(above[1:]) + sum(below[:-1])
    end = total
    for (x, y, notes), over, under in zip(panels, [0.0, *above[1:]], below, strict=True):
        of = first[y.domain]
        y.update(
            title_text=y.title.text or of.title.text,
            tickvals=of.tickvals,
            ticktext=of.ticktext,
            showticklabels=True,
        )
        end -= over
        x.domain, y.domain = (0, 1), (max(0.0, (end - high) / total), end / total)
        for note in notes:
            note.update(x=0.5, y=end / total)
        end -= high + under
    return total, above[0]


def _legend_rows(figure: go.Figure, width: float) -> int:
    """The number of rows of a legend: plotly gives each entry the width of the longest."""
    alone = sum(trace.name is not None for trace in figure.data) < 2
    names = [
        str(trace.name)
        for trace in figure.data
        if trace.name
        and (trace.showlegend or (trace.showlegend is None and not alone))
        and trace.type != "heatmap"
    ]
    if not names or figure.layout.showlegend is False:
        return 0
    entry = _LETTER * _SIZE * max(map(len, names)) + 40  # the line sample and the gap
    return -(-len(set(names)) // max(1, int((width - 10) // entry)))


def figure_table(figure: go.Figure) -> pd.DataFrame:
    """The numbers that a figure draws: panel, series, x_is, x, y_is, y, z_is, z (of maps), low and high (of intervals).

    ``x_is`` … are the words of the axes. A place that has words beside its axis is named by these.

    Args:
        figure: A figure of ``mechattn.render``.
    """
    titles = {
        (x.anchor, y.anchor): " ".join(note.text for note in notes)
        for x, y, notes in _panels(figure)
    }
    parts, order = [], ["panel", "series", "x_is", "x", "y_is", "y", "z_is", "z", "low", "high"]
    for trace in figure.data:
        x, y, given = np.asarray(trace.x), np.asarray(trace.y), trace.to_plotly_json()
        if (
            trace.name in (None, "faded")
            or given.get("fill") == "toself"
            or not pd.notna(np.atleast_1d(x)).any()
        ):
            continue
        part: dict[str, Any] = {
            "panel": titles.get((trace.yaxis, trace.xaxis), ""),
            "series": trace.name,
        }
        if trace.type == "heatmap":
            x, y = (cells.ravel() for cells in np.meshgrid(x, y))
            part |= {
                "z_is": trace.colorbar.title.text,
                "z": np.asarray(trace.z, dtype=np.float64).ravel(),
            }
        for kind, at in (("x", x), ("y", y)):
            axis = figure.layout[f"{kind}axis{(trace[f'{kind}axis'] or kind)[1:]}"]
            if bars := given.get(f"error_{kind}"):
                part |= {
                    "low": at - np.asarray(bars["arrayminus"]),
                    "high": at + np.asarray(bars["array"]),
                }
            words = np.array(() if axis.ticktext is None else axis.ticktext, dtype=object)
            if len(words) and list(axis.tickvals) == list(range(len(words))):
                at = words[np.rint(at.astype(np.float64)).astype(int).clip(0, len(words) - 1)]
            part |= {f"{kind}_is": axis.title.text, kind: at}
        if isinstance(
            trace.meta, (list, tuple)
        ):  # the ends of a band, or a number that is drawn at the edge
            named = dict(
                zip(trace.meta, np.asarray(trace.customdata).reshape(len(x), -1).T, strict=False)
            )
            part |= {
                name: named[name]
                for name in ("x", "low", "high")
                if name in named and trace.type != "heatmap"
            }
        parts.append(pd.DataFrame(part))
    made = pd.concat(parts, ignore_index=True).reindex(columns=order).dropna(axis=1, how="all")
    return made.map(lambda cell: _plain(cell) if isinstance(cell, str) else cell)


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
        OutputError: Kaleido or Chromium is not installed or does not respond, or the file cannot be written.
    """
    path = Path(path)
    if path.suffix not in _FORMATS:
        raise OptionError(f'"{path.name}" should end with {", ".join(_FORMATS)}')
    made = for_paper(figure, column, title=title)
    try:
        import kaleido  # noqa: F401
    except ImportError:
        raise OutputError('static figures need kaleido: pip install "mechattn[images]"') from None
    from choreographer.errors import ChromeNotFoundError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drawn(made, path)
    except (ChromeNotFoundError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "Chrome" not in str(error):
            raise
        raise OutputError(
            "static figures need Chromium, which was not found: apt install chromium (Debian, Ubuntu), brew "
            "install chromium (macOS), or plotly_get_chrome; set BROWSER_PATH if it is installed elsewhere"
        ) from None
    except OSError as error:
        raise OutputError(f"cannot write to {path}: {error.strerror or error}") from None
    return path


def _drawn(figure: go.Figure, path: Path) -> None:
    """Draw with a time limit and two attempts, because kaleido sometimes waits forever for a Chromium that is gone."""
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
    """Draw, and report the end, with the error if it failed, which is raised again in the caller's thread."""
    try:
        figure.write_image(path, scale=scale)
        ended.put(None)
    except Exception as failed:
        ended.put(failed)
