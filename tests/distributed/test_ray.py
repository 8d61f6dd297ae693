"""A local Ray cluster of two workers gives the bytes of a local run, also when a worker is killed in the middle."""

import os
import signal
import sys
from dataclasses import dataclass

import pytest

import mechattn as ma
from mechattn.engine.ray import Ray
from mechattn.results.schema import digest

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster():
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    path = os.pathsep.join(p for p in sys.path if p)
    ray.init(
        address="local", num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )  # fmt: skip
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def job(prompts):
    conditions = {"slash": ma.MeaninglessTokens(count=5)}
    return ma.Job("toy:llama", prompts, conditions, seed=3, chunk=2, verify=False, threads=1)


@pytest.fixture(scope="module")
def local(job, tmp_path_factory):
    return digest(ma.run_job(job, tmp_path_factory.mktemp("local") / "r.zarr").datasets)


@dataclass(frozen=True)
class KillsOnce:
    """Ray's executor, whose first worker is killed with SIGKILL when the first chunk has come."""

    killed: list

    def parts(self, job, chunks):
        for chunk, made in Ray(workers=2).parts(job, chunks):
            yield chunk, made
            if not self.killed:
                self.killed.append(busy_worker())
                os.kill(self.killed[0], signal.SIGKILL)


def busy_worker():
    """The process of an actor; Ray names it after its class and method."""
    from ray.util.state import list_actors  # needs no dashboard where the processes tell it themselves

    del list_actors
    return next(pid for pid in children() if "_Actor" in title(pid))


def children():
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def title(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as words:
            return words.read().decode(errors="replace")
    except OSError:
        return ""


def test_two_workers_equal_one_process_to_the_bit(cluster, job, local, tmp_path):
    made = ma.run_job(job, tmp_path / "r.zarr", executor="ray", workers=2)
    assert digest(made.datasets) == local
    assert made.provenance["threads"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["r.zarr"]
