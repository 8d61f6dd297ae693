"""Runs whose results do not fit in memory: resuming, finishing and repairing the store that chunks are written to."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

from mechattn.errors import OutputError
from mechattn.jobs.chunk_store import Into
from mechattn.jobs.job import Job
from mechattn.jobs.kept_chunks import Parts
from mechattn.results.merge import merge_results
from mechattn.results.provenance import digest
from mechattn.store.addresses import as_place
from mechattn.store.atomic_writes import move_whole, say
from mechattn.store.objects import OBJECTS, SCHEMA, Store, attributes_of
from mechattn.store.result_bytes import unpacked
from mechattn.store.writing import finish, unlike

Compute = Callable[[Job, list[int]], object]


def begun(job: Job, path: str | Path, parts: Parts, chunks: Seq[int]) -> Job:
    """Return the job with the store for its chunks; drop kept chunks that differ from what was written."""
    place = as_place(path)
    store = Store(place if isinstance(place, str) else parts.store)
    for chunk in parts.done():
        if bad := unlike(store, parts.opened(chunk).provenance[OBJECTS]):
            say(f"{bad[0]} of chunk {chunk} is damaged or missing; computing the chunk again")
            parts.drop(chunk)
    if isinstance(place, str) and not parts.done():
        store.begin(_owner(job, parts))
    owner = _owner(job, parts) if isinstance(place, str) else None
    return replace(job, into=Into(str(store.place), tuple(chunks), job.chunk, job.values == "float16", owner=owner))


def check_arrived(job: Job, chunk: int, content: bytes) -> None:
    """Refuse a chunk that a worker wrote to a folder of the same name on its own machine."""
    if job.into is None or isinstance(place := job.into.store.place, str):
        return
    lost = [name for name in unpacked(content).provenance[OBJECTS] if not (place / name).is_file()]
    if lost:
        raise OutputError(
            f"a worker wrote chunk {chunk}, but there is no {lost[0]} in {place}: a large result needs a folder "
            'that every worker sees, or an address such as "s3://bucket/result.zarr"; large=False needs neither'
        )


def finished(job: Job, path: str | Path, parts: Parts, chunks: Seq[int]) -> None:
    """Write the metadata of a store once all chunks are written, and move it to its final name."""
    assert job.into is not None
    job.into.check()
    receipt = merge_results([parts.opened(chunk) for chunk in chunks])
    finish(job.into.store, receipt, {"job": job.fingerprint})
    place = as_place(path)
    if isinstance(place, Path):
        move_whole(parts.store, place)


def mend(job: Job, path: str | Path, chunks: Seq[int], compute: Compute) -> None:
    """Compute the damaged or missing chunks of a stored result again; the others stay unchanged."""
    place = as_place(path)
    try:
        about = attributes_of(place)
        same = about.get("mechattn_schema") == SCHEMA and json.loads(about["provenance"])["job"] == job.fingerprint
    except (OSError, ValueError, LookupError, TypeError):
        return
    objects = about.get(OBJECTS)
    if not same or not isinstance(objects, dict):
        return
    named = {name: re.fullmatch(r".+/c/(\d{1,9})/.+", name) for name in objects}
    if any(found is None or int(found[1]) >= len(chunks) for found in named.values()):
        return  # nothing of ours; load_result names it
    bad = unlike(Store(place), objects)
    if numbers := sorted({int(found[1]) for name in bad if (found := named[name])}):
        say(f"{bad[0]} at {path} is damaged or missing; computing {len(numbers)} of {len(chunks)} chunks again")
        into = Into(str(place), tuple(chunks), job.chunk, job.values == "float16", objects)
        compute(replace(job, into=into), [chunks[number] for number in numbers])


def _owner(job: Job, parts: Parts) -> str:
    """Identify who writes to an address: this job, with its finished chunks in this folder of this machine."""
    return digest([job.fingerprint, platform.node(), str(parts.folder.absolute())])
