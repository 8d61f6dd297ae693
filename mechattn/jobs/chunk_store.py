"""The store that the chunks of a run are written to: resuming, finishing and repairing it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mechattn.errors import OutputError
from mechattn.jobs.job import Job
from mechattn.jobs.kept_chunks import Parts
from mechattn.results.merge import merge_results
from mechattn.results.result import Result
from mechattn.store.addresses import as_place
from mechattn.store.atomic_writes import move_whole, say
from mechattn.store.objects import OBJECTS, SCHEMA, Store, attributes_of
from mechattn.store.result_bytes import packed, unpacked
from mechattn.store.saving import upload
from mechattn.store.writing import finish, unlike, write_chunk

Compute = Callable[[Job, list[int]], Iterable[tuple[int, bytes]]]


@dataclass(frozen=True)
class ChunkStore:
    """Where the chunks of a job become objects of its result, while their other arrays are kept beside it.

    Args:
        job: The job.
        parts: The kept chunks.
        chunks: The chunks in the store, in order.
    """

    job: Job
    parts: Parts
    chunks: Seq[int]

    def drop_damaged(self) -> None:
        """Drop kept chunks whose objects differ from what was written."""
        for chunk in self.parts.done():
            if bad := unlike(self._store, self.parts.read(chunk).provenance[OBJECTS]):
                say(f"{bad[0]} of chunk {chunk} is damaged or missing; computing the chunk again")
                self.parts.drop(chunk)

    def write(self, chunk: int, content: bytes) -> bytes:
        """Write the per-prompt values of a chunk; return its other arrays and a record of what was written."""
        with self._explained():
            return packed(_written(self.job, self._store, self.chunks.index(chunk), content))

    def finish(self, path: str | Path) -> None:
        """Write the metadata once all chunks are written, read all back, and give the store its final name."""
        receipt = merge_results([self.parts.read(chunk) for chunk in self.chunks])
        with self._explained():
            finish(self._store, receipt, {"job": self.job.fingerprint})
        if bad := unlike(self._store, attributes_of(self._store.place)[OBJECTS]):
            raise OutputError(f"what was just written cannot be read back: {bad[0]} is damaged or missing")
        place = as_place(path)
        if isinstance(place, Path):
            move_whole(self.parts.store, place)
        else:
            upload(self._store, place)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(
                f"nothing more can be written to {self.parts.folder}: {error.strerror or error}. Earlier chunks are "
                "kept; free some space and run the same command again"
            ) from error

    @property
    def _store(self) -> Store:
        return Store(self.parts.store)


def mend(job: Job, path: str | Path, chunks: Seq[int], compute: Compute) -> None:
    """Compute the damaged or missing chunks of a stored result again; the others stay unchanged."""
    place = as_place(path)
    try:
        about = attributes_of(place)
        same = about.get("mechattn_schema") == SCHEMA and json.loads(about["provenance"])["job"] == job.fingerprint
        objects, cut = dict(about[OBJECTS]), tuple(f"{name}/c/" for name in about["by_prompt"])
    except (OSError, ValueError, LookupError, TypeError):
        return
    if not same:
        return
    named = {name: re.fullmatch(r".+/c/(\d{1,9})/.+", name) for name in objects if name.startswith(cut)}
    if any(found is None or int(found[1]) >= len(chunks) for found in named.values()):
        return  # nothing of ours; load_result names it
    bad = unlike(Store(place), {name: objects[name] for name in named})
    if numbers := sorted({int(found[1]) for name in bad if (found := named[name])}):
        say(f"{bad[0]} at {path} is damaged or missing; computing {len(numbers)} of {len(chunks)} chunks again")
        for chunk, content in compute(job, [chunks[number] for number in numbers]):
            _written(job, Store(place), chunks.index(chunk), content, objects)


def _written(job: Job, store: Store, number: int, content: bytes, known: dict[str, str] | None = None) -> Result:
    size = min(job.chunk, len(job.prompts))
    return write_chunk(store, number, unpacked(content), size, job.values == "float16", known)
