"""The notebook of first steps: stored without outputs, no number in its words; its page shows what it promises."""

import re
from pathlib import Path

import nbformat

FILE = Path(__file__).parents[2] / "docs" / "notebooks" / "first_steps.ipynb"


def stored():
    return nbformat.read(FILE, as_version=4)


def numbers_in_words(notebook):
    """Digits of the text cells, code and links left out."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return re.findall(r"\d+", re.sub(r"`[^`]*`|\]\([^)]*\)", "", text))


def test_it_is_stored_without_outputs():
    nbformat.validate(stored())
    code = [cell for cell in stored().cells if cell.cell_type == "code"]
    assert len(code) > 5
    assert not [cell.source for cell in code if cell.outputs or cell.execution_count]


def test_its_words_hold_no_number():
    assert numbers_in_words(stored()) == []
    changed = stored()
    changed.cells[0].source += " It falls by 30.3 %, [as `55` say](a1.md)."
    assert numbers_in_words(changed) == ["30", "3"]


def test_the_page_shows_what_the_cells_promise(site):
    """As the site's build ran them, offline, where an error ends the build."""
    page = (site / "notebooks" / "first_steps.html").read_text(encoding="utf-8")
    cells = page.split("jp-CodeCell")
    assert len(cells) - 1 >= sum(cell.cell_type == "code" for cell in stored().cells)
    assert page.count("plotly-graph-div") >= 2
    assert page.count("If the original tokens kept") == 2, "a verdict of each condition"
    assert "Successfully installed" not in page
