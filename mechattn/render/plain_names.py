"""Escapes names in figures, since plotly would turn ``<a href=…>`` in any text into a link."""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import plotly.graph_objects as go

_MARKUP = re.compile(r"<(?!(?:br|/?sup|/?extra)>)")  # every "<" except in tags that our own titles and hovers use
_OURS = ("template", "meta")  # the template, and metadata that plotly doesn't draw


def with_plain_names(figure: go.Figure) -> go.Figure:
    """The figure with "<" escaped in its texts, except in line breaks and small print."""
    for part in (figure.layout, *figure.data):
        _escape(part)
    return figure


def as_heading(title: str) -> str:
    """The first line of a figure's title as plain text, for a page that escapes it itself."""
    return html.unescape(title.partition("<br>")[0])


def _escape(part: Any) -> None:
    for name in part.to_plotly_json():
        value = part[name]
        if name in _OURS:
            continue
        if hasattr(value, "to_plotly_json"):
            _escape(value)
        elif isinstance(value, tuple) and value and hasattr(value[0], "to_plotly_json"):
            for one in value:
                _escape(one)
        elif (made := _escaped(value)) is not value:
            part[name] = made


def _escaped(value: Any) -> Any:
    """The same object if there is nothing to escape."""
    if isinstance(value, str):
        return _MARKUP.sub("&lt;", value) if _MARKUP.search(value) else value
    if isinstance(value, dict):  # the arguments of a slider's steps
        made = {name: _escaped(one) for name, one in value.items()}
        return made if any(made[name] is not value[name] for name in value) else value
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OUT":
        return value
    if isinstance(value, (list, tuple, np.ndarray)):
        parts = [_escaped(one) for one in value]
        return parts if any(new is not old for new, old in zip(parts, value, strict=True)) else value
    return value
