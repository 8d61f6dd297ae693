"""What the README shows is what the code does: its config, its ten lines, the verdict that they print."""

import re
from pathlib import Path

import plotly.io
import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def block(language):
    return re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)[1]


def test_the_config_is_the_file():
    assert block("toml") == (ROOT / "experiments" / "gsm8k" / "config.toml").read_text()


def test_the_ten_lines_print_the_verdict(tmp_path, monkeypatch, capsys):
    shown = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plotly.io, "show", lambda figure, *args, **kwargs: shown.append(figure))
    exec(block("python"), {})
    assert len(shown) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"pattern.html", "llama.zarr"}
    quoted = re.search(r"The verdict that it prints:\n\n> (.*?)\n\n", README, re.DOTALL)[1].replace("\n> ", " ")
    printed = capsys.readouterr().out.splitlines()[0]
    numbers = [re.findall(r"[+−]?\d+(?:\.\d+)?", text.replace("\u00a0", " ")) for text in (quoted, printed)]
    got, expected = ([float(n.replace("−", "-")) for n in some] for some in numbers)
    assert got == pytest.approx(expected, abs=1), f"the README says {quoted!r}, the code {printed!r}"
    assert got[:4] == pytest.approx(expected[:4], abs=0.15)
