"""A run that is killed with SIGKILL at random moments, and the same command again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = Path(__file__).parents[2] / "experiments" / "faults.py"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the script forks")
def test_killed_at_random_moments_it_ends_with_the_same_numbers():
    """Three trials; ``python experiments/faults.py`` makes twenty."""
    command = [sys.executable, str(FAULTS), "--trials", "3", "--seed", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[-1] == "3 of 3"
    assert sum("ended before" not in line.split(" and ")[0] for line in lines[1:4]) == 3, (
        "each was killed at least once"
    )
