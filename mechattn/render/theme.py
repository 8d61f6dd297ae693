"""The common look of all figures: colours, fonts, and the model's name in captions."""

from __future__ import annotations

from mechattn.results.result import Result

# Okabe and Ito (2008), "Color universal design"; contrast of at least 3 to 1 on white and on a dark background.
WITHOUT = "#0072b2"  # blue: without the inserted tokens
WITH = "#d55e00"  # vermilion: with them
THIRD = "#009e73"  # green: a control
OTHERS = ("#cc79a7", "#56b4e9", "#7a5c00", "#e69f00", "#000000")
COLOURS = (WITHOUT, WITH, THIRD, *OTHERS)  # of lines without a meaning of their own, in order
DARK = {
    WITHOUT: "#56b4e9",
    WITH: "#ff9a4d",
    THIRD: "#3fcf9f",
    "#000000": "#e6e6e3",
    "#7a5c00": "#c9a227",
    "#444": "#bbb",
}  # on a dark background
SHADE = "rgba(120, 120, 120, 0.16)"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

LAYOUT = dict(
    template="plotly_white",
    font=dict(family=FONT, size=13),
    margin=dict(l=70, r=20, t=90, b=60),
    hoverlabel=dict(font_family=FONT),
)


def headed(top: int, height: int) -> dict:
    """The layout of a figure with its legend in a separate row under the title, at any width."""
    return LAYOUT | {
        "title": dict(x=0.03, y=1 - 20 / height, yanchor="top"),
        "legend": dict(orientation="h", x=0.03, xref="container", y=1 - 66 / height, yref="container", yanchor="top"),
        "margin": dict(l=80, r=20, t=top, b=60),
        "height": height,
    }


def faint(colour: str, alpha: float = 0.2) -> str:
    """The colour of a band around a line of this colour."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {alpha})"


def quantity_words(quantity: str, segment: str) -> str:
    """The name of a segment's quantity in a title."""
    words = {
        "received": "attention received by the {}",
        "mass": "attention to all of the {}",
        "scale": "attention that the {} leaves to the original keys (λ)",
    }
    return words.get(quantity, quantity + " of the {}").format(segment)


def model_caption(result: Result) -> str:
    """The model's name and size; a toy is called a toy."""
    model = result.provenance["model"]
    size = model["parameters"]
    words = f"{size / 1e9:.1f} B" if size >= 1e9 else f"{size / 1e6:.1f} M"
    toy = "toy, " if str(model["name"]).startswith("toy:") else ""
    return f"{model['name']} ({toy}{words} parameters)"
