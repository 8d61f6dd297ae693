"""Computes the chunks of a job, in this process or on the workers of a Ray cluster. Each worker
loads the model once.

Anyone who can reach a Ray cluster can run code in it, and by default it listens on every interface.
A cluster that is started here listens on the loopback address only, and requires a token.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from logging import WARNING
from typing import Any, Literal, Protocol

import torch

from mechattn.errors import (
    MechattnError,
    OptionError,
    OutputError,
    check_choice,
    check_counts,
    reason,
    say,
)
from mechattn.jobs.job import Job, Worker
from mechattn.results.result import Result

ExecutorName = Literal["local", "ray"]
# How often a chunk is computed whose worker dies: a machine may be lost by accident twice, but a
# chunk that does not fit in memory kills every worker.
TRIES = 3


class Executor(Protocol):
    """Something that computes chunks."""

    def parts(self, job: Job, chunk_indices: Sequence[int]) -> Iterator[tuple[int, Result]]:
        """Yield the index and the result of each of these ``job.chunks``, in any order."""


def executor_for(
    executor: ExecutorName | Executor, address: str | None = None, workers: int | None = None
) -> Executor:
    """Return the executor with this name; an executor is returned as it is.

    Args:
        executor: "local", "ray", or an executor.
        address: The address of a Ray cluster, as for :class:`Ray`.
        workers: The number of workers in it, as for :class:`Ray`.

    Raises:
        OptionError: There is no such executor, the number of workers is not a whole number from 1
            on, or an address or a number of workers is given to another executor than "ray".
    """
    if isinstance(executor, str):
        check_choice(ExecutorName, executor=executor)
    if executor == "ray":
        if workers is not None:
            check_counts(workers=workers)
        return Ray(address, workers)
    if address is not None or workers is not None:
        raise OptionError(
            'address and workers are for executor="ray": omit them, or give them to your executor'
        )
    if executor == "local":
        return Local()
    return executor


class Local:
    """The executor for a single machine, or for one job of a job array."""

    def parts(self, job: Job, chunk_indices: Sequence[int]) -> Iterator[tuple[int, Result]]:
        """Yield the index and the result of each chunk, in the given order.

        The prompts of all these chunks are checked before the first is measured.
        """
        threads = torch.get_num_threads()
        worker = Worker(job)
        try:
            for index in chunk_indices:
                worker.check(index)
            for index in chunk_indices:
                yield worker.part(index)
        finally:
            torch.set_num_threads(threads)


@dataclass(frozen=True)
class Ray:
    """The executor for a Ray cluster: an actor that finishes a chunk gets the next one.

    If this process has already connected Ray to a cluster, that cluster is used.

    Args:
        address: Such as "auto" or "ray://host:10001"; by default a cluster is started that no other
            machine can reach.
        workers: The number of actors; by default one per GPU or, if the cluster has no GPUs, one
            per ``threads`` cores of a machine. There are never more than chunks, or than the
            cluster has room for.
    """

    address: str | None = None
    workers: int | None = None

    def parts(self, job: Job, chunk_indices: Sequence[int]) -> Iterator[tuple[int, Result]]:
        """Yield the index and the result of each chunk as it arrives.

        The prompts of all these chunks are checked before the first is measured.

        Raises:
            MechattnError: There is no cluster, it has no room for a worker, a worker refuses its
                chunk, or workers die.
        """
        ray = self._connected()
        from ray.util import ActorPool

        threads = job.threads or 1
        # Stored once for all actors. Ray deletes it with its last reference, and an actor that
        # restarts reads it again.
        stored_job = ray.put(replace(job, threads=threads))
        actors = self._actors(ray, stored_job, threads, len(chunk_indices))
        pool = ActorPool(actors)
        try:
            # Prompts are read when list asks for the results, all before any is measured.
            list(pool.map_unordered(lambda actor, index: actor.check.remote(index), chunk_indices))
            yield from pool.map_unordered(
                lambda actor, index: actor.part.remote(index), chunk_indices
            )
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            raise OutputError(
                f"a worker of {job.model!r} died {TRIES} times at the same chunk, perhaps for lack "
                f"of memory ({reason(error)}); finished chunks are kept. Use smaller chunks, fewer "
                "conditions or more memory, and run the command again"
            ) from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, MechattnError):
                raise error.cause from None
            raise
        finally:
            for actor in actors:  # the cluster stays up
                ray.kill(actor)

    def _actors(self, ray: Any, stored_job: Any, threads: int, chunk_count: int) -> list[Any]:
        """Start the actors that compute a job, but not more than there are chunks or than fit.

        Ray starts an actor that does not fit when resources become free. Until then the pool waits
        for the chunk that it has given to that actor.

        Raises:
            OptionError: No machine of the cluster has room for an actor.
        """
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        needs = {"CPU": threads}
        if any("GPU" in resources for resources in machines):
            needs = {"CPU": 1, "GPU": 1}  # the GPUs compute, so one core per actor is enough

        most_workers = 0
        for resources in machines:
            most_workers += int(min(resources.get(name, 0) // need for name, need in needs.items()))
        if not most_workers:
            raise OptionError(
                f"no machine of the Ray cluster has what a worker needs ({needs}): use fewer "
                "threads, or add machines to the cluster"
            )
        actor_count = min(self.workers or most_workers, chunk_count)
        if actor_count > most_workers:
            say(f"the Ray cluster has room for {most_workers} of the {actor_count} workers")
            actor_count = most_workers

        actor_class = ray.remote(Worker).options(
            num_cpus=needs["CPU"],
            num_gpus=needs.get("GPU", 0),
            max_restarts=-1,  # as often as needed
            max_task_retries=TRIES - 1,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads)}},
        )
        return [actor_class.remote(stored_job) for _ in range(actor_count)]

    def _connected(self) -> Any:
        """Return Ray, connected to the cluster at the address or, without one, to a private one.

        Raises:
            OptionError: There is no cluster at the address, the private one cannot be started, or
                Ray is not installed.
        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # sends no usage data
        try:
            if self.address is None:
                return _with_private_cluster()
            import ray

            if not ray.is_initialized():
                ray.init(self.address, log_to_driver=False, logging_level=WARNING)
        except MechattnError:  # an OptionError is a ValueError, which is caught below
            raise
        except ImportError:
            raise OptionError('executor="ray" needs Ray: pip install "mechattn[ray]"') from None
        except (OSError, ValueError, RuntimeError) as error:
            raise OptionError(
                f"no Ray cluster can be started or reached with address={self.address!r}: "
                f"{reason(error)}"
            ) from None

        return ray


