"""``make simulate`` runs to its end, and makes the rows that its dated table has."""

import subprocess
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
def test_every_row_of_the_dated_table_is_made(tmp_path):
    out = tmp_path / "table.md"
    command = [sys.executable, FOLDER / "simulate.py", "--tables", "5", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = rows(out.read_text(encoding="utf-8"))
    assert len(made) > 100
    assert made == rows(max(FOLDER.glob("20*.md")).read_text(encoding="utf-8"))
