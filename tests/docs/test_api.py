"""Every public name, and every function of mechattn.render, is on exactly one page of the API."""

import inspect
import re
from pathlib import Path

import mechattn as ma
from mechattn.render.figure_declaration import FIGURES

API = Path(__file__).parents[2] / "docs" / "api"


def listed() -> list[str]:
    """What the pages name, with the figures and conditions that the site fills in from the code."""
    pages = [path.read_text(encoding="utf-8") for path in sorted(API.glob("*.md"))]
    members = {
        "figures": [figure.draw for figure in FIGURES.values()],
        "conditions": [
            condition for condition in vars(ma.conditions).values() if inspect.isclass(condition)
        ],
    }
    filled_in = []
    for marker, definitions in members.items():
        assert [page.count(f"<!-- {marker} -->") for page in pages].count(1) == 1
        filled_in += [f"{member.__module__}.{member.__name__}" for member in definitions]
    written = [name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)]
    return filled_in + written


def public() -> list[str]:
    """Where each public name is defined."""
    things = [getattr(ma, name) for name in ma.__all__]
    spaces = [space for space in things if inspect.ismodule(space)]
    things += [
        thing for space in spaces for name, thing in vars(space).items() if not name.startswith("_")
    ]
    found = [thing for thing in things if inspect.isfunction(thing) or inspect.isclass(thing)]
    return sorted({f"{thing.__module__}.{thing.__name__}" for thing in found})


def test_each_public_name_is_on_one_page():
    assert len(public()) > 55
    assert not set(public()) - set(listed())
    assert len(listed()) == len(set(listed()))