def _with_private_cluster() -> Any:
    """Return Ray with a cluster that no other machine can reach.

    If this process has already connected Ray to a cluster, that cluster is used.

    Raises:
        OptionError: Ray cannot start a cluster, or starts one that other machines can reach.
    """
    # If the first is "0", which is its default on Windows and macOS only, Ray stays on the loopback
    # address. The token is for this cluster only. Ray reads the mode when it is imported; one that
    # the user has set is kept.
    variables = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    if "RAY_AUTH_MODE" not in os.environ and "ray" not in sys.modules:
        variables["RAY_AUTH_MODE"] = "token"

    old_values = {name: os.environ[name] for name in variables.keys() & os.environ.keys()}
    os.environ.update(variables)  # for the processes of the cluster, which inherit them
    try:
        import ray

        if ray.is_initialized():
            return ray
        # ray/_private/ray_constants.py reads the first variable into this constant when Ray is
        # imported, which may have been earlier. If it is false, ray/_private/services.py uses the
        # loopback address (github.com/ray-project/ray/issues/18730).
        constants = ray._private.ray_constants
        was_enabled = constants.ENABLE_RAY_CLUSTER
        constants.ENABLE_RAY_CLUSTER = False
        try:
            ray.init("local", include_dashboard=False, log_to_driver=False, logging_level=WARNING)
        finally:
            constants.ENABLE_RAY_CLUSTER = was_enabled
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(old_values)

    address = ray.util.get_node_ip_address()
    if address not in ("127.0.0.1", "::1"):
        ray.shutdown()
        raise OptionError(
            f"this version of Ray ({ray.__version__}) starts a cluster that other machines can "
            f"reach, at {address}, so it was stopped: install the version that mechattn requires, "
            "or start one yourself and give its address"
        )

    return ray
