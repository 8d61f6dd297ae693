"""Runs that survive interruption: each finished chunk is stored as a result of its own, and at the
end all chunks are merged.

The chunks of ``llama.zarr`` are in the folder ``llama.zarr.parts``: ``00000.zarr``, ``00001.zarr``
…. The provenance of each says what decides its numbers (``Job.decides``). The same call finds the
finished chunks there, computes the others, stores the merged result, and deletes the folder.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from filelock import FileLock, Timeout
from tqdm.auto import tqdm

from mechattn.errors import Interrupted, MechattnError, OptionError, OutputError, say
from mechattn.jobs.executors import Executor, ExecutorName, executor_named
from mechattn.jobs.job import Job
from mechattn.results.merge import check_same_run, merge_results
from mechattn.results.result import Result, with_provenance
from mechattn.store.atomic_writes import LOCK, sweep
from mechattn.store.objects import DamagedResult, Location, errors_of_files, location_of
from mechattn.store.reading import load_result, open_checked_result, open_result
from mechattn.store.writing import check_result_location, save_result


@dataclass(frozen=True)
class Shard:
    """Part of a job: every ``count``-th of its chunks, starting with the ``number``-th, from 1."""

    number: int
    count: int


WHOLE = Shard(1, 1)
CHUNK_NAME = re.compile(r"[0-9]{5,}\.zarr")
# A killed process leaves a temporary folder of atomic_writes, whose name ends with 8 characters.
UNFINISHED_NAME = re.compile(r"\.[0-9]{5,}\.zarr\.mechattn-[a-z0-9_]{8}")
# What a chunk that is being deleted is called, so that it is recognised as unfinished.
DELETED_ENDING = ".mechattn-deleted_"


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
        path: Where to store the result, as for ``Result.save``. Finished chunks are kept next to it
            until it is stored.
        shard: "3/16" computes the third of 16 shards (chunks 3, 19, 35 …, counted from 1), and
            stores "llama.zarr" as "llama-3-of-16.zarr".
        executor: "local", "ray", or your own executor.
        address: The address of a Ray cluster; by default one is started on this machine.
        workers: The number of workers in a Ray cluster; by default one per GPU or, without GPUs,
            one per ``job.threads`` cores.
        fresh: Start again: recompute a stored result, and discard kept chunks of this or any other
            job.

    Raises:
        MechattnError: An argument cannot be used, the path is taken, or the job was interrupted.
    """
    if isinstance(executor, str):
        executor = executor_named(executor, address, workers)
    elif address is not None or workers is not None:
        raise OptionError(
            'address and workers are for executor="ray": omit them, or give them to your executor'
        )
    chosen_shard = parse_shard(shard)
    location = shard_location(path, chosen_shard)
    result, _ = compute(job, location, chosen_shard, executor, fresh)
    return result


def compute(
    job: Job, path: str | Path, shard: Shard, executor: Executor, fresh: bool = False
) -> tuple[Result, bool]:
    """Compute a shard of a job and store its result at this path, as :func:`run_job` does.

    Returns:
        The result, and whether this call computed it; False if it was stored already.
    """
    chunks = range(shard.number - 1, len(job.chunks), shard.count)
    if not chunks:
        raise OptionError(
            f"shard {shard.number}/{shard.count} has nothing to do: {len(job.prompts)} prompts in"
            f" chunks of {job.chunk} make {len(job.chunks)} chunks. Use fewer shards or smaller"
            " chunks"
        )

    if not fresh and _is_stored(job, path, chunks):
        say(f"{path} already holds the result of this run; nothing was computed")
        if chunks_folder(path).is_dir():  # left by a run that was killed at its end, or another job
            with suppress(MechattnError), locked_chunks(path, job) as chunk_folder:
                chunk_folder.finished()  # an error if they are of another job, so that they stay
                chunk_folder.delete()
        return load_result(path), False

    check_result_location(path)
    with locked_chunks(path, job) as chunk_folder:
        if fresh:
            chunk_folder.discard()
        _compute_missing(chunk_folder, chunks, executor, path)
        chunk_folder.delete()

    return load_result(path), True


def parse_shard(text: str | None) -> Shard:
    """Return the shard that a text such as "3/16" names; None is the whole job.

    Raises:
        OptionError: The text does not name a shard.
    """
    if text is None:
        return WHOLE

    match = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise OptionError(f'shard {text!r}: write the third of 16 as "3/16"')
    return Shard(int(match[1]), int(match[2]))


def shard_location(path: str | Path, shard: Shard) -> str:
    """Where a shard's result is stored: "llama.zarr" gives "llama-3-of-16.zarr"."""
    if shard == WHOLE:
        return str(path)
    ending = rf"-{shard.number}-of-{shard.count}\g<extension>"
    return re.sub(r"(?P<extension>\.\w+)?/*\Z", ending, str(path), count=1)


def chunks_folder(path: str | Path) -> Path:
    """The folder of the finished chunks. It is next to the result, or in the current folder if the
    result is stored at an address."""
    location = location_of(path)
    folder = location.folder or Path.cwd() / PurePosixPath(location.name).name
    return folder.with_name(f"{folder.name}.parts")


