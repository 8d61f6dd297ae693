"""Writes HTML files completely or not at all, and does not replace other programs' files without force."""

from __future__ import annotations

import os
from pathlib import Path

from mechattn.errors import OutputError
from mechattn.results.whole import check_writable, write_whole

GENERATOR = '<meta name="generator" content="mechattn'  # in the head of each of our pages
_HEAD = 2**16  # bytes at the start of a file that must contain it, before any style or script


def check_page_place(path: str | Path, force: bool = False) -> None:
    """Check that a page can be written here, before the run.

    Args:
        path: The HTML file.
        force: Replace whatever file is there.

    Raises:
        OutputError: The path cannot be written to, or holds a file that mechattn did not write.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise OutputError(f'{path!r} is not a path: give one such as "out/page.html"')
    path = Path(path)
    if inside := [parent for parent in path.absolute().parents if parent.suffix == ".zarr"]:
        raise OutputError(f"{path} is in {inside[0]}, a folder for a stored result only; choose another place")
    check_writable(path)
    if path.exists() and not (path.is_file() and (force or _is_ours(path))):
        raise OutputError(
            f"{path} exists and was not written by mechattn, so it is not replaced; choose another name, or give "
            f"--force (in Python force=True)"
        )


def save_page(path: str | Path, text: str, force: bool = False) -> Path:
    """Write a page completely or not at all; an existing page is kept until then.

    Args:
        path: The HTML file.
        text: The page.
        force: Replace whatever file is there.

    Raises:
        OutputError: As for :func:`check_page_place`, or the disk is full.
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
