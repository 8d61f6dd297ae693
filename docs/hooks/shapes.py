"""Adds to the API entry of each analysis a table of its variables with dimensions and units, from ``quantities``."""

from functools import cache
from typing import Any

import griffe


class Shapes(griffe.Extension):
    """Inserts the table after the first sentence of the docstring."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        if cls.path.startswith("mechattn.analysis.") and cls.docstring and cls.path in tables():
            first, *rest = cls.docstring.value.split("\n\n")
            cls.docstring.value = "\n\n".join([first, tables()[cls.path], *rest])


@cache
def tables() -> dict[str, str]:
    """Of each analysis with its default options, by the path of its class."""
    from mechattn.analysis import ANALYSES

    return {
        f"{type(made).__module__}.{type(made).__name__}": _table(made)
        for made in (one() for one in ANALYSES)
    }


def _table(analysis: Any) -> str:
    lines = [
        f'| `result["{analysis.name}"]` | dimensions | unit | what it is |',
        "|---|---|---|---|",
    ]
    for name, quantity in analysis.quantities.items():
        dims = ", ".join(("prompt", "condition", "layer", *quantity.dims))
        if "key" in quantity.dims:  # a moment over prompts
            dims = dims.removeprefix("prompt, ")
        about = quantity.description.replace("|", r"\|")
        lines.append(f"| `{name}` | {dims} | {quantity.units} | {about} |")
    return "\n".join(lines)
