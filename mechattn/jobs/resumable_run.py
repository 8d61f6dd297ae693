"""Runs that survive interruption: each finished chunk is a stored result of its own, and in the end
all are merged.

The chunks of ``llama.zarr`` are in the folder ``llama.zarr.parts``: ``00000.zarr``, ``00001.zarr``
…, each with what decides its numbers in its provenance. The same call finds them there, computes
the others, and deletes the folder.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from filelock import FileLock, Timeout
from tqdm.auto import tqdm

from mechattn.errors import Interrupted, MechattnError, OptionError, OutputError
from mechattn.jobs.executors import Executor, ExecutorName, executor_named
from mechattn.jobs.job import Job
from mechattn.results.merge import check_same_run, merge_results
from mechattn.results.result import Result
from mechattn.store.atomic_writes import LOCK, say, sweep
from mechattn.store.objects import DamagedResult, Place, place_of
from mechattn.store.reading import load_result, open_checked_result, open_result
from mechattn.store.writing import check_result_or_place, check_result_place, save_result

Shard = tuple[int, int]
WHOLE: Shard = (1, 1)
CHUNK_NAME = re.compile(r"[0-9]{5,}\.zarr")
UNFINISHED_NAME = re.compile(r"\.[0-9]{5,}\.zarr\.mechattn-[a-z0-9_]{8}")


def run_job(
    job: Job,
    path: str | Path,
    *,
    shard: str | None = None,
    executor: ExecutorName | Executor = "local",
    address: str | None = None,
    workers: int | None = None,
    fresh: bool = False,
) -> Result:
    """Compute a job, store its result and return it; the same call resumes an interrupted job.

    If the result of this job is already stored, it is returned, and a message says so.

    Args:
        job: The job to compute.
        path: Where to store the result, as for ``Result.save``; finished chunks are kept next to it
            until then.
        shard: "3/16" computes the third of 16 shards: chunks 3, 19, 35 …, counted from 1.
        executor: "local", "ray", or your own executor.
        address: The address of a Ray cluster; by default one is started on this machine.
        workers: The number of workers in a cluster; by default one per GPU, or per core.
        fresh: Start again: recompute a stored result and discard kept chunks, of this or any other
            job.

    Raises:
        MechattnError: An argument cannot be used, the path is taken, or the job was interrupted.
    """
    if isinstance(executor, str):
        executor = executor_named(executor, address, workers)
    result, _ = compute(job, path, parse_shard(shard), executor, fresh)
    return result


def compute(
    job: Job, path: str | Path, shard: Shard, executor: Executor, fresh: bool = False
) -> tuple[Result, bool]:
    """As :func:`run_job`; the result, and whether it was computed now and not stored before."""
    path = shard_place(path, shard)
    if fresh:
        check_result_place(path)
    else:
        check_result_or_place(path)

    number, count = shard
    chunks = list(range(number - 1, len(job.chunks), count))
    if not chunks:
        raise OptionError(
            f"shard {number}/{count} has nothing to do: {len(job.prompts)} prompts in chunks of "
            f"{job.chunk} make {len(job.chunks)} chunks. Use fewer shards or smaller chunks"
        )

    if not fresh and _is_stored(job, path, chunks):
        say(f"{path} already holds the result of this run; nothing was computed")
        if chunks_folder(path).is_dir():  # of a run that was killed at its end, or of another job
            with suppress(MechattnError), kept_chunks(path, job, chunks) as chunk_store:
                chunk_store.finished()
                chunk_store.delete()
        return load_result(path), False

    check_result_place(path)
    with kept_chunks(path, job, chunks) as chunk_store:
        if fresh:
            chunk_store.discard()

        finished = chunk_store.finished()
        try:
            _compute_missing(chunk_store, finished, executor)
            merged = merge_results([finished[chunk] for chunk in chunks])
            provenance = {**merged.provenance, "job": job.fingerprint}
            save_result(replace(merged, provenance=provenance), path)
        except KeyboardInterrupt:
            raise Interrupted(
                f"stopped; {len(finished)} of {len(chunks)} chunks are done and kept in "
                f"{chunk_store.folder}; rerun the command to resume"
            ) from None

        chunk_store.delete()

    return load_result(path), True


def parse_shard(text: str | None) -> Shard:
    """Parse the number and the count of shards from "3/16"."""
    if text is None:
        return WHOLE

    match = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise OptionError(f'shard {text!r}: write the third of 16 as "3/16"')
    return int(match[1]), int(match[2])


def shard_place(path: str | Path, shard: Shard) -> str | Path:
    """Return the path of a shard's result: "llama.zarr" gives "llama-3-of-16.zarr"."""
    if shard == WHOLE:
        return path
    folder, slash, last_part = str(path).rpartition("/")

    name = PurePosixPath(last_part)
    return f"{folder}{slash}{name.stem}-{shard[0]}-of-{shard[1]}{name.suffix}"


