"""Figures for a paper as PDF, SVG or PNG, in its column width and font size."""

from __future__ import annotations

import re
from concurrent import futures
from html import unescape
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from threading import Thread
from typing import Literal

import plotly.graph_objects as go
import plotly.io as pio

from mechattn.errors import OptionError, OutputError, check_choice
from mechattn.render.draw import FONT, parts_of_title
from mechattn.render.words import sentence_of

Column = Literal["single", "double"]
_MILLIMETRES = {"single": 85, "double": 170}  # the widths of the columns of most journals
_PIXELS = 96  # pixels per inch, as in SVG and PDF
_PAGE_HEIGHT = 235 / 25.4 * _PIXELS  # the height of the text on a page
_LETTER_SIZE = 8 / 72 * _PIXELS  # 8 points, in pixels
_LINE_HEIGHT = 1.45 * _LETTER_SIZE
_LETTER_WIDTH = 0.58 * _LETTER_SIZE  # the mean width of a letter
_HEIGHT_IN_PRINT = 0.75  # a figure's height in print, as a fraction of that on a screen
_PANEL_HEIGHT = 0.7  # a panel's height without the room between rows, as a fraction of its row
_FORMATS = (".pdf", ".svg", ".png")
_PATIENCE = 100  # seconds for an attempt; kaleido's own limit for a figure is 90
# Parts of the layout that a figure sets for the screen; in print the template decides.
_OF_THE_SCREEN = ("font", "margin", "legend", "legend2", "sliders", "title")


def for_paper(figure: go.Figure, column: Column = "double") -> go.Figure:
    """Return a copy of a figure in the format of a paper: 85 or 170 mm wide, with 8-point text, the
    legend below and no title.

    Args:
        figure: A figure of ``mechattn.render``, which is not changed.
        column: "single" (85 mm) or "double" (170 mm).

    Raises:
        OptionError: There is no such column, or the figure has panels side by side, for which a
            single column is too narrow.
    """
    check_choice(Column, column=column)
    panels_across = len({axis.domain for axis in figure.select_xaxes()})
    if column == "single" and panels_across > 1:
        raise OptionError(
            f"{panels_across} panels side by side are too narrow in {_MILLIMETRES[column]} mm:"
            " use column='double', or draw one panel, such as one head (heads=[0])"
        )

    width = _MILLIMETRES[column] / 25.4 * _PIXELS
    panel_width = width / panels_across
    height = min(_HEIGHT_IN_PRINT * (figure.layout.height or 450), _PAGE_HEIGHT)

    paper = go.Figure(figure)
    for name in _OF_THE_SCREEN:
        paper.layout[name] = None
    paper.update_traces(legend=None, selector=lambda trace: trace.type != "heatmap")
    paper.update_annotations(font_size=_LETTER_SIZE)

    # Titles of panels are annotations of the whole figure. The longest decides the upper margin.
    title_lines = 0
    for annotation in paper.select_annotations(dict(xref="paper", yref="paper")):
        annotation.text = _wrapped(annotation.text, panel_width)
        title_lines = max(title_lines, annotation.text.count("<br>") + 1)

    rows = len({axis.domain for axis in paper.select_yaxes()})
    for axis in paper.select_xaxes():
        axis.title.text = _wrapped(axis.title.text, panel_width)
    for axis in paper.select_yaxes():
        axis.title.text = _wrapped(axis.title.text, _PANEL_HEIGHT * height / rows)
    paper.update_layout(
        template=_template(), width=width, height=height, margin_t=_LINE_HEIGHT * title_lines + 8
    )
    return paper


def caption(figure: go.Figure) -> str:
    """Return the title of a figure, its small print and its sentence as plain text, for the caption
    in a paper.

    Args:
        figure: A figure of ``mechattn.render``, before :func:`for_paper`.
    """
    title_parts = parts_of_title(figure.layout.title.text or "")
    title = "; ".join(filter(None, title_parts))
    sentences = [without_markup(title), sentence_of(figure)]
    one_line_sentences = [" ".join(sentence.split()) for sentence in sentences if sentence]
    return " ".join(sentence.removesuffix(".") + "." for sentence in one_line_sentences)


