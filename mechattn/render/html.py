"""Writes HTML files completely or not at all, and does not replace other programs' files without force."""

from __future__ import annotations

import os
from pathlib import Path

from mechattn.errors import OutputError
from mechattn.store.atomic_writes import check_writable, write_whole

GENERATOR = '<meta name="generator" content="mechattn'  # in the head of each of our pages
_HEAD = 2**16  # bytes at the start of a file that must contain it, before any style or script


def check_page_place(path: str | Path, force: bool = False) -> None:
    """Check that a page can be written here, before the run."""
    if not isinstance(path, (str, os.PathLike)):
        raise OutputError(f'{path!r} is not a path: give one such as "out/page.html"')
    path = Path(path)
    check_writable(path)
    if path.exists() and not (path.is_file() and (force or _is_ours(path))):
        raise OutputError(
            f"{path} exists and was not written by mechattn, so it is not replaced; choose another name, or give "
            f"--force (in Python force=True)"
        )


def save_page(path: str | Path, text: str, force: bool = False) -> Path:
    """Write a page completely or not at all; an existing page is kept until then."""
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
    return not head or GENERATOR in head.partition("<style")[0].partition("<script")[0]
