"""A local Ray cluster of two workers gives the bytes of a local run, also when a worker is killed in the middle."""

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError

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


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (OutOfMemoryError("killed"), OutputError, "a worker of 'toy:llama' died 3 times at the"),
        (ActorDiedError(), OutputError, "a worker of 'toy:llama' died 3 times at the same chunk"),
        (RayTaskError("check", "…", PromptTooLong("too long")), PromptTooLong, "too long"),
    ],
)
def test_what_workers_end_with_is_an_error_of_the_run(
    job, tmp_path, monkeypatch, error, expected, words
):
    """Ray kills workers when memory is short, and has errors of its own for that and for what a worker raises."""
    cluster = MagicMock(exceptions=ray.exceptions)
    cluster.nodes.return_value = [{"Alive": True, "Resources": {"CPU": 1.0}}]
    pool = MagicMock()
    pool.map_unordered.side_effect = error
    monkeypatch.setattr(Ray, "_connected", lambda executor: cluster)
    monkeypatch.setattr("ray.util.ActorPool", lambda actors: pool)
    with pytest.raises(expected, match=words):
        ma.run_job(job, tmp_path / "r.zarr", executor=Ray())
    (ask, _), _ = pool.map_unordered.call_args
    ask(actor := MagicMock(), 7)
    actor.check.remote.assert_called_once_with(7)  # all are checked before the first is measured
    assert cluster.remote.return_value.options.call_args.kwargs["max_task_retries"] == 2


def test_no_more_workers_than_the_machines_have_room_for():
    """An actor that waits for a core would keep its chunk, and the run would not end."""
    cluster = MagicMock()
    cluster.nodes.return_value = 2 * [{"Alive": True, "Resources": {"CPU": 3.0}}]
    assert len(Ray(workers=8)._actors(cluster, None, 2, 9)) == 2
    with pytest.raises(OptionError, match="no machine of the Ray cluster"):
        Ray()._actors(cluster, None, 4, 9)


def test_without_ray_and_without_a_cluster(job, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        OptionError, match=r'executor="ray" needs Ray: pip install "mechattn\[ray\]"'
    ):
        ma.run_job(job, tmp_path / "r.zarr", executor="ray")


def test_a_cluster_that_others_reach_is_stopped(monkeypatch):
    cluster = MagicMock(__version__="99")
    cluster.is_initialized.return_value = False
    monkeypatch.setitem(sys.modules, "ray", cluster)
    with pytest.raises(OptionError, match=r"^this version of Ray \(99\) starts a cluster"):
        Ray()._connected()
    cluster.shutdown.assert_called_once_with()
