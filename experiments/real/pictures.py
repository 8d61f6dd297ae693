"""Draws README's first picture: the question's change by layer and cause, in three real models.

python experiments/real/pictures.py experiments/real/2026-11-25.json docs/images/first.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

RUNS = {
    "smollm2-chat": "SmolLM2-135M-Instruct",
    "qwen2.5-chat": "Qwen2.5-Coder-0.5B-Instruct",
    "gemma3-plain": "Gemma-3-270m",
}
# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = {"distance": "#56B4E9", "mass": "#E69F00", "hidden states": "#999999"}
LABELS = {
    "distance": "distance: the prefix is further away",
    "mass": "mass: inserted tokens take attention",
    "hidden states": "hidden states have changed",
}


def figure_of(runs: dict[str, dict[str, Any]], condition: str = "slash") -> go.Figure:
    """A panel a model: bars of causes by layer, and the total with its interval."""
    titles = [
        f"{label}: {runs[name]['layers']} layers × {runs[name]['heads of a layer']} heads"
        for name, label in RUNS.items()
    ]
    figure = make_subplots(rows=1, cols=len(RUNS), subplot_titles=titles, shared_yaxes=True)
    for column, name in enumerate(RUNS, 1):
        rows = runs[name]["by layer"][condition]
        layers = list(range(len(rows["question"])))
        for cause, colour in COLOURS.items():
            heights = [triple[0] for triple in rows[cause]]
            bars = go.Bar(
                x=layers, y=heights, name=LABELS[cause], marker_color=colour, showlegend=column == 1
            )
            figure.add_trace(bars, row=1, col=column)

        totals = [triple[0] for triple in rows["question"]]
        half_widths = [(triple[2] - triple[1]) / 2 for triple in rows["question"]]
        line = go.Scatter(
            x=layers, y=totals, mode="lines+markers", name="total, with 95 % interval",
            error_y={"array": half_widths, "width": 2, "thickness": 1},
            line={"color": "black", "width": 1.5}, marker={"size": 4}, showlegend=column == 1,
        )  # fmt: skip
        figure.add_trace(line, row=1, col=column)
    figure.update_layout(
        barmode="relative", template="simple_white", width=1200, height=420,
        title="Change of the question's attention to itself, by layer, with 55 “/” before it",
        legend={"orientation": "h", "y": -0.2}, margin={"l": 60, "r": 20, "t": 80, "b": 90},
    )  # fmt: skip
    figure.update_annotations(font_size=13)
    figure.update_yaxes(title_text="change (points of 100)", col=1)
    figure.update_yaxes(zeroline=True, zerolinecolor="#888")
    figure.update_xaxes(title_text="layer")
    return figure


def main() -> None:
    runs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    figure_of(runs).write_image(sys.argv[2], scale=2)


if __name__ == "__main__":
    main()
