"""The cluster that mechattn starts listens on the loopback address alone, and takes no work without its token."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
# Starts a cluster as one line says, says what its processes listen on, and whether another process gets in.
STARTS = """
import json, os, subprocess, sys, time
from pathlib import Path
START
import ray
@ray.remote
def work(): return 7
assert ray.get(work.remote()) == 7

def family(pid):
    parents = {}
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try: parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError: pass
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found: found |= more
    return found

listens = {}
for kind in ("tcp", "tcp6"):
    for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A": listens[f"socket:[{fields[9]}]"] = fields[1]
at = set()
for pid in family(os.getpid()):
    for path in Path(f"/proc/{pid}/fd").glob("*"):
        try: at.add(listens.get(os.readlink(path)))
        except OSError: pass
at.discard(None)
joins = f"from ray._raylet import GcsClient; GcsClient(address={ray.get_runtime_context().gcs_address!r})"
without = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")} | {"RAY_AUTH_MODE": "disabled"}
other = subprocess.run([sys.executable, "-c", joins], capture_output=True, text=True, env=without)
print("FOUND " + json.dumps({"at": sorted(at), "joined": other.returncode == 0, "said": other.stderr,
    "node": ray.util.get_node_ip_address(), "left": {name: os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")}}))
ray.shutdown()
"""
OURS = "from mechattn.jobs.executors import Ray; Ray(workers=1)._connected()"
PLAIN = "import ray; ray.init(address='local', include_dashboard=False, log_to_driver=False)"

pytestmark = pytest.mark.skipif(
    not Path("/proc/net/tcp").exists(), reason="finds the sockets under /proc"
)


def started(how, home, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {
        "HOME": str(home),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        **variables,
    }
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STARTS.replace("START", how)],
        capture_output=True, text=True, timeout=300, env=environment, check=False,
    )  # fmt: skip
    assert "FOUND " in out.stdout, out.stderr
    return json.loads(out.stdout.partition("FOUND ")[2])


@pytest.mark.slow
def test_a_cluster_of_this_machine_alone(tmp_path):
    """Though ray was imported before, which reads its settings then."""
    found = started("import ray\n" + OURS, tmp_path)
    assert len(found["at"]) >= 5
    assert {place.rpartition(":")[0] for place in found["at"]} <= LOOPBACK
    assert not found["joined"]
    assert "InvalidAuthToken" in found["said"]
    assert found["left"] == {"RAY_AUTH_TOKEN": None, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": None}
    assert list(tmp_path.iterdir()) == [], "no token is left in the home"


@pytest.mark.slow
def test_a_cluster_as_ray_starts_it_listens_everywhere(tmp_path):  # negative control
    found = started(PLAIN, tmp_path, RAY_AUTH_MODE="disabled")
    assert found["joined"]
    alone = {place.rpartition(":")[0] for place in found["at"]} <= LOOPBACK
    assert alone == (found["node"] == "127.0.0.1"), (
        "which is so where a machine has no other address"
    )
