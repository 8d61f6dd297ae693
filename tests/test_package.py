"""What an installed package holds, and that it is found whatever folder Python is started in."""

import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import mechattn

ROOT = Path(mechattn.__file__).parent
# The build takes every file of the package but those that git is told to ignore.
IGNORED = [
    line.strip("/") for line in (ROOT.parent / ".gitignore").read_text(encoding="utf-8").split()
]


def left_out(files):
    return [
        file
        for file in files
        if any(fnmatch(part, one) for part in file.split("/") for one in IGNORED)
    ]


def test_every_file_beside_the_code_is_taken_along():
    files = [
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*")
        if path.is_file() and path.suffix != ".py"
    ]
    files = [file for file in files if "__pycache__" not in file]
    assert {"py.typed", "pages/templates/main.html.j2"} < set(files)
    assert sum(file.startswith("toys/") for file in files) > 20
    assert left_out(files) == []
    assert left_out(["toys/llama.zarr/zarr.json"]), "one that is ignored would be noticed"


def test_a_folder_of_its_name_does_not_hide_it(tmp_path):
    """As in the folder that holds a clone named mechattn, where ``import mechattn`` may find the clone."""
    (tmp_path / "mechattn").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = "import mechattn; print(mechattn.MechattnError.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "MechattnError", (
        f"{done.stderr}: install it by path, as make does"
    )
