"""Phrases of docs/words.txt are not in the README, the docs or the strings of the package; no word is there twice in a row."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LISTED = [
    line.split(" | ")
    for line in (ROOT / "docs" / "words.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


def pattern(phrase: str) -> str:
    """A phrase on one line or two; ``*`` is the rest of a word."""
    loose = re.escape(phrase).replace(r"\ ", r"\s+").replace(r"\*", r"\w*")
    return rf"(?<![\w-]){loose}(?![\w-])"


PHRASES = re.compile("|".join(pattern(phrase) for phrase, _ in LISTED), re.IGNORECASE)
TWICE = re.compile(r"\b(?!pos\b)([a-z]+)[ \n]\1\b(?!-)")  # "pos pos" is a shape


def prose(text: str) -> str:
    """Without code, formulas, targets of links, and marks of comments; the lines stay as many as they are."""
    blank = lambda found: re.sub(r"[^\n]+", "…", found[0])  # noqa: E731
    for code in (
        r"(?s)^ *```.*?^ *```",
        r"(?s)\$\$.*?\$\$",
        r"``[^`]+``",
        r"`[^`]+`",
        r"\$[^$\n]+\$",
        r"\]\([^)]*\)",
    ):
        text = re.sub(code, blank, text, flags=re.MULTILINE)
    return text


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The words of a file, with the line that they start at."""
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        yield from (
            (1, "".join(c["source"]))
            for c in json.loads(content)["cells"]
            if c["cell_type"] == "markdown"
        )
    elif path.suffix == ".md":
        yield 1, content
    elif "docs" in path.relative_to(ROOT).parts:
        yield (
            1,
            "\n".join(line[2:] if line.startswith("# ") else "" for line in content.split("\n")),
        )
    else:
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield node.lineno, node.value


def found(searched: re.Pattern, path: Path) -> list[str]:
    """What a file has of what is searched: file, line, words."""
    return [
        f"{path.relative_to(ROOT)}:{line + text.count(chr(10), 0, one.start())}: {' '.join(one[0].split())}"
        for line, text in ((line, prose(text)) for line, text in texts(path))
        for one in searched.finditer(text)
    ]


def files() -> list[Path]:
    docs = [path for kind in ("*.md", "*.py", "*.ipynb") for path in (ROOT / "docs").rglob(kind)]
    written = [path for path in docs if not {"hooks", "assets"} & set(path.parts)]
    package = list((ROOT / "mechattn").rglob("*.py"))
    return sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *written, *package])


@pytest.mark.parametrize("searched", [PHRASES, TWICE], ids=["phrases", "twice"])
def test_what_is_not_written(searched):
    assert len(files()) > 250
    every = [one for path in files() for one in found(searched, path)]
    assert not every, "\n".join(
        [f"{len(every)} places; docs/words.txt says what to write instead:", *every]
    )


def test_each_phrase_is_noticed(tmp_path, monkeypatch):
    """Also over a line's end and in any case; not in code, nor in a longer word."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "page.md"
    for phrase, _ in LISTED:
        page.write_text(
            "First line.\n" + phrase.replace("*", "").capitalize().replace(" ", "\n", 1) + ".\n"
        )
        assert [one.split(": ")[0] for one in found(PHRASES, page)] == ["page.md:2"], phrase
        page.write_text(
            f"```python\n{phrase}\n```\n`{phrase}` x{phrase.replace('*', '')} [a](b {phrase} c)\n"
        )
        assert not found(PHRASES, page), phrase
    page.write_text("it is the\nthe same\n")
    assert found(TWICE, page) == ["page.md:1: the the"]
    module = tmp_path / "m.py"
    module.write_text(
        '"""Drawn anew, ``anew``."""\nanew = 1  # anew\nraise ValueError(f"{anew} is drawn anew")\n'
    )
    assert [one.split(":")[1] for one in found(PHRASES, module)] == ["1", "3"]


def test_the_list_is_one():
    phrases = [phrase for phrase, _ in LISTED]
    assert len(phrases) == len(set(phrases)) > 30
