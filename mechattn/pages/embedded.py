"""What a page embeds: arrays and libraries, compressed, and its own ES modules joined into one script."""

from __future__ import annotations

import base64
import gzip
import json
import re
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import numpy as np

from mechattn.render.draw import DARK, DIVERGING, faint
from mechattn.render.html_views import Script, in_script, view_script

Kind = Literal["f4", "f2", "u2"]
Packed = dict[str, Any]
EXACT = 250_000  # numbers: larger arrays are stored in half precision
SCALE = (
    1024.0  # factor for half precision, which keeps all eleven bits for probabilities down to 6e-8
)
# Each module comes after those that it imports.
MODULES = (
    "data", "drawing", "words", "heads_map", "curves", "patterns", "room", "scatter", "thumbnails", "heads_table",
    "address", "narrow", "figures", "page",
)  # fmt: skip
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function|const|let) (\w+)", re.MULTILINE)


def packed(values: np.ndarray, kind: Kind = "f4") -> Packed:
    """Pack an array for JSON."""
    scaled = np.asarray(values, dtype=np.float64) * (SCALE if kind == "f2" else 1.0)
    if kind == "u2":
        scaled = np.nan_to_num(scaled)
    data = np.ascontiguousarray(scaled.astype(f"<{kind}")).tobytes()
    return {"shape": list(scaled.shape), "kind": kind, "data": base64.b64encode(data).decode()}


def unpacked(array: Packed) -> np.ndarray:
    """The numbers of an array that :func:`packed` has stored in single precision."""
    return np.frombuffer(base64.b64decode(array["data"]), dtype="<f4").reshape(array["shape"])


def squeezed(text: str) -> str:
    """Compress text with gzip and base64, which a browser reads offline; the same text always gives the same output."""
    return base64.b64encode(gzip.compress(text.encode("utf-8"), 6, mtime=0)).decode()


def kind_for(size: int) -> Kind:
    """Single precision for small arrays, half precision for large ones."""
    return "f4" if size <= EXACT else "f2"


def template(name: str) -> str:
    """The text of a template file."""
    return files("mechattn.pages").joinpath("templates", name).read_text(encoding="utf-8")


def joined(modules: dict[str, str]) -> str:
    """Join ES modules into one script, each in its own function, since a page opened from a file cannot import."""
    parts = []
    for name, text in modules.items():
        exported = [found[2] for found in _EXPORT.finditer(text)]
        body = _EXPORT.sub(r"\1 \2", _IMPORT.sub(r"const \1 = \2Module;", text))
        parts.append(
            f"const {name}Module = (() => {{\n{body}\nreturn {{ {', '.join(exported)} }};\n}})();"
        )
    return "\n".join(parts)


@cache
def page_script() -> str:
    """The page's own script, with the colours of the figures."""
    text = joined({name: template(f"{name}.js") for name in MODULES})
    return text.replace(
        "/*COLOURS*/ {}", in_script(json.dumps({"figures": _dark(), "map": _map()}))
    )


@cache
def packed_script(name: Script) -> str:
    """The plotly or circuitsvis script as gzip and base64: a third of the size, and unpacked only when needed."""
    text = view_script(name)
    if name == "circuitsvis":
        text += "\nwindow.CircuitsVis = CircuitsVis;"
    return squeezed(text)


def _map() -> dict[str, list[str]]:
    """The colours of the map of heads in either light: no change, less, more."""
    light = [DIVERGING[at][1] for at in (1, 0, 2)]
    return {"light": light, "dark": [DARK[colour] for colour in light]}


def _dark() -> dict[str, str]:
    """The replacement for each colour of the figures on a dark background, including faint ones."""
    faints = {
        faint(a).rsplit(",", 1)[0]: faint(b).rsplit(",", 1)[0]
        for a, b in DARK.items()
        if len(a) == len(b) == 7
    }
    return DARK | faints
