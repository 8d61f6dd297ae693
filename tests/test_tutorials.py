"""The tutorials run, and print what their pages show."""

import re
import runpy
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"


@pytest.mark.parametrize("name", sorted(path.stem for path in TUTORIALS.glob("*.py")))
def test_a_tutorial_prints_what_its_page_shows(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(TUTORIALS / f"{name}.py"))
    printed = capsys.readouterr().out
    page = (TUTORIALS / f"{name}.md").read_text()
    shown = re.search(r"```text\n(.*?)```", page, re.DOTALL)[1]
    words = [re.sub(r"[-+−]?\d+(\.\d+)?(e-\d+)?", "#", text).split() for text in (shown, printed)]
    assert words[0] == words[1], printed
    numbers = [[float(n.replace("−", "-")) for n in re.findall(r"[-+−]?\d+(?:\.\d+)?", t)] for t in (shown, printed)]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.11), printed
    assert list(tmp_path.rglob("*.html"))
    assert f'"docs/tutorials/{name}.py"' in page
