"""Text fit to be shown: HTML for notebooks, and no control characters or passwords in a terminal or
an error."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from typing import Any

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
_INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff"
# Everything that moves the cursor, colours, rings the bell or changes the writing direction;
# newlines and tabs stay.
_ACTS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
# A password may contain a slash not written as %2F; in an Azure URL, a container precedes the @,
# not a user.
_USER = re.compile(
    r"(?<=://)(?<!abfs://)(?<!abfss://)"
    r"(?:[^/?#\s\"'<>:@]{0,1000}:[^\s\"'<>@]{0,1000}@|[^/?#\s\"'<>@]{0,1000}@)+"
)
_QUERY = re.compile(r"(://[^\s\"'<>?]*\?)[^\s\"'<>()]+")


def visible(token: str) -> str:
    """A token's text with newlines made visible, and a placeholder if it is blank."""
    if not token.strip(_INVISIBLE):
        return "·"
    return token.replace("\n", "⏎")


def table(rows: Iterable[Sequence[Any]], caption: str = "", header: Sequence[str] = ()) -> str:
    """Rows of text as a table."""
    left = "text-align:left;vertical-align:top"
    parts = []
    if caption:
        style = f"{left};font-weight:600"
        parts.append(f'<caption style="{style}">{html.escape(caption)}</caption>')
    if header:
        parts.append(f"<thead>{_row('th', header, left)}</thead>")
    body = "".join(_row("td", row, left) for row in rows)
    parts.append(f"<tbody>{body}</tbody>")
    return f"<table>{''.join(parts)}</table>"


def _row(tag: str, cells: Sequence[Any], style: str) -> str:
    """A row of a table, with these tags around its cells."""
    row = "".join(f'<{tag} style="{style}">{html.escape(str(cell))}</{tag}>' for cell in cells)
    return f"<tr>{row}</tr>"


def tokens(texts: Iterable[tuple[str, str]], caption: str = "") -> str:
    """Tokens with their segment as background colour, and a legend of the segments."""
    texts = list(texts)
    present = [name for name in GROUNDS if any(name == segment for _, segment in texts)]
    key = " ".join(_token(name, name) for name in present)
    spans = "".join(_token(visible(text), segment) for text, segment in texts)
    style = "font-family:monospace;line-height:1.9;overflow-wrap:anywhere"
    return f'<p>{html.escape(caption)} {key}</p><p style="{style}">{spans}</p>'


def fields_table(value: Any) -> str:
    """A dataclass as a table of its fields, for ``_repr_html_``."""
    from dataclasses import fields

    rows = []
    for field in fields(value):
        if field.repr:
            rows.append((field.name, repr(getattr(value, field.name))))
    return table(rows, type(value).__name__)


def _token(text: str, segment: str) -> str:
    """A token on the background of its segment."""
    return (
        f'<span title="{segment}"'
        f' style="background:{GROUNDS[segment]};padding:2px;margin:1px;border-radius:3px;'
        f'white-space:pre-wrap;unicode-bidi:isolate">{html.escape(text)}</span>'
    )


def plain(text: str) -> str:
    """A text with its control characters escaped, such as ``\\x1b[31m``, so that they do not act on
    a terminal."""
    return _ACTS.sub(lambda found: ascii(found[0])[1:-1], text)


def without_secrets(text: str) -> str:
    """A text with user names, passwords and query strings (which hold keys and tokens) removed from
    its URLs."""
    return _QUERY.sub(r"\1…", _USER.sub("…@", text))


def shown(text: str) -> str:
    """Both of the above, for anything printed or quoted in an error."""
    return without_secrets(plain(text))
