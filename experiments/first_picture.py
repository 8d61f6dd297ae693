"""The first picture of the README: the attention that the question loses in each toy, and would lose anyway.

python experiments/first_picture.py docs/images/first.png
"""

import json
import sys
from pathlib import Path

import plotly.graph_objects as go

import mechattn as ma
from mechattn.model.checkpoint import toy_names
from mechattn.render.draw import LAYOUT, WITH, WITHOUT, faint

SLASH = ma.MeaninglessTokens("/", count=55)


def measured(limit: int = 64) -> dict[str, dict[str, float]]:
    """By toy, in percent: the change with its 95 % interval, and that of uniform attention."""
    prompts = ma.load_prompts("word-problems", limit=limit)
    found = {}
    for name in toy_names():
        verdict = ma.run(name, prompts, {"slash": SLASH}).verdict("slash")
        ends = {end: 100 * float(getattr(verdict.change, end)) for end in ("estimate", "low", "high")}
        found[name] = {**ends, "uniform": 100 * float(verdict.null.estimate)}
    return found


def picture(found: dict[str, dict[str, float]]) -> go.Figure:
    """A row a model."""
    names = sorted(found, key=lambda name: found[name]["estimate"])
    change, low, high, null = ([found[name][part] for name in names] for part in ("estimate", "low", "high", "uniform"))
    figure = go.Figure()
    for name, measured in zip(names, change, strict=True):
        line = dict(color=faint(WITH, 0.35), width=16)
        figure.add_scatter(x=[0, measured], y=[name, name], mode="lines", line=line, showlegend=False)
    bars = dict(
        type="data", symmetric=False, thickness=1.5,
        array=[h - c for h, c in zip(high, change, strict=True)],
        arrayminus=[c - lo for lo, c in zip(low, change, strict=True)],
    )  # fmt: skip
    for values, colour, symbol, words, error in (
        (change, WITH, "circle", "measured, with 95 % interval", bars),
        (null, WITHOUT, "line-ns-open", "if every head attended uniformly", None),
    ):
        figure.add_scatter(
            x=values, y=names, mode="markers+text", name=words, error_x=error,
            marker=dict(color=colour, size=16 if error else 22, symbol=symbol, line_width=4 if not error else 0),
            text=[f"{value:.0f} %".replace("-", "−") for value in values], textposition="top center",
            textfont=dict(color=colour, size=15),
        )  # fmt: skip
    figure.update_xaxes(range=[-62, 2], ticksuffix=" %", zeroline=True, zerolinecolor="#444", tickfont_size=14)
    figure.update_yaxes(tickfont_size=16, range=[3.6, -0.7])
    title = "Change in attention to the question when 55 “/” are put before it"
    figure.update_layout(
        **LAYOUT
        | {
            "title": dict(text=title, x=0.02, y=0.97, yanchor="top", font_size=20),
            "legend": dict(orientation="h", x=0.02, xref="container", y=0.86, yref="container", font_size=15),
            "margin": dict(l=110, r=30, t=110, b=50),
            "height": 420,
            "width": 900,
        }
    )
    return figure


if __name__ == "__main__":
    target = Path(sys.argv[1])
    numbers = measured()
    rounded = {name: {part: round(value, 1) for part, value in of.items()} for name, of in numbers.items()}
    target.with_suffix(".json").write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")
    picture(numbers).write_image(target, scale=2)