def chunks_folder(path: str | Path) -> Path:
    """Return where finished chunks are kept: next to the result, or in the current folder if it
    goes to an address."""
    place = place_of(path)
    folder = place.folder.parent if place.folder else Path.cwd()
    return folder / f"{PurePosixPath(str(place)).name}.parts"


@dataclass(frozen=True)
class KeptChunks:
    """The finished chunks of a job, or of a shard of it, in a folder that no other process uses."""

    folder: Path
    job: Job
    chunks: list[int]

    def path(self, chunk: int) -> Path:
        """Where a chunk is kept."""
        return self.folder / f"{chunk:05d}.zarr"

    def finished(self) -> dict[int, Result]:
        """The chunks that need not be computed; damaged ones are deleted, those of another job
        refused."""
        results = {}
        for path in sorted(self.folder.iterdir()):
            if not CHUNK_NAME.fullmatch(path.name):
                continue
            chunk = int(path.stem)
            try:
                result = open_checked_result(path)
                self._check_job(result)
                expected = self.job.chunks[chunk : chunk + 1]
                if [_places(result)] != [list(places) for places in expected]:
                    raise DamagedResult(f"{path} is another chunk")
                results[chunk] = result
            except DamagedResult as error:
                say(f"{error}; computing chunk {chunk} again")
                _delete_chunk(path)

        return results

    def discard(self) -> None:
        """Delete all chunks, and what killed processes have left of some."""
        for path in self.folder.iterdir():
            if CHUNK_NAME.fullmatch(path.name):
                _delete_chunk(path)
            elif UNFINISHED_NAME.fullmatch(path.name):
                shutil.rmtree(path)

    def delete(self) -> None:
        """Delete the folder, now that the result is stored; what somebody has put there meanwhile
        stays."""
        with suppress(OSError, OutputError):
            self.discard()
            (self.folder / LOCK).unlink(missing_ok=True)
            self.folder.rmdir()

    def _check_job(self, result: Result) -> None:
        """Refuse a chunk of another job, and say what differs."""
        decided = result.provenance.get("job")
        for name, value in self.job.decides.items():
            earlier = decided.get(name) if isinstance(decided, dict) else None
            if earlier != value:
                raise OptionError(
                    f"{self.folder} keeps chunks of another run: {name} was {earlier!s:.300} and "
                    f"is now {value!s:.300}. Restore it to resume, or discard them and start "
                    "again: mechattn run --fresh, in Python fresh=True"
                )


@contextmanager
def kept_chunks(path: str | Path, job: Job, chunks: list[int]) -> Iterator[KeptChunks]:
    """The kept chunks of a result, locked for this process within a ``with`` block."""
    folder = chunks_folder(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"finished chunks cannot be kept in {folder}: {error.strerror or error}; give this run "
            "another output"
        ) from error

    try:
        with FileLock(folder / LOCK, timeout=0):
            yield KeptChunks(folder, job, chunks)
    except Timeout:
        raise OutputError(
            f"another process is computing this result: it holds {folder / LOCK}. Wait for it, or "
            "give this run another output"
        ) from None


def _delete_chunk(path: Path) -> None:
    """Delete a chunk under the name of an unfinished one, as half of a chunk is none."""
    Place(folder=path).check_ours()

    unfinished = path.with_name(f".{path.name}.mechattn-deleted_")
    shutil.rmtree(unfinished, ignore_errors=True)
    os.replace(path, unfinished)
    shutil.rmtree(unfinished)


def _compute_missing(
    chunk_store: KeptChunks, finished: dict[int, Result], executor: Executor
) -> None:
    """Compute the chunks that are not finished, and keep each."""
    missing = [chunk for chunk in chunk_store.chunks if chunk not in finished]
    if not missing:
        return
    with tqdm(total=len(chunk_store.chunks), initial=len(finished), desc="chunks", delay=2) as bar:
        for chunk, result in executor.parts(chunk_store.job, missing):
            result = replace(
                result, provenance={**result.provenance, "job": chunk_store.job.decides}
            )
            if finished:  # a model on the hub may have changed since
                check_same_run(next(iter(finished.values())), result)
            save_result(result, chunk_store.path(chunk))
            finished[chunk] = open_result(chunk_store.path(chunk))
            bar.update()


def _is_stored(job: Job, path: str | Path, chunks: list[int]) -> bool:
    """Whether the whole result of these chunks is stored."""
    place = place_of(path)
    try:
        result = open_checked_result(path)
    except DamagedResult as error:
        say(f"{error}; computing it again")
        return False
    except OutputError:  # there is none
        return False
    if place.folder:
        sweep(place.folder)

    places = [place for chunk in chunks for place in job.chunks[chunk]]
    return result.provenance.get("job") == job.fingerprint and _places(result) == places


def _places(result: Result) -> list[int]:
    """The places of a result's prompts in the whole run."""
    return list(result["sequences"].place.values)