@dataclass(frozen=True)
class ChunkFolder:
    """The folder of a job's finished chunks, which is locked for this process."""

    path: Path
    job: Job

    def finished(self) -> dict[int, Result]:
        """Return the kept chunks by number, and delete those that are damaged.

        Raises:
            OptionError: A chunk belongs to another job; the message says what differs.
        """
        results = {}
        for path in sorted(self.path.iterdir()):
            if not CHUNK_NAME.fullmatch(path.name):
                continue
            chunk = int(path.stem)
            try:
                results[chunk] = self._opened(path, chunk)
            except DamagedResult as error:
                _delete_chunk(path)
                say(f"{error}; this kept chunk was deleted")

        return results

    def keep(self, chunk: int, result: Result) -> Result:
        """Store a chunk with what decides its numbers, and open it to be read on demand."""
        path = self.path / f"{chunk:05d}.zarr"
        save_result(with_provenance(result, job_decides=self.job.decides), path)
        return open_result(path)

    def discard(self) -> None:
        """Delete all chunks, finished or not."""
        for path in self.path.iterdir():
            if CHUNK_NAME.fullmatch(path.name):
                _delete_chunk(path)
            elif UNFINISHED_NAME.fullmatch(path.name):
                shutil.rmtree(path)

    def delete(self) -> None:
        """Delete the folder, now that the result is stored. If it contains anything that is not
        ours, the folder stays."""
        with suppress(OSError, OutputError):
            self.discard()
            (self.path / LOCK).unlink(missing_ok=True)
            self.path.rmdir()

    def _opened(self, path: Path, chunk: int) -> Result:
        """Open a kept chunk.

        Raises:
            OptionError: It belongs to another job.
            DamagedResult: It is damaged, or it is another chunk.
        """
        result = open_checked_result(path)
        kept_entries = result.provenance.get("job_decides", {})
        for name, value in self.job.decides.items():
            kept_value = kept_entries.get(name)
            if kept_value != value:
                raise OptionError(
                    f"{self.path} keeps chunks of another run: {name} was {kept_value!s:.300} and "
                    f"is now {value!s:.300}. Restore it to resume, or discard them and start "
                    "again: mechattn run --fresh, in Python fresh=True"
                )

        if chunk >= len(self.job.chunks) or not _holds(result, self.job.chunks[chunk]):
            raise DamagedResult(f"{path} is another chunk")
        return result


@contextmanager
def locked_chunks(path: str | Path, job: Job) -> Iterator[ChunkFolder]:
    """Lock the kept chunks of a result for this process within a ``with`` block.

    Raises:
        OutputError: Another process has locked them, or their folder cannot be made.
    """
    folder = chunks_folder(path)
    lock = FileLock(folder / LOCK, timeout=0)
    with errors_of_files(
        f"finished chunks cannot be kept in {folder}", "give this run another output"
    ):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            raise OutputError(
                f"another process is computing this result: it holds {folder / LOCK}. Wait for it, "
                "or give this run another output"
            ) from None

    try:
        yield ChunkFolder(folder, job)
    finally:
        lock.release()


def _is_stored(job: Job, path: str | Path, chunks: range) -> bool:
    """Whether the result of exactly these chunks of the job is stored."""
    try:
        result = open_checked_result(path)
    except DamagedResult as error:
        say(f"{error}; computing it again")
        return False
    except OutputError:  # no result is stored, or it cannot be read
        return False
    folder = location_of(path).folder
    if folder:  # a process that was killed at the end of its save leaves a temporary folder
        sweep(folder)

    prompt_indices: list[int] = []
    for chunk in chunks:
        prompt_indices += job.chunks[chunk]
    return result.provenance.get("job") == job.fingerprint and _holds(result, prompt_indices)


def _holds(result: Result, prompt_indices: Iterable[int]) -> bool:
    """Whether a result holds exactly these prompts of the run, in this order."""
    return result["sequences"].place.values.tolist() == list(prompt_indices)


def _compute_missing(
    chunk_folder: ChunkFolder, chunks: range, executor: Executor, path: str | Path
) -> None:
    """Compute and keep the chunks that are not finished, and store the merged result.

    Raises:
        Interrupted: The user stopped it.
    """
    job = chunk_folder.job
    results = chunk_folder.finished()
    missing = [chunk for chunk in chunks if chunk not in results]
    try:
        with tqdm(total=len(chunks), initial=len(results), desc="chunks", delay=2) as bar:
            if missing:  # an executor may start a cluster even if it gets no chunks
                for chunk, result in executor.parts(job, missing):
                    if results:  # a model on the hub may have changed between two chunks
                        check_same_run(next(iter(results.values())), result)
                    results[chunk] = chunk_folder.keep(chunk, result)
                    bar.update()
        merged = merge_results([results[chunk] for chunk in chunks])
        entries = {**merged.provenance, "job": job.fingerprint}
        entries.pop("job_decides")  # the fingerprint is a hash of it
        save_result(replace(merged, provenance=entries), path)
    except KeyboardInterrupt:
        raise Interrupted(
            f"stopped; {len(results)} of {len(chunks)} chunks are done and kept in "
            f"{chunk_folder.path}; rerun the command to resume"
        ) from None


def _delete_chunk(path: Path) -> None:
    """Delete a chunk. It is renamed first, so that a chunk that is half deleted when the process is
    killed counts as unfinished.

    Raises:
        OutputError: It is not a stored result, or contains something else.
    """
    Location(str(path)).check_ours()

    unfinished = path.with_name(f".{path.name}{DELETED_ENDING}")
    shutil.rmtree(unfinished, ignore_errors=True)
    os.replace(path, unfinished)
    shutil.rmtree(unfinished)
