"""The folder where a run keeps its finished chunks until all are there: whole or not at all, each with a checksum."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mechattn.engine.job import Job
from mechattn.errors import OptionError, OutputError
from mechattn.results.merge import merge_results
from mechattn.results.packed import unpacked
from mechattn.results.result import Result

_JOB = "job.json"
_LOCK = "lock"


@dataclass(frozen=True)
class Parts:
    """Files named after their chunk and the checksum of their content: ``00003-0123456789abcdef.zip``."""

    folder: Path

    def done(self) -> list[int]:
        """The chunks that are here and whole; what isn't is named on stderr and thrown away."""
        found = []
        for path in sorted(self.folder.glob("*.zip")):
            chunk, _, checksum = path.stem.partition("-")
            if chunk.isdecimal() and _checksum(int(chunk), path.read_bytes()) == checksum:
                found.append(int(chunk))
            else:
                _say(f"{path} is damaged (its checksum is another): it is computed again")
                path.unlink()
        return sorted(set(found))

    def write(self, chunk: int, content: bytes) -> None:
        """Keep a chunk.

        Raises:
            OutputError: There is no room; nothing of it is left.
        """
        new = self.folder / f"{chunk:05d}.new"
        try:
            new.write_bytes(content)
            os.replace(new, self.folder / f"{chunk:05d}-{_checksum(chunk, content)}.zip")
        except OSError as error:
            new.unlink(missing_ok=True)
            raise OutputError(
                f"chunk {chunk} could not be kept in {self.folder}: {error.strerror or error}. The chunks before it "
                "are kept; make room, and give the same command again"
            ) from error

    def read(self, chunk: int) -> Result:
        """The result of a chunk."""
        (path,) = self.folder.glob(f"{chunk:05d}-*.zip")
        return unpacked(path.read_bytes(), path)

    def check_same(self, before: int, now: bytes) -> None:
        """A chunk that was kept before and one that is new belong together.

        Raises:
            OptionError: They don't, naming the field: the model's weights are others, say.
        """
        try:
            merge_results([self.read(before), unpacked(now)])
        except OptionError as error:
            raise OptionError(
                f"the chunks that are kept in {self.folder} are of another run. {error}. Put back what has changed, "
                "or delete this folder to begin anew"
            ) from None

    def remove(self) -> None:
        """Throw the folder away."""
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def open_parts(folder: Path, job: Job) -> Iterator[Parts]:
    """The parts of a job, for this process alone.

    Raises:
        OutputError: Another process computes the same result, or the folder cannot be used.
        OptionError: The folder has parts of another run: its config, prompts or versions have changed.
    """
    from filelock import FileLock, Timeout

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / _LOCK, timeout=0)
        with lock:
            for left in folder.glob("*.new"):  # by a process that was killed while it wrote
                left.unlink()
            _check_job(folder, job)
            yield Parts(folder)
    except Timeout:
        raise OutputError(
            f"another process is computing this result: it holds {folder / _LOCK}. Wait for it, or give this run "
            "another output"
        ) from None


def _check_job(folder: Path, job: Job) -> None:
    """The job that the folder is of; written down for the first time in an empty one."""
    path, ours = folder / _JOB, job.decides()
    theirs = _read_json(path)
    if theirs is None:
        for part in folder.glob("*.zip"):
            _say(f"{part} is thrown away: what run it is of is not known, as {path} cannot be read")
            part.unlink()
        new = folder / f"{_JOB}.new"
        new.write_text(json.dumps(ours, indent=1), encoding="utf-8")
        os.replace(new, path)
        return
    for name, value in ours.items():
        if theirs.get(name) != value:
            raise OptionError(
                f"{folder} keeps chunks of another run: {name} was {_short(theirs.get(name))} and is now "
                f"{_short(value)}. Put it back to go on, or delete this folder to begin anew"
            )


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 300 else text[:299] + "…"


def _checksum(chunk: int, content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8, key=str(chunk).encode()).hexdigest()


def _say(sentence: str) -> None:
    print(f"mechattn: {sentence}", file=sys.stderr, flush=True)
