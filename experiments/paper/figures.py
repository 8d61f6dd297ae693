"""Draws the paper's figures for stored results, one row a family: what a caption says of the published one, and ours.

python experiments/paper/figures.py out/paper out/paper/figures.html
"""

from __future__ import annotations

import html
import json
import sys
from pathlib import Path

import plotly.graph_objects as go

import mechattn as ma
from mechattn.published.page import figure_sections

COLUMNS = ("three heads of layer 0", "“/” and a random sentence", "one head in layers 0, 1, 2")
STYLE = (
    "body { font: 15px/1.5 sans-serif; } "
    "td { vertical-align: top; padding: 1rem; min-width: 720px; }"  # as wide as three panels need
)


def rows_of(results: list[ma.Result]) -> list[str]:
    """A table row for each model: the figures in the order of ``COLUMNS``, with their published descriptions."""
    sections = figure_sections(results)
    rows = []
    for number in range(len(results)):
        cells = []
        for section in sections[number :: len(results)]:
            figure = go.Figure(json.loads(section.figure))
            drawn = figure.to_html(full_html=False, include_plotlyjs=False)
            title, note = html.escape(section.title), html.escape(section.note)
            cells.append(f"<td><h3>{title}</h3>{drawn}<p>{note}</p></td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return rows


def main() -> None:
    """Read the stored results of a folder, and write one page that opens offline."""
    folder, page = map(Path, sys.argv[1:3])
    results = [ma.load_result(place) for place in sorted(folder.glob("*-first-*.zarr"))]
    header = "".join(f"<th>{column}</th>" for column in COLUMNS)
    library = go.Figure().to_html(full_html=False, include_plotlyjs=True)
    hidden = f'<div style="display: none">{library}</div>'
    table = f"<table><tr>{header}</tr>{''.join(rows_of(results))}</table>"
    text = f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>{hidden}{table}"
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
