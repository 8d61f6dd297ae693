"""How often intervals hold the truth, and what q calls found where nothing is, when prompts come in groups.

Writes the table of docs/concepts/groups.md to the screen and its figure to docs/images/groups.svg.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from plotly.subplots import make_subplots

from mechattn.render.draw import WITH, WITHOUT
from mechattn.stats.intervals import t_interval
from mechattn.stats.paired import paired
from mechattn.stats.units import Units

GROUPS, SIZES, CORRELATION, HEADS = 24, (1, 2, 5, 10, 20), 0.5, 20
EXPERIMENTS = {"intervals": 4000, "discoveries": 500}
FIGURE = Path(__file__).parents[2] / "docs" / "images" / "groups.svg"


def drawn(
    size: int, cells: int, generator: np.random.Generator, shared: float = 0.0
) -> tuple[np.ndarray, Units]:
    """Differences with mean 0 [prompt, cell]: half of their variance is the group's, ``shared`` of it all heads'."""

    def normal(rows: int) -> np.ndarray:
        own, common = generator.normal(size=(rows, cells)), generator.normal(size=(rows, 1))
        return np.sqrt(1 - shared) * own + np.sqrt(shared) * common

    of = np.repeat(np.arange(GROUPS), size)
    d = np.sqrt(CORRELATION) * normal(GROUPS)[of] + np.sqrt(1 - CORRELATION) * normal(len(of))
    return d, Units.grouped([str(group) for group in of])


def covered(d: np.ndarray) -> float:
    """The share of t intervals that hold 0."""
    made = t_interval(d)
    return float(((made.low <= 0) & (made.high >= 0)).mean())


def found(d: np.ndarray) -> bool:
    """Whether any head has q < 0.05."""
    return bool((paired(d, resamples=999).q < 0.05).any())


def main() -> None:
    """Print the table, draw the figure."""
    rows = []
    for size in SIZES:
        generator = np.random.default_rng(size)
        d, units = drawn(size, EXPERIMENTS["intervals"], generator)
        coverage = covered(d), covered(units.means(d))
        some = [
            drawn(size, HEADS, generator, shared=0.5) for _ in range(EXPERIMENTS["discoveries"])
        ]
        false = (
            np.mean([found(d) for d, _ in some]),
            np.mean([found(units.means(d)) for d, units in some]),
        )
        rows.append([100 * np.array(pair) for pair in (coverage, false)])
        print(
            f"| {size} | "
            + " | ".join(f"{value:.1f}" for pair in rows[-1] for value in pair)
            + " |",
            flush=True,
        )
    figure = make_subplots(
        1, 2, subplot_titles=["95 % intervals that hold the truth", "tables with a false discovery"]
    )
    for column, nominal in ((1, 95), (2, 5)):
        for which, (name, colour) in enumerate((("ignored", WITH), ("respected", WITHOUT))):
            figure.add_scatter(
                x=SIZES, y=[row[column - 1][which] for row in rows], name=f"groups {name}", row=1, col=column,
                mode="lines+markers", line=dict(color=colour), showlegend=column == 1,
            )  # fmt: skip
        figure.add_hline(nominal, row=1, col=column, line=dict(dash="dot", width=1, color="#888"))
    figure.update_xaxes(title_text="prompts in a group", type="log", tickvals=SIZES)
    figure.update_yaxes(title_text="%", rangemode="tozero")
    figure.update_layout(
        template="plotly_white", width=820, height=360, legend=dict(orientation="h", y=-0.25)
    )
    figure.write_image(FIGURE)


if __name__ == "__main__":
    main()
