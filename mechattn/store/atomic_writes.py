"""Writes files and folders completely or not at all, even if the process is killed or the machine loses power.

Everything is first written to a temporary folder next to the target, ``.NAME.mechattn-…``, and renamed when complete. A
file replaces the old one in one step. A folder cannot: the old one is moved away, then the new one gets its name. If a
process is killed between these steps, both exist, and :func:`recover` finishes the job. What is new is on the disk, not
only in the system's memory, before it is renamed, and so is its name before anything old is deleted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from mechattn.errors import OptionError, OutputError

_MARKER, _LOCK, _OLD = "mechattn.json", "lock", "old"
_WAIT = 10.0  # seconds to wait for another process that is renaming
_AT_ONCE = 16  # files that are flushed at the same time
_NAME, _PATH = 255, 4095  # bytes, on the file systems in use


def say(sentence: str) -> None:
    """Print a message to standard error."""
    print(f"mechattn: {sentence}", file=sys.stderr, flush=True)


def file_names(models: Iterable[str]) -> dict[str, str]:
    """A name for the files of each model, in place of "{model}": "toy:llama" gives "toy-llama", "/a/b/" gives "b"."""
    found: dict[str, str] = {}
    for model in models:
        last = model.rstrip("/").rsplit("/", 1)[-1]
        name = "".join(c if c.isalnum() or c in "._-" else "-" for c in last)
        for other, taken in found.items():
            if taken.casefold() == name.casefold() and other != model:
                raise OptionError(
                    f"the models {other!r} and {model!r} would both write to files named {name!r}: run them "
                    "separately, or give their folders different names"
                )
        found[model] = name
    return found


def check_name(path: str | Path) -> None:
    """Refuse names that no file system accepts, before trying."""
    text = str(path)
    if re.search(
        "[\0\ud800-\udc7f\udd00-\udfff]", text
    ):  # those between stand for bytes that are not UTF-8
        raise OutputError(
            f"{text!r:.80} contains a NUL or half of a surrogate pair, which no file name may; remove it"
        )
    stored = text.encode("utf-8", "surrogatepass")
    if len(stored) > _PATH or max(map(len, stored.split(b"/"))) > _NAME:
        raise OutputError(
            f'"{text[:40]}…" is too long: file systems allow {_NAME} bytes for a name and {_PATH:,} for a path'
        )


def check_writable(path: str | Path) -> None:
    """Check in advance that a file or folder can be written at this place."""
    check_name(path)
    path = Path(os.path.realpath(path))
    folder = path.parent
    if path.is_symlink():
        raise OutputError(
            f"{path} is a link that leads back to itself; choose another name, or delete the link"
        )
    if inside := [parent for parent in path.parents if parent.suffix == ".zarr"]:
        raise OutputError(
            f"{path} is in {inside[0]}, a folder for a stored result only; choose another place"
        )
    if path.suffix != ".zarr" and path.is_dir():
        raise OutputError(f"{path} is a folder; name a file in it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = f"{error.strerror or error}; choose another place"
        raise OutputError(f"nothing can be written to {folder}: {reason}") from None


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file or a folder under a temporary name, and rename it when complete."""
    path = Path(os.path.realpath(path))
    try:
        with _beside(path) as folder:
            new = folder / f"new{path.suffix}"
            write(new)
            _rename(new, path, folder)
    except OSError as error:
        raise OutputError(
            f"{path} could not be written: {error.strerror or error}. No part of it is left; free some space, "
            "or choose another place"
        ) from error
    sweep(path)


def move_whole(new: Path, path: Path) -> None:
    """Move a complete folder to its name, replacing what is there; links are followed."""
    path = Path(os.path.realpath(path))
    try:
        with _beside(path) as folder:
            _rename(new, path, folder)
    except OSError as error:
        raise OutputError(
            f"{new} could not be renamed to {path}: {error.strerror or error}"
        ) from error
    sweep(path)


def write_file(path: Path, content: bytes, flushed: bool = True) -> None:
    """Write a file in a folder of ours, under a temporary name first."""
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_bytes(content)
        if flushed:
            flush([new])
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def flush(paths: Iterable[Path]) -> None:
    """Wait until files and the lists of names of folders, which are flushed separately, are on the disk."""

    def one(path: Path) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError:
            if not path.is_dir():  # not every system can flush folders
                raise

    with ThreadPoolExecutor(_AT_ONCE) as pool:  # many at once, as each one may wait for the disk
        list(pool.map(one, dict.fromkeys(paths)))


