"""What the README shows is what the code does: its config, its ten lines, the verdict that they print."""

import re
from pathlib import Path

import plotly.io
import pytest

import mechattn as ma

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
    printed, *table = capsys.readouterr().out.rstrip().splitlines()
    numbers = [re.findall(r"[+−]?\d+(?:\.\d+)?", text.replace("\u00a0", " ")) for text in (quoted, printed)]
    got, expected = ([float(n.replace("−", "-")) for n in some] for some in numbers)
    assert got == pytest.approx(expected, abs=1), f"the README says {quoted!r}, the code {printed!r}"
    assert got[:4] == pytest.approx(expected[:4], abs=0.15)
    shown = re.search(r"```text\n( +layer  head.*?)```", README, re.DOTALL)[1].rstrip().splitlines()
    assert [line.split() for line in table[:1]] == [line.split() for line in shown[:1]]
    for here, there in zip(shown[1:], table[1:], strict=True):
        assert [float(n) for n in here.split()] == pytest.approx([float(n) for n in there.split()], abs=0.004)


def test_what_verify_is_said_to_print():
    report = str(ma.verify_model("toy:falcon"))
    quoted = re.search(r"\$ mechattn verify toy:falcon\n(.*?)```", README, re.DOTALL)[1]
    names = [line.split()[0] for line in quoted.splitlines()[3:-1]]
    assert names == ["logits", "heads"]
    for name in names:
        here = next(line for line in quoted.splitlines() if line.startswith(name)).split()
        there = next(line for line in report.splitlines() if line.startswith(name)).split()
        assert here[1] == there[1] == "passed"
        assert [float(n) for n in here if re.fullmatch(r"-?[\d.]+", n)][:2] == pytest.approx(
            [float(n) for n in there if re.fullmatch(r"-?[\d.]+", n)][:2], abs=0.02
        )
    mended = next(line for line in quoted.splitlines() if line.startswith("mended"))
    assert mended.removesuffix(" …") in report


def test_nothing_was_left_to_be_filled_in():
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "experiments").rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"@[A-Z]+@|<<<<<<<|>>>>>>>|TODO", text), path
