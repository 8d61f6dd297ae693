"""What an installed package holds: every file that the code reads is among those that the build takes along."""

from fnmatch import fnmatch
from pathlib import Path

import mechattn

try:
    import tomllib
except ImportError:
    import tomli as tomllib

ROOT = Path(mechattn.__file__).parent
TAKEN = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["mechattn"]


def beside_the_code():
    files = [path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return [path.as_posix() for path in files if path.suffix != ".py"]


def test_every_file_beside_the_code_is_taken_along():
    assert len(beside_the_code()) > 20
    assert [file for file in beside_the_code() if not any(fnmatch(file, pattern) for pattern in TAKEN)] == []


def test_every_pattern_finds_a_file():
    assert [pattern for pattern in TAKEN if not any(fnmatch(file, pattern) for file in beside_the_code())] == []
