"""What a page embeds: packed arrays, compressed libraries, and its own ES modules as one script."""

from __future__ import annotations

import base64
import json
import re
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import numpy as np

from mechattn.render.draw import DARK, NEUTRAL, WITH, WITHOUT, faint
from mechattn.render.html_views import in_script, squeezed, view_script

Kind = Literal["f4", "f2", "u2"]
Packed = dict[str, Any]
# The most numbers that an array may have in single precision, which then takes 1 MB. Larger arrays
# are stored in half precision.
EXACT = 250_000
# In half precision numbers are multiplied by this, so that probabilities down to 6e-8 keep all
# eleven bits.
SCALE = 1024.0
# The ES modules of the page. Each comes after those that it imports.
MODULES = (
    "data",
    "drawing",
    "words",
    "heads_map",
    "curves",
    "patterns",
    "room",
    "scatter",
    "thumbnails",
    "heads_table",
    "address",
    "narrow",
    "figures",
    "page",
)
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function|const|let) (\w+)", re.MULTILINE)


def packed(values: np.ndarray, kind: Kind = "f4") -> Packed:
    """Pack an array for JSON.

    Args:
        values: The numbers.
        kind: "f4" and "f2" are single and half precision. "u2" takes whole numbers from 0 to 65,535
            and stores NaN as 0.

    Returns:
        The shape, the kind, and in ``data`` the bytes as base64. With "f2" the numbers are
        multiplied by ``SCALE``.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if kind == "f2":
        numbers = numbers * SCALE
    elif kind == "u2":
        numbers = np.nan_to_num(numbers)
    content = numbers.astype(f"<{kind}").tobytes()
    data = base64.b64encode(content).decode()
    return {"shape": list(numbers.shape), "kind": kind, "data": data}


def kind_for(size: int) -> Kind:
    """The kind of an array with this number of elements: "f4" up to ``EXACT``, and "f2" above."""
    return "f4" if size <= EXACT else "f2"


def template(name: str) -> str:
    """The text of a template file."""
    return files("mechattn.pages").joinpath("templates", name).read_text(encoding="utf-8")


def joined(modules: dict[str, str]) -> str:
    """Join ES modules into one script, since a page that is opened from a file cannot import any.

    Each module is in a function of its own, so that they share no names.

    Args:
        modules: The text of each module by its name, each after those that it imports.

    Returns:
        A script that sets ``nameModule`` to the exports of each module.
    """
    functions = []
    for name, text in modules.items():
        exported = ", ".join(match[2] for match in _EXPORT.finditer(text))
        body = _IMPORT.sub(r"const \1 = \2Module;", text)
        body = _EXPORT.sub(r"\1 \2", body)
        function = f"(() => {{\n{body}\nreturn {{ {exported} }};\n}})()"
        functions.append(f"const {name}Module = {function};")
    return "\n".join(functions)


@cache
def page_script() -> str:
    """The script of a page, with the colours of figures and of the map of heads."""
    text = joined({name: template(f"{name}.js") for name in MODULES})
    colours = {"figures": _dark_colours(), "map": _map_colours()}
    return text.replace("/*COLOURS*/ {}", in_script(json.dumps(colours)))


@cache
def packed_plotly() -> str:
    """The script of plotly, compressed to a third. A page unpacks it to draw its first figure."""
    return squeezed(view_script("plotly"))


def _map_colours() -> dict[str, list[str]]:
    """The colours of the map of heads on a light and a dark page: no change, less, more."""
    light = [NEUTRAL, WITHOUT, WITH]
    return {"light": light, "dark": [DARK[colour] for colour in light]}


def _dark_colours() -> dict[str, str]:
    """The replacement of each colour of figures on a dark page, and of the colours of bands."""
    colours = dict(DARK)
    for light, dark in DARK.items():
        # faint() takes colours of six digits, not "#444" or "rgba(255, 255, 255, 0.75)".
        if len(light) == len(dark) == len("#rrggbb"):
            colours[_band_start(light)] = _band_start(dark)
    return colours


def _band_start(colour: str) -> str:
    """The beginning of the colour of a band, up to its opacity, such as "rgba(1, 2, 3"."""
    return faint(colour).rpartition(",")[0]