def recover(path: Path) -> None:
    """Finish the renaming of a folder if a process was killed after moving the old one away."""
    path = Path(os.path.realpath(path))
    if os.path.lexists(path):
        return
    for folder in _left_beside(path):
        new = folder / f"new{path.suffix}"
        if not (folder / _OLD).exists():
            continue
        try:
            with _locked(folder, _WAIT) as alone:
                if alone and not os.path.lexists(path):
                    os.replace(new if new.exists() else folder / _OLD, path)
                    flush([path.parent])
                    say(
                        f"the result of {path} was found complete in {folder}, where a killed process had left it"
                    )
                    _remove(folder, path)
        except OSError as error:
            raise OutputError(
                f"the result of {path} was found complete in {folder}, but cannot be moved to its place "
                f"({error.strerror or error}): rename {new if new.exists() else folder / _OLD} to {path}"
            ) from error


def sweep(path: Path) -> None:
    """Delete what killed processes left behind while writing this file or folder, now that it exists."""
    path = Path(os.path.realpath(path))
    for folder in _left_beside(path):
        with suppress(OSError), _locked(folder, 0) as alone:
            if alone:
                _remove(folder, path)


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A temporary folder next to a name, marked as ours and locked inside a ``with`` block."""
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.mechattn-", dir=path.parent))
    try:
        (folder / _MARKER).write_text(json.dumps({"writes": path.name}), encoding="utf-8")
        with _locked(folder, 0):
            yield folder
    finally:
        with suppress(OSError):
            _remove(folder, path)


def _rename(new: Path, path: Path, folder: Path) -> None:
    """Give something new, once it is on the disk, its name; what has that name is moved into the folder."""
    old = folder / _OLD
    flush([folder, *folder.iterdir(), new, *new.rglob("*")])
    if path.is_dir():
        os.replace(path, old)
    try:
        os.replace(new, path)
    except OSError:
        if old.exists():
            os.replace(old, path)
        raise
    flush([path.parent])


def _left_beside(path: Path) -> list[Path]:
    """The existing folders of :func:`_beside`, recognised by name, marker and content."""
    named = re.compile(re.escape(f".{path.name}.mechattn-") + "[a-z0-9_]{8}")
    try:
        found = [folder for folder in path.parent.iterdir() if named.fullmatch(folder.name)]
        return [folder for folder in found if _is_ours(folder, path)]
    except OSError:
        return []


def _is_ours(folder: Path, path: Path) -> bool:
    if folder.is_symlink() or not folder.is_dir():
        return False
    held = {entry.name for entry in folder.iterdir()}
    if not held <= {_MARKER, _LOCK, _OLD, f"new{path.suffix}"}:
        return False
    if not held <= {_MARKER, _LOCK}:
        with suppress(ValueError, RecursionError):
            return bool(
                json.loads((folder / _MARKER).read_text(encoding="utf-8")) == {"writes": path.name}
            )
        return False
    return True  # killed before it wrote anything, or after it had deleted everything


@contextmanager
def _locked(folder: Path, wait: float) -> Iterator[bool]:
    """Whether no other process is using the folder; if so, it is reserved for this one inside the ``with`` block."""
    lock = FileLock(folder / _LOCK, timeout=wait)
    try:
        lock.acquire()
    except (
        Timeout,
        NotImplementedError,
    ):  # locked by another process, or a file system without locks
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _remove(folder: Path, path: Path) -> None:
    """Delete the folder, its marker last, unless it contains the only copy of a result."""
    if (folder / _OLD).exists() and not os.path.lexists(path):
        return
    for entry in (
        _OLD,
        f"new{path.suffix}",
    ):  # in this order: a new one next to an old one is complete
        if (folder / entry).is_dir():
            shutil.rmtree(folder / entry)
        else:
            (folder / entry).unlink(missing_ok=True)
    for entry in (_LOCK, _MARKER):
        (folder / entry).unlink(missing_ok=True)
    folder.rmdir()
