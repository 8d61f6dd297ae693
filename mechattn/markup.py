"""HTML for notebooks (tables, and tokens coloured by their segments), and tables in Markdown."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from mechattn.errors import visible

# A token keeps its spaces, and its writing direction does not affect its neighbours.
AS_WRITTEN = "white-space:pre-wrap;unicode-bidi:isolate"
# The background colour of each segment. The colours are faint, so that the text of a notebook stays
# readable in light and dark themes.
_BACKGROUNDS = {
    "first": "rgba(128,128,128,.18)",
    "template": "rgba(128,128,128,.18)",
    "system": "rgba(80,160,80,.16)",
    "inserted": "rgba(220,60,50,.32)",
    "question": "rgba(60,120,200,.14)",
    "answer": "rgba(150,90,200,.18)",
    "changed": "rgba(230,150,30,.32)",
}
_CELL_STYLE = "text-align:left;vertical-align:top"


def table(rows: Iterable[Sequence[Any]], caption: str = "", header: Sequence[str] = ()) -> str:
    """An HTML table of text, which is escaped.

    Args:
        rows: The cells of each row.
        caption: The caption, if there is one.
        header: The names of the columns, if they are shown.
    """
    parts = []
    if caption:
        style = f"{_CELL_STYLE};font-weight:600"
        parts.append(f'<caption style="{style}">{html.escape(caption)}</caption>')
    if header:
        parts.append(f"<thead>{_row('th', header)}</thead>")
    body = "".join(_row("td", row) for row in rows)
    parts.append(f"<tbody>{body}</tbody>")
    return f"<table>{''.join(parts)}</table>"


def tokens(texts_and_segments: Sequence[tuple[str, str]], caption: str = "") -> str:
    """HTML of tokens on the background colours of their segments, with a legend.

    Args:
        texts_and_segments: The text and the segment of each token.
        caption: The text before the legend.
    """
    segments = {segment for _, segment in texts_and_segments}
    legend = " ".join(_token(name, name) for name in _BACKGROUNDS if name in segments)
    spans = "".join(_token(visible(text), segment) for text, segment in texts_and_segments)
    style = "font-family:monospace;line-height:1.9;overflow-wrap:anywhere"
    return f'<p>{html.escape(caption)} {legend}</p><p style="{style}">{spans}</p>'


def fields_table(value: Any) -> str:
    """An HTML table of the fields of a dataclass, for ``_repr_html_``."""
    rows = [(field.name, repr(getattr(value, field.name))) for field in fields(value) if field.repr]
    return table(rows, type(value).__name__)


def markdown_table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown. A "|" in a cell is escaped."""
    lines = []
    for row in [header, *rows]:
        cells = [str(cell).replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    rule = "|---" * len(header) + "|"
    lines.insert(1, rule)
    return "\n".join(lines)


def _row(tag: str, cells: Sequence[Any]) -> str:
    """A row of an HTML table. ``tag`` is "td", or "th" for a header."""
    texts = [html.escape(str(cell)) for cell in cells]
    row = "".join(f'<{tag} style="{_CELL_STYLE}">{text}</{tag}>' for text in texts)
    return f"<tr>{row}</tr>"


def _token(text: str, segment: str) -> str:
    """HTML of a token on the background colour of its segment."""
    return (
        f'<span title="{segment}" style="background:{_BACKGROUNDS[segment]};padding:2px;margin:1px;'
        f'border-radius:3px;{AS_WRITTEN}">{html.escape(text)}</span>'
    )
