"""A process that dies at its n-th file operation: nothing under a folder is made, renamed or deleted after that."""

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

_CHANGES = {
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Killed(BaseException):
    """In place of SIGKILL: what runs after it, such as a ``finally``, can change no file either."""


class _Watch:
    """Counts the operations that change something in a folder, as Python's audit hooks tell them."""

    root: str | None = None
    left = 0
    empty = False
    last = ""
    die: Callable[[], None]
    seen: Callable[[], None] | None = None

    def __call__(self, event: str, arguments: tuple) -> None:
        if self.root is None or event not in _CHANGES or not self._counts(event, arguments):
            return
        if self.seen is not None:
            self.seen()
            return
        self.left -= 1
        if self.left >= 0:
            return
        if self.left == -1:
            self.last = event
            if self.empty and event == "open":  # it is there, and nothing is written to it
                root, self.root = self.root, None
                with suppress(OSError):
                    os.close(os.open(arguments[0], arguments[2], 0o666))
                self.root = root
        self.die()

    def _counts(self, event: str, arguments: tuple) -> bool:
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITES):
            return False
        paths = [
            os.fsdecode(a)
            for a in arguments[: 2 if event == "os.rename" else 1]
            if isinstance(a, (str, bytes))
        ]
        within = (
            event in ("os.remove", "os.rmdir", "os.mkdir") and arguments[-1] != -1
        )  # relative to an open folder
        return within or any(path.startswith(str(self.root)) for path in paths)


_watch = _Watch()
sys.addaudithook(_watch)


def _raise() -> None:
    raise Killed


@contextmanager
def killed_at(
    root: Path, operation: int, empty: bool = False, die: Callable[[], None] = _raise
) -> Iterator[list[str]]:
    """Die at an operation, from 0; what the ``with`` gives then holds what kind of operation it was.

    Args:
        root: The folder whose changes count.
        operation: The first that does not happen.
        empty: If it opens a file for writing, that is there, and is empty.
        die: How.
    """
    died: list[str] = []
    _watch.root, _watch.left, _watch.empty, _watch.die = str(root), operation, empty, die
    try:
        yield died
    except Killed:
        died.append(_watch.last)
        _let_all_die()
    finally:
        _watch.root = None


@contextmanager
def each_operation(root: Path, seen: Callable[[], None]) -> Iterator[None]:
    """Call something before each operation that changes something in a folder."""
    _watch.root, _watch.seen = str(root), seen
    try:
        yield
    finally:
        _watch.root = _watch.seen = None


def _let_all_die() -> None:
    """A killed process has no threads left; here those of zarr go on, and must not write when the next trial has begun."""
    from zarr.core.sync import loop, sync

    async def others() -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*rest, return_exceptions=True)

    if loop[0] is not None:
        sync(others())


def each_kill(
    root: Path, before: Callable[[], object], work: Callable[[], object], step: int = 1
) -> Iterator[int]:
    """Do some work again and again, killed at its first operation, its second … until it comes to its end."""
    for operation in count(step=step):
        for empty in (False, True):
            before()
            with killed_at(root, operation, empty) as died:
                work()
            if not died:
                assert operation > step, "the work changes nothing in this folder"
                return
            yield operation
            if died != ["open"]:
                break
