"""The scripts of a page: its ES modules joined into one, and compressed libraries that are unpacked when needed."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files

from mechattn.pages.packed_arrays import squeezed
from mechattn.render.theme import DARK, faint
from mechattn.render.view import Script, in_script, view_script

# Each module comes after those that it imports.
MODULES = ("data", "drawing", "words", "heads_map", "curves", "room", "scatter", "heads_table", "figures", "page")
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function|const|let) (\w+)", re.MULTILINE)


def template(name: str) -> str:
    """The text of a template file."""
    return files("mechattn.pages").joinpath("templates", name).read_text(encoding="utf-8")


def joined(modules: dict[str, str]) -> str:
    """Join ES modules into one script, each in its own function, since a page opened from a file cannot import."""
    parts = []
    for name, text in modules.items():
        exported = [found[2] for found in _EXPORT.finditer(text)]
        body = _EXPORT.sub(r"\1 \2", _IMPORT.sub(r"const \1 = \2Module;", text))
        parts.append(f"const {name}Module = (() => {{\n{body}\nreturn {{ {', '.join(exported)} }};\n}})();")
    return "\n".join(parts)


@cache
def page_script() -> str:
    """The page's own script, including the colours for a dark background."""
    text = joined({name: template(f"{name}.js") for name in MODULES})
    return text.replace("/*COLOURS*/ {}", in_script(json.dumps(_dark())))


@cache
def packed_script(name: Script) -> str:
    """The plotly or circuitsvis script as gzip and base64: a third of the size, and unpacked only when needed."""
    text = view_script(name)
    if name == "circuitsvis":
        text += "\nwindow.CircuitsVis = CircuitsVis;"
    return squeezed(text)


def _dark() -> dict[str, str]:
    """The replacement for each colour of the figures on a dark background, including faint ones."""
    faints = {faint(a).rsplit(",", 1)[0]: faint(b).rsplit(",", 1)[0] for a, b in DARK.items() if len(a) == len(b) == 7}
    return DARK | faints
