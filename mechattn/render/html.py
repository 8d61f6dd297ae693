"""HTML files: written whole or not at all, and never over what mechattn did not write, unless that is meant."""

from __future__ import annotations

import os
from pathlib import Path

from mechattn.errors import OutputError
from mechattn.results.whole import check_writable, write_whole

GENERATOR = '<meta name="generator" content="mechattn'  # stands in the head of each of them
_HEAD = 2**16  # bytes in which it has to stand, before any style or script


def check_page_place(path: str | Path, force: bool = False) -> None:
    """Find out before the work whether a page can be written here.

    Args:
        path: The HTML file.
        force: Replace whatever file is there.

    Raises:
        OutputError: Nothing can be written here, or a file is here that mechattn did not write.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise OutputError(f'{path!r} is no path: give one such as "out/page.html"')
    path = Path(path)
    if inside := [parent for parent in path.absolute().parents if parent.suffix == ".zarr"]:
        raise OutputError(f"{path} is in {inside[0]}, which holds a result and nothing else; choose another place")
    check_writable(path)
    if path.exists() and not (path.is_file() and (force or _is_ours(path))):
        raise OutputError(
            f"{path} exists, and mechattn did not write it, so it is not replaced: choose another name, or mean it "
            "(--force, in Python force=True)"
        )


def save_page(path: str | Path, text: str, force: bool = False) -> Path:
    """Write a page, whole or not at all: what was there before stays until it is.

    Args:
        path: The HTML file.
        text: The page.
        force: Replace whatever file is there.

    Raises:
        OutputError: As :func:`check_page_place` has it, or there is no room.
    """
    path = Path(path)
    check_page_place(path, force)
    write_whole(path, lambda new: new.write_text(text, encoding="utf-8"))
    return path


def _is_ours(path: Path) -> bool:
    try:
        with open(path, "rb") as stored:
            head = stored.read(_HEAD).decode("utf-8", "replace")
    except OSError:
        return False
    return GENERATOR in head.partition("<style")[0].partition("<script")[0]
