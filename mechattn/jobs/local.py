"""Computes chunks one after another in this process."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from mechattn.jobs.job import Job, Worker, with_threads


@dataclass(frozen=True)
class Local:
    """The executor for a single machine, or for one job of a job array."""

    def parts(self, job: Job, chunks: Seq[int]) -> Iterator[tuple[int, bytes]]:
        """Yield each chunk's number and packed result; all prompts are checked before any is measured."""
        with with_threads(job.threads):
            worker = Worker(job)
            for chunk in chunks:
                worker.check(chunk)
            for chunk in chunks:
                yield chunk, worker.part(chunk)
