"""``make simulate`` runs to its end, and makes the rows that its dated table has."""

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "experiments" / "simulations"


def rows(text):
    """The rule and the data of each row."""
    cells = [
        [cell.strip() for cell in line.split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return [(row[1], row[2]) for row in cells[2:]]


@pytest.mark.slow
def test_every_row_of_the_dated_table_is_made(tmp_path, monkeypatch):
    """Of five tables and few resamples: the rows are looked at, not the shares."""
    table = tmp_path / "table.md"
    command = ["simulate.py", "--tables", "5", "--out", str(table)]
    monkeypatch.setattr(sys, "argv", command)
    script = runpy.run_path(str(FOLDER / "simulate.py"))
    monkeypatch.setitem(script["main"].__globals__, "RESAMPLES", 99)
    script["main"]()
    written = rows(table.read_text(encoding="utf-8"))
    assert len(written) > 100
    assert written == rows(max(FOLDER.glob("20*.md")).read_text(encoding="utf-8"))
