"""One look for all figures: colours, fonts, and the words that say which model it is."""

from __future__ import annotations

from mechattn.results.result import Result

WITHOUT = "#1f5fa8"  # blue: without the inserted tokens
WITH = "#c8322b"  # red: with them
SHADE = "rgba(120, 120, 120, 0.16)"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

LAYOUT = dict(
    template="plotly_white",
    font=dict(family=FONT, size=13),
    margin=dict(l=70, r=20, t=90, b=60),
    hoverlabel=dict(font_family=FONT),
)


def faint(colour: str, alpha: float = 0.2) -> str:
    """The colour of a band around a line of this colour."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {alpha})"


def model_caption(result: Result) -> str:
    """The model's name and size; a toy is called a toy."""
    model = result.provenance["model"]
    size = model["parameters"]
    words = f"{size / 1e9:.1f} B" if size >= 1e9 else f"{size / 1e6:.1f} M"
    toy = "toy, " if str(model["name"]).startswith("toy:") else ""
    return f"{model['name']} ({toy}{words} parameters)"
