"""Figures for a paper as PDF, SVG or PNG: column width, font size and colour-blind-safe colours."""

from __future__ import annotations

from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import TYPE_CHECKING, Literal

from mechattn.errors import OptionError, OutputError
from mechattn.render.draw import FONT

if TYPE_CHECKING:
    import plotly.graph_objects as go

Column = Literal["single", "double"]
_INCHES = {"single": 3.35, "double": 6.9}  # 85 and 175 mm, the columns of most journals
_PIXELS = 96  # pixels per inch, as in SVG and PDF
_POINTS = 8
_FORMATS = (".pdf", ".svg", ".png")
_PATIENCE = 100  # seconds; kaleido's own limit for a figure is 90


def for_paper(figure: go.Figure, column: Column = "double", *, title: bool = False) -> go.Figure:
    """Copy a figure in the format of a paper: 85 or 175 mm wide, 8-point text, the colours of Okabe and Ito.

    Args:
        figure: A figure of ``mechattn.render``, which is not changed.
        column: "single" or "double".
        title: Whether to keep the title, which a caption usually replaces.

    Raises:
        OptionError: There is no such column.
    """
    import plotly.graph_objects as go

    if column not in _INCHES:
        raise OptionError(f"column={column!r}: choose {' or '.join(map(repr, _INCHES))}")
    across = len({tuple(axis.domain) for axis in figure.select_xaxes() if axis.domain})
    if column == "single" and across > 2:
        raise OptionError(f"{across} panels side by side are too narrow in 85 mm: draw fewer, or use column='double'")
    made, size = go.Figure(figure), _POINTS * _PIXELS / 72
    title = title or bool(figure.layout.sliders)  # the caption of the slider
    made.layout.sliders = None
    _lay_out(made, _INCHES[column] * _PIXELS, size, title)
    made.update_annotations(font_size=size)
    small = size * (0.8 if column == "single" and across > 1 else 1)  # so that titles side by side don't overlap
    axis = dict(title_standoff=4, title_font_size=small, tickfont_size=0.9 * size)
    made.update_xaxes(**axis)
    made.update_yaxes(**axis)
    bar = dict(thickness=9, title_font_size=size, tickfont_size=0.9 * size, nticks=5)
    made.update_traces(colorbar=bar, selector=dict(type="heatmap"))
    made.update_layout(title_text=figure.layout.title.text if title else "", title_font_size=1.2 * size)
    return made


def _lay_out(made: go.Figure, width: float, size: float, title: bool) -> None:
    """Set size, margins and legend; the figure grows by its legend, so the panels keep their height."""
    rows = _legend_rows(made, width, size)
    height = max(230.0, 0.72 * (made.layout.height or 450)) + 1.45 * size * max(0, rows - 1)
    room = (2.2 * size if title else 0.6 * size) + (1.7 * size if made.layout.annotations else 0.0)
    top = 1 - (2.2 * size / height if title else 0)
    legend = dict(
        orientation="h", x=1, xanchor="right", y=top, yref="container", yanchor="top", font_size=size, tracegroupgap=0
    )
    made.update_layout(
        template="simple_white", width=width, height=height, autosize=False, font=dict(family=FONT, size=size),
        margin=dict(l=50, r=10, t=1.45 * size * rows + room, b=38), legend=legend,
    )  # fmt: skip


def _legend_rows(figure: go.Figure, width: float, size: float) -> int:
    """The number of rows of a legend: plotly gives each entry the width of the longest."""
    alone = sum(trace.name is not None for trace in figure.data) < 2
    names = [
        str(trace.name)
        for trace in figure.data
        if trace.name and (trace.showlegend or (trace.showlegend is None and not alone)) and trace.type != "heatmap"
    ]
    if not names or figure.layout.showlegend is False:
        return 0
    entry = 0.58 * size * max(map(len, names)) + 40  # the mean width of a letter; the line sample and the gap
    return -(-len(set(names)) // max(1, int((width - 10) // entry)))


def write_image(figure: go.Figure, path: str | Path, column: Column = "double", *, title: bool = False) -> Path:
    """Write a figure for a paper as PDF, SVG or PNG (300 dots per inch).

    Args:
        figure: A figure of ``mechattn.render``.
        path: A file that ends with .pdf, .svg or .png.
        column: "single" (85 mm) or "double" (175 mm).
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
    raise OutputError(f"Chromium has not drawn {path} within {2 * _PATIENCE} s, in two attempts: try again")


def _attempt(figure: go.Figure, path: Path, scale: float, ended: Queue[Exception | None]) -> None:
    """Draw, and report the end, with the error if it failed, which is raised again in the caller's thread."""
    try:
        figure.write_image(path, scale=scale)
        ended.put(None)
    except Exception as failed:
        ended.put(failed)
