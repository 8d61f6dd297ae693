"""Executors compute the chunks of a job, in this process or on the workers of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Literal, Protocol, get_args, runtime_checkable

from mechattn.errors import OptionError
from mechattn.jobs.job import Job
from mechattn.jobs.local import Local

ExecutorName = Literal["local", "ray"]


@runtime_checkable
class Executor(Protocol):
    """Something that computes chunks."""

    def parts(self, job: Job, chunks: Seq[int]) -> Iterator[tuple[int, bytes]]:
        """Yield each chunk's number and packed result, in any order."""
        ...


def executor_named(name: ExecutorName, address: str | None = None, workers: int | None = None) -> Executor:
    """Return the executor with a given name."""
    if name not in get_args(ExecutorName):
        raise OptionError(f"executor={name!r}: choose one of {', '.join(map(repr, get_args(ExecutorName)))}")
    if name == "ray":
        from mechattn.jobs.ray import Ray

        return Ray(address, workers)
    if address is not None or workers is not None:
        given = "address" if address is not None else "workers"
        raise OptionError(f'{given} is for a cluster: add executor="ray", or omit it')
    return Local()
