"""The notebook of first steps: stored without outputs, no number in its words, and its cells run without a network."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FILE = Path(__file__).parents[2] / "docs" / "notebooks" / "first_steps.ipynb"
CUT = """
import socket
def refuse(self, address, *rest):
    raise AssertionError(f"asked for {address}")
socket.socket.connect = refuse
socket.getaddrinfo = lambda *a, **k: refuse(None, a)
"""


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


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Executed in a real kernel that cannot reach a network; by the cells' ids."""
    notebook = stored()
    notebook.cells.insert(0, nbformat.v4.new_code_cell(CUT, id="cut"))
    resources = {"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    return {cell.id: cell for cell in notebook.cells}


@pytest.mark.slow
def test_every_cell_ran(run):
    assert all(cell.execution_count for cell in run.values() if cell.cell_type == "code")


@pytest.mark.slow
def test_nothing_is_installed_where_mechattn_is(run):
    assert run["install"].outputs == []


@pytest.mark.slow
def test_the_cells_show_what_they_promise(run):
    kinds = {
        name: set().union(*(output.get("data", {}) for output in cell.get("outputs", [])))
        for name, cell in run.items()
    }
    for name in ("budget", "received"):
        assert "application/vnd.plotly.v1+json" in kinds[name]
    assert all(
        "text/html" in kinds[name]
        for name in ("model", "slash", "run", "heads", "matched", "pattern")
    )
    verdicts = "".join(output.text for output in run["verdict"].outputs).splitlines()
    assert len(verdicts) == 2
    assert all("If the original tokens kept" in line for line in verdicts)
