"""Runs that survive interruption: each finished chunk is kept, and all are merged at the end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mechattn.errors import Interrupted, OptionError, OutputError
from mechattn.jobs.chunk_store import ChunkStore, mend
from mechattn.jobs.executor import Executor, ExecutorName, executor_named
from mechattn.jobs.job import Job
from mechattn.jobs.kept_chunks import discard_parts, open_parts
from mechattn.jobs.size_estimate import announced
from mechattn.results.result import Result
from mechattn.store.addresses import as_place, is_address
from mechattn.store.atomic_writes import say, sweep
from mechattn.store.reading import load_result, read_result
from mechattn.store.saving import check_result_place

Shard = tuple[int, int]
WHOLE: Shard = (1, 1)


@dataclass(frozen=True)
class Computed:
    """The result of a job and where it is stored.

    Args:
        result: The result.
        path: Its path.
        now: Whether this call computed and stored it; otherwise it already existed.
    """

    result: Result
    path: str | Path
    now: bool


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
        path: Where to store the result, as for ``Result.save``; finished chunks are kept next to it until then.
        shard: "3/16" computes the third of 16 shards: chunks 3, 19, 35 …, counted from 1.
        executor: "local", "ray", or your own executor.
        address: The address of a Ray cluster; by default one is started on this machine.
        workers: The number of workers in a cluster; by default one per GPU, or per core.
        fresh: Start again: recompute a stored result and discard kept chunks, of this or any other job.

    Raises:
        MechattnError: An argument cannot be used, the path is taken, or the job was interrupted.
    """
    made = executor_named(executor, address, workers) if isinstance(executor, str) else executor
    with computed(job, path, parse_shard(shard), made, fresh) as found:
        return found.result


@contextmanager
def computed(job: Job, path: str | Path, shard: Shard, executor: Executor, fresh: bool = False) -> Iterator[Computed]:
    """Yield the stored result of a job; its chunks are deleted if the ``with`` block ends without an error."""
    path = shard_place(path, shard)
    check_result_place(path, used=not fresh)
    chunks = _of_shard(job, shard)
    if not fresh:
        mend(job, path, chunks, executor.parts)
    if not fresh and (stored := _stored(job, path, chunks)) is not None:
        say(f"{path} already holds the result of this run; nothing was computed")
        yield Computed(stored, path, now=False)
        discard_parts(parts_folder(path), job)
        return
    check_result_place(path)
    if words := announced(job, path):
        say(words)
    with open_parts(parts_folder(path), job, fresh) as parts:
        store = ChunkStore(job, parts, chunks)
        store.drop_damaged()
        try:
            _compute(store, executor)
            store.finish(path)
            yield Computed(load_result(path), path, now=True)
        except KeyboardInterrupt:
            have = f"{len(set(parts.done()) & set(chunks))} of {len(chunks)} chunks are done and kept in {parts.folder}"
            raise Interrupted(f"stopped; {have}; rerun the command to resume") from None
        parts.remove()


def parse_shard(text: str | None) -> Shard:
    """Parse the number and the count of shards from "3/16"."""
    if text is None:
        return WHOLE
    found = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise OptionError(f'shard {text!r}: write the third of 16 as "3/16"')
    return int(found[1]), int(found[2])


def shard_place(path: str | Path, shard: Shard) -> str | Path:
    """Return the path of a shard's result: "llama.zarr" gives "llama-3-of-16.zarr"."""
    if shard == WHOLE:
        return path
    head, _, last = str(path).rpartition("/")
    name = PurePosixPath(last)
    return f"{head}{'/' if head else ''}{name.stem}-{shard[0]}-of-{shard[1]}{name.suffix}"


def parts_folder(path: str | Path) -> Path:
    """Return where finished chunks are kept: next to the result, or in the current folder if it goes to an address."""
    place = as_place(path)
    name = str(place).rstrip("/").rpartition("/")[2] if is_address(path) else Path(place).name
    folder = Path.cwd() if is_address(path) else Path(place).parent
    return folder / f"{name}.parts"


def _of_shard(job: Job, shard: Shard) -> list[int]:
    number, of = shard
    chunks = list(range(len(job.chunks)))[number - 1 :: of]
    if not chunks:
        raise OptionError(
            f"shard {number}/{of} has nothing to do: {len(job.prompts)} prompts in chunks of {job.chunk} make "
            f"{len(job.chunks)} chunks. Use fewer shards or smaller chunks"
        )
    return chunks


def _compute(store: ChunkStore, executor: Executor) -> None:
    """Compute the missing chunks."""
    from tqdm.auto import tqdm

    parts, chunks = store.parts, store.chunks
    done = [chunk for chunk in parts.done() if chunk in chunks]
    todo = [chunk for chunk in chunks if chunk not in done]
    if not todo:
        return
    before = done[:1]
    bar = tqdm(total=len(chunks), initial=len(done), desc="chunks", unit="chunk", delay=2, disable=len(chunks) == 1)
    with bar:
        for chunk, content in executor.parts(store.job, todo):
            receipt = store.write(chunk, content)
            if before:
                parts.check_same(before.pop(), receipt)
            parts.write(chunk, receipt)
            bar.update()


def _stored(job: Job, path: str | Path, chunks: list[int]) -> Result | None:
    """The stored result of these chunks, if it belongs to this job."""
    try:
        found = read_result(path, lazy=True)
    except OutputError:  # missing, or damaged and computed again
        return None
    if found.provenance.get("job") != job.fingerprint:
        return None
    if found["sequences"].place.values.tolist() != [at for chunk in chunks for at in job.chunks[chunk]]:
        return None
    if isinstance(place := as_place(path), Path):
        sweep(place)
    return load_result(path)
