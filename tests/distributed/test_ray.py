"""A local Ray cluster of two workers gives the bytes of a local run, also when a worker is killed in the middle."""

import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import ray

import mechattn as ma
from mechattn.errors import OptionError, OutputError, PromptTooLong
from mechattn.jobs.executors import Ray


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
    return ma.Job(
        "toy:llama",
        prompts,
        conditions,
        options=ma.RunOptions(seed=3),
        chunk=2,
        verify=False,
        threads=1,
    )


@pytest.fixture(scope="module")
def local(job, tmp_path_factory):
    return ma.run_job(job, tmp_path_factory.mktemp("local") / "r.zarr").digest()


@dataclass(frozen=True)
class Kills:
    """Ray's executor; a worker, at work if one is, is killed with SIGKILL when the first chunk has come."""

    killed: list

    def parts(self, job, chunks):
        for chunk, made in Ray(workers=2).parts(job, chunks):
            yield chunk, made
            if not self.killed:
                self.killed.append(workers()[0])
                os.kill(self.killed[0], signal.SIGKILL)


def workers():
    """The processes of this cluster's actors, those first that compute a chunk; Ray names them after what they do."""
    running = processes()
    ours = {pid for pid, (parent, _) in running.items() if parent == os.getpid()}
    named = [
        (words, pid)
        for pid, (parent, words) in running.items()
        if parent in ours and "ray::Worker" in words
    ]
    return [pid for _, pid in sorted(named, reverse=True)]


def processes():
    running = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            running[pid] = (
                parent,
                Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"),
            )
        except OSError:  # it has ended
            continue
    return running


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the processes under /proc")
def test_two_workers_write_a_large_result_and_one_is_killed(cluster, job, local, tmp_path):
    """What comes of it is what one process makes."""
    killed = []
    result = ma.run_job(job, tmp_path / "r.zarr", executor=Kills(killed))
    assert len(killed) == 1
    assert result.digest() == local
    assert [path.name for path in tmp_path.iterdir()] == ["r.zarr"]


@pytest.mark.slow
def test_a_worker_that_always_dies_is_given_up_with_a_sentence(cluster, job, tmp_path, monkeypatch):
    monkeypatch.setattr("mechattn.jobs.executors.TRIES", 2)
    dies = replace(job, require=lambda model, layers: os._exit(1))
    with pytest.raises(OutputError, match="a worker of 'toy:llama' died 2 times at the same chunk"):
        ma.run_job(dies, tmp_path / "r.zarr", executor="ray", workers=1)


@pytest.mark.parametrize(
    "error", [ray.exceptions.OutOfMemoryError("killed"), ray.exceptions.ActorDiedError()]
)
def test_workers_that_are_lost_are_named_in_a_sentence(job, tmp_path, monkeypatch, error):
    """Ray kills workers when memory is short, and has an error of its own for that."""

    cluster = MagicMock(exceptions=ray.exceptions)
    cluster.cluster_resources.return_value = {"CPU": 1.0}
    pool = MagicMock()
    pool.map_unordered.side_effect = error
    monkeypatch.setattr(Ray, "_connected", lambda executor: cluster)
    monkeypatch.setattr("ray.util.ActorPool", lambda actors: pool)
    with pytest.raises(OutputError, match="a worker of 'toy:llama' died 3 times at the same chunk"):
        ma.run_job(job, tmp_path / "r.zarr", executor=Ray())


@pytest.mark.slow
def test_a_refusal_of_a_worker_is_the_refusal_of_the_run(cluster, job, tmp_path):
    long = replace(job, prompts=[*job.prompts, ma.Prompt("word " * 1200, id="long")])
    with pytest.raises(PromptTooLong, match=r"prompt long .*toy:llama takes 1,024"):
        ma.run_job(
            long, tmp_path / "r.zarr", executor="ray", workers=8
        )  # more than there is room for
    assert not list((tmp_path / "r.zarr.parts").glob("[0-9]*.zarr")), (
        "found before the first chunk was measured"
    )


def test_without_ray_and_without_a_cluster(job, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        OptionError, match=r'executor="ray" needs Ray: pip install "mechattn\[ray\]"'
    ):
        ma.run_job(job, tmp_path / "r.zarr", executor="ray")
