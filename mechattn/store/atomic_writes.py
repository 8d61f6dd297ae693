"""Files and folders that are written completely or not at all, even if the process is killed or
power is lost.

New content is written to a temporary folder next to the target, ``.NAME.mechattn-…``, and flushed
to the disk. It gets its name when it is complete. A file replaces the old one in one step. A folder
cannot: the old one is moved away first. If a process is killed between these two steps, both are in
the temporary folder, and :func:`recover` finishes the replacement.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from mechattn.errors import OutputError, say

FLUSHES_AT_ONCE = 16  # threads, most of which wait for the disk

MARKER = "mechattn.json"  # an empty file in each temporary folder of ours
LOCK = "lock"
OLD = "old"
# Errors of FileLock if another process has the lock, or the file system has no locks.
UNLOCKABLE = (Timeout, NotImplementedError)
# A Path makes "s3:/bucket" of "s3://bucket". A single letter is a drive of Windows, "C:/".
_ADDRESS = re.compile(r"\w\w+:/")


def check_writable(path: str | Path) -> None:
    """Check in advance that a file, or the folder of a result, can be written on this machine. Its
    parent folders are made.

    Raises:
        OutputError: It cannot be written; the message says why.
    """
    if _ADDRESS.match(str(path)):
        raise OutputError(
            f"{path} is an address, but this can only be written to a folder of this machine: give"
            ' a path such as "out/page.html"'
        )
    try:
        path = Path(os.path.realpath(path))
        for parent in path.parents:
            if parent.suffix == ".zarr":
                raise OutputError(
                    f"{path} is in {parent}, a folder for a stored result only; choose another"
                    " place"
                )

        # Only a result is written as a folder, and may replace one.
        if path.suffix != ".zarr" and path.is_dir():
            raise OutputError(f"{path} is a folder; name a file in it")
        path.parent.mkdir(parents=True, exist_ok=True)
        # A folder is made and deleted to find out whether this is allowed.
        tempfile.TemporaryDirectory(prefix=_prefix(path), dir=path.parent).cleanup()
    except (OSError, ValueError) as error:  # a ValueError if no file can have this name
        reason = getattr(error, "strerror", None) or error
        raise OutputError(
            f"nothing can be written to {str(path)!r:.300}: {reason}; choose another place"
        ) from None


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file or a folder under a temporary name, and rename it when it is complete.

    Args:
        path: The file or folder; a link is followed.
        write: A function that writes the content to the temporary path that it is given.

    Raises:
        OutputError: It could not be written. What was there before is kept.
    """
    path = Path(os.path.realpath(path))
    try:
        with _temporary_folder(path) as folder:
            new_path = folder / _new_name(path)
            write(new_path)
            flush([folder, new_path, *new_path.rglob("*")])  # rglob yields nothing for a file

            old_path = folder / OLD
            if path.is_dir():
                os.replace(path, old_path)
            try:
                os.replace(new_path, path)
            except OSError:
                if old_path.exists():
                    os.replace(old_path, path)
                raise

            flush([path.parent])
    except OSError as error:
        raise OutputError(
            f"{path} could not be written: {error.strerror or error}. No part of it is left. Free "
            "some space, or choose another place"
        ) from error

    delete_leftovers(path)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8 completely or not at all, as :func:`write_whole` does.

    Raises:
        OutputError: It could not be written. What was there before is kept.
    """
    write_whole(path, lambda new_path: new_path.write_text(text, encoding="utf-8"))


def flush(paths: Iterable[Path]) -> None:
    """Wait until the content of these files, and the names in these folders, are on the disk.

    Raises:
        OSError: A file cannot be flushed.
    """

    def flush_path(path: Path) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError:
            if not path.is_dir():  # some systems, such as Windows, cannot flush a folder
                raise

    with ThreadPoolExecutor(FLUSHES_AT_ONCE) as pool:
        list(pool.map(flush_path, paths))


def recover(path: Path) -> None:
    """Restore a folder that is missing because the process that was replacing it was killed.

    Args:
        path: The folder, by its real path.

    Raises:
        OSError: A complete folder was found, but it cannot be renamed; the error names both paths.
    """
    if os.path.lexists(path):
        return
    for folder in _temporary_folders(path):
        complete_path = folder / OLD
        if not complete_path.exists():
            continue
        new_path = folder / _new_name(path)
        if new_path.exists():  # the new one was complete before the old one was moved away
            complete_path = new_path
        # Whoever has the lock may be another process that is restoring the folder, or a writer
        # between its two renames. Both take less than these 10 seconds. If the lock is held for
        # longer, or the file system has no locks, the writer may be alive.
        with suppress(*UNLOCKABLE), FileLock(folder / LOCK, timeout=10):
            if not os.path.lexists(path):
                os.replace(complete_path, path)
                flush([path.parent])
                say(
                    f"the result of {path} was found complete in {folder}, where a killed process "
                    "had left it"
                )
                with suppress(OSError):  # the next sweep deletes what remains
                    _remove(folder, path)


def delete_leftovers(path: Path) -> None:
    """Delete the temporary folders that killed processes left when they wrote this file or folder,
    which now exists.

    Args:
        path: The file or folder, by its real path.
    """
    for folder in _temporary_folders(path):
        with suppress(OSError, *UNLOCKABLE), FileLock(folder / LOCK, timeout=0):
            _remove(folder, path)


@contextmanager
def _temporary_folder(path: Path) -> Iterator[Path]:
    """Make a locked folder next to a file or folder, and delete it after the ``with`` block."""
    folder, lock = _locked_folder(path)
    try:
        (folder / MARKER).touch()
        yield folder
    finally:
        lock.release()
        with suppress(OSError):
            _remove(folder, path)


def _locked_folder(path: Path) -> tuple[Path, FileLock]:
    """A new temporary folder of this file or folder, and its lock.

    The lock is acquired unless the file system has no locks. Until then a sweep by another process
    may treat the folder as abandoned, lock it and delete it. If that happens, another folder is
    made.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_prefix(path), dir=path.parent))
        lock = FileLock(folder / LOCK, timeout=0)
        try:
            lock.acquire()
        except NotImplementedError:
            pass  # the file system has no locks
        except (Timeout, FileNotFoundError):
            continue  # a sweep deletes the folder
        return folder, lock


