"""The numbers of a tutorial's conclusion are among those that it printed when the site was built."""

import html
import re
from pathlib import Path

import pytest

from tests.conftest import need

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


@pytest.fixture(scope="module")
def pages(site):
    """The tutorials' pages, built after the last change of any code."""
    folder = site / "tutorials"
    code = [*TUTORIALS.glob("*.py"), *(ROOT / "mechattn").rglob("*.py")]
    oldest = min(page.stat().st_mtime for page in folder.glob("*.html"))
    is_new = oldest > max(path.stat().st_mtime for path in code)
    need("site", is_new, "the code has changed since `make docs`")
    return folder


def printed_on(page: Path) -> str:
    """What the cells of a tutorial printed, as its page shows it."""
    text = page.read_text(encoding="utf-8")
    outputs = re.findall(
        r'<div class="[^"]*jp-RenderedText[^>]*>\s*<pre>(.*?)</pre>', text, re.DOTALL
    )
    return html.unescape(re.sub("<[^>]+>", "", "\n".join(outputs)))


@pytest.mark.parametrize("name", sorted(path.stem for path in TUTORIALS.glob("*.py")))
def test_a_conclusion_has_the_numbers_that_are_printed(name, pages):
    source = (TUTORIALS / f"{name}.py").read_text(encoding="utf-8")
    printed = printed_on(pages / f"{name}.html")
    assert len(numbers(printed)) > 5
    assert not unsupported(source, printed), printed


def test_a_number_that_was_not_printed_is_found_out():
    source = "x = 55\n# ## What it says\n#\n# It falls by 30.3 % with 55 tokens, not by −29.8 %."
    assert unsupported(source, "fall −30.31 %") == [-29.8]
