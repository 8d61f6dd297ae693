"""Computes chunks on the workers of a Ray cluster: plain actors, each of which loads the model once."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mechattn.errors import MechattnError, OptionError, OutputError
from mechattn.jobs.job import Job, Worker
from mechattn.jobs.ray_cluster import start_alone

TRIES = 3  # attempts at a chunk whose worker dies
_Task = Literal["check", "part"]


@dataclass(frozen=True)
class Ray:
    """One actor per GPU (or per core if there are no GPUs), each of which gets its next chunk when it finishes one.

    Args:
        address: The address of a running cluster ("auto", "ray://host:10001"); by default one is started on this
            machine, which no other machine can reach.
        workers: The number of actors; by default the number of GPUs, or cores, of the cluster.
    """

    address: str | None = None
    workers: int | None = None

    def parts(self, job: Job, chunks: Seq[int]) -> Iterator[tuple[int, bytes]]:
        """Yield each chunk's number and packed result as they arrive; all prompts are checked before that."""
        ray = self._connected()
        actors = _Actors(ray, replace(job, threads=job.threads or 1), self._count(ray, job, len(chunks)))
        try:
            for _ in actors.each("check", chunks):
                pass
            yield from actors.each("part", chunks)
        finally:
            actors.end()

    def _connected(self) -> Any:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # sends no usage data
        loaded = sys.modules.get("ray")
        if loaded is not None and loaded.is_initialized():
            return loaded
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
        try:
            return start_alone(quiet) if self.address is None else self._joined(quiet)
        except ImportError:
            raise OptionError('executor="ray" needs Ray: pip install "mechattn[ray]"') from None

    def _joined(self, options: dict[str, Any]) -> Any:
        import ray

        try:
            ray.init(address=self.address, **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise OptionError(f"there is no Ray cluster at address={self.address!r}: {reason}") from None
        return ray

    def _count(self, ray: Any, job: Job, chunks: int) -> int:
        """The number of actors, at most one per chunk."""
        has = ray.cluster_resources()
        room = int(has.get("GPU", 0)) or int(has.get("CPU", 1)) // (job.threads or 1)
        return max(1, min(self.workers or room, chunks))


@dataclass
class _Actors:
    """The actors of a job, what each is doing, and how often each chunk has been tried."""

    ray: Any
    job: Job
    count: int
    busy: dict[Any, tuple[Any, int | None]] = field(default_factory=dict)  # by pending result; None: loading the model
    idle: list[Any] = field(default_factory=list)
    lost: Counter[int | None] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.gpu = self.ray.cluster_resources().get("GPU", 0) >= 1
        self.stored = self.ray.put(self.job)  # once, for any number of actors
        for _ in range(self.count):
            self._start()

    def each(self, task: _Task, chunks: Seq[int]) -> Iterator[tuple[int, bytes]]:
        """Run a task for every chunk, one at a time per actor, so that results do not pile up."""
        waiting = list(reversed(chunks))
        while waiting or any(chunk is not None for _, chunk in self.busy.values()):
            while waiting and self.idle:
                self._give(task, waiting.pop())
            (come,), _ = self.ray.wait(list(self.busy), num_returns=1)
            actor, chunk = self.busy.pop(come)
            try:
                made = self.ray.get(come)
            except self.ray.exceptions.RayActorError as error:
                self._replace(chunk, error)
                waiting += [] if chunk is None else [chunk]
                continue
            except self.ray.exceptions.RayTaskError as error:
                raise error.cause if isinstance(error.cause, MechattnError) else error from None
            self.idle.append(actor)
            if chunk is not None:
                yield chunk, made

    def end(self) -> None:
        """Release all actors; the cluster stays up."""
        for actor in [*self.idle, *(actor for actor, _ in self.busy.values())]:
            self.ray.kill(actor)

    def _give(self, task: _Task, chunk: int) -> None:
        actor = self.idle.pop(0)
        method = actor.check if task == "check" else actor.part
        self.busy[method.remote(chunk)] = actor, chunk

    def _start(self) -> None:
        threads = self.job.threads or 1
        options: dict[str, Any] = {"num_cpus": 1 if self.gpu else threads, "num_gpus": 1 if self.gpu else 0}
        environment = {"env_vars": {"OMP_NUM_THREADS": str(threads)}}
        made = self.ray.remote(_Actor).options(**options, max_restarts=0, runtime_env=environment)
        actor = made.remote(self.stored)
        self.busy[actor.load.remote()] = actor, None

    def _replace(self, chunk: int | None, error: Exception) -> None:
        self.lost[chunk] += 1
        if self.lost[chunk] >= TRIES:
            raise OutputError(_lost(self.job, chunk, error)) from error
        self._start()


class _Actor:
    """A worker in a process of the cluster."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def load(self) -> None:
        """Load the model; errors raised in the constructor would not reach the caller."""
        import torch

        torch.set_num_threads(self.job.threads or 1)
        self.worker = Worker(self.job)

    def check(self, chunk: int) -> None:
        """See ``Worker.check``."""
        self.worker.check(chunk)

    def part(self, chunk: int) -> bytes:
        """See ``Worker.part``."""
        return self.worker.part(chunk)


def _lost(job: Job, chunk: int | None, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0]
    if chunk is None:
        return f"{TRIES} workers died while loading {job.model!r}, perhaps for lack of memory ({reason})"
    places = job.chunks[chunk]
    return (
        f"chunk {chunk} (prompts {places[0]} to {places[-1]}) lost its worker {TRIES} times, perhaps for lack of "
        f"memory ({reason}); finished chunks are kept. Use fewer conditions or more memory, and run the command again"
    )