def _prefix(path: Path) -> str:
    """The beginning of the names of the temporary folders of this file or folder."""
    return f".{path.name}.mechattn-"


def _new_name(path: Path) -> str:
    """The name of a new file or folder within its temporary folder."""
    return f"new{path.suffix}"


def _temporary_folders(path: Path) -> list[Path]:
    """The temporary folders of this file or folder, recognised by their names and contents."""
    pattern = glob.escape(_prefix(path)) + 8 * "[a-z0-9_]"  # tempfile adds 8 such characters
    our_names = {MARKER, LOCK, OLD, _new_name(path)}
    folders = []
    with suppress(OSError):
        for folder in path.parent.glob(pattern):
            if folder.is_symlink() or not folder.is_dir():
                continue
            entry_names = set(os.listdir(folder))
            # The marker is missing if the process was killed before it wrote the marker or after
            # it deleted it. The folder is then empty or contains the lock alone.
            if entry_names <= our_names and (MARKER in entry_names or entry_names <= {LOCK}):
                folders.append(folder)
    return folders


def _remove(folder: Path, path: Path) -> None:
    """Delete a temporary folder, unless it contains the only copy of a result."""
    if (folder / OLD).exists() and not os.path.lexists(path):
        return
    # The old one is deleted first: while it is here, recover treats a new one as complete. The
    # marker is deleted last: without it, the folder is not recognised as ours.
    for name in (OLD, _new_name(path), LOCK, MARKER):
        entry = folder / name
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
    folder.rmdir()
