"""Computes the chunks of a job, in this process or on the workers of a Ray cluster, each of which loads the model once.

Anyone who can reach a Ray cluster can run code in it, and by default it listens on every interface. One that is started
here listens on the loopback address only, and requires a token.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch

from mechattn.errors import MechattnError, OptionError, OutputError
from mechattn.jobs.job import Job, Worker, with_threads

ExecutorName = Literal["local", "ray"]
TRIES = 3  # attempts at a chunk whose worker dies
_Task = Literal["check", "part"]
_LOOPBACK = ("127.0.0.1", "::1")
# Where clusters of several machines are unsupported, Ray stays on the loopback address; this requests it everywhere.
_ONE_MACHINE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@runtime_checkable
class Executor(Protocol):
    """Something that computes chunks."""

    def parts(self, job: Job, chunks: Seq[int]) -> Iterator[tuple[int, bytes]]:
        """Yield each chunk's number and packed result, in any order."""
        ...


def executor_named(
    name: ExecutorName, address: str | None = None, workers: int | None = None
) -> Executor:
    """Return the executor with a given name."""
    if name not in get_args(ExecutorName):
        raise OptionError(
            f"executor={name!r}: choose one of {', '.join(map(repr, get_args(ExecutorName)))}"
        )
    if name == "ray":
        return Ray(address, workers)
    if given := [
        name for name, value in (("address", address), ("workers", workers)) if value is not None
    ]:
        raise OptionError(f'{given[0]} is for a cluster: add executor="ray", or omit it')
    return Local()


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


@dataclass(frozen=True)
class Ray:
    """One actor per GPU (or per core if there are no GPUs), each of which gets its next chunk when it finishes one."""

    address: str | None = (
        None  # "auto", "ray://host:10001"; else one is started here that no other machine can reach
    )
    workers: int | None = (
        None  # the number of actors; by default that of the GPUs, or cores, of the cluster
    )

    def parts(self, job: Job, chunks: Seq[int]) -> Iterator[tuple[int, bytes]]:
        """Yield each chunk's number and packed result as they arrive; all prompts are checked before that."""
        ray = self._connected()
        has, job = ray.cluster_resources(), replace(job, threads=job.threads or 1)
        room = (
            self.workers or int(has.get("GPU", 0)) or int(has.get("CPU", 1)) // (job.threads or 1)
        )
        actors = _Actors(ray, job, max(1, min(room, len(chunks))))
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
            if self.address is None:
                return _start_alone(quiet)
            import ray
        except ImportError:
            raise OptionError('executor="ray" needs Ray: pip install "mechattn[ray]"') from None
        try:
            ray.init(address=self.address, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise OptionError(
                f"there is no Ray cluster at address={self.address!r}: {reason}"
            ) from None
        return ray


@dataclass
class _Actors:
    """The actors of a job, what each is doing, and how often each chunk has been tried."""

    ray: Any
    job: Job
    count: int
    busy: dict[Any, tuple[Any, int | None]] = field(
        default_factory=dict
    )  # by pending result; None: loading the model
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
                idle, given = self.idle.pop(0), waiting.pop()
                self.busy[getattr(idle, task).remote(given)] = idle, given
            (come,), _ = self.ray.wait(list(self.busy), num_returns=1)
            actor, chunk = self.busy.pop(come)
            try:
                made = self.ray.get(come)
            except self.ray.exceptions.RayActorError as error:
                self.lost[chunk] += 1
                if self.lost[chunk] >= TRIES:
                    raise OutputError(_lost(self.job, chunk, error)) from error
                self._start()
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

    def _start(self) -> None:
        threads = self.job.threads or 1
        options: dict[str, Any] = {
            "num_cpus": 1 if self.gpu else threads,
            "num_gpus": 1 if self.gpu else 0,
        }
        environment = {"env_vars": {"OMP_NUM_THREADS": str(threads)}}
        made = self.ray.remote(_Actor).options(**options, max_restarts=0, runtime_env=environment)
        actor = made.remote(self.stored)
        self.busy[actor.load.remote()] = actor, None


class _Actor(Worker):
    """A worker in a process of the cluster."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def load(self) -> None:
        """Load the model; errors raised in the constructor would not reach the caller."""
        torch.set_num_threads(self.job.threads or 1)
        super().__init__(self.job)


def _lost(job: Job, chunk: int | None, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0]
    if chunk is None:
        return f"{TRIES} workers died while loading {job.model!r}, perhaps for lack of memory ({reason})"
    places = job.chunks[chunk]
    return (
        f"chunk {chunk} (prompts {places[0]} to {places[-1]}) lost its worker {TRIES} times, perhaps for lack of "
        f"memory ({reason}); finished chunks are kept. Use fewer conditions or more memory, and run the command again"
    )


def _start_alone(options: Mapping[str, Any]) -> Any:
    """Start a cluster that no other machine can reach, and return Ray."""
    with _set(_ONE_MACHINE | _token()):
        import ray

        constants = (
            ray._private.ray_constants
        )  # of a Ray that was imported earlier and has read its environment
        before, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
        try:
            ray.init(address="local", include_dashboard=False, **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise OptionError(
                f"no Ray cluster can be started here: {str(error).splitlines()[0]}"
            ) from error
        finally:
            constants.ENABLE_RAY_CLUSTER = before
    address = ray.util.get_node_ip_address()
    if address not in _LOOPBACK:
        ray.shutdown()
        raise OptionError(
            f"this version of Ray ({ray.__version__}) starts a cluster that other machines can reach, at {address}, so "
            "it was stopped: install the version that mechattn requires, or start one yourself and give its address"
        )
    return ray


def _token() -> dict[str, str]:
    """A token for this cluster only, unless the user has configured tokens."""
    mode = (
        {} if "RAY_AUTH_MODE" in os.environ or "ray" in sys.modules else {"RAY_AUTH_MODE": "token"}
    )
    has = (
        any(os.environ.get(name) for name in _TOKENS)
        or (Path.home() / ".ray" / "auth_token").exists()
    )
    return mode if has else mode | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}


@contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, which the cluster's processes inherit, within a ``with`` block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
