"""HTML for notebooks: tables, and tokens on the colours of their segments; tables in Markdown."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from mechattn.errors import visible

# Faint backgrounds, so that the notebook's text stays readable in light and dark themes.
GROUNDS = {
    "first": "rgba(128,128,128,.18)",
    "template": "rgba(128,128,128,.18)",
    "system": "rgba(80,160,80,.16)",
    "inserted": "rgba(220,60,50,.32)",
    "question": "rgba(60,120,200,.14)",
    "answer": "rgba(150,90,200,.18)",
    "changed": "rgba(230,150,30,.32)",
}
_LEFT = "text-align:left;vertical-align:top"
# A token keeps its spaces, and its direction does not turn its neighbours'.
AS_WRITTEN = "white-space:pre-wrap;unicode-bidi:isolate"


def table(rows: Iterable[Sequence[Any]], caption: str = "", header: Sequence[str] = ()) -> str:
    """Rows of text as a table."""
    parts = []
    if caption:
        style = f"{_LEFT};font-weight:600"
        parts.append(f'<caption style="{style}">{html.escape(caption)}</caption>')
    if header:
        parts.append(f"<thead>{_row('th', header)}</thead>")
    body = "".join(_row("td", row) for row in rows)
    parts.append(f"<tbody>{body}</tbody>")
    return f"<table>{''.join(parts)}</table>"


def _row(tag: str, cells: Sequence[Any]) -> str:
    """A row of a table, with these tags around its cells."""
    row = "".join(f'<{tag} style="{_LEFT}">{html.escape(str(cell))}</{tag}>' for cell in cells)
    return f"<tr>{row}</tr>"


def tokens(texts: Iterable[tuple[str, str]], caption: str = "") -> str:
    """Tokens with their segment as background colour, and a legend of the segments."""
    texts = list(texts)
    present = {segment for _, segment in texts}
    legend = " ".join(_token(name, name) for name in GROUNDS if name in present)
    spans = "".join(_token(visible(text), segment) for text, segment in texts)
    style = "font-family:monospace;line-height:1.9;overflow-wrap:anywhere"
    return f'<p>{html.escape(caption)} {legend}</p><p style="{style}">{spans}</p>'


def fields_table(value: Any) -> str:
    """A dataclass as a table of its fields, for ``_repr_html_``."""
    rows = [(field.name, repr(getattr(value, field.name))) for field in fields(value) if field.repr]
    return table(rows, type(value).__name__)


def _token(text: str, segment: str) -> str:
    """A token on the background of its segment."""
    return (
        f'<span title="{segment}" style="background:{GROUNDS[segment]};padding:2px;margin:1px;'
        f'border-radius:3px;{AS_WRITTEN}">{html.escape(text)}</span>'
    )


def markdown_table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Rows of text as a table in Markdown."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in [header, *rows]]
    lines.insert(1, "|---" * len(header) + "|")
    return "\n".join(lines)
