"""The folder where a run keeps its finished chunks until all are done, each written completely and with a checksum."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mechattn.errors import OptionError, OutputError
from mechattn.jobs.job import Job
from mechattn.results.result import Result
from mechattn.store.atomic_writes import say, write_file
from mechattn.store.objects import Store, files_in, named
from mechattn.store.result_bytes import unpacked

_JOB, _LOCK = "job.json", "lock"
_CHUNK = re.compile(r"([0-9]{5,})-([0-9a-f]{16})\.zip")
_STORE = "store"  # of a large result, until it is complete
_IN_STORE = r"(/(zarr\.json|[^/]+/(zarr\.json|[^/]+/(zarr\.json|c(/[0-9]+)*/?)?)?)?(\.new)?)?"
_OURS = re.compile(rf"{_STORE}{_IN_STORE}|({_CHUNK.pattern}|{re.escape(_JOB)})(\.new)?|{_LOCK}")
FRESH = "discard them and start again: mechattn run --fresh, in Python fresh=True"


@dataclass(frozen=True)
class Parts:
    """Files named after their chunk and the checksum of their content: ``00003-0123456789abcdef.zip``."""

    folder: Path

    def chunks(self) -> dict[Path, tuple[int, str]]:
        """The chunk files, complete or not, with their numbers and checksums."""
        found = ((path, _CHUNK.fullmatch(path.name)) for path in sorted(self.folder.iterdir()))
        return {path: (int(name[1]), name[2]) for path, name in found if name}

    def done(self) -> list[int]:
        """The complete chunks; damaged ones are reported on stderr."""
        found = []
        for path, (chunk, checksum) in self.chunks().items():
            try:
                content = path.read_bytes()
            except OSError as error:
                raise OutputError(
                    f"{path} cannot be read ({error.strerror or error}); nothing was deleted. Run the same command "
                    "again when it can be"
                ) from error
            if _checksum(chunk, content) == checksum:
                found.append(chunk)
            else:
                say(f"{path} is damaged (its checksum does not match); computing it again")
        return sorted(set(found))

    def write(self, chunk: int, content: bytes) -> None:
        """Keep a chunk, replacing a damaged one."""
        path = self.folder / f"{chunk:05d}-{_checksum(chunk, content)}.zip"
        with explained(f"chunk {chunk} could not be kept in {self.folder}"):
            write_file(path, content)
            self.drop(chunk, but=path)

    def read(self, chunk: int) -> Result:
        """Return the result of a complete chunk, whose large arrays are read on demand."""
        for path, (number, _) in self.chunks().items():
            if number == chunk:
                return unpacked(path)
        raise OutputError(
            f"chunk {chunk} is no longer in {self.folder}; run the same command again"
        )

    @property
    def store(self) -> Store:
        """Where the objects of the chunks are written until the result gets its final name."""
        return Store(self.folder / _STORE)

    def drop(self, chunk: int, but: Path | None = None) -> None:
        """Delete a chunk; one of its files may stay."""
        for path, (number, _) in self.chunks().items():
            if number == chunk and path != but:
                path.unlink()

    def forget(self) -> int:
        """Discard the chunks and return their number."""
        chunks = self.chunks()
        for path in chunks:
            path.unlink()
        if (self.folder / _STORE).is_dir():
            shutil.rmtree(self.folder / _STORE)
        return len(chunks)

    def remove(self) -> None:
        """Delete what a run wrote here, and the folder if nothing else is in it."""
        with suppress(OSError):
            if (self.folder / _STORE).is_dir() and not _strangers(self.folder):
                shutil.rmtree(self.folder / _STORE)
            ours = [
                path
                for path in self.folder.iterdir()
                if _OURS.fullmatch(path.name) and path.name != _STORE
            ]
            for path in sorted(
                ours, key=lambda path: (path.name == _LOCK, path.name == _JOB)
            ):  # these two last
                path.unlink(missing_ok=True)
            if left := _strangers(self.folder):
                say(
                    f"{self.folder} was not deleted: it holds {named(left)}, which mechattn did not write"
                )
            else:
                self.folder.rmdir()


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn an error of the system while writing into a sentence that begins with ``what``."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{what}: {error.strerror or error}. Earlier chunks are kept; free some space and run the same command "
            "again"
        ) from error


@contextmanager
def open_parts(folder: Path, job: Job, fresh: bool = False) -> Iterator[Parts]:
    """Open the parts of a job, locked for this process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        strangers = _strangers(folder)
    except OSError as error:
        raise OutputError(
            f"finished chunks cannot be kept in {folder}: {error.strerror or error}; give this run another output"
        ) from error
    if strangers:
        raise OutputError(
            f"{folder} is where finished chunks are kept, and holds {named(strangers)}, which mechattn did not write; "
            "move that away, or give this run another output"
        )
    try:
        with FileLock(folder / _LOCK, timeout=0):
            parts = Parts(folder)
            _check_job(parts, job, fresh)
            yield parts
    except Timeout:
        raise OutputError(
            f"another process is computing this result: it holds {folder / _LOCK}. Wait for it, or give this run "
            "another output"
        ) from None


def _check_job(parts: Parts, job: Job, fresh: bool) -> None:
    """Check the recorded job of the folder, or record it if the folder is empty."""
    ours = job.decides()
    theirs = _kept_job(parts)
    if theirs is not None and not fresh:
        name = next((name for name, value in ours.items() if theirs.get(name) != value), None)
        if name is None:
            return
        if theirs and parts.done():
            raise OptionError(
                f"{parts.folder} keeps chunks of another run: {name} was {_short(theirs.get(name))} and is now "
                f"{_short(ours[name])}. Restore it to resume, or {FRESH}"
            )
    if theirs is not None and (count := parts.forget()):
        why = "as asked" if theirs else f"as {_JOB}, which says to which run they belong, is empty"
        say(f"{count} chunks in {parts.folder} are discarded, {why}")
    with explained(f"{parts.folder / _JOB} could not be written"):
        write_file(parts.folder / _JOB, json.dumps(ours, indent=1).encode())


def _kept_job(parts: Parts) -> dict[str, Any] | None:
    """The recorded job of the chunks; None if there are neither chunks nor a record, {} if the record is empty."""
    path = parts.folder / _JOB
    try:
        found = json.loads(path.read_text(encoding="utf-8").strip("\0") or "{}")
        if isinstance(found, dict):
            return found
        why = "it is damaged"
    except FileNotFoundError:
        if not parts.chunks():
            return None
        why = "it is missing"
    except OSError as error:
        why = str(error.strerror or error)
    except (ValueError, RecursionError):
        why = "it is damaged"
    raise OutputError(
        f"{path} cannot be read ({why}); it says which run the chunks next to it belong to. Nothing was deleted: "
        f"run the same command again when it can be read, or delete {parts.folder} to start again"
    )


def _strangers(folder: Path) -> list[str]:
    return sorted(name for name in files_in(folder) if not _OURS.fullmatch(name))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 300 else text[:299] + "…"


def _checksum(chunk: int, content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8, key=str(chunk).encode()).hexdigest()
