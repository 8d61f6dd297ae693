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
from itertools import chain
from pathlib import Path, PurePosixPath

from filelock import FileLock, Timeout
from tqdm.auto import tqdm

from mechattn.errors import Interrupted, MechattnError, OptionError, OutputError, say
from mechattn.jobs.executors import Executor, ExecutorName, executor_for
from mechattn.jobs.job import Job
from mechattn.results.merge import check_same_run, merge_results
from mechattn.results.result import Result, with_provenance
from mechattn.store.atomic_writes import LOCK, delete_leftovers
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
    executor = executor_for(executor, address, workers)
    chosen_shard = parse_shard(shard)
    location = shard_location(path, chosen_shard)
    result, _ = compute(job, location, chosen_shard, executor, fresh)
    return result


def compute(
    job: Job, path: str | Path, shard: Shard, executor: Executor, fresh: bool
) -> tuple[Result, bool]:
    """Compute a shard of a job and store its result at this path, as :func:`run_job` does.

    Returns:
        The result, and whether this call computed it; False if it was stored already.

    Raises:
        MechattnError: The shard has no chunks, the path is taken, or the job was interrupted.
    """
    chunk_indices = range(shard.number - 1, len(job.chunks), shard.count)
    if not chunk_indices:
        raise OptionError(
            f"shard {shard.number}/{shard.count} has nothing to do: the job has {len(job.chunks)} "
            "chunks. Use fewer shards or smaller chunks"
        )

    is_stored = not fresh and _is_stored(job, path, chunk_indices)
    if is_stored:
        say(f"{path} already holds the result of this run; nothing was computed")
        # A process that was killed at the end of this run leaves a temporary folder and chunks.
        folder = location_of(path).folder
        if folder:
            delete_leftovers(folder)
        if chunks_folder(path).is_dir():
            with suppress(MechattnError), locked_chunks(path, job) as chunk_folder:
                chunk_folder.finished()  # an error if they are of another job, so that they stay
                chunk_folder.delete()
    else:
        check_result_location(path)
        with locked_chunks(path, job) as chunk_folder:
            if fresh:
                chunk_folder.discard()
            _compute_and_store(chunk_folder, chunk_indices, executor, path)
            chunk_folder.delete()

    return load_result(path), not is_stored


def parse_shard(text: str | None) -> Shard:
    """Return the shard that a text such as "3/16" names; None is the whole job.

    Raises:
        OptionError: The text does not name a shard.
    """
    if text is None:
        return WHOLE

    match = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", str(text))
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise OptionError(f'shard {text!r}: write the third of 16 as "3/16"')
    return Shard(int(match[1]), int(match[2]))


def shard_location(path: str | Path, shard: Shard) -> str:
    """Where a shard's result is stored: "llama.zarr" gives "llama-3-of-16.zarr"."""
    if shard == WHOLE:
        return str(path)
    stem, extension = os.path.splitext(str(path).rstrip("/"))
    return f"{stem}-{shard.number}-of-{shard.count}{extension}"


def chunks_folder(path: str | Path) -> Path:
    """The folder of the finished chunks. It is next to the result, or in the current folder if the
    result is stored at an address."""
    location = location_of(path)
    folder = location.folder
    if folder is None:
        folder = Path.cwd() / PurePosixPath(location.name).name
    return folder.with_name(f"{folder.name}.parts")


@dataclass(frozen=True)
class ChunkFolder:
    """The folder of a job's finished chunks, which is locked for this process."""

    path: Path
    job: Job

    def finished(self) -> dict[int, Result]:
        """Return the kept chunks by index, without those that are damaged.

        Raises:
            OptionError: A chunk belongs to another job; the message says what differs.
        """
        results = {}
        for path in self._paths_named(CHUNK_NAME):
            index = int(path.stem)
            try:
                results[index] = self._opened(path, index)
            except DamagedResult as error:
                say(f"{error}; this kept chunk is not used")

        return results

    def keep(self, index: int, result: Result) -> Result:
        """Store a chunk with what decides its numbers, and open it to be read on demand."""
        path = self.path / f"{index:05d}.zarr"
        save_result(with_provenance(result, job_decides=self.job.decides), path)
        return open_result(path)

    def discard(self) -> None:
        """Delete all chunks, finished or not.

        Raises:
            OutputError: A chunk is not a stored result, or contains something else.
        """
        for path in self._paths_named(UNFINISHED_NAME):
            shutil.rmtree(path)
        for path in self._paths_named(CHUNK_NAME):
            Location(str(path)).check_ours()
            # Renamed first, so that it has an UNFINISHED_NAME if the process is killed meanwhile.
            unfinished = path.with_name(f".{path.name}.mechattn-deleted_")
            os.replace(path, unfinished)
            shutil.rmtree(unfinished)

    def delete(self) -> None:
        """Delete the folder, now that the result is stored. If it contains anything that is not
        ours, the folder stays."""
        with suppress(OSError, OutputError):
            self.discard()
            (self.path / LOCK).unlink(missing_ok=True)
            self.path.rmdir()

    def _paths_named(self, pattern: re.Pattern[str]) -> list[Path]:
        return sorted(path for path in self.path.iterdir() if pattern.fullmatch(path.name))

    def _opened(self, path: Path, index: int) -> Result:
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

        if index >= len(self.job.chunks) or not _holds(result, self.job.chunks[index]):
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


def _is_stored(job: Job, path: str | Path, chunk_indices: range) -> bool:
    """Whether the result of exactly these chunks of the job is stored."""
    try:
        result = open_checked_result(path)
    except DamagedResult as error:
        say(f"{error}; computing it again")
        return False
    except OutputError:  # no result is stored, or it cannot be read
        return False
    chunks = [job.chunks[index] for index in chunk_indices]
    return result.provenance.get("job") == job.fingerprint and _holds(result, chain(*chunks))


def _holds(result: Result, prompt_indices: Iterable[int]) -> bool:
    """Whether a result holds exactly these prompts of the run, in this order."""
    return result["sequences"].place.values.tolist() == list(prompt_indices)


def _compute_and_store(
    chunk_folder: ChunkFolder, chunk_indices: range, executor: Executor, path: str | Path
) -> None:
    """Compute and keep the chunks that are not finished, and store the merged result.

    Raises:
        Interrupted: The user stopped it.
    """
    job = chunk_folder.job
    results = chunk_folder.finished()
    missing_indices = [index for index in chunk_indices if index not in results]
    try:
        with tqdm(total=len(chunk_indices), initial=len(results), desc="chunks", delay=2) as bar:
            if missing_indices:  # an executor may start a cluster even if it gets no chunks
                for index, result in executor.parts(job, missing_indices):
                    if results:  # a model on the hub may have changed between two chunks
                        check_same_run(next(iter(results.values())), result)
                    results[index] = chunk_folder.keep(index, result)
                    bar.update()
        merged = merge_results([results[index] for index in chunk_indices])
        entries = {**merged.provenance, "job": job.fingerprint}
        entries.pop("job_decides")  # the fingerprint is a hash of it
        save_result(replace(merged, provenance=entries), path)
    except KeyboardInterrupt:
        raise Interrupted(
            f"stopped; {len(results)} of {len(chunk_indices)} chunks are done and kept in "
            f"{chunk_folder.path}; rerun the command to resume"
        ) from None