def without_markup(text: str) -> str:
    """A text of a figure without plotly's tags, and with entities such as "&lt;" as letters."""
    return unescape(re.sub("<[^>]*>", " ", text))


def write_image(figure: go.Figure, path: str | Path, column: Column = "double") -> Path:
    """Write a figure for a paper as PDF, SVG or PNG (300 dots per inch), and return its path.

    Args:
        figure: A figure of ``mechattn.render``.
        path: A file that ends with .pdf, .svg or .png.
        column: "single" (85 mm) or "double" (170 mm).

    Raises:
        OptionError: The path has another file extension, or the column is refused by
            :func:`for_paper`.
        OutputError: Kaleido or Chromium is not installed or does not respond, or the file cannot be
            written.
    """
    path = Path(path)
    if path.suffix not in _FORMATS:
        raise OptionError(f'"{path.name}" should end with one of {", ".join(_FORMATS)}')
    paper = for_paper(figure, column)
    if find_spec("kaleido") is None:
        raise OutputError('static figures need kaleido: pip install "mechattn[images]"')

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(paper, path)
    except RuntimeError as error:
        if "Chrome" not in str(error):  # plotly has no error class of its own for this
            raise
        raise OutputError(
            "static figures need Chromium, which was not found: apt install chromium (Debian,"
            " Ubuntu), brew install chromium (macOS), or plotly_get_chrome; set BROWSER_PATH if it"
            " is installed elsewhere"
        ) from None
    except OSError as error:
        raise OutputError(f"cannot write to {path}: {error.strerror or error}") from None

    return path


def _template() -> go.layout.Template:
    """Plotly's white template with the text size of a paper and the legend below the panels."""
    template = go.layout.Template(pio.templates["simple_white"])
    font_sizes = dict(title_font_size=_LETTER_SIZE, tickfont_size=0.9 * _LETTER_SIZE)
    axis = dict(automargin=True, title_standoff=8, **font_sizes)
    legend = dict(
        orientation="h",
        x=0.5,
        xref="container",
        xanchor="center",
        y=0,
        yref="container",  # at the end of the figure, where plotly keeps the panels above it
        yanchor="bottom",
        font_size=_LETTER_SIZE,
        traceorder="normal",
    )

    bar = dict(thickness=9, nticks=5, **font_sizes)
    template.layout.update(
        font=dict(family=FONT, size=_LETTER_SIZE),
        margin=dict(l=10, r=10, t=8, b=0),
        legend=legend,
        shapedefaults_opacity=1,  # this template fades shapes
    )
    template.layout.xaxis.update(axis)
    template.layout.yaxis.update(axis)
    template.data.heatmap[0].colorbar.update(bar)
    template.data.scattergl[0].marker.colorbar.update(bar)
    return template


def _wrapped(text: str | None, width: float) -> str:
    """A title with further line breaks, so that it fits into a width in pixels; "" without a
    title."""
    letters = max(8, int(width / _LETTER_WIDTH))
    lines = []
    for line in (text or "").split("<br>"):
        lines += wrap(line, letters, break_long_words=False)
    return "<br>".join(lines)


def _write(figure: go.Figure, path: Path) -> None:
    """Write a figure in up to two attempts with a time limit, since kaleido sometimes waits forever
    for a Chromium that has ended (plotly/Kaleido issue 110).

    Raises:
        OutputError: Both attempts took too long.
    """
    scale = 300 / _PIXELS if path.suffix == ".png" else 1

    def attempt(drawing: futures.Future[None]) -> None:
        """Write the figure, or pass the error on to the thread that waits."""
        try:
            figure.write_image(path, scale=scale)
            drawing.set_result(None)
        except Exception as error:
            drawing.set_exception(error)

    for _ in range(2):
        # Each attempt has a future of its own, which a late first attempt cannot set twice.
        drawing: futures.Future[None] = futures.Future()
        # A daemon thread, like kaleido's own, does not keep Python from exiting.
        Thread(target=attempt, args=[drawing], daemon=True).start()
        try:
            return drawing.result(_PATIENCE)
        except futures.TimeoutError:
            continue

    raise OutputError(
        f"Chromium has not drawn {path} within {2 * _PATIENCE} s, in two attempts: try again"
    )
