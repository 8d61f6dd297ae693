"""A disk that loses power: what was not flushed is empty, and the names that were not flushed may be lost too."""

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kills import each_operation

State = dict[str, bytes | None]  # the content of each file by its path; None for a folder


class Disk:
    """What is on the disk under a folder, beside what the system's memory has.

    A file is as it was when it was last flushed. Of names there are two extremes: all as they are now, as file systems
    with a journal keep them, or each folder's as they were when it was last flushed.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.lock = root, threading.RLock()
        self.contents: dict[int, bytes] = {}
        self.names: dict[int, dict[str, int]] = {}
        self.pins: dict[int, int] = {}  # open files, so that no inode gets the number of another
        for path in [root, *root.rglob("*")]:
            self.flush(path)

    def flush(self, path: int | Path) -> None:
        """Write a file or a folder's names, given by its path or its descriptor."""
        descriptor = os.dup(path) if isinstance(path, int) else os.open(path, os.O_RDONLY)
        about = os.fstat(descriptor)
        with self.lock:
            descriptor = self._pinned(descriptor)
            if not stat.S_ISDIR(about.st_mode):
                self.contents[about.st_ino] = os.pread(descriptor, about.st_size, 0)
                return
            found = {}
            for name in os.listdir(descriptor):
                child = self._pinned(os.open(name, os.O_RDONLY, dir_fd=descriptor))
                found[name] = os.fstat(child).st_ino
            self.names[about.st_ino] = found

    def state(self, named: bool) -> State:
        """What is left when power is lost now: all names as they are, or those that were flushed."""
        made: State = {}
        with self.lock:
            if named:
                for path in self.root.rglob("*"):
                    at = path.relative_to(self.root).as_posix()
                    made[at] = None if path.is_dir() else self.contents.get(path.stat().st_ino, b"")
            else:
                self._flushed(self.root.stat().st_ino, "", made)
        return made

    def _flushed(self, folder: int, at: str, made: State) -> None:
        for name, inode in self.names.get(folder, {}).items():
            if stat.S_ISDIR(os.fstat(self.pins[inode]).st_mode):
                made[at + name] = None
                self._flushed(inode, f"{at}{name}/", made)
            else:
                made[at + name] = self.contents.get(inode, b"")

    def _pinned(self, descriptor: int) -> int:
        """The descriptor that is kept of a file or folder."""
        kept = self.pins.setdefault(os.fstat(descriptor).st_ino, descriptor)
        if kept != descriptor:
            os.close(descriptor)
        return kept


def power_losses(root: Path, work: Callable[[], object]) -> list[State]:
    """Do some work once; what each loss of power in it would leave, in order; the last two are after its end."""
    disk, states = Disk(root), []

    def note() -> None:
        for named in (True, False):
            if (now := disk.state(named)) not in states:
                states.append(now)

    def fsync(descriptor: int) -> None:
        with disk.lock:
            disk.flush(descriptor)
            note()

    def seen() -> None:
        if (
            threading.current_thread() is threading.main_thread()
        ):  # Zarr's threads write at the same time
            note()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with each_operation(root, seen):
            work()
    states += [disk.state(True), disk.state(False)]
    for descriptor in disk.pins.values():
        os.close(descriptor)
    return states


def write(state: State, root: Path) -> None:
    """Make a state the content of an empty folder."""
    for name, content in state.items():
        path = root / name
        (path if content is None else path.parent).mkdir(parents=True, exist_ok=True)
        if content is not None:
            path.write_bytes(content)
