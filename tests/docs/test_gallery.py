"""The gallery has every figure and view that there is, each with the question that it answers."""

import inspect
import re
from pathlib import Path

import mechattn as ma
from mechattn.render.figure_declaration import FIGURES

SOURCE = (Path(__file__).parents[2] / "docs" / "gallery.py").read_text(encoding="utf-8")
WRITES = "ma.render.write_image("  # a file, so the text names it


def public() -> list[str]:
    """Calls of everything that draws."""
    names = [
        name for name, _ in inspect.getmembers(ma.render, inspect.isfunction) if name[0] != "_"
    ]
    assert set(FIGURES) < set(names), "a figure is drawn under a name that ma.render lacks"
    return [f"ma.render.{name}(" for name in names] + ["ma.pattern(", "ma.browse("]


def missing(source: str) -> set[str]:
    """What is called nowhere in the cells."""
    cells = "\n".join(line for line in source.splitlines() if not line.startswith("#"))
    return {call for call in public() if call not in cells and call != WRITES}


def test_everything_that_draws_is_there():
    assert len(public()) > 25
    assert not missing(SOURCE)
    assert WRITES in SOURCE
    assert "result.page(" in SOURCE


def test_what_is_taken_out_is_missed():  # negative control
    for call in public():
        if call != WRITES:
            assert missing(SOURCE.replace(call, "ma.gone(")) == {call}


def test_most_figures_answer_a_question():
    """Views that repeat one from a stored result have none of their own, nor has the verdict."""
    asked = re.findall(r"^# %% \[markdown\]\n(?:#.*\n)*?#.*\?", SOURCE, re.MULTILINE)
    assert len(asked) >= len(public())
