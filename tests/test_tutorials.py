"""Each tutorial runs as a script, and the numbers of its conclusion are among those that it prints."""

import html
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"
NUMBER = re.compile(r"(?<![\w.])[-+−]?\d+(?:\.\d+)?(?:e-\d+)?(?![\w])")


def numbers(text: str) -> list[tuple[float, float]]:
    """Each number, and half a unit of its last digit."""
    found = [n.replace("−", "-") for n in NUMBER.findall(text)]
    return [
        (float(n), 0.5 * 10.0 ** -len(n.partition(".")[2]) if "e" not in n else float(n))
        for n in found
    ]


def conclusion(source: str) -> str:
    """The comment under the heading "What it says", links and literal code left out."""
    text = source.partition("# ## What it says")[2]
    assert text, "a tutorial ends with a section «What it says»"
    return re.sub(r"\]\([^)]*\)|`[^`]*`", "", text)


def unsupported(source: str, printed: str) -> list[float]:
    """Numbers of the conclusion that were neither printed nor stand in the code above it."""
    code = "\n".join(
        line
        for line in source.partition("# ## What it says")[0].splitlines()
        if not line.startswith("#")
    )
    known = numbers(printed) + numbers(code)
    return [
        value
        for value, unit in numbers(conclusion(source))
        if not any(
            abs(abs(value) - abs(other)) <= 1.1 * unit + (1.1 * unit if unit < 0.5 else 0)
            for other, _ in known
        )
    ]


def printed_in_the_site(name: str) -> str | None:
    """What a tutorial printed while the site was built; None unless that was after the last change of any code."""
    page = ROOT / "site" / "tutorials" / f"{name}.html"
    code = [TUTORIALS / f"{name}.py", *(ROOT / "mechattn").rglob("*.py")]
    if not page.is_file() or page.stat().st_mtime < max(path.stat().st_mtime for path in code):
        return None
    text = page.read_text(encoding="utf-8")
    found = re.findall(
        r'<div class="[^"]*jp-RenderedText[^>]*>\s*<pre>(.*?)</pre>', text, re.DOTALL
    )
    return html.unescape(re.sub("<[^>]+>", "", "\n".join(found)))


SHORT = "focus"  # one of them in each run of the tests, all of them in make test-all
NAMES = sorted(path.stem for path in TUTORIALS.glob("*.py"))


@pytest.mark.parametrize(
    "name", [n if n == SHORT else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_a_conclusion_has_the_numbers_that_are_printed(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    printed, source = (
        printed_in_the_site(name),
        (TUTORIALS / f"{name}.py").read_text(encoding="utf-8"),
    )
    if printed is None:  # the site is not there, or of an older state
        runpy.run_path(str(TUTORIALS / f"{name}.py"))
        printed = capsys.readouterr().out
    assert len(numbers(printed)) > 5
    assert not unsupported(source, printed), printed


def test_a_number_that_was_not_printed_is_found_out():
    source = "x = 55\n# ## What it says\n#\n# It falls by 30.3 % with 55 tokens, not by −29.8 %."
    assert unsupported(source, "fall −30.31 %") == [-29.8]
