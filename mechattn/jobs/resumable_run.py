"""Runs that survive interruption: each finished chunk is kept, and their store is finished at the end, or mended."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tqdm.auto import tqdm

from mechattn.errors import Interrupted, MechattnError, OptionError, OutputError
from mechattn.jobs.executors import Executor, ExecutorName, executor_named
from mechattn.jobs.job import Job, announced
from mechattn.jobs.kept_chunks import FRESH, Parts, explained, open_parts
from mechattn.results.merge import merge_results
from mechattn.results.result import Result
from mechattn.store.atomic_writes import move_whole, say, sweep
from mechattn.store.objects import OBJECTS, SCHEMA, Store, as_place, attributes_of, is_address
from mechattn.store.pieces import finish, unlike, write_chunk
from mechattn.store.reading import load_result, read_result
from mechattn.store.result_bytes import packed, unpacked
from mechattn.store.saving import check_result_place, upload

Compute = Callable[[Job, list[int]], Iterable[tuple[int, bytes]]]
Shard = tuple[int, int]
WHOLE: Shard = (1, 1)


@dataclass(frozen=True)
class Computed:
    """The result of a job and where it is stored."""

    result: Result
    path: str | Path
    now: bool  # this call computed and stored it; otherwise it already existed


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
def computed(
    job: Job, path: str | Path, shard: Shard, executor: Executor, fresh: bool = False
) -> Iterator[Computed]:
    """Yield the stored result of a job; its chunks are deleted if the ``with`` block ends without an error."""
    path = shard_place(path, shard)
    check_result_place(path, used=not fresh)
    chunks = list(range(len(job.chunks)))[shard[0] - 1 :: shard[1]]
    if not chunks:
        raise OptionError(
            f"shard {shard[0]}/{shard[1]} has nothing to do: {len(job.prompts)} prompts in chunks of {job.chunk} make "
            f"{len(job.chunks)} chunks. Use fewer shards or smaller chunks"
        )
    if not fresh:
        _mend(job, path, chunks, executor.parts)
    if not fresh and (stored := _stored(job, path, chunks)) is not None:
        say(f"{path} already holds the result of this run; nothing was computed")
        yield Computed(stored, path, now=False)
        folder = parts_folder(path)
        if folder.is_dir():  # what is kept for it goes; anything else in the folder stays
            with suppress(MechattnError, OSError), open_parts(folder, job) as parts:
                parts.remove()
        return
    check_result_place(path)
    if words := announced(job, path):
        say(words)
    with open_parts(parts_folder(path), job, fresh) as parts:
        store = ChunkStore(job, parts, chunks)
        for chunk in parts.done():
            if bad := unlike(parts.store, parts.read(chunk).provenance[OBJECTS]):
                say(f"{bad[0]} of chunk {chunk} is damaged or missing; computing the chunk again")
                parts.drop(chunk)
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


@dataclass(frozen=True)
class ChunkStore:
    """Where the chunks of a job become objects of its result, while their other arrays are kept beside it."""

    job: Job
    parts: Parts
    chunks: Seq[int]  # in the store, in order

    def write(self, chunk: int, content: bytes) -> bytes:
        """Write the per-prompt values of a chunk; return its other arrays and a record of what was written."""
        with explained(f"nothing more can be written to {self.parts.folder}"):
            return packed(_written(self.job, self.parts.store, self.chunks.index(chunk), content))

    def finish(self, path: str | Path) -> None:
        """Write the metadata once all chunks are written, read all back, and give the store its final name."""
        receipt, store = (
            merge_results([self.parts.read(chunk) for chunk in self.chunks]),
            self.parts.store,
        )
        with explained(f"nothing more can be written to {self.parts.folder}"):
            finish(store, receipt, {"job": self.job.fingerprint})
        if bad := unlike(store, attributes_of(store.place)[OBJECTS]):
            raise OutputError(
                f"what was just written cannot be read back: {bad[0]} is damaged or missing"
            )
        place = as_place(path)
        if isinstance(place, Path):
            move_whole(Path(store.place), place)
        else:
            upload(store, place)


def _compute(store: ChunkStore, executor: Executor) -> None:
    parts, chunks = store.parts, store.chunks
    done = [chunk for chunk in parts.done() if chunk in chunks]
    todo = [chunk for chunk in chunks if chunk not in done]
    if not todo:
        return
    before = done[:1]
    hidden = (
        {"disable": True} if len(chunks) == 1 else {}
    )  # otherwise the environment's TQDM_DISABLE decides
    with tqdm(
        total=len(chunks), initial=len(done), desc="chunks", unit="chunk", delay=2, **hidden
    ) as bar:
        for chunk, content in executor.parts(store.job, todo):
            receipt = store.write(chunk, content)
            if before:
                try:  # a kept chunk and a new one have to belong together
                    merge_results([parts.read(before.pop()), unpacked(receipt)])
                except OptionError as error:
                    raise OptionError(
                        f"the chunks kept in {parts.folder} belong to another run. {error}. Undo the change, or {FRESH}"
                    ) from None
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
    if found["sequences"].place.values.tolist() != [
        at for chunk in chunks for at in job.chunks[chunk]
    ]:
        return None
    if isinstance(place := as_place(path), Path):
        sweep(place)
    return load_result(path)


def _mend(job: Job, path: str | Path, chunks: Seq[int], compute: Compute) -> None:
    """Compute the damaged or missing chunks of a stored result again; the others stay unchanged."""
    place = as_place(path)
    try:
        about = attributes_of(place)
        same = (
            about.get("mechattn_schema") == SCHEMA
            and json.loads(about["provenance"])["job"] == job.fingerprint
        )
        objects, cut = dict(about[OBJECTS]), tuple(f"{name}/c/" for name in about["by_prompt"])
    except (OSError, ValueError, LookupError, TypeError):
        return
    if not same:
        return
    named = {
        name: re.fullmatch(r".+/c/(\d{1,9})/.+", name) for name in objects if name.startswith(cut)
    }
    if any(found is None or int(found[1]) >= len(chunks) for found in named.values()):
        return  # nothing of ours; load_result names it
    bad = unlike(Store(place), {name: objects[name] for name in named})
    if numbers := sorted({int(found[1]) for name in bad if (found := named[name])}):
        say(
            f"{bad[0]} at {path} is damaged or missing; computing {len(numbers)} of {len(chunks)} chunks again"
        )
        for chunk, content in compute(job, [chunks[number] for number in numbers]):
            _written(job, Store(place), chunks.index(chunk), content, objects)


def _written(
    job: Job, store: Store, number: int, content: bytes, known: dict[str, str] | None = None
) -> Result:
    size = min(job.chunk, len(job.prompts))
    return write_chunk(store, number, unpacked(content), size, job.values == "float16", known)
