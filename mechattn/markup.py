"""HTML for notebooks: escaped tables and tokens, readable in light and dark themes."""

from __future__ import annotations

import html
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

# Faint backgrounds, so that the notebook's text stays readable in light and dark themes.
GROUNDS = {
    "bos": "rgba(128,128,128,.18)",
    "template": "rgba(128,128,128,.18)",
    "system": "rgba(80,160,80,.16)",
    "inserted": "rgba(220,60,50,.32)",
    "question": "rgba(60,120,200,.14)",
    "answer": "rgba(150,90,200,.18)",
    "changed": "rgba(230,150,30,.32)",
}
_INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff"


def visible(token: str) -> str:
    """A token's text with newlines made visible, and a placeholder if it is blank."""
    return token.replace("\n", "⏎") if token.strip(_INVISIBLE) else "·"


def table(rows: Iterable[Seq[Any]], caption: str = "", header: Seq[str] = ()) -> str:
    """Rows of text as a table."""
    left = "text-align:left;vertical-align:top"
    head = "".join(f'<th style="{left}">{html.escape(name)}</th>' for name in header)
    body = "".join(
        "<tr>" + "".join(f'<td style="{left}">{html.escape(str(cell))}</td>' for cell in row) + "</tr>" for row in rows
    )
    said = f'<caption style="{left};font-weight:600">{html.escape(caption)}</caption>' if caption else ""
    return f"<table>{said}{f'<thead><tr>{head}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"


def tokens(texts: Iterable[tuple[str, str]], caption: str = "") -> str:
    """Tokens with their segment as background colour, and a legend of the segments."""
    texts = list(texts)
    present = [name for name in GROUNDS if any(name == segment for _, segment in texts)]
    key = " ".join(_token(name, name) for name in present)
    spans = "".join(_token(visible(text), segment) for text, segment in texts)
    said = f"<p>{html.escape(caption)} {key}</p>"
    return f'{said}<p style="font-family:monospace;line-height:1.9;overflow-wrap:anywhere">{spans}</p>'


def fields_table(value: Any) -> str:
    """A dataclass as a table of its fields, for ``_repr_html_``."""
    from dataclasses import fields

    shown = [(field.name, repr(getattr(value, field.name))) for field in fields(value) if field.repr]
    return table(shown, type(value).__name__)


def _token(text: str, segment: str) -> str:
    return (
        f'<span title="{segment}" style="background:{GROUNDS[segment]};padding:2px;margin:1px;border-radius:3px;'
        f'white-space:pre-wrap;unicode-bidi:isolate">{html.escape(text)}</span>'
    )
